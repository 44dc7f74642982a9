"""An episode that is played again is given the replies that it had, as long as it asks for them as it did before."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from episode_kit import TASK, Count, Engine, factory, limits, numbers, talk

from relax_rt.roles.agentic import Chat, Reply, Step, Task
from relax_rt.roles.agentic.episode import PlayedEpisode, play
from relax_rt.roles.agentic.interface import EnvironmentStuck, EpisodeLost
from relax_rt.roles.agentic.replay_cache import SWEEP_EVERY, ReplayCache, ReplayStore, clear_all
from relax_rt.roles.rollout.engines.routing import PART_TOKENS
from relax_rt.roles.rollout.router.core import GenerationRequest, Outcome
from relax_rt.transport.queue.ledger.messages import VersionSpan


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
            raise EpisodeLost("in step 3", why="its process was killed")
        step = await super().step(reply)
        if self.other and self.begun > 1 and self.at == 3:
            step.messages = "and now?"
        return step


async def again(game: Any, engine: Engine, path: Path, *, plays: bool = False) -> tuple[PlayedEpisode, list[int]]:
    """Play until it is not lost; also how many replies were given again each time."""
    used = []
    while True:
        said, kept = talk(engine.generate), ReplayCache(path)
        said.replay = kept
        try:
            found = await play(factory(lambda: game, plays=plays), game, TASK, said, limits())
        except (EpisodeLost, EnvironmentStuck):
            used.append(kept.replayed)
            continue
        return found, [*used, kept.replayed]


def tokens(played: PlayedEpisode) -> list[int]:
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
                raise EpisodeLost("a reply", why="no engine")
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
        prompt_routing=b"p",
    )


def test_replies_outlive_their_process_and_a_torn_end(tmp_path: Path) -> None:
    path = tmp_path / "replies"
    one = ReplayCache(path)
    assert one.oldest() == 0 and one.take(1, (5,)) is None
    one.add(1, (5, 6), made())
    one.add(2, (5, 6, 7), made(4))
    path.write_bytes(path.read_bytes()[:-3])
    again = ReplayCache(path)
    assert again.oldest() == 2 and again.take(2, (5, 6, 7)) is None
    assert again.take(1, (5, 7)) is None and again.take(2, (5, 6)) is None
    assert again.take(1, (5, 6)) == made() and again.take(1, (5, 6)) is None and again.replayed == 1
    clear_all([again])
    assert not path.exists() and ReplayCache(path).oldest() == 0


def test_a_reply_without_the_routing_rows_that_are_lacking_is_sampled_anew(tmp_path: Path) -> None:
    """A prompt of three has rows of two positions before its last; the reply brought that of the second."""
    for rows, plain, there in ((None, True, True), (None, False, True), (1, False, True), (2, False, True),
                               (0, False, False), (1, True, False)):  # fmt: skip
        kept = ReplayCache(tmp_path / f"{rows} {plain}")
        reply = msgspec.structs.replace(made(), routing=b"", prompt_routing=b"") if plain else made()
        kept.add(1, (5, 6, 7), reply)
        again = ReplayCache(tmp_path / f"{rows} {plain}")
        assert again.take(1, (5, 6, 7), rows) == (reply if there else None) and again.replayed == there


async def test_rows_are_given_again_with_their_replies(tmp_path: Path) -> None:
    """Also where the episode was played without rows before: then it has them all, and nothing of then."""
    asked: list[tuple[int, int]] = []

    def routed(engine: Engine) -> Any:
        async def generate(wanted: GenerationRequest) -> Outcome:
            done = await engine.generate(wanted)
            assert wanted.routing and wanted.chunk_tokens == PART_TOKENS
            asked.append((wanted.rows_from, len(wanted.prompt)))
            rows, number = len(wanted.prompt) - 1 - wanted.rows_from, bytes([len(asked)])
            return msgspec.structs.replace(done, routing=number * len(done.tokens), prompt_routing=number * rows)

        return generate

    engine, game = Engine(numbers), Dying(1)
    found = await play_again(game, lambda: routed(engine), tmp_path / "0.0")
    (branch,) = found.episode.branches
    assert len(branch.routing) == len(branch.tokens) - 1 and [*branch.routing] == sorted(branch.routing)
    assert set(branch.routing) == {1, 2, 3, 4} and len(asked) == 4
    assert [start for start, _ in asked[1:]] == [end for _, end in lengths(found)[:-1]]
    plain = Engine(numbers)
    game = Dying(1)
    with pytest.raises(EpisodeLost):
        await once(game, plain.generate, tmp_path / "0.1", routing=False)
    asked.clear()
    found = await once(game, routed(plain), tmp_path / "0.1", routing=True)
    (branch,) = found.episode.branches
    assert len(branch.routing) == len(branch.tokens) - 1 and len(asked) == 4


def lengths(played: PlayedEpisode) -> list[tuple[int, int]]:
    """Of each reply: where it begins, and the position of its last token."""
    (branch,) = played.episode.branches
    return [(turn.start, turn.end - 1) for turn in branch.turns if turn.response]


async def once(game: Any, generate: Any, path: Path, *, routing: bool) -> PlayedEpisode:
    said = talk(generate)
    said._sampling = msgspec.structs.replace(said._sampling, routing=routing)
    said.replay = ReplayCache(path)
    return await play(factory(lambda: game), game, TASK, said, limits())


async def play_again(game: Any, generate: Any, path: Path) -> PlayedEpisode:
    """Play until it is not lost, with rows."""
    while True:
        try:
            return await once(game, generate(), path, routing=True)
        except EpisodeLost:
            continue


def test_a_disk_that_is_full_costs_no_episode(tmp_path: Path) -> None:
    ReplayCache(tmp_path / "nowhere" / "replies").add(1, (5,), made())


@pytest.mark.parametrize("seats", [1, 2])
def test_replies_are_found_by_prompt_and_member_until_they_are_too_old(tmp_path: Path, seats: int) -> None:
    newest = [2]
    store = ReplayStore(tmp_path, seats, 100.0, lambda version: newest[0] - version > 1)
    for number, replies in enumerate(store.caches_of(9, 3)):
        replies.add(1, (number,), made())
    again = ReplayStore(tmp_path, seats, 100.0, lambda version: newest[0] - version > 1)
    assert [one.oldest() for one in again.caches_of(9, 3)] == [2] * seats
    assert [one.oldest() for one in again.caches_of(9, 3 - seats)] == [0] * seats
    newest[0] = 4
    assert (
        [one.oldest() for one in again.caches_of(9, 3)]
        == [0] * seats
        == [one.oldest() for one in store.caches_of(9, 3)]
    )
    (replies, *_) = store.caches_of(9, 3)
    replies.add(1, (0,), made(4))
    store.clear(9, 3 // seats * seats)
    assert store.caches_of(9, 3)[0].oldest() == 0


def test_what_nobody_goes_on_with_is_removed(tmp_path: Path) -> None:
    store = ReplayStore(tmp_path, 1, 100.0, lambda version: False)
    for member in (0, 1):
        store.caches_of(7, member)[0].add(1, (1,), made())
    os.utime(tmp_path / "episodes" / "7.0", (1.0, 1.0))
    for _ in range(SWEEP_EVERY):
        store.caches_of(8, 0)
    assert sorted(path.name for path in (tmp_path / "episodes").iterdir()) == ["7.1"]
