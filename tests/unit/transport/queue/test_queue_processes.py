"""Broker and producer as real processes, killed with SIGKILL in the middle of their work."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import queue_far_end as far

from relax_rt.transport.base.journal import Journal
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.queue.client import QueueClient
from relax_rt.transport.queue.ledger.events import JournalEntry
from relax_rt.transport.queue.ledger.machine import Ledger
from relax_rt.transport.queue.ledger.messages import SampleKey
from relax_rt.transport.rpc.identity import Incarnation

JUDGE, TRAINER, AGENT = Incarnation("reward/0", 2), Incarnation("trainer/0", 3), Incarnation("agent/0", 1)
STEPS = 30


class Fleet:
    """The processes of one test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "shm").mkdir()
        self.logs = 0
        self.broker = self.start("broker")
        self.epoch = 10
        self.producer = self.start("producer", str(self.epoch))

    def start(self, *args: str) -> subprocess.Popen[bytes]:
        self.logs += 1
        command = [sys.executable, far.__file__, args[0], str(self.folder), *args[1:]]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{args[0]}-{self.logs}.out").open("wb") as log:
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        assert process.poll() is None, "it ended by itself: " + "".join(
            path.read_text() for path in self.folder.glob("*.out")
        )
        process.send_signal(signal.SIGKILL)
        process.wait()

    def acknowledged(self) -> list[SampleKey]:
        lines = [line for path in self.folder.glob("producer-*.out") for line in path.read_text().splitlines()]
        return [SampleKey(*map(int, line.split())) for line in lines]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path)
    yield made
    for process in (made.broker, made.producer):
        process.kill()
        process.wait()


async def judge(queue: QueueClient) -> None:
    while True:
        batch = await queue.lease("reward", samples=4, wait_s=10)
        for sample in batch.samples:
            np.testing.assert_array_equal(sample["tokens"], far.tokens(sample.key))
        if batch:
            await queue.complete(batch, {one.key: {"reward": 1.0} for one in batch.samples})


async def train(queue: QueueClient, agent: QueueClient, fleet: Fleet) -> list[SampleKey]:
    """Thirty steps, with kills in between; what was trained, as the trainer saw it."""
    seen: list[SampleKey] = []
    await queue.rollback(0, VersionRecord(1, 0, 0))
    for step in range(1, STEPS + 1):
        batch = await queue.lease("train", groups=2, wait_s=60)
        assert batch, batch.waiting_on
        for sample in batch.samples:
            np.testing.assert_array_equal(sample["tokens"], far.tokens(sample.key))
            seen.append(sample.key)
        if step % 7 == 3:
            fleet.kill(fleet.broker)
            fleet.broker = fleet.start("broker")
        await queue.complete_step(batch, step, VersionRecord(step + 1, step, step))
        if step % 5 == 0:
            await queue.commit(step, f"step-{step}")
        if step % 11 == 6:
            fleet.kill(fleet.producer)
            await agent.api.process_exited(step, Incarnation("rollout/0", fleet.epoch), "killed")
            fleet.epoch += 1
            fleet.producer = fleet.start("producer", str(fleet.epoch))
    return seen


def recover(folder: Path) -> Ledger:
    """The ledger as its journal has it, after one more kill."""
    journal = Journal(folder)
    found = journal.recover()
    journal.close()
    ledger = Ledger(found.snapshot)
    for _, payload in found.records:
        ledger.apply(msgspec.msgpack.decode(payload, type=JournalEntry))
    ledger.restart_deadlines(0.0)
    return ledger


async def test_kills_lose_nothing_acknowledged_and_train_nothing_twice(fleet: Fleet) -> None:
    ends = [far.connect(fleet.folder, who) for who in (JUDGE, TRAINER, AGENT)]
    (_, judging), (_, training), (_, agent) = ends
    async with judging, training, asyncio.timeout(240):
        judge_task = asyncio.create_task(judge(judging))
        train_task = asyncio.create_task(train(training, agent, fleet))
        await asyncio.wait([judge_task, train_task], return_when=asyncio.FIRST_COMPLETED)
        if judge_task.done():
            train_task.cancel()
            judge_task.result()
        seen = await train_task
        judge_task.cancel()
        await asyncio.gather(judge_task, return_exceptions=True)
    for rpc, _ in ends:
        await rpc.close()
    fleet.kill(fleet.broker)
    fleet.kill(fleet.producer)

    ledger = recover(fleet.folder / "queue")
    assert ledger.audit() == []
    assert len(seen) == len(set(seen)) == STEPS * 4
    on_path = {
        SampleKey(record.group, member)
        for records in ledger.state.path.values()
        for record in records
        for member in range(record.size)
    }
    assert on_path == set(seen)
    account = ledger.account()
    assert account["trained_twice"] == account["prompts_trained_twice"] == 0
    acknowledged = fleet.acknowledged()
    assert len(acknowledged) == len(set(acknowledged))
    complete = {group for group, members in Counter(key.group for key in acknowledged).items() if members == 2}
    there = {key.group for key in on_path} | set(ledger.state.groups)
    assert complete <= there
    # What was given up is what killed producers had begun, and nothing else.
    assert set(ledger.state.ended) <= {"freed", "dropped(producer gone)"}
    assert account["prompts_first_issued"] == len(
        {record.prompt.index for records in ledger.state.path.values() for record in records}
        | {group.prompt.index for group in ledger.state.groups.values()}
        | {prompt.index for prompt in ledger.state.prompts.waiting}
    )


async def test_a_restarted_broker_unlinks_the_slabs_of_the_dead(fleet: Fleet) -> None:
    rpc, queue = far.connect(fleet.folder, TRAINER)
    async with queue, asyncio.timeout(120):
        await queue.rollback(0, VersionRecord(1, 0, 0))
        slab = fleet.folder / "shm" / "rollout-0-10-1.slab"
        while not slab.exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.02)
        fleet.kill(fleet.producer)
        fleet.kill(fleet.broker)
        (fleet.folder / "shm" / "rollout-0-10-2.slab").write_bytes(b"never used")
        fleet.broker = fleet.start("broker")
        await queue.api.process_exited(10_000, Incarnation("rollout/0", 10), "killed")
        while (fleet.folder / "shm" / "rollout-0-10-2.slab").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        fleet.producer = fleet.start("producer", "11")
    await rpc.close()
