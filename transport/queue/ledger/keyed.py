"""The keyed store among the ledger's events: same journal, same callers, same table of live memory."""

from __future__ import annotations

from collections.abc import Iterable

from relax_rt.transport.compat.store import state as ev
from relax_rt.transport.compat.store.api import Fetched, Found, StoreConfig, Stored
from relax_rt.transport.memory.refs import Extent
from relax_rt.transport.queue.ledger import admission
from relax_rt.transport.queue.ledger.core import ROOM, Core
from relax_rt.transport.queue.ledger.messages import Put as QueuePut
from relax_rt.transport.queue.ledger.state import Kept
from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.rpc.identity import Incarnation

Answer = StoreConfig | Stored | Found | Fetched | list[Extent] | bool
TOPIC = "store"
"""What those who sample wait for."""


def topic(event: ev.StoreEvent) -> str:
    """What a call that cannot be answered yet waits for."""
    return ROOM if isinstance(event, ev.Put) else TOPIC


def apply(core: Core, who: Incarnation, event: ev.StoreEvent) -> Answer:
    """Apply an event of the store.

    Raises:
        Refused: it is not possible; nothing changed.
    """
    store = core.store
    store.changed = False
    rows, nbytes = len(store), core.blocks.payload_bytes
    answer = _applied(core, who, event)
    core.changed = core.changed or store.changed
    if len(store) < rows or core.blocks.payload_bytes < nbytes:
        core.touched.add(ROOM)
    return answer


def _applied(core: Core, who: Incarnation, event: ev.StoreEvent) -> Answer:
    store = core.store
    match event:
        case ev.Put():
            return _put(core, who, event)
        case ev.Get():
            return store.get(who, event)
        case ev.Sample():
            return store.sample(event)
        case ev.Unpin(pins):
            store.unpin(who, pins)
            return _collect(core, who)
        case ev.Clear(rows):
            store.clear(rows)
            return _collect(core, who)
        case ev.Reset():
            if done := store.reset(event):
                core.touched.add(TOPIC)
            return done
        case ev.Configure(config):
            return store.configure(config)


def _put(core: Core, who: Incarnation, event: ev.Put) -> Stored:
    core.store.check_put(event)
    if event.block is not None:
        put = QueuePut(event.block, [], event.blobs)
        core.blocks.check_extents([put], who)
        admission.check_fields(core, who, [put])
    if full := _obstacle(core, event):
        return Stored([], [], [], waiting_on=full)
    stored = core.store.put(event)
    core.touched.add(TOPIC)
    return Stored(stored.indexes, stored.fields, stored.tags, _collect(core, who))


def _obstacle(core: Core, event: ev.Put) -> str:
    """Why there is no room for what the put brings; empty if there is.

    Columns for rows that have some already never wait: they come from those whom others wait for.

    Raises:
        Refused: there will never be room for that many rows.
    """
    more, limit = core.store.new_rows(event), core.state.limits.capacity_samples
    if more > limit:
        raise Refused(f"put of {more} new rows", why=f"{limit} are allowed", hint="put fewer at once")
    there = core.held + len(core.store)
    if more and there + more > limit:
        return f"{there} samples and rows are in the queue, {limit} allowed"
    return admission.crowded(core, 0) if core.store.is_first_payload(event) else ""


def _collect(core: Core, who: Incarnation) -> list[Extent]:
    freed = core.blocks.collect(who)
    core.changed = core.changed or bool(freed)
    return freed


def kept(answer: Answer) -> Kept:
    """What is kept of an answer, to give it again."""
    match answer:
        case Stored(indexes, _, _, freed):
            return Kept(rows=_runs(indexes), freed=freed)
        case Found(indexes):
            return Kept(rows=_runs(indexes))
        case Fetched(pin=pin):
            return Kept(pin=pin)
        case list():
            return Kept(freed=answer)
        case _:
            return Kept()


def repeated(core: Core, who: Incarnation, event: ev.StoreEvent, known: Kept) -> Answer:
    """The answer to a call that came before. Rows are described as they are now."""
    store = core.store
    indexes = [index for first, count in known.rows for index in range(first, first + count)]
    match event:
        case ev.Put():
            stored = store.stored(indexes)
            return Stored(stored.indexes, stored.fields, stored.tags, known.freed)
        case ev.Sample():
            return store.granted(indexes)
        case ev.Get():
            if known.pin not in core.state.store.pins:
                # Whoever said that it reads no more had its answer: this copy of the call came late.
                return Fetched()
            store.changed = False
            answer = store.get(who, event, pin=known.pin)
            core.changed = core.changed or store.changed
            return answer
        case ev.Unpin() | ev.Clear():
            return known.freed
        case ev.Reset():
            return event.partition in core.state.store.partitions
        case ev.Configure():
            return store.config


def _runs(indexes: Iterable[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for index in indexes:
        if runs and runs[-1][0] + runs[-1][1] == index:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return runs
