"""Counts of samples and prompts by state, and the audit of the ledger's invariants."""

from __future__ import annotations

from collections import Counter
from typing import Any

from relax_rt.transport.queue.ledger import packed
from relax_rt.transport.queue.ledger.admission import allowed_surplus
from relax_rt.transport.queue.ledger.core import Core
from relax_rt.transport.queue.ledger.messages import SampleKey
from relax_rt.transport.queue.ledger.state import SampleGroup, SampleState

STATES = ("reserved", "waiting", "ready", "leased", "trained", "freed", "finished")
ENDS = ("skipped", "lost", "failed", "quarantined")
"""States in which samples end, beside `dropped(…)` and `refused(…)`."""


def is_state(name: str) -> bool:
    """Whether a count of the account is of samples in a state; the other counts are of something else."""
    return name in STATES or name in ENDS or name.startswith(("dropped(", "refused("))


def by_state(core: Core) -> dict[str, int]:
    """Samples by state, from the first of the run on; the sum is the number of samples ever issued.

    `waiting` is generated, but ready for no task and leased to none (its group is not complete).
    """
    counts: Counter[str] = Counter(dict.fromkeys(STATES, 0))
    for group in core.state.groups.values():
        for key, sample in group.members():
            counts[_state(core, group, key, sample)] += 1
    counts.update(packed.count_states(core))
    counts["trained"] += sum(group.size for group in core.state.trained.values())
    counts.update(core.state.ended)
    return dict(counts)


def _state(core: Core, group: SampleGroup, key: SampleKey, sample: SampleState) -> str:
    if not sample.generated:
        return "reserved"
    if group.lease or sample.leases:
        return "leased"
    ready = group.id in core.step_ready or any(key in keys for keys in core.ready.values())
    return "ready" if ready else "waiting"


def account(core: Core) -> dict[str, int]:
    """Counts since the run began: samples by state, prompts, and what must be 0 (`trained_twice`)."""
    state = core.state
    on_path = [record for records in state.path.values() for record in records]
    groups = Counter(record.group for record in on_path)
    prompts = Counter(record.prompt.index for record in on_path if record.prompt is not None)
    size = {record.group: record.size for record in on_path}
    return {
        **by_state(core),
        **dict(sorted(state.tallies.items())),
        "samples_issued": state.issued,
        "samples_on_path": sum(record.size for record in on_path) + state.folded.get("samples", 0),
        "prompts_issued": state.prompts.issued,
        "prompts_first_issued": state.prompts.cursor,
        "prompts_returned": state.prompts.returned,
        "prompts_waiting": len(state.prompts.waiting),
        "prompts_retired": len(state.prompts.retired),
        "prompts_filtered": state.prompts.filtered,
        "prompts_skipped": state.prompts.skipped,
        "trained_twice": sum(size[group] * (times - 1) for group, times in groups.items()),
        "prompts_trained_twice": sum(times - 1 for times in prompts.values()),
    }


def audit(core: Core) -> list[str]:
    """Violated invariants; empty unless the ledger has a defect. For tests and simulations."""
    wrong: list[str] = []
    state = core.state
    states = by_state(core)
    total = sum(states.values())
    if unknown := [name for name in states if not is_state(name)]:
        wrong.append(f"samples are in unknown states {unknown}")
    if total != state.issued:
        wrong.append(f"{state.issued} samples were issued, {total} are accounted for")
    wrong += _audit_prompts(core)
    wrong += packed.audit(core)
    wrong += _audit_memory(core)
    wrong += _audit_bounds(core)
    ready, step_ready, held = core.ready, core.step_ready.copy(), core.held
    core.reindex()
    if _indices(ready, step_ready, held) != _indices(core.ready, core.step_ready, core.held):
        wrong.append("the indices of ready work do not match the groups")
    # As they were: their order is that in which samples became ready.
    core.ready, core.step_ready, core.held = ready, step_ready, held
    held_ids = {group.id for group in state.groups.values() if group.holder} | set(state.leases)
    if held_ids != set(core.deadlines):
        wrong.append(f"deadlines {sorted(core.deadlines)} for {sorted(held_ids)}")
    wrong += _audit_open(core)
    return wrong


def _indices(*indices: Any) -> Any:
    """The same without order."""
    ready, step_ready, held = indices
    return {task: set(keys) for task, keys in ready.items()}, set(step_ready), held


def _audit_bounds(core: Core) -> list[str]:
    state, wrong = core.state, []
    if core.policy.group_size:
        limit = (core.policy.max_staleness + 1) * core.policy.batch_samples + allowed_surplus(core)
        held = sum(group.size for group in state.groups.values()) + state.since_update
        if held > limit:
            wrong.append(f"{held} samples outstanding, {limit} allowed")
    for group in state.groups.values():
        if state.trainer_version is not None and core.staleness(group) > core.policy.max_staleness:
            wrong.append(f"group {group.id} is over-stale and still active")
    return wrong


def _audit_open(core: Core) -> list[str]:
    """Check that missing members of each group are either held by a producer or queued for admission."""
    wrong: list[str] = []
    for group in core.state.groups.values():
        if any(sample.partial is not None and (sample.generated or sample.excluded) for sample in group.samples):
            wrong.append(f"group {group.id} keeps partial completions of members that are not to be made")
        if group.prompt is None:
            continue
        if (group.holder is not None) != bool(group.making):
            wrong.append(f"group {group.id} is held by {group.holder}, who makes {group.making}")
        waits = group.id in core.state.reopened
        if waits != (group.holder is None and bool(group.missing())):
            wrong.append(f"group {group.id} misses {group.missing()}, held by {group.holder}, reopened: {waits}")
    return wrong


def _audit_prompts(core: Core) -> list[str]:
    state = core.state
    places = [prompt.index for prompt in state.prompts.waiting] + list(state.prompts.retired)
    places += [group.prompt.index for group in state.groups.values() if group.prompt is not None]
    on_path = [record.prompt for records in state.path.values() for record in records]
    places += [prompt.index for prompt in on_path if prompt is not None]
    double = sorted(index for index, times in Counter(places).items() if times > 1)
    folded = state.folded.get("groups", 0) if core.policy.group_size else 0
    filtered, skipped = state.prompts.filtered, state.prompts.skipped
    if double or len(places) + folded + filtered + skipped != state.prompts.cursor:
        missing = sorted(set(range(state.prompts.cursor)) - set(places))
        known = f"{folded} are in folded steps, {filtered} filtered, {skipped} of retired items"
        return [f"prompts skipped: {missing} ({known}); in two places: {double}"]
    return []


def _audit_memory(core: Core) -> list[str]:
    """Every block has its rows, every extent its references, and the bytes are counted right."""
    state, table = core.state, core.state.blocks
    rows: Counter[int] = Counter()
    for group in [*state.groups.values(), *state.trained.values()]:
        rows.update(part.block for sample in group.samples for part in sample.parts)
    for run in state.runs.values():
        rows[run.block] += run.open
    wrong: list[str] = []
    counted = {id_: block.rows for id_, block in table.blocks.items()}
    if counted != dict(rows):
        wrong.append(f"rows of blocks {counted}, samples have {dict(rows)}")
    naming = Counter(digest for block in table.blocks.values() for digest in block.blobs)
    if {digest: blob.blocks for digest, blob in table.blobs.items()} != dict(naming):
        wrong.append("blobs are not named as often as counted")
    extents = [block.ref.extent for block in table.blocks.values() if block.ref.extent is not None]
    extents += [blob.extent for blob in table.blobs.values()]
    for lease in [*state.leases.values(), *state.pinned.values()]:
        extents += lease.pins
    references = Counter((extent.slab, extent.offset) for extent in extents)
    live = {(slab, at): one.references for slab, at_ in table.live.items() for at, one in at_.items()}
    if live != dict(references):
        wrong.append(f"extents {live} live, {dict(references)} referred to")
    return wrong + _audit_bytes(core)


def _audit_bytes(core: Core) -> list[str]:
    table, totals = core.state.blocks, {True: 0, False: 0}
    samples = [sample for group in core.state.groups.values() for sample in group.samples]
    partials = sum(sample.partial.nbytes for sample in samples if sample.partial)
    if partials != core.state.partials_bytes:
        return [f"partial completions of {partials} bytes, {core.state.partials_bytes} counted"]
    for block in table.blocks.values():
        extent = block.ref.extent
        if extent is not None and extent.nbytes != table.live[extent.slab][extent.offset].nbytes:
            return [f"extent {extent} is live with another size"]
    for slab, at_ in table.live.items():
        totals[slab.startswith("spill-")] += sum(one.nbytes for one in at_.values())
    wrong = []
    if (totals[False], totals[True]) != (table.payload_bytes, table.spilled_bytes):
        wrong.append(f"{totals} payload bytes are live, {table.payload_bytes} and {table.spilled_bytes} counted")
    for lease in core.state.leases.values():
        if lease.task == core.policy.step_task and any(core.state.groups[i].lease != lease.id for i in lease.groups()):
            wrong.append(f"train lease {lease.id} lost a group")
    return wrong
