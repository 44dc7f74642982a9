"""The trace has the form that Perfetto and chrome://tracing read."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from relax_rt.cli.main import main
from relax_rt.config.version import RUN_FORMAT
from relax_rt.observe.trace import Trace

PHASES = {"X": {"ts", "dur"}, "i": {"ts", "s"}, "C": {"ts", "args"}, "M": {"args"}}


def event(t: float, kind: str, slot: str = "", by: str = "agent", **fields: Any) -> dict[str, Any]:
    return {"t": t, "m": t, "by": by, "kind": kind, **({"slot": slot, "epoch": 1} if slot else {}), **fields}


EVENTS = [
    event(100.0, "run_started", slots=["trainer/0", "rollout/0"]),
    event(100.0, "slot_spawned", "trainer/0", pid=7),
    event(102.0, "slot_ready", "trainer/0"),
    event(103.0, "version_committed", "trainer/0", by="registry/0#0", version=1),
    event(104.0, "fault_injected", "trainer/0", by="chaos", name="stop", seconds=2.0, seed=1),
    event(105.0, "slot_exited", "trainer/0", diagnosis={"kind": "killed", "cause": "SIGKILL"}),
    event(105.0, "slot_restarting", "trainer/0", wait_s=0.5, restarts=1),
    event(105.5, "slot_spawned", "trainer/0", pid=8),
    event(106.0, "lease_lapsed", by="queue/0#2", task="train", samples=4),
    event(106.5, "slot_ready", "trainer/0"),
    event(108.0, "checkpoint", by="trainer/0#3", folder="step-000010", seconds=0.5),
    event(110.0, "node_lost", node="b"),
    {"kind": "torn"},
    event(float("nan"), "slot_ready", "trainer/0"),
]
METRICS = [
    {"kind": "step", "t": 108.0, "by": "trainer/0#3", "step": 4, "wait_s": 0.25, "train_s": 0.5, "publish_s": None},
    {"kind": "queue", "t": 108.5, "by": "queue/0#2", "outstanding": 5, "bound": 8, "payload_bytes": 100},
    {"kind": "evaluation", "t": 109.0, "by": "evaluator/0#5", "when": "during", "seconds": 1.5, "exact": 0.5},
    {"kind": "other", "t": 109.0, "by": "evaluator/0#5"},
]


def check_form(records: list[dict[str, Any]]) -> None:
    named: set[tuple[int, int]] = set()
    for record in records:
        wanted = PHASES[record["ph"]]
        assert wanted <= record.keys() and isinstance(record["name"], str)
        assert isinstance(record["pid"], int) and isinstance(record["tid"], int)
        if record["ph"] == "M":
            named.add((record["pid"], record["tid"]))
            continue
        assert isinstance(record["ts"], int) and record["ts"] >= 0
        assert (record["pid"], record["tid"]) in named, "a track is named before it is used"
        assert record.get("dur", 0) >= 0
        assert record.get("s", "t") in ("t", "p", "g")
        assert record["ph"] != "C" or all(isinstance(v, int | float) for v in record["args"].values())


def test_spans_of_a_slot_from_start_to_end() -> None:
    records = list(Trace(100.0).records(EVENTS, METRICS))
    check_form(records)
    spans = [(r["name"], r["ts"] / 1e6, r["dur"] / 1e6) for r in records if r["ph"] == "X"]
    assert spans == [
        ("starting", 0.0, 2.0),
        ("fault: stop", 4.0, 2.0),
        ("ready", 2.0, 3.0),
        ("back-off", 5.0, 0.5),
        ("starting", 5.5, 1.0),
        ("step-000010", 7.5, 0.5),
        ("train", 7.5, 0.5),
        ("wait", 7.25, 0.25),
        ("evaluation during", 7.5, 1.5),
        ("ready", 6.5, 3.5),
    ]
    instants = [r["name"] for r in records if r["ph"] == "i"]
    assert instants == ["version_committed", "fault: stop", "died (killed)", "lease_lapsed", "node_lost"]
    tracks = {r["args"]["name"] for r in records if r["name"] == "thread_name"}
    assert {"trainer/0", "trainer/0 steps", "trainer/0 faults", "trainer/0 checkpoints", "queue/0", "agent"} <= tracks


def test_spans_of_one_track_do_not_overlap() -> None:
    records = [r for r in Trace(100.0).records(EVENTS, METRICS) if r["ph"] == "X"]
    for tid in {r["tid"] for r in records}:
        mine = sorted((r["ts"], r["ts"] + r["dur"]) for r in records if r["tid"] == tid)
        assert all(end <= start for (_, end), (start, _) in pairwise(mine))


def test_a_long_log_is_turned_in_bounded_memory() -> None:
    def many() -> Iterator[dict[str, Any]]:
        for n in range(30_000):
            yield event(float(n), "slot_spawned", f"rollout/{n % 5}", pid=n)
            yield event(n + 0.5, "slot_exited", f"rollout/{n % 5}", diagnosis={"kind": "clean"})

    tracemalloc.start()
    count = sum(1 for _ in Trace(0.0).records(many(), []))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count > 30_000
    assert peak < 2 << 20


def test_the_file_is_whole_json_with_torn_lines_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "events").mkdir()
    (tmp_path / "run.json").write_text(
        f'{{"format": {RUN_FORMAT}, "run_id": "ab", "name": "two", "status": "finished"}}'
    )
    lines = "\n".join(json.dumps(e) for e in EVENTS)
    (tmp_path / "events/current.jsonl").write_text(lines + '\n{"t": 111.0, "kind": "slot_re')
    assert main(["trace", str(tmp_path)]) == 0
    assert "perfetto" in capsys.readouterr().out
    whole = json.loads((tmp_path / "trace.json").read_text())
    assert whole["otherData"] == {"run": "two", "run_id": "ab", "began": 100.0}
    check_form(whole["traceEvents"])
    assert main(["trace", str(tmp_path), "--out", str(tmp_path / "no/such/folder.json")]) == 1
    (tmp_path / "events/current.jsonl").write_text("")
    assert main(["trace", str(tmp_path)]) == 1
    assert "no event" in capsys.readouterr().err
