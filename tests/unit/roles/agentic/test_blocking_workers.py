"""Environments that block, in real worker processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from episode_kit import Engine, factory, limits, talk

from relax_rt.roles.agentic import Observation, Reply, Step, Task
from relax_rt.roles.agentic.episode import play
from relax_rt.roles.agentic.interface import EnvironmentFailed, EnvironmentStuck, EpisodeLost
from relax_rt.roles.agentic.worker_process import WorkerSetup
from relax_rt.roles.agentic.workers import EnvironmentPool
from relax_rt.transport.rpc.errors import RelaxError

GAME = '''
import os, subprocess, time
from pathlib import Path
from relax_rt.roles.agentic import Observation, Step

HERE = str(Path(__file__).parent)

class Game:
    """Does what its task's question says."""

    def __init__(self, bonus=0.0):
        self.bonus = bonus

    def reset(self, task):
        print("to standard output, which is nobody's wire")
        if task.question == "hang in reset":
            time.sleep(600)
        self.question = task.question
        return Observation(messages=[{"role": "user", "content": str(os.getpid())}])

    def step(self, reply):
        if self.question == "hang":
            time.sleep(600)
        if self.question == "die":
            os._exit(3)
        if self.question in ("hide", "fork"):
            for _ in range(1 if self.question == "hide" else 40):
                subprocess.Popen(["sleep", "600"], start_new_session=True, env={"HIDDEN": HERE})
            time.sleep(600 if self.question == "fork" else 0)
        if self.question == "eat":
            held = bytearray(b"x") * (400 << 20)
            time.sleep(600)
        if self.question == "exit":
            raise SystemExit("stop it all")
        return Step(reward=1.0 + self.bonus, done=True)
'''
REPLY = Reply(text="x", message={"role": "assistant", "content": "x"}, finish_reason="stop")


def task(question: str) -> Task:
    return Task(index=0, item="i", split="train", seed=1, question=question)


@asynccontextmanager
async def pool_of(
    folder: Path, size: int = 1, timeout_s: float = 20.0, name: str = "Game", **limits: int
) -> AsyncIterator[EnvironmentPool]:
    (folder / "game.py").write_text(GAME)
    setup = WorkerSetup(f"game.py:{name}", {"bonus": 0.5}, str(folder))
    os.environ["GAME_FOLDER"] = str(folder)
    async with EnvironmentPool(setup, size, timeout_s, blocking=True, **limits) as pool:
        yield pool


def living(folder: Path) -> list[int]:
    """Worker processes of a pool, and what its game has started."""
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and _belongs(path, str(folder))]


def _belongs(process: Path, folder: str) -> bool:
    try:
        command, environment = ((process / name).read_bytes().split(b"\0") for name in ("cmdline", "environ"))
    except OSError:
        return False
    is_worker = b"relax_rt.roles.agentic.worker_process" in command and f"GAME_FOLDER={folder}".encode() in environment
    return is_worker or f"HIDDEN={folder}".encode() in environment


async def test_episodes_of_one_process_and_their_errors_do_not_touch_each_other(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        good, bad = await pool.environment("1.0"), await pool.environment("1.1")
        seen = await good.reset(task("play"))
        assert isinstance(seen, Observation) and isinstance(seen.messages, list)
        assert len(living(tmp_path)) == 1
        await bad.reset(task("exit"))
        with pytest.raises(EnvironmentFailed, match=r"in step 1 of 1.1.*SystemExit: stop it all at .*game.py:\d+"):
            await bad.step(REPLY)
        assert await good.step(REPLY) == Step(reward=1.5, done=True)
        await good.close()
    assert not living(tmp_path)


async def test_one_that_hangs_is_killed_and_named_and_its_neighbours_are_lost(tmp_path: Path) -> None:
    async with pool_of(tmp_path, timeout_s=3.0) as pool:
        stuck, neighbour = await pool.environment("1.0"), await pool.environment("1.1")
        await stuck.reset(task("hang"))
        await neighbour.reset(task("play"))
        found = await asyncio.gather(stuck.step(REPLY), neighbour.step(REPLY), return_exceptions=True)
        assert isinstance(found[0], EnvironmentStuck) and "in step 1 of 1.0" in str(found[0])
        # It waited for its turn: the time was not its own.
        assert isinstance(found[1], EpisodeLost) and "in step 1 of 1.0" in str(found[1])
        assert not living(tmp_path)
        again = await pool.environment("1.1")
        await again.reset(task("play"))
        assert (await again.step(REPLY)).reward == 1.5 and pool.pool.replaced == 1


async def test_one_that_ends_its_process_is_blamed_for_it(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        dying = await pool.environment("2.0")
        await dying.reset(task("die"))
        with pytest.raises(EnvironmentFailed, match="the process ended: exit code 3"):
            await dying.step(REPLY)
        await dying.close()


async def test_what_an_environment_has_started_ends_with_its_process(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        playing = await pool.environment("1.0")
        await playing.reset(task("hide"))
        await playing.step(REPLY)
        async with asyncio.timeout(120):
            while len(living(tmp_path)) != 2:  # noqa: ASYNC110 - it may not have become what it is to be yet
                await asyncio.sleep(0.02)
    assert not living(tmp_path)


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("fork", r"more than 16 processes \(roles.env.worker_processes"),
        ("eat", "more than 256 MiB .*worker_memory_mib"),
    ],
)
async def test_a_worker_that_takes_too_much_is_killed_with_all_that_it_started(
    tmp_path: Path, question: str, words: str
) -> None:
    async with pool_of(tmp_path, processes=16, memory_mib=256) as pool:
        greedy = await pool.environment("3.0")
        await greedy.reset(task(question))
        with pytest.raises(EnvironmentFailed, match=f"in step 1 of 3.0.*{words}"):
            await greedy.step(REPLY)
        assert not living(tmp_path)


async def test_an_environment_that_cannot_be_loaded_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(RelaxError, match=r"did you mean 'Game'"):
        async with pool_of(tmp_path, name="Gamee"):
            raise AssertionError


async def test_an_episode_is_played_in_a_worker_as_it_is_here(tmp_path: Path) -> None:
    async with pool_of(tmp_path, 2) as pool:
        made = factory(lambda: None)

        async def one(number: int) -> float:
            environment = await pool.environment(f"{number}")
            said = talk(Engine(lambda prompt: "hello").generate)
            return (await play(made, environment, task("play"), said, limits())).reward

        assert await asyncio.gather(*(one(n) for n in range(20))) == [1.5] * 20


async def test_a_cancelled_call_does_not_confuse_the_next_ones(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        first, second = await pool.environment("1"), await pool.environment("2")
        call = asyncio.create_task(first.reset(task("play")))
        await asyncio.sleep(0)
        call.cancel()
        seen = await second.reset(task("play"))
        assert isinstance(seen, Observation) and (await second.step(REPLY)).done
