"""Episodes of which nothing ever comes: each attempt is bounded, and so is the role that makes them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from episode_kit import TASK, Count, Engine, factory, numbers, template, tokenizer

from relax_rt.config.schema import RunTable
from relax_rt.observe.metrics import MetricsLog
from relax_rt.roles.agentic import Chat, Reply, Step, Task
from relax_rt.roles.agentic.episode import Generate
from relax_rt.roles.agentic.evaluation import MAX_ATTEMPTS, EpisodeEvaluation
from relax_rt.roles.agentic.interface import EnvironmentStuck, EpisodeLost
from relax_rt.roles.agentic.player import Player
from relax_rt.roles.agentic.replay_cache import ReplayStore
from relax_rt.roles.agentic.role import EnvRole, EpisodeCounters, EpisodeGroup
from relax_rt.roles.agentic.settings import EnvSettings
from relax_rt.roles.agentic.stall_detection import (
    KIND,
    MAX_FAILURES,
    MAX_LOSSES,
    MAX_RESTARTS,
    MIN_PROMPTS,
    EpisodesStalled,
    StallDetector,
    stall_error,
)
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.rollout.engines.settings import SamplingTable
from relax_rt.roles.rollout.router.core import GenerationRequest, Outcome
from relax_rt.roles.training.algorithms.settings import AlgorithmTable
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.queue.ledger.messages import Ticket
from relax_rt.transport.rpc.errors import GivenUp

GROUP = 7
TOO_LATE = {"failed": True, "late": True, "item": TASK.item, "about": ""}


class Slow(Count):
    """Each call is in time, and all of them together are not."""

    async def step(self, reply: Reply) -> Step:
        await asyncio.sleep(1.2)
        return await super().step(reply)


async def dawdles(task: Task, chat: Chat) -> float:
    """The same as a function, which has had its reply."""
    await chat.say([{"role": "user", "content": "x"}])
    await asyncio.sleep(60)
    return 1.0


async def silent(wanted: GenerationRequest) -> Outcome:
    """An engine that never answers."""
    await asyncio.sleep(60)
    raise AssertionError


class Slot:
    """An env role that plays one group, and what it tells the queue."""

    def __init__(
        self,
        environment: Any,
        generate: Generate,
        store: ReplayStore | None = None,
        *,
        plays: bool = False,
        **settings: Any,
    ) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.returned: list[tuple[str, dict[str, Any]]] = []
        self.put = 0
        table = EnvSettings(environment="slow.py:Slow", max_tokens=400, **{"episode_timeout_s": 2.0, **settings})
        made = factory((lambda: environment) if plays else environment, plays=plays)
        run = RunTable(name="slot", seed=1)
        config = cast(Any, RLConfig).model_construct(run=run, algorithm=AlgorithmTable(group_size=2), roles={})
        self.role = role = EnvRole.__new__(EnvRole)
        vars(role).update(
            settings=table,
            config=config,
            ctx=SimpleNamespace(
                event=lambda kind, **fields: self.events.append((kind, fields)),
                log=SimpleNamespace(warning=lambda *_, **__: None),
                progress=SimpleNamespace(waiting=lambda _: None),
            ),
            factory=made,
            store=store,
            groups={},
            tasks=SimpleNamespace(train=lambda prompt, item: TASK),
            player=Player(
                factory=made,
                pool=None,
                chat=template(),
                generate=generate,
                settings=table,
                sampling=SamplingTable(max_new_tokens=8),
                stop_ids=tokenizer().stop_ids,
                lag=lambda oldest: 0,
                on_tokens=lambda tokens: None,
            ),
            queue=SimpleNamespace(groups={GROUP: 1}, release_groups=self._give_back),
            _capacity_changed=asyncio.Event(),
            _counters=EpisodeCounters(),
            _stalls=StallDetector(table.environment, table.episodes_in_flight),
        )

    async def _give_back(self, groups: list[int], why: str, **how: Any) -> None:
        assert groups == [GROUP]
        self.returned.append((why, how))

    async def play(self, member: int = 0, losses: int = 0) -> None:
        about: dict[str, Any] = {"size": 2, "version": 1, "lease_s": 60.0, "members": [member], "losses": losses}
        group = EpisodeGroup(Ticket(group=GROUP, prompt=3, attempt=0, **about))
        group.remaining = 1
        self.role.groups[GROUP] = group
        await self.role._play_game(group, [member])

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.events if name == kind]


async def test_an_environment_whose_turns_take_too_long_in_all_has_failed() -> None:
    slot = Slot(Slow, Engine(numbers).generate)
    await slot.play()
    ((why, how),) = slot.returned
    assert how == TOO_LATE and "is in step 2: not over within 2 s" in why
    (stuck,) = slot.told("environment_stuck")
    assert stuck["why"] == why and "roles.env.episode_timeout_s" in why
    assert not slot.told("episode_lost")


async def test_one_whose_replies_are_kept_has_one_try_more(tmp_path: Path) -> None:
    engine = Engine(numbers)
    slot = Slot(Slow, engine.generate, ReplayStore(tmp_path, 1, 100.0, lambda version: False))
    await slot.play()
    assert [how for _, how in slot.returned] == [TOO_LATE]
    first, second = slot.told("environment_stuck")
    assert first.get("again") and not second.get("again") and len(engine.said) == 2, "replies were sampled anew"


@pytest.mark.parametrize(("losses", "sampled"), [(MAX_LOSSES, 0), (MAX_LOSSES + 1, 2)])
async def test_replies_with_which_it_was_lost_again_and_again_are_given_up(
    losses: int, sampled: int, tmp_path: Path
) -> None:
    before, after = Engine(numbers), Engine(numbers)
    first = Slot(Slow, before.generate, ReplayStore(tmp_path, 1, 100.0, lambda version: False))
    assert first.role.store is not None
    kept = first.role.store.caches_of(3, 0)
    with pytest.raises(EnvironmentStuck):
        await first.role.player.play_game("7.0", TASK, 1, replays=kept)
    assert len(before.said) == 2
    await Slot(Slow, after.generate, ReplayStore(tmp_path, 1, 100.0, lambda version: False)).play(losses=losses)
    assert len(after.said) == sampled


async def test_a_function_that_has_its_reply_and_dawdles_has_failed() -> None:
    slot = Slot(dawdles, Engine(numbers).generate, plays=True)
    await slot.play()
    ((why, how),) = slot.returned
    assert how == TOO_LATE and "goes on after reply 1: not over within" in why


async def test_one_that_waits_for_tokens_is_lost_and_the_queue_is_told_how_often() -> None:
    slot = Slot(Count, silent, episode_timeout_s=0.3)
    await slot.play()
    ((why, how),) = slot.returned
    assert how == {"losses": MAX_LOSSES} and "waits for tokens of reply 1" in why
    assert len(slot.told("episode_lost")) == MAX_LOSSES and not slot.told("environment_stuck")
    await slot.play()
    # What many of them wait for is told to whoever asks what the role does.
    told = f"{2 * MAX_LOSSES} consecutive attempts failed, the last one: 7.0+2 was lost"
    assert slot.role._stalls.summary().startswith(told)


async def test_a_function_that_gave_up_a_reply_by_itself_and_dawdles_has_failed() -> None:
    async def impatient(task: Task, chat: Chat) -> float:
        try:
            await asyncio.wait_for(chat.say([{"role": "user", "content": "x"}]), 0.02)
        except TimeoutError:
            await asyncio.sleep(60)
        return 1.0

    slot = Slot(impatient, silent, plays=True)
    await slot.play()
    ((why, how),) = slot.returned
    assert how == TOO_LATE and "goes on without reply 1: not over within" in why


def played(environment: str, in_flight: int) -> StallDetector:
    """Of a slot that has played an episode."""
    one = StallDetector(environment, in_flight)
    one.record_finished()
    return one


def test_a_slot_that_never_played_an_episode_is_not_started_anew() -> None:
    """Another process would mend nothing: the queue counts its groups, and ends the run."""
    one = StallDetector("game.py:Game", 10)
    for n in range(10 * MAX_LOSSES * MAX_FAILURES):
        one.record_failed(n, "KeyError")
    assert "consecutive attempts failed, the last one: KeyError" in one.summary()


def test_a_slot_ends_when_nothing_comes_of_its_episodes() -> None:
    one = played("game.py:Game", 10)
    most = MAX_LOSSES * MAX_FAILURES
    for n in range(most - 1):
        one.record_lost(n, "the gateway was started again")
    one.record_finished()
    assert one.summary() == ""
    for n in range(most - 1):
        one.record_lost(n, "no engine")
    assert f"{most - 1} consecutive attempts failed, the last one: no engine" in one.summary()
    with pytest.raises(EpisodesStalled, match=r"192 consecutive attempts at episodes.*the last one: no engine"):
        one.record_lost(7, "no engine")
    # What takes all of many along takes each as often as one may be lost.
    many = played("game.py:Game", 1000)
    for n in range(MAX_LOSSES * 1000 - 1):
        many.record_lost(n, "the gateway was started again")
    with pytest.raises(EpisodesStalled):
        many.record_lost(7, "the gateway was started again")
    wrong = played("game.py:Game", 1000)
    for n in range(MAX_FAILURES - 1):
        wrong.record_failed(n, "KeyError")
    with pytest.raises(EpisodesStalled, match=r"64 consecutive episodes of game.py:Game failed: KeyError"):
        wrong.record_failed(7, "KeyError")


def test_what_is_wrong_with_a_task_ends_no_slot() -> None:
    """A large group may be all that there is to play, again and again, until its prompt is retired."""
    one = played("game.py:Game", 10)
    for n in range(10 * MAX_LOSSES * MAX_FAILURES):
        one.record_failed(n % (MIN_PROMPTS - 1), "KeyError")
    with pytest.raises(EpisodesStalled):
        one.record_failed(MIN_PROMPTS, "KeyError")


def context(run_dir: Path, run_id: str) -> Any:
    log = MetricsLog(run_dir, "env/0#1")
    events: list[dict[str, Any]] = []
    return SimpleNamespace(
        run_dir=run_dir,
        run_id=run_id,
        who=SimpleNamespace(slot="env/0"),
        metrics=log.write,
        event=lambda kind, **fields: events.append({"kind": kind, **fields}),
        events=events,
        close=log.close,
    )


def test_the_run_ends_when_slots_end_again_and_again_without_an_episode_in_between(tmp_path: Path) -> None:
    error = EpisodesStalled("192 times", why="no engine", hint="look")
    first = context(tmp_path, "one")
    assert [stall_error(first, error) for _ in range(MAX_RESTARTS - 1)] == [error] * (MAX_RESTARTS - 1)
    first.metrics({"kind": "produced", "samples": []})
    assert stall_error(first, error) is error, "an episode came to its end in between"
    # Begun again it has its tries again.
    ctx = context(tmp_path, "two")
    assert [stall_error(ctx, error) for _ in range(MAX_RESTARTS - 1)] == [error] * (MAX_RESTARTS - 1)
    final = stall_error(ctx, error)
    assert isinstance(final, GivenUp) and "192 times: no engine; it is end number 3 of an env role" in str(final)
    assert [event["times"] for event in ctx.events] == [1, 2, 3] and ctx.events[0]["kind"] == KIND
    for one in (first, ctx):
        one.close()


async def test_held_out_episodes_of_which_none_could_be_played_end_the_slot() -> None:
    """And with the third such end the run."""
    events: list[str] = []

    async def play(*_: Any, **__: Any) -> Any:
        raise EpisodeLost("the program's session", why="gateway/0#1 had it, and now it is gateway/0#2")

    recipe = SimpleNamespace(count=lambda when: 3, samples=2, temperature=1.0)
    held_out = EpisodeEvaluation.__new__(EpisodeEvaluation)
    vars(held_out).update(
        _ctx=SimpleNamespace(event=lambda kind, **_: events.append(kind)),
        _tasks=SimpleNamespace(held_out=lambda count: [TASK] * count),
        _player=SimpleNamespace(play=play),
        _seed=lambda task, sample, attempt: 1,
        _slots=asyncio.Semaphore(4),
        _max_silence_s=60.0,
        _finished=0,
        schedule=SimpleNamespace(spec=recipe, before=None, due_steps=lambda step: []),
    )
    with pytest.raises(EpisodesStalled, match="6 held-out episodes, before: each was lost 5 times"):
        await held_out.evaluate(VersionRecord(1, 0, 0), "before")
    assert events.count("episode_lost") == 6 * MAX_ATTEMPTS
