"""Episodes by the gateway's HTTP, over a real engine of a mixture of experts: rows are those that the engine went by,
and with them the model gives the log-probabilities again that were recorded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

GATEWAY = Path(__file__).resolve().parents[3] / "roles" / "gateway"
if str(GATEWAY) not in sys.path:
    sys.path.insert(0, str(GATEWAY))
pytest.importorskip("uvicorn")
pytest.importorskip("openai")

from engine_world import World, build  # noqa: E402
from gateway_world import running, tokenizer  # noqa: E402
from harness import replayed, routed  # noqa: E402
from openai import AsyncOpenAI  # noqa: E402

from relax_rt.roles.agentic import Task  # noqa: E402
from relax_rt.roles.agentic.episode import PlayedEpisode  # noqa: E402
from relax_rt.roles.agentic.samples import make_sample  # noqa: E402
from relax_rt.roles.base.sample import Sample  # noqa: E402
from relax_rt.roles.gateway.api import ClosedSession  # noqa: E402
from relax_rt.roles.gateway.service import AnswerPolicy  # noqa: E402
from relax_rt.transport.queue.ledger.messages import Ticket  # noqa: E402

TOLERANCE = 2e-4
TERMS = AnswerPolicy(models=("policy",), new_tokens=40, context=2048)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(build(tmp_path / "model", moe=True, vocabulary=len(tokenizer().raw)), moe=True)
    yield made
    made.close()


async def episode(world: World) -> ClosedSession:
    """Three turns, the second cut before a stop string, the third streamed; then another answer to the second."""
    async with running(lambda prompt, wanted: "", terms=TERMS) as gateway:
        gateway.gateway.service._generator = world  # type: ignore[assignment]
        key = gateway.episode(routing=True)
        async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0) as api:
            messages: list[Any] = []

            async def say(words: str, **how: Any) -> None:
                messages.append({"role": "user", "content": words})
                made = await api.chat.completions.create(model="policy", messages=messages, **how)
                if how.get("stream"):
                    text = "".join([chunk.choices[0].delta.content or "" async for chunk in made])
                else:
                    text = made.choices[0].message.content or ""
                messages.append({"role": "assistant", "content": text})

            await say("hello")
            await say("go on", stop=["a", "e", "1", " "])
            await say("and now?", stream=True)
            del messages[3:]
            messages.pop()
            await say("go on")
        found = gateway.sessions.close("episode-1")
    return msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=ClosedSession)


def sample_of(closed: ClosedSession, world: World) -> Sample:
    names = [said.id for said in closed.answers]
    played = PlayedEpisode(
        episode=closed.episode, rewards=dict.fromkeys(names, 0.5), states={}, truncated="", turns=4, cut=0, info={}
    )
    ticket = Ticket(group=4, prompt=9, attempt=1, size=2, version=1, lease_s=60.0)
    task = Task(index=0, item="train-0", split="train", seed=7)
    of = tokenizer()
    return make_sample(
        ticket, 1, task, played, tokenizer=of, sampling={}, player="env/0#1", routing=world.engine.routing
    )


def test_log_probabilities_are_those_of_the_rows(world: World) -> None:
    closed = world.run(episode(world))
    assert closed.episode.counts.drift == 0 and closed.episode.counts.realigned == 0
    sample = sample_of(closed, world)
    assert sample.routing is not None and len(sample.meta.branches) == 2
    model, version = world.model(world.version), 1 + world.version % 3
    for start, end in sample.meta.branches:
        ids, rows = sample.tokens[start:end].tolist(), sample.routing[start : end - 1]
        assert (rows == routed(world.folder, version, ids)).all()
        mask = sample.loss_mask[start + 1 : end].astype(bool)
        behaviour = sample.behaviour_logprobs[start + 1 : end]
        again = replayed(model, ids, rows, 1.0).numpy()
        assert mask.any() and np.abs(again - behaviour)[mask].max() < TOLERANCE
        # With others it gives others: what was replayed is what they say.
        elsewhere = replayed(model, ids, (rows + 1) % 8, 1.0).numpy()
        assert np.abs(elsewhere - behaviour)[mask].max() > 100 * TOLERANCE
    (first, second) = sample.meta.branches
    assert (sample.routing[first[1] - 1] == -1).all() and second[0] == first[1]
