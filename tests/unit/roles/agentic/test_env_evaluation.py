"""Scores of held-out episodes."""

from __future__ import annotations

from typing import Any, cast

import pytest
from episode_kit import TASK, Engine, factory, numbers, template, tokenizer

from relax_rt.roles.agentic import Chat, Task
from relax_rt.roles.agentic.episode import PlayedEpisode
from relax_rt.roles.agentic.evaluation import NOT_PLAYED, score_episodes
from relax_rt.roles.agentic.player import Player
from relax_rt.roles.agentic.settings import EnvSettings
from relax_rt.roles.agentic.tokens.types import Branch, Episode, SessionCounts
from relax_rt.roles.evaluation.scoring import wilson
from relax_rt.roles.rollout.engines.settings import SamplingTable
from relax_rt.transport.queue.ledger.messages import VersionSpan


def played(reward: float, version: int = 1, truncated: str = "", turns: int = 2) -> PlayedEpisode:
    spans = (VersionSpan(1, 3, version, version),)
    branch = Branch((1, 2, 3), (0, 1, 1), (0.0, -1.0, -1.0), spans, (), "stop")
    episode = Episode((branch,), SessionCounts())
    return PlayedEpisode(
        episode=episode, rewards={"a": reward}, states={}, truncated=truncated, turns=turns, cut=0, info={}
    )


class Asked:
    """In place of programs: remembers how they were to be played."""

    def __init__(self) -> None:
        self.routing: list[bool] = []

    async def play(
        self, name: str, task: Task, seed: int, *, temperature: float, fresh: bool, routing: bool
    ) -> PlayedEpisode:
        self.routing.append(routing)
        return played(1.0)


async def test_routing_rows_are_asked_for_where_they_are_trained() -> None:
    async def plays(task: Task, chat: Chat) -> float:
        await chat.say([{"role": "user", "content": "go"}])
        return 1.0

    engine, programs = Engine(numbers), Asked()
    player = Player(
        factory=factory(lambda: plays, plays=True),
        pool=None,
        chat=template(),
        generate=engine.generate,
        settings=EnvSettings(environment="test", max_tokens=400),
        sampling=SamplingTable(max_new_tokens=16),
        stop_ids=tokenizer().stop_ids,
        lag=lambda oldest: 0,
        on_tokens=lambda tokens: None,
        routing=True,
    )
    for fresh in (False, True):
        await player.play("e", TASK, 3, fresh=fresh)
    assert [wanted.routing for wanted in engine.asked] == [True, False]
    player.programs = cast(Any, programs)
    for fresh in (False, True):
        await player.play("e", TASK, 3, fresh=fresh)
    assert programs.routing == [True, False]


def test_shares_and_means_with_failed_episodes_as_reward_0() -> None:
    episodes = [played(1.0), played(0.2, version=3, truncated="turns", turns=4), None, played(0.9)]
    found = score_episodes(episodes, 1, 0.5, None)
    assert (found["exact"], found["reward"], found["failed"]) == (0.5, pytest.approx(0.525), 1)
    assert (found["format"], found["turns"], found["tokens"]) == (0.5, pytest.approx(8 / 3), 3.0)
    assert found["versions"] == [1, 3] and 0 < found["exact_low"] < 0.5 < found["exact_high"] < 1
    assert found["reward_low"] < found["reward"] < found["reward_high"] and "gain" not in found


def test_the_gain_is_over_what_was_before() -> None:
    before = score_episodes([played(0.0)] * 50, 1, 0.5, None)
    after = score_episodes([played(1.0)] * 40 + [played(0.0)] * 10, 1, 0.5, before)
    assert after["gain"] == pytest.approx(0.8) and 0.5 < after["gain_low"] < 0.8 < after["gain_high"]


def test_several_samples_of_a_task_are_one_draw() -> None:
    found = score_episodes([played(1.0), played(0.0)] * 10, 2, 0.5, None)
    assert (found["items"], found["exact"], found["reward_low"], found["reward_high"]) == (10, 0.5, 0.5, 0.5)


def test_what_could_not_be_played_says_nothing_about_the_policy() -> None:
    whole = [played(1.0), played(0.0), played(1.0), None]
    lost = score_episodes(
        [*whole[:2], NOT_PLAYED, NOT_PLAYED, whole[2], NOT_PLAYED, NOT_PLAYED, whole[3]], 2, 0.5, None
    )
    # Four tasks of two: one whole, one lost, two of which one episode is there, the last failed.
    assert (lost["items"], lost["exact"], lost["reward"], lost["failed"], lost["lost"]) == (3, 0.5, 0.5, 1, 4)
    assert lost["exact_low"] == pytest.approx(wilson(1.5, 3)[0])
    plain = score_episodes([played(1.0), played(0.0), played(1.0)], 1, 0.5, None)
    with_lost = score_episodes([played(1.0), NOT_PLAYED, played(0.0), played(1.0), NOT_PLAYED], 1, 0.5, None)
    assert {**with_lost, "lost": 0} == plain
