"""Several optimizer updates of one step: its batch is dealt out into mini-batches, one update each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from relax_rt.roles.training.algorithms.tensors import Metrics, merge
from relax_rt.roles.training.base import StepResult
from relax_rt.roles.training.mismatch import before_updates, beside_gradients
from relax_rt.roles.training.step import set_proximal

if TYPE_CHECKING:
    from relax_rt.roles.base.sample import Sample
    from relax_rt.roles.training.algorithms.objective import Objective
    from relax_rt.roles.training.base import TrainerBackend
    from relax_rt.roles.training.step import Batch

T = TypeVar("T")

OVER_MEASURED = ("ratio_mean", "clip_fraction", "kl_behaviour", "difference_mean", "sampled_entropy")
"""Fields of a StepResult that are means over its measured tokens; so are those that may be None."""
PERHAPS = ("drift_mean", "entropy", "kl_reference")
ADDED = ("tokens", "measured_tokens", "rejected_tokens", "updates")
LARGEST = ("ratio_max_deviation", "difference_max")


def mini_batches(groups: Sequence[int], updates: int) -> list[list[int]]:
    """Places of the samples of each mini-batch: groups stay whole, and are dealt out in turn as they appear, so that
    parts differ by one group at most and those that came early are not together.

    Args:
        groups: of each sample. updates: so many parts, or as many as there are groups.
    """
    number = {group: place for place, group in enumerate(dict.fromkeys(groups))}
    parts: list[list[int]] = [[] for _ in range(min(updates, len(number)))]
    for place, group in enumerate(groups):
        parts[number[group] % len(parts)].append(place)
    return parts


def chosen(items: Sequence[T], places: Sequence[int]) -> list[T]:
    """The items at these places."""
    return [items[place] for place in places]


def take_updates(
    batch: Batch,
    backend: TrainerBackend,
    objective: Objective,
    *,
    updates: int,
    version: int,
    number: int,
    over: Literal["trained", "all"] = "trained",
    before_update: Callable[[], None] = lambda: None,
) -> StepResult:
    """The updates of a step whose groups are all there. Blocks.

    Advantages are of the whole batch, and so are the proximal log-probabilities, where they are needed: both are
    computed before the first update, and what the latter say of trainer and engine stands in the result. Each update
    is divided by the count of its own mini-batch. One that is not finite is thrown away, and the others are taken.

    Args:
        version: the published one that the step begins with. number: of the step; all its updates have its rate.
        over: see `beside_gradients`. before_update: called, and may block, before each update.
    """
    proximal = "proximal" in objective.needs
    if proximal:
        set_proximal(batch.samples, backend, version)
    batch.left_out_tokens = objective.advantages(batch.samples)
    if not proximal:
        batch.beside = beside_gradients(batch.samples, backend, objective, over)
    parts, results = list(_parts(batch.samples, updates)), []
    for part in parts:
        count = backend.accumulate(part).count
        results.append(backend.apply(count, number, before_update))
        batch.parts += 1
    batch.accumulated = len(batch.samples)
    result = together(results)
    if not proximal:
        return result
    counted = [part for part, one in zip(parts, results, strict=True) if one.applied or not result.applied]
    return before_updates(result, [sample for part in counted for sample in part])


def _parts(samples: Sequence[Sample], updates: int) -> Iterator[list[Sample]]:
    for places in mini_batches([sample.meta.group for sample in samples], updates):
        yield chosen(samples, places)


def together(results: Sequence[StepResult]) -> StepResult:
    """The result of a step with these updates.

    Of updates that were thrown away only that they were: what they measured may be no numbers. If all were, the step
    was.

    Args:
        results: of at least one update.
    """
    applied = [one for one in results if one.applied]
    counted = applied or results
    moved = [one for one in applied if one.changed]
    others: Metrics = {}
    for one in counted:
        merge(others, one.others)
    if moved:
        others["grad_norm_max"] = max(one.grad_norm for one in moved)
    bad = [f"update {place} of {len(results)}: {one.why}" for place, one in enumerate(results, 1) if not one.applied]
    fields: dict[str, Any] = {name: _mean(counted, name) for name in OVER_MEASURED}
    fields |= {name: _mean(counted, name) for name in PERHAPS if any(getattr(one, name) is not None for one in counted)}
    fields |= {name: sum(getattr(one, name) for one in counted) for name in ADDED}
    fields |= {name: max(getattr(one, name) for one in counted) for name in LARGEST}
    return StepResult(
        applied=bool(applied),
        changed=bool(moved),
        why="; ".join(bad) if bad or moved else results[0].why,
        loss=float(np.mean([one.loss for one in counted])),
        grad_norm=float(np.mean([one.grad_norm for one in moved])) if moved else counted[0].grad_norm,
        learning_rate=results[0].learning_rate,
        computed_tokens=sum(one.computed_tokens for one in results),
        updates_skipped=len(bad),
        others=others,
        **fields,
    )


def _mean(results: Sequence[StepResult], name: str) -> float:
    """Over the measured tokens of all of them."""
    tokens = sum(one.measured_tokens for one in results)
    whole = math.fsum((getattr(one, name) or 0.0) * one.measured_tokens for one in results if one.measured_tokens)
    return whole / max(tokens, 1)
