"""User code that blocks an event loop is named by the task and the line."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from episode_kit import TASK, Count, Engine, factory, limits, numbers, talk
from test_stall_detection import Slot

from relax_rt.roles.agentic import Reply, Step
from relax_rt.roles.agentic.episode import play_game
from relax_rt.roles.agentic.user_tasks import AbandonedTasks, LoopWatch


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
    assert name == "episode 7.0" and "test_loop_watch.py:" in line and at < ended, "while it blocks, not afterwards"
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
