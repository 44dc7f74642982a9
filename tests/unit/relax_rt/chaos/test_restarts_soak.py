"""The soak of restarts: what was not measured has not been shown."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[4] / "tools" / "soak"))

import restarts


def points(who: str, measures: tuple[str, ...]) -> list[restarts.Point]:
    values = dict.fromkeys(measures, 5.0)
    return [restarts.Point(who, 1, float(at), values) for at in range(20)]


def test_a_measure_that_is_missing_is_a_failure() -> None:
    everything = ("descriptors", "threads", "anonymous MiB")
    taken = [p for who in restarts.WATCHED for p in points(who, everything)]
    told = restarts.missing(restarts.trends(taken, 0.0, 20.0))
    assert told == [f"{who}: tasks could not be measured 8 times" for who in ("agent", "registry/0", "queue/0")]
    whole = [p for who in restarts.WATCHED for p in points(who, (*everything, "tasks"))]
    assert restarts.missing(restarts.trends(whole, 0.0, 20.0)) == []
    assert len(restarts.missing([])) == 5 * 3 + 3


def test_a_soak_that_measured_nothing_is_not_clean(tmp_path: Path) -> None:
    assert restarts.Soak(tmp_path, 1.0, 10, 1).report()["ok"] is False
