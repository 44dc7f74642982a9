"""What the standalone queue promises of samples: tasks, groups, samplers, deadlines and reasons."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from broker_world import until

from relax_rt.transport import TransferQueue
from relax_rt.transport.queue.batch import LeasedBatch
from relax_rt.transport.queue.ledger.messages import Failure, LeaseRequest, SampleKey
from relax_rt.transport.queue.ledger.policy import QueueLimits, SamplerSpec
from relax_rt.transport.queue.ledger.selection import Selection, Unit
from relax_rt.transport.rpc.errors import OutOfSpace, Refused


class LongestFirst:
    """A sampler of the user's own."""

    whole_groups = False

    def choose(self, units: Iterable[Unit], want: LeaseRequest) -> Selection:
        """The longest ones."""
        return Selection(sorted(units, key=lambda unit: -unit.tokens)[: want.samples])


@contextlib.asynccontextmanager
async def serving(folder: Path, tasks: dict[str, list[str]], **settings: Any) -> AsyncIterator[TransferQueue]:
    async with TransferQueue.serve(folder / "queue", tasks, **settings) as queue:
        yield queue


def tokens(*lengths: int) -> list[dict[str, Any]]:
    return [{"tokens": np.full(length, length, np.int32)} for length in lengths]


def lengths(batch: LeasedBatch) -> list[int]:
    return [len(sample["tokens"]) for sample in batch.samples]


async def test_each_task_sees_every_sample_once_when_its_fields_are_there(tmp_path: Path) -> None:
    tasks = {"judge": ["tokens"], "critic": ["tokens"], "train": ["tokens", "reward", "value"]}
    async with serving(tmp_path, tasks) as queue, TransferQueue.connect(queue.host.folder) as other:  # type: ignore[union-attr]
        keys = await queue.put(tokens(*range(1, 11)))
        seen: dict[str, list[SampleKey]] = {task: [] for task in tasks}

        async def work(end: TransferQueue, task: str, column: str) -> None:
            while len(seen[task]) < len(keys):
                batch = await end.lease(task, samples=3, wait_s=30)
                seen[task] += batch.keys
                new = {one.key: {column: float(len(one["tokens"]))} for one in batch.samples} if column else None
                await end.complete(batch, new)

        train = asyncio.create_task(work(other, "train", ""))
        await work(queue, "judge", "reward")
        assert not seen["train"] and not train.done()
        await until(lambda: other.waiting_on.startswith("no sample is ready for task 'train': "))
        assert queue.waiting_on == ""
        # Two consumers of one task share its samples.
        await asyncio.gather(work(queue, "critic", "value"), work(other, "critic", "value"))
        await train
        assert {task: sorted(found) for task, found in seen.items()} == dict.fromkeys(tasks, keys)
        memory = (await queue.statistics())["broker"]["memory"]
        assert memory["blocks"] == memory["payload_bytes"] == 0
        assert (await queue.client.api.account())["finished"] == 10


async def test_columns_and_rows_of_one_put_are_read_the_same_way(tmp_path: Path) -> None:
    async with serving(tmp_path, {"train": ["x"]}) as queue:
        stacked = np.arange(8 * 600, dtype=np.float32).reshape(8, 600)
        await queue.put({"x": stacked, "s": [str(n) for n in range(8)]})
        await queue.put([{"x": row, "s": str(n)} for n, row in enumerate(stacked)])
        by_column, by_row = [await queue.lease("train", samples=8, wait_s=5) for _ in range(2)]
        for batch in (by_column, by_row):
            np.testing.assert_array_equal(batch.column("x"), stacked)
            assert batch.values("s") == [str(n) for n in range(8)]
            # One block, in place.
            assert np.shares_memory(batch.column("x"), batch.samples[5]["x"])
            assert not batch.column("x").flags.writeable
        half = stacked[::2]
        await queue.release(by_row, "again")
        first = await queue.lease("train", samples=4, wait_s=5)
        await queue.complete(first)
        del half
        # What lies in several places is gathered.
        await queue.put([{"x": stacked[0], "s": "0"}])
        rest = await queue.lease("train", samples=8, wait_s=5)
        np.testing.assert_array_equal(rest.column("x"), np.concatenate([stacked[4:], stacked[:1]]))


async def test_groups_are_taken_whole(tmp_path: Path) -> None:
    async with serving(tmp_path, {"judge": ["tokens"], "train": ["reward"]}) as queue:
        groups = [await queue.put(tokens(*[n] * 3), group=True) for n in (1, 2, 3)]
        assert all({key.group for key in keys} == {keys[0].group} for keys in groups)
        judged = await queue.lease("judge", groups=2, wait_s=5)
        assert judged.keys == groups[0] + groups[1] and [len(g) for g in judged.groups().values()] == [3, 3]
        some = judged.keys[:4]
        await queue.release(judged, "one by one")
        judged = await queue.lease("judge", samples=4, wait_s=5)
        assert judged.keys == some
        await queue.complete(judged, {key: {"reward": 1.0} for key in some})
        # Of the second group one member has a reward.
        trained = await queue.lease("train", groups=1, wait_s=5)
        assert trained.keys == groups[0]
        missing = await queue.lease("train", groups=1, wait_s=0.01)
        assert not missing and missing.waiting_on == "0 of 1 groups are ready for task 'train'"
        columns = await queue.put({"tokens": np.zeros((4, 5), np.int32)}, group=True)
        assert [key.member for key in columns] == [0, 1, 2, 3] and len({key.group for key in columns}) == 1


@pytest.mark.parametrize(
    ("sampler", "order"),
    [
        ("fifo", [10, 60, 20, 50]),
        ("priority", [50, 20, 60, 10]),
        (f"{Path(__file__)}:LongestFirst", [60, 50, 40, 30]),
        (SamplerSpec("priority", {"window": 2}), [60, 10]),
    ],
)
async def test_samplers_by_name_and_by_path(tmp_path: Path, sampler: str | SamplerSpec, order: list[int]) -> None:
    async with serving(tmp_path, {"t": ["tokens"]}, samplers={"t": sampler}, length_field="tokens") as queue:
        await queue.put(tokens(10, 60), priorities=[0.0, 1.0])
        # As columns, of one length each.
        await queue.put({"tokens": [np.zeros(20, np.int32), np.zeros(50, np.int32)]}, priorities=[2.0, 3.0])
        await queue.put(tokens(30, 40), priorities=[-1.0, -1.0])
        assert lengths(await queue.lease("t", samples=len(order), wait_s=5)) == order


async def test_a_token_budget(tmp_path: Path) -> None:
    async with serving(tmp_path, {"t": ["tokens"]}, length_field="tokens") as queue:
        await queue.put(tokens(10, 20, 30, 1000))
        batches = [await queue.lease("t", samples=10, tokens=35, wait_s=5) for _ in range(3)]
        assert list(map(lengths, batches)) == [[10, 20], [30], [1000]]


async def test_waits_have_a_reason_and_an_end(tmp_path: Path) -> None:
    reasons: list[str] = []
    async with (
        serving(tmp_path, {"t": ["tokens"]}, capacity_bytes=20_000) as queue,
        TransferQueue.connect(queue.host.folder, on_wait=reasons.append) as producer,  # type: ignore[union-attr]
    ):
        nothing = await queue.lease("t", samples=1, wait_s=0.01)
        assert not nothing and len(nothing) == 0 and nothing.waiting_on.startswith("no sample is ready for task 't'")
        await queue.complete(nothing)
        await producer.put(tokens(4000))
        await producer.put(tokens(4000))
        waiting = asyncio.create_task(producer.put(tokens(5, 6), wait_s=60))
        with pytest.raises(OutOfSpace, match=r"put of \d samples: payloads fill the capacity: \d+ of 20000 bytes"):
            await producer.put(tokens(7), wait_s=0.05)
        with pytest.raises(OutOfSpace, match="payloads fill the capacity"):
            await producer.put({"tokens": np.zeros((1, 2), np.int32)}, wait_s=0.05)
        await until(lambda: producer.waiting_on.startswith("payloads fill the capacity"))
        assert not waiting.done()
        assert producer.waiting_on in reasons and queue.waiting_on == ""
        async with asyncio.timeout(120):
            await queue.complete(await queue.lease("t", samples=2, wait_s=5))
            assert len(await waiting) == 2
        assert producer.waiting_on == reasons[-1] == ""
        # What was given up is nowhere.
        assert lengths(await queue.lease("t", samples=9, wait_s=5)) == [5, 6]
        assert (await producer.statistics())["client"]["arena"]["used_bytes"] <= 128


async def test_one_bad_sample_of_many_callers_is_told_to_its_own(tmp_path: Path) -> None:
    async with serving(tmp_path, {"t": ["tokens"]}) as queue:
        rows = tokens(*range(1, 9))
        rows[3] = {"tokens": object()}
        rows[5] = {1: np.zeros(3)}  # type: ignore[dict-item]
        answers = await asyncio.gather(*(queue.put([row]) for row in rows), return_exceptions=True)
        assert [n for n, answer in enumerate(answers) if isinstance(answer, Refused)] == [3, 5]
        assert "field 'tokens' of type object" in str(answers[3])
        assert sorted(lengths(await queue.lease("t", samples=9, wait_s=5))) == [1, 2, 3, 5, 7, 8]


async def test_failed_abandoned_and_forgotten_batches(tmp_path: Path) -> None:
    limits = QueueLimits(lease_s=60.0)
    async with serving(tmp_path, {"t": ["tokens"], "u": ["tokens"]}, limits=limits) as queue:
        keys = await queue.put(tokens(100, 200, 300, 400))
        batch = await queue.lease("t", samples=4, wait_s=5)
        await queue.complete(batch, failures=[Failure(keys[0], "broken")])
        assert lengths(await queue.lease("u", samples=4, wait_s=5)) == [200, 300, 400]
        # That batch was forgotten, and what it held is offered again.
        batch = await queue.lease("u", samples=4, wait_s=20)
        assert lengths(batch) == [200, 300, 400]
        with pytest.raises(Refused, match=r"sample 99\.0 is not part of it"):
            await queue.complete(batch, {SampleKey(99, 0): {"x": 1.0}})
        with pytest.raises(Refused, match="has column tokens already"):
            await queue.complete(batch, {batch.keys[0]: {"tokens": np.zeros(5000)}})
        # A refused completion leaves everything as it was.
        assert lengths(batch) == [200, 300, 400]
        await queue.complete(batch)
        with pytest.raises(Refused, match="it is finished"):
            lengths(batch)
        await queue.complete(batch)
        stats = await queue.statistics()
        account = await queue.client.api.account()
        assert account == {**account, "finished": 3, "failed": 1, "leased": 0}
        assert stats["client"]["leases"] == stats["client"]["pinned_leases"] == 0
        assert stats["client"]["arena"]["used_bytes"] == 0


async def test_what_a_cancelled_take_was_granted_goes_back(tmp_path: Path) -> None:
    async with serving(tmp_path, {"t": ["tokens"]}) as queue:
        taking = asyncio.create_task(queue.lease("t", samples=4, wait_s=30))
        await asyncio.sleep(0.02)
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        await queue.put(tokens(1))
        assert len(await queue.lease("t", samples=4, wait_s=30)) == 1


async def test_a_late_consumer_loses_its_samples_to_another(tmp_path: Path) -> None:
    async with serving(tmp_path, {"t": ["tokens"]}, lease_s=0.5) as queue:
        await queue.put(tokens(2000))
        async with TransferQueue.connect(queue.host.folder) as slow:  # type: ignore[union-attr]
            late = await slow.lease("t", samples=1, wait_s=5)
            view = late.samples[0]["tokens"]
            slow.client._renewal.cancel()  # type: ignore[union-attr]
            slow.client._renewal = None
            again = await queue.lease("t", samples=1, wait_s=30)
            assert again.keys == late.keys
            await slow.complete(late)
            assert (await queue.statistics())["broker"]["tallies"]["late_completions"] == 1
            await queue.complete(again)
            await queue.put(tokens(2000))
            assert (view == 2000).all()


def test_the_blocking_form(tmp_path: Path) -> None:
    with TransferQueue.serve(tmp_path / "queue", {"t": ["tokens"]}).blocking() as queue:
        found: list[int] = []

        def consume() -> None:
            with TransferQueue.connect(tmp_path / "queue").blocking() as other:
                while len(found) < 6:
                    batch = other.lease("t", samples=2, wait_s=30)
                    found.extend(lengths(batch))
                    other.complete(batch, {key: {"seen": True} for key in batch.keys})

        consumer = threading.Thread(target=consume)
        consumer.start()
        keys = queue.put(tokens(1, 2, 3)) + queue.put({"tokens": np.ones((2, 5), np.int32)})
        assert len(set(keys)) == 5 and queue.waiting_on == ""
        with pytest.raises(Refused, match="tasks are t"):
            queue.lease("u", samples=1)
        batch = queue.lease("t", samples=1, wait_s=0.0)
        if batch:
            queue.release(batch, "for the other")
        queue.put(tokens(9), group=True)
        consumer.join(120)
        assert sorted(found) == [1, 2, 3, 5, 5, 9]
        assert queue.statistics()["broker"]["memory"]["blocks"] == 0
    with pytest.raises(Refused, match="it was not entered"):
        queue.put(tokens(1))
