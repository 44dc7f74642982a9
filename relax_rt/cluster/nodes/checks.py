"""Which roles must run on the head, and which ask for nodes or GPUs that cannot be there: refused before a start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from relax_rt.cluster.nodes.api import HEAD
from relax_rt.config.checks import check_listen
from relax_rt.config.job import load_job
from relax_rt.config.loader import SYSTEM_ROLES
from relax_rt.config.problems import Problem
from relax_rt.config.schema import RoleSettings, RunConfig
from relax_rt.supervision.devices import count_gpus
from relax_rt.supervision.plan import RolePlan
from relax_rt.transport.rpc.errors import RelaxError


def check_nodes(config: RunConfig, plans: Sequence[RolePlan]) -> None:
    """Refuse what can never be placed. Raises RelaxError: which setting asks for it."""
    if listen := config.supervision.nodes.listen:
        check_listen(listen)
    for problem in node_problems(config, {plan.kind: plan.settings for plan in plans}):
        raise RelaxError(problem.message, hint=problem.hint)


def node_problems(config: RunConfig, tables: Mapping[str, RoleSettings]) -> Iterator[Problem]:
    """What can never be placed on this machine and those that may join, by role.

    Args:
        tables: the settings of the roles that are to run.
    """
    listen = config.supervision.nodes.listen
    if listen and config.queue.durability == "disk" and "queue" in tables:
        message = (
            'queue.durability = "disk" with supervision.nodes.listen: payloads of other nodes are in their memory, and '
            "would not outlive them"
        )
        yield Problem(("queue", "durability"), message, "leave one of the two out")
    for kind, table in tables.items():
        path, key, node = ("roles", kind), f"roles.{kind}", table.node
        if node and not listen:
            message = f'{key}.node = "{node}": this run has one node only'
            yield Problem((*path, "node"), message, 'supervision.nodes.listen = "HOST:PORT" lets others join')
        elif node and node != HEAD and kind in SYSTEM_ROLES:
            message = f'{key}.node = "{node}": the {kind} runs on the head'
            yield Problem((*path, "node"), message, "leave it out")
        elif node and node != HEAD and kind in (together := kinds_of_one_node(config)):
            message = (
                f'{key}.node = "{node}": checkpoints do not go between nodes: {", ".join(together)} run on the head'
            )
            yield Problem((*path, "node"), message, f'leave it out, or write node = "{HEAD}"')
        if not listen and table.count and table.gpus > (have := count_gpus()):
            message = f"{key}.gpus = {table.gpus:g}: this machine has {have}, and no other node can join"
            yield Problem((*path, "gpus"), message, "lower it, or see supervision.nodes.listen")


def pinned_plans(plans: Sequence[RolePlan], config: RunConfig) -> list[RolePlan]:
    """The roles of a run, those pinned to the head that cannot run elsewhere."""
    if not config.supervision.nodes.listen:
        return list(plans)
    at_head = {*SYSTEM_ROLES, *kinds_of_one_node(config)}
    return [
        msgspec.structs.replace(plan, settings=plan.settings.model_copy(update={"node": HEAD}))
        if plan.kind in at_head
        else plan
        for plan in plans
    ]


def kinds_of_one_node(config: RunConfig) -> Sequence[str]:
    """Kinds of role that run on the head only, because they share memory and files."""
    return load_job(config.run.job).one_node
