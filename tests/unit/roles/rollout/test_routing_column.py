"""Routing rows on their way from a completion into the queue and out of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from relax_rt.roles.base.sample import read_sample
from relax_rt.roles.data.source import PromptSource
from relax_rt.roles.models.tokenizer import ChatTokenizer
from relax_rt.roles.rollout.engines.base import Completion, GroupRequest
from relax_rt.roles.rollout.engines.routing import RoutingShape, encode_rows
from relax_rt.roles.rollout.samples import SampleMaker, as_put
from relax_rt.roles.rollout.work import ActiveGroup, RolloutWork
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.queue.broker import Broker
from relax_rt.transport.queue.client import QueueClient
from relax_rt.transport.queue.ledger.messages import Ticket, VersionSpan
from relax_rt.transport.queue.ledger.policy import LedgerPolicy, QueueLimits
from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.rpc.identity import Incarnation

SHAPE = RoutingShape(layers=3, chosen=2)
PROMPT, SAMPLED = (11, 12, 13, 14), ([5, 6], [7, 8, 9])
ENGINE, READER = Incarnation("rollout/0", 1), Incarnation("reader/0", 2)


def rows(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-1, 128, (count, 3, 2)).astype(np.int16)


def completion(member: int, prompt: bytes, sampled: bytes) -> Completion:
    tokens = SAMPLED[member]
    spans = [VersionSpan(0, len(tokens), 1, 1)]
    return Completion(1, member, tokens, [-0.5] * len(tokens), spans, "stop", bytearray(sampled), prompt)


def maker() -> SampleMaker:
    item = SimpleNamespace(tokens=PROMPT, item="i", split="train", answer="a", info={})
    source = SimpleNamespace(prompt=lambda *_: item, sample_seed=lambda *_: 1)
    tokenizer = SimpleNamespace(tokenizer_digest="t", template_digest="c")
    return SampleMaker(
        cast(PromptSource, source),
        cast(ChatTokenizer, tokenizer),
        temperature=1.0,
        max_new_tokens=9,
        engine="rollout/0",
        routing=SHAPE,
    )


def job(ticket: Ticket) -> ActiveGroup:
    request = GroupRequest(
        id=1, prompt=PROMPT, seeds=(1, 2), temperature=1.0, max_new_tokens=9, stop_ids=frozenset(), routing=True
    )
    return RolloutWork(0, SHAPE.row_bytes).add(1, ticket, request)


class Calls:
    """The broker's interface for one caller."""

    def __init__(self, broker: Broker, callers: list[Incarnation], who: Incarnation) -> None:
        self._broker, self._callers, self._who = broker, callers, who

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*arguments: Any) -> Any:
            self._callers[0] = self._who
            return await getattr(self._broker, name)(*arguments)

        return call


async def test_routing_rows_reach_consumers_of_the_column(tmp_path: Path) -> None:
    fields = ("tokens", "loss_mask", "behaviour_logprobs", "meta", "routing")
    policy = LedgerPolicy(group_size=2, prompts_per_step=1, tasks={"train": fields})
    callers, shm = [READER], tmp_path / "shm"
    shm.mkdir()
    broker = Broker(
        tmp_path / "queue", shm, run_id="run", policy=policy, limits=QueueLimits(), identify=lambda: callers[0]
    )
    await broker.open()
    sizes = {"slab_bytes": 1 << 16, "capacity_bytes": 1 << 18}
    try:
        async with (
            QueueClient(cast(Any, Calls(broker, callers, ENGINE)), ENGINE, shm, **sizes) as engine,
            QueueClient(cast(Any, Calls(broker, callers, READER)), READER, shm, **sizes) as reader,
        ):
            await reader.rollback(0, VersionRecord(1, 0, 0))
            (ticket,) = (await engine.admit(1, 1, wait_s=0)).tickets
            wanted = [rows(3 + len(tokens), member) for member, tokens in enumerate(SAMPLED)]
            made = [
                maker().make(job(ticket), completion(member, encode_rows(all_of[:3]), encode_rows(all_of[3:])))
                for member, all_of in enumerate(wanted)
            ]
            await engine.put_samples([as_put(sample) for sample in made])
            batch = await reader.lease("train", groups=1, wait_s=0)
            assert batch is not None
            found = {sample.meta.member: sample for sample in map(read_sample, batch.samples)}
            for member, all_of in enumerate(wanted):
                routing = found[member].routing
                assert routing is not None and routing.dtype == np.int16
                assert routing.shape == (len(found[member].tokens) - 1, 3, 2)
                assert np.array_equal(routing, all_of)
            found.clear()
            del routing, batch
    finally:
        await broker.close()


def test_a_sample_without_its_rows_is_refused() -> None:
    ticket = Ticket(group=4, prompt=0, attempt=0, size=2, version=1, lease_s=9.0)
    whole = rows(5, 0)
    assert maker().make(job(ticket), completion(0, encode_rows(whole[:3]), encode_rows(whole[3:]))).routing is not None
    for prompt, sampled in ((whole[:3], whole[3:4]), (whole[:0], whole[3:]), (whole[:3], whole)):
        with pytest.raises(Refused, match=r"sample 4.0 with \d routing rows of 6 tokens"):
            maker().make(job(ticket), completion(0, encode_rows(prompt), encode_rows(sampled)))
