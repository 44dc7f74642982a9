"""Marks: what producers have sampled of members that are not finished, kept so that whoever makes them goes on behind.

They lie in the ledger itself, and so in the journal: a mark that was acknowledged survives its producer, the broker and
the node agent. They count as tokens of their group for staleness, end with it, and end when the member is put.
"""

from __future__ import annotations

from collections.abc import Sequence

from relax_rt.transport.queue.ledger.core import Core
from relax_rt.transport.queue.ledger.events import MarkTokens
from relax_rt.transport.queue.ledger.messages import Mark, Marked, SampleKey, VersionSpan
from relax_rt.transport.queue.ledger.state import Group, Held
from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.rpc.identity import Incarnation

TOKEN_BYTES = 4
"""An int32 token id; its log-probability, a float32, has as many."""
MAX_MARKS = 4096
"""Marks of one call."""
FETCHED_BYTES = 4 << 20
"""One answer to `partials` has about so many, and at least one mark."""
IDLE_ISSUES = 3
"""A group that was given out this often without a new mark or member starts from zero: its tokens may be what kills
its producers."""


def mark(core: Core, who: Incarnation, event: MarkTokens) -> Marked:
    """Keep what the caller has sampled since its last mark; tokens from `start` on take the place of those held.

    Answers with the tokens now held of each. Fewer than marked: there is no room, or tokens before `start` are missing.

    Raises:
        Refused: a mark is malformed; nothing of the call was done.
    """
    _check(core, who, event.marks)
    held: list[int] = []
    for one in event.marks:
        group = core.state.groups.get(one.key.group)
        if group is None or group.holder != who or group.issue != one.issue or one.key.member not in group.making:
            core.marks_refused["late"] += 1
            held.append(-1)
            continue
        held.append(_keep(core, group, one))
    return Marked(held)


def _check(core: Core, who: Incarnation, marks: Sequence[Mark]) -> None:
    if len(marks) > MAX_MARKS:
        raise Refused(f"{len(marks)} marks of {who}", why=f"{MAX_MARKS} are allowed at once")
    for one in marks:
        what, count = f"mark of {one.key} by {who}", len(one.tokens) // TOKEN_BYTES
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


def _keep(core: Core, group: Group, one: Mark) -> int:
    sample, limits = group.samples[one.key.member], core.state.limits
    old = sample.mark
    have = old.length if old is not None else 0
    if one.start > have:
        core.marks_refused["with a gap"] += 1
        return have
    if old is not None and one.start and len(one.rows) * TOKEN_BYTES != old.row_bytes * len(one.tokens):
        # Nobody could tell whose rows are whose; from its first token on it would be taken.
        core.marks_refused["of another kind"] += 1
        return have
    new = _joined(old, one)
    grown = new.nbytes - (old.nbytes if old is not None else 0)
    if new.nbytes > limits.mark_bytes or core.state.marks_bytes + grown > limits.marks_bytes:
        core.marks_refused["without room"] += 1
        return have
    if new.length > sample.most:
        sample.most = new.length
        got_on(core, group)
    sample.mark = new
    core.state.marks_bytes += grown
    core.changed = True
    return new.length


def got_on(core: Core, group: Group) -> None:
    """There is more of the group than there ever was."""
    group.idle = 0
    # Where the next loss ends the group, nothing less than all of it is of use.
    if group.prompt is not None and (core.policy.on_failed_member != "drop" or group.complete):
        group.prompt = group.prompt.got_on()


def _joined(old: Held | None, one: Mark) -> Held:
    if old is None or not one.start:
        return Held(one.tokens, one.logprobs, one.versions, one.origin, one.rows)
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
    return Held(
        old.tokens[:at] + one.tokens, old.logprobs[:at] + one.logprobs, kept, one.origin, old.rows[:row] + one.rows
    )


def partials(core: Core, who: Incarnation, keys: Sequence[SampleKey]) -> list[Mark]:
    """What is held of these members, which the caller makes: of the first of them, as much as one answer takes."""
    found: list[Mark] = []
    nbytes = 0
    for key in keys:
        group = core.state.groups.get(key.group)
        if group is None or group.holder != who or key.member not in group.making:
            continue
        held = group.samples[key.member].mark
        if held is None:
            continue
        nbytes += held.nbytes
        if found and nbytes > FETCHED_BYTES:
            break
        found.append(Mark(key, group.issue, 0, held.tokens, held.logprobs, held.spans, held.origin, held.rows))
    return found


def lengths(group: Group) -> dict[int, int]:
    """Tokens held of each member that is to be made, for its ticket."""
    return {n: held.length for n in group.making if (held := group.samples[n].mark) is not None}


def any_held(group: Group) -> bool:
    """Whether something of an unfinished member is kept."""
    return any(sample.mark is not None for sample in group.samples)


def reissued(core: Core, group: Group) -> None:
    """The group is about to be given out again, which must not go on for ever without progress."""
    group.idle += 1
    if group.idle > IDLE_ISSUES and any_held(group):
        core.tally("marks_given_up")
        for member in range(len(group.samples)):
            core.drop_mark(group.samples[member])
    else:
        core.tally("tokens_gone_on_with", sum(lengths(group).values()))
