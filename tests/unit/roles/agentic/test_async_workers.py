"""Environments and functions that are async, in real worker processes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from episode_kit import Engine, factory, limits, numbers, talk
from test_blocking_workers import REPLY, living, task

from relax_rt.roles.agentic import Observation, Step
from relax_rt.roles.agentic.episode import PlayedEpisode, play_game
from relax_rt.roles.agentic.interface import EnvironmentFailed, EnvironmentStuck, EpisodeLost
from relax_rt.roles.agentic.user_tasks import AbandonedTasks
from relax_rt.roles.agentic.worker_process import WorkerSetup
from relax_rt.roles.agentic.workers import EnvironmentPool

GAME = '''
import asyncio, os, time
from relax_rt.roles.agentic import EpisodeOver, Observation, Step

async def endure():
    while True:
        try:
            await asyncio.sleep(1)
        except BaseException:
            pass

class Game:
    """Does what its task's question says."""

    async def reset(self, task):
        self.question, self.task, self.steps = task.question, asyncio.current_task(), 0
        return Observation(messages=[{"role": "user", "content": str(os.getpid())}])

    async def step(self, reply):
        self.steps += 1
        match self.question:
            case "nap":
                await asyncio.sleep(0.5)
            case "hang" if self.steps == 1:
                await asyncio.sleep(600)
            case "endure":
                await endure()
            case "block":
                await asyncio.sleep(0.3)
                await asyncio.create_task(self.block())
            case "die":
                os._exit(3)
            case "exit":
                raise SystemExit("stop it all")
            case "same task":
                assert asyncio.current_task() is self.task
        return Step(reward=1.0, done=True)

    async def block(self):
        time.sleep(600)

async def play(task, chat, *, bonus=0.0):
    """Does what its task's question says."""
    first = [{"role": "user", "content": "count"}]
    one = await chat.say(first)
    chat.reward(0.25)
    match task.question:
        case "two":
            more = [*first, one.message, {"role": "user", "content": "next"}]
            other = chat.say([{"role": "user", "content": "x"}])
            two, other = await asyncio.gather(chat.say(more, previous=one), other)
            assert two.text == "2" and other.text == "1", (two.text, other.text)
            chat.reward(0.5, two)
        case "on and on":
            while True:
                await chat.say(first)
        case "impatient":
            try:
                await asyncio.wait_for(chat.say([{"role": "user", "content": "slow"}]), 0.1)
            except TimeoutError:
                pass
        case "fail":
            raise KeyError("board")
        case "wrong":
            chat.reward(float("nan"))
        case "endure":
            await endure()
        case "block":
            time.sleep(600)
    return bonus
'''


@asynccontextmanager
async def pool_of(
    folder: Path, name: str = "Game", timeout_s: float = 20.0, **how: Any
) -> AsyncIterator[EnvironmentPool]:
    (folder / "game.py").write_text(GAME)
    options = {"bonus": 1.0} if name == "play" else {}
    setup = WorkerSetup(f"game.py:{name}", options, str(folder))
    os.environ["GAME_FOLDER"] = str(folder)
    async with EnvironmentPool(setup, 1, timeout_s, blocking=False, **how) as pool:
        yield pool


async def begun(pool: EnvironmentPool, *questions: str) -> list[Any]:
    found = [await pool.environment(f"1.{n}") for n in range(len(questions))]
    for one, question in zip(found, questions, strict=True):
        assert isinstance(await one.reset(task(question)), Observation)
    return found


async def test_episodes_of_one_process_are_played_side_by_side(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        split_games = await begun(pool, *["nap"] * 40, "exit", "same task")
        began = time.monotonic()
        *napped, ended, same = await asyncio.gather(*(one.step(REPLY) for one in split_games), return_exceptions=True)
        assert time.monotonic() - began < 20.0, "forty naps of half a second are twenty"
        assert napped == [Step(reward=1.0, done=True)] * 40 == [same] * 40
        assert (
            isinstance(ended, EnvironmentFailed)
            and "in step 1 of 1.40" in str(ended)
            and "SystemExit: stop it all at" in str(ended)
        )
        for one in split_games:
            await one.close()
        assert len(living(tmp_path)) == 1
    assert not living(tmp_path)


async def test_a_late_call_is_cancelled_and_costs_no_other_episode_anything(tmp_path: Path) -> None:
    async with pool_of(tmp_path, timeout_s=3.0) as pool:
        late, good = await begun(pool, "hang", "play")
        with pytest.raises(EnvironmentStuck, match=r"in step 1 of 1\.0: it did not return within 3 s$"):
            await late.step(REPLY)
        assert (await good.step(REPLY)).done and (await late.step(REPLY)).done
        await late.close()
        assert not any(worker.ended for worker in pool.pool.workers)


async def test_who_swallows_its_cancellation_is_killed_with_its_process(tmp_path: Path) -> None:
    async with pool_of(tmp_path, timeout_s=3.0) as pool:
        stubborn, _ = await begun(pool, "endure", "play")
        with pytest.raises(
            EnvironmentStuck, match=r"in step 1 of 1\.0.*within 3 s, nor when it was cancelled: its process was killed"
        ):
            await stubborn.step(REPLY)
        assert not living(tmp_path)
        (again,) = await begun(pool, "play")
        assert (await again.step(REPLY)).done and pool.pool.replaced == 1


async def test_who_blocks_the_loop_is_named_and_not_those_who_wait_behind(tmp_path: Path) -> None:
    async with pool_of(tmp_path, timeout_s=3.0) as pool:
        waits, blocks = await begun(pool, "hang", "block")
        found = await asyncio.gather(waits.step(REPLY), blocks.step(REPLY), return_exceptions=True)
        assert isinstance(found[1], EnvironmentStuck) and isinstance(found[0], EpisodeLost), found
        assert "in step 1 of 1.1: it blocks the event loop of its process at" in str(found[1])
        assert f"{tmp_path}/game.py:{1 + GAME[: GAME.index('time.sleep(600)')].count(chr(10))}" in str(found[1])
        assert "another episode of its process was stuck in step 1 of 1.1" in str(found[0])
        assert not living(tmp_path)


async def test_one_that_ends_its_process_is_blamed_where_nobody_else_can_be(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as pool:
        dies, waits = await begun(pool, "die", "hang")
        with pytest.raises(EnvironmentFailed, match=r"in step 1 of 1\.0: the process ended: exit code 3"):
            await dies.step(REPLY)
        with pytest.raises(EpisodeLost, match="its process ended: exit code 3"):
            await waits.step(REPLY)
        dies, waits = await begun(pool, "die", "hang")
        found = await asyncio.gather(waits.step(REPLY), dies.step(REPLY), return_exceptions=True)
        assert [type(one) for one in found] == [EpisodeLost, EpisodeLost]


async def test_a_call_that_nobody_waits_for_is_cancelled_there(tmp_path: Path) -> None:
    async with pool_of(tmp_path, timeout_s=600.0) as pool:
        split_games = await begun(pool, "hang", "hang")
        for one, seconds in zip(split_games, (0.0, 0.3), strict=True):
            call = asyncio.create_task(one.step(REPLY))
            await asyncio.sleep(seconds)
            call.cancel()
            await asyncio.wait({call})
            # Its close does not wait for the call.
            async with asyncio.timeout(120):
                await one.close()
            assert call.cancelled()


async def test_who_swallows_that_its_caller_left_is_not_waited_for_until_it_is_late(tmp_path: Path) -> None:
    async with pool_of(tmp_path, timeout_s=600.0) as pool:
        (game,) = await begun(pool, "endure")
        (pid,) = living(tmp_path)
        call = asyncio.create_task(game.step(REPLY))
        await asyncio.sleep(0.3)
        call.cancel()
        await asyncio.wait({call})
        async with asyncio.timeout(120):
            while pid in living(tmp_path):  # noqa: ASYNC110 - nothing tells of another process
                await asyncio.sleep(0.1)


async def played(pool: EnvironmentPool, question: str, said: Any, **changes: Any) -> PlayedEpisode:
    made = factory(lambda: None, plays=True)
    environment = await pool.environment("7.0")
    (found,) = await play_game(made, environment, task(question), [said], limits(**changes), AbandonedTasks(), "7.0")
    return found


async def test_a_function_is_played_there_as_it_is_here(tmp_path: Path) -> None:
    engine = Engine(numbers)

    async def generate(wanted: Any) -> Any:
        if len(wanted.prompt) == 7:
            await asyncio.sleep(60)
        return await engine.generate(wanted)

    async with pool_of(tmp_path, "play", play_timeout_s=60.0) as pool:
        found = await played(pool, "two", talk(engine.generate))
        assert found.reward == 1.75 and found.turns == 3 and len(found.episode.branches) == 2
        found = await played(pool, "on and on", talk(engine.generate, max_turns=3))
        assert (found.truncated, found.turns, found.reward) == ("turns", 3, 0.25)
        said = talk(generate)
        found = await played(pool, "impatient", said)
        assert found.reward == 1.25 and found.episode.counts.abandoned == 1 and not said.waiting
        for question, why in (("fail", r"KeyError: 'board' at .*game.py:\d+"), ("wrong", "must be finite")):
            with pytest.raises(EnvironmentFailed, match=f"in play of 7.0: .*{why}"):
                await played(pool, question, talk(engine.generate))
        side_by_side = await asyncio.gather(*(played(pool, "two", talk(engine.generate)) for _ in range(30)))
        assert [one.reward for one in side_by_side] == [1.75] * 30
        assert not pool.pool.workers[0].load


async def test_what_the_engines_cannot_do_is_not_the_functions_fault(tmp_path: Path) -> None:
    async def refuse(wanted: Any) -> Any:
        raise EpisodeLost("reply 1", why="no engine")

    async with pool_of(tmp_path, "play", play_timeout_s=60.0) as pool:
        with pytest.raises(EpisodeLost, match="no engine"):
            await played(pool, "two", talk(refuse))


@pytest.mark.parametrize(
    ("question", "why"),
    [("endure", "goes on after reply 1: not over within 3 s"), ("block", "it blocks the event loop of its process at")],
)
async def test_a_function_that_does_not_end_is_killed(tmp_path: Path, question: str, why: str) -> None:
    seconds = {"endure": 3.0, "block": 60.0}[question]
    async with pool_of(tmp_path, "play", timeout_s=3.0, play_timeout_s=seconds) as pool:
        with pytest.raises(EnvironmentStuck, match=why):
            await played(pool, question, talk(Engine(numbers).generate), episode_timeout_s=seconds)
        async with asyncio.timeout(120):
            while living(tmp_path):  # noqa: ASYNC110 - it has its grace first
                await asyncio.sleep(0.1)
