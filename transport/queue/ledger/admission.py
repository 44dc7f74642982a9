"""Production: tickets within the staleness bound, puts, partial completions, and groups that come back unfinished."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, repeat

from relax_rt.transport.memory.refs import extents_in
from relax_rt.transport.queue.ledger import packed
from relax_rt.transport.queue.ledger.core import REFUSED, ROOM, Core
from relax_rt.transport.queue.ledger.events import (
    PutGroups,
    PutSamples,
    ReleaseGroups,
    RequestTickets,
    SavePartials,
    SkipGroups,
)
from relax_rt.transport.queue.ledger.failures import (
    count_success,
    fail_missing,
    failed_group,
    is_frozen,
    regenerate_members,
    reset_failures,
)
from relax_rt.transport.queue.ledger.messages import (
    Admission,
    BlockPut,
    Freed,
    GroupsPut,
    PartialChunk,
    RowPut,
    SampleKey,
    SavedPartials,
    Ticket,
    VersionSpan,
)
from relax_rt.transport.queue.ledger.state import PartialTokens, SampleGroup, SamplePart, SampleState
from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.rpc.identity import Incarnation

MAX_SAMPLES = 65_536
"""Samples of one call."""
MAX_PRODUCER_LOSSES = 6
"""A group fails after its producer was lost this many times in a row without a new token or member."""


def outstanding(core: Core) -> int:
    """Samples reserved, generating, ready or leased, plus those trained since the last update."""
    return core.held + core.state.since_update


def admission_bound(core: Core, engine_version: int) -> float:
    """Samples that may be outstanding when this engine makes more: (max_staleness + 1 - lag) * b."""
    policy = core.policy
    return (policy.max_staleness + 1 - core.lag(engine_version)) * policy.batch_samples


def allowed_surplus(core: Core) -> int:
    """Samples that may be under way beyond the bound."""
    return max(core.policy.over_provision, core.state.surplus_requested) * core.policy.group_size


def groups_beyond_bound(core: Core) -> int:
    """Groups that are under way beyond the bound of the freshest engine."""
    policy = core.policy
    over = outstanding(core) - (policy.max_staleness + 1) * policy.batch_samples if policy.group_size else 0
    return math.ceil(over / policy.group_size) if over > 0 else 0


def limit_surplus_request(core: Core) -> None:
    """End the request for surplus with the step; groups that are under way beyond the bound stay allowed."""
    if core.state.surplus_requested:
        core.state.surplus_requested = min(core.state.surplus_requested, groups_beyond_bound(core))


def capacity_blocker(core: Core, more: int = 1) -> str:
    """Why `more` samples do not fit into the queue; empty if something does."""
    state = core.state
    used, limit = core.used_bytes, state.limits.capacity_bytes
    if used >= limit:
        held = sum(group.size for group in state.trained.values())
        waits = f", {held} samples wait for a checkpoint" if held else ""
        spill = ", the disk for spilled payloads is full" if state.limits.spill_bytes else ""
        partials = f", {state.partials_bytes} of them partial completions" if state.partials_bytes else ""
        return f"payloads fill the capacity: {used} of {limit} bytes{partials}{waits}{spill}"
    if core.held + more > state.limits.capacity_samples:
        return f"{core.held} samples are in the queue, {state.limits.capacity_samples} allowed"
    return ""


def admission_blocker(core: Core, engine_version: int) -> str:
    """Why no new group can be admitted to this engine now; empty if one can."""
    state, policy = core.state, core.policy
    if not state.prompts.available(policy.prompts):
        return f"all {policy.prompts} prompts are given out"
    full = capacity_blocker(core)
    if full:
        return full
    now, limit = outstanding(core), admission_bound(core, engine_version)
    if limit > 0:
        # What an engine too far behind makes would be refused, also as surplus.
        limit += allowed_surplus(core)
    if now + policy.group_size > limit:
        behind = core.lag(engine_version)
        lag = f" to an engine {behind} updates behind" if behind else ""
        return f"staleness bound: {now} samples outstanding, {max(limit, 0):g} allowed{lag}"
    return ""


def admit(core: Core, who: Incarnation, event: RequestTickets) -> Admission:
    """Tickets for up to `groups` groups: first those with missing members, then new ones, as the bound allows."""
    what = f"admission of {event.groups} groups to {who}"
    if event.groups < 1:
        raise Refused(what, why="at least one must be asked for")
    if not core.policy.group_size:
        raise Refused(what, why="this queue has no prompts", hint="put samples instead")
    retired = core.state.progress.revision
    if core.state.trainer_version is None:
        return Admission([], "the trainer has not announced its weights yet", retired)
    if event.engine_version not in core.tree:
        return Admission([], f"engine version {event.engine_version} is not known to the queue yet", retired)
    tickets: list[Ticket] = []
    wanted = min(event.groups, MAX_SAMPLES // core.policy.group_size or 1)
    for id_ in list(core.state.reopened):
        if len(tickets) < wanted and core.lag(event.engine_version) <= core.policy.max_staleness:
            tickets.append(_reissue(core, who, core.state.groups[id_], event.engine_version))
    while len(tickets) < wanted:
        waiting_on = admission_blocker(core, event.engine_version)
        if waiting_on:
            return Admission(tickets, "" if tickets else waiting_on, retired)
        tickets.append(_issue(core, who, event.engine_version))
    return Admission(tickets, retired=retired)


def _issue(core: Core, who: Incarnation, engine_version: int) -> Ticket:
    state, size = core.state, core.policy.group_size
    assert state.trainer_version is not None
    group = SampleGroup(
        id=core.new_id(),
        prompt=state.prompts.issue(),
        version=state.trainer_version,
        base=engine_version,
        samples=[SampleState() for _ in range(size)],
        holder=who,
        making=list(range(size)),
        issue=1,
        passed=dict(state.progress.passed),
    )
    core.add_group(group)
    state.issued += size
    core.start_deadline(group.id)
    core.changed = True
    assert group.prompt is not None
    prompt = group.prompt
    return Ticket(
        group.id,
        prompt.index,
        prompt.attempt,
        size,
        group.version,
        state.limits.lease_s,
        issue=1,
        item=prompt.chosen_item,
        losses=prompt.losses,
    )


def _reissue(core: Core, who: Incarnation, group: SampleGroup, engine_version: int) -> Ticket:
    """A ticket for the missing members of a group."""
    assert group.prompt is not None and core.state.trainer_version is not None
    core.state.reopened.pop(group.id)
    group.holder, group.base, group.making = who, engine_version, group.missing()
    group.issue += 1
    count_reissue(core, group)
    core.start_deadline(group.id)
    core.changed = True
    return Ticket(
        group.id,
        group.prompt.index,
        group.prompt.attempt,
        len(group.samples),
        core.state.trainer_version,
        core.state.limits.lease_s,
        list(group.making),
        group.issue,
        partial_lengths(group),
        group.prompt.chosen_item,
        group.prompt.losses,
    )


def reopen(core: Core, group: SampleGroup, state: str, why: str = "", *, losses: int = 0) -> None:
    """Queue the missing members of a group without a producer for admission, or end the group in `state`.

    Members that are there stay, and the partial completions of the others, so that a producer's death costs at most
    what it sampled since it last saved them.

    losses: how often it was lost on its producer. What is lost again and again, with no member and no token saved in
        between, has failed: it may be what kills its producers, or always takes longer than they have.
    """
    holder, group.holder, group.making = group.holder, None, []
    core.clear_deadline(group.id)
    missing = group.missing()
    if not missing:
        core.refresh(group)
        return
    prompt = group.prompt = group.prompt.with_losses(losses) if group.prompt is not None else None
    begun = [member for member in missing if group.samples[member].partial is not None]
    tokens = sum(partial.length for member in missing if (partial := group.samples[member].partial) is not None)
    core.log(
        "group_reopened",
        group=group.id,
        holder=str(holder),
        state=state,
        why=why,
        missing=len(missing),
        partial=len(begun),
        tokens=tokens,
        losses=prompt.losses if prompt is not None else 0,
    )
    if prompt is not None and prompt.losses >= MAX_PRODUCER_LOSSES:
        group.prompt = prompt.without_losses()
        fail_missing(core, group, f"begun and lost {prompt.losses} times, the last time: {why or state}")
        return
    nothing = len(missing) == group.size and not begun
    if nothing or group.prompt is None or core.policy.on_failed_member == "drop":
        core.end(group, state)
        return
    core.count_end(state, len(missing) - len(begun))
    core.state.issued += len(missing) - len(begun)
    group.regenerations += 1
    group.prompt = group.prompt.next_attempt()
    core.state.reopened[group.id] = None
    core.touched.add(ROOM)


def put_samples(core: Core, who: Incarnation, event: PutSamples) -> Freed:
    """New samples of groups that the caller generates.

    What comes for a group that is no longer the caller's is not kept: its extents go straight back.
    """
    check_puts(core, who, event.puts)
    core.changed = bool(event.puts)
    touched: dict[int, SampleGroup] = {}
    for item in event.puts:
        mine = [row for row in item.rows if _is_open(core, who, row)]
        if len(mine) < len(item.rows):
            core.tally("late_puts", len(item.rows) - len(mine))
        if not mine:
            return_extents(core, [item])
            continue
        block = core.blocks.add(item, len(mine), core.state.callers.alive)
        for row in mine:
            group = core.state.groups[row.key.group]
            core.drop_partial(group.samples[row.key.member])
            group.samples[row.key.member] = _sample(core, row, block)
            group.making.remove(row.key.member)
            made_progress(core, group)
            touched[group.id] = group
            count_success(core, group, "")
    for group in touched.values():
        _after_put(core, group)
    return collect_freed(core, who)


def collect_freed(core: Core, who: Incarnation) -> Freed:
    """Extents that came free since the caller last asked."""
    freed = core.blocks.collect(who)
    core.changed = core.changed or bool(freed)
    return Freed(freed)


def _is_open(core: Core, who: Incarnation, row: RowPut) -> bool:
    group = core.state.groups.get(row.key.group)
    return group is not None and group.holder == who and row.key.member in group.making


def _sample(core: Core, row: RowPut, block: int) -> SampleState:
    core.losses.generated(row.length)
    return SampleState(True, [SamplePart(block, row.row)], row.length, row.priority, row.versions)


def _after_put(core: Core, group: SampleGroup) -> None:
    if not group.making:
        group.holder = None
        core.clear_deadline(group.id)
        if group.missing():
            # A member failed a task while its siblings were still being made.
            core.state.reopened[group.id] = None
            core.touched.add(ROOM)
    core.refresh(group)
    if group.id in core.step_ready:
        reset_failures(core)
    # What it has now may be fresher than the ticket or the partial completion that it was counted with.
    core.recheck_stragglers()
    if core.staleness(group) > core.policy.max_staleness and not (
        group.recycled and regenerate_stale_members(core, group)
    ):
        # An engine that still served a branch the trainer has left.
        core.end(group, REFUSED)


def return_extents(core: Core, puts: list[BlockPut]) -> None:
    """Return the memory of puts that are not kept."""
    for extent in extents_in(puts):
        core.blocks.return_to_owner(extent, core.state.callers.alive)


def check_puts(core: Core, who: Incarnation, puts: list[BlockPut]) -> None:
    """Check all puts of a call before any of them is applied.

    Raises:
        Refused: a put is not possible; nothing of the call was done.
    """
    check_rows(core, who, puts)
    check_fields(core, who, puts)
    _check_new(core, who, puts)
    seen: set[tuple[int, int]] = set()
    for item in puts:
        for row in item.rows:
            at = (row.key.group, row.key.member)
            if at in seen:
                raise Refused(f"put of sample {row.key} by {who}", why="it is twice in the same call")
            seen.add(at)
            what = f"put of sample {row.key} by {who}"
            group = core.state.groups.get(row.key.group)
            if group is not None and group.holder == who:
                if not 0 <= row.key.member < len(group.samples):
                    raise Refused(what, why=f"its group has {len(group.samples)} members")
                # After a lapse the caller may hold the same group again, and the work of its first ticket comes late.
                if row.key.member not in group.making and not group.regenerations:
                    raise Refused(what, why="a producer puts each member of its ticket once, with all its columns")
            check_versions(core, what, row)


def check_versions(core: Core, what: str, row: RowPut) -> None:
    """Check that the ledger knows the versions of a row.

    Raises:
        Refused: a policy version is not known.
    """
    for span in row.versions:
        if span.version not in core.tree:
            raise Refused(what, why=f"policy version {span.version} is not known")


def check_rows(core: Core, who: Incarnation, puts: list[BlockPut]) -> None:
    """Check the memory of blocks, and that each block comes with all its rows.

    Raises:
        Refused: an extent is not in the caller's own slab, is in use, or comes twice; a block's rows do not fit it.
    """
    core.blocks.check_extents(puts, who)
    for put in puts:
        rows = [row.row for row in put.rows]
        if not rows or len(rows) != put.block.rows or sorted(rows) != list(range(len(rows))):
            raise Refused(
                f"put by {who}", why=f"a block of {put.block.rows} rows comes with rows {rows[:8]} of samples"
            )


def check_fields(core: Core, who: Incarnation, puts: list[BlockPut]) -> None:
    """Check the fields and sizes of blocks.

    Raises:
        Refused: a field is not declared, or a sample is too large.
    """
    declared, limit = core.policy.fields, core.state.limits.max_sample_bytes
    for item in puts:
        if declared:
            for name in item.block.fields:
                if name not in declared:
                    raise Refused(
                        f"field '{name}' put by {who}", why=f"the declared fields are {', '.join(sorted(declared))}"
                    )
        nbytes = item.block.extent.nbytes if item.block.extent is not None else len(item.block.inline)
        each = max([nbytes // max(item.block.rows, 1), *(blob.extent.nbytes for blob in item.blobs)])
        if each > limit:
            raise Refused(f"put by {who}", why=f"a sample has {each} bytes, max_sample_bytes is {limit}")
        if nbytes > core.state.limits.capacity_bytes:
            raise Refused(
                f"put by {who}",
                why=f"a block has {nbytes} bytes, the queue's capacity is {core.state.limits.capacity_bytes}",
                hint="put fewer samples at once",
            )


def _check_new(core: Core, who: Incarnation, puts: list[BlockPut]) -> None:
    """Refuse new samples that no task can work on, or whose columns would lapse with the weights."""
    for item in puts:
        if not core.tasks_with(item.block.fields):
            needed = "; ".join(f"{task}: {', '.join(fields)}" for task, fields in core.policy.tasks.items())
            raise Refused(
                f"samples with fields {', '.join(item.block.fields)} put by {who}",
                why="no task can take them, and so nobody can put what they lack",
                hint=f"the tasks need {needed}",
            )
        for name in item.block.fields:
            if name in core.policy.versioned:
                raise Refused(
                    f"field '{name}' put by {who}",
                    why="it lapses with the weights, and a producer does not compute it again",
                    hint="let a consumer task put it",
                )


def put_groups(core: Core, who: Incarnation, event: PutGroups) -> GroupsPut:
    """Put whole groups of samples that no ticket was drawn for."""
    what = f"put by {who}"
    if core.policy.group_size:
        raise Refused(what, why="this queue admits groups of prompts", hint="ask for tickets with admit, then put")
    _check_groups(core, who, event)
    full = capacity_blocker(core, sum(event.groups))
    if full:
        return GroupsPut([], waiting_on=full)
    first, version = core.state.next_id, core.state.trainer_version
    if not event.puts[0].rows and packed.can_pack(core, event.groups):
        return _put_packed(core, who, event)
    samples = _samples_by_key(core, event) if event.puts[0].rows else _samples_in_order(core, event)
    core.state.next_id += len(event.groups)
    at = 0
    for id_, size in enumerate(event.groups, first):
        group = SampleGroup(id_, None, version or 0, 0, samples[at : at + size])
        at += size
        core.add_group(group)
        if size > 1 or core.policy.step_task:
            core.refresh(group)
        else:
            core.index_single(id_, group.samples[0])
        if version is not None and core.staleness(group) > core.policy.max_staleness:
            core.end(group, REFUSED)
    core.state.issued += len(samples)
    core.changed = True
    return GroupsPut(list(range(first, first + len(event.groups))), core.blocks.collect(who))


def _put_packed(core: Core, who: Incarnation, event: PutGroups) -> GroupsPut:
    (item,) = event.puts
    first, count = core.state.next_id, len(event.groups)
    core.state.next_id += count
    block = core.blocks.add(item, count, core.state.callers.alive)
    for length in item.lengths:
        core.losses.generated(length)
    packed.add(core, first, item, block)
    core.state.issued += count
    core.changed = True
    return GroupsPut(list(range(first, first + count)), core.blocks.collect(who))


def _samples_in_order(core: Core, event: PutGroups) -> list[SampleState]:
    (item,) = event.puts
    rows = item.block.rows
    block = core.blocks.add(item, rows, core.state.callers.alive)
    for length in item.lengths:
        core.losses.generated(length)
    lengths = item.lengths or repeat(-1, rows)
    return [SampleState(True, [SamplePart(block, row)], length) for row, length in enumerate(lengths)]


def _samples_by_key(core: Core, event: PutGroups) -> list[SampleState]:
    starts = list(accumulate(event.groups, initial=0))
    samples = [SampleState()] * starts[-1]
    for item in event.puts:
        block = core.blocks.add(item, len(item.rows), core.state.callers.alive)
        for row in item.rows:
            samples[starts[row.key.group] + row.key.member] = _sample(core, row, block)
    return samples


def _check_groups(core: Core, who: Incarnation, event: PutGroups) -> None:
    what = f"put by {who}"
    if not event.groups or min(event.groups) < 1:
        raise Refused(what, why=f"its groups have {event.groups[:8]} members; each needs at least 1")
    samples, limit = sum(event.groups), min(MAX_SAMPLES, core.state.limits.capacity_samples)
    if samples > limit:
        raise Refused(what, why=f"it has {samples} samples, {limit} are allowed at once")
    check_fields(core, who, event.puts)
    _check_new(core, who, event.puts)
    if len(event.puts) == 1 and not event.puts[0].rows:
        (item,) = event.puts
        core.blocks.check_extents(event.puts, who)
        if item.block.rows != sum(event.groups) or len(item.lengths) not in (0, item.block.rows):
            raise Refused(what, why=f"a block of {item.block.rows} rows for {sum(event.groups)} samples")
        return
    check_rows(core, who, event.puts)
    seen: set[tuple[int, int]] = set()
    for item in event.puts:
        for row in item.rows:
            group, member = row.key.group, row.key.member
            if not 0 <= group < len(event.groups) or not 0 <= member < event.groups[group]:
                raise Refused(what, why=f"row {row.key} is in none of its groups")
            seen.add((group, member))
            check_versions(core, what, row)
    rows = sum(len(item.rows) for item in event.puts)
    if len(seen) != rows or rows != sum(event.groups):
        raise Refused(what, why=f"{rows} rows for {sum(event.groups)} samples: each sample is put once, whole")


def release_groups(core: Core, who: Incarnation, event: ReleaseGroups) -> None:
    """The caller does not make these groups any more."""
    for id_ in event.groups:
        group = core.state.groups.get(id_)
        if group is not None and group.holder == who:
            core.changed = True
            if event.failed and group.prompt is not None:
                fail_missing(core, group, event.reason, late=event.late, item=event.item, about=event.about)
            else:
                reopen(core, group, "dropped(returned)", event.reason, losses=event.losses)


def skip_groups(core: Core, who: Incarnation, event: SkipGroups) -> None:
    """End the caller's groups whose items are retired; their places in the prompt order are skipped."""
    for id_ in event.groups:
        group = core.state.groups.get(id_)
        if group is not None and group.holder == who and group.prompt is not None:
            core.changed = True
            core.end(group, "dropped(retired)", fate="skip")
            failed_group(core, group)


TOKEN_BYTES = 4
"""An int32 token id; its log-probability, a float32, has as many."""
MAX_CHUNKS = 4096
"""Chunks of one call."""
PARTIALS_REPLY_BYTES = 4 << 20
"""One answer to `load_partials` has about so many, and at least one chunk."""
MAX_IDLE_TICKETS = 3
"""A group that was given out this often without a new token or member starts from zero: its tokens may be what kills
its producers."""


def save_partials(core: Core, who: Incarnation, event: SavePartials) -> SavedPartials:
    """Keep what the caller has sampled since it last did so; tokens from `start` on take the place of those held.

    Answers with the tokens now held of each. Fewer than sent: there is no room, or tokens before `start` are missing.

    Raises:
        Refused: a chunk is malformed; nothing of the call was done.
    """
    _check_chunks(core, who, event.chunks)
    held: list[int] = []
    for one in event.chunks:
        group = core.state.groups.get(one.key.group)
        if group is None or group.holder != who or group.issue != one.issue or one.key.member not in group.making:
            core.partials_refused["late"] += 1
            held.append(-1)
            continue
        held.append(_save_chunk(core, group, one))
    return SavedPartials(held)


def _check_chunks(core: Core, who: Incarnation, chunks: Sequence[PartialChunk]) -> None:
    if len(chunks) > MAX_CHUNKS:
        raise Refused(f"{len(chunks)} chunks of partial completions of {who}", why=f"{MAX_CHUNKS} are allowed at once")
    for one in chunks:
        what, count = f"partial completion of {one.key} by {who}", len(one.tokens) // TOKEN_BYTES
        if len(one.tokens) != count * TOKEN_BYTES or len(one.logprobs) != len(one.tokens) or not count:
            raise Refused(what, why=f"{len(one.tokens)} bytes of tokens, {len(one.logprobs)} of log-probabilities")
        if len(one.rows) % count:
            raise Refused(what, why=f"{len(one.rows)} bytes of rows for {count} tokens")
        at = one.start
        for span in one.versions:
            if span.start != at or span.end <= at:
                raise Refused(what, why=f"its spans {one.versions[:4]} do not follow each other from {one.start} on")
            if span.version not in core.tree or span.kv_version not in core.tree:
                raise Refused(what, why=f"policy version {span.version} or {span.kv_version} is not known")
            at = span.end
        if at != one.start + count:
            raise Refused(what, why=f"its spans end at {at}, its {count} tokens at {one.start + count}")


def _save_chunk(core: Core, group: SampleGroup, one: PartialChunk) -> int:
    sample, limits = group.samples[one.key.member], core.state.limits
    old = sample.partial
    have = old.length if old is not None else 0
    if one.start > have:
        core.partials_refused["with a gap"] += 1
        return have
    if old is not None and one.start and len(one.rows) * TOKEN_BYTES != old.row_bytes * len(one.tokens):
        # The rows would not match the tokens; a chunk from the first token on would be accepted.
        core.partials_refused["of another kind"] += 1
        return have
    new = _joined(old, one)
    grown = new.nbytes - (old.nbytes if old is not None else 0)
    if new.nbytes > limits.partial_bytes or core.state.partials_bytes + grown > limits.partials_bytes:
        core.partials_refused["without room"] += 1
        return have
    if new.length > sample.longest_partial:
        sample.longest_partial = new.length
        made_progress(core, group)
    sample.partial = new
    core.state.partials_bytes += grown
    core.changed = True
    return new.length


def made_progress(core: Core, group: SampleGroup) -> None:
    """Reset the group's counts of tickets without progress: it has a new token or member."""
    group.idle = 0
    # With `drop` one more loss ends the group: its losses are forgotten only once it is complete.
    if group.prompt is not None and (core.policy.on_failed_member != "drop" or group.complete):
        group.prompt = group.prompt.without_losses()


def _joined(old: PartialTokens | None, one: PartialChunk) -> PartialTokens:
    if old is None or not one.start:
        return PartialTokens(one.tokens, one.logprobs, one.versions, one.origin, one.rows)
    kept = [
        VersionSpan(span.start, min(span.end, one.start), span.version, span.kv_version)
        for span in old.spans
        if span.start < one.start
    ]
    first, last = one.versions[0], kept[-1]
    if (last.version, last.kv_version) == (first.version, first.kv_version):
        kept[-1:] = [VersionSpan(last.start, first.end, last.version, last.kv_version), *one.versions[1:]]
    else:
        kept += one.versions
    at, row = one.start * TOKEN_BYTES, one.start * old.row_bytes
    return PartialTokens(
        old.tokens[:at] + one.tokens, old.logprobs[:at] + one.logprobs, kept, one.origin, old.rows[:row] + one.rows
    )


def load_partials(core: Core, who: Incarnation, keys: Sequence[SampleKey]) -> list[PartialChunk]:
    """Saved tokens of these members of the caller, as many of the first ones as fit into one answer."""
    found: list[PartialChunk] = []
    nbytes = 0
    for key in keys:
        group = core.state.groups.get(key.group)
        if group is None or group.holder != who or key.member not in group.making:
            continue
        held = group.samples[key.member].partial
        if held is None:
            continue
        nbytes += held.nbytes
        if found and nbytes > PARTIALS_REPLY_BYTES:
            break
        found.append(PartialChunk(key, group.issue, 0, held.tokens, held.logprobs, held.spans, held.origin, held.rows))
    return found


def partial_lengths(group: SampleGroup) -> dict[int, int]:
    """Tokens held of each member that is to be made, for its ticket."""
    return {n: held.length for n in group.making if (held := group.samples[n].partial) is not None}


def has_partials(group: SampleGroup) -> bool:
    """Whether a partial completion of a member is held."""
    return any(sample.partial is not None for sample in group.samples)


def count_reissue(core: Core, group: SampleGroup) -> None:
    """Count another ticket for the group. After several without progress its partial completions are dropped."""
    group.idle += 1
    if group.idle > MAX_IDLE_TICKETS and has_partials(group):
        core.tally("partials_dropped")
        for member in range(len(group.samples)):
            core.drop_partial(group.samples[member])
    else:
        core.tally("resumed_tokens", sum(partial_lengths(group).values()))


def recycle(core: Core, group: SampleGroup) -> bool:
    """Let a surplus group continue. False if the policy drops it, or nothing of it is unfinished and begun."""
    if core.policy.on_surplus != "recycle" or (group.holder is None and not has_partials(group)):
        return False
    group.recycled = True
    core.changed = True
    core.tally("groups_recycled")
    core.recheck_stragglers()
    return regenerate_stale_members(core, group)


def regenerate_stale_members(core: Core, group: SampleGroup) -> bool:
    """Regenerate members of a recycled group that are over-stale as a whole.

    A group that is complete keeps its other members, so that one that took long is not lost with short ones that were
    done before it. False if nothing else is left, or its composition is fixed.
    """
    bound = core.policy.max_staleness
    stale = {
        key.member for key, sample in group.members() if sample.spans and core.staleness(group, key.member) > bound
    }
    if stale and (len(stale) == group.size or is_frozen(core, group)):
        return False
    if stale:
        core.log("members_ended", group=group.id, members=sorted(stale), state="dropped(surplus)")
        regenerate_members(core, group, stale, "dropped(surplus)")
    return True
