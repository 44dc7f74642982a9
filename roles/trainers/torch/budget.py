"""How many tokens a micro-batch may have, and what becomes of that when memory runs out."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from relax_rt.roles.trainers.packing import Row
from relax_rt.transport.errors import RelaxError

SIGNS = ("can't allocate memory", "not enough memory", "bad_alloc", "out of memory")
"""In the messages of what torch raises on a CPU."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be had."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)


class Budget:
    """Tokens of a micro-batch: as configured, or fewer from the moment on that one did not fit.

    Args:
        configured: roles.trainer.tokens_per_micro_batch.
        file: where the smaller number is kept for those that come after this process; another setting voids it.
        on_smaller: told the tokens that did not fit, the tokens from now on, and why.
    """

    def __init__(
        self, configured: int, file: Path | None = None, on_smaller: Callable[[int, int, str], None] = lambda *_: None
    ) -> None:
        self.configured, self.tokens = configured, configured
        self._file, self._on_smaller = file, on_smaller
        self._trying: tuple[int, int] = (0, 0)
        if file is not None and file.exists():
            kept = json.loads(file.read_text())
            if kept["configured"] == configured:
                self.tokens = int(kept["tokens"])

    def trying(self, rows: Sequence[Row]) -> int:
        """These rows are computed next; the tokens that this takes, padding included."""
        tokens = len(rows) * max(row.length for row in rows)
        self._trying = (tokens, sum(len(row.members) for row in rows))
        return tokens

    def halve(self, why: str, *, divisible: bool = True) -> None:
        """What was tried last did not fit: half of it from now on.

        Args:
            divisible: the budget decides what a micro-batch has.

        Raises:
            RelaxError: it was one sequence, or cannot be divided.
        """
        tokens, sequences = self._trying
        if sequences <= 1 or not divisible:
            what = "one sequence" if sequences <= 1 else "a group, which the loss compares,"
            raise RelaxError(
                f"a micro-batch of {what} of {tokens} tokens does not fit into memory",
                why=why,
                hint="lower sampling.max_new_tokens or data.max_prompt_tokens, set roles.trainer.lora, or divide the "
                "model over more ranks or machines (roles.trainer.count)",
            )
        before, self.tokens = tokens, max(1, min(self.tokens, tokens) // 2)
        if self._file is not None:
            partial = self._file.with_suffix(".partial")
            partial.write_text(json.dumps({"configured": self.configured, "tokens": self.tokens}))
            partial.rename(self._file)
        self._on_smaller(before, self.tokens, why)
