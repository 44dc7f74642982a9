"""Environments in real worker processes: blocking ones, and async ones side by side."""

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

from relax_rt.roles.agentic import Observation, Reply, Step, Task
from relax_rt.roles.agentic.episode import PlayedEpisode, play, play_game
from relax_rt.roles.agentic.interface import EnvironmentFailed, EnvironmentStuck, EpisodeLost
from relax_rt.roles.agentic.user_tasks import AbandonedTasks
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


ASYNC_GAME = '''
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
async def async_pool(
    folder: Path, name: str = "Game", timeout_s: float = 20.0, **how: Any
) -> AsyncIterator[EnvironmentPool]:
    (folder / "game.py").write_text(ASYNC_GAME)
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
    async with async_pool(tmp_path) as pool:
        games = await begun(pool, *["nap"] * 40, "exit", "same task")
        began = time.monotonic()
        *napped, ended, same = await asyncio.gather(*(one.step(REPLY) for one in games), return_exceptions=True)
        assert time.monotonic() - began < 20.0, "forty naps of half a second are twenty"
        assert napped == [Step(reward=1.0, done=True)] * 40 == [same] * 40
        assert (
            isinstance(ended, EnvironmentFailed)
            and "in step 1 of 1.40" in str(ended)
            and "SystemExit: stop it all at" in str(ended)
        )
        for one in games:
            await one.close()
        assert len(living(tmp_path)) == 1
    assert not living(tmp_path)


async def test_a_late_call_is_cancelled_and_costs_no_other_episode_anything(tmp_path: Path) -> None:
    async with async_pool(tmp_path, timeout_s=3.0) as pool:
        late, good = await begun(pool, "hang", "play")
        with pytest.raises(EnvironmentStuck, match=r"in step 1 of 1\.0: it did not return within 3 s$"):
            await late.step(REPLY)
        assert (await good.step(REPLY)).done and (await late.step(REPLY)).done
        await late.close()
        assert not any(worker.ended for worker in pool.pool.workers)


async def test_who_swallows_its_cancellation_is_killed_with_its_process(tmp_path: Path) -> None:
    async with async_pool(tmp_path, timeout_s=3.0) as pool:
        stubborn, _ = await begun(pool, "endure", "play")
        with pytest.raises(
            EnvironmentStuck, match=r"in step 1 of 1\.0.*within 3 s, nor when it was cancelled: its process was killed"
        ):
            await stubborn.step(REPLY)
        assert not living(tmp_path)
        (again,) = await begun(pool, "play")
        assert (await again.step(REPLY)).done and pool.pool.replaced == 1


async def test_who_blocks_the_loop_is_named_and_not_those_who_wait_behind(tmp_path: Path) -> None:
    async with async_pool(tmp_path, timeout_s=3.0) as pool:
        waits, blocks = await begun(pool, "hang", "block")
        found = await asyncio.gather(waits.step(REPLY), blocks.step(REPLY), return_exceptions=True)
        assert isinstance(found[1], EnvironmentStuck) and isinstance(found[0], EpisodeLost), found
        assert "in step 1 of 1.1: it blocks the event loop of its process at" in str(found[1])
        assert f"{tmp_path}/game.py:{1 + ASYNC_GAME[: ASYNC_GAME.index('time.sleep(600)')].count(chr(10))}" in str(
            found[1]
        )
        assert "another episode of its process was stuck in step 1 of 1.1" in str(found[0])
        assert not living(tmp_path)


async def test_one_that_ends_its_process_is_blamed_where_nobody_else_can_be(tmp_path: Path) -> None:
    async with async_pool(tmp_path) as pool:
        dies, waits = await begun(pool, "die", "hang")
        with pytest.raises(EnvironmentFailed, match=r"in step 1 of 1\.0: the process ended: exit code 3"):
            await dies.step(REPLY)
        with pytest.raises(EpisodeLost, match="its process ended: exit code 3"):
            await waits.step(REPLY)
        dies, waits = await begun(pool, "die", "hang")
        found = await asyncio.gather(waits.step(REPLY), dies.step(REPLY), return_exceptions=True)
        assert [type(one) for one in found] == [EpisodeLost, EpisodeLost]


async def test_a_call_that_nobody_waits_for_is_cancelled_there(tmp_path: Path) -> None:
    async with async_pool(tmp_path, timeout_s=600.0) as pool:
        games = await begun(pool, "hang", "hang")
        for one, seconds in zip(games, (0.0, 0.3), strict=True):
            call = asyncio.create_task(one.step(REPLY))
            await asyncio.sleep(seconds)
            call.cancel()
            await asyncio.wait({call})
            # Its close does not wait for the call.
            async with asyncio.timeout(120):
                await one.close()
            assert call.cancelled()


async def test_who_swallows_that_its_caller_left_is_not_waited_for_until_it_is_late(tmp_path: Path) -> None:
    async with async_pool(tmp_path, timeout_s=600.0) as pool:
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

    async with async_pool(tmp_path, "play", play_timeout_s=60.0) as pool:
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

    async with async_pool(tmp_path, "play", play_timeout_s=60.0) as pool:
        with pytest.raises(EpisodeLost, match="no engine"):
            await played(pool, "two", talk(refuse))


@pytest.mark.parametrize(
    ("question", "why"),
    [("endure", "goes on after reply 1: not over within 3 s"), ("block", "it blocks the event loop of its process at")],
)
async def test_a_function_that_does_not_end_is_killed(tmp_path: Path, question: str, why: str) -> None:
    seconds = {"endure": 3.0, "block": 60.0}[question]
    async with async_pool(tmp_path, "play", timeout_s=3.0, play_timeout_s=seconds) as pool:
        with pytest.raises(EnvironmentStuck, match=why):
            await played(pool, question, talk(Engine(numbers).generate), episode_timeout_s=seconds)
        async with asyncio.timeout(120):
            while living(tmp_path):  # noqa: ASYNC110 - it has its grace first
                await asyncio.sleep(0.1)
