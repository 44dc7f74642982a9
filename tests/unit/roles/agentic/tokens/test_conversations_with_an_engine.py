"""From a conversation to what the trainer's packing hands the model: token for token what a real engine sampled.

Clients talk, fork, edit, change history and call tools; weights are swapped between tokens, with the KV cache kept or
computed again; sequences are taken away and gone on with. Tokens, versions and log-probabilities are those that the
engine told, behind the very context that it had; at the version of each token the model gives the same log-probability
again, unless the token is marked as sampled on an older cache.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
from chat_fixtures import TOOLS, user
from engine_world import Sampled, World, build, chat
from harness import routed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from relax_rt.roles.agentic import Reply, Task  # noqa: E402
from relax_rt.roles.agentic.episode import EpisodeChat, EpisodeLimits, PlayedEpisode, ReplySampling, play  # noqa: E402
from relax_rt.roles.agentic.loading import Factory  # noqa: E402
from relax_rt.roles.agentic.samples import make_sample  # noqa: E402
from relax_rt.roles.agentic.tokens.ledger import TokenLedger  # noqa: E402
from relax_rt.roles.base.sample import Sample, SampleMeta  # noqa: E402
from relax_rt.roles.training.batch.collate import (  # noqa: E402
    MicroBatch,
    collate,
    token_logprobs,
)
from relax_rt.roles.training.batch.rows import shared_rows  # noqa: E402
from relax_rt.transport.queue.ledger.messages import Ticket  # noqa: E402

TASK = Task(index=0, item="train-0", split="train", seed=7)
TICKET = Ticket(group=4, prompt=9, attempt=1, size=2, version=1, lease_s=60.0)
LIMITS = EpisodeLimits(max_turns=64, max_new_tokens=10, turn_timeout_s=60.0, episode_timeout_s=120.0)
TOLERANCE = 2e-4
WORDS = st.sampled_from(["yes", "No, it is not.", "a\nb", "1 + 1 = 2", "<|eot|>", '{"a": 1}', "x" * 20])


@dataclass
class View:
    """A conversation as its client has it, and the reply that it ends with."""

    messages: list[dict[str, Any]]
    reply: Reply | None = None


@dataclass
class Client:
    """Talks as hypothesis says, and has the engine's weights changed meanwhile."""

    world: World
    draw: Callable[[Any], Any]
    temperature: float
    tools: list[dict[str, Any]]
    drift: Any
    views: list[View] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)

    async def talk(self, seed: int) -> PlayedEpisode:
        stops = chat().tokenizer.stop_ids | frozenset(chat().encode("abcdefghij"))
        ledger = TokenLedger(chat(), max_tokens=1 << 16, drift=self.drift, session="s")
        sampling = ReplySampling(
            seed=seed, temperature=self.temperature, stop_ids=stops, session="s", routing=self.world.moe
        )
        talk = EpisodeChat(ledger, self.world.generate, LIMITS, sampling)
        return await play(Factory("test", lambda: self, blocking=False, plays=True), self.plays, TASK, talk, LIMITS)

    async def plays(self, task: Task, talk: EpisodeChat) -> float:
        for _ in range(self.draw(st.integers(1, 4))):
            await self.step(talk)
        return 0.5

    async def step(self, talk: EpisodeChat) -> None:
        asked = [self.following() for _ in range(self.draw(st.sampled_from([1, 1, 2])))]
        swap, kv = (
            self.draw(st.sampled_from(["", "before", "within"])),
            self.draw(st.sampled_from(["keep", "recompute"])),
        )
        if swap == "before":
            await self.world.swap(kv)
        self.world.engine.left = self.draw(st.integers(1, 6)) if swap == "within" else None
        self.world.move = self.draw(st.integers(0, 6))
        tasks = [asyncio.create_task(talk.say(view.messages, self.tools, previous=view.reply or "")) for view in asked]
        if swap == "within":
            await self.world.until_it_stands(tasks)
            await self.world.swap(kv)
            self.world.engine.left = None
        for view, reply in zip(asked, await asyncio.gather(*tasks), strict=True):
            self.views.append(View([*view.messages, self.sent_back(reply)], reply))
            self.seen["calls"] += bool(reply.tool_calls)
            if self.draw(st.booleans()):
                talk.reward(0.25, reply)

    def following(self) -> View:
        """It begins, goes on from anywhere, puts its last words otherwise, asks again, or changes history."""
        old = self.draw(st.sampled_from(self.views)) if self.views else View([])
        how = self.draw(st.sampled_from(["go on", "go on", "go on", "begin", "edit", "repeat", "rewrite"]))
        if how == "begin" or old.reply is None:
            return View([user(self.draw(WORDS))])
        if how == "go on":
            # One that a policy has dropped cannot be named any more.
            named = old.reply if self.drift == "fork" and self.draw(st.booleans()) else None
            return View([*old.messages, *self.answers(old.reply)], named)
        before = [place for place, message in enumerate(old.messages) if message["role"] == "assistant"][-1]
        if how == "repeat":
            return View(old.messages[:before])
        if how == "edit":
            return View([*old.messages[: before - 1], user(self.draw(WORDS) + "?")])
        place = self.draw(st.integers(0, before - 1))
        changed = {**old.messages[place], "content": "Never mind."}
        return View([*old.messages[:place], changed, *old.messages[place + 1 :], user("So?")])

    def answers(self, reply: Reply) -> list[dict[str, Any]]:
        results = [
            {"role": "tool", "content": self.draw(WORDS), "tool_call_id": call["id"]} for call in reply.tool_calls
        ]
        return results or [user(self.draw(WORDS))]

    def sent_back(self, reply: Reply) -> dict[str, Any]:
        """With space around words, and arguments spaced otherwise."""
        message = copy.deepcopy(reply.message)
        if message["content"]:
            message["content"] = f" {message['content'].strip()}\n"
        for call in message.get("tool_calls", ()):
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())), indent=1)
        return message


def through_the_queue(played: PlayedEpisode, world: World) -> Sample:
    """The sample as the trainer has it: its meta went over the wire."""
    sample = make_sample(
        TICKET,
        1,
        TASK,
        played,
        tokenizer=chat().tokenizer,
        sampling={},
        player="env/0#1",
        routing=world.engine.routing,
    )
    sample.meta = msgspec.msgpack.decode(msgspec.msgpack.encode(sample.meta), type=SampleMeta)
    return sample


def places(sample: Sample, sampled: list[Sampled]) -> dict[int, tuple[Sampled, int]]:
    """Which token of which completion stands at each trained place; each completion is there once, or was dropped."""
    left, found = list(sampled), {}
    tokens, mask = sample.tokens.tolist(), sample.loss_mask
    for start, end in sample.meta.branches or [(0, len(tokens))]:
        for turn in sample.meta.turns:
            if turn.role != "assistant" or not start <= turn.start < end:
                assert turn.role == "assistant" or not mask[turn.start : turn.end].any()
                continue
            behind, said = tuple(tokens[start : turn.start]), tokens[turn.start : turn.end]
            logprobs = sample.behaviour_logprobs[turn.start : turn.end]
            one = next(
                one
                for one in left
                if one.prompt == behind
                and one.what.tokens == said
                and np.array_equal(np.array(one.what.logprobs, np.float32), logprobs)
            )
            left.remove(one)
            assert mask[turn.start : turn.end].all()
            found |= {turn.start + at: (one, at) for at in range(len(said))}
    assert sorted(found) == np.flatnonzero(mask).tolist()
    assert not sample.behaviour_logprobs[mask == 0].any()
    sampled[:] = left
    return found


def versions(spans: Any) -> dict[int, tuple[int, int]]:
    return {at: (span.version, span.kv_version) for span in spans for at in range(span.start, span.end)}


def check_handed(batch: MicroBatch, sample: Sample, found: dict[int, tuple[Sampled, int]]) -> None:
    """What the model is given for each trained token: all that the engine had before it, in order, and nothing else."""
    assert sorted(batch.token.tolist()) == sorted(found)
    for m, place in enumerate(batch.token.tolist()):
        one, at = found[place]
        row, last = int(batch.predict_row[m]), int(batch.predict_at[m])
        seen = batch.mask[row, 0, last].nonzero()[:, 0]
        assert batch.positions[row, seen].tolist() == list(range(len(one.prompt) + at))
        assert batch.ids[row, seen].tolist() == [*one.prompt, *one.what.tokens[:at]]
        assert int(batch.targets[m]) == one.what.tokens[at]
        assert float(batch.behaviour[m]) == float(np.float32(one.what.logprobs[at]))


def check_recomputed(client: Client, batch: MicroBatch, of: dict[int, tuple[int, int]]) -> None:
    """At a token's version the model gives its log-probability again, where its cache was of that version, too."""
    for version in {version for version, _ in of.values()}:
        with torch.no_grad():
            again, _ = token_logprobs(
                client.world.model(version), batch, temperature=client.temperature, autocast=False
            )
        caches = [of[place] for place in batch.token.tolist()]
        same, older = (torch.tensor([v == version and (kv == v) is own for v, kv in caches]) for own in (True, False))
        wrong = (again - batch.behaviour).abs() > TOLERANCE
        assert not wrong[same].any()
        # Marked for a reason: no single version gives these again.
        client.seen["not of one version"] += int(wrong[older].sum())
    client.seen["kept"] += sum(kv != version for version, kv in of.values())


def check_context_rows(client: Client, sample: Sample, found: dict[int, tuple[Sampled, int]]) -> None:
    """The experts of what was rendered, in the pass from which the first token behind it was sampled: of branches that
    train all that was sampled in them, where a completion is of one version. A branch's last token was sent nowhere."""
    assert sample.routing is not None
    for start, end in sample.meta.branches or [(0, len(sample.tokens))]:
        turns = [turn for turn in sample.meta.turns if start <= turn.start < end]
        assert end == len(sample.tokens) or (sample.routing[end - 1] == -1).all()
        if any(turn.role == "context" for turn in turns):
            continue
        at = start
        for turn in (turn for turn in turns if turn.role == "assistant"):
            one, _ = found[turn.start]
            known = set(versions(one.what.versions).values())
            if len(known) == 1 and len(set(*known)) == 1:
                expected = routed(client.world.folder, 1 + one.what.versions[0].version % 3, one.prompt)
                assert (sample.routing[at : turn.start - 1] == expected[at - start :]).all()
                client.seen["rows behind others"] += at > start
            at = turn.end - 1


def check_rows(client: Client, sample: Sample, found: dict[int, tuple[Sampled, int]]) -> None:
    """The experts of the pass that each trained token was sampled from."""
    assert sample.routing is not None and len(sample.routing) == len(sample.tokens) - 1
    for one in {id(one): one for one, _ in found.values()}.values():
        ids = [*one.prompt, *one.what.tokens]
        of = versions(one.what.versions)
        expected = {v: routed(client.world.folder, 1 + v % 3, ids) for v in {v for v, _ in of.values()}}
        for place, (own, at) in found.items():
            if own is one and of[at][0] == of[at][1]:
                assert (sample.routing[place - 1] == expected[of[at][0]][len(one.prompt) + at - 1]).all()


def converse(world: World, data: st.DataObject) -> Client:
    draw = data.draw
    world.sampled.clear()
    client = Client(
        world,
        draw,
        temperature=draw(st.sampled_from([1.0, 0.7])),
        tools=draw(st.sampled_from([TOOLS, []])),
        drift=draw(st.sampled_from(["fork", "realign", "drop"])),
    )
    played = world.run(client.talk(draw(st.integers(0, 1 << 40))))
    sample = through_the_queue(played, world)
    sampled = list(world.sampled.values())
    found = places(sample, sampled)
    assert sum(len(one.what.tokens) for one in sampled) == played.episode.counts.dropped_tokens
    of = versions(sample.versions)
    assert of == {place: versions(one.what.versions)[at] for place, (one, at) in found.items()}
    batch = collate(shared_rows([sample], 1 << 14))
    check_handed(batch, sample, found)
    check_recomputed(client, batch, of)
    if world.moe:
        check_rows(client, sample, found)
        check_context_rows(client, sample, found)
    per_reply = [len({v for v, _ in versions(one.what.versions).values()}) for one, _ in found.values()]
    client.seen["swapped within"] += max(per_reply) > 1
    client.seen["branches"] += bool(sample.meta.branches)
    client.seen["drift"] += played.episode.counts.drift
    return client


@pytest.fixture(scope="module", params=["dense", "experts"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    moe = request.param == "experts"
    made = World(build(tmp_path_factory.mktemp(request.param), moe=moe), moe=moe)
    yield made
    made.close()


def many(world: World, examples: int) -> Counter[str]:
    seen: Counter[str] = Counter()

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(st.data())
    def one(data: st.DataObject) -> None:
        seen.update(converse(world, data).seen)

    one()
    return seen


def test_what_the_trainer_is_handed_is_what_the_engine_sampled(world: World) -> None:
    seen = many(world, 10)
    # These are conversations that have something to get wrong.
    wanted = ("branches", "swapped within", "kept", "not of one version", *["rows behind others"] * world.moe)
    assert all(seen[what] for what in wanted) and world.moved, seen


@pytest.mark.long
def test_the_same_of_many_conversations(world: World) -> None:
    seen = many(world, 100)
    wanted = ("branches", "swapped within", "kept", "not of one version", "drift", "calls")
    assert all(seen[what] for what in wanted) and world.moved, seen
