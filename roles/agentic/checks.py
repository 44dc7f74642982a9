"""Checks of [roles.env] across the keys of a config, without model, data and user code."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from pathlib import Path

from relax_rt.cluster.nodes.api import HEAD
from relax_rt.cluster.nodes.checks import kinds_of_one_node
from relax_rt.config.problems import Problem
from relax_rt.config.schema import RoleSettings, RunConfig
from relax_rt.roles.agentic.rewards import PLACE, check_rewards
from relax_rt.roles.agentic.settings import EnvSettings, env_settings, gateway_settings, is_program
from relax_rt.roles.agentic.tokens.parsers import AUTO, check_parsers
from relax_rt.roles.data.settings import DataTable
from relax_rt.roles.evaluation.settings import EvaluationTable
from relax_rt.roles.gateway.settings import GatewaySettings
from relax_rt.roles.rewards.settings import RewardTable
from relax_rt.roles.rollout.engines.settings import SamplingTable
from relax_rt.roles.training.algorithms.settings import SHARING, AlgorithmTable, ColdStartTable
from relax_rt.transport.rpc.errors import Refused

REPLACED = {"reward": "the environment gives the rewards", "evaluator": "the env role plays the held-out episodes"}
"""Roles that have nothing to do if episodes are played."""

GATEWAY_KEYS = ("drift", "reasoning")
"""Keys that the gateway has as well, and that apply to programs there."""
WITHOUT_EFFECT = {
    "turn_timeout_s": "a program's turns are its own: episode_timeout_s bounds all of it",
    "workers": "each program is a process of its own: episodes_in_flight says how many there are",
    "worker_processes": "set roles.env.options.processes, of each program",
    "worker_memory_mib": "set roles.env.options.memory_mib, of each program",
    "media_kib": "set roles.gateway.session_media_kib",
}
"""Keys that have no effect on programs -> what to use instead."""
GATEWAY_LIMITS = {
    "sessions": "sessions",
    "connections": "connections, one for each program at least",
    "waiting": "calls may wait",
}
"""Limits of a gateway that episodes in flight must not reach."""


def check_environment(config: RunConfig) -> Iterator[Problem]:
    """Check what shows without model, data and user code."""
    algorithm = config.table(AlgorithmTable)
    sampling = config.table(SamplingTable)
    table = env_settings(config)
    if table is None:
        return
    if table.count < 1:
        yield Problem((*PLACE, "count"), "nobody plays the episodes", "at least 1, or no [roles.env]")
    yield from _check_replaced(config)
    yield from check_program(config, table)
    yield from check_rewards(config)
    yield from _check_chat_format(config)
    yield from _check_tasks(config, table)
    if sampling.max_new_tokens >= table.max_tokens:
        reply = sampling.max_new_tokens
        message = f"max_tokens = {table.max_tokens} of an episode, and each reply may have {reply}"
        yield Problem((*PLACE, "max_tokens"), message, "raise it, or lower sampling.max_new_tokens")
    if not is_program(table) and table.turn_timeout_s >= table.episode_timeout_s:
        message = f"turn_timeout_s = {table.turn_timeout_s:g} is not below episode_timeout_s"
        yield Problem((*PLACE, "turn_timeout_s"), message, "an episode has at least one turn")
    if table.episodes_in_flight < algorithm.group_size:
        message = f"episodes_in_flight = {table.episodes_in_flight} is less than a group (algorithm.group_size)"
        yield Problem((*PLACE, "episodes_in_flight"), message, f"at least {algorithm.group_size}")
    if algorithm.mode in SHARING:
        message = f'mode = "{algorithm.mode}" with [roles.env]: no episode waits for turns of the trainer'
        yield Problem(("algorithm", "mode"), message, 'set mode = "asynchronous"')


def _check_chat_format(config: RunConfig) -> Iterator[Problem]:
    """Check that template files exist, and parsers are known."""
    for path, table in ((("roles", "env"), env_settings(config)), (("roles", "gateway"), gateway_settings(config))):
        if table is None or not table.count:
            continue
        if table.chat_template is not None and not (file := Path(config.config_dir) / table.chat_template).is_file():
            yield Problem((*path, "chat_template"), f"there is no file {file}", "its path is relative to the config")
        parsers = {"tool_parser": (table.tool_parser or AUTO, AUTO)}
        parsers["reasoning_parser"] = (AUTO, table.reasoning_parser or AUTO)
        for key, names in parsers.items():
            try:
                check_parsers(*names)
            except Refused as error:
                yield Problem((*path, key), f"{error.what}: {error.why}", error.hint)


def _check_replaced(config: RunConfig) -> Iterator[Problem]:
    reward = config.table(RewardTable)
    evaluation = config.table(EvaluationTable)
    if reward.function or reward.components:
        message = "the environment gives the rewards: function and components of [reward] have no effect"
        yield Problem(("reward",), message, "rewards beside its own are roles.env.rewards = [...]", at="key")
    for kind, why in REPLACED.items():
        role = config.roles.get(kind)
        if isinstance(role, RoleSettings) and role.count and role.target is None:
            yield Problem(("roles", kind), f"nothing to do for {kind}: {why}", "leave the table out", at="key")
    if evaluation.sets:
        message = "sets are of prompts, and held-out episodes are what is evaluated"
        yield Problem(("evaluation", "sets"), message, "leave them out")
    if evaluation.greedy:
        message = "greedy episodes beside sampled ones are not played"
        yield Problem(("evaluation", "greedy"), message, "set evaluation.temperature = 0 instead", at="key")


def _check_tasks(config: RunConfig, table: EnvSettings) -> Iterator[Problem]:
    has_data = bool(config.table(DataTable).model_fields_set)
    if table.tasks is not None and has_data:
        message = "tasks and [data] are both set: episodes are about seeds, or about the items of [data]"
        yield Problem((*PLACE, "tasks"), message, "leave one of them out", at="key")
    if table.tasks is None and not has_data:
        message = "what are the episodes about? neither tasks nor [data] is set"
        yield Problem(PLACE, message, "tasks = 10000 for an environment that makes its task from a seed", at="key")
    if table.tasks is None:
        return
    if config.table(AlgorithmTable).sampler is not None:
        message = "a sampler chooses among the items of [data], and there is none"
        yield Problem(("algorithm", "sampler"), message, "leave it out", at="key")
    if config.table(ColdStartTable).wanted:
        message = "a cold start is held against the prompts of [data], and there is none"
        yield Problem(("cold_start",), message, "leave it out, or train its model in a run of its own", at="key")


def check_program(config: RunConfig, table: EnvSettings) -> Iterator[Problem]:
    """Check what a program needs of the gateway, and keys without effect on it."""
    if not is_program(table):
        return
    for key, hint in WITHOUT_EFFECT.items():
        if key in table.model_fields_set:
            yield Problem((*PLACE, key), f"{key} has no effect on programs", hint, at="key")
    yield from _check_template(config, table)
    if "unfinished" in table.model_fields_set and table.unfinished == "keep":
        message = "replies of a program's episode are not kept: it is played again from its beginning"
        yield Problem((*PLACE, "unfinished"), message, 'leave it out, or set unfinished = "drop"')
    gateway = config.roles.get("gateway")
    if not isinstance(gateway, GatewaySettings) or not gateway.count:
        message = "a program reaches the policy through the gateway, and there is none"
        yield Problem((*PLACE, "environment"), message, "add a table [roles.gateway]")
        return
    for key in GATEWAY_KEYS:
        if key in table.model_fields_set:
            yield Problem((*PLACE, key), f"{key} of programs is the gateway's", f"set roles.gateway.{key}", at="key")
    yield from _check_gateway_limits(config, table, gateway)
    yield from _check_gateway_reachable(config, table, gateway)


def _check_template(config: RunConfig, table: EnvSettings) -> Iterator[Problem]:
    """Check that data.template has an effect; with stdin = "task" the program may use the messages."""
    plain = config.table(DataTable).template == type(config.table(DataTable)).model_fields["template"].default
    if plain or table.tasks is not None or table.options.get("stdin") == "task":
        return
    if "{question}" in table.environment and "{prompt}" not in table.environment:
        message = "data.template has no effect on {question}, which is the item's own"
        hint = '{prompt} is the question put into the template; or roles.env.options.stdin = "task", for its messages'
        yield Problem((*PLACE, "environment"), message, hint)


def _check_gateway_limits(config: RunConfig, table: EnvSettings, gateway: GatewaySettings) -> Iterator[Problem]:
    """Check that a gateway's limits fit the episodes in flight.

    Slots use gateways in turn, so the first gateway has the most slots. The first slot continues its training episodes
    while it plays the held-out ones.
    """
    slots = -(-table.count // gateway.count)
    need = slots * table.episodes_in_flight
    if config.table(EvaluationTable).every_steps or config.table(EvaluationTable).at_steps:
        need += table.episodes_in_flight
    for key in GATEWAY_LIMITS:
        if (have := getattr(gateway, key)) < need:
            message = f"{key} = {have}, and up to {need} episodes are played at a time through one gateway"
            yield Problem(("roles", "gateway", key), message, f"at least {need}, or more gateways (count)")


def _check_gateway_reachable(config: RunConfig, table: EnvSettings, gateway: GatewaySettings) -> Iterator[Problem]:
    """Check that programs, which run on the nodes of their slots, reach their gateway."""
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
