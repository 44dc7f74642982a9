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
"""Tokens between two parts of a sequence with rows that nobody looks at while it is made: SGLang tells rows at a
segment's end alone, so that each part is a segment of its own there."""
HINT = "leave roles.rollout.routing out, or train a mixture of experts of the Qwen3-MoE family"


class RoutingShape(msgspec.Struct, frozen=True):
    """What a model's rows look like.

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
        """Rows that are told in bytes, one part behind the other, as int16 [rows, layers, k]."""
        return np.frombuffer(b"".join(parts), "<i2").astype(np.int16).reshape(-1, self.layers, self.chosen)


class Rows:
    """Routing rows of one member in an engine.

    Args:
        had: rows of the tokens of its partial.
    """

    __slots__ = ("_prompt", "_size", "_tokens")

    def __init__(self, shape: RoutingShape, had: bytes = b"") -> None:
        self._size = shape.row_bytes
        self._tokens = bytearray(had)
        self._prompt = b""

    def __len__(self) -> int:
        """Tokens that have their row."""
        return len(self._tokens) // self._size

    def set_prompt(self, rows: bytes) -> None:
        """Set the rows of the positions before the prompt's last."""
        self._prompt = rows

    def extend(self, rows: bytes) -> None:
        """Append the rows of the next tokens."""
        self._tokens += rows

    def of(self, start: int, end: int) -> bytes:
        """Rows of these tokens."""
        return bytes(self._tokens[start * self._size : end * self._size])

    def take_prompt(self) -> bytes:
        """Rows of the prompt, once."""
        rows, self._prompt = self._prompt, b""
        return rows


def settled(experts: NDArray[Any], without: Sequence[int]) -> NDArray[np.int16]:
    """Experts as a model chose them, [..., layers, k] of any integers in any order, as rows.

    Args:
        without: layers that have no experts.
    """
    # Which of them weighs most is the gate's own affair, and not told by every engine.
    rows: NDArray[np.int16] = np.sort(experts.astype(np.int16), axis=-1)
    rows[..., list(without), :] = NO_EXPERT
    return rows


def told(rows: NDArray[np.int16]) -> bytes:
    """Rows in bytes, little-endian."""
    return rows.astype("<i2", copy=False).tobytes()


def sparse_layers(folder: Path) -> tuple[RoutingShape, tuple[bool, ...]]:
    """Shape of a model's rows by its config.json, and which of its layers have experts.

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
