"""Arrays of a batch stay good for as long as anything refers to them, however the lease ended."""

from __future__ import annotations

import gc
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from broker_world import World, until, world

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.queue.client import NewSample, QueueClient
from relax_rt.transport.queue.ledger.events import Lapse
from relax_rt.transport.queue.ledger.messages import SampleKey, VersionSpan
from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.rpc.identity import Incarnation

ENGINE, JUDGE = Incarnation("rollout/0", 1), Incarnation("reward/0", 2)
TRAINER = Incarnation("trainer/0", 3)


async def generate(engine: QueueClient, version: int, *, fill: int) -> None:
    """One group, put in one block, so that its memory comes free in one piece."""
    (ticket,) = (await engine.admit(version, 1, wait_s=0)).tickets
    tokens = np.full(500, fill, dtype=np.int32)
    spans = [VersionSpan(0, 500, version, version)]
    await engine.put_samples(
        [NewSample(SampleKey(ticket.group, n), {"tokens": tokens}, spans) for n in range(ticket.size)]
    )


async def judge_all(judge: QueueClient) -> None:
    while batch := await judge.lease("reward", samples=16, wait_s=0):
        await judge.complete(batch, {key: {"reward": 1.0} for key in batch.keys})


def pinned(w: World) -> int:
    assert w.broker is not None
    return len(w.broker._ledger.state.pinned)


@pytest.mark.parametrize("skipped", [False, True])
async def test_what_a_trainer_keeps_of_a_step_is_not_overwritten(tmp_path: Path, skipped: bool) -> None:
    async with world(tmp_path) as w, w.client(ENGINE) as engine, w.client(JUDGE) as judge, w.client(TRAINER) as trainer:
        await trainer.rollback(0, first := VersionRecord(1, 0, 0))
        await generate(engine, 1, fill=7)
        await judge_all(judge)
        batch = await trainer.lease("train", groups=1, wait_s=1)
        kept = batch.samples[0]["tokens"]
        weights = first if skipped else VersionRecord(2, 1, 1)
        await trainer.complete_step(batch, 1, weights, skipped=skipped)
        del batch
        await trainer.commit(1, "step-1")
        for _ in range(2):
            await generate(engine, weights.version, fill=9)
        assert (kept == 7).all() and pinned(w) == 1
        held = engine.arena.used_bytes
        del kept
        gc.collect()
        await until(lambda: pinned(w) == 0)
        # The answer to a put says what is free, so that another group adds nothing.
        await generate(engine, weights.version, fill=9)
        assert engine.arena.used_bytes <= held


async def test_what_is_kept_of_a_batch_given_back_is_not_overwritten(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.client(ENGINE) as engine, w.client(JUDGE) as judge, w.client(TRAINER) as trainer:
        await trainer.rollback(0, VersionRecord(1, 0, 0))
        await generate(engine, 1, fill=7)
        batch = await judge.lease("reward", samples=1, wait_s=1)
        kept = batch.samples[0]["tokens"]
        await judge.release(batch, "another one shall do it")
        await judge_all(judge)
        await trainer.complete_step(await trainer.lease("train", groups=1, wait_s=1), 1, VersionRecord(2, 1, 1))
        await trainer.commit(1, "step-1")
        for _ in range(2):
            await generate(engine, 2, fill=9)
        assert (kept == 7).all() and pinned(w) == 1


@pytest.mark.parametrize("look", [False, True])
async def test_a_step_that_does_not_count_holds_no_memory(tmp_path: Path, look: bool) -> None:
    async with world(tmp_path) as w, w.client(ENGINE) as engine, w.client(JUDGE) as judge, w.client(TRAINER) as trainer:
        await trainer.rollback(0, VersionRecord(1, 0, 0))
        await generate(engine, 1, fill=7)
        await judge_all(judge)
        batch = await trainer.lease("train", groups=1, wait_s=1)
        kept = batch.samples[0]["tokens"] if look else None
        assert w.broker is not None
        w.broker._apply(Lapse([], [batch.lease]))
        assert pinned(w) == 1
        with pytest.raises(Refused, match="lapsed"):
            await trainer.complete_step(batch, 1, VersionRecord(2, 1, 1))
        assert pinned(w) == look
        assert kept is None or (kept == 7).all()
        del kept
        gc.collect()
        await until(lambda: pinned(w) == 0)


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes that do nothing."""
    made = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    yield made
    for process in made:
        process.kill()
        process.wait()


@pytest.mark.parametrize("restart", [False, True])
async def test_what_an_overtaken_process_reads_is_free_when_it_ends(
    tmp_path: Path, sleepers: list[subprocess.Popen[bytes]], restart: bool
) -> None:
    async with world(tmp_path) as w, w.client(ENGINE) as engine, w.client(TRAINER) as trainer:
        assert w.broker is not None
        old = (await w.broker.join("reader/0", "", sleepers[0].pid, "")).who
        await trainer.rollback(0, VersionRecord(1, 0, 0))
        await generate(engine, 1, fill=7)
        async with w.client(old) as reader:
            assert await reader.lease("reward", samples=1, wait_s=1)
            for _ in range(2):
                await w.broker.join("reader/0", "", sleepers[1].pid, "")
            if restart:
                await w.kill()
                await w.start()
            assert pinned(w) == 1
            sleepers[0].kill()
            sleepers[0].wait()
            await until(lambda: pinned(w) == 0)
