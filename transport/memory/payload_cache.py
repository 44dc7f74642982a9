"""A reader's cache of other nodes' payloads: which extents it holds, for which leases, and what it evicts when full.

An extent's bytes may be written anew by their owner once no lease pins them, and their name does not tell. So an entry
lives only while a lease that asked for it is held here, and a later lease never sees what an earlier one fetched.
No I/O, and no clock of its own.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from relax_rt.transport.memory.refs import Extent
from relax_rt.transport.memory.slabs import Heap, aligned
from relax_rt.transport.rpc.errors import OutOfSpace, Refused, RelaxError, Unreachable

Fetched = dict[Extent, NDArray[np.uint8]]

_ENTRIES_AT_A_TIME = 128


class CacheEntry:
    """An extent that is held or being fetched.

    Attributes:
        region: where its bytes go; None when it is no longer wanted: what still arrives is dropped.
        ready: all its bytes are there.
        todo: (offset, bytes) not yet requested, the next at the end.
        missing_bytes: that have not arrived.
        leases: for which it is held; those in `pinned` may be reading it.
        urgent: a caller waits for it.
    """

    __slots__ = (
        "address",
        "deadline",
        "extent",
        "jobs",
        "leases",
        "missing_bytes",
        "pinned",
        "ready",
        "region",
        "todo",
        "urgent",
    )

    def __init__(self, address: str, extent: Extent, region: Region) -> None:
        self.address, self.extent = address, extent
        self.region: Region | None = region
        self.ready = False
        self.todo = [(0, extent.nbytes)] if extent.nbytes else []
        self.missing_bytes = extent.nbytes
        self.leases: set[int] = set()
        self.pinned: set[int] = set()
        self.jobs: list[FetchJob] = []
        self.deadline = 0.0
        self.urgent = False

    def array(self) -> NDArray[np.uint8] | None:
        region = self.region
        return region.array() if self.ready and region is not None else None

    @property
    def name(self) -> str:
        return f"slab {self.extent.slab} bytes {self.extent.offset} to {self.extent.offset + self.extent.nbytes}"


@dataclasses.dataclass(eq=False)
class FetchJob:
    """Extents requested for a lease. With a future a caller waits, and reads them until the lease is released."""

    address: str
    extents: Sequence[Extent]
    lease: int
    deadline: float
    future: concurrent.futures.Future[Fetched] | None = None
    waiting: int = 0
    entries: list[CacheEntry] = dataclasses.field(default_factory=list)

    @property
    def admitted(self) -> bool:
        return len(self.entries) == len(self.extents)

    @property
    def what(self) -> str:
        return f"payload of lease {self.lease} from {self.address}"

    def resolve(self, error: BaseException | None = None) -> None:
        """Resolve the future, once."""
        future, self.future = self.future, None
        entries, self.entries = self.entries, []
        # False when the caller was cancelled.
        if future is None or not future.set_running_or_notify_cancel():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result({entry.extent: array for entry in entries if (array := entry.array()) is not None})


class CacheStatistics(msgspec.Struct, frozen=True):
    """Numbers of a cache; those of bytes, entries and waiting are of this moment, the others since it was made."""

    capacity_bytes: int
    total_bytes: int
    used_bytes: int
    pinned_bytes: int
    entries: int
    leases: int
    waiting_for_space: int
    hits: int
    misses: int
    evictions: int


class Cache:
    """Entries by extent, in the order of their last use, and the jobs that wait for room."""

    def __init__(self, memory: LocalMemory) -> None:
        self.memory = memory
        self.entries: collections.OrderedDict[Extent, CacheEntry] = collections.OrderedDict()
        self.jobs: set[FetchJob] = set()
        self._leases: dict[int, set[Extent]] = {}
        self._fetches: collections.deque[FetchJob] = collections.deque()
        self._prefetches: collections.deque[FetchJob] = collections.deque()
        self._hits = self._misses = self._evictions = 0
        self.unfinished = False

    def add(self, job: FetchJob) -> None:
        """Enqueue a job. One that can never fit fails at once; such a prefetch is dropped."""
        job.extents = list(dict.fromkeys(job.extents))
        need = sum(aligned(extent.nbytes) for extent in job.extents)
        if need > self.memory.capacity_bytes:
            job.resolve(
                OutOfSpace(
                    job.what,
                    why=f"it needs {need} bytes; the capacity is {self.memory.capacity_bytes}",
                    hint="lease fewer samples at once, or raise capacity_bytes",
                )
            )
            return
        (self._prefetches if job.future is None else self._fetches).append(job)
        self.jobs.add(job)
        self.unfinished = True

    def queue_changed(self) -> None:
        """A queued job was cancelled."""
        self.unfinished = True

    def admit(self) -> list[CacheEntry]:
        """Allocate memory for the next jobs; returns the entries to be received for them.

        Jobs with a waiting caller go first; a prefetch never evicts. One job after the other gets all it needs, so that
        two of them never wait for each other; a long one gets some entries at a time, so that these can be requested
        meanwhile (`unfinished`: call again).
        """
        wanted: list[CacheEntry] = []
        if not self.memory.collect() and not self.unfinished:
            return wanted
        self.unfinished = False
        for queue in (self._fetches, self._prefetches):
            while queue:
                job = queue[0]
                if job.future is not None and job.future.cancelled():
                    self.jobs.discard(job)
                if job in self.jobs:
                    try:
                        if not self._admit(job, wanted):
                            return wanted
                    except OutOfSpace as error:
                        self._fail(job, error)
                    if job in self.jobs and not job.admitted:
                        self.unfinished = True
                        return wanted
                    self._done_if_complete(job)
                queue.popleft()
        return wanted

    def _admit(self, job: FetchJob, wanted: list[CacheEntry]) -> bool:
        """Admit some of a job's entries; False when there is no room."""
        if not job.entries:
            # Nothing is evicted in vain: first see whether there can be room.
            need = sum(aligned(extent.nbytes) for extent in job.extents if extent not in self.entries)
            if need > self.memory.capacity_bytes - self._pinned_bytes():
                return False
        for extent in job.extents[len(job.entries) :][:_ENTRIES_AT_A_TIME]:
            entry = self.entries.get(extent)
            if entry is not None and not entry.ready and entry.address != job.address:
                why = f"it is at {job.address} now"
                self.drop(entry, Unreachable(f"{entry.name}, asked of {entry.address}", why=why))
                entry = None
            self._hits += entry is not None
            if entry is None:
                region = self.memory.allocate(extent.nbytes)
                while region is None and job.future is not None and self._evict_one(job):
                    region = self.memory.allocate(extent.nbytes)
                if region is None:
                    return False
                self._misses += 1
                entry = self.entries[extent] = CacheEntry(job.address, extent, region)
            entry.leases.add(job.lease)
            entry.deadline = max(entry.deadline, job.deadline)
            if job.future is not None:
                entry.pinned.add(job.lease)
            if not entry.ready:
                if not entry.urgent:
                    entry.urgent = job.future is not None
                    wanted.append(entry)
                entry.jobs.append(job)
                job.waiting += 1
            self.entries.move_to_end(extent)
            self._leases.setdefault(job.lease, set()).add(extent)
            job.entries.append(entry)
        return True

    def _evict_one(self, job: FetchJob) -> bool:
        """Evict the least recently used entry that nobody reads; its lease can fetch it again."""
        wanted = set(job.extents)
        for entry in self.entries.values():
            if not entry.pinned and entry.extent not in wanted:
                self._evictions += 1
                self.drop(entry, Refused(entry.name, why="its memory was needed for what someone waits for"))
                return True
        return False

    def received(self, entry: CacheEntry) -> None:
        """All bytes of an entry are there."""
        entry.ready = True
        jobs, entry.jobs = entry.jobs, []
        for job in jobs:
            job.waiting -= 1
            self._done_if_complete(job)

    def _done_if_complete(self, job: FetchJob) -> None:
        if job.waiting == 0 and job.admitted:
            self.jobs.discard(job)
            job.resolve()

    def drop(self, entry: CacheEntry, error: RelaxError) -> None:
        """Drop an entry; jobs that wait for it fail with the error."""
        self.unfinished = True
        if self.entries.get(entry.extent) is entry:
            del self.entries[entry.extent]
        entry.region, entry.ready = None, False
        entry.todo.clear()
        jobs, entry.jobs = entry.jobs, []
        for job in jobs:
            self._fail(job, error)

    def _fail(self, job: FetchJob, error: RelaxError) -> None:
        # The next job in the queue may be admitted now.
        self.unfinished = True
        self.jobs.discard(job)
        job.resolve(error)

    def release(self, lease: int) -> None:
        """Release a lease: entries held for it alone are dropped, its jobs fail. Arrays stay valid while they live."""
        # Entries that it pinned can be evicted now.
        self.unfinished = True
        ended = Refused(f"payload of lease {lease}", why="the lease was released meanwhile")
        for extent in self._leases.pop(lease, ()):
            entry = self.entries.get(extent)
            if entry is not None and lease in entry.leases:
                entry.leases.discard(lease)
                entry.pinned.discard(lease)
                if not entry.leases:
                    self.drop(entry, ended)
        for job in [job for job in self.jobs if job.lease == lease]:
            self._fail(job, ended)

    def expire(self, now: float, late: Callable[[FetchJob], RelaxError]) -> None:
        """Fail the jobs whose deadline has passed, with what `late` says."""
        for job in [job for job in self.jobs if job.deadline <= now]:
            self._fail(job, late(job))

    def expire_entries(self, now: float) -> None:
        """Stop receiving entries whose deadline has passed."""
        for entry in [entry for entry in self.entries.values() if not entry.ready and entry.deadline <= now]:
            self.drop(entry, Refused(entry.name, why="its deadline has passed"))

    @property
    def waiting_for_space(self) -> int:
        """Jobs that have no memory yet."""
        return len(self._fetches) + len(self._prefetches)

    def space(self) -> str:
        """Why there is no room, for messages."""
        return f"{self._pinned_bytes()} of {self.memory.capacity_bytes} bytes are in use by {len(self._leases)} leases"

    def fail_all(self, error: RelaxError) -> None:
        """Fail all jobs and drop all entries."""
        for job in list(self.jobs):
            self._fail(job, error)
        self.entries.clear()

    def _pinned_bytes(self) -> int:
        # An array outlives its entry's release: it counts until it is gone.
        unpinned = [entry.extent.nbytes for entry in list(self.entries.values()) if not entry.pinned]
        return self.memory.used_bytes - sum(aligned(max(nbytes, 1)) for nbytes in unpinned)

    def statistics(self) -> CacheStatistics:
        return CacheStatistics(
            capacity_bytes=self.memory.capacity_bytes,
            total_bytes=self.memory.total_bytes,
            used_bytes=self.memory.used_bytes,
            pinned_bytes=self._pinned_bytes(),
            entries=len(self.entries),
            leases=len(self._leases),
            waiting_for_space=self.waiting_for_space,
            hits=self._hits,
            misses=self._misses,
            evictions=self._evictions,
        )


class _Segment:
    """Memory mapped twice, writable to receive into and read-only for readers, with its free extents.

    Raises:
        OutOfSpace: the system gives no memory.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        fd = os.memfd_create("relax-payload", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
            # The pages must be there before bytes come: a fault costs more than the copy into it.
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self.writable = memoryview(mmap.mmap(fd, nbytes, flags=flags))
            self.readable = np.frombuffer(mmap.mmap(fd, nbytes, flags=flags, prot=mmap.PROT_READ), np.uint8)
        except OSError as error:
            raise OutOfSpace(f"{nbytes} bytes for payloads from other nodes", why=str(error)) from error
        finally:
            os.close(fd)
        self.address = self.readable.ctypes.data
        self.heap = Heap(nbytes)


class Region:
    """Bytes of a segment, freed when neither the region nor an array made of it is left."""

    __slots__ = ("_on_release", "_segment", "memory", "nbytes", "offset", "size")

    def __init__(self, segment: _Segment, offset: int, nbytes: int, size: int, on_release: _OnRelease) -> None:
        self.memory = segment.writable[offset : offset + nbytes]
        self.offset, self.nbytes, self.size = offset, nbytes, size
        self._segment, self._on_release = segment, on_release

    @property
    def __array_interface__(self) -> dict[str, Any]:
        # numpy: an array that is made of this keeps it alive, and so does every view of that array.
        return {
            "data": (self._segment.address + self.offset, True),
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }

    def array(self) -> NDArray[np.uint8]:
        return np.asarray(self)

    def __del__(self) -> None:
        self._on_release(self._segment, self.offset, self.size)


_OnRelease = Callable[[_Segment, int, int], None]


class LocalMemory:
    """Regions within capacity_bytes. Used by one thread; only what ends a region's life may happen in any.

    Args:
        capacity_bytes: of all segments together.
        segment_bytes: what is taken from the system at a time; a larger region gets a segment of its own.
        on_free: called, in whatever thread, when a region has been freed.
    """

    def __init__(self, capacity_bytes: int, segment_bytes: int, on_free: Callable[[], None] = lambda: None) -> None:
        self.capacity_bytes = aligned(capacity_bytes)
        self._segment_bytes = min(aligned(segment_bytes), self.capacity_bytes)
        self._on_free = on_free
        self._segments: list[_Segment] = []
        self._freed: collections.deque[tuple[_Segment, int, int]] = collections.deque()
        self.used_bytes = 0

    @property
    def total_bytes(self) -> int:
        return sum(segment.nbytes for segment in self._segments)

    def warm(self) -> None:
        """Make the first segment, its pages there, so that the first fetch does not have to."""
        if not self._segments:
            self._segments.append(_Segment(self._segment_bytes))

    def allocate(self, nbytes: int) -> Region | None:
        """A region; None if there is no room for it now.

        Raises:
            OutOfSpace: the system gives no memory.
        """
        self.collect()
        size = aligned(max(nbytes, 1))
        for segment in self._segments:
            offset = segment.heap.allocate(size)
            if offset is not None:
                return self._region(segment, offset, nbytes, size)
        wanted = max(size, self._segment_bytes)
        if not self._make_room(wanted):
            wanted = size
            if not self._make_room(wanted):
                return None
        segment = _Segment(wanted)
        self._segments.append(segment)
        offset = segment.heap.allocate(size)
        assert offset is not None
        return self._region(segment, offset, nbytes, size)

    def collect(self) -> bool:
        """Collect freed regions; returns whether there were any."""
        some = bool(self._freed)
        while self._freed:
            segment, offset, size = self._freed.popleft()
            segment.heap.free(offset, size)
            self.used_bytes -= size
        return some

    def _region(self, segment: _Segment, offset: int, nbytes: int, size: int) -> Region:
        self.used_bytes += size
        return Region(segment, offset, nbytes, size, self._on_release)

    def _on_release(self, segment: _Segment, offset: int, size: int) -> None:
        # A region may end in the middle of anything, in any thread: no lock here, a deque's append is atomic.
        self._freed.append((segment, offset, size))
        self._on_free()

    def _make_room(self, nbytes: int) -> bool:
        """Unmap unused segments until another of nbytes fits."""
        excess = self.total_bytes + nbytes - self.capacity_bytes
        unused = sorted((one for one in self._segments if one.heap.empty), key=lambda one: one.nbytes)
        if excess > sum(segment.nbytes for segment in unused):
            return False
        while excess > 0:
            segment = unused.pop()
            self._segments.remove(segment)
            excess -= segment.nbytes
        return True

    def close(self) -> None:
        """Unmap all segments; those that arrays refer to live as long as these."""
        self._segments.clear()
