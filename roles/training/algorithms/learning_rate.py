"""The learning-rate schedule of RL and cold start, and its checks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

from relax_rt.config.problems import KeyPath, Problem
from relax_rt.roles.training.algorithms.settings import Schedule


class Rates(Protocol):
    """The keys of a table that define its learning-rate schedule."""

    @property
    def learning_rate(self) -> float: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def learning_rate_schedule(self) -> Schedule: ...
    @property
    def learning_rate_floor(self) -> float: ...


def learning_rate(table: Rates, number: int, steps: int) -> float:
    """Return the learning rate of a step: a linear warm-up, then the schedule down to the floor.

    It depends on the step's number alone, so that a resumed training continues as it would have. The floor is the rate
    of the step that would follow the last one: with a floor of 0 no step is without effect. Cosine: SGDR (arXiv
    1608.03983, equation 5), without restarts.

    Args:
        number: from 1. steps: of the whole training, more than those of the warm-up.
    """
    full, floor, warmup = table.learning_rate, table.learning_rate_floor, table.warmup_steps
    if number < warmup:
        return full * (number / warmup)
    if table.learning_rate_schedule == "constant":
        return full
    done = min(1.0, max(0, number - 1 - warmup) / max(1, steps - warmup))
    left = 1.0 - done if table.learning_rate_schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2
    return floor + (full - floor) * left


def check_rates(table: Rates, place: KeyPath, steps: int | None) -> Iterator[Problem]:
    """Yield what cannot be meant of these keys.

    Args:
        steps: of the training, where they are known.
    """
    if steps is not None and table.warmup_steps >= steps:
        message = f"warmup_steps = {table.warmup_steps} is not below steps = {steps}: the rate is never reached"
        yield Problem((*place, "warmup_steps"), message)
    if not table.learning_rate_floor:
        return
    key = (*place, "learning_rate_floor")
    if table.learning_rate_schedule == "constant":
        message = 'learning_rate_floor has no effect with learning_rate_schedule = "constant"'
        yield Problem(key, message, 'leave it out, or set learning_rate_schedule = "cosine"', at="key")
    elif table.learning_rate_floor >= table.learning_rate:
        message = f"learning_rate_floor = {table.learning_rate_floor:g} is not below learning_rate"
        yield Problem(key, f"{message} = {table.learning_rate:g}: the rate would not go down", "lower it")
