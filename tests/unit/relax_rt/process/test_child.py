"""Children: signals that cannot hit a recycled pid, exit statuses, packets, logs."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from relax_rt.process import procfs
from relax_rt.process.child import (
    Child,
    Notifier,
    PacketReader,
    describe_exit,
    packet_pair,
    read_tail,
    rotate_log,
    spawn,
    watch_exit,
)

WAIT_S = 120
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


async def start(tmp_path: Path, argv: list[str]) -> tuple[Child, asyncio.Future[int]]:
    end: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    popen = spawn(argv, os.environ, tmp_path / "log")
    return Child(popen.pid, end.set_result, popen), end


async def status_of(end: asyncio.Future[int]) -> int:
    async with asyncio.timeout(WAIT_S):
        return await end


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [("raise SystemExit(7)", 7, "exit code 7"), ("import os; os.kill(os.getpid(), 9)", -9, "ended by SIGKILL")],
)
async def test_exit_status_is_reported_once_the_child_is_reaped(
    tmp_path: Path, code: str, status: int, words: str
) -> None:
    child, end = await start(tmp_path, [sys.executable, "-c", code])
    assert await status_of(end) == status and describe_exit(status) == words
    assert not child.alive and procfs.stat_fields(child.pid) is None


async def test_group_ends_with_its_leader(tmp_path: Path) -> None:
    code = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"
    _, end = await start(tmp_path, [sys.executable, "-c", code])
    assert await status_of(end) == 0
    member = int((tmp_path / "log").read_text())
    deadline = asyncio.get_running_loop().time() + WAIT_S
    while procfs.start_time(member):
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)


async def test_no_signal_is_sent_after_the_exit_was_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child, end = await start(tmp_path, [sys.executable, "-c", ""])
    await status_of(end)
    sent: list[object] = []
    monkeypatch.setattr(os, "killpg", lambda *to: sent.append(to))
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *to: sent.append(to))
    child.kill()
    child.signal(signal.SIGUSR1)
    assert sent == []


async def test_released_child_is_not_reaped(tmp_path: Path) -> None:
    exits: list[int] = []
    popen = spawn(SLEEP, os.environ, tmp_path / "log")
    child = Child(popen.pid, exits.append, popen)
    child.release()
    ended = Notifier()
    gone: list[bool] = []
    watch_exit(child.pid, lambda: (gone.append(True), ended.notify()))
    os.kill(child.pid, signal.SIGKILL)
    assert await ended.wait_for(lambda: gone, WAIT_S)
    assert await asyncio.to_thread(popen.wait) == -signal.SIGKILL
    assert exits == []


async def test_what_was_sent_before_a_death_is_read_at_the_close() -> None:
    ours, theirs = packet_pair()
    packets: list[bytes] = []
    reader = PacketReader(ours, 64, packets.append)
    for n in range(3 * PacketReader.PER_TURN):
        theirs.send(b"%d" % n)
    theirs.close()
    reader.close()
    assert len(packets) == 3 * PacketReader.PER_TURN and ours.fileno() < 0


async def test_wait_ends_with_the_predicate_or_the_timeout() -> None:
    changed = Notifier()
    assert not await changed.wait_for(lambda: False, 0.01)
    waiting = asyncio.create_task(changed.wait_for(lambda: done, WAIT_S))
    done: list[int] = []
    await asyncio.sleep(0)
    done.append(1)
    changed.notify()
    assert await waiting


def test_log_is_rotated_in_place_while_it_is_open_for_writing(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    assert not rotate_log(log, 1)
    with log.open("ab", buffering=0) as writer:
        for n in range(4):
            writer.write(b"%d" % n * 10)
            assert not rotate_log(log, 11) and rotate_log(log, 10)
        writer.write(b"last")
    assert log.read_text() == "last"
    kept = {path.name: path.read_text() for path in tmp_path.iterdir() if path != log}
    assert kept == {"x.log.1": "3" * 10, "x.log.2": "2" * 10}


def test_tail_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    assert read_tail(log, 0) == ""
    log.write_text("old incarnation\nnew one\n")
    assert read_tail(log, 16) == "new one\n"
    assert read_tail(log, 0, limit=4) == "one\n"
    assert read_tail(log, 1000) == "old incarnation\nnew one\n", "the log was cut since: all of it is new"
