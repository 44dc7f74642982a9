"""The state together with what is derived from it; the other modules of the ledger are functions over it.

Derived are the queues of ready samples (`ReadyQueue`), counts by length (`LengthStatistics`), deadlines and staleness.
"""

from __future__ import annotations

import bisect
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from relax_rt.transport.base.versions import VersionRecord, VersionTree
from relax_rt.transport.memory.block_table import BlockTable
from relax_rt.transport.memory.refs import Extent
from relax_rt.transport.queue.ledger.messages import SampleKey
from relax_rt.transport.queue.ledger.policy import LedgerPolicy
from relax_rt.transport.queue.ledger.state import Lease, PackedSamples, SampleGroup, SamplePart, SampleState, State
from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.rpc.identity import Incarnation

Notice = tuple[str, dict[str, Any]]
"""Something a person wants to see in the event log: kind and fields."""
REFUSED, REFUSED_TOKENS = "refused(stale)", "refused_tokens"
"""Terminal state of over-stale samples, and the name of the tally of their tokens."""
ROOM = "room"
"""Topic that waiting producers are woken by; consumers are woken by the name of their task."""


class ReadyQueue:
    """Ready samples of one task: single ones, and packed runs, of which those from `next` of the task on are ready.

    Attributes:
        entries: in order; a packed run stands under the key of its first sample, with None beside a single sample.
    """

    def __init__(self, task: str) -> None:
        self.task = task
        self.entries: OrderedDict[SampleKey, PackedSamples | None] = OrderedDict()

    def walk(self, newest_first: bool = False) -> Iterator[tuple[SampleKey, PackedSamples | None]]:
        """Yield the ready samples in order, or from the last one on, each with its packed run (None: a single one)."""
        entries = self.entries.items()
        for key, run in reversed(entries) if newest_first else entries:
            if run is None:
                yield key, None
            else:
                keys = self._keys_of(run)
                for one in reversed(keys) if newest_first else keys:
                    yield one, run

    def __iter__(self) -> Iterator[SampleKey]:
        return (key for key, _ in self.walk())

    def __len__(self) -> int:
        return sum(1 if run is None else run.count - run.next[self.task] for run in self.entries.values())

    def __contains__(self, key: SampleKey) -> bool:
        return key in self.entries

    def _keys_of(self, run: PackedSamples) -> list[SampleKey]:
        return [SampleKey(run.first + n, 0) for n in range(run.next[self.task], run.count)]

    def add(self, key: SampleKey) -> None:
        """Add a sample behind the others."""
        self.entries[key] = None

    def discard(self, key: SampleKey) -> None:
        """Remove a sample, if it is there."""
        self.entries.pop(key, None)

    def add_run(self, run: PackedSamples) -> None:
        """Add a packed run behind the others."""
        self.entries[SampleKey(run.first, 0)] = run

    def remove_run(self, run: PackedSamples) -> None:
        """Remove a packed run of which nothing is ready any more."""
        del self.entries[SampleKey(run.first, 0)]

    def move_first(self, keys: Iterable[SampleKey]) -> None:
        """Move those of the samples that are ready before all others, in this order."""
        for key in reversed(list(keys)):
            if key in self.entries:
                self.entries.move_to_end(key, last=False)

    def unpack(self, runs: Mapping[int, PackedSamples]) -> None:
        """Replace packed runs (by first sample) by their samples, in their places."""
        there = [key for key in (SampleKey(first, 0) for first in runs) if self.entries.get(key) is not None]
        if not there:
            return
        # Leases take from the front, so that what is to be unpacked mostly lies there too.
        front: list[tuple[SampleKey, PackedSamples | None]] = []
        left = len(there)
        for key, run in self.entries.items():
            if run is None or run.first not in runs:
                front.append((key, run))
                continue
            front += [(one, None) for one in self._keys_of(run)]
            left -= 1
            if not left:
                break
        for key in there:
            del self.entries[key]
        for key, run in reversed(front):
            self.entries[key] = run
            self.entries.move_to_end(key, last=False)


RECENT = 4096
"""Lengths from which the deciles are computed."""


class LengthStatistics:
    """Counts by length decile of the samples generated lately, and a histogram of staleness by length decile.

    Long generations must not be lost more often than short ones. Kept in memory only, as what the broker has seen since
    it started: figures for people, nothing is decided by them.
    """

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=RECENT)
        self._cuts: list[int] = []
        self._by_decile: dict[str, Counter[int]] = {}
        self._staleness: dict[int, Counter[int]] = {}
        self._seen = 0

    def generated(self, length: int) -> None:
        """A sample of this many tokens was put."""
        if length < 0:
            return
        self._recent.append(length)
        self._seen += 1
        # Each doubling, then every RECENT: the cuts cost a sort.
        if self._seen & (self._seen - 1) == 0 or self._seen % RECENT == 0:
            ordered = sorted(self._recent)
            self._cuts = [ordered[len(ordered) * tenth // 10] for tenth in range(1, 10)]

    def decile(self, length: int) -> int:
        """0 for the shortest tenth to 9 for the longest."""
        return bisect.bisect_right(self._cuts, length)

    def used(self, length: int) -> None:
        """A sample was consumed to the end."""
        if length >= 0:
            self._by_decile.setdefault("used", Counter())[self.decile(length)] += 1

    def lost(self, length: int, state: str) -> None:
        """A generated sample ended unused."""
        if length >= 0:
            self._by_decile.setdefault(state, Counter())[self.decile(length)] += 1

    def consumed(self, length: int, staleness: int) -> None:
        """A sample was leased for a step at this staleness."""
        if length >= 0:
            self._staleness.setdefault(staleness, Counter())[self.decile(length)] += 1

    def by_decile(self) -> dict[str, list[int]]:
        """Ten counts, shortest first, for each way in which samples ended."""
        return {state: [counts[n] for n in range(10)] for state, counts in sorted(self._by_decile.items())}

    def staleness(self) -> dict[str, list[int]]:
        """Ten counts, shortest first, for each staleness at consumption."""
        return {str(lag): [counts[n] for n in range(10)] for lag, counts in sorted(self._staleness.items())}


class Core:
    """State, version tree, indices of ready work, deadlines and counts; the other modules are functions over it.

    Deadlines are not part of the state: renewals are not journaled, and after a restart leases start again at
    full length.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.tree = VersionTree(state.versions)
        self.deadlines: dict[int, float] = {}
        self.now = 0.0
        self.changed = False
        self.notices: list[Notice] = []
        self.touched: set[str] = set()
        self.ready: dict[str, ReadyQueue] = {}
        self.step_ready: OrderedDict[int, None] = OrderedDict()
        self.held = 0
        """Samples in groups that are not yet trained."""
        self.losses = LengthStatistics()
        self.partials_refused: Counter[str] = Counter()
        """Marks not kept since this broker started, by reason."""
        self._lags: dict[int, int] = {}
        self._tasks: dict[tuple[tuple[str, ...], ...], tuple[str, ...]] = {}
        if state.policy is not None:
            self.reindex()

    @property
    def policy(self) -> LedgerPolicy:
        """Return the policy.

        Raises:
            Refused: the ledger was not configured yet.
        """
        if self.state.policy is None:
            raise Refused("call of the queue", why="its policy is not set yet")
        return self.state.policy

    @property
    def blocks(self) -> BlockTable:
        return self.state.blocks

    def log(self, kind: str, **fields: Any) -> None:
        """Add a notice for the event log."""
        self.notices.append((kind, fields))

    def tally(self, what: str, n: int = 1) -> None:
        self.state.tallies[what] = self.state.tallies.get(what, 0) + n

    def count_end(self, what: str, n: int = 1) -> None:
        """Count samples that reached a terminal state."""
        self.state.ended[what] = self.state.ended.get(what, 0) + n

    def new_id(self) -> int:
        self.state.next_id += 1
        return self.state.next_id - 1

    def start_deadline(self, id_: int) -> None:
        """Start the deadline of a ticket or lease at full length from now."""
        self.renew(id_, self.now)

    def renew(self, id_: int, now: float) -> None:
        """Start the deadline of a ticket or lease at full length from `now`."""
        self.deadlines[id_] = now + self.state.limits.lease_s

    def clear_deadline(self, id_: int) -> None:
        """Clear the deadline: the ticket or lease is not held any more."""
        self.deadlines.pop(id_, None)

    def unpin(self, extents: Iterable[Extent]) -> None:
        """Release one reference on each extent."""
        self.blocks.unpin(extents, self.state.callers.alive)

    # --- staleness

    def lag(self, version: int) -> int:
        """Distance from the trainer's weights to a version, which must be known."""
        if version not in self._lags:
            assert self.state.trainer_version is not None
            self._lags[version] = self.tree.distance(self.state.trainer_version, version)
        return self._lags[version]

    def staleness(self, group: SampleGroup, member: int | None = None) -> int:
        """Longest distance from the trainer's weights to any version in the group, or in one member.

        Members that are not there yet count with the version of the engine that makes them, and with those of their
        partial completions.
        Where over-stale tokens are masked, only the others count; a sample that has no others counts with its freshest.
        """
        if self.state.trainer_version is None:
            return 0
        samples = [s for s in group.samples if not s.excluded] if member is None else [group.samples[member]]
        if self.policy.on_straggler == "mask" or group.recycled:
            return max((self._unmasked(sample) for sample in samples if sample.spans), default=0)
        versions = {span.version for sample in samples for span in sample.spans}
        partials = [sample.partial for sample in samples if sample.partial is not None]
        versions.update(span.version for partial in partials for span in partial.spans)
        if group.prompt is not None and any(not sample.spans for sample in samples):
            versions.add(group.base)
        return max((self.lag(version) for version in versions), default=0)

    def _unmasked(self, sample: SampleState) -> int:
        lags = [self.lag(span.version) for span in sample.spans]
        return max((lag for lag in lags if lag <= self.policy.max_staleness), default=min(lags))

    def masked(self, group: SampleGroup, sample: SampleState) -> list[tuple[int, int]]:
        """Token ranges over the staleness bound, whose loss mask counts as 0."""
        if not (self.policy.on_straggler == "mask" or group.recycled) or self.state.trainer_version is None:
            return []
        return [(s.start, s.end) for s in sample.spans if self.lag(s.version) > self.policy.max_staleness]

    def move_weights(self, record: VersionRecord) -> None:
        """The trainer's weights are `record` from now on; columns computed with other weights lapse.

        Raises:
            Refused: the version's parent is not known, or its number was used for another version.
        """
        known = record.version in self.tree
        self.tree.add(record)
        if known:
            self.state.versions = self.tree.records()
        else:
            self.state.versions.append(record)
        self.state.trainer_version = record.version
        self._lags.clear()
        for group in self.state.groups.values():
            self.lapse_columns(group)

    def outdated(self, part: SamplePart) -> bool:
        """Whether its columns were computed with other weights than the trainer's, and depend on them."""
        return part.version >= 0 and self.state.trainer_version is not None and self.lag(part.version) > 0

    @property
    def used_bytes(self) -> int:
        """Bytes that count against the capacity: payloads in shared memory, and partial completions."""
        return self.state.blocks.payload_bytes + self.state.partials_bytes

    def drop_partial(self, sample: SampleState) -> None:
        """Drop the sample's partial completion."""
        if sample.partial is not None:
            self.state.partials_bytes -= sample.partial.nbytes
            sample.partial = None

    def lapse_columns(self, group: SampleGroup) -> None:
        """Drop columns computed with older weights, and offer the samples to the tasks that put them again.

        All that such a task put lapses with them: it will put all of it again. Who is at work on what lapsed finishes
        without effect.
        """
        if group.lease or not self.policy.versioned:
            return
        for sample in group.samples:
            old = {part.task for part in sample.parts if self.outdated(part)}
            if not old:
                continue
            gone = [part for part in sample.parts if part.task in old]
            lost = {name for part in gone for name in self.blocks.blocks[part.block].ref.fields}
            self.drop_parts(sample, gone)
            sample.done = [task for task in sample.done if task not in old]
            for task in [task for task in sample.leases if not lost.isdisjoint(self.policy.tasks[task])]:
                del sample.leases[task]
            self.tally("columns_lapsed", len(gone))
        self.refresh(group)

    # --- indices

    def reindex(self) -> None:
        """Rebuild the indices of ready work."""
        self._tasks.clear()
        self.ready = {task: ReadyQueue(task) for task in self.policy.tasks if task != self.policy.step_task}
        self.step_ready.clear()
        self.held = 0
        for group in self.state.groups.values():
            self.held += group.size
            self.refresh(group)
        for run in self.state.runs.values():
            self.held += run.open
            for task, begin in run.next.items():
                if begin < run.count:
                    self.ready[task].add_run(run)

    def tasks_with(self, *fields: tuple[str, ...]) -> tuple[str, ...]:
        """Tasks whose required fields are all present in these blocks."""
        tasks = self._tasks.get(fields)
        if tasks is None:
            have = {name for block in fields for name in block}
            tasks = tuple(task for task, needed in self.policy.tasks.items() if have.issuperset(needed))
            if len(self._tasks) > 4096:
                self._tasks.clear()
            self._tasks[fields] = tasks
        return tasks

    def tasks_for(self, sample: SampleState) -> tuple[str, ...]:
        """Tasks all of whose fields the sample has."""
        if not sample.generated:
            return ()
        blocks = self.blocks.blocks
        return self.tasks_with(*[blocks[part.block].ref.fields for part in sample.parts])

    def refresh(self, group: SampleGroup) -> None:
        """Index what of the group is ready for which task, after any change of it."""
        step_task = self.policy.step_task
        step_ready = bool(step_task) and group.holder is None and not group.lease
        for member, sample in enumerate(group.samples):
            if sample.excluded:
                continue
            tasks = self.tasks_for(sample)
            key = SampleKey(group.id, member)
            for task, ready in self.ready.items():
                if task in tasks and task not in sample.leases and task not in sample.done:
                    if key not in ready:
                        ready.add(key)
                        self.touched.add(task)
                else:
                    ready.discard(key)
            step_ready = step_ready and step_task in tasks
        if step_ready:
            if group.id not in self.step_ready:
                self.step_ready[group.id] = None
                self.touched.add(step_task)
        else:
            self.step_ready.pop(group.id, None)

    def index_single(self, group: int, sample: SampleState) -> None:
        """Index the only sample of a group that was just put; a fast form of `refresh`."""
        key = SampleKey(group, 0)
        for task in self.tasks_with(self.blocks.blocks[sample.parts[0].block].ref.fields):
            self.ready[task].add(key)
            self.touched.add(task)

    def requeue_first(self, task: str, keys: Sequence[SampleKey]) -> None:
        """Put samples that come back to a task before new ones, in the order of `keys`."""
        if task in self.ready:
            self.ready[task].move_first(keys)

    def add_group(self, group: SampleGroup) -> None:
        """Add a group."""
        self.state.groups[group.id] = group
        self.held += group.size

    def remove_group(self, group: SampleGroup) -> None:
        """Remove a group from those to be trained, and all of it from the indices."""
        if self.state.groups.pop(group.id, None) is not None:
            self.held -= group.size
        for key in group.sample_keys():
            for ready in self.ready.values():
                ready.discard(key)
        self.step_ready.pop(group.id, None)
        self.state.reopened.pop(group.id, None)
        self.clear_deadline(group.id)
        self.touched.add(ROOM)
        self.recheck_stragglers()

    def recheck_stragglers(self) -> None:
        """Wake the trainer: a group changed that its batch may be waiting for as a straggler."""
        if self.state.blocked_since is not None:
            self.touched.add(self.policy.step_task)

    # --- the end of samples, groups and leases

    def drop_parts(self, sample: SampleState, parts: Sequence[SamplePart] | None = None) -> None:
        """Drop these columns of the sample; all of them if none are named."""
        gone = sample.parts if parts is None else parts
        sample.parts = [] if parts is None else [part for part in sample.parts if part not in gone]
        for part in gone:
            self.blocks.drop_row(part.block, self.state.callers.alive)

    def end(
        self,
        group: SampleGroup,
        state: str,
        *,
        member_states: dict[int, str] | None = None,
        fate: str = "return",
        **why: str,
    ) -> None:
        """The group ends before it was trained, its samples in `state` (or their own in `member_states`).

        fate is what becomes of the prompt: `return`, `failed` (returned, unless it failed too often), `retire`, or
        `filter` and `skip` (retired, of which only the number is kept). why: more for the event log.
        """
        self.remove_group(group)
        for member, sample in enumerate(group.samples):
            if sample.excluded:
                continue
            name = (member_states or {}).get(member, state)
            self.count_end(name)
            if sample.generated:
                self.losses.lost(sample.length, name)
                if name == REFUSED:
                    self.tally(REFUSED_TOKENS, max(0, sample.length))
            self.drop_parts(sample)
            if sample.partial is not None:
                self.tally("partial_tokens_dropped", sample.partial.length)
                self.drop_partial(sample)
        if group.prompt is None:
            fate = "none"
        else:
            if fate == "failed" and group.prompt.failures + 1 >= self.policy.failures_per_prompt:
                fate = "retire"
            if fate in ("filter", "skip"):
                self.state.prompts.filtered += fate == "filter"
                self.state.prompts.skipped += fate == "skip"
                fate = "retire"
            elif fate == "retire":
                self.state.prompts.retire(group.prompt)
            else:
                self.state.prompts.give_back(group.prompt, failed=fate == "failed")
        self.log(
            "group_ended",
            group=group.id,
            prompt=group.prompt.index if group.prompt is not None else None,
            state=state,
            prompt_fate=fate,
            **why,
        )

    def finish_if_done(self, group: SampleGroup) -> None:
        """Without a step task a group is finished when all tasks are done with all of it."""
        tasks = len(self.policy.tasks)
        if self.policy.step_task:
            return
        for sample in group.samples:
            if len(sample.done) < tasks and not sample.excluded:
                return
        # Done with everywhere, it is in no index of ready work.
        size = group.size
        del self.state.groups[group.id]
        self.held -= size
        self.touched.add(ROOM)
        for sample in group.samples:
            if not sample.excluded:
                self.losses.used(sample.length)
                self.drop_parts(sample)
        self.count_end("finished", size)

    def close(self, lease: Lease, *, pinned: bool) -> None:
        """The lease is not held any more. What becomes of its samples is the caller's to say.

        pinned: its holder may still be reading, so its extents stay until it says `unpin`, or its process ends.
        """
        self.state.leases.pop(lease.id, None)
        self.clear_deadline(lease.id)
        if lease.task == self.policy.step_task:
            # The next batch of the task waits for this one to end.
            self.touched.add(lease.task)
            for group in self.groups_of(lease):
                group.lease = 0
        else:
            task, groups = lease.task, self.state.groups
            for key in lease.keys:
                found = groups.get(key.group)
                if found is not None and (leases := found.samples[key.member].leases).get(task) == lease.id:
                    del leases[task]
        if pinned:
            self.state.pinned[lease.id] = lease
        else:
            self.unpin(lease.pins)

    def release_pins(self, lease: Lease) -> None:
        """Release the pins of an ended lease: its holder does not read its memory any more."""
        del self.state.pinned[lease.id]
        self.unpin(lease.pins)

    def readers(self) -> set[Incarnation]:
        """Incarnations that may be reading memory, fenced or not: it stays pinned until they release it or end."""
        found = {lease.holder for lease in self.state.leases.values()}
        found.update(lease.holder for lease in self.state.pinned.values())
        return found

    def groups_of(self, lease: Lease) -> list[SampleGroup]:
        """The lease's groups that are still there and not yet trained."""
        return [self.state.groups[id_] for id_ in lease.groups() if id_ in self.state.groups]

    def samples_of(self, lease: Lease) -> list[tuple[SampleKey, SampleState]]:
        """The samples that the lease of a task other than the step task still holds.

        A member that was regenerated under its old key is another sample, which this lease never held.
        """
        found: list[tuple[SampleKey, SampleState]] = []
        for key in lease.keys:
            group = self.state.groups.get(key.group)
            if group is not None and group.samples[key.member].leases.get(lease.task) == lease.id:
                found.append((key, group.samples[key.member]))
        return found

    def blocks_of(self, samples: Iterable[SampleState]) -> list[int]:
        """Ids of the blocks that hold columns of these samples, each once."""
        return list(dict.fromkeys([part.block for sample in samples for part in sample.parts]))
