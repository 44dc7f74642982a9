"""Another objective, told to a gang: every rank comes to the same one, with the same settings."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch")

from relax_rt.roles.training.algorithms.objective import Objective
from relax_rt.roles.training.algorithms.settings import AlgorithmTable
from relax_rt.roles.training.backend import gang
from relax_rt.roles.training.backend.gang import GangCommand

TABLES = [
    AlgorithmTable(name="sft", learning_rate=1e-4, warmup_steps=3, adam_betas=(0.8, 0.95)),
    AlgorithmTable(name="dpo", loss={"name": "dpo", "beta": 0.3, "label_smoothing": 0.1}, max_grad_norm=2.0),
    AlgorithmTable(max_staleness=float("inf"), kl={"name": "k2", "coefficient": 0.1}, weight_decay=0.1),
    AlgorithmTable(name="dr_grpo"),
]


class Rank:
    """A rank's backend that only remembers what it was told to use."""

    def __init__(self) -> None:
        self.ranks = SimpleNamespace(control=None, rank=0)
        self.used: list[tuple[Objective, AlgorithmTable, float | None]] = []

    def use(self, objective: Objective, table: AlgorithmTable, *, temperature: float | None = None) -> None:
        self.used.append((objective, table, temperature))


@pytest.mark.parametrize("temperature", [None, 0.7])
@pytest.mark.parametrize("table", TABLES, ids=lambda table: str(table.name))
def test_ranks_use_what_rank_0_uses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, table: AlgorithmTable, temperature: float | None
) -> None:
    wire: list[bytes] = []
    monkeypatch.setattr(gang, "send_command", lambda order, group: wire.append(msgspec.msgpack.encode(order)))
    first, other = Rank(), Rank()
    objective = Objective.of(table, base=tmp_path, longest=11)
    made: Any = first
    gang.Leader(made).use(objective, table, temperature=temperature)
    assert first.used == [(objective, table, temperature)]
    (order,) = wire
    follower: Any = other
    gang.Follower(follower)._carry_out(msgspec.msgpack.decode(order, type=GangCommand))
    ((theirs, settings, heat),) = other.used
    assert settings == table and heat == temperature
    assert (theirs.needs, theirs.base, theirs.longest) == (objective.needs, tmp_path, 11)
    for mine, its in zip(objective.parts.all(), theirs.parts.all(), strict=True):
        assert (mine.part.name, mine.options) == (its.part.name, its.options)
