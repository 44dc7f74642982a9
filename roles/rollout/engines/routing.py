"""Routing rows: the experts that tokens of a mixture of experts were sent to.

A row belongs to a position: the experts of each layer that the token there was sent to, int16 [layers, k] in ascending
order, -1 in a layer without experts. T tokens have T - 1 rows, because the newest was not sent anywhere yet.

The row of position i is that of the pass from which token i + 1 was sampled, and stays so: where keys and values are
computed again, at a swap or in another engine, tokens keep their rows. Positions before the prompt's last, from which
nothing was sampled, have the rows of the pass that computed the prompt for the member's first token in this engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from relax_rt.roles.models.shape import read_shape
from relax_rt.transport.rpc.errors import Refused, RelaxError

NO_EXPERT = -1
"""In a layer that has no experts."""
MAX_EXPERTS = 1 << 15
PART_TOKENS = 64
"""Tokens between two parts of a sequence with rows whose tokens nobody streams. SGLang reports rows at the end of a
segment only, so that each part is a segment of its own there."""
HINT = "leave roles.rollout.routing out, or train a mixture of experts of the Qwen3-MoE family"


class RoutingShape(msgspec.Struct, frozen=True):
    """Shape of a model's rows.

    Attributes:
        layers: of the model, those without experts among them.
        chosen: experts of a token in a layer.
    """

    layers: int
    chosen: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's row."""
        return 2 * self.layers * self.chosen

    def rows(self, *parts: bytes | bytearray) -> NDArray[np.int16]:
        """Decode rows, given as consecutive parts in bytes, to int16 [rows, layers, k]."""
        return np.frombuffer(b"".join(parts), "<i2").astype(np.int16).reshape(-1, self.layers, self.chosen)


class RowBuffer:
    """Routing rows of one member in an engine, as bytes.

    Args:
        rows: of the tokens of its partial.
    """

    __slots__ = ("_prompt", "_row_bytes", "_tokens")

    def __init__(self, shape: RoutingShape, rows: bytes = b"") -> None:
        self._row_bytes = shape.row_bytes
        self._tokens = bytearray(rows)
        self._prompt = b""

    def __len__(self) -> int:
        """Number of tokens that have their row."""
        return len(self._tokens) // self._row_bytes

    def set_prompt(self, rows: bytes) -> None:
        """Set the rows of the positions before the prompt's last."""
        self._prompt = rows

    def extend(self, rows: bytes) -> None:
        """Append the rows of the next tokens."""
        self._tokens += rows

    def get(self, start: int, end: int) -> bytes:
        """Return the rows of these tokens."""
        return bytes(self._tokens[start * self._row_bytes : end * self._row_bytes])

    def take_prompt(self) -> bytes:
        """Return the prompt's rows, once."""
        rows, self._prompt = self._prompt, b""
        return rows


def canonical_rows(experts: NDArray[Any], dense: Sequence[int]) -> NDArray[np.int16]:
    """Convert the experts that a model chose, [..., layers, k] of any integers in any order, to rows.

    Args:
        dense: layers that have no experts.
    """
    # Sorted, because not every engine reports which of them has the greatest weight.
    rows: NDArray[np.int16] = np.sort(experts.astype(np.int16), axis=-1)
    rows[..., list(dense), :] = NO_EXPERT
    return rows


def encode_rows(rows: NDArray[np.int16]) -> bytes:
    """Return rows as bytes, little-endian."""
    return rows.astype("<i2", copy=False).tobytes()


def sparse_layers(folder: Path) -> tuple[RoutingShape, tuple[bool, ...]]:
    """Return the shape of a model's rows, and which of its layers have experts, from its config.json.

    Raises:
        Refused: it has none, or how it routes is not known.
    """
    what = f"routing rows of the model in {folder}"
    try:
        shape = read_shape(folder)
    except RelaxError as error:
        why = f"how it routes is not known: {error.what}" + (f": {error.why}" if error.why else "")
        raise Refused(what, why=why, hint=HINT) from error
    if not any(shape.sparse):
        raise Refused(what, why="it is dense: none of its layers has experts that tokens are sent to", hint=HINT)
    if shape.experts > MAX_EXPERTS:
        raise Refused(what, why=f"its {shape.experts} experts have no numbers of 16 bits", hint=HINT)
    return RoutingShape(len(shape.sparse), shape.experts_per_token), shape.sparse
