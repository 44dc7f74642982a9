"""What a reader holds of other nodes' payloads: room, pins, and that no lease sees what an earlier one fetched."""

from __future__ import annotations

import concurrent.futures
import gc

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from relax_rt.transport.memory.payload_cache import Cache, CacheEntry, Fetched, FetchJob, LocalMemory
from relax_rt.transport.memory.refs import Extent
from relax_rt.transport.rpc.errors import OutOfSpace, Refused, Unreachable

KIB = 1024
CAPACITY = 64 * KIB


def extent(number: int, nbytes: int = 16 * KIB) -> Extent:
    return Extent("rollout-0-7-1.slab", number * 64 * KIB, nbytes)


def job(lease: int, *extents: Extent, prefetch: bool = False, deadline: float = 10.0) -> FetchJob:
    future: concurrent.futures.Future[Fetched] = concurrent.futures.Future()
    return FetchJob("tcp://far:1", list(extents), lease, deadline, None if prefetch else future)


def small() -> Cache:
    return Cache(LocalMemory(CAPACITY, CAPACITY))


def ask(cache: Cache, wanted: FetchJob) -> concurrent.futures.Future[Fetched] | None:
    """Put a job in line; what is admitted arrives at once, as bytes that name its lease."""
    future = wanted.future
    cache.add(wanted)
    for entry in cache.admit():
        arrive(cache, entry, wanted.lease)
    return future


def arrive(cache: Cache, entry: CacheEntry, value: int) -> None:
    assert entry.region is not None
    entry.region.memory[:] = bytes([value % 256]) * entry.extent.nbytes
    entry.missing_bytes = 0
    cache.received(entry)


def test_views_keep_their_bytes_when_the_lease_is_long_over() -> None:
    cache = small()
    future = ask(cache, job(1, extent(1)))
    assert future is not None
    view = future.result(0)[extent(1)][KIB : 2 * KIB].view("<u4").reshape(16, 16)
    del future
    cache.release(1)
    for lease in range(2, 20):
        ask(cache, job(lease, extent(1), extent(2), extent(3)))
        cache.release(lease)
    assert (view == 0x01010101).all()
    with pytest.raises(ValueError, match="read-only"):
        view[0, 0] = 7
    assert cache.memory.used_bytes >= 16 * KIB
    del view
    cache.memory.collect()
    assert cache.memory.used_bytes == 0


def test_a_later_lease_does_not_see_what_an_earlier_one_fetched() -> None:
    cache = small()
    ask(cache, job(1, extent(1)))
    cache.release(1)
    assert extent(1) not in cache.entries
    again = ask(cache, job(2, extent(1)))
    assert again is not None and (again.result(0)[extent(1)] == 2).all()


def test_leases_that_overlap_share_one_copy() -> None:
    cache = small()
    ask(cache, job(1, extent(1), extent(2)))
    second = ask(cache, job(2, extent(2)))
    assert second is not None and (second.result(0)[extent(2)] == 1).all()
    cache.release(1)
    assert list(cache.entries) == [extent(2)]
    cache.release(2)
    assert not cache.entries
    assert cache.statistics().hits == 1


def test_prefetched_extents_give_way_the_least_recently_used_first() -> None:
    cache = small()
    for number in range(1, 5):
        ask(cache, job(number, extent(number), prefetch=True))
    ask(cache, job(1, extent(1)))
    ask(cache, job(9, extent(9)))
    assert list(cache.entries) == [extent(3), extent(4), extent(1), extent(9)]
    assert cache.statistics().evictions == 1


def test_a_prefetch_evicts_nothing_and_is_admitted_later() -> None:
    cache = small()
    for number in range(1, 5):
        ask(cache, job(number, extent(number), prefetch=True))
    ask(cache, job(5, extent(5), prefetch=True))
    assert extent(5) not in cache.entries
    cache.release(2)
    assert [entry.extent for entry in cache.admit()] == [extent(5)]


def test_fetched_extents_are_kept_and_who_waits_gets_room_when_a_lease_ends() -> None:
    cache = small()
    ask(cache, job(1, *(extent(number) for number in range(4))))
    waiting = ask(cache, job(2, extent(7)))
    assert waiting is not None and not waiting.done()
    assert cache.space() == f"{CAPACITY} of {CAPACITY} bytes are in use by 1 leases"
    cache.release(1)
    for entry in cache.admit():
        arrive(cache, entry, 2)
    assert (waiting.result(0)[extent(7)] == 2).all()


@pytest.mark.parametrize("how", ["deadline", "cancelled", "released"])
def test_a_job_behind_a_cancelled_one_is_admitted(how: str) -> None:
    cache = small()
    ask(cache, job(1, extent(1), extent(2), extent(3)))
    large, little = job(2, extent(4), extent(5), deadline=1.0), job(3, extent(6))
    future = large.future
    assert future is not None
    ask(cache, large)
    waiting = ask(cache, little)
    assert waiting is not None and not waiting.done()
    if how == "deadline":
        cache.expire(2.0, lambda late: Refused(late.what))
    elif how == "cancelled":
        future.cancel()
        cache.queue_changed()
    else:
        cache.release(2)
    for entry in cache.admit():
        arrive(cache, entry, 3)
    assert waiting.done() and future.done() and cache.waiting_for_space == 0


def test_what_can_never_fit_is_refused_at_once() -> None:
    future = ask(small(), job(1, *(extent(number) for number in range(5))))
    assert future is not None
    with pytest.raises(OutOfSpace, match=f"needs {80 * KIB} bytes; the capacity is {CAPACITY}"):
        future.result(0)


def test_a_released_lease_gets_nothing_any_more() -> None:
    cache = small()
    wanted = job(1, extent(1))
    future = wanted.future
    cache.add(wanted)
    (entry,) = cache.admit()
    cache.release(1)
    assert entry.region is None and not entry.todo
    assert future is not None
    with pytest.raises(Refused, match="the lease was released"):
        future.result(0)


def test_a_deadline_fails_the_job_and_ends_what_only_it_waited_for() -> None:
    cache = small()
    short, long = job(1, extent(1), deadline=1.0), job(2, extent(1), deadline=5.0)
    futures = short.future, long.future
    cache.add(short)
    cache.add(long)
    (entry,) = cache.admit()[:1]
    cache.expire(1.5, lambda late: Refused(late.what))
    cache.expire_entries(1.5)
    assert futures[0] is not None and isinstance(futures[0].exception(0), Refused)
    assert entry.region is not None
    cache.expire(6.0, lambda late: Refused(late.what))
    cache.expire_entries(6.0)
    assert futures[1] is not None and isinstance(futures[1].exception(0), Refused)
    assert entry.region is None and not cache.entries


def test_who_names_a_newer_address_is_not_made_to_wait_for_the_old_one() -> None:
    cache = small()
    old, new = job(1, extent(1)), job(2, extent(1))
    new.address = "tcp://far:2"
    futures = old.future, new.future
    cache.add(old)
    cache.admit()
    cache.add(new)
    (entry,) = cache.admit()
    assert entry.address == "tcp://far:2"
    arrive(cache, entry, 2)
    assert futures[0] is not None and isinstance(futures[0].exception(0), Unreachable)
    assert futures[1] is not None and extent(1) in futures[1].result(0)


def test_a_cancelled_caller_is_no_error() -> None:
    cache = small()
    wanted = job(1, extent(1))
    assert wanted.future is not None and wanted.future.cancel()
    cache.add(wanted)
    for entry in cache.admit():
        arrive(cache, entry, 1)
    assert not cache.jobs


def test_empty_segments_give_way_to_a_larger_one() -> None:
    memory = LocalMemory(64 * KIB, 16 * KIB)
    regions = [memory.allocate(16 * KIB) for _ in range(4)]
    assert all(regions) and memory.allocate(64) is None
    regions.clear()
    large = memory.allocate(60 * KIB)
    assert large is not None and memory.total_bytes <= 64 * KIB
    del large


class CacheMachine(RuleBasedStateMachine):
    """Leases come, look at things for as long as they like, and end, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = small()
        self.generation: dict[Extent, int] = {}
        self.leases: dict[int, list[Extent]] = {}
        self.views: list[tuple[np.ndarray, int]] = []
        self.futures: dict[int, list[concurrent.futures.Future[Fetched]]] = {}
        self.next_lease = 0
        self.flying: list[CacheEntry] = []

    @rule(numbers=st.sets(st.integers(0, 7), max_size=5), prefetch=st.booleans(), nbytes=st.integers(1, 20 * KIB))
    def lease(self, numbers: set[int], prefetch: bool, nbytes: int) -> None:
        self.next_lease += 1
        wanted = [extent(number, nbytes) for number in sorted(numbers)]
        for one in wanted:
            # The ledger gives an extent to others only while the same bytes are in it.
            if not any(one in held for held in self.leases.values()):
                self.generation[one] = self.next_lease
        self.leases[self.next_lease] = wanted
        self.submit(self.next_lease, prefetch)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def fetch_again(self, data: st.DataObject) -> None:
        self.submit(data.draw(st.sampled_from(sorted(self.leases))), False)

    def submit(self, lease: int, prefetch: bool) -> None:
        wanted = job(lease, *self.leases[lease], prefetch=prefetch)
        if wanted.future is not None:
            self.futures.setdefault(lease, []).append(wanted.future)
        self.cache.add(wanted)
        self.flying += self.cache.admit()

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def arrival(self, data: st.DataObject) -> None:
        entry = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        if entry.region is not None and not entry.ready:
            arrive(self.cache, entry, self.generation[entry.extent])

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        for future in self.futures.pop(lease, []):
            if keep and future.done() and not future.exception():
                self.views += [(view[:], self.generation[one]) for one, view in future.result().items()]
        del self.leases[lease]
        self.cache.release(lease)
        self.flying += self.cache.admit()

    @precondition(lambda self: self.views)
    @rule()
    def look_away(self) -> None:
        self.views.pop(0)

    @invariant()
    def nothing_is_stale_or_overwritten(self) -> None:
        for one, entry in self.cache.entries.items():
            array = entry.array()
            assert array is None or (array == self.generation[one] % 256).all()
        for view, value in self.views:
            assert (view == value % 256).all()

    @invariant()
    def memory_is_bounded_and_accounted(self) -> None:
        memory = self.cache.memory
        memory.collect()
        assert memory.used_bytes <= memory.total_bytes <= CAPACITY
        assert set(self.cache.entries) <= {one for wanted in self.leases.values() for one in wanted}

    def teardown(self) -> None:
        for lease in self.leases:
            self.cache.release(lease)
        self.flying.clear()
        self.views.clear()
        self.futures.clear()
        gc.collect()
        self.cache.memory.collect()
        assert self.cache.memory.used_bytes == 0
        assert not self.cache.entries and not self.cache.jobs and not self.cache.statistics().leases


CacheMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
test_cache_machine = CacheMachine.TestCase
