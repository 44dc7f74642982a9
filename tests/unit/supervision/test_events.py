"""The event log: many writers, one rotator, readers that miss nothing."""

from __future__ import annotations

import json
import multiprocessing
import resource
import signal
import threading
import time
import tracemalloc
from pathlib import Path

import pytest

from relax_rt import events
from relax_rt.events import CURRENT, MAX_LINE_BYTES, Appender, EventFollower, EventLog, read_events, segments
from relax_rt.metrics import MetricsLog, read_metrics


def test_events_carry_who_when_and_what(tmp_path: Path) -> None:
    log = EventLog(tmp_path, "rollout/0#3")
    log.emit("swap", version=4, path=tmp_path, t="not the time")
    (event,) = read_events(tmp_path)
    assert event["by"] == "rollout/0#3" and event["kind"] == "swap" and event["version"] == 4
    assert event["path"] == str(tmp_path)
    assert isinstance(event["t"], float) and isinstance(event["m"], float)


def test_rotation_keeps_order_and_removes_the_oldest(tmp_path: Path) -> None:
    log = EventLog(tmp_path, "agent", segment_bytes=200, keep=3)
    for n in range(40):
        log.emit("n", n=n)
        log.rotate()
    assert len(segments(tmp_path / "events")) == 3
    numbers = [e["n"] for e in read_events(tmp_path)]
    assert numbers == list(range(numbers[0], 40)) and numbers[0] > 0


def _write(run_dir: Path, who: str, count: int) -> None:
    log = EventLog(run_dir, who)
    for n in range(count):
        log.emit("n", n=n, filler="x" * (n % 300))
        time.sleep(0.0005)


def test_writers_in_many_processes_lose_nothing_through_rotations(tmp_path: Path) -> None:
    agent = EventLog(tmp_path, "agent", segment_bytes=4000, keep=10_000)
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=_write, args=(tmp_path, f"w/{w}", 400)) for w in range(2)]
    follower, followed = EventFollower(tmp_path), []
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        agent.rotate()
        followed += follower.poll()
    followed += follower.poll() + follower.poll()
    follower.close()
    assert len(segments(tmp_path / "events")) > 3, "it must have rotated while they wrote"
    for found in (list(read_events(tmp_path)), followed):
        for w in range(2):
            assert sorted(e["n"] for e in found if e["by"] == f"w/{w}") == list(range(400))


def test_threads_share_an_appender(tmp_path: Path) -> None:
    out = Appender(tmp_path / "lines")
    threads = [threading.Thread(target=lambda: [out.append(b"0" * 50) for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "lines").read_bytes() == (b"0" * 50 + b"\n") * 800


def test_torn_lines_are_passed_over_and_healed(tmp_path: Path) -> None:
    log = EventLog(tmp_path, "a")
    log.emit("first")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (tmp_path / "events" / CURRENT).stat().st_size
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))
    try:
        log.emit("torn")
        log.emit("lost")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    log.emit("last")
    assert [e["kind"] for e in read_events(tmp_path)] == ["first", "last"]
    assert log.lost == 2


def test_overlong_events_are_cut(tmp_path: Path) -> None:
    EventLog(tmp_path, "a").emit("big", text="x" * MAX_LINE_BYTES)
    (event,) = read_events(tmp_path)
    assert event["kind"] == "big" and event["cut_bytes"] > MAX_LINE_BYTES and "text" not in event


def test_follower_waits_for_the_rest_of_a_line(tmp_path: Path) -> None:
    follower = EventFollower(tmp_path)
    assert follower.poll() == []
    (tmp_path / "events").mkdir()
    with (tmp_path / "events" / CURRENT).open("ab", buffering=0) as file:
        file.write(b'{"kind":"a"}\n{"kind"')
        assert [e["kind"] for e in follower.poll()] == ["a"]
        file.write(b':"b"}\n')
        assert [e["kind"] for e in follower.poll()] == ["b"]
    assert follower.poll() == []
    follower.close()


def test_metrics_are_lines_of_plain_numbers(tmp_path: Path) -> None:
    class Scalar:
        def item(self) -> float:
            return 0.5

    log = MetricsLog(tmp_path, "trainer/0#1")
    log.write({"kind": "step", "loss": Scalar(), "step": 1})
    log.write({"kind": "other"})
    records = list(read_metrics(tmp_path))
    assert [r["kind"] for r in records] == ["step", "other"] and records[0]["loss"] == 0.5
    assert [r["step"] for r in read_metrics(tmp_path, "step")] == [1]
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["by"] == "trainer/0#1"


def test_a_rotation_while_events_are_read_loses_nothing(tmp_path: Path) -> None:
    log = EventLog(tmp_path, "agent", segment_bytes=300, keep=100)
    for n in range(20):
        log.emit("n", n=n)
        log.rotate()
    numbers = []
    for event in read_events(tmp_path):
        numbers.append(event["n"])
        if len(numbers) < 15:
            # Somebody goes on writing, and the agent rotates, between any two lines that are read.
            log.emit("n", n=19 + len(numbers))
            log.rotate()
    assert numbers == list(range(len(numbers))) and len(numbers) >= 30


def test_what_is_no_line_is_passed_over_in_bounded_memory(tmp_path: Path) -> None:
    log = EventLog(tmp_path, "agent")
    log.emit("before")
    log.close()
    with (tmp_path / "events" / CURRENT).open("r+b") as file:
        file.seek(0, 2)
        # A host's crash may leave a hole of zeros.
        file.truncate(file.tell() + (256 << 20))
        file.seek(0, 2)
        file.write(b"\n")
    log.emit("after")
    tracemalloc.start()
    kinds = [event["kind"] for event in read_events(tmp_path)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kinds == ["before", "after"]
    assert peak < 16 << 20


def test_a_follower_reads_a_long_log_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "POLL_BYTES", 500)
    log = EventLog(tmp_path, "agent", segment_bytes=1000, keep=100)
    follower = EventFollower(tmp_path)
    numbers: list[int] = []
    for n in range(100):
        log.emit("n", n=n)
        log.rotate()
        if n % 10 == 0:
            numbers += [event["n"] for event in follower.poll()]
    polls = 0
    while len(numbers) < 100 and polls < 100:
        numbers += [event["n"] for event in follower.poll()]
        polls += 1
    follower.close()
    assert numbers == list(range(100)) and polls > 5
