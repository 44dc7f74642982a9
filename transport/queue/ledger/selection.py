"""Selection of samples for a lease: samplers, the next training batch, and waiting for stragglers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Protocol

import msgspec

from relax_rt.transport.queue.ledger import packed
from relax_rt.transport.queue.ledger.admission import (
    admission_bound,
    allowed_surplus,
    outstanding,
    recycle,
    regenerate_stale_members,
)
from relax_rt.transport.queue.ledger.core import REFUSED, Core
from relax_rt.transport.queue.ledger.messages import LeaseRequest, SampleKey
from relax_rt.transport.queue.ledger.state import PackedSamples, SampleGroup
from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.rpc.identity import Incarnation

WINDOW = 4096
"""Units that a sampler looks at, unless it says otherwise."""


class Unit(msgspec.Struct, frozen=True):
    """Smallest unit of a sampler's choice: one ready sample, or all samples of a group.

    Attributes:
        id: its group.
        lengths: tokens of each of its samples; -1: no producer said.
        staleness: as of now; -1 outside training.
        urgent: the next update of the weights would make it over-stale.
        priority: higher is sooner.
        order: grows with the time at which it became ready.
    """

    id: int
    keys: tuple[SampleKey, ...]
    lengths: tuple[int, ...]
    staleness: int = -1
    urgent: bool = False
    priority: float = 0.0
    order: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of all its samples.

        Raises:
            Refused: the length of one is not known.
        """
        if min(self.lengths, default=0) < 0:
            key = self.keys[self.lengths.index(-1)] if -1 in self.lengths else self.keys[0]
            raise Refused(
                f"choosing by length, of sample {key}",
                why="no producer said how many tokens it has",
                hint="name the column that holds a sample's tokens where the samples are put (length_field)",
            )
        return sum(self.lengths)


class Selection(msgspec.Struct, frozen=True):
    """The units to lease, in the order in which they go out; none, and why, while there are not enough."""

    units: list[Unit]
    waiting_on: str = ""


class BatchSampler(Protocol):
    """Chooses among what is ready for a task. Pure: the same units and request give the same choice.

    It is named in a config as `package.module:Class` or `file.py:Class` and made with its options as keyword
    arguments. Two attributes are optional: `window`, how many units it looks at (4096), and `newest_first`, whether
    it wants to see the latest ready ones first.
    """

    @property
    def whole_groups(self) -> bool:
        """Whether units are to be whole groups even if samples are asked for."""

    def choose(self, units: Iterable[Unit], request: LeaseRequest) -> Selection:
        """At most what is wanted, each unit once.

        Args:
            units: what is ready, oldest first; made as it is read, so read no more than needed.
            request: with groups, exactly so many units, or none and `waiting_on`; fewer only where `tokens` end the
                batch.
        """


def limit_of(request: LeaseRequest) -> float:
    """Largest number of groups, or else samples, to choose; inf if tokens are the only bound.

    Raises:
        Refused: nothing is wanted, or less than nothing.
    """
    if min(request.samples, request.groups, request.tokens) < 0:
        raise Refused(
            "lease", why=f"it asks for {request.samples} samples, {request.groups} groups, {request.tokens} tokens"
        )
    if not (request.samples or request.groups or request.tokens):
        raise Refused("lease", why="neither samples nor groups nor tokens were asked for")
    return request.groups or request.samples or math.inf


def within(units: Iterable[Unit], window: int, request: LeaseRequest) -> Iterator[Unit]:
    """The first `window` units, or as many as are wanted if that is more."""
    limit = limit_of(request)
    return islice(units, max(window, int(limit) if limit < math.inf else 0))


def fill(units: Iterable[Unit], request: LeaseRequest, *, skip: bool = False) -> Selection:
    """Take units in their order until there are enough. The first one goes even if it is over the token budget.

    Args:
        skip: pass over a unit that is too large for what is left of the budget, instead of ending there.
    """
    room, left = limit_of(request), float(request.tokens) if request.tokens else math.inf
    chosen: list[Unit] = []
    seen, smallest, closed = 0, 0, False
    for unit in units:
        seen += 1
        size = 1 if request.groups else len(unit.keys)
        tokens = unit.tokens if request.tokens else 0
        smallest = min(smallest or size, size)
        if size <= room and not closed and (tokens <= left or not chosen):
            chosen.append(unit)
            room, left = room - size, left - tokens
        elif chosen and tokens > left:
            closed = closed or not skip
        # Keep counting after the token budget is used up: the batch is granted only if enough groups are ready.
        if room < 1 or ((closed or left <= 0) and seen >= request.groups):
            break
    if request.groups and seen < request.groups:
        return Selection([], f"{seen} of {request.groups} groups are ready")
    if not chosen and seen:
        return Selection(
            [], f"the smallest of {seen} ready groups has {smallest} samples, {request.samples} are asked for"
        )
    return Selection(chosen, "" if chosen else "no sample is ready")


def choose(sampler: BatchSampler, units: Iterable[Unit], request: LeaseRequest) -> Selection:
    """Ask the sampler, and check its choice against the request.

    Raises:
        Refused: the sampler failed, chose more than was wanted, a unit twice, or one that it was not offered.
    """
    offered: dict[tuple[SampleKey, ...], Unit] = {}

    def noted() -> Iterator[Unit]:
        for unit in units:
            offered[unit.keys] = unit
            yield unit

    name = f"sampler {type(sampler).__name__}"
    try:
        choice = sampler.choose(noted(), request)
    except Refused:
        raise
    except Exception as error:
        raise Refused(name, why=f"it raised {type(error).__name__}: {error}") from error
    if not isinstance(choice, Selection) or not all(isinstance(unit, Unit) for unit in choice.units):
        raise Refused(name, why=f"its choose returned a {type(choice).__name__}", hint="return Selection([units…])")
    keys = [unit.keys for unit in choice.units]
    tokens = sum(unit.tokens for unit in choice.units) if request.tokens else 0
    samples = sum(map(len, keys))
    wrong = ""
    if len(set(keys)) != len(keys):
        wrong = "it chose a sample twice"
    elif not offered.keys() >= set(keys):
        wrong = "it chose a sample that it was not offered"
    elif request.groups and (len(keys) > request.groups or (0 < len(keys) < request.groups and not request.tokens)):
        wrong = f"it chose {len(keys)} groups, {request.groups} are wanted"
    elif not request.groups and samples > limit_of(request):
        wrong = f"it chose {samples} samples, {request.samples} are wanted"
    elif len(keys) > 1 and tokens > request.tokens > 0:
        wrong = f"it chose {tokens} tokens, {request.tokens} are wanted"
    if wrong:
        raise Refused(name, why=wrong)
    return Selection([offered[key] for key in keys], choice.waiting_on)


def choose_urgent_first(sampler: BatchSampler, units: Iterable[Unit], request: LeaseRequest) -> Selection:
    """The sampler's choice, in which what the next update would make over-stale comes before all else.

    The whole window is read for it; where nothing can be urgent, `choose` reads no more than the sampler needs. A
    ledger that knows of urgent units beyond the window puts them in front.

    Raises:
        Refused: see `choose`.
    """
    pool = list(within(units, int(getattr(sampler, "window", WINDOW)), request))
    urgent = [unit for unit in pool if unit.urgent]
    if request.groups and len(pool) < request.groups:
        return Selection([], f"{len(pool)} of {request.groups} groups are ready")
    groups = min(request.groups, len(urgent))
    first = choose(sampler, urgent, msgspec.structs.replace(request, groups=groups)).units if urgent else []
    if not first:
        return choose(sampler, pool, request)
    left = _remaining(request, first)
    if left is None or len(first) < len(urgent):
        # What was left of the urgent ones had no room; it goes first in the next batch.
        return Selection(first)
    rest = [unit for unit in pool if not unit.urgent and not (left.tokens and unit.tokens > left.tokens)]
    if not rest:
        return Selection(first)
    second = choose(sampler, rest, msgspec.structs.replace(left, groups=min(left.groups, len(rest))))
    if request.groups and not request.tokens and len(first) + len(second.units) < request.groups:
        return Selection([], second.waiting_on)
    return Selection(first + second.units)


def _remaining(request: LeaseRequest, chosen: list[Unit]) -> LeaseRequest | None:
    """The rest of the request after these units; None if it is met."""
    groups = request.groups - len(chosen)
    samples = request.samples - sum(len(unit.keys) for unit in chosen)
    tokens = request.tokens - sum(unit.tokens for unit in chosen) if request.tokens else 0
    if request.tokens and tokens < 1:
        return None
    if request.groups:
        return msgspec.structs.replace(request, groups=groups, tokens=tokens) if groups > 0 else None
    if request.samples:
        return msgspec.structs.replace(request, samples=samples, tokens=tokens) if samples > 0 else None
    return msgspec.structs.replace(request, tokens=tokens)


def refuse_stale(core: Core, beyond: int = 0) -> None:
    """End every group over the staleness bound that is not on lease to the trainer; its prompt returns.

    beyond: samples that admission allowed over the bound. Up to this many of the newest stale samples end as surplus,
        or are recycled, instead of refused; recycled groups that still continue use up this allowance.
    """
    if core.state.trainer_version is None or core.policy.max_staleness == float("inf"):
        return
    stale = [
        group
        for group in reversed(list(core.state.groups.values()))
        if not group.lease and core.staleness(group) > core.policy.max_staleness
    ]
    core.changed = core.changed or bool(stale)
    for group in stale:
        if group.recycled and not regenerate_stale_members(core, group):
            core.end(group, "dropped(surplus)" if beyond else REFUSED)
    left = beyond - _recycled_samples(core) if beyond else 0
    for group in stale:
        if group.recycled:
            continue
        if left <= 0 or not recycle(core, group):
            core.end(group, "dropped(surplus)" if left > 0 else REFUSED)
        left -= group.size


def _recycled_samples(core: Core) -> int:
    """Samples of recycled groups that are not ready for training: they take the room of new surplus."""
    return sum(
        group.size
        for group in core.state.groups.values()
        if group.recycled and not group.lease and group.id not in core.step_ready
    )


def urgent(core: Core, group: SampleGroup) -> bool:
    """Whether the next update would push the group past the bound."""
    return core.staleness(group) + 1 > core.policy.max_staleness


def stragglers(core: Core) -> list[SampleGroup]:
    """Groups that are not ready to be trained and that the next update would push past the bound."""
    if core.policy.on_straggler == "mask" or core.policy.max_staleness == float("inf"):
        return []
    return [
        group
        for group in core.state.groups.values()
        if group.id not in core.step_ready and not group.lease and not group.recycled and urgent(core, group)
    ]


def wait_for_stragglers(core: Core, *, ends_step: bool = True) -> str:
    """Why the batch that could be granted must wait; empty when it need not. Late stragglers are revoked.

    ends_step: the update comes next, so that surplus is of no use any more. A trainer that takes parts may still leave
        some of them out, and then needs it; the update itself ends what is left of it.
    """
    late = stragglers(core)
    beyond = _beyond_bound(core, late)
    for group in beyond if ends_step else ():
        if not recycle(core, group):
            core.end(group, "dropped(surplus)")
        core.changed = True
    ended = {group.id for group in beyond}
    late = [group for group in late if group.id not in ended]
    if late:
        since = core.now if core.state.blocked_since is None else core.state.blocked_since
        patience_s = core.policy.straggler_wait_s if core.policy.on_straggler == "wait" else 0.0
        if core.now - since < patience_s:
            set_blocked(core, since)
            return _describe_stragglers(late)
        for group in late:
            core.tally("stragglers")
            # Do not wait for the same prompt forever. One that cost no waiting is retried without limit.
            in_vain = patience_s > 0 and bool(group.missing())
            core.end(group, "dropped(straggler)", fate="failed" if in_vain else "return")
        core.changed = True
    set_blocked(core, None)
    return ""


def groups_excluding_stragglers(core: Core, groups: int) -> int:
    """Number of groups that a step may lease before its stragglers are ready; the others are reserved for them.

    Otherwise groups that are made fast would take the places of those that take long, which the update then refuses.
    """
    if core.policy.on_straggler != "wait":
        return groups
    late = stragglers(core)
    waited_for = len(late) - len(_beyond_bound(core, late))
    ready = sum(urgent(core, core.state.groups[id_]) for id_ in core.step_ready)
    return max(ready, groups - waited_for, 0)


def _beyond_bound(core: Core, late: list[SampleGroup]) -> list[SampleGroup]:
    """The newest stragglers, as many as are surplus beside recycled groups: the batch does not wait for them."""
    over = outstanding(core) - admission_bound(core, core.state.trainer_version or 0) - _recycled_samples(core)
    found: list[SampleGroup] = []
    for group in reversed(late):
        if not allowed_surplus(core) or over <= 0:
            break
        over -= group.size
        found.append(group)
    return found


def set_blocked(core: Core, since: float | None) -> None:
    """Record since when the batch waits for stragglers only."""
    if core.state.blocked_since != since:
        core.state.blocked_since = since
        core.changed = True


def _describe_stragglers(late: list[SampleGroup]) -> str:
    """Say what the batch waits for."""
    group = late[0]
    there = sum(sample.generated for sample in group.samples)
    at = f"{group.holder} has made {there} of {group.size}" if group.holder else "its columns are not complete"
    more = f" and {len(late) - 1} more" if len(late) > 1 else ""
    return f"the update would make group {group.id}{more} over-stale: {at}"


MAX_DIAGNOSED_GROUPS = 64
"""Groups that are looked at to say what is missing."""
Samplers = dict[str, BatchSampler]
"""The samplers of those tasks that have another one than first in, first out."""


def select_keys(core: Core, samplers: Samplers, task: str, request: LeaseRequest) -> tuple[list[SampleKey], str]:
    """Keys to lease, or none and the reason. For the step task `prepare_step_request` comes first."""
    if task == core.policy.step_task:
        return _select_for_step(core, samplers.get(task), request)
    sampler = samplers.get(task)
    if sampler is None and not request.groups:
        return _select_fifo(core, task, request)
    whole = bool(request.groups) or (sampler is not None and sampler.whole_groups)
    newest_first = bool(getattr(sampler, "newest_first", False))
    units = _groups(core, task, newest_first) if whole else _samples(core, task, newest_first)
    if sampler is None:
        found = list(islice(units, request.groups))
        if len(found) < request.groups:
            return [], f"{len(found)} of {request.groups} groups are ready for task '{task}'"
        return [key for unit in found for key in unit.keys], ""
    # Without training nothing is urgent, and the sampler reads only as many units as it needs.
    steps = core.policy.step_task and core.state.trainer_version is not None
    choice = choose_urgent_first(sampler, units, request) if steps else choose(sampler, units, request)
    keys = [key for unit in choice.units for key in unit.keys]
    return keys, "" if keys else choice.waiting_on or f"no sample is ready for task '{task}'"


def _select_fifo(core: Core, task: str, request: LeaseRequest) -> tuple[list[SampleKey], str]:
    """First in, first out: the usual case, which reads only the samples that it takes."""
    if request.tokens:
        keys = [key for unit in fill(_samples(core, task), request).units for key in unit.keys]
    else:
        keys = list(islice(core.ready[task], request.samples))
    return keys, "" if keys else not_ready_reason(core, task)


def not_ready_reason(core: Core, task: str) -> str:
    """Why no sample is ready for a task: there is none, others work on them, or they lack columns."""
    lack: Counter[str] = Counter()
    blocks = core.blocks.blocks
    for group in islice(core.state.groups.values(), MAX_DIAGNOSED_GROUPS):
        for sample in group.samples:
            if sample.generated and not sample.excluded and task not in sample.done and task not in sample.leases:
                have = {name for part in sample.parts for name in blocks[part.block].ref.fields}
                lack.update(name for name in core.policy.tasks[task] if name not in have)
    for run in islice(core.state.runs.values(), MAX_DIAGNOSED_GROUPS):
        if task not in run.next:
            have = set(blocks[run.block].ref.fields)
            lack.update({name: run.open for name in core.policy.tasks[task] if name not in have})
    what = f"no sample is ready for task '{task}'"
    if not lack:
        return what
    return f"{what}: " + ", ".join(f"{n} lack '{name}'" for name, n in sorted(lack.items()))


def _samples(core: Core, task: str, newest_first: bool = False) -> Iterator[Unit]:
    for order, (key, run) in enumerate(core.ready[task].walk(newest_first)):
        yield _unit(core, _group_of(core, key, run), (key,), -order if newest_first else order)


def _group_of(core: Core, key: SampleKey, run: PackedSamples | None) -> SampleGroup:
    """The group of a ready sample, made for this look if it is packed."""
    return core.state.groups[key.group] if run is None else packed.group_at(run, key.group - run.first)


def _groups(core: Core, task: str, newest_first: bool = False) -> Iterator[Unit]:
    """Groups whose members are all ready for the task, or done with it already (one may have been made again)."""
    ready = core.ready[task]
    seen: set[int] = set()
    for key, run in ready.walk(newest_first):
        if key.group in seen:
            continue
        seen.add(key.group)
        group = _group_of(core, key, run)
        if run is not None:
            yield _unit(core, group, (key,), -len(seen) if newest_first else len(seen))
            continue
        keys = [key for key, sample in group.members() if task not in sample.done]
        if group.complete and all(one in ready for one in keys):
            yield _unit(core, group, tuple(keys), -len(seen) if newest_first else len(seen))


def _unit(core: Core, group: SampleGroup, keys: tuple[SampleKey, ...], order: int) -> Unit:
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


def prepare_step_request(core: Core, who: Incarnation, request: LeaseRequest) -> tuple[LeaseRequest | None, str]:
    """Settle what may be granted of a step's batch before it is chosen; None, and why, if nothing may.

    Refuses what is over-stale and revokes late stragglers. A replay does it again, without choosing. A part of a step
    is granted beside others of its holder, as one update ends them all; the last one waits for stragglers.
    """
    state = core.state
    if state.trainer_version is None:
        return None, "the trainer has not announced its weights yet"
    refuse_stale(core)
    for lease in state.leases.values():
        beside = request.at_least and lease.holder == who
        if lease.task == core.policy.step_task and not beside:
            return None, f"lease {lease.id} of {lease.holder} is not finished; its update decides what is stale"
    granted, waiting_on = _grantable_groups(core, request)
    if granted < (request.at_least or request.groups) or granted < 1:
        return None, waiting_on
    return msgspec.structs.replace(request, groups=granted), ""


def _grantable_groups(core: Core, request: LeaseRequest) -> tuple[int, str]:
    """Number of groups that may be granted to a step now, and the reason why not all."""
    ready = len(core.step_ready)
    room = groups_excluding_stragglers(core, request.groups) if request.at_least else request.groups
    lacking = f"{ready} of {request.groups} groups are ready for training"
    if ready < request.groups and (room or not ready):
        set_blocked(core, None)
        return min(ready, room), lacking
    waiting_on = wait_for_stragglers(core, ends_step=not request.at_least)
    if waiting_on:
        return min(request.groups - 1, room), waiting_on
    return min(ready, request.groups), lacking


def _select_for_step(core: Core, sampler: BatchSampler | None, request: LeaseRequest) -> tuple[list[SampleKey], str]:
    """Exactly the wanted groups, those first that the next update would make over-stale."""
    state = core.state
    units = [
        _unit(core, state.groups[id_], tuple(state.groups[id_].sample_keys()), order)
        for order, id_ in enumerate(core.step_ready)
    ]
    if sampler is None:
        units.sort(key=lambda unit: (-unit.staleness, unit.id))
        return [key for unit in units[: request.groups] for key in unit.keys], ""
    choice = choose_urgent_first(sampler, units, request)
    if len(choice.units) != request.groups:
        return [], choice.waiting_on or f"the sampler chose {len(choice.units)} of {request.groups} groups"
    return [key for unit in choice.units for key in unit.keys], ""
