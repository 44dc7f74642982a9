"""The verdicts of the engine benches can fail, and the peer in them is not slowed down."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from harness import Driver, Traits

from relax_rt.roles.rollout.engines.embedded import EmbeddedEngine

BENCH = Path(__file__).resolve().parents[5] / "tools" / "bench"


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, BENCH / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rounds(*pairs: tuple[float, float]) -> list[dict[str, Any]]:
    """Without and with updates, seconds of the same work; every other pair the other way round."""
    out = []
    for number, pair in enumerate(pairs):
        both = [
            {"tokens": 1000, "seconds": s, "cpu_s": s, "pauses": [0.01] * updated} for updated, s in enumerate(pair)
        ]
        out += both[::-1] if number % 2 else both
    return out


@pytest.mark.parametrize(
    ("pairs", "clock", "holds"),
    [
        ([(10.0, 10.1), (10.0, 10.2)], "seconds", True),
        ([(10.0, 11.1), (10.0, 11.2)], "seconds", False),
        ([(10.0, 10.1), (10.0, 8.0)], "seconds", None),
        ([(10.0, 10.1)], "seconds", None),
        ([(10.0, 10.1), (10.0, 10.11)], "cpu_s", True),
        ([(10.0, 10.5), (10.0, 10.48)], "cpu_s", False),
        ([(10.0, 11.0), (10.0, 9.0)], "cpu_s", None),
    ],
)
def test_what_updates_cost_is_judged_only_where_it_can_be_seen(
    pairs: list[tuple[float, float]], clock: str, holds: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = load("engine.py")
    monkeypatch.setattr(bench, "measure", lambda name, *_, **__: rounds(*pairs) if name == bench.OURS else None)
    row = bench.compare("tiny", 4, 8, len(pairs), clock, [bench.OURS])[-1]
    assert (row["limit"], row["holds"]) == (bench.MAX_LOSS, holds)


async def test_new_weights_wait_for_running_but_not_for_queued_requests(conformance_model: Path) -> None:
    inner = EmbeddedEngine(conformance_model, dtype="float32", max_sequences=2, threads=1)
    engine = load("long_tail/long_tail_engine.py").LongTail(inner, 60, 0.0, 60, interruptible=False)
    driver = await Driver(engine, conformance_model, Traits(members=2)).start()
    asked = [driver.request([1, 2], 2), driver.request([3, 4], 3), driver.request([5], 1)]
    driver.submit(*asked)
    await driver.tokens(4)
    source = driver.source()
    await engine.prepare(source)
    swap = asyncio.create_task(engine.commit(source.record, "keep"))
    await asyncio.sleep(0.01)
    engine.abort(asked[2].id)
    assert [c.finish_reason for c in await driver.finished(asked[2])] == ["abort"]
    await swap
    first, later = await driver.finished(asked[0]), await driver.finished(asked[1])
    assert {s.version for c in first for s in c.versions} == {0}
    assert {s.version for c in later for s in c.versions} == {source.record.version}
    assert [len(c.tokens) for c in (*first, *later)] == [60] * 5
    await engine.close(10.0)
