"""Producers, consumers and trainers as processes that can be killed, paused and replaced at any step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from sim_broker import Client
from sim_checker import FOREIGN, UNEXPECTED, Trained
from sim_kernel import Exit, Silence, Steps, Thread
from sim_memory import Arena, Full, Slab

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.memory.refs import BlobRef, BlockRef, Extent
from relax_rt.transport.queue.ledger import events as ev
from relax_rt.transport.queue.ledger.messages import (
    BlockPut,
    Failure,
    Freed,
    LeaseGrant,
    LeaseRequest,
    RowPut,
    SampleKey,
    Ticket,
    VersionSpan,
)
from relax_rt.transport.queue.partials import decode_partial, partial_chunk
from relax_rt.transport.rpc.errors import Refused, StaleEpoch
from relax_rt.transport.rpc.identity import Incarnation

if TYPE_CHECKING:
    from sim_world import World

ROW_CELLS, BLOB_CELLS = 2, 3
Seen = dict[SampleKey, str]


class Process:
    """An incarnation: its threads die with it, its memory stays for those who read it."""

    def __init__(self, world: World, slot: str, main: Callable[[Process], Steps]) -> None:
        self.world, self.slot = world, slot
        self.who = Incarnation(slot, world.new_epoch())
        self.client = Client(world.kernel, world.net, world.broker, self.who)
        self.arena = Arena(world.memory, self.who, world.arena_cells)
        self.held: set[int] = set()
        self.maps: dict[str, Slab] = {}
        self.threads = [Thread(world.kernel, main(self), self._ended), Thread(world.kernel, self._renew())]

    def kill(self) -> None:
        for thread in self.threads:
            thread.kill()

    def pause(self, seconds: float) -> None:
        """It stands still and knows nothing of it."""
        for thread in self.threads:
            thread.resumes_at = self.world.kernel.now + seconds

    def _ended(self) -> None:
        self.kill()
        self.world.process_ended(self)

    def _renew(self) -> Steps:
        while True:
            yield self.world.limits.lease_s / 3
            if self.held:
                lost = yield from self.client.renew(sorted(self.held))
                if isinstance(lost, Refused):
                    return
                self.held.difference_update(lost)

    def call(self, event: ev.Event, *, may_refuse: bool = False) -> Steps:
        """The answer; freed memory is given to the arena. A fenced process ends.

        Raises:
            Exit: it is fenced.
        """
        answer = yield from self.client.call(event)
        if isinstance(answer, StaleEpoch):
            raise Exit
        if isinstance(answer, Refused):
            if not may_refuse:
                self.world.checker.found(UNEXPECTED, f"{self.who}: {answer}")
            return answer
        self.world.checker.answered(self.who, self.client.first_sent, self.world.kernel.now)
        freed = answer.extents if isinstance(answer, Freed) else getattr(answer, "freed", [])
        for extent in freed:
            if not self.arena.free(extent):
                self.world.checker.found(UNEXPECTED, f"{self.who} is given {extent}, which it does not use")
        return answer.extents if isinstance(answer, Freed) else answer

    # --- memory

    def place(self, rows: list[str], cells: int) -> Steps:
        """An extent with these rows, as soon as there is room for it."""
        while True:
            try:
                return self.arena.put(rows, cells)
            except Full:
                yield from self.call(ev.PutSamples([]))
                yield 0.3

    def take_back(self, puts: Sequence[BlockPut]) -> None:
        """After a refusal nobody reads what was put."""
        for put in puts:
            for extent in [put.block.extent, *(blob.extent for blob in put.blobs)]:
                if extent is not None:
                    self.arena.free(extent)

    def rows_at(self, extent: Extent) -> list[str] | None:
        slab = self.maps.get(extent.slab) or self.world.memory.slabs.get(extent.slab)
        if slab is None:
            return None
        self.maps[extent.slab] = slab
        return self.world.memory.read(slab, extent)

    def read(self, batch: LeaseGrant, before: Seen | None = None) -> Seen:
        """Look at everything that the batch shows; what each sample is, as its bytes say."""
        checker, seen = self.world.checker, {}
        for info in batch.infos():
            for block, row in info.parts:
                ref = batch.blocks[block]
                rows = ref.inline.decode().split("|") if ref.extent is None else self.rows_at(ref.extent)
                text = rows[row] if rows is not None and row < len(rows) else None
                if ref.fields == ("tokens",):
                    checker.read(self.who, info.key, text, (before or {}).get(info.key))
                    seen[info.key] = text or ""
                elif text != f"{ref.fields[0]} of {seen.get(info.key)}":
                    checker.found(FOREIGN, f"{self.who} read {text!r} as {ref.fields[0]} of {seen.get(info.key)}")
        for blob in batch.blobs:
            rows = self.rows_at(blob.extent)
            if rows != [blob.digest.decode()]:
                checker.found(FOREIGN, f"{self.who} read {rows} as {blob.digest!r}")
        return seen

    def columns(self, seen: Seen, field: str) -> Steps:
        """A new column for each of these samples."""
        if not seen:
            return []
        rows = [RowPut(key, row) for row, key in enumerate(seen)]
        texts = [f"{field} of {digest}" for digest in seen.values()]
        if self.world.kernel.random.random() < 0.5:
            return [BlockPut(BlockRef(None, len(rows), (field,), "|".join(texts).encode()), rows)]
        extent = yield from self.place(texts, ROW_CELLS * len(rows))
        return [BlockPut(BlockRef(extent, len(rows), (field,)), rows)]


# --- producers


def engine(p: Process) -> Steps:
    """Generates what it gets tickets for, with the newest weights that it knows."""
    rng = p.world.kernel.random
    version = 0
    while True:
        if p.world.published and (not version or rng.random() < 0.8):
            version = p.world.published[-1]
        if not version:
            yield 0.3
            continue
        answer = yield from p.call(ev.RequestTickets(version, rng.randint(1, 2)))
        if isinstance(answer, Refused) or not answer.tickets:
            yield rng.uniform(0.2, 0.6)
            continue
        p.held.update(ticket.group for ticket in answer.tickets)
        if p.world.hangs(p):
            raise Silence
        for ticket in answer.tickets:
            p.world.checker.is_of(ticket.prompt, ticket.item)
            if rng.random() < 0.03:
                yield from p.call(ev.ReleaseGroups([ticket.group], "no wish"))
            else:
                yield from _generate(p, ticket, version)
            p.held.discard(ticket.group)


def _generate(p: Process, ticket: Ticket, version: int) -> Steps:
    rng, todo = p.world.kernel.random, list(ticket.wanted())
    begun = yield from _begun(p, ticket)
    while todo and ticket.group in p.held:
        members, todo = todo[:2], todo[2:]
        if rng.random() < 0.3:
            todo, members = [*members[1:], *todo], members[:1]
        lines: dict[int, list[int]] = {}
        for member in members:
            lines[member] = yield from _sample(p, ticket, member, version, begun.get(member, []))
            if not lines[member]:
                return
        yield from _put(p, ticket, lines)


def _begun(p: Process, ticket: Ticket) -> Steps:
    """Tokens that are kept of the ticket's members."""
    for member in ticket.wanted() if ticket.issue > 1 else ():
        p.world.checker.issued_again(SampleKey(ticket.group, member), ticket.issue, ticket.partials.get(member, 0))
    if not ticket.partials:
        return {}
    keys = [SampleKey(ticket.group, member) for member in ticket.partials]
    answer = yield from p.client.partials(keys)
    if isinstance(answer, Refused):
        raise Exit
    p.world.happened["gone on with"] += len(answer)
    for mark in answer:
        p.world.checker.one_line(mark.key, decode_partial(mark).tokens)
    return {mark.key.member: decode_partial(mark).tokens for mark in answer}


def _sample(p: Process, ticket: Ticket, member: int, version: int, begun: list[int]) -> Steps:
    """All tokens of a member; now and then those so far are marked. Empty: the group was handed over in between."""
    rng, world, key = p.world.kernel.random, p.world, SampleKey(ticket.group, member)
    tokens, marked, last = list(begun), len(begun), rng.choice([0, 0, 1, 2])
    seconds = min(rng.lognormvariate(-1.9, 0.9), 12.0)
    for part in range(last + 1):
        yield seconds / (last + 1)
        if (part or not last) and rng.random() < 0.3:
            version = world.published[-1]
        tokens += world.checker.sampled(key, tokens, version, rng.randint(1, 2))
        if part < last and ticket.group in p.held and rng.random() < 0.7:
            new, spans = tokens[marked:], _spans(p, tokens)
            mark = partial_chunk(ticket, member, marked, new, [-1.0] * len(new), spans)
            answer = yield from p.call(ev.SavePartials([mark]))
            if not isinstance(answer, Refused) and answer.held[0] >= 0:
                marked = answer.held[0]
                world.checker.acknowledged_mark(key, ticket.issue, marked)
                world.happened["marked"] += 1
                if rng.random() < 0.1:
                    yield from p.call(ev.ReleaseGroups([ticket.group], "handed over"))
                    return []
    return tokens


def _spans(p: Process, tokens: list[int]) -> list[VersionSpan]:
    versions = [p.world.checker.tokens[token].version for token in tokens]
    return [VersionSpan(n, n + 1, version, version) for n, version in enumerate(versions)]


def _put(p: Process, ticket: Ticket, lines: dict[int, list[int]]) -> Steps:
    world, rows = p.world, []
    digests = [world.new_digest(f"{ticket.group}.{member}") for member in lines]
    for row, (member, digest) in enumerate(zip(lines, digests, strict=True)):
        key, spans = SampleKey(ticket.group, member), _spans(p, lines[member])
        rows.append(RowPut(key, row, 1, spans))
        world.checker.one_line(key, lines[member])
        world.checker.marked.pop(key, None)
        world.checker.made(digest, key, [span.version for span in spans])
    extent = yield from p.place(digests, ROW_CELLS * len(rows))
    name = f"image {ticket.prompt}".ljust(16)
    image = yield from p.place([name], BLOB_CELLS)
    puts = [BlockPut(BlockRef(extent, len(rows), ("tokens",)), rows, [BlobRef(name.encode(), image)])]
    answer = yield from p.call(ev.PutSamples(puts))
    if isinstance(answer, Refused):
        p.take_back(puts)
    else:
        world.checker.acknowledged(puts, digests, answer, [row.key for row in rows])


def offerer(p: Process) -> Steps:
    """Puts samples of its own into a queue without prompts, until enough were put."""
    world, rng = p.world, p.world.kernel.random
    while world.to_offer > 0:
        sizes = [rng.randint(1, 2) for _ in range(rng.randint(1, 3))]
        n = sum(sizes)
        digests = [world.new_digest("offered") for _ in range(n)]
        for digest in digests:
            world.checker.made(digest, None, ())
        inline = rng.random() < 0.4
        extent = None if inline else (yield from p.place(digests, ROW_CELLS * n))
        keys = [SampleKey(group, member) for group, size in enumerate(sizes) for member in range(size)]
        rows = [RowPut(key, row) for row, key in enumerate(keys)] if rng.random() < 0.5 else []
        put = BlockPut(BlockRef(extent, n, ("tokens",), "|".join(digests).encode() if inline else b""), rows)
        while True:
            answer = yield from p.call(ev.PutGroups([put], sizes))
            if isinstance(answer, Refused) or not answer.waiting_on:
                break
            yield rng.uniform(0.2, 0.6)
        if isinstance(answer, Refused):
            p.take_back([put])
            continue
        world.to_offer -= n
        named = [SampleKey(answer.groups[key.group], key.member) for key in keys]
        world.checker.acknowledged([put], digests, answer.freed, named)
        yield rng.uniform(0.1, 0.8)
    while True:
        yield from p.call(ev.PutSamples([]))
        yield 2.0


# --- consumers


def consumer(task: str, puts: str) -> Callable[[Process], Steps]:
    """Works on samples one lease after the other; sometimes too slowly, sometimes reading on when it is done."""

    def main(p: Process) -> Steps:
        rng = p.world.kernel.random
        while True:
            want = LeaseRequest(samples=rng.randint(1, 4)) if rng.random() < 0.9 else LeaseRequest(groups=1)
            batch = yield from p.call(ev.RequestLease(task, want))
            if isinstance(batch, Refused) or not batch.lease:
                yield rng.uniform(0.2, 0.5)
            elif not len(batch):
                yield from p.call(ev.ReleaseLease(batch.lease, "it ended"))
            else:
                yield from _work(p, task, puts, batch)

    return main


def _work(p: Process, task: str, puts: str, batch: LeaseGrant) -> Steps:
    rng, slow = p.world.kernel.random, p.world.kernel.random.random() < p.world.slow
    if not slow:
        p.held.add(batch.lease)
    if p.world.hangs(p):
        raise Silence
    seen = p.read(batch)
    for _ in range(8 if slow else 1):
        yield rng.uniform(0.5, 1.5) if slow else rng.uniform(0.05, 0.3)
        p.read(batch, seen)
    failed = [key for key, digest in seen.items() if p.world.is_bad(digest)]
    for key in failed:
        p.world.checker.given_up.add(key)
    good = {key: digest for key, digest in seen.items() if key not in failed}
    new = (yield from p.columns(good, puts)) if puts else []
    pinned = rng.random() < 0.3
    failures = [Failure(key, "bad") for key in failed]
    p.world.completing(task, seen)
    answer = yield from p.call(ev.CompleteLease(batch.lease, new, failures, pinned))
    p.held.discard(batch.lease)
    if isinstance(answer, Refused):
        p.take_back(new)
    if pinned:
        for _ in range(rng.randint(1, 6)):
            yield rng.uniform(0.2, 1.5)
            p.read(batch, seen)
        yield from p.call(ev.UnpinLeases([batch.lease]))


# --- the trainer


def trainer(p: Process) -> Steps:
    """Trains from its newest checkpoint on; when the queue says that a step does not count, it falls back to it."""
    while True:
        yield from _train_from_checkpoint(p)


def _train_from_checkpoint(p: Process) -> Steps:
    world, rng = p.world, p.world.kernel.random
    disk = world.disk
    disk.open(p.who.epoch)
    if world.faulty and rng.random() < 0.3:
        disk.damage_newest()
    step, saved, path = disk.newest()
    version, record = world.new_version(p.who.epoch, saved, step, changed=saved == 0)
    answer = yield from p.call(ev.Rollback(step, record))
    if isinstance(answer, Refused):
        raise Exit
    disk.began_with(version)
    world.published.append(version)
    world.path, committed, misses = path, step, 0
    while True:
        yield from _sample_on(p)
        parts = yield from _collect(p, version, world.policy.prompts_per_step if misses < 8 else 1)
        if parts is None:
            return
        if not parts:
            misses += 1
            if misses == 8 and step > committed:
                committed = yield from _checkpoint(p, step, version, path)
            yield rng.uniform(0.2, 0.5)
            continue
        misses = 0
        record = yield from _step(p, parts, step + 1, version, record, path)
        if record is None:
            return
        step, version = step + 1, record.version
        if step - committed >= 5 or rng.random() < 0.05:
            committed = yield from _checkpoint(p, step, version, path)


def _sample_on(p: Process) -> Steps:
    """Now and then more groups are wanted, and the next prompts chosen."""
    rng = p.world.kernel.random
    if rng.random() < 0.1:
        yield from p.call(ev.RequestSurplus(rng.randint(0, 2)))
    if rng.random() < 0.2:
        answer = yield from p.call(ev.AssignItems({}))
        if not isinstance(answer, Refused):
            places = range(max(0, answer.next_index - 1), answer.next_index + 3)
            yield from p.call(ev.AssignItems({place: rng.randrange(1000) for place in places}))


def _collect(p: Process, weights: int, groups: int) -> Steps:
    """Batches of one step: one, or parts of which groups are left out. None: it does not count."""
    world, rng = p.world, p.world.kernel.random
    part, misses, parts = int(rng.random() < 0.5), 0, []
    while groups and misses < 8:
        batch = yield from p.call(ev.RequestLease("train", LeaseRequest(groups=groups, at_least=part)))
        if isinstance(batch, Refused) or not batch.samples:
            if not parts:
                break
            misses += 1
            yield rng.uniform(0.2, 0.5)
            continue
        p.held.add(batch.lease)
        seen = p.read(batch)
        for info in batch.samples:
            world.checker.consumed(p.who, weights, seen[info.key], info.masked)
        if part and rng.random() < 0.15:
            batch = yield from _leave_out(p, batch)
            if batch is None:
                return None
        groups -= len({info.key.group for info in batch.samples})
        if batch.samples:
            parts.append(batch)
    world.happened["in parts"] += len(parts) > 1
    return parts


def _leave_out(p: Process, batch: LeaseGrant) -> Steps:
    """The first group of a batch is not trained on: what is left, or None if the lease is not there any more."""
    world, pinned = p.world, p.world.kernel.random.random() < 0.3
    first = batch.samples[0]
    world.checker.leaves_out(first.prompt)
    event = ev.FilterGroups(batch.lease, [first.key.group], "rule: why", pinned)
    answer = yield from p.call(event, may_refuse=True)
    if isinstance(answer, Refused):
        return None
    world.checker.left_out(first.prompt)
    world.happened["filtered"] += 1
    samples = [info for info in batch.samples if info.key.group != first.key.group]
    if not samples:
        p.held.discard(batch.lease)
        if pinned:
            p.read(batch)
            yield from p.call(ev.UnpinLeases([batch.lease]))
    return msgspec.structs.replace(batch, samples=samples, blobs=batch.blobs if pinned else [])


def _step(
    p: Process, parts: list[LeaseGrant], step: int, version: int, record: VersionRecord, path: dict[int, list[Trained]]
) -> Steps:
    """The record of the weights after the step; None if it does not count."""
    world, rng = p.world, p.world.kernel.random
    seen = {key: digest for batch in parts for key, digest in p.read(batch).items()}
    prompt = {info.key: info.prompt for batch in parts for info in batch.samples}
    yield rng.uniform(0.1, 0.6)
    for batch in parts:
        p.read(batch, seen)
    skipped = rng.random() < 0.04
    if not skipped:
        version, record = world.new_version(p.who.epoch, version, step, changed=True)
    world.checker.stepped_on.update(seen.values())
    leases = [batch.lease for batch in parts]
    pinned = [lease for lease in leases if rng.random() < 0.3]
    answer = yield from p.call(ev.CompleteStep(leases, step, record, skipped, pinned), may_refuse=True)
    p.held.difference_update(leases)
    refused = isinstance(answer, Refused)
    for batch in parts:
        if refused or batch.lease in pinned:
            yield rng.uniform(0.0, 0.3)
            p.read(batch, seen)
            yield from p.call(
                ev.ReleaseLease(batch.lease, "it does not count") if refused else ev.UnpinLeases([batch.lease])
            )
    if refused:
        return None
    path[step] = [Trained(key, prompt[key], digest) for key, digest in seen.items()]
    if not skipped:
        world.published.append(version)
    return record


def _checkpoint(p: Process, step: int, version: int, path: dict[int, list[Trained]]) -> Steps:
    rng = p.world.kernel.random
    yield rng.uniform(0.05, 0.4)
    if not p.world.disk.save(p.who.epoch, step, version, path):
        raise Exit
    yield rng.uniform(0.0, 0.2)
    yield from p.call(ev.Commit(step, f"step-{step}"))
    p.world.committed = step
    return step


def agent(p: Process) -> Steps:
    """Tells of processes that were seen dead."""
    while True:
        while p.world.dead:
            gone: Any = p.world.dead.pop(0)
            yield from p.call(ev.ProcessExited(gone, "seen dead"))
        yield 0.2
