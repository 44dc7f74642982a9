"""How long the trainer has waited for a step's samples, as it records it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from relax_rt.roles import trainer
from relax_rt.roles.trainer import TrainerRole


async def test_a_wait_of_many_calls_counts_from_the_first_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"now": 100.0}
    recorded: list[tuple[float, ...]] = []
    batches = iter([None, None, "batch", None, "batch"])

    async def batch() -> Any:
        clock["now"] += 1.0
        return SimpleNamespace(samples=[]) if next(batches) else None

    async def account(*_: Any) -> None:
        clock["now"] += 0.25

    def train(_: Any) -> None:
        clock["now"] += 5.0

    def record(_lease: Any, _samples: Any, _result: Any, at: tuple[float, ...]) -> dict[str, float]:
        recorded.append(at)
        return dict.fromkeys(("reward_mean", "loss", "grad_norm", "wait_s", "train_s"), 0.0)

    monkeypatch.setattr(trainer, "time", SimpleNamespace(monotonic=lambda: clock["now"]))
    role = TrainerRole.__new__(TrainerRole)
    silent = SimpleNamespace(advance=lambda *_: None)
    vars(role).update(
        publisher=SimpleNamespace(check=lambda: None),
        ctx=SimpleNamespace(metrics=lambda _: None, progress=silent, log=SimpleNamespace(info=lambda *_, **__: None)),
        config=SimpleNamespace(
            algorithm=SimpleNamespace(steps=9), checkpoint=SimpleNamespace(every_steps=9), publication=None
        ),
        weights=SimpleNamespace(version=1),
        step=1,
        _worked=True,
        _saving=None,
        _early="",
        _asked=0.0,
        _batch=batch,
        _train=train,
        _account=account,
        _record=record,
    )
    async with asyncio.timeout(30):
        while len(recorded) < 2:
            await role._one_step()
    assert recorded == [(100.0, 103.0, 108.0, 108.25), (108.25, 110.25, 115.25, 115.5)]
