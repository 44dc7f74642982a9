"""The same picture of the ledger and of its model, to be compared."""

from __future__ import annotations

import itertools
import struct
from collections import Counter
from typing import Any

from ledger_model import Model
from ledger_model_parts import Group as ModelGroup
from ledger_model_parts import Lease as ModelLease

from relax_rt.transport.memory.refs import Extent
from relax_rt.transport.queue.ledger.state import Lease, PartialTokens, SampleGroup, State


def of_ledger(state: State) -> dict[str, Any]:
    table = state.blocks
    live = {(slab, at): one.references for slab, at_ in table.live.items() for at, one in at_.items()}
    return {
        "groups": {id_: _group(state, group) for id_, group in state.groups.items()},
        "trained": {id_: _group(state, group) for id_, group in state.trained.items()},
        "reopened": list(state.reopened),
        "leases": {id_: _lease(lease) for id_, lease in state.leases.items()},
        "pinned": {id_: lease.holder for id_, lease in state.pinned.items()},
        "live": live,
        "payload_bytes": table.payload_bytes,
        "partials_bytes": state.partials_bytes,
        "blobs": {digest: _at(blob.extent) for digest, blob in table.blobs.items()},
        "waiting": {p.index: (p.attempt, p.failures, p.item, p.losses) for p in state.prompts.waiting},
        "prompts": (state.prompts.cursor, sorted(state.prompts.retired), state.prompts.filtered),
        "chosen": state.prompts.chosen,
        "asked": state.surplus_requested,
        "path": {
            step: sorted((r.group, r.prompt.index if r.prompt else -1, r.size, r.skipped) for r in records)
            for step, records in state.path.items()
        },
        "steps": (state.step, state.committed, state.since_update, state.trainer_version, state.blocked_since),
        "issued": state.issued,
        "ended": {name: n for name, n in state.ended.items() if n},
    }


def of_model(model: Model) -> dict[str, Any]:
    references = model.references()
    named = {digest for block in model.blocks() for digest in block.digests}
    return {
        "groups": {id_: _model_group(group) for id_, group in model.groups.items()},
        "trained": {id_: _model_group(group) for id_, group in model.trained.items()},
        "reopened": model.reopened,
        "leases": {id_: _lease(lease) for id_, lease in model.leases.items()},
        "pinned": {id_: lease.holder for id_, lease in model.pinned.items()},
        "live": {_at(extent): n for extent, n in references.items()},
        "payload_bytes": model.payload_bytes(),
        "partials_bytes": model.partials_bytes(),
        "blobs": {digest: _at(extent) for digest, extent in model.homes.items() if digest in named},
        "waiting": model.waiting,
        "prompts": (model.cursor, sorted(model.retired), len(model.filtered)),
        "chosen": model.chosen,
        "asked": model.asked,
        "path": {
            step: sorted((group.id, group.prompt, len(group.alive()), skipped) for group, skipped in records)
            for step, records in model.path.items()
        },
        "steps": (model.step, model.committed, model.since_update, model.trainer, model.blocked),
        "issued": model.issued,
        "ended": {name: n for name, n in Counter(model.ended).items() if n},
    }


def _at(extent: Extent) -> tuple[str, int]:
    return (extent.slab, extent.offset)


def _place(extent: Extent | None) -> tuple[str, int]:
    return _at(extent) if extent is not None else ("", 0)


def _group(state: State, group: SampleGroup) -> tuple[Any, ...]:
    blocks, prompt = state.blocks.blocks, group.prompt
    assert prompt is not None
    samples = [
        None
        if sample.excluded
        else (
            sample.generated,
            sorted(sample.done),
            sorted(sample.leases.items()),
            sample.deaths,
            [span.version for span in sample.spans],
            sorted((_place(blocks[part.block].ref.extent), part.row, part.task, part.version) for part in sample.parts),
            _held(sample.partial),
            sample.longest_partial,
        )
        for sample in group.samples
    ]
    place = (prompt.index, prompt.attempt, prompt.failures, prompt.item, prompt.losses)
    return (*place, group.issue, group.idle, group.recycled, group.holder, sorted(group.making), group.lease, samples)


def _model_group(group: ModelGroup) -> tuple[Any, ...]:
    samples = [
        None
        if sample.excluded
        else (
            sample.made,
            sorted(sample.done),
            sorted(sample.leases.items()),
            sample.deaths,
            sample.versions,
            sorted((_place(part.block.extent), part.row, part.task, part.version) for part in sample.parts),
            sample.partial,
            sample.longest_partial,
        )
        for sample in group.samples
    ]
    place = (group.prompt, group.attempt, group.failures, group.item, group.losses)
    return (*place, group.issue, group.idle, group.recycled, group.holder, sorted(group.making), group.lease, samples)


def _held(mark: PartialTokens | None) -> list[tuple[int, int]]:
    """Tokens, each with its version."""
    if mark is None:
        return []
    tokens = struct.unpack(f"<{mark.length}i", mark.tokens)
    assert struct.unpack(f"<{mark.length}f", mark.logprobs) == tuple(float(-token) for token in tokens)
    versions = [span.version for span in mark.spans for _ in range(span.start, span.end)]
    assert all(a.end == b.start for a, b in itertools.pairwise(mark.spans)) and mark.spans[0].start == 0
    return list(zip(tokens, versions, strict=True))


def _lease(lease: Lease | ModelLease) -> tuple[Any, ...]:
    return (lease.task, lease.keys, lease.holder, {_at(extent) for extent in lease.pins})
