"""The ledger's account of itself: every sample and every prompt in exactly one place."""

from __future__ import annotations

from collections import Counter

from relax_rt.transport.ledger.core import Core
from relax_rt.transport.ledger.policy import TRAIN
from relax_rt.transport.ledger.state import Group, Sample

STATES = ("reserved", "waiting", "ready", "leased", "trained", "freed")


def by_state(core: Core) -> dict[str, int]:
    """Samples by state, from the first of the run on; the sum is the number of samples ever reserved.

    `waiting` is generated, but ready for no task and leased to none (its group is not complete).
    """
    counts: Counter[str] = Counter(dict.fromkeys(STATES, 0))
    ready = set().union(*core.ready.values()) if core.ready else set()
    for group in core.state.groups.values():
        for key, sample in zip(group.sample_keys(), group.samples, strict=True):
            counts[_state(core, group, sample, key in ready)] += 1
    counts["trained"] += sum(group.size for group in core.state.trained.values())
    counts.update(core.state.ended)
    return dict(counts)


def _state(core: Core, group: Group, sample: Sample, ready: bool) -> str:
    if not sample.generated:
        return "reserved"
    if group.lease or sample.leases:
        return "leased"
    return "ready" if ready or group.id in core.train_ready else "waiting"


def account(core: Core) -> dict[str, int]:
    """Counts since the run began: samples by state, prompts, and what must be 0 (`trained_twice`)."""
    state = core.state
    on_path = [record for records in state.path.values() for record in records]
    groups = Counter(record.group for record in on_path)
    prompts = Counter(record.prompt.index for record in on_path)
    size = {record.group: record.size for record in on_path}
    return {
        **by_state(core),
        **dict(sorted(state.tallies.items())),
        "samples_issued": state.issued,
        "samples_on_path": sum(record.size for record in on_path),
        "prompts_issued": state.prompts.issued,
        "prompts_first_issued": state.prompts.cursor,
        "prompts_returned": state.prompts.returned,
        "prompts_waiting": len(state.prompts.waiting),
        "prompts_retired": len(state.prompts.retired),
        "trained_twice": sum(size[group] * (times - 1) for group, times in groups.items()),
        "prompts_trained_twice": sum(times - 1 for times in prompts.values()),
    }


def audit(core: Core) -> list[str]:
    """What is wrong with the ledger: empty, or there is a defect in it. For tests and simulations."""
    wrong: list[str] = []
    state = core.state
    total = sum(by_state(core).values())
    if total != state.issued:
        wrong.append(f"{state.issued} samples were issued, {total} are accounted for")
    wrong += _audit_prompts(core)
    wrong += _audit_extents(core)
    limit = (core.policy.max_staleness + 1) * core.policy.batch_samples
    held = sum(group.size for group in state.groups.values()) + state.since_update
    if held > limit:
        wrong.append(f"{held} samples outstanding, {limit} allowed")
    for group in state.groups.values():
        if state.trainer_version is not None and core.staleness(group) > core.policy.max_staleness:
            wrong.append(f"group {group.id} is over-stale and still active")
    ready = {task: set(keys) for task, keys in core.ready.items()}
    train_ready = set(core.train_ready)
    core.reindex()
    if (ready, train_ready) != (core.ready, core.train_ready):
        wrong.append("the indices of ready work do not match the groups")
    held_ids = {group.id for group in state.groups.values() if group.holder} | set(state.leases)
    if held_ids != set(core.deadlines):
        wrong.append(f"deadlines {sorted(core.deadlines)} for {sorted(held_ids)}")
    return wrong


def _audit_prompts(core: Core) -> list[str]:
    state = core.state
    places = [prompt.index for prompt in state.prompts.waiting] + list(state.prompts.retired)
    places += [group.prompt.index for group in state.groups.values()]
    places += [record.prompt.index for records in state.path.values() for record in records]
    if sorted(places) != list(range(state.prompts.cursor)):
        missing = sorted(set(range(state.prompts.cursor)) - set(places))
        double = sorted(index for index, times in Counter(places).items() if times > 1)
        return [f"prompts skipped: {missing}; in two places: {double}"]
    return []


def _audit_extents(core: Core) -> list[str]:
    state = core.state
    references: Counter[tuple[str, int]] = Counter()
    for group in [*state.groups.values(), *state.trained.values()]:
        references.update((extent.slab, extent.offset) for sample in group.samples for extent in sample.extents)
    for lease in [*state.leases.values(), *state.lapsed.values()]:
        references.update((extent.slab, extent.offset) for extent in lease.pins)
    live = {(slab, at): one.references for slab, table in state.extents.live.items() for at, one in table.items()}
    wrong = [] if live == dict(references) else [f"extents {live} live, {dict(references)} referred to"]
    nbytes = sum(one.nbytes for table in state.extents.live.values() for one in table.values())
    if nbytes != state.extents.payload_bytes:
        wrong.append(f"{nbytes} payload bytes live, {state.extents.payload_bytes} counted")
    for lease in state.leases.values():
        if lease.task == TRAIN and any(state.groups[id_].lease != lease.id for id_ in lease.groups()):
            wrong.append(f"train lease {lease.id} lost a group")
    return wrong
