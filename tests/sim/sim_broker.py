"""The broker as far as it matters here: the real ledger, a journal that survives, crashes at any point, a lossy net."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

import msgspec
from sim_kernel import Kernel, Promise, Steps
from sim_memory import CELL, Memory

from relax_rt.transport.memory.refs import Extent
from relax_rt.transport.memory.spill import dead_slabs
from relax_rt.transport.queue.ledger import events as ev
from relax_rt.transport.queue.ledger.admission import load_partials
from relax_rt.transport.queue.ledger.core import Notice
from relax_rt.transport.queue.ledger.events import JournalEntry
from relax_rt.transport.queue.ledger.machine import Ledger
from relax_rt.transport.queue.ledger.messages import SampleKey
from relax_rt.transport.queue.ledger.policy import LedgerPolicy, QueueLimits
from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.rpc.identity import Incarnation

TICK_S = 0.5
ANSWER_S = 1.0
"""After so long without an answer a client sends its call again."""


class Crashed(Exception):
    """The broker is gone in the middle of a call."""


class Net:
    """Messages are lost, late, overtaken and doubled, as long as there are faults."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.faulty = True

    def send(self, deliver: Callable[[], None]) -> None:
        rng = self._kernel.random
        if not self.faulty:
            self._kernel.after(0.005, deliver)
            return
        if rng.random() >= 0.05:
            self._kernel.after(rng.uniform(0.001, 0.02) if rng.random() < 0.95 else rng.uniform(0.1, 3.0), deliver)
        if rng.random() < 0.05:
            self._kernel.after(rng.uniform(0.01, 8.0), deliver)


class SimBroker:
    """Applies, journals, answers. `acknowledge` and `append` are apart so that a test can turn them round."""

    def __init__(self, kernel: Kernel, memory: Memory, policy: LedgerPolicy, limits: QueueLimits) -> None:
        self.kernel, self._memory, self._policy, self._limits = kernel, memory, policy, limits
        self.run_id = 1
        self.snapshot = b""
        self.journal: list[bytes] = []
        self.notices: dict[int, list[Notice]] = {}
        self.ledger: Ledger | None = None
        self.crash_rate = 0.0
        self.deaths = 0
        self.life = 0
        self._empty: dict[tuple[Incarnation, int], Any] = {}
        self._spills = count(1)
        self._writing = ""

    # --- life

    def now(self) -> float:
        """The broker's own clock."""
        return self.kernel.now

    def start(self) -> None:
        """Come back from the snapshot and the journal, whose last record may be torn."""
        ledger = Ledger(self.snapshot)
        if self.journal and not _is_whole(self.journal[-1]):
            self.journal.pop()
        for record in self.journal:
            entry = msgspec.msgpack.decode(record[4:], type=JournalEntry)
            outcome = ledger.apply(entry)
            assert outcome.changed and ledger.n == entry.n, "a replay must do what was done"
            self.notices[entry.n] = outcome.notices
        self.ledger = ledger
        self.life += 1
        self._empty.clear()
        rate, self.crash_rate = self.crash_rate, 0.0
        self.apply(ev.ConfigureQueue(self._policy, self._limits))
        self.apply(ev.OpenRun(f"run-{self.run_id}"))
        self.crash_rate = rate
        ledger.restart_deadlines(self.now())
        life = self.life
        self.kernel.after(TICK_S, lambda: self._tick(life))

    def crash(self) -> None:
        if self.ledger is not None:
            self.deaths += 1
            self.ledger = None
            self.kernel.after(self.kernel.random.uniform(0.05, 1.5), self.start)

    # --- calls

    def receive(self, life: int, who: Incarnation, seq: int, event: ev.Event, reply: Callable[[Any], None]) -> None:
        """A call over a connection to one life of the broker; it ends with it."""
        if self.ledger is None or life != self.life:
            return
        key = (who, seq)
        try:
            # A copy of a call that was told to wait is not carried out later: its caller has gone on.
            answer: Any = self._empty.get(key) or self.apply(event, who, seq)
        except Refused as error:
            answer = error
        except Crashed:
            return
        if getattr(answer, "waiting_on", ""):
            self._empty[key] = answer
        reply(answer)

    def renew(self, life: int, who: Incarnation, ids: list[int], reply: Callable[[Any], None]) -> None:
        if self.ledger is None or life != self.life:
            return
        try:
            self.ledger.knows(who)
            reply(self.ledger.renew(who, ids, self.now()))
        except Refused as error:
            reply(error)

    def partials(self, life: int, who: Incarnation, keys: list[SampleKey], reply: Callable[[Any], None]) -> None:
        if self.ledger is None or life != self.life:
            return
        try:
            self.ledger.knows(who)
            reply(load_partials(self.ledger.core, who, keys))
        except Refused as error:
            reply(error)

    def apply(self, event: ev.Event, who: Incarnation | None = None, seq: int = 0) -> Any:
        ledger = self.ledger
        assert ledger is not None
        if who is not None and not isinstance(event, ev.JoinQueue) and not ledger.knows(who):
            self.apply(ev.JoinQueue(), who)
        entry = JournalEntry(ledger.n + 1, self.now(), event, who, seq)
        outcome = ledger.apply(entry)
        if outcome.changed:
            assert outcome.event is not None
            journaled = JournalEntry(entry.n, entry.at, outcome.event, who, seq)
            self.append(entry.n, msgspec.msgpack.encode(journaled), outcome.notices)
        return outcome.answer

    def append(self, n: int, payload: bytes, notices: list[Notice]) -> None:
        """What is in the journal when this returns survives; a crash may come at any point before the answer.

        Raises:
            Crashed: the broker is gone.
        """
        rng = self.kernel.random
        point = rng.choice(["before", "torn", "after"]) if rng.random() < self.crash_rate else ""
        record = zlib.crc32(payload).to_bytes(4, "little") + payload
        if point == "torn":
            self.journal.append(record[: rng.randrange(len(record))])
        if point in ("before", "torn"):
            self.crash()
            raise Crashed
        self.journal.append(record)
        self.notices[n] = notices
        if point == "after":
            self.crash()
            raise Crashed

    # --- time and disk

    def _tick(self, life: int) -> None:
        ledger = self.ledger
        if ledger is None or life != self.life:
            return
        try:
            due = ledger.due(self.now())
            if due is not None:
                self.apply(due)
        except Crashed:
            return
        self._spill(ledger)
        for name in dead_slabs(list(self._memory.slabs), ledger.state.blocks.live, ledger.state.callers.ended):
            if name != self._writing:
                del self._memory.slabs[name]
        if len(self.journal) > 300:
            self.snapshot, self.journal = ledger.snapshot(), []
        self.kernel.after(TICK_S, lambda: self._tick(life))

    def _spill(self, ledger: Ledger) -> None:
        """Copying takes its time, in which blocks end, are taken, and their memory is written anew."""
        moves = ledger.to_spill() if not self._writing else []
        if moves:
            self._writing = f"spill-{self.life}-{next(self._spills)}.slab"
            self.kernel.after(0.1, lambda: self._copy(ledger, self._writing, moves))

    def _copy(self, ledger: Ledger, name: str, moves: list[tuple[int, Extent]]) -> None:
        slab, at, copies = self._memory.make(name, sum(old.nbytes for _, old in moves) // CELL), 0, []
        for id_, old in moves:
            source = self._memory.slabs.get(old.slab)
            rows = self._memory.read(source, old) if source is not None else None
            copies.append((id_, Extent(name, at, old.nbytes)))
            self._memory.write(slab, copies[-1][1], rows or ["copied too late"])
            at += old.nbytes
        self.kernel.after(0.1, lambda: self._spilled(ledger, copies))

    def _spilled(self, ledger: Ledger, copies: list[tuple[int, Extent]]) -> None:
        self._writing = ""
        if self.ledger is ledger:
            with suppress(Crashed):
                self.apply(ev.MoveBlocks(copies))


def _is_whole(record: bytes) -> bool:
    return len(record) > 4 and zlib.crc32(record[4:]).to_bytes(4, "little") == record[:4]


class Client:
    """Sends each call until it is answered, always with the same number."""

    def __init__(self, kernel: Kernel, net: Net, broker: SimBroker, who: Incarnation) -> None:
        self.who, self._kernel, self._net, self._broker = who, kernel, net, broker
        self._seq = 0
        self.first_sent = 0.0

    def call(self, event: ev.Event) -> Steps:
        """The answer, or the refusal as a value."""
        self._seq += 1
        seq, self.first_sent = self._seq, self._kernel.now
        while True:
            answer = Promise()
            self._net.send(
                lambda answer=answer, life=self._broker.life: self._broker.receive(  # type: ignore[misc]
                    life, self.who, seq, event, lambda value: self._net.send(lambda: answer.settle((value,)))
                )
            )
            self._kernel.after(ANSWER_S, lambda answer=answer: answer.settle(None))  # type: ignore[misc]
            got = yield answer
            if got is not None:
                return got[0]

    def partials(self, keys: list[SampleKey]) -> Steps:
        """What is kept of these members, or the refusal as a value."""
        while True:
            answer, life = Promise(), self._broker.life
            self._net.send(
                lambda answer=answer, life=life: self._broker.partials(  # type: ignore[misc]
                    life, self.who, keys, lambda value: self._net.send(lambda: answer.settle((value,)))
                )
            )
            self._kernel.after(ANSWER_S, lambda answer=answer: answer.settle(None))  # type: ignore[misc]
            got = yield answer
            if got is not None:
                return got[0]

    def renew(self, ids: list[int]) -> Steps:
        """Ids that are lost; none if there was no answer."""
        answer, life = Promise(), self._broker.life
        self._net.send(
            lambda: self._broker.renew(
                life, self.who, ids, lambda value: self._net.send(lambda: answer.settle((value,)))
            )
        )
        self._kernel.after(ANSWER_S, lambda: answer.settle(None))
        got = yield answer
        return [] if got is None else got[0]
