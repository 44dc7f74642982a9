"""What every end of the TransferQueue has: numbered calls, renewed leases, memory of its own and views of others'."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

from relax_rt.transport.base.calls import NumberedCalls
from relax_rt.transport.memory.arena import Reader, Writer
from relax_rt.transport.memory.fields import parse_fields
from relax_rt.transport.memory.payload_fetcher import Fetcher
from relax_rt.transport.memory.refs import Extent, extents_in
from relax_rt.transport.queue.api import QueueApi
from relax_rt.transport.queue.batch import LeasedBatch
from relax_rt.transport.queue.ledger.messages import Admission, Batch, Offered, Put
from relax_rt.transport.queue.marking import Marks
from relax_rt.transport.queue.offers import Offers
from relax_rt.transport.queue.pins import Pins
from relax_rt.transport.queue.reasons import Reasons
from relax_rt.transport.queue.space import Space
from relax_rt.transport.queue.statistics import ClientStatistics
from relax_rt.transport.queue.threads import Threads
from relax_rt.transport.rpc.errors import DeadlineExceeded, Refused, RelaxError, Unreachable
from relax_rt.transport.rpc.identity import Incarnation

FIRST_SLICE_S, SLICE_S = 0.1, 1.0
"""Long waits are made of calls of this length, so that none holds the window of calls for long."""
HEARTBEAT_S = 60.0
"""An idle client says something this often, so that the broker knows of it on another node."""

T = TypeVar("T")
P = TypeVar("P", Admission, Offered, Batch)


def _is_lease(answer: Admission | Offered | Batch) -> bool:
    """Also one without samples: it is to be given back."""
    return isinstance(answer, Batch) and answer.lease > 0


class Session:
    """One incarnation's session with the broker, for one event loop. Use it as an async context manager.

    Every changing call carries a sequence number and is sent again, with the same number, when the broker cannot be
    reached, for up to patience_s: the broker knows it again and answers as before (see NumberedCalls).

    Args:
        api: the broker's interface.
        who: this incarnation, as the broker sees it.
        shm_dir, spill_dir: the run's directory in shared memory, and where the broker spills to.
        slab_bytes, capacity_bytes: size of one slab, and of all slabs of this incarnation.
        patience_s: how long a broker that cannot be reached is asked again (it restarts within seconds).
        space_wait_s: how long a put waits for room in shared memory.
        fields: declared columns (see transport/memory/fields.py); values of another dtype or shape are refused here.
        length_field: the column whose length counts as a sample's tokens.
        max_sample_bytes: a sample with more payload is refused here, by the name of its largest field; 0: the broker's
            own check is enough.
        fetcher: gets payloads that lie on other nodes; closed by whoever made it.
        fetch_s: how long a take waits for such a payload before it gives the samples back and takes others: their
            owner may be dead, and the broker about to hear of it. 0: for the length of the lease, then it fails.
        on_lost: gets ids of groups that are no longer this incarnation's (lapsed or revoked): stop working on them.
        on_wait: gets the reason of a wait, and an empty string when none is left; for the role's progress. Waits for
            work (admit and take) it does not hear of: whoever makes these knows whether there is other work.
    """

    def __init__(
        self,
        api: QueueApi,
        who: Incarnation,
        shm_dir: Path,
        *,
        spill_dir: Path | None = None,
        slab_bytes: int = 16 << 20,
        capacity_bytes: int = 256 << 20,
        patience_s: float = 120.0,
        space_wait_s: float = 60.0,
        fields: Mapping[str, str] | None = None,
        length_field: str = "",
        max_sample_bytes: int = 0,
        fetcher: Fetcher | None = None,
        fetch_s: float = 0.0,
        on_lost: Callable[[list[int]], None] | None = None,
        on_wait: Callable[[str], None] | None = None,
    ) -> None:
        self.api, self.who = api, who
        self._fetcher, self._fetch_s = fetcher, fetch_s
        self.arena = Writer(shm_dir, who, slab_bytes=slab_bytes, capacity_bytes=capacity_bytes)
        self.reader = Reader(shm_dir, spill_dir, source=fetcher.memory if fetcher is not None else None)
        self.groups: dict[int, int] = {}
        """Tickets held: members not yet put, by group."""
        self.leases: set[int] = set()
        self.retired: set[str] = set()
        """Retired items, as of the newest admission."""
        self._retired_revision = 0
        self._fields = parse_fields(fields or {})
        self._on_lost = on_lost
        self._reasons, self._polls = Reasons(on_wait), Reasons()
        self._calls = NumberedCalls(str(who), patience_s, self._reasons.wait())
        self.threads = Threads()
        self._space = Space(
            self.arena, self._collect, self._reasons, self.threads, space_wait_s, length_field, max_sample_bytes
        )
        self._offers = Offers(self._offer, self._space, self._fields, self._reasons)
        self._pins = Pins(self._tell_unread)
        self.marks = Marks(api, self._call)
        self._closing = False
        self._lease_s = 60.0
        self._renewal: asyncio.Task[None] | None = None
        self._background: set[asyncio.Future[Any]] = set()
        self._held = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._renewal = asyncio.create_task(self._keep_leases())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop renewing; finish what is under way, and leave the queue.

        Leases still held lapse, or end with the process; so does memory over which arrays are still looked at.
        """
        self._closing = True
        await self._offers.outbox.close()
        if self._background:
            await asyncio.wait(self._background, timeout=SLICE_S)
        pending = [*self._background, *([self._renewal] if self._renewal else [])]
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        await self._leave()
        self.threads.close()
        self.arena.close()
        self.reader.close()

    async def linger(self, wait_s: float) -> int:
        """Wait until others have read what lies in this memory; answers with the bytes that are left after wait_s."""
        return await self._space.drained(wait_s)

    async def _leave(self) -> None:
        """What this incarnation has in the broker goes: its answers, and slabs in which nothing is left."""
        if self.groups or self.leases or len(self._pins):
            return
        left = self.api.gone(self._calls.next_number(), self.who, "it left")
        # A broker that is away, or knows of a newer incarnation, hears of the process's end.
        with suppress(RelaxError, TimeoutError):
            async with asyncio.timeout(SLICE_S):
                await left

    def statistics(self) -> ClientStatistics:
        """Numbers for people and metrics."""
        return ClientStatistics(
            self._calls.statistics(),
            self._offers.outbox.messages,
            self._offers.outbox.rows,
            len(self.leases),
            len(self._pins),
            len(self.groups),
            self.waiting_on,
            self.arena.statistics(),
            self.reader.statistics(),
        )

    @property
    def waiting_on(self) -> str:
        """Why a call waits, of those that do the one that began last; empty when none does."""
        return self._reasons.current or self._polls.current

    # --- leases that end

    async def _abandon_lease(self, lease: int, reason: str, roots: list[weakref.ref[Any]]) -> None:
        await self._call(lambda seq: self.api.abandon(seq, lease, reason, bool(roots)))
        self._pins.keep(lease, roots)

    def _dropped(self, lease: int, roots: list[weakref.ref[Any]]) -> None:
        """A batch was forgotten before it was finished. Called by the garbage collector, in any thread."""
        if self._loop is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._give_dropped_back, lease, roots)

    def _give_dropped_back(self, lease: int, roots: list[weakref.ref[Any]]) -> None:
        if self._closing or lease not in self.leases:
            return
        self.leases.discard(lease)
        if self._fetcher is not None:
            self._fetcher.release(lease)
        self._later(self._abandon_lease(lease, "its batch was forgotten", roots))

    def _tell_unread(self, leases: list[int]) -> None:
        if not self._closing:
            self._later(self._unpin(leases))

    # --- memory that is still looked at

    def _done_with(self, batch: LeasedBatch) -> list[weakref.ref[Any]]:
        """Let go of a batch's memory, as far as nothing refers to it. To be said before its owner is told."""
        roots = batch.finish()
        if self._fetcher is not None:
            self._fetcher.release(batch.lease)
        return roots

    async def _unpin(self, leases: list[int]) -> None:
        self._space.free(await self._call(lambda seq: self.api.unpin(seq, leases)))

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        """Do this in the background."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._was_done)

    def _was_done(self, task: asyncio.Future[None]) -> None:
        self._background.discard(task)
        # Whoever is fenced or cannot be reached is told by its next call; its pins end with the process.
        if not task.cancelled():
            task.exception()

    # --- calls
    async def _finish(self, work: Coroutine[Any, Any, T], undo: Callable[[T], Awaitable[None]] | None = None) -> T:
        """Carry work to its end also when the caller is cancelled; then undo what it was granted."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if task.cancelled() and caller is not None and not caller.cancelling():
                why = "this end of the queue was closed while it was under way: it may have been carried out, or not"
                raise Refused("call of the queue", why=why, hint="end your calls before you leave the queue") from None
            orphan = asyncio.ensure_future(self._settle(task, undo))
            self._background.add(orphan)
            orphan.add_done_callback(self._background.discard)
            raise

    async def _settle(self, task: asyncio.Future[T], undo: Callable[[T], Awaitable[None]] | None) -> None:
        # The caller is gone: an error has nobody to go to, and what it left undone lapses with the lease.
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if undo is not None and not isinstance(result, BaseException):
            await undo(result)

    async def _poll(self, wait_s: float, send: Callable[[int, float], Awaitable[P]]) -> P:
        """Ask in slices until there is something, or wait_s is over."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        # The first answer comes soon, and has the reason of a longer wait.
        longest_s = FIRST_SLICE_S
        with self._polls.wait() as wait:
            while True:
                left = max(0.0, deadline - loop.time())
                slice_s = min(left, longest_s)
                answer = await self._call_waiting(send, slice_s)
                if not answer.waiting_on or left <= longest_s or self._closing or _is_lease(answer):
                    return answer
                wait(answer.waiting_on)
                longest_s = SLICE_S

    async def _call(self, send: Callable[[int], Awaitable[T]]) -> T:
        self._check_renewal()
        return await self._calls.call(send)

    async def _call_waiting(self, send: Callable[[int, float], Awaitable[T]], wait_s: float) -> T:
        self._check_renewal()
        return await self._calls.wait(send, wait_s)

    def _check_renewal(self) -> None:
        if self._renewal is not None and self._renewal.done():
            # Renewing failed for good, as with a fenced epoch: nothing held here is ours any more.
            self._renewal.result()

    async def _collect(self, short_bytes: int) -> list[Extent]:
        return await self._call(lambda seq: self.api.put(seq, [], short_bytes))

    async def _offer(self, puts: list[Put], groups: list[int], wait_s: float) -> Offered:
        return await self._call_waiting(lambda seq, slice_s: self.api.offer(seq, puts, groups, slice_s), wait_s)

    async def _sent(self, puts: list[Put], send: Callable[[int], Awaitable[list[Extent]]]) -> None:
        try:
            freed = await self._call(send)
        except Refused:
            # Only after a refusal is it sure that nobody reads the extents.
            self._space.free(extents_in(puts))
            raise
        self._space.free(freed)

    # --- leases

    def _hold(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._held.set()

    async def _keep_leases(self) -> None:
        """Renew three times within a lease; forget what is no longer ours, and say so. Idle, be heard now and then."""
        while True:
            if not self.groups and not self.leases:
                self._held.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_S):
                        await self._held.wait()
            if self.groups or self.leases:
                await asyncio.sleep(self._lease_s / 3)
            groups, leases = list(self.groups), sorted(self.leases)
            try:
                lost = await self.api.renew(groups, leases)
            except (Unreachable, DeadlineExceeded):
                # The next round asks again; leases freeze while the broker is away.
                continue
            self.leases.difference_update(lost)
            mine = [group for group in lost if self.groups.pop(group, None) is not None]
            if mine and self._on_lost is not None:
                self._on_lost(mine)
