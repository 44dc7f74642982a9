"""The standalone queue between network namespaces: who is on the other node has memory of its own, and a key."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from netns import Nodes
from transfer_queue_far_end import FAR_SAMPLES, FAR_TOKENS
from transfer_queue_world import World, settled

from relax_rt.transport import TransferQueue
from relax_rt.transport.base.liveness import NODE_ENV

TOKENS_BYTES = FAR_SAMPLES * FAR_TOKENS * 4


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path) as made:
        yield made


def test_producer_and_trainer_on_another_node(world: World, nodes: Nodes, tmp_path: Path) -> None:
    host = world.far("host", "{}", f"tcp://{nodes.host}:0", "32768", "rewards", before=nodes.first)
    _, address = host.told()
    keys = str(world.folder / "keys.json")
    producer = world.far("far_produce", address, keys, before=nodes.second, node="far")
    memory, is_own = producer.told()
    assert is_own and Path(memory).is_dir()
    # One reads from the other node, one from another process of its own node and from the broker's.
    judge = world.far("far_take", "", "", "judge", "rewards", before=nodes.first)
    trainer = world.far("far_take", address, keys, "train", "", before=nodes.second, node="far")
    seen, nbytes = judge.told()
    assert sorted(seen) == list(range(FAR_SAMPLES)) and nbytes >= TOKENS_BYTES
    seen, nbytes = trainer.told()
    assert sorted(seen) == list(range(FAR_SAMPLES)) and nbytes >= 3 * TOKENS_BYTES
    # It left when all of it was read, and its memory with it.
    assert producer.told() is False and producer.wait() == 0
    assert judge.wait() == trainer.wait() == 0
    stranger = world.far("far_stranger", address, str(tmp_path / "own.json"), before=nodes.second, node="far")
    assert [stranger.told(), stranger.told()] == ["Unreachable", "Refused"]
    host.tell()
    assert host.wait() == 0


async def test_who_leaves_another_node_with_unread_payload_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with TransferQueue.serve(tmp_path / "queue", {"t": ["x"]}, listen="tcp://127.0.0.1:0") as queue:
        assert queue.host is not None and queue.host.location is not None
        address, keys = queue.host.location.addresses[1], tmp_path / "queue" / "keys.json"
        monkeypatch.setenv(NODE_ENV, "far")
        async with TransferQueue.connect(address, keys=keys, linger_s=0.05) as far:
            monkeypatch.delenv(NODE_ENV)
            assert far.membership is not None and far.client.arena._dir != Path(far.membership.shm_dir)
            await far.put([{"x": np.full(5000, n, np.int32)} for n in range(2)])
            await queue.put([{"x": np.full(5000, 9, np.int32)}])
            batch = await queue.lease("t", samples=1, wait_s=5)
            first = batch.samples[0]["x"]
            await queue.complete(batch)
            # Read bytes stay, whatever becomes of their owner.
            assert (first == 0).all()
        assert "leaves with 40" in caplog.text and "they are lost" in caplog.text
        assert (first == 0).all()
        account = await settled(queue.client.api.account, lambda now: now["ready"] == 1)
        assert account["failed"] == 1 and account["finished"] == 1
        batch = await queue.lease("t", samples=5, wait_s=5)
        assert [int(sample["x"][0]) for sample in batch.samples] == [9]
        await queue.complete(batch)
        assert (await queue.statistics())["broker"]["tallies"]["lost_with_owner"] == 1


async def test_a_folder_that_several_nodes_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "queue"
    async with TransferQueue.serve(folder, {"t": ["x"]}, listen="tcp://127.0.0.1:0") as queue:
        await queue.put([{"x": np.full(5000, 7, np.int32)}])
        monkeypatch.setenv(NODE_ENV, "far")
        async with TransferQueue.connect(folder) as far:
            batch = await far.lease("t", samples=1, wait_s=5)
            assert (batch.samples[0]["x"] == 7).all()
            assert far.client._fetcher is not None and far.client._fetcher.statistics().bytes_in >= 20_000
            await far.complete(batch)
            await asyncio.sleep(0)
