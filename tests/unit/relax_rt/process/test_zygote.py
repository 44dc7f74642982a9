"""Real zygotes: what their children are, what kills them, and who goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

sys.path.insert(0, str(Path(__file__).parent / "zygote_toys"))

from zygote_world import KEY, RUN_ID, TOYS, WAIT_S, World

from relax_rt.interfaces.agent import Diagnosis
from relax_rt.process import procfs, zygote
from relax_rt.process.zygote import FromZygote
from relax_rt.process.zygote_pool import ForkFailed, ForkRequest, ZygoteKey, ZygoteProcess
from relax_rt.supervision.role_process import Launch


@pytest.fixture(autouse=True)
def subreaper() -> Iterator[None]:
    procfs.become_subreaper()
    yield
    procfs.prctl(procfs.PR_SET_CHILD_SUBREAPER, 0)
    assert procfs.with_environment(f"RELAX_RUN_ID={RUN_ID}") == set()


def open_descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def command_of(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")


async def test_child_belongs_to_the_owner_and_inherits_no_state_of_the_zygote(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        probe = await world.fork(nice=5, OWN="yes")
        found = probe.found
        assert found["parent"] == os.getpid() and found["session"] == found["pid"]
        assert found["environment"] == {
            "RELAX_SLOT": "toy/0",
            "RELAX_EPOCH": "7",
            "OWN": "yes",
            "RELAX_CONTROL_FD": str(found["control"]),
        }
        assert found["descriptors"] == [0, 1, 2, found["control"]]
        assert found["nice"] == 5
        assert command_of(found["pid"]) == [sys.executable.encode(), b"-m", b"relax_rt.hosting.host", b"toy/0"]
        assert procfs.has_environment(found["pid"], "RELAX_SLOT=toy/0", "RELAX_EPOCH=7", f"RELAX_RUN_ID={RUN_ID}")
        assert probe.let_go() == 0
        assert "probe is here" in world.log.read_text()


async def test_children_of_one_zygote_draw_different_numbers(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        probes = [await world.fork() for _ in range(3)]
        drawn = [number for probe in probes for number in probe.found["drawn"]]
        assert len(set(drawn)) == len(drawn)
        assert [probe.let_go() for probe in probes] == [0, 0, 0]


async def test_forks_leave_no_descriptor_and_no_zombie(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        (await world.fork()).let_go()
        pids = [os.getpid(), *world.zygotes.pids]
        before = [open_descriptors(pid) for pid in pids]
        for _ in range(10):
            (await world.fork()).let_go()
        assert [open_descriptors(pid) for pid in pids] == before
        kin = [procfs.stat_fields(pid) for pid in procfs.pids()]
        assert [fields for fields in kin if fields is not None and int(fields[1]) in world.zygotes.pids] == []


async def test_child_that_raises_ends_and_is_no_second_zygote(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        probe = await world.fork(PROBE="raise")
        assert probe.let_go() == 1
        assert "RuntimeError: the probe broke" in world.log.read_text()
        (await world.fork()).let_go()


async def test_orphans_that_were_only_forked_are_found(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        probe = await world.fork(PROBE="fork")
        stray = int(await asyncio.to_thread(probe.control.recv, 64))
        os.kill(probe.found["pid"], signal.SIGKILL)
        assert probe.let_go() == -signal.SIGKILL
        assert procfs.start_time(stray), "in a session of its own, it lives on"
        await asyncio.to_thread(procfs.kill_orphans, ["RELAX_SLOT=toy/0", "RELAX_EPOCH=7"])
        await world.until(lambda: not procfs.start_time(stray))
        procfs.reap_all()


async def test_killed_zygotes_are_restarted_and_their_children_live_on(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        probe = await world.fork()
        for kept in (world.pair.light, world.pair.heavy):
            assert kept.living is not None
            os.kill(kept.living.pid, signal.SIGKILL)
        await world.until(lambda: len(world.zygote_events("zygote_ready", "heavy")) == 2)
        assert [e["reason"] for e in world.zygote_events("zygote_died", "light")] == ["ended by SIGKILL"]
        assert procfs.start_time(probe.found["pid"])
        again = await world.fork()
        assert [again.let_go(), probe.let_go()] == [0, 0]


async def test_stopped_zygote_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_rt.process.zygote_pool.FORK_TIMEOUT_S", 0.3)
    async with World(tmp_path) as world:
        (await world.fork()).let_go()
        heavy = world.pair.heavy.living
        assert heavy is not None
        os.kill(heavy.pid, signal.SIGSTOP)
        with pytest.raises(ForkFailed, match="did not answer"):
            await world.fork()
        monkeypatch.setattr("relax_rt.process.zygote_pool.FORK_TIMEOUT_S", WAIT_S)
        await world.until(lambda: len(world.zygote_events("zygote_ready", "heavy")) == 2)
        (await world.fork()).let_go()


def lose_fork_reply(monkeypatch: pytest.MonkeyPatch, died: list[ZygoteProcess]) -> None:
    """The next zygote that has forked dies before it is heard."""
    take = ZygoteProcess._on_message

    def lose(self: ZygoteProcess, message: FromZygote) -> None:
        if isinstance(message, zygote.ForkedMsg) and not died:
            died.append(self)
            self.kill("died between the fork and the word of it")
        else:
            take(self, message)

    monkeypatch.setattr(ZygoteProcess, "_on_message", lose)


async def test_forked_process_that_was_never_reported_ends_before_it_does_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = set(procfs.children(os.getpid()))
    async with World(tmp_path) as world:
        (await world.fork()).let_go()
        world.log.write_text("")
        died: list[ZygoteProcess] = []
        lose_fork_reply(monkeypatch, died)
        with pytest.raises(ForkFailed, match="died between the fork and the word of it"):
            await world.fork()
        assert died
        await world.until(lambda: not set(procfs.children(os.getpid())) - world.zygotes.pids - others)
        assert world.log.read_text() == "", "the probe was not even called"


async def test_process_that_is_spawned_after_an_unreported_fork_is_the_only_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = "import os, socket; c = socket.socket(fileno=int(os.environ['RELAX_CONTROL_FD'])); c.recv(1)"
    async with World(tmp_path) as world:
        (await world.fork()).let_go()
        died: list[ZygoteProcess] = []
        lose_fork_reply(monkeypatch, died)
        end: asyncio.Future[Diagnosis] = asyncio.get_running_loop().create_future()
        launch = Launch(
            slot="toy/0",
            epoch=7,
            argv=[sys.executable, "-c", idle],
            env={**os.environ, "RELAX_SLOT": "toy/0", "RELAX_EPOCH": "7"},
            log=tmp_path / "toy.log",
            key=KEY,
            preload=("zygote_probe",),
        )
        role = await world.spawner.spawn(launch, lambda message: None, end.set_result)
        assert died and [e["slot"] for e in world.events if e["kind"] == "spawned_without_zygote"] == ["toy/0"]

        def bearers() -> set[int]:
            return {pid for pid in procfs.children(os.getpid()) if procfs.has_environment(pid, "RELAX_SLOT=toy/0")}

        await world.until(lambda: bearers() == {role.pid})
        assert "probe is here" not in launch.log.read_text()
        role.kill("killed", "enough")
        assert (await end).pid == role.pid


async def test_module_that_starts_a_thread_is_named_and_left_out(tmp_path: Path) -> None:
    async with World(tmp_path, ["zygote_thread", "zygote_probe"]) as world:
        probe = await world.fork(needs=["zygote_probe", "zygote_thread"])
        assert "zygote_thread" not in probe.found["modules"]
        assert probe.let_go() == 0
        (died,) = world.zygote_events("zygote_died", "heavy")
        assert died["reason"].startswith("no fork is safe any more after zygote_thread: 2 threads")


async def test_light_zygote_that_is_never_safe_to_fork_is_given_up_and_roles_are_spawned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relax_rt.supervision.spawner.ALWAYS_IMPORTED", ("zygote_thread",))
    monkeypatch.setattr("relax_rt.process.zygote_pool.BACKOFF_FIRST_S", 0.2)
    began = time.monotonic()
    async with World(tmp_path) as world:
        (given_up,) = await world.until(lambda: world.zygote_events("zygote_given_up", "light"))
        assert time.monotonic() - began >= 0.2 + 0.4, "with back-off between them"
        assert given_up["reason"].startswith("no fork is safe any more after zygote_thread: 2 threads")
        assert len(world.zygote_events("zygote_died", "light")) == 2
        # Nobody waits for what does not come.
        monkeypatch.setattr("relax_rt.process.zygote_pool.FORK_TIMEOUT_S", 600.0)
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(ForkFailed, match="2 threads"):
                await world.fork()


async def test_heavy_zygote_that_all_imports_together_make_unsafe_is_given_up(tmp_path: Path) -> None:
    async with World(tmp_path, ["zygote_loop", "zygote_probe"]) as world:
        (given_up,) = await world.until(lambda: world.zygote_events("zygote_given_up", "heavy"))
        assert given_up["reason"].startswith("no fork is safe any more after its imports: an open event loop")
        await world.until(lambda: world.pair.heavy._task and world.pair.heavy._task.done())
        assert not world.zygote_events("zygote_died", "heavy"), "it did not import everything again"
        light = world.pair.light.living
        request = ForkRequest(KEY, "", [], {}, 0, {}, needs=("zygote_probe",))
        assert await world.pair.choose(request) is light


async def test_module_that_cannot_be_imported_delays_no_fork(tmp_path: Path) -> None:
    async with World(tmp_path, ["no_such_module", "zygote_probe"]) as world:
        assert (await world.fork(needs=["no_such_module", "zygote_probe"])).let_go() == 0


async def test_light_roles_do_not_wait_for_heavy_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZYGOTE_GATE", str(tmp_path / "gate"))
    monkeypatch.setattr("relax_rt.supervision.spawner.ALWAYS_IMPORTED", ("relax_rt.hosting.host", "zygote_probe"))
    async with World(tmp_path, ["zygote_slow"]) as world:
        light = await world.fork(needs=())
        heavy = asyncio.create_task(world.fork(needs=["zygote_slow"]))
        assert "zygote_slow" not in light.found["modules"]
        assert light.let_go() == 0
        assert not heavy.done()
        (tmp_path / "gate").touch()
        probe = await heavy
        assert "zygote_slow" in probe.found["modules"]
        assert probe.let_go() == 0


async def test_role_of_another_interpreter_or_environment_is_not_forked(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        for key in (ZygoteKey("/opt/python", ()), ZygoteKey(KEY.python, (("A", "b"),))):
            with pytest.raises(ForkFailed, match="no zygote for its interpreter and environment"):
                await world.zygotes.fork(ForkRequest(key, "", [], {}, 0, {}))


async def test_missing_interpreter_is_the_reason_of_the_failed_fork(tmp_path: Path) -> None:
    world = World(tmp_path)
    nowhere = ZygoteKey("/nonexistent/python", ())
    world.zygotes.preload(nowhere, "", [])
    async with world:
        with pytest.raises(ForkFailed, match="No such file or directory"):
            await world.zygotes.fork(ForkRequest(nowhere, "", [], {}, 0, {}))
        (await world.fork()).let_go()


def test_death_of_the_agent_takes_zygotes_and_roles_along(tmp_path: Path) -> None:
    command = [sys.executable, str(TOYS / "zygote_agent.py"), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        pids = [int(pid) for pid in agent.stdout.readline().split()]
        agent.kill()
    assert len(pids) == 3
    end = time.monotonic() + WAIT_S
    while any(map(procfs.start_time, pids)) and time.monotonic() < end:
        procfs.reap_all()
        time.sleep(0.01)
    assert not any(map(procfs.start_time, pids))
    procfs.reap_all()


def check_hazard(code: str) -> str:
    lines = ["import sys", "from relax_rt.process.zygote import fork_hazard, leaked_context", code]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_forks_are_refused_where_they_are_not_safe() -> None:
    assert check_hazard("print(fork_hazard() or leaked_context() or 'fit')") == "fit"
    thread = "import threading; threading.Thread(target=threading.Event().wait, name='x', daemon=True).start()"
    assert check_hazard(f"{thread}; print(fork_hazard())").startswith("2 threads (")
    assert check_hazard("import zmq; c = zmq.Context.instance(); print(fork_hazard())") == "a ZeroMQ context exists"
    assert check_hazard("import zmq; c = zmq.Context(); print(leaked_context())") == "an open ZeroMQ context"
    loop = "import asyncio; l = asyncio.new_event_loop(); print(leaked_context())"
    assert check_hazard(loop).startswith("an open event loop, asyncio.")
    running = "import asyncio\nasync def main(): print(fork_hazard())\nasyncio.run(main())"
    assert check_hazard(running) == "an event loop is running"
    cuda = "import types; t = types.ModuleType('torch'); t.cuda = types.SimpleNamespace(is_initialized=lambda: True)"
    assert check_hazard(f"{cuda}; sys.modules['torch'] = t; print(fork_hazard())") == "torch has initialised CUDA"


def test_this_test_process_itself_would_be_refused() -> None:
    with zmq.Context():
        thread = threading.Thread(target=time.sleep, args=(0.05,))
        thread.start()
        assert "threads" in zygote.fork_hazard()
        thread.join()
