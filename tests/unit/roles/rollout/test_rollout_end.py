"""The end of a rollout: what is journaled and released."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest

from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.rollout.engines.base import Chunk
from relax_rt.roles.rollout.role import RolloutRole
from relax_rt.roles.training.algorithms.settings import AlgorithmTable


def role_with(
    calls: list[str], close_error: Exception | None = None, events: list[tuple[str, dict[str, Any]]] | None = None
) -> RolloutRole:
    """A role whose parts tell what is done with them."""
    events = events if events is not None else []

    def told(what: str, answer: Any = None, error: Exception | None = None) -> Any:
        async def call(*_: Any) -> Any:
            calls.append(what)
            if error is not None:
                raise error
            return answer

        return call

    async def give_back(groups: list[int], why: str, *, losses: int) -> None:
        calls.append(f"give back, losses {losses}")

    role, resources = RolloutRole.__new__(RolloutRole), AsyncExitStack()
    resources.push_async_callback(told("close queue"))
    parts = {
        "resources": resources,
        "_unreliable": False,
        "_record_metrics": lambda: None,
        "failure": lambda _: None,
        "engine": SimpleNamespace(close=told("close engine", error=close_error)),
        "queue": SimpleNamespace(groups={7}, release_groups=give_back, save_partials=told("mark")),
        "work": SimpleNamespace(
            take_all=lambda: [SimpleNamespace(chunk="of a member")], saved=lambda *_: None, unsaved_tokens=31
        ),
        "ctx": SimpleNamespace(event=lambda kind, **fields: events.append((kind, fields))),
    }
    vars(role).update(parts)
    return role


async def test_teardown_journals_partials_and_releases_groups() -> None:
    calls: list[str] = []
    await role_with(calls).teardown()
    assert calls == ["close engine", "mark", "give back, losses 0", "close queue"]


async def test_a_failed_engine_journals_nothing_and_counts_a_loss() -> None:
    calls: list[str] = []
    events: list[tuple[str, dict[str, Any]]] = []
    role = role_with(calls, events=events)
    role._on_engine_failure(RuntimeError("of the device"))
    role._on_chunks(cast(list[Chunk], [object()]))  # it is not looked at
    await role.teardown()
    assert calls == ["close engine", "give back, losses 1", "close queue"]
    assert events == [("groups_released", {"groups": 1, "tokens_lost": 31})]


async def test_an_engine_that_cannot_be_closed_still_releases_groups() -> None:
    calls: list[str] = []
    with pytest.raises(BufferError):
        await role_with(calls, BufferError("exported")).teardown()
    assert calls == ["close engine", "mark", "give back, losses 0", "close queue"]


class Stopping:
    """A role that was asked to stop; `_follow` ends while its sequences are handed over."""

    def __init__(self, error: Exception | None = None) -> None:
        self.followed, self.handed = asyncio.Event(), False
        self.role = RolloutRole.__new__(RolloutRole)

        async def for_ever() -> None:
            await asyncio.Event().wait()

        async def follow() -> None:
            await begun.wait()
            self.followed.set()
            if error is not None:
                raise error

        async def hand_over() -> None:
            begun.set()
            await self.followed.wait()
            # The end of `_follow` is seen before this goes on.
            for _ in range(20):
                await asyncio.sleep(0)
            self.handed = True

        begun, stopping = asyncio.Event(), asyncio.Event()
        stopping.set()
        waits = dict.fromkeys(("_admit_groups", "_put_finished", "_journal", "_report"), for_ever)
        failure = SimpleNamespace(wait=for_ever, check=lambda: None)
        parts = {"ctx": SimpleNamespace(stopping=stopping), "time_slicing": None, "failure": failure}
        vars(self.role).update(**waits, **parts, _follow=follow, _release_all=hand_over)


async def test_the_end_of_following_the_weights_does_not_end_the_hand_over() -> None:
    stopping = Stopping()
    async with asyncio.timeout(120):
        await stopping.role.run()
    assert stopping.handed


async def test_an_engine_that_cannot_follow_ends_the_hand_over() -> None:
    stopping = Stopping(ArithmeticError("of the weights"))
    with pytest.raises(ArithmeticError, match="of the weights"):
        async with asyncio.timeout(120):
            await stopping.role.run()
    assert not stopping.handed


@pytest.mark.parametrize(
    ("members", "sequences", "intake", "free"),
    [
        (0, 0, None, 3),
        # Of each of three groups one straggler is left: that is no reason to leave the engine empty.
        (3, 3, None, 3),
        (12, 12, None, 0),
        (11, 11, None, 1),
        # What is not yet on the queue takes room: nobody makes more than the queue takes.
        (12, 0, None, 0),
        (14, 14, None, 0),
        (4, 4, 1, 1),
        (4, 4, 0, 0),
    ],
)
def test_groups_are_admitted_by_the_members_in_progress(
    members: int, sequences: int, intake: int | None, free: int
) -> None:
    role = RolloutRole.__new__(RolloutRole)
    vars(role).update(
        config=cast(Any, RLConfig).model_construct(algorithm=AlgorithmTable(group_size=4)),
        settings=SimpleNamespace(groups_in_flight=3),
        work=SimpleNamespace(members=members, sequences=sequences),
        cap=None if intake is None else SimpleNamespace(room=lambda _: intake),
    )
    assert role._free() == free
