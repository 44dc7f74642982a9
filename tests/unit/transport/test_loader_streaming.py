"""The streaming loader on a real broker: same micro-batches within a group, disjoint ones between groups."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import loader_far_end as far
import pytest
from loader_far_end import BATCH, MAX_TOKENS, TASK, connect, sample, serve

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.queue import space
from relax_rt.transport.queue.api import Failure
from relax_rt.transport.queue.client import QueueClient
from relax_rt.transport.queue.facade import TransferQueue
from relax_rt.transport.queue.ledger import LedgerPolicy
from relax_rt.transport.queue.loader.blocking import BlockingLoader
from relax_rt.transport.queue.loader.plan import Packing
from relax_rt.transport.queue.loader.streaming import Step, StreamingLoader
from relax_rt.transport.queue.sync import SyncQueue
from relax_rt.transport.rpc.errors import DeadlineExceeded, Refused


def numbers(step: Step | None) -> list[int]:
    assert step is not None
    return sorted(int(one["number"]) for one in step.samples)


async def offer(queue: QueueClient, first: int, count: int) -> None:
    await queue.offer([sample(number) for number in range(first, first + count)])


async def test_steps_come_in_order_and_end_where_they_are_to(tmp_path: Path) -> None:
    async with asyncio.timeout(120), serve(tmp_path) as broker, connect(tmp_path, "rollout/0") as producer:
        await offer(producer, 0, 10)
        async with (
            connect(tmp_path, "trainer/0") as queue,
            StreamingLoader(queue, TASK, groups=2, steps=4, packing=Packing(size=1)) as loader,
        ):
            found = [(step.index, numbers(step), len(step)) async for step in loader]
            assert loader.index == 4 and await loader.next() is None
        assert found == [(at, [2 * at, 2 * at + 1], 2) for at in range(4)]
        stats = await broker.stats()
        # Nothing was taken beyond the end, and all that was taken is finished.
        assert (stats.by_state.get("ready", 0), stats.by_state.get("finished", 0)) == (2, 8), stats


async def test_the_next_batch_is_taken_while_one_is_worked_on(tmp_path: Path) -> None:
    async with asyncio.timeout(120), serve(tmp_path), connect(tmp_path, "rollout/0") as producer:
        await offer(producer, 0, 12)
        async with connect(tmp_path, "trainer/0") as queue:
            for prefetch in (0, 1, 2):
                async with StreamingLoader(
                    queue, TASK, groups=2, prefetch=prefetch, stream=f"with {prefetch}"
                ) as loader:
                    assert await loader.next() is not None
                    while len(queue.leases) < 1 + prefetch:  # noqa: ASYNC110
                        await asyncio.sleep(0.001)
                    for _ in range(5):
                        await asyncio.sleep(0.01)
                        assert len(queue.leases) == 1 + prefetch
                # What was not finished is given back.
                assert not queue.leases
            async with StreamingLoader(queue, TASK, groups=12) as loader:
                assert numbers(await loader.next()) == list(range(12))


async def test_a_wait_says_what_for_and_can_go_on_after_its_deadline(tmp_path: Path) -> None:
    reasons: list[str] = []
    async with (
        asyncio.timeout(120),
        serve(tmp_path),
        connect(tmp_path, "rollout/0") as producer,
        connect(tmp_path, "trainer/0") as queue,
        StreamingLoader(queue, TASK, groups=3, prefetch=0, on_wait=reasons.append) as loader,
    ):
        await offer(producer, 0, 2)
        with pytest.raises(DeadlineExceeded, match=f"step 0 of task '{TASK}': none came within 0.01 s"):
            await loader.next(wait_s=0.01)
        while "2 of 3 groups are ready" not in loader.waiting_on:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        with pytest.raises(DeadlineExceeded, match="2 of 3 groups are ready"):
            await loader.next(wait_s=0.01)
        await offer(producer, 2, 1)
        assert numbers(await loader.next()) == [0, 1, 2]
        assert loader.waiting_on == "" and reasons[-1] == "" and "2 of 3" in reasons[0]


async def test_what_cannot_be_loaded_is_an_error_and_goes_back(tmp_path: Path) -> None:
    async with asyncio.timeout(120), serve(tmp_path), connect(tmp_path, "rollout/0") as producer:
        await offer(producer, 0, 2)
        async with connect(tmp_path, "trainer/0") as queue:
            for number, (options, message) in enumerate(
                [
                    ({"columns": ["tokenz"]}, r"column 'tokenz' of sample \d+\.0 .*did you mean tokens"),
                    ({"packing": Packing(max_tokens=5)}, r"sample \d+\.0 has 20 tokens, more than the 5"),
                    ({"length": "numbers"}, "column 'numbers' of sample"),
                ]
            ):
                async with StreamingLoader(queue, TASK, groups=2, stream=f"try {number}", **options) as loader:
                    with pytest.raises(Refused, match=message):
                        await loader.next()
                assert not queue.leases
            async with StreamingLoader(queue, "refrence", groups=2) as loader:
                with pytest.raises(Refused, match="tasks are reference"):
                    await loader.next()
            async with StreamingLoader(queue, TASK, groups=2, stream="at last") as loader:
                assert numbers(await loader.next()) == [0, 1]


async def test_an_error_in_the_trainer_gives_the_step_back(tmp_path: Path) -> None:
    async with asyncio.timeout(120), serve(tmp_path), connect(tmp_path, "rollout/0") as producer:
        await offer(producer, 0, 2)
        async with connect(tmp_path, "trainer/0") as queue:
            with pytest.raises(ZeroDivisionError):
                async with StreamingLoader(queue, TASK, samples=2, stream="first") as loader:
                    async for _ in loader:
                        raise ZeroDivisionError
            async with StreamingLoader(queue, TASK, samples=2, stream="second") as loader:
                step = await loader.next()
                assert numbers(step) == [0, 1]
                assert step is not None
                columns = far.columns_of(step)
                with pytest.raises(Refused, match="not part of it"):
                    await step.done({far.SampleKey(99, 0): {"sum": 1}})
                await step.done(columns)


async def test_failed_samples_end_and_the_others_go_on(tmp_path: Path) -> None:
    policy = LedgerPolicy(tasks={TASK: ("tokens",), "later": ("sum",)}, step_task="")
    async with asyncio.timeout(120), serve(tmp_path, policy), connect(tmp_path, "rollout/0") as producer:
        await offer(producer, 0, 3)
        async with connect(tmp_path, "trainer/0") as queue:
            async with StreamingLoader(queue, TASK, groups=3) as loader:
                step = await loader.next()
                assert step is not None
                columns = far.columns_of(step)
                bad = step.samples[0].key
                del columns[bad]
                await step.done(columns, [Failure(bad, "too odd")])
            async with StreamingLoader(queue, "later", groups=2) as loader:
                assert len(numbers(await loader.next())) == 2


async def test_a_batch_that_ended_is_not_granted_again_and_a_stream_goes_on_at_its_index(tmp_path: Path) -> None:
    async with asyncio.timeout(120), serve(tmp_path), connect(tmp_path, "rollout/0") as producer:
        await offer(producer, 0, 6)
        async with connect(tmp_path, "trainer/0") as queue:
            async with StreamingLoader(queue, TASK, groups=2, steps=1) as loader:
                assert [numbers(step) async for step in loader] == [[0, 1]]
            async with StreamingLoader(queue, TASK, groups=2) as loader:
                with pytest.raises(Refused, match="the next is 1"):
                    await loader.next()
            async with StreamingLoader(queue, TASK, groups=2, start_index=1, steps=2) as loader:
                assert [(step.index, numbers(step)) async for step in loader] == [(1, [2, 3]), (2, [4, 5])]


async def test_training_takes_one_batch_at_a_time_and_one_rank_says_that_it_is_trained(tmp_path: Path) -> None:
    policy = LedgerPolicy(tasks={"train": ("tokens",)}, prompts_per_step=2)
    told: list[str] = []
    async with (
        asyncio.timeout(120),
        serve(tmp_path, policy) as broker,
        connect(tmp_path, "rollout/0") as producer,
        connect(tmp_path, "trainer/0") as lead,
        connect(tmp_path, "trainer/1") as other,
    ):
        await lead.rollback(0, VersionRecord(1, 0, 0))
        await offer(producer, 0, 6)
        loaders = [
            StreamingLoader(queue, "train", dp_rank=rank, dp_size=2, groups=2, on_wait=told.append)
            for rank, queue in enumerate([lead, other])
        ]
        async with loaders[0], loaders[1]:
            for at in range(1, 4):
                first, second = await loaders[0].next(), await loaders[1].next()
                assert first is not None and second is not None
                assert first.batch.lease == second.batch.lease
                assert sorted(numbers(first) + numbers(second)) == [2 * at - 2, 2 * at - 1]
                await second.done()
                while at == 1 and "is not finished" not in loaders[0].waiting_on:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                assert len(lead.leases) == 1
                # Taking ahead waits; the trainer, which works, does not.
                assert at > 1 or not any(told)
                await first.trained(at, VersionRecord(at + 1, at, at))
                assert first.finished and second.finished
        assert (await broker.stats()).step == 3


async def test_a_thread_beside_the_loop_iterates_without_await(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()

    def train(queue: QueueClient) -> list[tuple[int, int, int, list[int]]]:
        found = []
        options: dict[str, Any] = {"groups": 2, "steps": 3, "packing": Packing(size=1), "columns": ["tokens"]}
        with BlockingLoader(StreamingLoader(queue, TASK, **options), loop) as loader:
            for step in loader:
                assert loader.index == step.index + 1
                lengths = [len(micro.packed("tokens").values) for micro in step]
                columns = {one.key: {"sum": 1} for one in step.samples}
                if step.index == 0:
                    step.done(columns)
                found.append((step.index, len(step), step.tokens, lengths))
        with BlockingLoader(StreamingLoader(queue, TASK, samples=9, start_index=3), loop) as loader:
            with pytest.raises(DeadlineExceeded):
                loader.next(wait_s=0.0)
            assert loader.waiting_on == "" or "no sample is ready" in loader.waiting_on
        with BlockingLoader(StreamingLoader(queue, TASK, samples=9, stream="given up"), loop) as loader:
            await_more.set()
            step_given_up = loader.next()
            assert step_given_up is not None
            step_given_up.abandon("not today")
        return found

    await_more = threading.Event()
    async with asyncio.timeout(120), serve(tmp_path) as broker, connect(tmp_path, "rollout/0") as producer:
        await offer(producer, 0, 6)
        async with connect(tmp_path, "trainer/0") as queue:
            training = asyncio.create_task(asyncio.to_thread(train, queue))
            while not await_more.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await offer(producer, 6, 1)
            found = await training
        stats = (await broker.stats()).by_state
    lengths = [far.length_of(number) for number in range(6)]
    assert found == [(at, 2, sum(lengths[2 * at : 2 * at + 2]), lengths[2 * at : 2 * at + 2]) for at in range(3)]
    assert (stats["finished"], stats["ready"]) == (6, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 0}, "0 samples, 0 groups, 0 tokens from index 0 cannot be"),
        ({"samples": 1, "start_index": -1}, "from index -1 cannot be"),
        ({"samples": 1, "dp_rank": 2, "dp_size": 2}, "rank 2 of 2, replica 0 of 1 cannot be"),
        ({"samples": 1, "replica": -1}, "replica -1 of 1 cannot be"),
        ({"samples": 1, "mode": "steps"}, "mode is 'steps'"),
        ({"samples": 1, "prefetch": 65}, "prefetch is 65, between 0 and 64"),
        ({"samples": 1, "packing": Packing(max_tokens=1, size=1)}, "both max_tokens and size"),
    ],
)
async def test_a_loader_that_cannot_be_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    async with serve(tmp_path), connect(tmp_path, "trainer/0") as queue:
        with pytest.raises(Refused, match=message):
            StreamingLoader(queue, TASK, **options)
        with pytest.raises(Refused, match="it is not open"):
            await StreamingLoader(queue, TASK, samples=1).next()


class Ranks:
    """Two data-parallel groups of two replicas, each a process."""

    def __init__(self, folder: Path, mode: str, steps: int, pause_s: float = 0.0) -> None:
        self.folder = folder
        self.processes: dict[tuple[int, int], subprocess.Popen[bytes]] = {}
        for dp, replica in product(range(far.DP_SIZE), range(far.REPLICAS)):
            args = [str(folder), str(dp), str(replica), mode, str(steps), str(pause_s)]
            with self.file(dp, replica, "out").open("wb") as out, self.file(dp, replica, "err").open("wb") as err:
                self.processes[dp, replica] = subprocess.Popen(
                    [sys.executable, far.__file__, *args], stdout=out, stderr=err
                )

    def file(self, dp: int, replica: int, what: str) -> Path:
        return self.folder / f"rank-{dp}-{replica}.{what}"

    async def seen(self) -> dict[tuple[int, int], list[dict[str, Any]]]:
        """What each rank saw of each step."""
        for rank, process in self.processes.items():
            assert await asyncio.to_thread(process.wait) == 0, self.file(*rank, "err").read_text()
        return {
            rank: [json.loads(line) for line in self.file(*rank, "out").read_text().splitlines()]
            for rank in self.processes
        }

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


def flat(steps: list[dict[str, Any]]) -> list[int]:
    return [number for step in steps for micro in step["micro"] for number in micro]


@pytest.mark.parametrize("mode", ["step", "stream"])
async def test_ranks_share_batches_within_a_group_and_split_them_between_groups(tmp_path: Path, mode: str) -> None:
    steps = 4
    # In mode `step` a batch serves both groups, in mode `stream` each takes its own.
    total = steps * BATCH * (1 if mode == "step" else far.DP_SIZE)
    async with asyncio.timeout(120), serve(tmp_path) as broker, connect(tmp_path, "rollout/0") as producer:
        ranks = Ranks(tmp_path, mode, steps)
        try:
            for first in range(0, total, 8):
                await offer(producer, first, 8)
            found = await ranks.seen()
        finally:
            ranks.end()
        by_state = (await broker.stats()).by_state
    assert by_state.get("finished") == total
    for dp in range(far.DP_SIZE):
        assert found[dp, 0] == found[dp, 1]
        assert [step["index"] for step in found[dp, 0]] == list(range(steps))
    both = flat(found[0, 0]) + flat(found[1, 0])
    assert sorted(both) == list(range(total))
    for steps_of in found.values():
        for step in steps_of:
            for micro, total_of in zip(step["micro"], step["sums"], strict=True):
                assert sum(far.length_of(number) for number in micro) <= MAX_TOKENS
                assert total_of == sum(int(sample(number)["tokens"].sum()) for number in micro)
    if mode == "step":
        for one, other in zip(found[0, 0], found[1, 0], strict=True):
            assert one["lease"] == other["lease"] and one["tokens"] == other["tokens"]
            assert len(one["micro"]) == len(other["micro"])
            loads = [sum(far.length_of(n) for micro in step["micro"] for n in micro) for step in (one, other)]
            assert abs(loads[0] - loads[1]) <= max(map(far.length_of, flat([one, other])))
            assert sum(loads) == one["tokens"]


async def test_a_rank_that_is_killed_leaves_nothing_lost_and_the_gang_begins_anew(tmp_path: Path) -> None:
    steps, total = 6, 6 * BATCH
    async with asyncio.timeout(120), serve(tmp_path) as broker, connect(tmp_path, "rollout/0") as producer:
        await offer(producer, 0, total)
        ranks = Ranks(tmp_path, "step", steps, pause_s=0.2)
        try:
            while (await broker.stats()).by_state.get("finished", 0) < 2 * BATCH:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            # The gang dies together, one of them first; its supervisor says so.
            ranks.processes[1, 0].kill()
        finally:
            ranks.end()
        for number in range(len(ranks.processes)):
            await producer.api.gone(1000 + number, far.Incarnation(f"trainer/{number}", 1), "killed")
        left = total - (await broker.stats()).by_state["finished"]
        assert left > 0
        rest: dict[int, list[int]] = defaultdict(list)
        async with connect(tmp_path, "trainer/0", 2) as one, connect(tmp_path, "trainer/1", 2) as other:
            loaders = [
                StreamingLoader(queue, TASK, dp_rank=dp, dp_size=2, groups=BATCH, stream="2nd", steps=left // BATCH)
                for dp, queue in enumerate([one, other])
            ]
            async with loaders[0], loaders[1]:
                for _ in range(left // BATCH):
                    for dp, loader in enumerate(loaders):
                        rest[dp] += numbers(await loader.next())
                assert [await loader.next() for loader in loaders] == [None, None]
        by_state = (await broker.stats()).by_state
    assert by_state["finished"] == total
    assert len(rest[0]) + len(rest[1]) == len({*rest[0], *rest[1]}) == left


async def test_threads_that_all_wait_for_the_queue_do_not_hold_it_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every put is a large one.
    monkeypatch.setattr(space, "_THREAD_BYTES", 1)
    async with asyncio.timeout(120), serve(tmp_path), connect(tmp_path, "trainer/0") as queue:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))

        def work() -> list[int]:
            here = SyncQueue(queue, loop, timeout_s=60)
            here._run(offer(queue, 0, 2))
            with here.loader(TASK, groups=2, steps=1, wait_s=60) as loader:
                return [number for step in loader for number in sorted(int(one["number"]) for one in step.samples)]

        assert await asyncio.to_thread(work) == [0, 1]
    with pytest.raises(Refused, match="the client was closed"):
        await queue.threads.run(lambda: None)


def test_a_process_without_an_event_loop_iterates_over_a_queue_that_stands_alone(tmp_path: Path) -> None:
    with TransferQueue.serve(
        tmp_path / "queue", tasks={"train": ["tokens"]}, length_field="tokens"
    ).blocking() as queue:
        queue.put([sample(number) for number in range(6)])
        with queue.steps.loader("train", groups=3, steps=2, packing=Packing(max_tokens=MAX_TOKENS)) as loader:
            found = [sorted(int(one["number"]) for one in step.samples) for step in loader]
    assert found == [[0, 1, 2], [3, 4, 5]]
