"""Which memory lives how long: blocks of many rows, shared blobs, pins, batches of several readers, spilled blocks."""

from __future__ import annotations

import pytest
from ledger_driver import (
    CRITIC,
    ENGINE,
    JUDGE,
    OTHER,
    ROW_BYTES,
    TRAINER,
    Driver,
    make,
    policy,
    spans,
    started,
)

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.memory.refs import BlobRef, Extent
from relax_rt.transport.queue.ledger import events as ev
from relax_rt.transport.queue.ledger.messages import RowPut, SampleKey
from relax_rt.transport.queue.ledger.policy import QueueLimits
from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.rpc.identity import Incarnation

RANK0, RANK1 = Incarnation("reference/0", 40), Incarnation("reference/1", 41)
REFERENCE = {"reward": ("tokens",), "reference": ("tokens",), "train": ("tokens", "reward", "reference")}


def train(d: Driver, version: int, number: int, groups: int = 1) -> int:
    d.reward_all(JUDGE)
    return d.trained(TRAINER, d.take(TRAINER, "train", groups=groups), number, version)


def extents(d: Driver) -> set[tuple[str, int]]:
    return {(slab, offset) for slab, at in d.ledger.state.blocks.live.items() for offset in at}


# --- blocks of many rows


def test_a_block_lives_as_long_as_one_of_its_samples() -> None:
    d, version = started(prompts_per_step=1)
    first, second = d.admit(ENGINE, version, 2).tickets
    keys = [SampleKey(ticket.group, member) for ticket in (first, second) for member in range(2)]
    d.put_all(ENGINE, [d.rows(ENGINE, [RowPut(key, row, 1, spans(version)) for row, key in enumerate(keys)])])
    version = train(d, version, 1)
    d.committed(TRAINER, 1)
    assert d.put_all(ENGINE, []) == []
    assert d.ledger.state.blocks.payload_bytes == 4 * ROW_BYTES
    train(d, version, 2)
    d.committed(TRAINER, 2)
    assert [extent.nbytes for extent in d.put_all(ENGINE, [])] == [4 * ROW_BYTES]
    assert not d.ledger.state.blocks.blocks


def test_rows_of_a_block_that_come_too_late_take_no_part_in_it() -> None:
    d, version = started()
    (mine,) = d.admit(ENGINE, version).tickets
    (lost,) = d.admit(ENGINE, version).tickets
    d.give_back(ENGINE, lost.group)
    rows = [RowPut(SampleKey(ticket.group, 0), row, 1, spans(version)) for row, ticket in enumerate((lost, mine))]
    d.put_all(ENGINE, [d.rows(ENGINE, rows)])
    assert d.ledger.account()["late_puts"] == 1
    batch = d.take(JUDGE, "reward", samples=8)
    assert [(info.key, info.parts) for info in batch.samples] == [(SampleKey(mine.group, 0), [(0, 1)])]
    assert d.ledger.audit() == []


def test_a_batch_names_each_block_once_with_the_row_of_each_sample() -> None:
    d, version = started(group_size=3)
    (ticket,) = d.admit(ENGINE, version).tickets
    at = [2, 0, 1]
    rows = [RowPut(SampleKey(ticket.group, member), row, 1, spans(version)) for row, member in enumerate(at)]
    d.put_all(ENGINE, [d.rows(ENGINE, rows)])
    batch = d.take(JUDGE, "reward", samples=3)
    assert len(batch.blocks) == 1
    assert {info.key.member: info.parts for info in batch.samples} == {2: [(0, 0)], 0: [(0, 1)], 1: [(0, 2)]}


# --- blobs


def image(d: Driver, who: Incarnation, name: str, *keys: SampleKey, version: int) -> BlobRef:
    blob = d.blob(who, name)
    d.put_all(who, [d.rows(who, [RowPut(key, row, 1, spans(version)) for row, key in enumerate(keys)], blobs=[blob])])
    return blob


def test_the_same_blob_of_two_producers_is_kept_once_and_lives_as_long_as_its_last_block() -> None:
    d, version = started(prompts_per_step=1)
    (first,), (second,) = d.admit(ENGINE, version).tickets, d.admit(OTHER, version).tickets
    kept = image(d, ENGINE, "cat", *(SampleKey(first.group, n) for n in range(2)), version=version)
    again = d.blob(OTHER, "cat")
    keys = [SampleKey(second.group, n) for n in range(2)]
    rows = [RowPut(key, row, 1, spans(version)) for row, key in enumerate(keys)]
    assert d.put_all(OTHER, [d.rows(OTHER, rows, blobs=[again])]) == [again.extent]  # goes straight back
    assert d.ledger.state.blocks.deduplicated_bytes == 5000
    d.gone(ENGINE)  # its memory stays for those who need it
    version = train(d, version, 1)
    d.committed(TRAINER, 1)
    batch = d.take(JUDGE, "reward", samples=8)
    d.reward(JUDGE, batch)
    batch = d.take(TRAINER, "train", groups=1)
    assert batch.blobs == [kept]
    d.trained(TRAINER, batch, 2, version)
    assert (kept.extent.slab, kept.extent.offset) in extents(d)
    d.committed(TRAINER, 2)
    assert not d.ledger.state.blocks.blobs and not extents(d)
    assert d.ledger.audit() == []


def test_a_blob_is_pinned_with_the_block_that_names_it() -> None:
    d, version = started(prompts_per_step=1)
    (ticket,) = d.admit(ENGINE, version).tickets
    blob = image(d, ENGINE, "dog", *(SampleKey(ticket.group, n) for n in range(2)), version=version)
    d.take(JUDGE, "reward", samples=2)
    d.own(ev.Lapse([], list(d.ledger.state.leases)))
    late = Incarnation("reward/1", 9)
    d.reward(late, d.take(late, "reward", samples=2))
    d.trained(TRAINER, d.take(TRAINER, "train", groups=1), 1, version)
    d.committed(TRAINER, 1)
    assert (blob.extent.slab, blob.extent.offset) in extents(d)
    d.gone(JUDGE)
    assert not extents(d)
    assert len(d.put_all(ENGINE, [])) == 2


# --- reading after the work is done


def test_a_completion_can_leave_its_memory_pinned_until_unpin() -> None:
    d, version = started(prompts_per_step=1)
    make(d, version)
    batch = d.take(JUDGE, "reward", samples=2)
    d.reward(JUDGE, batch, pinned=True)
    d.trained(TRAINER, d.take(TRAINER, "train", groups=1), 1, version)
    d.committed(TRAINER, 1)
    assert len(extents(d)) == 1 and not d.put_all(ENGINE, [])
    d.restart()
    d.unpin(JUDGE, batch.lease)
    assert not extents(d) and len(d.put_all(ENGINE, [])) == 1
    d.unpin(JUDGE, batch.lease, 777)  # again, or of leases that never were: nothing
    assert d.ledger.audit() == []


@pytest.mark.parametrize("how", ["trained", "abandoned"])
def test_a_trainer_may_read_on_after_its_step(how: str) -> None:
    d, version = started(prompts_per_step=1)
    make(d, version)
    d.reward_all(JUDGE)
    batch = d.take(TRAINER, "train", groups=1)
    if how == "trained":
        d.call(TRAINER, ev.CompleteStep([batch.lease], 1, VersionRecord(9, version, 1), pinned=[batch.lease]))
    else:
        d.call(TRAINER, ev.ReleaseLease(batch.lease, "stopping", pinned=True))
        other = d.take(TRAINER, "train", groups=1)
        d.call(TRAINER, ev.CompleteStep([other.lease], 1, VersionRecord(9, version, 1)))
    d.committed(TRAINER, 1)
    assert len(extents(d)) == 1
    assert len(d.unpin(TRAINER, batch.lease)) == 0 and not extents(d)
    assert len(d.put_all(ENGINE, [])) == 1


def test_a_reader_that_is_fenced_keeps_its_pin_until_it_is_dead() -> None:
    d, version = started(prompts_per_step=1)
    make(d, version)
    batch = d.take(JUDGE, "reward", samples=2)
    newer = Incarnation("reward/0", 60)
    d.reward(newer, d.take(newer, "reward", samples=2))
    d.trained(TRAINER, d.take(TRAINER, "train", groups=1), 1, version)
    d.committed(TRAINER, 1)
    assert len(extents(d)) == 1
    with pytest.raises(Refused):
        d.unpin(JUDGE, batch.lease)
    d.own(ev.ProcessExited(JUDGE, "seen dead"))
    assert not extents(d)


def test_what_was_put_after_the_grant_is_not_in_a_repeated_answer() -> None:
    d, version = started(tasks=REFERENCE)
    make(d, version)
    batch = d.take(RANK0, "reference", samples=2)
    who, seq, event, _ = d.last or pytest.fail("no call")
    d.reward_all(JUDGE)
    assert d.apply(event, who, seq) == batch


# --- spill

SPILLING = QueueLimits(capacity_bytes=10 * ROW_BYTES, high_water=0.5, spill_bytes=100 * ROW_BYTES)


def test_what_waits_for_a_checkpoint_is_spilled_first_and_comes_back() -> None:
    d, v1 = started(SPILLING, prompts_per_step=1, max_staleness=3)
    make(d, v1, 3)
    version = train(d, v1, 1)
    assert d.spill() == []
    table = d.ledger.state.blocks
    assert (table.payload_bytes, table.spilled_bytes) == (4 * ROW_BYTES, 2 * ROW_BYTES)
    trained = next(iter(d.ledger.state.trained.values()))
    assert table.blocks[trained.samples[0].parts[0].block].ref.extent == Extent("spill-1-1.slab", 0, 2 * ROW_BYTES)
    assert len(d.put_all(ENGINE, [])) == 1  # its memory can be used again
    assert d.ledger.to_spill() == []
    d.restart()
    d.rollback(TRAINER, 0, v1)
    batch = d.take(TRAINER, "train", groups=1)
    assert batch.blocks[0].extent is not None and batch.blocks[0].extent.slab == "spill-1-1.slab"
    d.trained(TRAINER, batch, 1, d.weights().version)
    d.committed(TRAINER, 1)
    assert table is not d.ledger.state.blocks and d.ledger.state.blocks.spilled_bytes == 0
    assert d.ledger.audit() == [] and version


def test_the_oldest_are_spilled_next_but_not_what_is_read() -> None:
    d, v1 = started(SPILLING, prompts_per_step=1, max_staleness=8)
    make(d, v1, 4)
    batch = d.take(JUDGE, "reward", samples=2)  # of the oldest group
    moves = d.ledger.to_spill()
    assert [id_ for id_, _ in moves] == [2, 3]
    # One is taken and one ends while they are being copied.
    d.take(CRITIC, "reward", samples=2)
    to = [(id_, Extent("spill-1-1.slab", n * 4096, extent.nbytes)) for n, (id_, extent) in enumerate(moves)]
    assert d.moved([*to, (99, Extent("spill-1-1.slab", 9 * 4096, 10))]) == [
        to[0][1],
        Extent("spill-1-1.slab", 36864, 10),
    ]
    assert d.ledger.state.blocks.spilled_bytes == 2 * ROW_BYTES
    d.reward(JUDGE, batch)
    assert d.ledger.audit() == []


def test_spilling_ends_with_the_disk_and_then_producers_wait() -> None:
    limits = QueueLimits(capacity_bytes=4 * ROW_BYTES, high_water=0.5, spill_bytes=3 * ROW_BYTES)
    d, v1 = started(limits, prompts_per_step=1, max_staleness=8)
    make(d, v1, 2)
    assert "fill the capacity" in d.admit(ENGINE, v1).waiting_on
    d.spill()
    assert d.ledger.state.blocks.spilled_bytes == 2 * ROW_BYTES  # one block: a second has no room
    make(d, v1)
    assert d.ledger.to_spill() == []
    assert "the disk for spilled payloads is full" in d.admit(ENGINE, v1).waiting_on


def test_trainers_are_asked_for_an_early_checkpoint_when_memory_fills() -> None:
    d, v1 = started(QueueLimits(capacity_bytes=5 * ROW_BYTES), prompts_per_step=1, max_staleness=3)
    make(d, v1)
    d.reward_all(JUDGE)
    version = d.trained(TRAINER, d.take(TRAINER, "train", groups=1), 1, v1)
    assert d.last is not None and d.last[3].checkpoint_now == ""  # type: ignore[attr-defined]
    make(d, version)
    d.reward_all(JUDGE)
    d.trained(TRAINER, d.take(TRAINER, "train", groups=1), 2, version)
    assert "4000 of 5000 payload bytes" in d.last[3].checkpoint_now  # type: ignore[attr-defined]


def test_a_slot_cannot_be_named_as_spilled_files_are() -> None:
    d = Driver(policy())
    with pytest.raises(Refused, match="spilled payloads"):
        d.apply(ev.JoinQueue(issued=True), Incarnation("spill/0", 7))
