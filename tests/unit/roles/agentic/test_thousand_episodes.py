"""A thousand episodes at once on one machine, while a worker of another environment hangs."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from episode_kit import Engine, factory, numbers, template, tokenizer

from relax_rt.roles.agentic import Observation, Reply, Step, Task
from relax_rt.roles.agentic.episode import Generate, PlayedEpisode
from relax_rt.roles.agentic.interface import EnvironmentStuck, EpisodeLost
from relax_rt.roles.agentic.loading import Factory, load_factory
from relax_rt.roles.agentic.player import Player
from relax_rt.roles.agentic.settings import EnvSettings
from relax_rt.roles.agentic.worker_process import WorkerSetup
from relax_rt.roles.agentic.workers import EnvironmentPool
from relax_rt.roles.rollout.engines.settings import SamplingTable
from relax_rt.roles.rollout.router.core import GenerationRequest, Outcome

pytestmark = [pytest.mark.integration, pytest.mark.long]
EPISODES, TURNS, BLOCKING, WORKERS = 1000, 8, 40, 4
ATTEMPTS = 5
DEADLINE_S = 300.0
GAME = """
import time
from relax_rt.roles.agentic import Step

class Blocks:
    def reset(self, task):
        self.item = task.item
        return "count to 1"

    def step(self, reply):
        if self.item == "stuck":
            time.sleep(600)
        return Step(reward=1.0, done=True)
"""


class Counting:
    """Counts to TURNS, and how many of its kind are under way."""

    now = most = 0

    async def reset(self, task: Task) -> Observation:
        Counting.now += 1
        Counting.most = max(Counting.most, Counting.now)
        self.at = 0
        return Observation(messages=f"count to {TURNS}")

    async def step(self, reply: Reply) -> Step:
        self.at += 1
        await asyncio.sleep(0)
        return Step(messages="next", reward=float(reply.text == str(self.at)), done=self.at == TURNS)

    async def close(self) -> None:
        Counting.now -= 1


class Slow:
    """An engine whose replies take a long-tailed time, once as many as `crowd` have asked for their first."""

    def __init__(self, crowd: int = 0) -> None:
        self._engine, self._random = Engine(numbers), random.Random(0)
        self._crowd, self._all_there = crowd, asyncio.Event()
        self.asked = 0

    async def generate(self, wanted: GenerationRequest) -> Outcome:
        self.asked += 1
        if self.asked >= self._crowd:
            self._all_there.set()
        await self._all_there.wait()
        await asyncio.sleep(min(2.0, 0.2 * self._random.lognormvariate(0.0, 1.0)))
        return await self._engine.generate(wanted)


def player(made: Factory, generate: Generate, pool: EnvironmentPool | None) -> Player:
    return Player(
        factory=made,
        pool=pool,
        chat=template(),
        generate=generate,
        settings=EnvSettings(environment="test", max_tokens=400, episode_timeout_s=DEADLINE_S),
        sampling=SamplingTable(max_new_tokens=8),
        stop_ids=tokenizer().stop_ids,
        lag=lambda oldest: 0,
        on_tokens=lambda tokens: None,
    )


def task(number: int, item: str) -> Task:
    return Task(index=number, item=item, split="train", seed=number)


async def replayed(at: Player, number: int, item: str, lost: list[str]) -> PlayedEpisode:
    """As the role does: an episode that was lost with a neighbour's process is begun again."""
    for attempt in range(ATTEMPTS):
        try:
            return await at.play(f"{item} {number}+{attempt}", task(number, item), number)
        except EpisodeLost as error:
            lost.append(str(error))
    raise AssertionError(lost)


async def test_a_thousand_episodes_and_a_worker_that_hangs(tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(GAME)
    engine, lost = Slow(EPISODES), list[str]()
    setup = WorkerSetup("game.py:Blocks", {}, str(tmp_path))
    async with (
        asyncio.timeout(DEADLINE_S),
        EnvironmentPool(setup, WORKERS, timeout_s=15.0, blocking=True) as pool,
    ):
        calm = player(factory(Counting), engine.generate, None)
        blocking = player(load_factory("game.py:Blocks", {}, tmp_path), Slow().generate, pool)
        thousand = [asyncio.create_task(calm.play(str(n), task(n, "calm"), n)) for n in range(EPISODES)]
        stuck = asyncio.create_task(blocking.play("7.3", task(0, "stuck"), 0))
        others = [asyncio.create_task(replayed(blocking, n, "blocking", lost)) for n in range(BLOCKING)]
        with pytest.raises(
            EnvironmentStuck, match=r"in step 1 of 7\.3: it did not return within 15 s: its process was killed"
        ):
            await stuck
        played = await asyncio.gather(*thousand, *others)
        assert pool.pool.replaced + sum(bool(worker.ended) for worker in pool.pool.workers) == 1
    assert (Counting.most, Counting.now, engine.asked) == (EPISODES, 0, EPISODES * TURNS)
    assert [one.reward for one in played] == [float(TURNS)] * EPISODES + [1.0] * BLOCKING
    assert all(one.turns == TURNS and not one.truncated for one in played[:EPISODES])
    # Those that shared the process were told whose fault it was, and were played again.
    assert all("another episode of its process was stuck in step 1 of 7.3" in why for why in lost)
