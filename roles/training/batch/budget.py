"""The token budget of micro-batches, and how work is retried with a smaller one when memory runs out."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, NamedTuple, TypeVar

import msgspec
import torch

from relax_rt.roles.models.device import CPU, empty_cache, out_of_memory
from relax_rt.transport.rpc.errors import GivenUp, RelaxError

if TYPE_CHECKING:
    from relax_rt.interfaces.role import RoleContext
    from relax_rt.roles.training.batch.rows import SampleRow

T = TypeVar("T")
P = TypeVar("P")

SHORTER = "lower sampling.max_new_tokens or data.max_prompt_tokens"


class MicroBatchAttempt(NamedTuple):
    """A micro-batch: its tokens, and the number of units that can be computed separately."""

    tokens: int
    units: int
    unit: str


class _SavedBudget(msgspec.Struct, frozen=True):
    configured: int
    tokens: Annotated[int, msgspec.Meta(ge=1)]


def _read(file: Path) -> _SavedBudget | None:
    """Read the saved budget; None if the file is missing or torn (the host went down): it is learnt again."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=_SavedBudget)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


class TokenBudget:
    """Tokens of a micro-batch: as configured, or fewer once one did not fit.

    Args:
        configured: `tokens_per_micro_batch` of the role.
        file: keeps the smaller number for later processes; another setting voids it.
        on_smaller: called with the tokens that did not fit, the tokens from now on, and why.
        remedy: what to do when one sequence does not fit.
    """

    def __init__(
        self,
        configured: int,
        file: Path | None = None,
        on_smaller: Callable[[int, int, str], None] = lambda *_: None,
        remedy: str = SHORTER,
    ) -> None:
        self.configured, self.tokens = configured, configured
        self._file, self._on_smaller, self._remedy = file, on_smaller, remedy
        self._trying = MicroBatchAttempt(0, 0, "nothing")
        kept = _read(file) if file is not None else None
        if kept is not None and kept.configured == configured:
            self.tokens = kept.tokens

    @classmethod
    def of(cls, ctx: RoleContext, configured: int, remedy: str = "") -> TokenBudget:
        """Make the budget of a role: saved in the run's folder for all slots of the role; an event reports each
        reduction.

        Args:
            remedy: what to do, besides shorter sequences, when one does not fit.
        """
        role = ctx.who.slot.partition("/")[0]

        def smaller(before: int, after: int, why: str) -> None:
            ctx.event("micro_batch_halved", tokens=before, from_now_on=after, why=why)

        file = ctx.run_dir / f"micro_batch_{role}.json"
        return cls(configured, file, smaller, f"{SHORTER}, or {remedy}" if remedy else SHORTER)

    def attempting(self, rows: Sequence[SampleRow], tokens: int, *, whole_groups: bool = False) -> None:
        """Note the rows that are computed next.

        Args:
            tokens: that this takes, padding included. whole_groups: the samples of a group cannot be computed apart.
        """
        # The branches of one sample are members of a row, and stay together.
        units = {sample.meta.group if whole_groups else index for row in rows for index, sample in row.members}
        self.attempting_units(tokens, len(units), whole_groups=whole_groups)

    def attempting_units(self, tokens: int, units: int, *, whole_groups: bool = False) -> None:
        """Note how many tokens are computed next, and how many sequences or groups can be computed separately."""
        self._trying = MicroBatchAttempt(tokens, units, "one group" if whole_groups else "one sequence")

    def agree(self, gather: Callable[[int], list[int]]) -> None:
        """Take the smallest budget of all ranks: ranks that compute one micro-batch together must divide the batch
        alike.

        Args:
            gather: gives the value of each rank.
        """
        self.tokens = min(gather(self.tokens))

    def halve(self, why: str) -> None:
        """Halve the budget: the last attempt did not fit.

        Raises:
            GivenUp: it cannot be divided.
        """
        tokens = self._trying.tokens
        if self._trying.units <= 1:
            raise GivenUp(
                f"a micro-batch of {self._trying.unit} of {tokens} tokens does not fit into memory",
                why=why,
                hint=self._remedy,
            )
        before, self.tokens = tokens, max(1, min(self.tokens, tokens) // 2)
        if self._file is not None:
            # Several ranks, or slots of a pool, may write it at the same time.
            partial = self._file.with_suffix(f".{os.getpid()}")
            partial.write_bytes(msgspec.json.encode(_SavedBudget(self.configured, self.tokens)))
            partial.rename(self._file)
        self._on_smaller(before, self.tokens, why)


class MemoryRetry:
    """Runs work in micro-batches, and retries it with smaller ones each time that memory runs out.

    Args:
        device: its unused cached memory is freed before a retry.
        rank: e.g. "rank 1 of the trainer", if other ranks take part in each pass: they cannot leave one halfway. Empty:
            no other process waits for this one in a pass.

    Attributes:
        halved: how often it was, since `taken`.
    """

    def __init__(self, budget: TokenBudget, device: torch.device = CPU, *, rank: str = "") -> None:
        self.budget, self._device, self._rank = budget, device, rank
        self._halved = 0

    def __call__(self, work: Callable[[], T]) -> T:
        """Do the work; partial results of a failed try must not count.

        Raises:
            GivenUp: micro-batches cannot be smaller.
            RelaxError: this is one rank of several: the gang has to begin again, with what it has learnt of its memory.
        """
        while True:
            try:
                return work()
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
                why = (str(error) or type(error).__name__).splitlines()[0]
            # Only here, outside the except block, are the frames gone that held the tensors of the pass.
            self.budget.halve(why)
            empty_cache(self._device)
            if self._rank:
                raise RelaxError(
                    f"memory ran out on {self._rank}",
                    why=why,
                    hint=f"begun again, it makes micro-batches of {self.budget.tokens} tokens",
                )
            self._halved += 1

    def taken(self) -> dict[str, float]:
        """Return for the step's record how often micro-batches were halved since the last call, if they were."""
        halved, self._halved = self._halved, 0
        return {"micro_batches_halved": float(halved)} if halved else {}


class GradientAccumulation(Generic[P]):
    """Accumulates the gradients of a step part by part; if memory runs out in one, all are computed anew.

    A pass that failed may have left half of its gradients in those of the passes before.

    Args:
        begin: clears gradients and metrics. add: adds those of a part.
    """

    def __init__(self, fitting: MemoryRetry, begin: Callable[[], Any], add: Callable[[P], Any]) -> None:
        self._fitting, self._begin, self._add = fitting, begin, add
        self._parts: list[P] = []

    def __call__(self, part: P) -> None:
        """Add a part; the first one after `forget` begins the step. See `MemoryRetry` for what is raised."""
        first = len(self._parts)
        self._parts.append(part)

        def work() -> None:
            nonlocal first
            begin, first = first, 0
            if begin == 0:
                self._begin()
            for one in self._parts[begin:]:
                self._add(one)

        self._fitting(work)

    def forget(self) -> None:
        """End or discard the step: the next part begins another one."""
        self._parts = []
