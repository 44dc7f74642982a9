"""User code that swallows its cancellation: nobody waits for it, and it is named, counted and bounded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from episode_kit import TASK, Count, Engine, factory, limits, numbers, talk
from test_stall_detection import GROUP, Slot

from relax_rt.hosting import host
from relax_rt.roles.agentic import Chat, Observation, Reply, Step, Task, episode, user_tasks
from relax_rt.roles.agentic.episode import PlayedEpisode, play_game
from relax_rt.roles.agentic.evaluation import EpisodeEvaluation
from relax_rt.roles.agentic.interface import EnvironmentFailed, EnvironmentStuck
from relax_rt.roles.agentic.role import EpisodeGroup
from relax_rt.roles.agentic.user_tasks import AbandonedTasks, LoopWatch, TooManyAbandoned
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.queue.ledger.messages import Ticket
from relax_rt.transport.rpc.errors import RelaxError

HERE = r"test_user_tasks\.py:\d+"
SOON_S = 120.0
"""All deadlines together, with room for a busy machine; the coroutines themselves never end."""


class Will:
    """Of coroutines that do not give in until the test is over."""

    broken = False


async def endure() -> None:
    """A retry loop of the usual kind."""
    while not Will.broken:
        try:
            await asyncio.sleep(0.05)
        except BaseException:  # noqa: BLE001 - what it must not do
            await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
async def deadlines(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    grace = [(user_tasks, name) for name in ("CALL_GRACE_S", "EPISODE_GRACE_S", "END_S")]
    for module, name in (*grace, (episode, "CLOSE_S")):
        monkeypatch.setattr(module, name, 0.3 if name == "END_S" else 0.1)
    Will.broken = False
    began = time.monotonic()
    yield
    assert time.monotonic() - began < SOON_S
    Will.broken = True
    left = asyncio.all_tasks() - {asyncio.current_task()}
    if left:
        await asyncio.wait(left, timeout=SOON_S)


class Stubborn(Count):
    """Endures in one of its calls."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    async def reset(self, task: Task) -> Observation:
        if self.where == "in reset":
            await endure()
        return await super().reset(task)

    async def step(self, reply: Reply) -> Step:
        if self.where == f"in step {self.at}":
            await endure()
        return await super().step(reply)

    async def close(self) -> None:
        if self.where == "in close":
            await endure()
        await super().close()


Told = list[tuple[str, str, str]]


def abandoned(told: Told, **how: Any) -> AbandonedTasks:
    return AbandonedTasks(on_abandoned=lambda *about: told.append(about), **how)


async def played(
    environment: Any, said: Any, kept: AbandonedTasks, *, plays: bool = False, **changes: Any
) -> PlayedEpisode:
    made = factory(lambda: environment, plays=plays)
    (found,) = await play_game(made, environment, TASK, [said], limits(**changes), kept, "7.0")
    return found


@pytest.mark.parametrize("where", ["in reset", "in step 2"])
async def test_a_call_that_swallows_its_cancellation_is_stuck_and_left_to_itself(where: str) -> None:
    told: Told = []
    kept, engine = abandoned(told), Engine(numbers)
    game = Stubborn(where)
    why = rf"{where}: it did not return within 0.5 s, nor when it was cancelled: it stands at .*{HERE}"
    with pytest.raises(EnvironmentStuck, match=why):
        await played(game, talk(engine.generate), kept, turn_timeout_s=0.5)
    ((name, call, line),) = told
    assert (name, call) == ("7.0", where) and "test_user_tasks.py" in line
    assert len(kept) == kept.total == 1 and f"{where} of 7.0 at" in kept.summary()
    # Once it ends after all it says nothing more, and its environment is closed.
    asked = len(engine.asked)
    Will.broken = True
    while len(kept):  # noqa: ASYNC110 - the fixture has the deadline
        await asyncio.sleep(0.01)
    assert len(engine.asked) == asked and game.closed == 1 and not kept.summary() and kept.total == 1


async def test_a_close_that_never_ends_costs_no_episode() -> None:
    told: Told = []
    found = await played(Stubborn("in close"), talk(Engine(numbers).generate), abandoned(told))
    assert found.reward == 1.5 and [call for _, call, _ in told] == ["in close"]


async def test_a_function_that_swallows_its_cancellation() -> None:
    async def plays(task: Task, chat: Chat) -> float:
        await chat.say([{"role": "user", "content": "x"}])
        await endure()
        return 1.0

    told: Told = []
    with pytest.raises(EnvironmentStuck, match=r"goes on after reply 1: not over within 0\.5 s"):
        await played(plays, talk(Engine(numbers).generate), abandoned(told), plays=True, episode_timeout_s=0.5)
    assert [call for _, call, _ in told] == ["in play"]


async def test_a_task_of_a_function_that_swallows_its_cancellation() -> None:
    async def plays(task: Task, chat: Chat) -> float:
        async def asks() -> None:
            try:
                await chat.say([{"role": "user", "content": "slow"}])
            except asyncio.CancelledError:
                await endure()

        task_of_its_own = asyncio.create_task(asks())
        await asyncio.sleep(0)
        await chat.say([{"role": "user", "content": "x"}])
        del task_of_its_own
        return 1.0

    engine = Engine(numbers)

    async def generate(wanted: Any) -> Any:
        if len(wanted.prompt) > 6:
            await asyncio.sleep(60)
        return await engine.generate(wanted)

    told: Told = []
    found = await played(plays, talk(generate), abandoned(told), plays=True)
    assert found.reward == 1.0 and [call for _, call, _ in told] == ["in a task of the function"]


async def test_an_episode_that_is_given_up_ends_for_whoever_waits_for_it() -> None:
    told: Told = []
    task = asyncio.create_task(played(Stubborn("in step 1"), talk(Engine(numbers).generate), abandoned(told)))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [call for _, call, _ in told] == ["in step 1"]


async def test_who_takes_its_cancellation_for_an_answer_plays_no_further() -> None:
    class Shrugs(Count):
        async def step(self, reply: Reply) -> Step:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                return await super().step(reply)
            raise AssertionError

    for changes in ({"turn_timeout_s": 0.5}, {"episode_timeout_s": 0.5}):
        told: Told = []
        engine, game = Engine(numbers), Shrugs()
        with pytest.raises(EnvironmentStuck):
            await played(game, talk(engine.generate), abandoned(told), **changes)
        assert (len(engine.asked), game.closed, told) == (1, 1, [])


@pytest.mark.parametrize(("raised", "word"), [(asyncio.CancelledError, "CancelledError"), (SystemExit, "SystemExit")])
async def test_what_ends_tasks_and_processes_is_an_environments_error_where_it_raises_it(
    raised: type, word: str
) -> None:
    class Raises(Count):
        async def step(self, reply: Reply) -> Step:
            raise raised

    with pytest.raises(EnvironmentFailed, match=f"in step 1: {word}, raised by itself"):
        await played(Raises(), talk(Engine(numbers).generate), AbandonedTasks())


async def test_what_one_call_opens_another_may_close() -> None:
    """Cancel scopes (anyio's, asyncio.timeout) are of the task that entered them."""

    class Scoped(Count):
        async def reset(self, task: Task) -> Observation:
            self.scope = asyncio.timeout(60)
            await self.scope.__aenter__()
            self.task = asyncio.current_task()
            return await super().reset(task)

        async def step(self, reply: Reply) -> Step:
            assert asyncio.current_task() is self.task
            return await super().step(reply)

        async def close(self) -> None:
            assert asyncio.current_task() is self.task
            await self.scope.__aexit__(None, None, None)
            await super().close()

    game = Scoped()
    assert (await played(game, talk(Engine(numbers).generate), AbandonedTasks())).reward == 1.5 and game.closed == 1


async def test_a_function_that_asks_on_after_its_end_does_not_block_the_others() -> None:
    async def plays(task: Task, chat: Chat) -> float:
        while True:
            try:
                await chat.say([{"role": "user", "content": "x"}])
            except Exception:  # noqa: BLE001 - what it must not do
                continue

    with pytest.raises(EnvironmentStuck, match=r"not over within 0\.3 s"):
        said = talk(Engine(numbers).generate, max_turns=2)
        await played(plays, said, AbandonedTasks(), plays=True, episode_timeout_s=0.3)


async def test_more_than_a_slot_bears_end_it() -> None:
    broken: list[BaseException] = []
    kept = AbandonedTasks(2, on_too_many=broken.append)
    games = (played(Stubborn("in reset"), talk(Engine(numbers).generate), kept, turn_timeout_s=0.05) for _ in range(3))
    found = await asyncio.gather(*games, return_exceptions=True)
    assert all(isinstance(one, EnvironmentStuck) for one in found)
    (error,) = broken
    assert isinstance(error, TooManyAbandoned) and "3 coroutines of the environment keep running although" in str(error)


async def test_the_role_names_it_and_leaves_groups_at_the_end_of_a_run() -> None:
    slot = Slot(lambda: Stubborn("in step 1"), Engine(numbers).generate, episode_timeout_s=60.0)
    role = slot.role
    role.player.abandoned = AbandonedTasks(8, role._on_abandoned, role._fail_role)
    group = EpisodeGroup(Ticket(group=GROUP, prompt=3, attempt=0, size=2, version=1, lease_s=60.0, members=[0]))
    group.tasks = [asyncio.create_task(role._play_game(group, [0]))]
    role.groups[GROUP] = group
    await asyncio.sleep(0.05)
    assert await role._release_groups("the last step is done") == 0 and not role.groups
    assert [why for why, _ in slot.returned] == ["the last step is done"]
    (told,) = slot.told("environment_abandoned")
    assert (told["episode"], told["call"], told["at_once"]) == ("7.0", "in step 1", 1) and "test_user_tasks.py" in told[
        "line"
    ]


async def test_episodes_that_do_not_end_at_all_are_not_waited_for() -> None:
    """Whoever is to blame, a gateway's client or a worker."""
    slot = Slot(Count, Engine(numbers).generate)
    group = EpisodeGroup(Ticket(group=GROUP, prompt=3, attempt=0, size=2, version=1, lease_s=60.0, members=[0]))
    group.tasks = [asyncio.create_task(endure())]
    slot.role.groups[GROUP] = group
    await asyncio.sleep(0)
    assert await slot.role._release_groups("the last step is done") == 1
    assert slot.returned, "its group is handed back all the same"


def held_out(player: Any, events: list[str], silent_s: float = 4.0) -> EpisodeEvaluation:
    made = EpisodeEvaluation.__new__(EpisodeEvaluation)
    recipe = SimpleNamespace(count=lambda when: 3, samples=1, temperature=1.0)
    vars(made).update(
        _ctx=SimpleNamespace(
            event=lambda kind, **_: events.append(kind),
            metrics=lambda record: None,
            log=SimpleNamespace(info=lambda *_, **__: None),
        ),
        _tasks=SimpleNamespace(held_out=lambda count: [TASK] * count),
        _player=player,
        _seed=lambda task, sample, attempt: 1,
        _success=0.5,
        _slots=asyncio.Semaphore(4),
        _max_silence_s=silent_s,
        _finished=0,
        schedule=SimpleNamespace(spec=recipe, before=None, due_steps=lambda step: [], record=lambda result: None),
    )
    return made


async def test_an_evaluation_ends_with_coroutines_that_do_not() -> None:
    events: list[str] = []
    slot = Slot(lambda: Stubborn("in step 2"), Engine(numbers).generate, turn_timeout_s=0.5, episode_timeout_s=60.0)
    await held_out(slot.role.player, events).evaluate(VersionRecord(1, 0, 0), "after")
    assert events.count("environment_stuck") == 3 and events[-1] == "evaluation_done"
    assert len(slot.role.player.abandoned) == 3


async def test_an_evaluation_of_which_nothing_ends_ends_the_role() -> None:
    async def play(*_: Any, **__: Any) -> Any:
        await endure()

    player = SimpleNamespace(play=play, activity=lambda: "3 x plays")
    with pytest.raises(
        RelaxError, match=r"3 of 3 held-out episodes: none of them ended within 0.2 s: they are 3 x plays"
    ):
        await held_out(player, [], 0.2).evaluate(VersionRecord(1, 0, 0), "after")


async def test_an_evaluation_that_fails_leaves_no_episode_behind() -> None:
    async def play(name: str, *_: Any, **__: Any) -> Any:
        if len(gone) == 0 and not begun:
            begun.append(name)
            raise RelaxError("the router", why="it is gone")
        try:
            await asyncio.sleep(60)
        finally:
            gone.append(name)

    begun: list[str] = []
    gone: list[str] = []
    with pytest.raises(RelaxError, match="the router"):
        await held_out(SimpleNamespace(play=play), []).evaluate(VersionRecord(1, 0, 0), "after")
    assert len(gone) == 2


def test_a_role_ends_although_it_leaves_coroutines_that_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "CANCEL_S", 0.1)

    async def role() -> None:
        asyncio.create_task(endure(), name="episode 7.0")  # noqa: RUF006
        await asyncio.sleep(0.01)
        raise ValueError("why it ended")

    began = time.monotonic()
    with pytest.raises(ValueError, match="why it ended"):
        host.run_role_loop(role())
    assert time.monotonic() - began < SOON_S


class Blocks(Count):
    async def step(self, reply: Reply) -> Step:
        time.sleep(2.0)  # noqa: ASYNC251 - what it must not do
        return await super().step(reply)


async def test_the_episode_and_its_line_are_named_while_the_loop_is_blocked() -> None:
    told: list[tuple[str, str, float]] = []
    over: list[float] = []

    def blocked(task: asyncio.Task[Any] | None, line: str) -> None:
        told.append((task.get_name() if task else "", line, time.monotonic()))

    game, said = Blocks(last=1), talk(Engine(numbers).generate)
    with LoopWatch(asyncio.get_running_loop(), blocked, over.append, after_s=0.6):
        await asyncio.sleep(0.8)
        assert not told, "it answers"
        made = factory(lambda: game)
        await play_game(made, game, TASK, [said], limits(), AbandonedTasks(), "7.0")
        ended = time.monotonic()
    ((name, line, at),) = told
    assert name == "episode 7.0" and "test_user_tasks.py:" in line and at < ended, "while it blocks, not afterwards"
    async with asyncio.timeout(120):
        while not over:  # noqa: ASYNC110 - the watch says it in its own time
            await asyncio.sleep(0.02)
    assert len(over) == 1 and over[0] >= 0.6


def test_the_role_says_it_where_a_hang_is_diagnosed() -> None:
    slot, waiting = Slot(Count, Engine(numbers).generate), list[str]()
    slot.role.ctx.progress.waiting = waiting.append  # type: ignore[method-assign]
    slot.role._on_loop_blocked(None, "game.py:12")
    slot.role._on_loop_unblocked(7.0)
    assert slot.told("loop_blocked") == [{"what": "no task", "line": "game.py:12"}]
    assert slot.told("loop_unblocked") == [{"seconds": 7.0}]
    assert "blocks the event loop at game.py:12" in waiting[0] and "blocked for 7 s" in waiting[1]
