"""From the completions of a session to the sequences that are trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from relax_rt.roles.agentic.tokens.tree import Said, token_chain
from relax_rt.roles.agentic.tokens.types import Branch, BranchTurn
from relax_rt.roles.engines.base import extend_spans
from relax_rt.roles.media.pictures import Placed, digest_of
from relax_rt.transport.queue.api import VersionSpan


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
            role = said.call.messages[-1]["role"] if said.call.messages else "assistant"
            turns.append(BranchTurn(len(tokens), len(tokens) + len(rendered), role))
        start = len(tokens) + len(rendered)
        trained = said.number in owned
        if sampled:
            turns.append(BranchTurn(start, start + len(sampled), "assistant", said.id, trained, said.number))
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


def _routing(path: Sequence[Said]) -> bytes:
    """Routing rows of all positions but the last.

    Those of sampled tokens are of their own sampling; those of context, of the first completion sampled on it.
    """
    rows = bytearray()
    for said in path:
        what = said.what
        if not what.tokens:
            continue
        width = len(what.routing) // len(what.tokens)
        if not width or len(what.prompt_routing) != (said.call.end - 1) * width:
            return b""
        rows += what.prompt_routing[len(rows) :]
        rows += what.routing
    return bytes(rows)
