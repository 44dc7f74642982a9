"""Environments that block, in real worker processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from agentic_parts import Engine, factory, limits, talk

from relax_rt.roles.agentic import Observation, Reply, Step, Task
from relax_rt.roles.agentic.episode import play
from relax_rt.roles.agentic.frames import Spec
from relax_rt.roles.agentic.pool import Broken, Lost, Pool, Stuck
from relax_rt.transport.errors import RelaxError

GAME = '''
import os, time
from relax_rt.roles.agentic import Observation, Step

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
        if self.question == "exit":
            raise SystemExit("stop it all")
        return Step(reward=1.0 + self.bonus, done=True)
'''
REPLY = Reply(text="x", message={"role": "assistant", "content": "x"}, finish_reason="stop")


def task(question: str) -> Task:
    return Task(index=0, item="i", split="train", seed=1, question=question)


@asynccontextmanager
async def pool_of(folder: Path, size: int = 1, timeout_s: float = 20.0, name: str = "Game") -> AsyncIterator[Pool]:
    (folder / "game.py").write_text(GAME)
    async with Pool(Spec(f"game.py:{name}", {"bonus": 0.5}, str(folder)), size, timeout_s) as pool:
        yield pool


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_episodes_of_one_process_and_their_errors_do_not_touch_each_other(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        good, bad = await pool.environment("1.0"), await pool.environment("1.1")
        seen = await good.reset(task("play"))
        assert isinstance(seen, Observation) and isinstance(seen.messages, list)
        pid = int(seen.messages[0]["content"])
        assert pid != os.getpid()
        await bad.reset(task("exit"))
        with pytest.raises(Broken, match=r"in step 1 of 1.1.*SystemExit: stop it all at .*game.py:\d+"):
            await bad.step(REPLY)
        assert await good.step(REPLY) == Step(reward=1.5, done=True)
        await good.close()
    assert not alive(pid)


async def test_one_that_hangs_is_killed_and_named_and_its_neighbours_are_lost(tmp_path: Path) -> None:
    async with pool_of(tmp_path, timeout_s=1.0) as pool:
        stuck, neighbour = await pool.environment("1.0"), await pool.environment("1.1")
        seen = await stuck.reset(task("hang"))
        assert isinstance(seen, Observation)
        await neighbour.reset(task("play"))
        found = await asyncio.gather(stuck.step(REPLY), neighbour.step(REPLY), return_exceptions=True)
        assert isinstance(found[0], Stuck) and "in step 1 of 1.0" in str(found[0])
        # It waited for its turn: the time was not its own.
        assert isinstance(found[1], Lost) and "in step 1 of 1.0" in str(found[1])
        assert not alive(int(seen.messages[0]["content"]))  # type: ignore[index]
        again = await pool.environment("1.1")
        await again.reset(task("play"))
        assert (await again.step(REPLY)).reward == 1.5 and pool.killed == 1


async def test_one_that_ends_its_process_is_blamed_for_it(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        dying = await pool.environment("2.0")
        await dying.reset(task("die"))
        with pytest.raises(Broken, match="the process ended with exit code 3"):
            await dying.step(REPLY)
        await dying.close()


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
