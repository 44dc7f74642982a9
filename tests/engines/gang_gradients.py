"""Gradients of gangs, held to those of sequences computed one by one by a plain model in float64."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from gang_harness import Gang
from gang_objectives import FAMILIES, TABLES, arrivals, cut, episodes, judged, objective_of

from relax_rt.roles.base.sample import Sample
from relax_rt.roles.training.algorithms.objective import Objective
from relax_rt.roles.training.batch.rows import replica_share

sys.path.append(str(Path(__file__).parents[1] / "unit" / "roles" / "training"))
from packing_ways import alone, gradients_alone, load_exactly

Gradients = dict[str, np.ndarray]
VERSION = 1
"""Of the weights that a step begins with."""


class Alone:
    """A model in one process, without any of the backends."""

    def __init__(self, folder: Path, temperature: float) -> None:
        self._model, self._temperature = load_exactly(folder), temperature
        self._kept: dict[str, Gradients] = {}

    def sums(self, label: str, objective: Objective, batch: Sequence[Sample]) -> Gradients:
        """By name, not divided by anything; of a batch that has its advantages. Kept under the label."""
        if label not in self._kept:
            self._model.zero_grad()
            means, count = gradients_alone(self._model, objective, batch, self._temperature), objective.count(batch)
            plain = {name: value.numpy() * count for name, value in means.items()}
            self._kept[label] = {own: part for name, value in plain.items() for own, part in by_expert(name, value)}
        return self._kept[label]

    def judge(self, batch: Sequence[Sample]) -> None:
        """Give samples the log-probabilities of these weights as proximal ones."""
        for sample in batch:
            values = alone(self._model, sample.tokens, self._temperature)[0].detach().numpy() * sample.loss_mask
            sample.proximal_logprobs, sample.proximal_version = values.astype(np.float32), VERSION


def by_expert(name: str, value: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """A tensor as checkpoints name it: transformers computes with the experts of a layer in one, [experts, rows, …]."""
    folder, _, tensor = name.rpartition(".")
    if not folder.endswith(".experts"):
        yield name, value
        return
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[tensor]
    for expert, rows in enumerate(value):
        for part, own in zip(parts, np.split(rows, len(parts)), strict=True):
            yield f"{folder}.{expert}.{part}.weight", own


def off(found: Sequence[Gradients], wanted: Gradients) -> float:
    """The largest difference, of the largest element of its tensor; where that is small, of the largest of all.

    Args:
        found: of each rank, which has rows of a tensor, perhaps none.
    """
    largest = max(float(np.abs(value).max()) for value in wanted.values())
    assert largest > 1e-3
    worst = 0.0
    for name, value in wanted.items():
        rows = np.concatenate([part[name] for part in found if name in part])
        assert rows.shape == value.shape, name
        worst = max(worst, float(np.abs(rows - value).max()) / max(float(np.abs(value).max()), 0.01 * largest))
    return worst


def check_losses(gang: Gang, one: Alone, bound: float) -> None:
    """Every loss and aggregation, cut and streamed in unequal parts."""
    worst, seen = {}, dict[str, np.ndarray]()
    for label, table in TABLES.items():
        batch = judged(table)
        wanted = one.sums(label, objective_of(table), batch)
        _tell_apart(label, wanted, seen)
        gang.call("use", algorithm=table)
        worst[label] = off(gang.call("whole", batches=cut(table, batch)), wanted)
    _hold(worst, bound)


def check_advantages(gang: Gang, one: Alone, bound: float, *, given: bool = True, branched: bool = False) -> None:
    """Every advantage: groups arrive in parts, or all of them at once, at a leader that computes advantages.

    Args:
        branched: see `episodes`.
        given: the policy's own log-probabilities are there, as for a later update of a publication; else the ranks
            compute them where an advantage looks at them.
    """
    worst, seen = {}, dict[str, np.ndarray]()
    for label, table in FAMILIES.items():
        objective = objective_of(table)
        if not given and not objective.proximal_first:
            continue
        batch = episodes(branched=branched)
        whole = copy.deepcopy(batch)
        if not given:
            one.judge(whole)
            for sample in batch:
                sample.proximal_logprobs = sample.proximal_version = None
        objective.advantages(whole)
        if given and not objective.streams:
            assert _differs_by_share(objective, batch, whole), f"{label}: a rank's own statistics would do as well"
        kept = f"{label}, {given=}, {branched=}"
        wanted = one.sums(kept, objective, whole)
        _tell_apart(label, wanted, seen)
        gang.call("use", algorithm=table)
        answers = gang.call("stepped", parts=arrivals(table, batch), version=VERSION)
        assert answers[0]["count"] == objective.count(whole), label
        worst[label] = off([answer["gradients"] for answer in answers], wanted)
    _hold(worst, bound)


def _differs_by_share(objective: Objective, batch: list[Sample], whole: list[Sample]) -> bool:
    """Whether a replica that computed advantages of its own share would find others."""
    parts = copy.deepcopy(batch)
    for place in range(2):
        objective.advantages([sample for _, sample in replica_share(parts, place, 2, whole_groups=True)])
    return any(
        not np.allclose(ours.advantages, theirs.advantages, atol=1e-3)
        for ours, theirs in zip(parts, whole, strict=True)
        if ours.advantages is not None and theirs.advantages is not None
    )


def _tell_apart(label: str, sums: Gradients, others: dict[str, np.ndarray]) -> None:
    """See that what is tested acts on its batch: no two objectives have the same gradients."""
    mine = np.concatenate([value.ravel() for value in sums.values()])
    for other, value in others.items():
        assert np.abs(mine - value).max() > 1e-3 * np.abs(mine).max(), f"{label} is {other} on this batch"
    others[label] = mine


def _hold(worst: dict[str, float], bound: float) -> None:
    beyond = {label: f"{value:.1e}" for label, value in worst.items() if not value <= bound}
    assert not beyond, f"off by more than {bound:g}: {beyond}"
