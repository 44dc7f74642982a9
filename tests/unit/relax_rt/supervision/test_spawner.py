"""Processes started by the spawner: their limits, their stacks, their memory."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from relax_rt.config.schema import RunConfig
from relax_rt.interfaces.agent import Diagnosis
from relax_rt.process import procfs
from relax_rt.process.limits import ProcessLimits
from relax_rt.process.zygote_pool import ZygoteKey
from relax_rt.supervision.channel import PreparedMsg, encode
from relax_rt.supervision.local import LocalExecutor
from relax_rt.supervision.role_process import Launch, RoleProcess, StartedProcess
from relax_rt.supervision.rundir import RunPaths
from relax_rt.supervision.spawner import BACKOFF_FIRST_S, EXAMINERS, RoleSpawner, Spares, SpareSpec

WAIT_S = 120
IDLE = "import os, socket\nc = socket.socket(fileno=int(os.environ['RELAX_CONTROL_FD']))\nwhile c.recv(999): pass"


class Started:
    def __init__(self, process: RoleProcess, end: asyncio.Future[Diagnosis]) -> None:
        self.process, self.end = process, end

    async def diagnosis(self) -> Diagnosis:
        async with asyncio.timeout(WAIT_S):
            return await self.end


class World:
    def __init__(self, folder: Path) -> None:
        self.log = folder / "toy.log"
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.spawner = RoleSpawner(lambda kind, **fields: self.events.append((kind, fields)))

    async def start(self, code: str, **fields: Any) -> Started:
        end: asyncio.Future[Diagnosis] = asyncio.get_running_loop().create_future()
        launch = Launch(
            slot="toy/0", epoch=3, argv=[sys.executable, "-c", code], env=dict(os.environ), log=self.log, **fields
        )
        return Started(await self.spawner.spawn(launch, lambda message: None, end.set_result), end)


def until_logged(log: Path, words: str) -> None:
    end = time.monotonic() + WAIT_S
    while words not in log.read_text():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    yield world
    await world.spawner.aclose()
    world.spawner.close()


async def test_limits_are_applied_to_spawned_processes(world: World) -> None:
    toy = await world.start(IDLE, limits=ProcessLimits(nice=3))
    assert os.getpriority(os.PRIO_PROCESS, toy.process.pid) == 3
    toy.process.kill("killed", "enough")
    end = await toy.diagnosis()
    assert (end.kind, end.cause, end.pid) == ("killed", "enough", toy.process.pid)
    assert not toy.process.living


async def test_process_above_its_memory_limit_is_killed_with_that_reason(world: World) -> None:
    greedy = await world.start(f"hoard = b'1' * (160 << 20)\n{IDLE}", memory_mib=100)
    modest = await world.start(IDLE, memory_mib=100)
    end = await greedy.diagnosis()
    assert end.kind == "oom" and end.cause.startswith("had 1") and "above memory_mib = 100" in end.cause
    assert modest.process.living
    modest.process.kill("killed", "enough")
    await modest.diagnosis()


async def test_role_without_a_zygote_is_spawned_and_an_event_gives_the_reason(world: World, tmp_path: Path) -> None:
    world.spawner.use_zygotes(tmp_path / "zygote.log", tmp_path / "none.json", "0badf00d")
    toy = await world.start(IDLE, key=ZygoteKey(sys.executable, ()))
    assert world.events == [
        (
            "spawned_without_zygote",
            {"slot": "toy/0", "epoch": 3, "reason": "no zygote for its interpreter and environment"},
        )
    ]
    toy.process.kill("killed", "enough")
    await toy.diagnosis()


async def test_stacks_are_dumped_by_py_spy_where_it_is_installed(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A stand-in: what it is asked for, and that its answer reaches the log.
    program = tmp_path / "py-spy"
    program.write_text('#!/bin/sh\necho "spied: $*"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    toy = await world.start(IDLE)
    toy.process.dump_stacks()
    asked = f"spied: dump --pid {toy.process.pid}"
    await asyncio.to_thread(until_logged, world.log, asked)
    toy.process.kill("killed", "enough")
    assert asked in (await toy.diagnosis()).last_lines


async def test_exits_are_reported_while_many_stacks_are_being_dumped(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "py-spy"
    monkeypatch.setattr("relax_rt.supervision.role_process.NATIVE_STACKS_TIMEOUT_S", 5 * WAIT_S)
    seen = tmp_path / "seen"
    program.write_text(f"#!/bin/sh\nwhile [ ! -e {seen} ]; do sleep 0.05; done\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    toy = await world.start(IDLE)
    for _ in range(EXAMINERS):
        toy.process.dump_stacks()
    await asyncio.to_thread(until_logged, world.log, "--- py-spy dump")
    toy.process.kill("killed", "enough")
    try:
        async with asyncio.timeout(WAIT_S):
            assert (await toy.end).cause == "enough"
    finally:
        seen.touch()


async def test_kill_after_the_exit_sends_no_signal_and_changes_no_diagnosis(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = await world.start("raise SystemExit(3)")
    end = time.monotonic() + WAIT_S
    while toy.process.living:
        assert time.monotonic() < end
        await asyncio.sleep(0)
    hit: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, number: hit.append(group))
    toy.process.kill("hang", "too late")
    assert hit == []
    found = await toy.diagnosis()
    assert found.kind == "exception" or found.exit_code == 3
    assert "too late" not in found.cause


async def test_an_exit_is_reported_also_when_its_evidence_cannot_be_examined(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> str:
        raise OSError("the disk is gone")

    monkeypatch.setattr("relax_rt.supervision.role_process.read_tail", refused)
    toy = await world.start(IDLE)
    toy.process.kill("hang", "it stood still")
    found = await toy.diagnosis()
    assert (found.kind, found.cause) == ("hang", "it stood still")
    assert found.last_lines == ["what it left behind cannot be examined (OSError: the disk is gone)"]


async def test_an_orphan_that_may_not_be_killed_is_skipped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have become another user's."""
    real, refused = os.kill, []

    def kill(pid: int, number: int) -> None:
        if number == signal.SIGKILL and not refused:
            refused.append(pid)
            raise PermissionError(1, "Operation not permitted")
        real(pid, number)

    stray = "import subprocess\nsubprocess.Popen(['sleep', '60'], process_group=0)\nraise SystemExit(3)"
    monkeypatch.setattr(os, "kill", kill)
    procfs.become_subreaper()
    try:
        toy = await world.start(stray)
        assert (await toy.diagnosis()).exit_code == 3
    finally:
        # Else orphans of other tests would come to this process, which does not reap them.
        procfs.prctl(procfs.PR_SET_CHILD_SUBREAPER, 0)
    _, status = await asyncio.to_thread(os.waitpid, refused[0], 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


PREPARED = f"""
import os, socket
socket.socket(fileno=os.dup(int(os.environ['RELAX_CONTROL_FD']))).send({encode(PreparedMsg())!r})
{IDLE}
"""


def spare_launch(world: World, code: str) -> Launch:
    return Launch(slot="toy/spare", epoch=0, argv=[sys.executable, "-c", code], env=dict(os.environ), log=world.log)


async def until_event(world: World, kind: str, number: int = 1) -> list[dict[str, Any]]:
    end = time.monotonic() + WAIT_S
    while len(found := [fields for name, fields in world.events if name == kind]) < number:
        assert time.monotonic() < end, world.events
        await asyncio.sleep(0.01)
    return found


async def test_spare_that_hangs_in_prepare_is_killed_and_replaced_with_back_off(world: World) -> None:
    spares = world.spawner.spares
    spares.configure("toy", SpareSpec(1, spare_launch(world, IDLE), 0.2))
    began = time.monotonic()
    spares.keep("toy")
    died = await until_event(world, "spare_died", 2)
    assert {d["reason"] for d in died} == {"not prepared within start_timeout_s = 0.2 s"}
    assert time.monotonic() - began > 0.2 + BACKOFF_FIRST_S + 0.2
    assert died[0]["pid"] != died[1]["pid"] and not procfs.start_time(died[0]["pid"])


async def test_spare_that_cannot_be_started_is_retried() -> None:
    events: list[dict[str, Any]] = []

    async def start_process(launch: Launch) -> StartedProcess:
        raise RuntimeError("no luck")

    spares = Spares(start_process, lambda kind, **fields: events.append(fields))
    spares.configure("toy", SpareSpec(1, Launch(slot="toy/spare", epoch=0, argv=[], env={}, log=Path("/dev/null"))))
    spares.keep("toy")
    end = time.monotonic() + WAIT_S
    while len(events) < 2:
        assert time.monotonic() < end
        await asyncio.sleep(0.01)
    assert "no luck" in events[1]["reason"]
    await spares.close()


async def test_dropped_spares_are_not_assigned_and_can_be_kept_again(world: World) -> None:
    spares, launch = world.spawner.spares, spare_launch(world, PREPARED)
    spares.configure("toy", SpareSpec(1, launch))
    spares.keep("toy")
    (first,) = await until_event(world, "spare_ready")
    assert spares.prepared(launch) and spares.kept == ["toy"]
    spares.drop("toy")
    assert not spares.prepared(launch) and spares.kept == [] and spares.pids == {first["pid"]}
    end = time.monotonic() + WAIT_S
    while spares.pids:
        assert time.monotonic() < end
        await asyncio.sleep(0.01)
    spares.keep("toy")
    await until_event(world, "spare_ready", 2)
    assert not [kind for kind, _ in world.events if kind == "spare_died"]


async def test_rendezvous_socket_of_a_gang_that_was_called_off_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relax_rt.supervision.local.RENDEZVOUS_TIMEOUT_S", 1.0)
    local = LocalExecutor(
        RunConfig.model_validate({"run": {"name": "toy", "job": "toy"}}),
        RunPaths("0badf00d", tmp_path),
        [],
        on_event=lambda event: None,
        on_address=lambda *address: None,
        emit=lambda kind, **fields: None,
    )
    at = await local.rendezvous("trainer/0", 1)
    socket.create_connection((at.host, at.port)).close()
    with pytest.raises(ConnectionRefusedError):
        async with asyncio.timeout(WAIT_S):
            while True:
                socket.create_connection((at.host, at.port)).close()
                await asyncio.sleep(0.05)
    await local.close()
