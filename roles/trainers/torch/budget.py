"""How many tokens a micro-batch may have, and what becomes of that when memory runs out."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

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


class Tried(NamedTuple):
    """A micro-batch: its tokens, and of how many parts it is that can be computed apart."""

    tokens: int
    units: int
    unit: str


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
        self._trying = Tried(0, 0, "nothing")
        if file is not None and file.exists():
            kept = json.loads(file.read_text())
            if kept["configured"] == configured:
                self.tokens = int(kept["tokens"])

    def trying(self, rows: Sequence[Row], *, whole_groups: bool = False) -> int:
        """These rows are computed next; the tokens that this takes, padding included.

        Args:
            whole_groups: the samples of a group cannot be computed apart.
        """
        tokens = len(rows) * max(row.length for row in rows)
        groups = {sample.meta.group for row in rows for _, sample in row.members}
        units = len(groups) if whole_groups else sum(len(row.members) for row in rows)
        self._trying = Tried(tokens, units, "one group" if whole_groups else "one sequence")
        return tokens

    def halve(self, why: str) -> None:
        """What was tried last did not fit: half of it from now on.

        Raises:
            RelaxError: it cannot be divided.
        """
        tokens = self._trying.tokens
        if self._trying.units <= 1:
            raise RelaxError(
                f"a micro-batch of {self._trying.unit} of {tokens} tokens does not fit into memory",
                why=why,
                hint="lower sampling.max_new_tokens or data.max_prompt_tokens, set roles.trainer.lora, or divide the "
                "model over more ranks or machines (roles.trainer.count)",
            )
        before, self.tokens = tokens, max(1, min(self.tokens, tokens) // 2)
        if self._file is not None:
            # Several ranks may write it at the same time.
            partial = self._file.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps({"configured": self.configured, "tokens": self.tokens}))
            partial.rename(self._file)
        self._on_smaller(before, self.tokens, why)
