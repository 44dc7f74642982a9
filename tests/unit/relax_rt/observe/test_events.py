"""The event log: many writers, one rotator, readers that miss nothing."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from relax_rt.observe import events
from relax_rt.observe.events import CURRENT, MAX_LINE_BYTES, Appender, EventFollower, EventLog, read_events, segments
from relax_rt.observe.metrics import MetricsLog, Tail, read_metrics


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


WRITER = """
import sys, time
from pathlib import Path
from relax_rt.observe.events import EventLog
log = EventLog(Path(sys.argv[1]), sys.argv[2])
for n in range(400):
    log.emit("n", n=n, filler="x" * (n % 300))
    time.sleep(0.0005)
"""


def test_writers_in_many_processes_lose_nothing_through_rotations(tmp_path: Path) -> None:
    agent = EventLog(tmp_path, "agent", segment_bytes=4000, keep=10_000)
    follower, followed = EventFollower(tmp_path), []
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, tmp_path, f"w/{w}"]) for w in range(2)]
    while any(writer.poll() is None for writer in writers):
        agent.rotate()
        followed += follower.poll()
    assert [writer.returncode for writer in writers] == [0, 0]
    followed += follower.poll()
    follower.close()
    assert len(segments(tmp_path / "events")) > 3, "it must have rotated while they wrote"
    for found in (list(read_events(tmp_path)), followed):
        for w in range(2):
            assert sorted(e["n"] for e in found if e["by"] == f"w/{w}") == list(range(400))


class Suspended:
    """Stands for os.write: a writer is suspended at its first write, `meanwhile` happens, and it writes then."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self._meanwhile: Callable[[], None] | None = meanwhile

    def __call__(self, fd: int, data: bytes, write: Callable[[int, bytes], int] = os.write) -> int:
        meanwhile, self._meanwhile = self._meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return write(fd, data)


@pytest.mark.parametrize("rotations", [1, 3])
@pytest.mark.parametrize("polls", [1, 2, 5])
def test_a_writer_that_is_suspended_through_rotations_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, polls: int, rotations: int
) -> None:
    agent, slow = EventLog(tmp_path, "agent", segment_bytes=1), EventLog(tmp_path, "slow")
    follower, followed = EventFollower(tmp_path), []
    slow.emit("n", n=0)

    def meanwhile() -> None:
        for n in range(rotations):
            assert agent.rotate()
            agent.emit("n", n=10 + n)
            for _ in range(polls):
                followed.extend(follower.poll())

    monkeypatch.setattr(os, "write", Suspended(meanwhile))
    slow.emit("n", n=1)
    slow.emit("n", n=2)
    followed += follower.poll()
    follower.close()
    wanted = [0, 1, 2, *(10 + n for n in range(rotations))]
    assert sorted(e["n"] for e in followed) == sorted(e["n"] for e in read_events(tmp_path)) == wanted


def test_a_file_that_is_followed_alone_is_left_when_no_writer_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, slow = EventLog(tmp_path, "agent", segment_bytes=1), EventLog(tmp_path, "slow")
    tail = Tail(tmp_path / "events" / CURRENT)
    slow.emit("n", n=0)
    found = tail.poll()

    def meanwhile() -> None:
        assert agent.rotate()
        agent.emit("n", n=2)
        found.extend([*tail.poll(), *tail.poll(), *tail.poll()])

    monkeypatch.setattr(os, "write", Suspended(meanwhile))
    slow.emit("n", n=1)
    found += [*tail.poll(), *tail.poll()]
    tail.close()
    assert [e["n"] for e in found] == [0, 1, 2]


def test_a_reader_that_locks_a_closed_segment_holds_no_writer_up(tmp_path: Path) -> None:
    agent, slow = EventLog(tmp_path, "agent", segment_bytes=1), EventLog(tmp_path, "slow")
    slow.emit("n", n=0)
    assert agent.rotate()
    with segments(tmp_path / "events")[0].open("rb") as reader:
        fcntl.flock(reader, fcntl.LOCK_EX)
        slow.emit("n", n=1)
    assert (slow.lost, [e["n"] for e in read_events(tmp_path)]) == (0, [0, 1])


def test_a_writer_that_is_killed_in_a_write_keeps_no_segment_open(tmp_path: Path) -> None:
    EventLog(tmp_path, "a").emit("first")
    holder = "import fcntl, os, sys; fcntl.flock(0, fcntl.LOCK_SH); print('locked', flush=True); sys.stdin = None; "
    with (tmp_path / "events" / CURRENT).open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", holder + "os.kill(os.getpid(), 19)"], stdin=file, stdout=subprocess.PIPE
        )
    assert process.stdout is not None and process.stdout.readline() == b"locked\n"
    assert EventLog(tmp_path, "agent", segment_bytes=1).rotate()
    follower = EventFollower(tmp_path)
    assert [e["kind"] for e in follower.poll() + follower.poll() + follower.poll()] == ["first"]
    assert follower._finished == set()
    process.kill()
    process.wait()
    process.stdout.close()
    assert follower.poll() == [] and follower._finished == {"events-000001.jsonl"}
    follower.close()


def test_without_locks_a_closed_segment_is_read_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(fd: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    log = EventLog(tmp_path, "agent", segment_bytes=1)
    follower, numbers = EventFollower(tmp_path), []
    for n in range(5):
        log.emit("n", n=n)
        log.rotate()
        numbers += [e["n"] for e in follower.poll()]
    assert log.lost == 0 and numbers == list(range(5))
    follower.close()


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
