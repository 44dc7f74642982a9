"""What keeps a program from being an environment, as far as the config shows it."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import TYPE_CHECKING

from relax_rt.config.problems import KeyPath, Problem
from relax_rt.roles.agentic.loading import PROGRAM
from relax_rt.roles.data.settings import DataTable
from relax_rt.roles.evaluation.settings import EvaluationTable

if TYPE_CHECKING:
    from relax_rt.config.schema import RunConfig
    from relax_rt.roles.agentic.settings import EnvSettings
    from relax_rt.roles.gateway.settings import GatewaySettings

PLACE: KeyPath = ("roles", "env")
GATEWAYS = ("drift", "reasoning")
"""Keys that the gateway has as well: what it keeps of an episode is its affair."""
NOT_ITS = {
    "turn_timeout_s": "a program's turns are its own: episode_timeout_s bounds all of it",
    "workers": "each program is a process of its own: episodes_in_flight says how many there are",
    "worker_processes": "set roles.env.options.processes, of each program",
    "worker_memory_mib": "set roles.env.options.memory_mib, of each program",
    "media_kib": "set roles.gateway.session_media_kib",
}
"""Keys of environments in workers, or that take turns -> what to use with programs."""
BOUNDS = {
    "sessions": "sessions",
    "connections": "connections, one for each program at least",
    "waiting": "calls may wait",
}
"""Of a gateway, that episodes in flight must not meet."""


def is_program(table: EnvSettings) -> bool:
    """Whether the environment is a program."""
    return table.environment.partition(":")[0] == PROGRAM


def check_program(config: RunConfig, table: EnvSettings) -> Iterator[Problem]:
    """What a program needs of the gateway, and what has no effect on it."""
    from relax_rt.roles.gateway.settings import GatewaySettings

    if not is_program(table):
        return
    for key, hint in NOT_ITS.items():
        if key in table.model_fields_set:
            yield Problem((*PLACE, key), f"{key} has no effect on programs", hint, at="key")
    yield from _template(config, table)
    if "unfinished" in table.model_fields_set and table.unfinished == "keep":
        message = "replies of a program's episode are not kept: it is played again from its beginning"
        yield Problem((*PLACE, "unfinished"), message, 'leave it out, or set unfinished = "drop"')
    gateway = config.roles.get("gateway")
    if not isinstance(gateway, GatewaySettings) or not gateway.count:
        message = "a program reaches the policy through the gateway, and there is none"
        yield Problem((*PLACE, "environment"), message, "add a table [roles.gateway]")
        return
    for key in GATEWAYS:
        if key in table.model_fields_set:
            yield Problem((*PLACE, key), f"{key} of programs is the gateway's", f"set roles.gateway.{key}", at="key")
    yield from _bounds(config, table, gateway)
    yield from _reach(config, table, gateway)


def _template(config: RunConfig, table: EnvSettings) -> Iterator[Problem]:
    """A template that would do nothing. Who says stdin = "task" may take the messages from there."""
    data = config.table(DataTable)
    plain = data.template == type(data).model_fields["template"].default
    if plain or table.tasks is not None or table.options.get("stdin") == "task":
        return
    if "{question}" in table.environment and "{prompt}" not in table.environment:
        message = "data.template has no effect on {question}, which is the item's own"
        hint = '{prompt} is the question put into the template; or roles.env.options.stdin = "task", for its messages'
        yield Problem((*PLACE, "environment"), message, hint)


def _bounds(config: RunConfig, table: EnvSettings, gateway: GatewaySettings) -> Iterator[Problem]:
    """Slots take turns at the gateways, so that the first one has the most of them. The first slot goes on with the
    episodes that it trains on while it plays the held-out ones."""
    evaluation = config.table(EvaluationTable)
    slots = -(-table.count // gateway.count)
    need = slots * table.episodes_in_flight
    if evaluation.every_steps or evaluation.at_steps:
        need += table.episodes_in_flight
    for key in BOUNDS:
        if (have := getattr(gateway, key)) < need:
            message = f"{key} = {have}, and up to {need} episodes are played at a time through one gateway"
            yield Problem(("roles", "gateway", key), message, f"at least {need}, or more gateways (count)")


def _reach(config: RunConfig, table: EnvSettings, gateway: GatewaySettings) -> Iterator[Problem]:
    """Programs run on the nodes of their slots. A job keeps roles on the head that it names so."""
    from relax_rt.cluster.nodes.api import HEAD
    from relax_rt.cluster.nodes.checks import kinds_of_one_node

    if not config.supervision.nodes.listen:
        return
    at_home = kinds_of_one_node(config)
    players, its = (HEAD if kind in at_home else of.node for kind, of in (("env", table), ("gateway", gateway)))
    if players and players == its:
        return
    try:
        local = gateway.host == "localhost" or ipaddress.ip_address(gateway.host).is_loopback
    except ValueError:
        return
    if local:
        message = f"host = {gateway.host!r}: programs on other nodes than the gateway's do not reach it"
        hint = 'set host = "node" (the address of its node), or node of roles.env and roles.gateway to the same one'
        yield Problem(("roles", "gateway", "host"), message, hint)
