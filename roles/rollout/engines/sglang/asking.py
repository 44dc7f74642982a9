"""What the server is asked for, and the routing rows that it answers with."""

from __future__ import annotations

import asyncio
import binascii
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_rt.roles.rollout.engines.base import GroupRequest
from relax_rt.roles.rollout.engines.routing import settled, sparse_layers
from relax_rt.roles.rollout.engines.sglang.client import LARGE_BYTES, MAX_EVENT_BYTES, Meta
from relax_rt.roles.rollout.engines.sglang.hashing import finished
from relax_rt.roles.rollout.engines.sglang.members import Batch, Member
from relax_rt.transport.rpc.errors import ProtocolError, Refused

PROGRESS_TOKENS = 16
"""A segment is heard of at least every so many tokens: health is judged by them."""
PIECE = 1 << 20
"""Characters of base64 that are decoded at a time, which nothing else of the process runs beside; a multiple of 4."""


def server_seed(seed: int) -> int:
    """The 63 bits that the server takes, made of all 64: seeds of two domains must not meet for want of the highest."""
    return finished(seed) >> 1


def body_of(batch: Batch, *, seeded: bool) -> dict[str, Any]:
    """The call that samples a segment of each member.

    Args:
        seeded: each by its own seed.
    """
    members = list(batch.members.values())
    first = members[0].request
    every = min(first.chunk_tokens or PROGRESS_TOKENS, PROGRESS_TOKENS)
    body: dict[str, Any] = {
        "rid": [member.rid for member in members],
        "input_ids": [[*first.prompt, *member.tokens] for member in members],
        "sampling_params": [_sampling(member, every, seeded) for member in members],
        "extra_key": [f"v{member.salt}" for member in members],
        "return_logprob": True,
        "stream": True,
    }
    if first.routing:
        # It takes one start for all of them.
        body |= {"return_routed_experts": True, "routed_experts_start_len": batch.rows_from}
    return body


def _sampling(member: Member, every: int, seeded: bool) -> dict[str, Any]:
    request = member.request
    params: dict[str, Any] = {
        "temperature": request.temperature,
        "max_new_tokens": member.asked,
        "stop_token_ids": sorted(request.stop_ids),
        # It would make the server overlook stop ids, too.
        "ignore_eos": not request.stop_ids,
        "stream_interval": every,
    }
    if seeded:
        params["sampling_seed"] = server_seed(request.seeds[member.index])
    return params


class RowReader:
    """Routing rows of one model as the server tells them: int32 in base64, for all layers, at the end of a segment.

    Raises:
        Refused: the model has none. A server that was asked to keep them would not start.
    """

    def __init__(self, folder: Path) -> None:
        self.shape, sparse = sparse_layers(folder)
        self._without = [layer for layer, has in enumerate(sparse) if not has]

    def check(self, request: GroupRequest) -> None:
        """Refuse a sequence whose rows one answer might not hold.

        Raises:
            Refused: with how many it holds.
        """
        most = MAX_EVENT_BYTES * 3 // (8 * self.shape.row_bytes)
        need = len(request.prompt) - request.rows_from + request.max_new_tokens
        if request.routing and need > most:
            raise Refused(
                f"request {request.id}: routing rows of {need} tokens",
                why=f"an answer of the SGLang server is read up to {MAX_EVENT_BYTES >> 20} MiB, the rows of {most}",
                hint="lower sampling.max_new_tokens or data.max_prompt_tokens, or leave roles.rollout.routing out",
            )

    async def told_by(self, meta: Meta) -> NDArray[np.int16] | None:
        """Rows that came with an event; None: it has none. Many are read off the event loop.

        Raises:
            ProtocolError: see read.
        """
        string = memoryview(meta.routed_experts)
        if bytes(string[:1]) != b'"' or len(string) == 2:  # null is none either
            return None
        text = string[1:-1]
        return await asyncio.to_thread(self.read, text) if len(text) > LARGE_BYTES else self.read(text)

    def read(self, text: memoryview) -> NDArray[np.int16]:
        """Rows [positions, layers, k], of base64.

        Raises:
            ProtocolError: they are not of this model.
        """
        try:
            values = np.frombuffer(_of_base64(text), "<i4")
            return settled(values.reshape(-1, self.shape.layers, self.shape.chosen), self._without)
        except (binascii.Error, ValueError) as error:
            what = f"routing rows of the SGLang server, {len(text)} characters"
            why = f"they are not of {self.shape.layers} layers and {self.shape.chosen} experts each: {error}"
            raise ProtocolError(what, why=why) from error


def _of_base64(text: memoryview) -> bytes:
    pieces = [binascii.a2b_base64(text[at : at + PIECE], strict_mode=True) for at in range(0, len(text), PIECE)]
    if any(len(piece) < PIECE // 4 * 3 for piece in pieces[:-1]):
        raise ValueError("it is padded before its end")
    return b"".join(pieces)
