"""What can be refused before a run starts: roles that ask for nodes or devices that there cannot be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from relax_rt.config.schema import RunConfig
from relax_rt.nodes.api import HEAD
from relax_rt.nodes.base import SYSTEM, kinds_of_one_node
from relax_rt.nodes.gpus import count_gpus
from relax_rt.nodes.listen import check_listen
from relax_rt.transport.errors import RelaxError

if TYPE_CHECKING:
    from relax_rt.supervision.plan import RolePlan


def check_nodes(config: RunConfig, plans: Sequence[RolePlan]) -> None:
    """Refuse what can never be placed.

    Raises:
        RelaxError: which setting asks for it.
    """
    listen = config.supervision.nodes.listen
    if listen:
        check_listen(listen)
        if config.queue.durability == "disk" and any(plan.kind == "queue" for plan in plans):
            raise RelaxError(
                'queue.durability = "disk" with supervision.nodes.listen',
                why="payloads of other nodes lie in their memory, and would not outlive them",
                hint="leave one of the two out",
            )
    for plan in plans:
        key, node, gpus = f"roles.{plan.kind}", plan.settings.node, plan.settings.gpus
        if node and not listen:
            hint = 'supervision.nodes.listen = "HOST:PORT" lets others join'
            raise RelaxError(f'{key}.node = "{node}"', why="this run has one node only", hint=hint)
        if node and node != HEAD and plan.kind in SYSTEM:
            raise RelaxError(f'{key}.node = "{node}"', why=f"the {plan.kind} runs on the head", hint="leave it out")
        if node and node != HEAD and plan.kind in kinds_of_one_node(config):
            together = ", ".join(kinds_of_one_node(config))
            raise RelaxError(
                f'{key}.node = "{node}"',
                why=f"checkpoints do not go between nodes: {together} run on the head",
                hint=f'leave it out, or write node = "{HEAD}"',
            )
        if not listen and plan.settings.count and gpus > (have := count_gpus()):
            why = f"this machine has {have}, and no other node can join"
            raise RelaxError(f"{key}.gpus = {gpus:g}", why=why, hint="lower it, or see supervision.nodes.listen")
