"""Settings of [algorithm] that no part makes use of, or that cannot act: refused, if they were written."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from relax_rt.config.problems import Problem
from relax_rt.config.schema import RunConfig
from relax_rt.roles.training.algorithms.objective import COMMON_OPTIONS, Parts
from relax_rt.roles.training.algorithms.registry import Bound, Kind, parts
from relax_rt.roles.training.algorithms.settings import AlgorithmTable
from relax_rt.roles.training.critic.settings import CriticSettings

OF: dict[str, Kind] = {"clip_low": "loss", "clip_high": "loss", "normalise_std": "advantage"}
"""Whose option a key of [algorithm] is first of all."""
BOUNDS = ("clip_low", "clip_high", "dual_clip", "tau_positive", "tau_negative")
"""Options of losses that act where the ratio is not 1."""
SEVERAL = "set updates_per_step to 2 or more"


def check_idle(config: RunConfig, found: Parts) -> Iterator[Problem]:
    """What was written and would have no effect."""
    table = config.table(AlgorithmTable)
    yield from _dropped(table, found)
    yield from _std(found.advantage)
    yield from _truncation(table, found.advantage)
    yield from _corrections(found)
    if table.updates_per_step == 1:
        yield from _bounds(table, found.loss)
        yield from _value_clip(config)


def _dropped(table: AlgorithmTable, found: Parts) -> Iterator[Problem]:
    """Common options that no part has, or that each part gives otherwise."""
    for key in COMMON_OPTIONS:
        if key not in table.model_fields_set:
            continue
        having = [one for one in found.all() if key in one.part.options.model_fields]
        if not having:
            one = found.loss if OF[key] == "loss" else found.advantage
            message = f"{key} has no effect: {one.part.kind} '{one.part.name}' has no such option"
            others = [name for name, part in parts(OF[key]).items() if key in part.options.model_fields]
            yield _idle(key, message, f"use {OF[key]} {', '.join(others)}")
        elif all(key in _own(table, one) for one in having):
            one = having[0]
            message = f"{key} has no effect: {one.part.kind} '{one.part.name}' has its own in its table"
            yield _idle(key, message, "take it out there")


def _std(advantage: Bound) -> Iterator[Problem]:
    options = advantage.options
    if "std_of" in options.model_fields_set and getattr(options, "normalise_std", True) is False:
        message = "std_of has no effect with normalise_std = false: nothing is divided by a standard deviation"
        place = (*advantage.place, "std_of")
        yield Problem(place, message, "leave it out, or set normalise_std = true", at="key")


def _truncation(table: AlgorithmTable, advantage: Bound) -> Iterator[Problem]:
    """Rewards that are changed, where nobody looks at them."""
    known = advantage.part in parts("advantage").values()
    changes = table.truncated in ("zero_reward", "soft_penalty") and "truncated" in table.model_fields_set
    if changes and known and "rewards" not in advantage.needs:
        message = (
            f'truncated = "{table.truncated}" has no effect: it changes the reward, and advantage '
            f"'{advantage.part.name}' does not look at it"
        )
        yield _idle("truncated", message, 'set "mask"')


def _corrections(found: Parts) -> Iterator[Problem]:
    loss = found.loss
    if not found.corrections or not ("pairs" in loss.needs or "unjudged" in loss.part.traits):
        return
    what = "a pair as a whole" if "pairs" in loss.needs else "completions as they are given"
    message = f"corrections weigh tokens that the policy sampled one by one; loss '{loss.part.name}' is of {what}"
    yield Problem(found.corrections[0].place, message, "leave them out")


def _bounds(table: AlgorithmTable, loss: Bound) -> Iterator[Problem]:
    """Bounds of a ratio that is always 1: to the policy before the step's first update, which is its only one."""
    if "ratio" not in loss.part.traits or getattr(loss.options, "ratio_to", "proximal") != "proximal":
        return
    why = (
        f"has no effect with updates_per_step = 1: loss '{loss.part.name}' takes its ratio to the policy before the "
        "step's first update, so that in its only one it is 1"
    )
    own = _own(table, loss)
    for key in BOUNDS:
        if key not in loss.part.options.model_fields:
            continue
        if key in own:
            yield Problem((*loss.place, key), f"{key} {why}", f"leave it out, or {SEVERAL}", at="key")
        elif key in table.model_fields_set:
            yield _idle(key, f"{key} {why}", SEVERAL)


def _value_clip(config: RunConfig) -> Iterator[Problem]:
    critic = config.roles.get("critic")
    if isinstance(critic, CriticSettings) and "value_clip" in critic.model_fields_set and critic.value_clip:
        message = (
            "value_clip has no effect with algorithm.updates_per_step = 1: no value has moved before the step's only "
            "update"
        )
        yield Problem(("roles", "critic", "value_clip"), message, f"leave it out, or {SEVERAL}", at="key")


def _own(table: AlgorithmTable, one: Bound) -> Collection[str]:
    """Keys of the table that names the part; none if it is named alone."""
    given: Any = table
    for step in one.place[1:]:
        given = given[step] if isinstance(step, int) else getattr(given, step)
    return given if isinstance(given, dict) else ()


def _idle(key: str, message: str, remedy: str) -> Problem:
    return Problem(("algorithm", key), message, f"leave it out, or {remedy}", at="key")
