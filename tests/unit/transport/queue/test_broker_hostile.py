"""Calls that no client of ours makes: whatever comes over the wire is answered or refused, and the broker goes on."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
from broker_world import World
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ledger_driver import free_policy, policy

from relax_rt.transport.base import broker as broker_base
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.memory.refs import BlobRef, BlockRef, Extent
from relax_rt.transport.queue.api import QueueApi
from relax_rt.transport.queue.ledger.messages import BlockPut, Failure, LeaseRequest, RowPut, SampleKey, VersionSpan
from relax_rt.transport.queue.ledger.policy import LedgerPolicy, QueueLimits
from relax_rt.transport.rpc.errors import RelaxError, Unreachable
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.interface import methods_of

CALLERS = [Incarnation("rollout/0", 1), Incarnation("trainer/0", 2), Incarnation("rollout/0", 0)]

# Mostly what could be: the rest is refused by the decoder before it comes to the ledger.
huge = st.sampled_from([2**31, 2**48, 2**48, -1, 2**48 + 1, 2**63, 2**64 - 1, -(2**63)])
small = st.sampled_from([0, 1, 2, 0, 1, 3])
numbers = st.integers(0, 15).flatmap(lambda n: huge if n == 0 else small)
durations = st.sampled_from([0.0, -1.0, float("nan"), float("inf"), float("-inf"), 1e308])
floats = st.sampled_from([0.0, 1.0, float("nan"), float("inf"), -1e308])
names = st.sampled_from(["", "rollout/0", "spill/0", "a/b", "x" * 300, "../..", "\0", "trainer/0"])
tasks = st.sampled_from(["reward", "train", "a", "b", "", "rewrad"])
fields = st.lists(st.sampled_from(["tokens", "reward", "label", "", "x" * 100]), max_size=3).map(tuple)
slabs = st.sampled_from(["rollout-0-1-1.slab", "trainer-0-2-1.slab", "spill-1-1.slab", "", "../x.slab", "x" * 5000])
keys = st.builds(SampleKey, numbers, numbers)
spans = st.lists(st.builds(VersionSpan, numbers, numbers, numbers, numbers), max_size=2)
extents = st.builds(Extent, slabs, numbers, numbers)
blocks = st.builds(BlockRef, st.none() | extents, numbers, fields, st.sampled_from([b"", b"\1", b"\1" * 2000, b"RLXB"]))
rows = st.builds(RowPut, keys, numbers, numbers, spans, floats)
blobs = st.builds(BlobRef, st.sampled_from([b"", b"d" * 16, b"e" * 16, b"x" * 100]), extents)
puts = st.lists(
    st.builds(BlockPut, blocks, st.lists(rows, max_size=3), st.lists(blobs, max_size=2), numbers), max_size=2
)
# Some calls are as they should be, so that there is something for the others to spoil.
offers = st.lists(st.integers(0, 1 << 20), min_size=1, max_size=3, unique=True).map(
    lambda at: (
        [
            BlockPut(
                BlockRef(Extent("rollout-0-1-1.slab", 64 * n, 64), 1, ("tokens",)), [RowPut(SampleKey(i, 0), 0, 3)]
            )
            for i, n in enumerate(at)
        ],
        [1] * len(at),
        0.0,
    )
)
made = st.builds(
    lambda at, group, member: (
        [
            BlockPut(
                BlockRef(Extent("rollout-0-1-1.slab", 64 * at, 64), 1, ("tokens",)),
                [RowPut(SampleKey(group, member), 0, 3, [VersionSpan(0, 3, 1, 1)])],
            )
        ],
    ),
    st.integers(0, 1 << 20),
    st.integers(1, 3),
    st.integers(0, 1),
)
columns = st.builds(
    lambda group, member: [BlockPut(BlockRef(None, 1, ("reward",), b"\1"), [RowPut(SampleKey(group, member), 0)])],
    st.integers(1, 4),
    st.integers(0, 1),
)
wants = st.builds(LeaseRequest, numbers, numbers, numbers, numbers)
versions = st.builds(VersionRecord, numbers, numbers, numbers, changed=st.booleans())
ids = st.lists(numbers, max_size=3)
incarnations = st.sampled_from(CALLERS) | st.builds(Incarnation, names, numbers)

METHODS: dict[str, Any] = {
    "join": st.tuples(names, st.sampled_from(["", "here", "there"]), numbers, st.sampled_from(["", "tcp://x:1"])),
    "put_groups": st.tuples(puts, ids, durations) | offers,
    "admit": st.tuples(numbers, numbers, durations) | st.just((1, 2, 0.0)),
    "put_samples": st.tuples(puts) | made,
    "release_groups": st.tuples(ids, names),
    "renew": st.tuples(ids, ids),
    "lease": st.tuples(tasks, wants, durations) | st.tuples(tasks, st.just(LeaseRequest(1)), durations),
    "complete": st.tuples(
        numbers, puts | columns | st.just([]), st.lists(st.builds(Failure, keys, names)), st.booleans()
    ),
    "unpin": st.tuples(ids),
    "release": st.tuples(numbers, names),
    "complete_step": st.tuples(ids, numbers, versions, st.booleans(), ids),
    "filter_groups": st.tuples(numbers, ids, names, st.booleans()),
    "request_surplus": st.tuples(numbers),
    "assign_items": st.tuples(st.dictionaries(numbers, numbers, max_size=3)),
    "commit": st.tuples(numbers, names),
    "rollback": st.tuples(numbers, versions),
    "process_exited": st.tuples(incarnations, names),
}
UNNUMBERED = {"join", "renew"}
Call = tuple[str, Incarnation, int, tuple[Any, ...]]
"""Method, caller, number (0: the next one), arguments."""
hostile: st.SearchStrategy[Call] = st.sampled_from(sorted(METHODS)).flatmap(
    lambda name: st.tuples(st.just(name), st.sampled_from(CALLERS), st.just(0) | numbers, METHODS[name])
)
leases = st.integers(1, 8)
proper: st.SearchStrategy[Call] = st.one_of(
    offers.map(lambda args: ("put_groups", CALLERS[0], 0, args)),
    st.just(("admit", CALLERS[0], 0, (1, 2, 0.0))),
    made.map(lambda args: ("put_samples", CALLERS[0], 0, args)),
    st.builds(
        lambda task, want: ("lease", CALLERS[1], 0, (task, want, 0.0)), tasks, st.builds(LeaseRequest, small, small)
    ),
    st.builds(lambda lease: ("complete", CALLERS[1], 0, (lease, [], [], True)), leases),
    st.builds(lambda lease, put: ("complete", CALLERS[1], 0, (lease, put, [], False)), leases, columns),
    leases.map(lambda lease: ("unpin", CALLERS[1], 0, ([lease],))),
)
scripts = st.lists(proper | hostile, max_size=40)


def wired(name: str, args: tuple[Any, ...]) -> list[Any]:
    """As they come over the wire."""
    method = methods_of(QueueApi)[name]
    values, _ = method.decode_arguments(msgspec.Raw(method.encode_arguments(args)))
    return values


async def play(world: World, script: list[Call]) -> None:
    broker = await world.start(segment_bytes=4096)
    try:
        for n, (name, who, seq, args) in enumerate(script, 2):
            world.caller = who
            given_args = args if name in UNNUMBERED else (seq or n, *args)
            try:
                await getattr(broker, name)(*wired(name, given_args))
            except Unreachable as error:
                raise AssertionError(f"{name}{given_args} ended the broker") from error
            except RelaxError:
                pass
            assert broker._failed is not None and not broker._failed.done(), f"{name}{given_args} ended the broker"
            assert broker._ledger.audit() == [], f"{name}{given_args}"
            await broker.statistics()
            await broker.stats()
        account, n = await broker.account(), broker._ledger.n
    finally:
        with suppress(Exception):
            await world.kill()
    again = await world.start()
    assert await again.account() == account and again._ledger.n >= n
    assert again._ledger.audit() == []
    await again.close()


def run(given: LedgerPolicy, script: list[Call]) -> None:
    folder = Path(tempfile.mkdtemp(prefix="relax-hostile-"))
    try:
        made = World(folder, given=given, limits=QueueLimits(lease_s=60.0, max_sample_bytes=1 << 20))
        with patch.object(broker_base, "MAX_WAIT_S", 0.001):
            asyncio.run(play(made, script))
    finally:
        shutil.rmtree(folder)


careful = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


@careful
@given(scripts)
def test_a_queue_of_offers_outlives_hostile_calls(script: list[Call]) -> None:
    run(free_policy(), script)


@careful
@given(scripts)
def test_a_queue_of_prompts_outlives_hostile_calls(script: list[Call]) -> None:
    run(policy(), [("rollback", CALLERS[1], 1, (0, VersionRecord(1, 0, 0))), *script])
