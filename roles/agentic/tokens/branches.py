"""Turn the completions of a session into the sequences that are trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from relax_rt.roles.agentic.tokens.messages import ASSISTANT
from relax_rt.roles.agentic.tokens.tree import CallNode, CompletionNode, completion_path, token_path
from relax_rt.roles.agentic.tokens.types import CONTEXT, Branch, BranchTurn, Message, Sampled
from relax_rt.roles.data.media.pictures import ImageRef, digest_of
from relax_rt.roles.rollout.engines.base import extend_spans
from relax_rt.transport.queue.ledger.messages import VersionSpan


def branches_of(completion: Sequence[CompletionNode]) -> Iterator[Branch]:
    """Yield a branch up to each trained completion that no other continues; a shared one is trained in the first."""
    counted = [one for one in completion if one.trained and one.sampled.tokens]
    inner = {before.number for one in counted for before in token_path(one.call.base)}
    owned: set[int] = set()
    for last in counted:
        if last.number not in inner:
            path = token_path(last)
            yield _branch(path, {one.number for one in path if one.trained} - owned)
            owned |= {one.number for one in path}


def _branch(path: Sequence[CompletionNode], owned: set[int]) -> Branch:
    tokens: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    versions: list[VersionSpan] = []
    turns: list[BranchTurn] = []
    media: list[ImageRef] = []
    for completion in path:
        rendered, sampled = completion.call.tokens, completion.sampled.tokens
        begun = len(tokens)
        media += (ImageRef(one.start + begun, one.end + begun, digest_of(one.data)) for one in completion.call.media)
        if rendered:
            messages = (*_before(completion.call), *completion.call.messages)
            # A call without messages asks for another reply after the last one.
            last = messages[-1]["role"] if messages else ASSISTANT
            role = CONTEXT if last == ASSISTANT else last
            turns.append(BranchTurn(len(tokens), len(tokens) + len(rendered), role, messages=messages))
        start = len(tokens) + len(rendered)
        trained = completion.number in owned
        if sampled:
            role = ASSISTANT if trained else CONTEXT
            turns.append(BranchTurn(start, start + len(sampled), role, completion.id, trained))
        tokens += [*rendered, *sampled]
        mask += [0] * len(rendered) + [int(trained)] * len(sampled)
        logprobs += [0.0] * len(rendered) + (list(completion.sampled.logprobs) if trained else [0.0] * len(sampled))
        for span in completion.sampled.versions if trained else ():
            extend_spans(versions, VersionSpan(span.start + start, span.end + start, span.version, span.kv_version))
    return Branch(
        tokens=tuple(tokens),
        loss_mask=tuple(mask),
        logprobs=tuple(logprobs),
        versions=tuple(versions),
        turns=tuple(turns),
        finish_reason=path[-1].sampled.finish_reason,
        routing=_routing(path),
        media=tuple(media),
    )


def _before(call: CallNode) -> Iterator[Message]:
    """Yield the earlier messages that were rendered with a call: the whole conversation, if the call does not continue
    the tokens of a completion."""
    for completion in completion_path(call.above if call.base is None else None):
        yield from (*completion.call.messages, completion.message)


def with_new_routing(call: CallNode, what: Sampled) -> tuple[Sampled, int]:
    """Strip a completion's routing rows to positions that have none yet, so that an episode has one row a token,
    however many turns it has.

    Returns:
        The completion, and the number of leading positions that have rows then.
    """
    count = len(what.tokens)
    if not count:
        return msgspec.structs.replace(what, routing=b"", prompt_routing=b""), call.rows
    width = len(what.routing) // count
    first = call.end - 1 - len(what.prompt_routing) // width if width else -1
    if not 0 <= first <= call.rows or len(what.prompt_routing) % width:
        # Rows after a gap cannot be used.
        return msgspec.structs.replace(what, routing=b"", prompt_routing=b""), 0
    new = what.prompt_routing[(call.rows - first) * width :]
    return msgspec.structs.replace(what, prompt_routing=new), call.end - 1 + count


def _routing(path: Sequence[CompletionNode]) -> bytes:
    """Return the routing rows of all positions but the last.

    Rows of sampled tokens were recorded when they were sampled; those of context with the first completion after it.
    """
    if path[-1].rows < path[-1].end - 1:
        return b""
    parts: list[bytes] = []
    for completion in path:
        if not completion.rows:
            # The rows that follow start with the first position again.
            parts.clear()
        parts += [completion.sampled.prompt_routing, completion.sampled.routing]
    return b"".join(parts)
