"""From the completions of a session to the sequences that are trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from relax_rt.roles.agentic.tokens.messages import ASSISTANT
from relax_rt.roles.agentic.tokens.tree import Call, Said, chain, token_chain
from relax_rt.roles.agentic.tokens.types import CONTEXT, Branch, BranchTurn, Message, Sampled
from relax_rt.roles.data.media.pictures import Placed, digest_of
from relax_rt.roles.rollout.engines.base import extend_spans
from relax_rt.transport.queue.ledger.messages import VersionSpan


def branches_of(said: Sequence[Said]) -> Iterator[Branch]:
    """A branch up to each trained completion that no other goes on behind; a shared one is trained in the first."""
    counted = [one for one in said if one.trained and one.what.tokens]
    inner = {before.number for one in counted for before in token_chain(one.call.base)}
    owned: set[int] = set()
    for last in counted:
        if last.number not in inner:
            path = token_chain(last)
            yield _branch(path, {one.number for one in path if one.trained} - owned)
            owned |= {one.number for one in path}


def _branch(path: Sequence[Said], owned: set[int]) -> Branch:
    tokens: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    versions: list[VersionSpan] = []
    turns: list[BranchTurn] = []
    media: list[Placed] = []
    for said in path:
        rendered, sampled = said.call.tokens, said.what.tokens
        begun = len(tokens)
        media += (Placed(one.start + begun, one.end + begun, digest_of(one.data)) for one in said.call.media)
        if rendered:
            messages = (*_before(said.call), *said.call.messages)
            # Without any it asks for another reply behind the last one.
            last = messages[-1]["role"] if messages else ASSISTANT
            role = CONTEXT if last == ASSISTANT else last
            turns.append(BranchTurn(len(tokens), len(tokens) + len(rendered), role, messages=messages))
        start = len(tokens) + len(rendered)
        trained = said.number in owned
        if sampled:
            role = ASSISTANT if trained else CONTEXT
            turns.append(BranchTurn(start, start + len(sampled), role, said.id, trained))
        tokens += [*rendered, *sampled]
        mask += [0] * len(rendered) + [int(trained)] * len(sampled)
        logprobs += [0.0] * len(rendered) + (list(said.what.logprobs) if trained else [0.0] * len(sampled))
        for span in said.what.versions if trained else ():
            extend_spans(versions, VersionSpan(span.start + start, span.end + start, span.version, span.kv_version))
    return Branch(
        tokens=tuple(tokens),
        loss_mask=tuple(mask),
        logprobs=tuple(logprobs),
        versions=tuple(versions),
        turns=tuple(turns),
        finish_reason=path[-1].what.finish_reason,
        routing=_routing(path),
        media=tuple(media),
    )


def _before(call: Call) -> Iterator[Message]:
    """The messages before those of a call that were rendered with it: the whole conversation, where it does not go on
    behind the tokens of what it answers."""
    for said in chain(call.above if call.base is None else None):
        yield from (*said.call.messages, said.message)


def with_new_rows(call: Call, what: Sampled) -> tuple[Sampled, int]:
    """A completion of a call as it is kept: of routing rows only those of positions that have none yet, so that an
    episode's rows are as many as its tokens, however many turns it has.

    Returns:
        With how many positions, from the first on, then have theirs.
    """
    count = len(what.tokens)
    if not count:
        return msgspec.structs.replace(what, routing=b"", prompt_routing=b""), call.rows
    width = len(what.routing) // count
    first = call.end - 1 - len(what.prompt_routing) // width if width else -1
    if not 0 <= first <= call.rows or len(what.prompt_routing) % width:
        # Rows with a gap before them are of no use.
        return msgspec.structs.replace(what, routing=b"", prompt_routing=b""), 0
    new = what.prompt_routing[(call.rows - first) * width :]
    return msgspec.structs.replace(what, prompt_routing=new), call.end - 1 + count


def _routing(path: Sequence[Said]) -> bytes:
    """Routing rows of all positions but the last.

    Those of sampled tokens are of their own sampling; those of context, of the first completion sampled on it.
    """
    if path[-1].rows < path[-1].end - 1:
        return b""
    parts: list[bytes] = []
    for said in path:
        if not said.rows:
            # Whatever follows has begun with the first position again.
            parts.clear()
        parts += [said.what.prompt_routing, said.what.routing]
    return b"".join(parts)
