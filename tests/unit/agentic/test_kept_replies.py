"""An episode that is played again is given the replies that it had, as long as it asks for them as it did before."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from agentic_parts import TASK, Count, Engine, factory, limits, numbers, talk

from relax_rt.roles.agentic import Chat, Reply, Step, Task
from relax_rt.roles.agentic.episode import Played, play
from relax_rt.roles.agentic.kept import FEW, Replies, Store, forget
from relax_rt.roles.agentic.pool import Lost, Stuck
from relax_rt.roles.router.requests import Outcome
from relax_rt.transport.queue.api import VersionSpan


class Dying(Count):
    """Is lost in a step, as often as it is told; says something else from then on, if it is to."""

    def __init__(self, deaths: int = 1, *, other: bool = False) -> None:
        super().__init__(4)
        self.deaths, self.other = deaths, other
        self.begun = 0

    async def reset(self, task: Task) -> Any:
        self.at, self.begun = 1, self.begun + 1
        return await super().reset(task)

    async def step(self, reply: Reply) -> Step:
        if self.at == 3 and self.deaths:
            self.deaths -= 1
            raise Lost("in step 3", why="its process was killed")
        step = await super().step(reply)
        if self.other and self.begun > 1 and self.at == 3:
            step.messages = "and now?"
        return step


async def again(game: Any, engine: Engine, path: Path, *, plays: bool = False) -> tuple[Played, list[int]]:
    """Play until it is not lost; also how many replies were given again each time."""
    used = []
    while True:
        said, kept = talk(engine.generate), Replies(path)
        said.kept = kept
        try:
            found = await play(factory(lambda: game, plays=plays), game, TASK, said, limits())
        except (Lost, Stuck):
            used.append(kept.used)
            continue
        return found, [*used, kept.used]


def tokens(played: Played) -> list[int]:
    (branch,) = played.episode.branches
    return [token for token, bit in zip(branch.tokens, branch.loss_mask, strict=True) if bit]


async def test_what_was_sampled_is_gone_on_with(tmp_path: Path) -> None:
    engine, game = Engine(numbers), Dying(2)
    engine.version = 3
    found, used = await again(game, engine, tmp_path / "0.0")
    # Three replies before the first death; then only the fourth is asked for.
    assert used == [0, 3, 3] and len(engine.said) == 4 and game.begun == 3
    assert tokens(found) == [token for said, _ in engine.said for token in said]
    assert found.reward == 2.0 and found.turns == 4
    (branch,) = found.episode.branches
    logprobs = [value for value, bit in zip(branch.logprobs, branch.loss_mask, strict=True) if bit]
    assert logprobs == [value for _, values in engine.said for value in values]
    assert {(span.version, span.kv_version) for span in branch.versions} == {(3, 3)}


async def test_behind_other_words_everything_is_sampled_anew(tmp_path: Path) -> None:
    engine, game = Engine(numbers), Dying(other=True)
    found, used = await again(game, engine, tmp_path / "0.0")
    # The first two prompts were as before; the third was not, and its old reply is not in the episode.
    assert used == [0, 2] and len(engine.said) == 5
    first, second, _, third, fourth = (said for said, _ in engine.said)
    assert tokens(found) == [*first, *second, *third, *fourth]


async def test_functions_are_gone_on_with_too(tmp_path: Path) -> None:
    lost = [True]

    async def plays(task: Task, chat: Chat) -> float:
        messages = [{"role": "user", "content": "go"}]
        for turn in range(3):
            reply = await chat.say(messages)
            messages = [*messages, reply.message, {"role": "user", "content": str(turn)}]
            if turn == 1 and lost:
                lost.clear()
                engine.trouble = True
        return 1.0

    class Failing(Engine):
        trouble = False

        async def generate(self, wanted: Any) -> Outcome:
            if self.trouble:
                self.trouble = False
                raise Lost("a reply", why="no engine")
            return await super().generate(wanted)

    engine = Failing(numbers)
    found, used = await again(plays, engine, tmp_path / "0.0", plays=True)
    assert used == [0, 2] and len(engine.said) == 3 and found.turns == 3


def made(version: int = 2) -> Outcome:
    return Outcome(
        kind="done",
        finish_reason="stop",
        tokens=[1, 2],
        logprobs=[-0.5, -1.0],
        versions=[VersionSpan(0, 1, version, version), VersionSpan(1, 2, version + 1, version)],
        routing=b"ab",
    )


def test_replies_outlive_their_process_and_a_torn_end(tmp_path: Path) -> None:
    path = tmp_path / "replies"
    one = Replies(path)
    assert one.oldest() == 0 and one.take(1, (5,)) is None
    one.add(1, (5, 6), made())
    one.add(2, (5, 6, 7), made(4))
    path.write_bytes(path.read_bytes()[:-3])
    again = Replies(path)
    assert again.oldest() == 2 and again.take(2, (5, 6, 7)) is None
    assert again.take(1, (5, 7)) is None and again.take(2, (5, 6)) is None
    assert again.take(1, (5, 6)) == made() and again.take(1, (5, 6)) is None and again.used == 1
    forget([again])
    assert not path.exists() and Replies(path).oldest() == 0


def test_a_disk_that_is_full_costs_no_episode(tmp_path: Path) -> None:
    Replies(tmp_path / "nowhere" / "replies").add(1, (5,), made())


@pytest.mark.parametrize("seats", [1, 2])
def test_replies_are_found_by_prompt_and_member_until_they_are_too_old(tmp_path: Path, seats: int) -> None:
    newest = [2]
    store = Store(tmp_path, seats, 100.0, lambda version: newest[0] - version > 1)
    for number, replies in enumerate(store.of(9, 3)):
        replies.add(1, (number,), made())
    again = Store(tmp_path, seats, 100.0, lambda version: newest[0] - version > 1)
    assert [one.oldest() for one in again.of(9, 3)] == [2] * seats
    assert [one.oldest() for one in again.of(9, 3 - seats)] == [0] * seats
    newest[0] = 4
    assert [one.oldest() for one in again.of(9, 3)] == [0] * seats == [one.oldest() for one in store.of(9, 3)]
    (replies, *_) = store.of(9, 3)
    replies.add(1, (0,), made(4))
    store.forget(9, 3 // seats * seats)
    assert store.of(9, 3)[0].oldest() == 0


def test_what_nobody_goes_on_with_is_removed(tmp_path: Path) -> None:
    store = Store(tmp_path, 1, 100.0, lambda version: False)
    for member in (0, 1):
        store.of(7, member)[0].add(1, (1,), made())
    os.utime(tmp_path / "episodes" / "7.0", (1.0, 1.0))
    for _ in range(FEW):
        store.of(8, 0)
    assert sorted(path.name for path in (tmp_path / "episodes").iterdir()) == ["7.1"]
