"""What programs may take, what is left of them, and who sees to it. Real processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from test_program import TASK, Lender, lives, programs_of, said, until

from relax_rt.roles.agentic import program_episodes, program_host
from relax_rt.roles.agentic.episode import EpisodeLimits, PlayedEpisode
from relax_rt.roles.agentic.interface import EpisodeLost, LimitExceeded
from relax_rt.roles.agentic.program import Program, ProgramLimits, exceeded_limit, load_program
from relax_rt.roles.agentic.program_episodes import GatewayUnreachable, ProgramPlayer, gateway_url, program_environment
from relax_rt.roles.agentic.program_host import (
    FILES_PER_PROGRAM,
    RESERVED_FILES,
    ProgramExit,
    ProgramHost,
    ProgramNotStarted,
)
from relax_rt.roles.gateway.api import Access, SessionLimits
from relax_rt.transport.rpc.errors import Refused, RelaxError

SMALL = ProgramLimits(memory_mib=120, processes=5, open_files=40, file_mib=1, output_mib=1)
PYTHON = (sys.executable, "-S", "-c")
AWAY = """
import os, time
# Twice a fork, and a session of its own: nothing of it is the program's child or in its group.
if not os.fork():
    os.setsid()
    if not os.fork():
        open("away", "w").write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
os.wait()
while not os.path.exists("away") or not open("away").read():
    time.sleep(0.01)
"""


def over(ended: ProgramExit, limits: ProgramLimits = SMALL) -> str:
    return exceeded_limit(ended.over, ended.code, program_episodes.stderr_tail(ended), limits)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ([*PYTHON, "import time; x = bytearray(200 << 20); time.sleep(600)"], "more than 120 MiB"),
        ([*PYTHON, "bytearray(2 << 30)"], "more than 120 MiB"),
        (["/bin/sh", "-c", "for i in 1 2 3 4 5 6; do sleep 600 & done; wait"], "more than 5 processes"),
        (
            ["/bin/sh", "-c", "(setsid sleep 600 &) ; for i in 1 2 3 4 5; do (setsid sleep 600 &) ; done; sleep 600"],
            "5",
        ),
        ([*PYTHON, "[open('/dev/null') for _ in range(100)]"], "more than 40 files"),
        ([*PYTHON, "open('big', 'wb').write(bytes(3 << 20))"], "a file of more than 1 MiB"),
        (["/bin/sh", "-c", "exec head -c 3000000 /dev/zero > big"], "a file of more than 1 MiB"),
        (["/usr/bin/yes"], "printed more than 1 MiB"),
        (["/bin/sh", "-c", "yes >&2"], "printed more than 1 MiB"),
    ],
)
async def test_what_takes_more_than_it_may_is_ended_and_the_limit_is_named(
    tmp_path: Path, command: list[str], why: str
) -> None:
    async with ProgramHost(tmp_path, limits=SMALL) as host:
        neighbour = asyncio.create_task(host.run(["/bin/sh", "-c", "sleep 0.5; echo fine"], {}))
        async with asyncio.timeout(120):
            ended = await host.run(command, dict(os.environ))
        assert why in over(ended) and "roles.env.options." in over(ended), ended
        assert (await neighbour).stdout == "fine\n"
        await until(lambda: not programs_of(host.spawner))


async def test_a_program_within_its_limits_is_not_blamed_for_them(tmp_path: Path) -> None:
    async with ProgramHost(tmp_path, limits=SMALL) as host:
        fine = await host.run(["/bin/sh", "-c", "sleep 1 & sleep 1 & wait; head -c 900000 /dev/zero"], {})
        failed = await host.run(["/bin/sh", "-c", "echo no >&2; exit 1"], {})
    assert (fine.code, over(fine)) == (0, "") and (failed.code, over(failed)) == (1, "")


@pytest.mark.parametrize("end", ["by itself", "cancelled", "keeper", "spawner", "slot"])
async def test_what_a_program_leaves_anywhere_ends_with_it(tmp_path: Path, end: str) -> None:
    host = ProgramHost(tmp_path)
    async with host:
        script = AWAY if end == "by itself" else f"{AWAY}\ntime.sleep(600)"
        run = asyncio.create_task(host.run([*PYTHON, script], {}))
        told = tmp_path / "away"
        await until(lambda: told.exists() and told.read_text())
        away = int(told.read_text())
        assert end == "by itself" or lives(away)
        (keeper,) = programs_of(host.spawner) or [0]
        match end:
            case "cancelled":
                run.cancel()
            case "keeper":
                os.kill(keeper, signal.SIGKILL)
            case "spawner":
                os.kill(host.spawner, signal.SIGKILL)
        if end != "slot":
            (result,) = await asyncio.gather(run, return_exceptions=True)
            if end in ("by itself", "cancelled"):
                assert not lives(away), "it is there when the episode has ended"
            if end in ("by itself", "keeper"):
                assert isinstance(result, ProgramExit) and result.code == (0 if end == "by itself" else -9)
            await until(lambda: not lives(away))
    if end == "slot":
        assert not lives(away)
        await asyncio.gather(run, return_exceptions=True)


# --- the spawner is watched


async def test_a_spawner_that_hangs_is_replaced_and_its_programs_are_lost(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    tell: Callable[..., None] = lambda kind, **fields: events.append({"kind": kind, **fields})  # noqa: E731
    async with ProgramHost(tmp_path, on_event=tell, ping_interval_s=0.5) as host:
        assert (await host.run(["/bin/sleep", "1"], {})).code == 0, "one that answers is left alone"
        hung = host.spawner
        runs = [asyncio.create_task(host.run(["/bin/sleep", "600"], {})) for _ in range(2)]
        await until(lambda: len(programs_of(hung)) == 2)
        keepers = programs_of(hung)
        os.kill(hung, signal.SIGSTOP)
        later = asyncio.create_task(host.run(["/bin/echo", "later"], {}))
        for run in runs:
            with pytest.raises(EpisodeLost, match=r"did not answer for 2 s"):
                await asyncio.wait_for(run, 120)
        with pytest.raises(EpisodeLost):
            await later
        assert (await host.run(["/bin/echo", "again"], {})).stdout == "again\n"
        await until(lambda: not any(map(lives, keepers)))
        assert not lives(hung) and host.spawners_lost == 1
        (event,) = events
        assert event["kind"] == "spawner_lost" and event["programs"] == 3 and "did not answer" in event["why"]


async def test_a_spawner_that_dies_at_rest_is_replaced_at_once_and_none_that_never_lives_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_host, "MAX_CRASHES", 2)
    async with ProgramHost(tmp_path) as host:
        for _ in range(2):
            first = host.spawner
            os.kill(first, signal.SIGKILL)
            await until(lambda: host.spawner not in (0, first) or host.failed.done())  # noqa: B023
            if not host.failed.done():
                # Programs that come to their end show that it was chance.
                assert (await host.run(["/bin/true"], {})).code == 0
        assert not host.failed.done() and host.spawners_lost == 2
        for _ in range(2):
            first = host.spawner
            os.kill(first, signal.SIGKILL)
            await until(lambda: host.spawner not in (0, first) or host.failed.done())  # noqa: B023
        with pytest.raises(RelaxError, match="2 spawners of programs ended"):
            await host.failed


# --- room


async def test_programs_wait_for_a_place(tmp_path: Path) -> None:
    async with ProgramHost(tmp_path, files=RESERVED_FILES + 3 * FILES_PER_PROGRAM) as host:
        assert host.capacity == 3
        most = 0

        async def one() -> int:
            nonlocal most
            async with host.reserve():
                most = max(most, len(host._running) + 1)
                return (await host.run(["/bin/sleep", "0.1"], {})).code

        assert await asyncio.gather(*(one() for _ in range(9))) == [0] * 9
        assert most == 3


async def test_no_room_for_files_is_told_apart_and_passes(tmp_path: Path) -> None:
    async with ProgramHost(tmp_path) as host:
        assert (await host.run(["/bin/true"], {})).code == 0
        for pid, why in ((host.spawner, "too many open files"), (os.getpid(), "Too many open files")):
            before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            # What is open stays open, and nothing more can be.
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
            try:
                with pytest.raises(ProgramNotStarted, match=why):
                    await host.run(["/bin/true"], {})
            finally:
                resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
            assert (await host.run(["/bin/true"], {})).code == 0


FULL = """
import errno, os
fork, spawner, left = os.fork, os.getpid(), ["one"]

def refused():
    # The spawner's first one, then that of the first keeper.
    if os.getpid() == spawner:
        return left and left.pop()
    told = os.environ["REFUSED"]
    if not os.path.exists(told):
        open(told, "w").close()
        return True

def full():
    if refused():
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return fork()

os.fork = full
"""


async def test_no_room_for_a_process_is_told_apart_and_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "full_machine.py").write_text(FULL)
    (tmp_path / "agent.py").write_text("print('here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("REFUSED", str(tmp_path / "refused"))
    async with ProgramHost(tmp_path, ["full_machine"]) as host:
        for keeper in (False, True):
            assert not (tmp_path / "refused").exists()
            with pytest.raises(ProgramNotStarted, match="no new process: Resource temporarily unavailable"):
                await host.run(["python", "agent.py"], {})
            assert (tmp_path / "refused").exists() == keeper
        assert (await host.run(["python", "agent.py"], {})).stdout == "here\n"
        assert not host.spawners_lost


MANY = """
import asyncio, resource, sys
from pathlib import Path
from relax_rt.roles.agentic.program_host import ProgramHost
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 420))
async def main():
    async with ProgramHost(Path(sys.argv[1])) as host:
        async def one(n):
            async with host.reserve():
                return (await host.run(["/bin/sh", "-c", f"sleep 0.3; echo {n}"], {})).stdout
        print(host.capacity, await asyncio.gather(*(one(n) for n in range(150))) == [f"{n}\\n" for n in range(150)])
asyncio.run(main())
"""


def test_more_programs_than_there_are_descriptors_all_come_to_their_end(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", MANY, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert ran.stdout == "82 True\n", ran.stderr


# --- episodes


class Full(Lender):
    """A gateway that has no room for a while."""

    def __init__(self, times: int) -> None:
        super().__init__(said("a"))
        self.times = times

    @contextlib.asynccontextmanager
    async def session(self, name: str, limits: SessionLimits) -> AsyncIterator[Lender]:
        self.times -= 1
        if self.times >= 0:
            raise Refused(f"session {name!r}", why="64 are open, the bound")
        async with super().session(name, limits) as lent:
            yield lent


async def play(folder: Path, lender: Lender, script: str, limits: ProgramLimits = SMALL) -> PlayedEpisode:
    bounds = EpisodeLimits(max_turns=4, max_new_tokens=8, turn_timeout_s=60, episode_timeout_s=120)
    program = Program(argv=("/bin/sh", "-c", script), cwd=str(folder), limits=limits)
    async with ProgramHost(folder, limits=limits) as host:
        programs = ProgramPlayer(program, host, lender, bounds, 100, False, lambda count: None)  # type: ignore[arg-type]
        return await programs.play("7.1", TASK, 11, temperature=0.5)


async def test_an_episode_over_a_limit_has_failed_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(LimitExceeded, match=r"printed more than 1 MiB \(roles.env.options.output_mib\)"):
        await play(tmp_path, Lender(said("a")), "yes")
    script = f"{sys.executable} -S -c \"open('x', 'wb').write(bytes(3 << 20))\""
    with pytest.raises(LimitExceeded, match=r"a file of more than 1 MiB.*exit code 1: .*File too large"):
        await play(tmp_path, Lender(said("a", exhausted="tokens")), script)


async def test_an_episode_waits_for_room_and_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_episodes, "RETRY_PAUSES_S", (0.01, 0.02, 0.03))
    played = await play(tmp_path, Full(3), """echo '{"reward": 1}'""")
    assert played.reward == 1
    with pytest.raises(EpisodeLost, match=r"could not be started within 0\.06 s: .*64 are open"):
        await play(tmp_path, Full(4), "true")


def test_a_program_has_the_address_that_holds_on_its_node() -> None:
    here = Access("http://127.0.0.1:9/v1", "key", "gateway/0#1", "head", "http://10.1.0.1:9/v1")
    assert gateway_url(here, "head") == here.base_url and gateway_url(here, "b") == here.remote_url
    with pytest.raises(
        GatewayUnreachable, match=r"from node 'b'.*on node 'head' and listens there for that machine alone"
    ):
        gateway_url(Access("http://127.0.0.1:9/v1", "key", "gateway/0#1", "head"), "b")
    env = program_environment(Program(argv=("x",), cwd="/"), here.remote_url, "key")
    assert env["OPENAI_BASE_URL"] == here.remote_url and env["ANTHROPIC_BASE_URL"] == "http://10.1.0.1:9"
    assert env["NO_PROXY"].endswith("127.0.0.1,localhost,10.1.0.1")


def test_limits_are_options(tmp_path: Path) -> None:
    (tmp_path / "a.py").touch()
    options = {"memory_mib": 0, "processes": 3, "open_files": 64, "file_mib": 5, "output_mib": 2}
    found = load_program("python a.py", options, tmp_path)
    assert found.limits == ProgramLimits(memory_mib=None, processes=3, open_files=64, file_mib=5, output_mib=2)
    with pytest.raises(RelaxError, match="open_files"):
        load_program("python a.py", {"open_files": 3}, tmp_path)
