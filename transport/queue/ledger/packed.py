"""Samples of one put kept as one record, as long as nothing happens to them but leases and completions in order.

A queue without steps and samplers moves most samples that way, and a record for each would be most of what the broker
does. Whatever else happens (a release, a lapse, new columns, a failure) first unpacks the runs that it concerns to
groups of their own. Only an event that changes the ledger unpacks, so that a replay of the journal unpacks alike.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

from relax_rt.transport.queue.ledger.core import ROOM, Core
from relax_rt.transport.queue.ledger.messages import BlockPut, LeaseRequest, SampleKey, SampleRun
from relax_rt.transport.queue.ledger.state import (
    Lease,
    PackedSamples,
    SampleGroup,
    SamplePart,
    SampleRange,
    SampleState,
)
from relax_rt.transport.rpc.identity import Incarnation

_ONE_LESS = bytes([0, *range(255)])
"""Byte table for `bytes.translate`: decrements the number of remaining tasks of each sample."""
MAX_TASKS = 255


def can_pack(core: Core, sizes: Sequence[int]) -> bool:
    """Whether samples that are put as groups of these sizes, one block's rows in order, can be one record."""
    policy = core.policy
    plain = not policy.step_task and not policy.group_size and not policy.samplers
    return plain and 0 < len(policy.tasks) <= MAX_TASKS and sizes.count(1) == len(sizes)


def add(core: Core, first: int, item: BlockPut, block: int) -> None:
    """Add the rows of a block as the samples `first`, `first` + 1 and so on."""
    tasks, count = core.tasks_with(item.block.fields), item.block.rows
    left = bytes([len(core.policy.tasks)]) * count
    run = PackedSamples(first, count, block, list(item.lengths), dict.fromkeys(tasks, 0), {}, left, count)
    core.state.runs[first] = run
    core.held += count
    index(core, run)


def index(core: Core, run: PackedSamples) -> None:
    """Enter a run in the indices of ready work."""
    for task, begin in run.next.items():
        if begin < run.count:
            core.ready[task].add_run(run)
            core.touched.add(task)


def choose(core: Core, task: str, request: LeaseRequest) -> list[SampleRange]:
    """The first samples that are ready for a task; none if they are not all packed, or not chosen by number alone."""
    if not core.state.runs or request.groups or request.tokens:
        return []
    found: list[SampleRange] = []
    wanted = request.samples
    for run in core.ready[task].entries.values():
        if run is None:
            return []
        begin = run.next[task]
        end = min(run.count, begin + wanted)
        found.append(SampleRange(run.first, begin, end))
        wanted -= end - begin
        if not wanted:
            break
    return found


def grant(core: Core, who: Incarnation, task: str, slices: list[SampleRange]) -> Lease:
    """Lease these samples, the first ones that are ready for the task."""
    runs, ready = core.state.runs, core.ready[task]
    blocks = [runs[one.run].block for one in slices]
    pins = core.blocks.extents_of(blocks)
    lease = Lease(core.new_id(), task, [], blocks, pins, who, slices)
    core.blocks.pin(pins)
    core.state.leases[lease.id] = lease
    core.start_deadline(lease.id)
    for one in slices:
        run = runs[one.run]
        run.next[task] = one.end
        run.leases[lease.id] = (task, one.start, one.end)
        if one.end == run.count:
            ready.remove_run(run)
    core.changed = True
    return lease


def runs_of(core: Core, lease: Lease, place: dict[int, int]) -> list[SampleRun]:
    """The lease's samples for its holder; place: where each block is in the grant's list, extended here."""
    found: list[SampleRun] = []
    for one in lease.slices:
        run = core.state.runs[one.run]
        index = place.setdefault(run.block, len(place))
        lengths = run.lengths[one.start : one.end]
        lengths = lengths if lengths and max(lengths) >= 0 else []
        found.append(
            SampleRun(SampleKey(run.first + one.start, 0), one.end - one.start, True, [(index, one.start)], lengths)
        )
    return found


def complete(core: Core, lease: Lease, *, pinned: bool) -> bool:
    """Finish a lease that brings nothing new. False if some of its samples still lack columns for another task."""
    runs, tasks = core.state.runs, len(core.policy.tasks)
    if any(len(runs[one.run].next) < tasks for one in lease.slices):
        return False
    core.changed = True
    for one in lease.slices:
        run = runs[one.run]
        del run.leases[lease.id]
        left = run.left[one.start : one.end].translate(_ONE_LESS)
        run.left = run.left[: one.start] + left + run.left[one.end :]
        finished = left.count(0)
        if not finished:
            continue
        for n in range(one.start, one.end) if run.lengths else ():
            if not run.left[n]:
                core.losses.used(run.lengths[n])
        run.open -= finished
        if not run.open:
            del runs[one.run]
        core.held -= finished
        core.count_end("finished", finished)
        core.touched.add(ROOM)
        core.blocks.drop_rows(run.block, finished, core.state.callers.alive)
    core.close(lease, pinned=pinned)
    lease.slices = []
    return True


def keys_of(lease: Lease) -> list[SampleKey]:
    """The keys of all its samples."""
    packed = [SampleKey(one.run + n, 0) for one in lease.slices for n in range(one.start, one.end)]
    return packed or lease.keys


def group_at(run: PackedSamples, n: int) -> SampleGroup:
    """The group that the n-th sample of a run would be."""
    at_work = {task: id_ for id_, (task, start, end) in run.leases.items() if start <= n < end}
    done = [task for task, begin in run.next.items() if n < begin and task not in at_work]
    length = run.lengths[n] if run.lengths else -1
    sample = SampleState(True, [SamplePart(run.block, n)], length, leases=at_work, done=done)
    return SampleGroup(run.first + n, None, 0, 0, [sample])


def unfinished(run: PackedSamples) -> Iterator[SampleGroup]:
    """The groups that the samples of a run would be."""
    return (group_at(run, n) for n, left in enumerate(run.left) if left)


def unpack(core: Core, firsts: Iterable[int]) -> None:
    """Make groups of these runs' samples, and of those that share a lease with them: a lease is packed as a whole."""
    state = core.state
    todo = [first for first in firsts if first in state.runs]
    gone: dict[int, PackedSamples] = {}
    while todo:
        run = state.runs.pop(todo.pop(), None)
        if run is None:
            continue
        gone[run.first] = run
        for id_ in run.leases:
            todo += [one.run for one in state.leases[id_].slices]
    for ready in core.ready.values():
        ready.unpack(gone)
    for first in sorted(gone):
        for group in unfinished(gone[first]):
            state.groups[group.id] = group
    for id_ in {id_: None for run in gone.values() for id_ in run.leases}:
        lease = state.leases[id_]
        lease.keys, lease.slices = keys_of(lease), []


def unpack_lease(core: Core, lease: Lease) -> None:
    """Make groups of the samples of a lease."""
    if lease.slices:
        unpack(core, [one.run for one in lease.slices])


def unpack_keys(core: Core, keys: Sequence[SampleKey]) -> None:
    """Make groups of the runs that these samples are in, if they are."""
    if core.state.runs:
        wanted = {key.group for key in keys} - core.state.groups.keys()
        if wanted:
            # Runs are entered in the order of their first samples, and none is entered again.
            runs = list(core.state.runs.values())
            found: set[int] = set()
            for id_ in wanted:
                at = bisect_right(runs, id_, key=lambda run: run.first) - 1
                if at >= 0 and id_ < runs[at].first + runs[at].count:
                    found.add(runs[at].first)
            unpack(core, sorted(found))


def unpack_all(core: Core) -> None:
    """Make groups of all runs."""
    unpack(core, list(core.state.runs))


def count_states(core: Core) -> dict[str, int]:
    """Unfinished samples of all runs by state (see accounting.by_state)."""
    counts = dict.fromkeys(("leased", "ready", "waiting"), 0)
    for run in core.state.runs.values():
        at_work = bytearray(run.count)
        for _, start, end in run.leases.values():
            at_work[start:end] = b"\1" * (end - start)
        leased, begin = at_work.count(1), min(run.next.values(), default=run.count)
        ready = at_work.count(0, begin)
        counts["leased"] += leased
        counts["ready"] += ready
        counts["waiting"] += run.open - leased - ready
    return counts


def audit(core: Core) -> list[str]:
    """Violated invariants of packed runs; empty unless there is a defect."""
    wrong: list[str] = []
    tasks, leases = len(core.policy.tasks), core.state.leases
    for run in core.state.runs.values():
        left = [tasks - len(group_at(run, n).samples[0].done) for n in range(run.count)]
        if list(run.left) != left or run.open != run.count - left.count(0) or not run.open:
            wrong.append(f"run {run.first} has {list(run.left)} tasks left, {left} by its leases; {run.open} open")
        for id_, (_, start, end) in run.leases.items():
            if id_ not in leases or SampleRange(run.first, start, end) not in leases[id_].slices:
                wrong.append(f"run {run.first} is at work under lease {id_}, which does not hold it")
    return wrong
