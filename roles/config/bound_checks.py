"""Settings of [algorithm] about the staleness bound, stragglers and single samples that nothing would make use of."""

from __future__ import annotations

import math
from collections.abc import Iterator

from relax_rt.config.problems import Problem
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.training.algorithms.settings import AlgorithmTable

BOUND = "set a max_staleness"


def check_bound(config: RLConfig) -> Iterator[Problem]:
    """What was written and would have no effect. Values that only switch something off are let be."""
    table = config.algorithm
    if math.isinf(table.max_staleness):
        yield from _unbounded(table)
    else:
        yield from _bounded(table)
    if "min_group" in table.model_fields_set and table.on_failed_member != "shrink":
        message = f'min_group has no effect with on_failed_member = "{table.on_failed_member}"'
        yield _idle("min_group", message, 'set on_failed_member = "shrink"')
    if "soft_penalty" in table.model_fields_set and table.truncated != "soft_penalty":
        message = f'soft_penalty has no effect with truncated = "{table.truncated}"'
        yield _idle("soft_penalty", message, 'set truncated = "soft_penalty"')


def _unbounded(table: AlgorithmTable) -> Iterator[Problem]:
    """Nothing is over-stale, and nothing waits for an update."""
    asked = {
        "over_provision": table.over_provision > 0,
        "on_surplus": table.on_surplus == "recycle",
        "on_straggler": table.on_straggler != "wait",
        "straggler_wait_s": True,
    }
    for key, wanted in asked.items():
        if wanted and key in table.model_fields_set:
            yield _idle(key, f"{key} has no effect with max_staleness = inf: nothing becomes over-stale", BOUND)


def _bounded(table: AlgorithmTable) -> Iterator[Problem]:
    if "straggler_wait_s" in table.model_fields_set and table.on_straggler != "wait":
        message = f'straggler_wait_s has no effect with on_straggler = "{table.on_straggler}": no update waits'
        yield _idle("straggler_wait_s", message, 'set on_straggler = "wait"')
    # Groups that refill a step for filters are begun beyond the bound too.
    if table.on_surplus == "recycle" and not table.over_provision and not table.filters:
        message = 'on_surplus = "recycle" has no effect without over_provision: no group is begun beyond the bound'
        yield _idle("on_surplus", message, "set over_provision")


def _idle(key: str, message: str, remedy: str) -> Problem:
    return Problem(("algorithm", key), message, f"leave it out, or {remedy}", at="key")
