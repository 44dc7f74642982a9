"""Episodes of an environment that shows images: from what it shows to what the trainer recomputes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio
from harness import Driver, Traits
from tiny_vision import CONTEXT, encoded_image, part

from relax_rt.roles.agentic import Observation, Reply, Step, Task
from relax_rt.roles.agentic.adapters.gymnasium import image_url
from relax_rt.roles.agentic.episode import EpisodeChat, EpisodeLimits, ReplySampling, play
from relax_rt.roles.agentic.interface import EnvironmentFailed
from relax_rt.roles.agentic.loading import Factory
from relax_rt.roles.agentic.replay_cache import ReplayCache
from relax_rt.roles.agentic.samples import make_sample
from relax_rt.roles.agentic.tokens.ledger import TokenLedger
from relax_rt.roles.agentic.tokens.template import ChatTemplate
from relax_rt.roles.base.sample import Sample, generated_columns, read_sample
from relax_rt.roles.data.media.image_processor import load_image_processor
from relax_rt.roles.data.media.images import ImageSpan, image_digest
from relax_rt.roles.models.tokenizer import load_tokenizer
from relax_rt.roles.rollout.engines.embedded import EmbeddedEngine
from relax_rt.roles.rollout.generation import GenerationService
from relax_rt.roles.rollout.router.core import GenerationRequest, Outcome, RequestState
from relax_rt.roles.rollout.router.interface import SequenceRequest
from relax_rt.roles.training.algorithms.settings import AlgorithmTable
from relax_rt.roles.training.torch.backend import TorchBackend
from relax_rt.transport.queue.ledger.messages import Ticket

pytest.importorskip("torch")
pytest.importorskip("PIL")
TASK = Task(index=0, item="train-0", split="train", seed=7)
LIMITS = EpisodeLimits(max_turns=8, max_new_tokens=8, turn_timeout_s=20.0, episode_timeout_s=60.0)


class World:
    """A real engine, reached as a router reaches it: orders and pieces cross the wire."""

    def __init__(self, driver: Driver, chat: ChatTemplate) -> None:
        self.driver, self.chat = driver, chat
        self.service = GenerationService(1, driver.engine, asyncio.Event())
        self.asked: list[GenerationRequest] = []

    async def generate(self, wanted: GenerationRequest) -> Outcome:
        self.asked.append(wanted)
        life = RequestState(len(self.asked), wanted, 0.0, 3, lowest_version=0)
        life.assign(0.0, "rollout/0", 1)
        order = SequenceRequest(
            prompt=list(wanted.prompt),
            seed=wanted.seed,
            temperature=wanted.temperature,
            max_new_tokens=wanted.max_new_tokens,
            stop_ids=sorted(wanted.stop_ids),
            allowed=[0],
            media=list(wanted.media),
        )
        async for piece in self.service.generate(
            msgspec.msgpack.decode(msgspec.msgpack.encode(order), type=SequenceRequest)
        ):
            assert life.add(0.0, piece) == ""
        assert life.outcome is not None
        return life.outcome

    def talk(self, kept: ReplayCache | None = None) -> EpisodeChat:
        ledger = TokenLedger(self.chat, max_tokens=CONTEXT, session="s")
        sampling = ReplySampling(seed=3, temperature=1.0, stop_ids=self.chat.tokenizer.stop_ids, session="s")
        found = EpisodeChat(ledger, self.generate, LIMITS, sampling)
        found.replay = kept
        return found


@pytest_asyncio.fixture
async def world(seeing: Path) -> AsyncIterator[World]:
    engine = EmbeddedEngine(seeing, dtype="float32", max_sequences=4, threads=1)
    driver = Driver(engine, seeing, Traits())
    found = World(driver, ChatTemplate(load_tokenizer(seeing), image_processor=load_image_processor(seeing)))

    def arrive(chunks: list[Any]) -> None:
        assert found.service.take_chunks(chunks) == []

    await engine.start(arrive, driver._fail)
    yield found
    await engine.close(10.0)


class Gallery:
    """Shows an image each turn, as gymnasium's adapter does, now and then the same once more."""

    def __init__(self, last: int = 4, seed: int = 1) -> None:
        self.draw, self.first, self.last, self.turn = random.Random(seed), 10 * seed, last, 0

    def shown(self) -> dict[str, Any]:
        pixels = np.random.default_rng(self.first + self.draw.randrange(3)).integers(
            0, 256, (20, 24, 3), dtype=np.uint8
        )
        return {"type": "image_url", "image_url": {"url": image_url(pixels)}}

    async def reset(self, task: Task) -> Observation:
        content = [{"type": "text", "text": "what is it?"}, self.shown()]
        return Observation(messages=[{"role": "user", "content": content}])

    async def step(self, reply: Reply) -> Step:
        self.turn += 1
        return Step(messages=[{"role": "user", "content": [self.shown()]}], reward=0.25, done=self.turn == self.last)


def factory(make: Any, *, plays: bool = False) -> Factory:
    return Factory("test", make, blocking=False, plays=plays)


def sample_of(world: World, played: Any) -> Sample:
    ticket = Ticket(1, 0, 0, 1, 0, 60.0)
    return make_sample(
        ticket, 0, TASK, played, tokenizer=world.chat.tokenizer, sampling={}, player="env/0#1", has_vision=True
    )


class Leased(dict[str, Any]):
    """A sample's columns, as the queue's client gives them."""

    masked = ()
    versions = ()

    def decode(self, name: str, kind: Any) -> Any:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(self[name]), type=kind)


def agrees(world: World, sample: Sample) -> None:
    """What the queue gives the trainer is computed with the images, to the log-probabilities that were sampled."""
    columns = generated_columns(sample)
    assert sample.media and set(columns["media"].values()) == {one.data for one in sample.media}
    taken = read_sample(Leased(columns))  # type: ignore[arg-type]
    assert taken.media == sample.media
    trainer = TorchBackend(
        world.driver.folder,
        AlgorithmTable(),
        dtype="float32",
        threads=1,
        tokens_per_micro_batch=2048,
        temperature=1.0,
        on_progress=lambda _: None,
    )
    (found,) = trainer.log_probabilities([taken])
    assert np.abs(found - sample.behaviour_logprobs).max() < 2e-4
    blind = [ImageSpan(one.start, one.end, encoded_image(99)) for one in taken.media]
    (found,) = trainer.log_probabilities([msgspec.structs.replace(taken, media=blind)])
    assert np.abs(found - sample.behaviour_logprobs).max() > 0.1, "the images make no difference"


async def test_an_episode_of_images_is_trained_on_what_was_seen(world: World) -> None:
    played = await play(factory(Gallery), Gallery(), TASK, world.talk(), LIMITS)
    assert played.turns == 4 and played.reward == 1.0
    (branch,) = played.episode.branches
    assert [len(wanted.media) for wanted in world.asked] == [1, 2, 3, 4]
    assert branch.tokens[: len(world.asked[-1].prompt)] == world.asked[-1].prompt
    assert [one.digest for one in branch.media] == [image_digest(one.data) for one in world.asked[-1].media]
    assert len(played.episode.images) < 4, "none was shown twice"
    agrees(world, sample_of(world, played))


async def test_branches_have_the_images_of_their_own(world: World) -> None:
    async def both(task: Task, chat: Any) -> float:
        def asked(number: int) -> Any:
            return {"role": "user", "content": [part(encoded_image(number)), {"type": "text", "text": "and this?"}]}

        first = await chat.say([asked(1)])
        for number in (2, 3):
            await chat.say([asked(1), first.message, asked(number)], previous=first)
        await chat.say([asked(4)])
        return 1.0

    played = await play(factory(both, plays=True), both, TASK, world.talk(), LIMITS)
    images = played.episode.images
    seen = [[images[one.digest] for one in branch.media] for branch in played.episode.branches]
    assert sorted(seen) == sorted(
        [[encoded_image(1), encoded_image(2)], [encoded_image(1), encoded_image(3)], [encoded_image(4)]]
    )
    agrees(world, sample_of(world, played))


async def test_a_reply_is_given_again_only_behind_the_same_images(world: World, tmp_path: Path) -> None:
    await play(factory(Gallery), Gallery(), TASK, world.talk(ReplayCache(tmp_path / "kept")), LIMITS)
    made = len(world.asked)
    again = ReplayCache(tmp_path / "kept")
    await play(factory(Gallery), Gallery(), TASK, world.talk(again), LIMITS)
    assert again.replayed == 4 and len(world.asked) == made
    other = ReplayCache(tmp_path / "kept")
    await play(factory(Gallery), Gallery(seed=5), TASK, world.talk(other), LIMITS)
    assert other.replayed == 0 and len(world.asked) == made + 4


@pytest.mark.parametrize(
    ("shown", "why"),
    [
        (part(b"no image"), "cannot be read"),
        ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, "nothing is fetched"),
        ({"type": "input_audio", "input_audio": {}}, "'input_audio', and the model takes texts and images"),
    ],
)
async def test_an_environment_that_shows_what_cannot_be_seen_is_told(world: World, shown: Any, why: str) -> None:
    class Odd(Gallery):
        def shown(self) -> dict[str, Any]:
            return dict(shown)

    with pytest.raises(EnvironmentFailed, match=why):
        await play(factory(Odd), Odd(), TASK, world.talk(), LIMITS)
    assert not world.asked
