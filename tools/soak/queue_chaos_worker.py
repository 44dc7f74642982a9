"""A process of queue_chaos.py: ``queue_chaos_worker.py {broker|rollout|reward|trainer} ORDERS-AS-JSON``.

Exits with 0 when asked to stop (SIGTERM), with FENCED when a newer process has taken its place.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import queue_chaos_sabotage as sabotage
from queue_chaos_records import (
    FIELDS,
    Again,
    Book,
    Checkpoint,
    Done,
    Fallback,
    Fenced,
    Joined,
    Made,
    Making,
    Put,
    Read,
    Record,
    Seen,
    Step,
    Weights,
    digest_of,
    now,
    read_lives,
    scored,
)

from relax_rt.transport import TransferQueue
from relax_rt.transport.base.versions import ROOT, VersionRecord
from relax_rt.transport.memory.values import Shared
from relax_rt.transport.queue.batch import LeasedBatch, LeasedSample
from relax_rt.transport.queue.client import NewSample
from relax_rt.transport.queue.hosting import Host
from relax_rt.transport.queue.ledger.messages import Failure, SampleKey, Ticket, VersionSpan
from relax_rt.transport.queue.ledger.policy import LedgerPolicy, QueueLimits
from relax_rt.transport.queue.transfer_queue import BlockingQueue
from relax_rt.transport.rpc.errors import Refused, StaleEpoch

FENCED = 3
PR_SET_PDEATHSIG = 1
POLICY = LedgerPolicy(
    group_size=4,
    prompts_per_step=4,
    max_staleness=2,
    tasks={"reward": ("tokens", "image"), "train": ("tokens", "logprobs", "reward", "token_reward")},
    straggler_wait_s=4.0,
)
# Room for less than what the staleness bound lets producers make: it is met, and so is the disk.
LIMITS = QueueLimits(lease_s=3.0, capacity_bytes=2 << 20, spill_bytes=1 << 20, high_water=0.75)
SEGMENT_BYTES = 256 << 10
ARENA_BYTES = 8 << 20
KEPT_CHECKPOINTS = 5
CHECKPOINT_EVERY = 4
WAIT_S = 1.0


class Orders(msgspec.Struct):
    """What the tool asks of a process.

    Attributes:
        folder: of the whole run. slot, number: which process this is. seed: of its choices.
        sabotage: a safeguard that the broker switches off; empty: none.
    """

    folder: str
    slot: str
    number: int
    seed: int
    sabotage: str = ""

    @property
    def queue(self) -> Path:
        return Path(self.folder) / "queue"

    @property
    def weights(self) -> Path:
        """Holds the version that engines are to use."""
        return Path(self.folder) / "weights"


class Work:
    """What the loops of all kinds share: the book, the dice, and whether to stop."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.book = Book(Path(orders.folder) / "records", orders.slot, orders.number)
        self.dice = random.Random(f"{orders.seed} {orders.slot} {orders.number}")
        self.numbers = np.random.default_rng(self.dice.getrandbits(64))
        self.stopping = False
        signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, *_: object) -> None:
        self.stopping = True

    def connect(self) -> TransferQueue:
        return TransferQueue.connect(
            self.orders.queue, name=self.orders.slot, capacity_bytes=ARENA_BYTES, length_field="tokens"
        )

    def joined(self, queue: TransferQueue) -> None:
        assert queue.membership is not None
        who = queue.membership.who
        self.write(Joined(now(), who.slot, who.epoch, os.getpid()))

    def write(self, record: Record) -> None:
        self.book.write(record)

    def seen(self, sample: LeasedSample) -> Seen:
        score = {name: sample[name] for name in ("reward", "token_reward") if name in sample}
        return Seen(
            sample.key,
            content(sample),
            sample.prompt,
            sample.staleness,
            digest_of(score) if score else "",
            digest_of(scored(sample["tokens"])),
        )


def content(sample: LeasedSample) -> str:
    """The digest of what its producer put, as it is in memory now."""
    return digest_of({name: sample[name] for name in FIELDS})


# --- the broker


async def broker(orders: Orders) -> None:
    sabotage.apply(orders.sabotage)
    fsync_every_s = 2.0 if orders.sabotage == "journal" else 0.2
    host = Host(orders.queue, POLICY, LIMITS, fsync_every_s=fsync_every_s, segment_bytes=SEGMENT_BYTES)
    await host.open()
    assert host.broker is not None
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    failed, stopped = asyncio.ensure_future(host.broker.run()), asyncio.ensure_future(stop.wait())
    await asyncio.wait([failed, stopped], return_when=asyncio.FIRST_COMPLETED)
    if failed.done():
        failed.result()
    failed.cancel()
    await host.close()


# --- producers


async def rollout(orders: Orders) -> None:
    """Make groups of samples, as an engine that swaps its weights at a token boundary would."""
    work = Work(orders)
    async with work.connect() as queue:
        work.joined(queue)
        while not work.stopping:
            version = _engine_version(orders)
            if version is None:
                await asyncio.sleep(0.05)
                continue
            admission = await queue.client.admit(version, work.dice.randint(1, 2), wait_s=WAIT_S)
            for ticket in admission.tickets:
                await _make(work, queue, ticket, version)


def _engine_version(orders: Orders) -> int | None:
    return int(orders.weights.read_text()) if orders.weights.exists() else None


async def _make(work: Work, queue: TransferQueue, ticket: Ticket, version: int) -> None:
    image = Shared(work.numbers.integers(0, 256, (64, 64, 3), dtype=np.uint8))
    whole = work.dice.random() < 0.5
    samples: list[NewSample] = []
    for member in ticket.wanted():
        await asyncio.sleep(work.dice.expovariate(1 / 0.008))
        length = int(min(work.numbers.lognormal(6.8, 0.8), 8000)) + 1
        tokens = work.numbers.integers(0, 50_000, length).astype(np.int32)
        columns = {
            "tokens": tokens,
            "logprobs": -work.numbers.random(length, dtype=np.float32),
            "image": image,
            "text": f"group {ticket.group}, member {member}: " + "ä" * work.dice.randrange(40),
        }
        cut, newer = work.dice.randrange(length), _engine_version(work.orders) or version
        spans = [VersionSpan(0, length, version, version)]
        if newer > version and cut:
            spans = [VersionSpan(0, cut, version, version), VersionSpan(cut, length, newer, version)]
        samples.append(NewSample(SampleKey(ticket.group, member), columns, spans))
        if not whole:
            await _put(work, queue, samples)
            samples = []
    if samples:
        await _put(work, queue, samples)


async def _put(work: Work, queue: TransferQueue, samples: list[NewSample]) -> None:
    made = [
        Made(one.key, digest_of({**one.columns, "image": one.columns["image"].value}), one.versions) for one in samples
    ]
    work.write(Making(now(), made))
    begun = now()
    await queue.client.put_samples(samples)
    work.write(Put(begun, now(), [one.key for one in samples]))


# --- reward consumers


class Kept:
    """Arrays of finished leases that are looked at again after a while."""

    FOR_S: ClassVar = 6.0

    def __init__(self, work: Work) -> None:
        self._work = work
        self._arrays: deque[tuple[float, int, SampleKey, str, dict[str, Any]]] = deque()

    def keep(self, batch: LeasedBatch, sample: LeasedSample) -> None:
        columns = {name: sample[name] for name in FIELDS}
        until = now() + self._work.dice.random() * self.FOR_S
        self._arrays.append((until, batch.lease, sample.key, digest_of(columns), columns))

    def look(self, *, at_all: bool = False) -> None:
        """Look again at those whose time has come."""
        while self._arrays and (at_all or self._arrays[0][0] <= now()):
            _, lease, key, digest, columns = self._arrays.popleft()
            self._work.write(Again(now(), lease, key, digest, digest_of(columns)))


async def reward(orders: Orders) -> None:
    """Read, compute what follows from the tokens, put it; now and then fail, give up, or keep what was read."""
    work = Work(orders)
    kept = Kept(work)
    async with work.connect() as queue:
        work.joined(queue)
        while not work.stopping:
            batch = await queue.lease("reward", samples=work.dice.randint(1, 8), wait_s=WAIT_S)
            kept.look()
            if batch:
                await _score(work, kept, queue, batch)
        kept.look(at_all=True)


async def _score(work: Work, kept: Kept, queue: TransferQueue, batch: LeasedBatch) -> None:
    seen = [work.seen(sample) for sample in batch.samples]
    work.write(Read(now(), "reward", batch.lease, seen))
    await asyncio.sleep(work.dice.expovariate(1 / 0.02))
    for first, sample in zip(seen, batch.samples, strict=True):
        again = content(sample)
        if again != first.digest:
            work.write(Again(now(), batch.lease, sample.key, first.digest, again))
    if work.dice.random() < 0.03:
        await queue.release(batch, "now and then one does")
        return
    if work.dice.random() < 0.3:
        kept.keep(batch, work.dice.choice(batch.samples))
    failures = [Failure(key, "cannot be judged") for key in batch.keys if work.dice.random() < 0.004]
    failed = {failure.key for failure in failures}
    columns = {sample.key: scored(sample["tokens"]) for sample in batch.samples if sample.key not in failed}
    begun = now()
    await queue.complete(batch, columns, failures)
    work.write(Done(begun, now(), batch.lease))


# --- the trainer


class Trainer:
    """Takes batches, trains, announces weights, writes checkpoints, falls back."""

    def __init__(self, orders: Orders) -> None:
        self.work = Work(orders)
        self.kept = Kept(self.work)
        self.folder = Path(orders.folder) / "checkpoints"
        self.step, self.saved, self.asked = 0, 0, ""
        self.weights = VersionRecord(ROOT, ROOT, 0)
        lives = read_lives(Path(orders.folder) / "records", "trainer")
        told = [one.version for life in lives for one in life.records if isinstance(one, Weights)]
        self._last_version = max(told, default=ROOT)

    def run(self) -> None:
        work, dice = self.work, self.work.dice
        transfer = work.connect()
        with transfer.blocking() as queue:
            work.joined(transfer)
            self._fall_back(queue, deliberate=dice.random() < 0.2)
            while not work.stopping:
                batch = queue.lease("train", groups=POLICY.prompts_per_step, wait_s=WAIT_S)
                self.kept.look()
                if batch:
                    self._train(queue, batch)
                # The queue asks for a checkpoint when memory is short: often late, so that there are steps to undo.
                asked = self.asked and (not batch or dice.random() < 0.2)
                if self.step > self.saved and (asked or self.step - self.saved >= CHECKPOINT_EVERY):
                    self._save(queue)
                    if dice.random() < 0.04:
                        self._fall_back(queue, deliberate=True)
            if self.step > self.saved:
                self._save(queue)
            self.kept.look(at_all=True)

    def _train(self, queue: BlockingQueue, batch: LeasedBatch) -> None:
        """One step."""
        work, dice = self.work, self.work.dice
        work.write(Read(now(), "train", batch.lease, [work.seen(one) for one in batch.samples], self.weights.version))
        time.sleep(dice.expovariate(1 / (0.4 if dice.random() < 0.03 else 0.04)))
        if dice.random() < 0.3:
            self.kept.keep(batch, dice.choice(batch.samples))
        skipped, step = dice.random() < 0.02, self.step + 1
        after = self.weights if skipped else self._new_weights(step, self.weights.version, changed=True)
        begun = now()
        try:
            advice = queue.complete_step(batch, step, after, skipped=skipped)
        except StaleEpoch:
            raise
        except Refused:
            # The lease lapsed: the step does not count.
            self._fall_back(queue, deliberate=False)
            return
        self.step, self.weights, self.asked = step, after, advice.checkpoint_now
        work.write(Step(begun, now(), step, batch.lease, after.version, skipped))
        self._tell_engines()

    def _new_weights(self, step: int, parent: int, *, changed: bool) -> VersionRecord:
        self._last_version += 1
        self.work.write(Weights(now(), self._last_version, parent, changed))
        return VersionRecord(self._last_version, parent, step, changed=changed)

    def _tell_engines(self) -> None:
        path = self.work.orders.weights
        temporary = path.with_suffix(".tmp")
        temporary.write_text(str(self.weights.version))
        temporary.rename(path)

    def _save(self, queue: BlockingQueue) -> None:
        """The rename is the commit point; the queue is told of it."""
        temporary = self.folder / f"tmp-{self.work.orders.number}"
        temporary.mkdir()
        (temporary / "version").write_text(str(self.weights.version))
        temporary.rename(self._path(self.step))
        self.saved = self.step
        self.work.write(Checkpoint(now(), self.step, self.weights.version))
        queue.commit(self.step, self._path(self.step).name)
        for step in self._checkpoints()[:-KEPT_CHECKPOINTS]:
            shutil.rmtree(self._path(step))

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def _checkpoints(self) -> list[int]:
        return sorted(int(path.name.removeprefix("step-")) for path in self.folder.glob("step-*"))

    def _fall_back(self, queue: BlockingQueue, *, deliberate: bool) -> None:
        """Go on from the newest checkpoint, or deliberately from an older one: those after it are given up."""
        there = self._checkpoints()
        given_up = self.work.dice.randint(1, 2) if deliberate and len(there) > 2 else 0
        for step in reversed(there[len(there) - given_up :]):
            # At once and newest first: whoever is killed here leaves whole checkpoints of one path.
            gone = self.folder / f"gone-{self.work.orders.number}-{self._last_version}-{step}"
            self._path(step).rename(gone)
            shutil.rmtree(gone)
        there = there[: len(there) - given_up]
        step = there[-1] if there else 0
        parent = int((self._path(step) / "version").read_text()) if there else ROOT
        after = self._new_weights(step, parent, changed=False)
        begun = now()
        queue.rollback(step, after)
        self.step, self.saved, self.weights = step, step, after
        self.work.write(Fallback(begun, now(), step, after.version, given_up > 0))
        self._tell_engines()


def trainer(orders: Orders) -> None:
    Trainer(orders).run()


# --- any of them


def _die_with_parent() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def main() -> int:
    _die_with_parent()
    kind, orders = sys.argv[1], msgspec.json.decode(sys.argv[2], type=Orders)
    if kind == "trainer":
        work: Callable[[], None] = lambda: trainer(orders)  # noqa: E731
    else:
        loop = {"broker": broker, "rollout": rollout, "reward": reward}[kind]
        work = lambda: asyncio.run(loop(orders))  # noqa: E731
    try:
        work()
    except StaleEpoch as error:
        Book(Path(orders.folder) / "records", orders.slot, orders.number).write(Fenced(now(), str(error)))
        return FENCED
    return 0


if __name__ == "__main__":
    sys.exit(main())
