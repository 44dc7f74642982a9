"""What a consumer gets: the task's sampler chooses among the ready work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice

import msgspec

from relax_rt.transport.queue.ledger.batch import blocked, hold_for_stragglers, places, refuse_stale, urgent
from relax_rt.transport.queue.ledger.core import Core
from relax_rt.transport.queue.ledger.messages import SampleKey, Want
from relax_rt.transport.queue.ledger.selection import Sampler, Unit, choose_urgent_first, fill
from relax_rt.transport.queue.ledger.selection import choose as choose_by
from relax_rt.transport.queue.ledger.state import Group
from relax_rt.transport.rpc.identity import Incarnation

LOOKED_AT = 64
"""Groups that are looked at to say what is missing."""
Samplers = dict[str, Sampler]
"""The samplers of those tasks that have another one than first in, first out."""


def choose(core: Core, samplers: Samplers, task: str, want: Want) -> tuple[list[SampleKey], str]:
    """Keys to lease, or none and the reason. For the step task `settle` comes first."""
    if task == core.policy.step_task:
        return _for_step(core, samplers.get(task), want)
    sampler = samplers.get(task)
    if sampler is None and not want.groups:
        return _first(core, task, want)
    whole = bool(want.groups) or (sampler is not None and sampler.whole_groups)
    newest_first = bool(getattr(sampler, "newest_first", False))
    units = _groups(core, task, newest_first) if whole else _samples(core, task, newest_first)
    if sampler is None:
        found = list(islice(units, want.groups))
        if len(found) < want.groups:
            return [], f"{len(found)} of {want.groups} groups are ready for task '{task}'"
        return [key for unit in found for key in unit.keys], ""
    # Where nothing is ever trained nothing is urgent, and the sampler need read no more than it wants.
    steps = core.policy.step_task and core.state.trainer_version is not None
    choice = choose_urgent_first(sampler, units, want) if steps else choose_by(sampler, units, want)
    keys = [key for unit in choice.units for key in unit.keys]
    return keys, "" if keys else choice.waiting_on or f"no sample is ready for task '{task}'"


def _first(core: Core, task: str, want: Want) -> tuple[list[SampleKey], str]:
    """First in, first out: the usual case, without looking at more than what is taken."""
    if want.tokens:
        keys = [key for unit in fill(_samples(core, task), want).units for key in unit.keys]
    else:
        keys = list(islice(core.ready[task], want.samples))
    return keys, "" if keys else nothing_ready(core, task)


def nothing_ready(core: Core, task: str) -> str:
    """Why no sample is ready for a task: there is none, others work on them, or they lack columns."""
    lack: Counter[str] = Counter()
    blocks = core.blocks.blocks
    for group in islice(core.state.groups.values(), LOOKED_AT):
        for sample in group.samples:
            if sample.generated and not sample.left_out and task not in sample.done and task not in sample.leases:
                have = {name for part in sample.parts for name in blocks[part.block].ref.fields}
                lack.update(name for name in core.policy.tasks[task] if name not in have)
    what = f"no sample is ready for task '{task}'"
    if not lack:
        return what
    return f"{what}: " + ", ".join(f"{n} lack '{name}'" for name, n in sorted(lack.items()))


def _samples(core: Core, task: str, newest_first: bool = False) -> Iterator[Unit]:
    ready = core.ready[task]
    for order, key in enumerate(reversed(ready) if newest_first else ready):
        group = core.state.groups[key.group]
        yield _unit(core, group, (key,), -order if newest_first else order)


def _groups(core: Core, task: str, newest_first: bool = False) -> Iterator[Unit]:
    """Groups whose members are all ready for the task, or done with it already (one may have been made again)."""
    ready = core.ready[task]
    seen: set[int] = set()
    for key in reversed(ready) if newest_first else ready:
        if key.group in seen:
            continue
        seen.add(key.group)
        group = core.state.groups[key.group]
        keys = [key for key, sample in group.members() if task not in sample.done]
        if group.complete and all(one in ready for one in keys):
            yield _unit(core, group, tuple(keys), -len(seen) if newest_first else len(seen))


def _unit(core: Core, group: Group, keys: tuple[SampleKey, ...], order: int) -> Unit:
    samples = [group.samples[key.member] for key in keys]
    steps = bool(core.policy.step_task) and core.state.trainer_version is not None
    return Unit(
        id=group.id,
        keys=keys,
        lengths=tuple(sample.length for sample in samples),
        staleness=core.staleness(group) if steps else 0,
        urgent=steps and urgent(core, group),
        priority=max(sample.priority for sample in samples),
        order=order,
    )


def settle(core: Core, who: Incarnation, want: Want) -> tuple[Want | None, str]:
    """What comes before the choice of a step's batch: what may be granted of it now, or nothing, and why.

    Refuses what is over-stale and revokes late stragglers. A replay does it again, without choosing. A part of a step
    is granted beside others of its holder, as one update ends them all; the last one waits for stragglers.
    """
    state = core.state
    if state.trainer_version is None:
        return None, "the trainer has not announced its weights yet"
    refuse_stale(core)
    for lease in state.leases.values():
        alone = want.at_least and not lease.stream and lease.holders == [who]
        if lease.task == core.policy.step_task and not alone:
            holder = (lease.holders or lease.finished)[0]
            return None, f"lease {lease.id} of {holder} is not finished; its update decides what is stale"
    granted, waiting_on = _granted(core, want)
    if granted < (want.at_least or want.groups) or granted < 1:
        return None, waiting_on
    return msgspec.structs.replace(want, groups=granted), ""


def _granted(core: Core, want: Want) -> tuple[int, str]:
    """How many groups may be granted of what a step lacks, and why not all of them."""
    ready = len(core.step_ready)
    room = places(core, want.groups) if want.at_least else want.groups
    lacking = f"{ready} of {want.groups} groups are ready for training"
    if ready < want.groups and (room or not ready):
        blocked(core, None)
        return min(ready, room), lacking
    waiting_on = hold_for_stragglers(core, ends_step=not want.at_least)
    if waiting_on:
        return min(want.groups - 1, room), waiting_on
    return min(ready, want.groups), lacking


def _for_step(core: Core, sampler: Sampler | None, want: Want) -> tuple[list[SampleKey], str]:
    """Exactly the wanted groups, those first that the next update would make over-stale."""
    state = core.state
    units = [
        _unit(core, state.groups[id_], tuple(state.groups[id_].sample_keys()), order)
        for order, id_ in enumerate(core.step_ready)
    ]
    if sampler is None:
        units.sort(key=lambda unit: (-unit.staleness, unit.id))
        return [key for unit in units[: want.groups] for key in unit.keys], ""
    choice = choose_urgent_first(sampler, units, want)
    if len(choice.units) != want.groups:
        return [], choice.waiting_on or f"the sampler chose {len(choice.units)} of {want.groups} groups"
    return [key for unit in choice.units for key in unit.keys], ""
