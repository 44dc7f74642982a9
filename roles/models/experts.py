"""Names of expert matrices: one by one in released models, one stacked tensor a layer in transformers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

_STACKED = re.compile(r"(.*\.experts\.)(gate_up_proj|down_proj)")
_RELEASED = ["mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"]
"""Released weights that transformers stacks into one `gate_up_proj`."""


class ExpertStack(NamedTuple):
    """A tensor [experts, pieces x rows, columns] of the matrices of a layer's experts.

    Attributes:
        prefix: of their names. pieces: of each expert, in the order of their rows.
    """

    prefix: str
    pieces: tuple[str, ...]
    experts: int
    rows: int
    columns: int

    @classmethod
    def of(cls, name: str, shape: Sequence[int]) -> ExpertStack | None:
        """Return the stack that a tensor of this name in transformers is; None if it is not one."""
        match = _STACKED.fullmatch(name)
        if match is None or len(shape) != 3:
            return None
        pieces = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else ("down_proj",)
        experts, rows, columns = shape
        return cls(match[1], pieces, experts, rows // len(pieces), columns)

    def names(self, first: int = 0, experts: int | None = None) -> Iterator[str]:
        """Yield the names of each expert's matrices [rows, columns], in their order in the tensor.

        Args:
            first, experts: those of so many experts from this one on; unless given, of all.
        """
        for expert in range(first, self.experts if experts is None else first + experts):
            for piece in self.pieces:
                yield f"{self.prefix}{expert}.{piece}.weight"


def released_one_by_one(config: Any) -> bool:
    """Return whether released models of this kind have each expert's matrices under names of their own, as
    `Stack.names`.

    Args:
        config: of transformers, of the whole model.
    """
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    known = get_checkpoint_conversion_mapping(config.model_type) or ()
    return any(getattr(one, "source_patterns", None) == _RELEASED for one in known)
