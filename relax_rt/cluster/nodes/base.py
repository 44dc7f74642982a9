"""The head's own node: its name and resources, what its roles need to reach others, and what must run on it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from relax_rt.cluster.nodes.api import HEAD
from relax_rt.cluster.nodes.gpus import count_gpus
from relax_rt.cluster.nodes.links import role_environment
from relax_rt.cluster.nodes.listen import check_listen
from relax_rt.cluster.nodes.machine import physical_mib
from relax_rt.cluster.nodes.placement import Node
from relax_rt.config.schema import NodesTable, RunConfig
from relax_rt.supervision.rundir import RunPaths
from relax_rt.transport.rpc.address import parse_address

if TYPE_CHECKING:
    from relax_rt.supervision.plan import RolePlan

SYSTEM = ("registry", "queue")


class HeadBase:
    """The node that a run was brought up on.

    Attributes:
        here: its name and resources; the name is empty in a run of one node.
        several: other nodes can join.
        host: address at which other nodes reach it.
        environment: variables of its roles.
    """

    def __init__(self, table: NodesTable, paths: RunPaths) -> None:
        self.table, self.paths = table, paths
        self.several = bool(table.listen)
        cores = len(os.sched_getaffinity(0))
        self.here = Node(HEAD if self.several else "", cores, count_gpus(), physical_mib())
        self.host = parse_address(check_listen(table.listen)).host if self.several else "127.0.0.1"
        self.environment = (
            role_environment(paths, run_id=paths.run_id, node=HEAD, host=self.host) if self.several else {}
        )


def pinned_plans(plans: Sequence[RolePlan], config: RunConfig) -> list[RolePlan]:
    """The roles of a run, those pinned to the head that cannot run elsewhere."""
    if not config.supervision.nodes.listen:
        return list(plans)
    at_home = {*SYSTEM, *kinds_of_one_node(config)}
    return [
        msgspec.structs.replace(plan, settings=plan.settings.model_copy(update={"node": HEAD}))
        if plan.kind in at_home
        else plan
        for plan in plans
    ]


def kinds_of_one_node(config: RunConfig) -> Sequence[str]:
    """Kinds of role that run on the head's node only, because they share memory and files."""
    from relax_rt.config.job import load_job

    return load_job(config.run.job).one_node
