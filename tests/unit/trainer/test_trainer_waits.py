"""How long the trainer has waited for a step's samples, as it records it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from relax_rt.roles.trainers.step import Batch, Collector


class LateQueue:
    """Answers one take after the other, each a second late: with a lease, or with what is waited for."""

    def __init__(self, clock: dict[str, float], answers: list[bool]) -> None:
        self.clock, self.answers = clock, iter(answers)

    async def take(self, *_: Any, **__: Any) -> Any:
        self.clock["now"] += 1.0
        return Lease() if next(self.answers) else Nothing()


class Lease:
    samples: tuple[()] = ()
    waiting_on = ""


class Nothing(Lease):
    waiting_on = "2 of 8 groups are ready"

    def __bool__(self) -> bool:
        return False


async def test_a_wait_of_many_calls_counts_from_the_first_of_them() -> None:
    clock = {"now": 100.0}
    shown: list[str] = []
    collector = Collector(
        LateQueue(clock, [False, False, True, False, True]),  # type: ignore[arg-type]
        SimpleNamespace(waiting=shown.append),  # type: ignore[arg-type]
        groups=8,
        clock=lambda: clock["now"],
    )
    spent: list[tuple[float, ...]] = []
    for _ in range(5):
        batch = await collector.collect()
        if batch is not None:
            spent.append(worked(batch, clock))
    assert spent == [(3.0, 5.0, 0.25), (2.0, 5.0, 0.25)]
    assert shown == ["2 of 8 groups are ready", "2 of 8 groups are ready", "", "2 of 8 groups are ready", ""]


def worked(batch: Batch, clock: dict[str, float]) -> tuple[float, ...]:
    """What the step's times are after training for 5 s and publishing for 0.25 s."""
    clock["now"] += 5.0
    batch.spent.on("train")
    clock["now"] += 0.25
    batch.spent.on("publish")
    return tuple(batch.spent[what] for what in ("wait", "train", "publish"))
