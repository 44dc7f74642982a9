"""Numbers of the standalone queue, and its broker as a command."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from transfer_queue_world import World, settled

from relax_rt.transport import TransferQueue
from relax_rt.transport.memory.values import Shared
from relax_rt.transport.queue.ledger.messages import Failure


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path) as made:
        yield made


async def test_numbers_of_every_part(tmp_path: Path) -> None:
    tasks = {"judge": ["tokens"], "train": ["tokens", "reward"]}
    async with (
        TransferQueue.serve(tmp_path / "queue", tasks, length_field="tokens", capacity_bytes=1 << 24) as host,
        TransferQueue.connect(tmp_path / "queue", length_field="tokens") as queue,
    ):

        async def statistics() -> dict[str, Any]:
            found = await queue.statistics()
            # For metrics and tools: nothing in it that JSON does not know.
            assert msgspec.json.decode(msgspec.json.encode(found)).keys() == found.keys()
            client = msgspec.to_builtins(found["client"])
            return {**found["broker"], "client": client}

        async def counts(**expected: int) -> dict[str, Any]:
            """The numbers, once samples are counted anew (a large queue is not counted all the time)."""
            return await settled(statistics, lambda now: expected.items() <= now["samples"].items())

        empty = await counts(ready=0, leased=0)
        assert set(empty["samples"].values()) == {0} and empty["memory"]["occupancy"] == 0
        image = np.zeros((64, 64, 3), np.uint8)
        keys = await queue.put([{"tokens": np.zeros(n, np.int32), "image": Shared(image)} for n in (1000, 2000, 3000)])
        await queue.put([{"tokens": np.zeros(5, np.int32)}])
        full = await counts(ready=4)
        memory, arena = full["memory"], full["client"]["arena"]
        assert memory["blocks"] == 2 and memory["blobs"] == 1 and memory["extents"] == arena["extents"] == 2
        assert 24_000 + 12_288 < memory["payload_bytes"] == arena["used_bytes"] < 40_000
        assert memory["occupancy"] == memory["payload_bytes"] / (1 << 24) and 0 < memory["inline_bytes"] <= 1024
        assert memory["pinned_extents"] == memory["spilled_bytes"] == memory["deduplicated_bytes"] == 0
        assert full["leases"]["ready"] == {"judge": 4, "train": 0, "groups_for_step": 0}
        assert arena["deduplicated"] == 2 and arena["deduplicated_bytes"] == 2 * 12_288
        assert 0 <= arena["fragmentation"] < 1 and arena["slabs"] == memory["slabs"] == 1
        assert full["client"]["put_samples"] == 4 and full["client"]["put_messages"] == 2

        batch = await queue.lease("judge", samples=10, wait_s=5)
        assert sum(len(sample["tokens"]) for sample in batch.samples) == 6005
        held = await counts(leased=4)
        assert held["leases"]["held"] == {"judge": 1} and held["memory"]["pinned_extents"] == 2
        assert held["client"]["leases"] == 1 and held["client"]["reader"]["blocks"] == 2
        await queue.complete(batch, {key: {"reward": 1.0} for key in batch.keys[1:]}, [Failure(keys[0], "bad")])
        del batch
        judged = await counts(ready=3, failed=1)
        assert judged["leases"]["held"] == {} and judged["leases"]["ready"]["train"] == 3
        nothing = await host.lease("judge", samples=1, wait_s=0.15)
        assert not nothing
        waits = (await statistics())["waits"]
        assert waits["now"] == [] and waits["over"]["judge"]["waits"] >= 1 and waits["over"]["judge"]["total_s"] > 0

        await queue.complete(await queue.lease("train", samples=3, wait_s=5))
        await settled(statistics, lambda now: now["memory"]["extents"] == 0)
        end = await counts(finished=3, failed=1, ready=0)
        assert end["memory"]["payload_bytes"] == end["memory"]["inline_bytes"] == end["memory"]["blocks"] == 0
        assert {what: sum(tenths) for what, tenths in end["lengths"].items()} == {"used": 3, "failed": 1}
        assert end["journal"]["records"] > empty["journal"]["records"] and end["journal"]["segment_bytes"] > 0
        assert end["client"]["calls"]["unanswered"] == end["client"]["leases"] == 0
        assert await host.client.api.account() == await queue.client.api.account()


def test_the_command_ends_in_order_and_leaves_nothing(world: World) -> None:
    options = ["--task", "train=tokens", "--field", "tokens=int32[*]", "--sampler", "train=priority", "--lease-s", "5"]
    for number in (signal.SIGTERM, signal.SIGINT):
        broker = world.broker(*options, "--listen", "tcp://127.0.0.1:0")
        shm = world.shm()
        assert shm is not None and shm.stat().st_mode & 0o777 == 0o700
        assert world.folder.stat().st_mode & 0o777 == 0o700
        assert (world.folder / "queue.sock").stat().st_mode & 0o777 == 0o600
        with TransferQueue.connect(world.folder, patience_s=30).blocking() as queue:
            queue.put([{"tokens": np.zeros(n, np.int32)} for n in (3000, 4000)], priorities=[0.0, 1.0])
            batch = queue.lease("train", samples=1, wait_s=10)
            assert len(batch.samples[0]["tokens"]) == 4000
            queue.complete(batch)
        assert broker.end(number) == 0
        assert not shm.exists() and not (world.folder / "queue.json").exists()
        assert not (world.folder / "queue.sock").exists()


@pytest.mark.parametrize(
    ("options", "status", "says"),
    [
        ([], 2, "no consumer task is named"),
        (["--task", "train"], 2, "'train' is not NAME=VALUE"),
        (["--task", "train=tokens", "--field", "tokens=int23[*]"], 2, "did you mean int32"),
        (["--task", "train=tokens", "--sampler", "train=fifoo"], 2, "did you mean 'fifo'"),
        (["--task", "train=tokens", "--listen", "tcp://"], 2, "no host and port"),
    ],
)
def test_a_command_that_cannot_work(tmp_path: Path, options: list[str], status: int, says: str) -> None:
    command = [sys.executable, "-m", "relax_rt.transport.queue", str(tmp_path / "queue"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == status and says in done.stderr and "Traceback" not in done.stderr
