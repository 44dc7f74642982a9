"""A broker that journals every change: what the brokers of the queue and of the compat store share.

A broker is a ledger (a pure state machine) behind an RPC interface. A subclass turns each call into an event for its
ledger; the base journals it, recovers the ledger from the journal, lets calls wait for a topic, and stops answering for
good once memory and journal may differ.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from relax_rt.transport.base.calls import WaitingCalls
from relax_rt.transport.base.journal import SEGMENT_BYTES, Journal, Recovered
from relax_rt.transport.base.liveness import ProcessWatch
from relax_rt.transport.rpc import rpc
from relax_rt.transport.rpc.errors import Corrupt, OutOfSpace, Refused, Unreachable
from relax_rt.transport.rpc.identity import Incarnation

MAX_WAIT_S = 60.0
"""A call waits no longer than this; its client asks again."""
UNMET_KEPT = 1024
OTHER_VERSION = "was it written by another version of relax-rt?"


class JournaledLedger(Protocol):
    """A state machine whose state follows from the entries applied to it."""

    @property
    def n(self) -> int:
        """Number of the last entry that changed it."""

    def apply(self, entry: Any) -> Any:
        """Apply an entry; the outcome's `changed` says whether it has to be journaled. Raises Refused: no change."""

    def snapshot(self) -> bytes:
        """The whole state."""


class WaitingReply(Protocol):
    """A reply that may say why there is nothing to reply with yet."""

    @property
    def waiting_on(self) -> str: ...


L = TypeVar("L", bound=JournaledLedger)
W = TypeVar("W", bound=WaitingReply)
R = TypeVar("R")


def rpc_caller() -> Incarnation:
    """Who makes the current call, as the RPC layer knows it."""
    return rpc.caller().who


class JournaledBroker(Generic[L]):
    """Applies events to a ledger, each journaled before its caller gets the reply.

    Args:
        name: of the broker, in errors.
        folder: of the journal.
        ledger: an empty one; `_recover` replaces it.
        identify: who calls.
        clock: seconds, monotonic within this process.
        segment_bytes: size of the journal from which on a snapshot is made.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        ledger: L,
        *,
        identify: Callable[[], Incarnation],
        clock: Callable[[], float],
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self._name, self._ledger = name, ledger
        self._identify, self._clock = identify, clock
        self._journal = Journal(folder, segment_bytes=segment_bytes)
        self._encoder = msgspec.msgpack.Encoder()
        self._waits = WaitingCalls(clock)
        self._watch = ProcessWatch(self._process_ended)
        self._unmet: dict[tuple[Incarnation, int], WaitingReply] = {}
        self._failed: asyncio.Future[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        # A journal that begins a new segment is on disk only when the old one is as well.
        self._forcing = asyncio.Lock()

    # --- what a subclass brings

    def _apply(self, event: Any, who: Incarnation | None = None, seq: int = 0) -> Any:
        """Apply an event of a caller, or of the broker's own, and wake whoever waits for it; return the reply."""
        raise NotImplementedError

    def _process_ended(self, who: Incarnation, reason: str) -> None:
        """A watched process is dead. May come after the broker's own failure, when nothing can be journaled."""
        raise NotImplementedError

    # --- life

    async def _recover(self, make: Callable[[bytes], L], entry: type) -> Recovered:
        """Make the ledger from the journal's snapshot and replay the records after it.

        Raises:
            Corrupt: the journal is damaged in a way that lost acknowledged events, or of another version.
        """
        self._failed = asyncio.get_running_loop().create_future()
        recovered = await asyncio.to_thread(self._journal.recover)
        try:
            self._ledger = make(recovered.snapshot)
        except msgspec.DecodeError as error:
            raise Corrupt(f"journal snapshot {recovered.n}", why=str(error), hint=OTHER_VERSION) from error
        decode: Callable[[bytes], Any] = msgspec.msgpack.Decoder(entry).decode
        for n, payload in recovered.records:
            try:
                same = self._ledger.apply(decode(payload)).changed and self._ledger.n == n
            except (Refused, msgspec.DecodeError) as error:
                raise Corrupt(f"journal record {n}", why=str(error), hint=OTHER_VERSION) from error
            if not same:
                raise Corrupt(f"journal record {n}", why="its replay changes nothing", hint=OTHER_VERSION)
        return recovered

    def _start(self, *work: Callable[[], Awaitable[None]]) -> None:
        """Run these until the broker closes; the end of one by an error is the broker's failure."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self._fail(error)

        self._tasks = [asyncio.ensure_future(one()) for one in work]
        for task in self._tasks:
            task.add_done_callback(ended)

    async def run(self) -> None:
        """Wait until the broker fails.

        Raises:
            Exception: what stopped it (OutOfSpace: the journal could not be written). A restart recovers all that was
                acknowledged.
        """
        assert self._failed is not None, "open() first"
        await asyncio.shield(self._failed)

    async def close(self) -> None:
        """Stop, and force the journal to disk."""
        self._watch.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._failed is not None and not self._failed.done():
            self._failed.cancel()
        await asyncio.to_thread(self._journal.close)

    def _fail(self, error: BaseException) -> None:
        """Stop answering: what is in memory is ahead of the journal."""
        assert self._failed is not None
        if not self._failed.done():
            self._failed.set_exception(error)
            # Also read by those who never await run().
            self._failed.exception()
        self._waits.touch_all()

    @property
    def _alive(self) -> bool:
        return self._failed is not None and not self._failed.done()

    def _check_alive(self) -> None:
        if self._failed is not None and self._failed.done():
            # Not the caller's fault: it asks the next incarnation again.
            error = self._failed.exception() if not self._failed.cancelled() else None
            raise Unreachable(self._name, why=f"it failed ({error}) and is to be started again")

    # --- events

    def _commit(self, entry: Any) -> Any:
        """Apply a numbered entry to the ledger and journal it if it changed something; return the outcome.

        The ledger changes before the journal is written. Nobody sees the change in between, because there is no await;
        but if the journal cannot be written, or the ledger broke off in the middle of an event, memory and journal
        differ for good. Then this broker answers nothing more, and its successor replays the journal.
        """
        sound = False
        try:
            outcome = self._ledger.apply(entry)
            if outcome.changed:
                self._journal.append(entry.n, self._encoder.encode(self._to_journal(entry, outcome)))
            sound = True
        except Refused:
            sound = True
            raise
        except OutOfSpace as error:
            self._fail(error)
            raise Unreachable(self._name, why=str(error)) from error
        finally:
            if not sound:
                self._fail(RuntimeError(f"the ledger of {self._name} broke down on {entry}"))
        return outcome

    def _to_journal(self, entry: Any, outcome: Any) -> Any:
        """The entry to write, where an outcome adds what was decided on the way."""
        return entry

    def _call(self, event: Any, seq: int, kind: type[R]) -> R:
        """Carry out a call whose reply is of this kind."""
        reply = self._apply(event, self._identify(), seq)
        assert isinstance(reply, kind)
        return reply

    async def _wait_for(self, event: Any, topic: str, seq: int, wait_s: float, kind: type[W]) -> W:
        """Apply an event until its reply waits on nothing, at most for wait_s; then reply with the reason."""
        who = self._identify()
        key = (who, seq)
        # In this order a wait of NaN seconds is none.
        deadline = self._clock() + min(max(0.0, wait_s), MAX_WAIT_S)
        token = self._waits.enter(who.slot, topic)
        try:
            while True:
                # A copy of this call, sent over a connection that was lost, may have been answered "nothing yet": then
                # its caller has gone on, and this copy must not get what nobody would read. (Such a reply may be false:
                # a lease of no samples has the length 0.)
                reply = self._unmet[key] if key in self._unmet else self._apply(event, who, seq)
                if not isinstance(reply, kind):
                    why, hint = "another call had this number", "number changing calls anew"
                    raise Refused(f"call {seq} of {who}", why=why, hint=hint)
                left = deadline - self._clock()
                if not reply.waiting_on or left <= 0 or key in self._unmet:
                    break
                await self._waits.wait(token, reply.waiting_on, left)
        finally:
            self._waits.leave(token)
        if reply.waiting_on:
            self._unmet[key] = reply
            while len(self._unmet) > UNMET_KEPT:
                del self._unmet[next(iter(self._unmet))]
        return reply

    # --- disk

    async def _force_journal(self, *, snapshot: bool = False) -> None:
        """Force the journal to disk; with `snapshot`, also begin a new segment with a snapshot when it is time."""
        async with self._forcing:
            await asyncio.to_thread(self._journal.sync)
            if snapshot and self._journal.wants_snapshot:
                await asyncio.to_thread(self._journal.rotate(self._ledger.snapshot()))
