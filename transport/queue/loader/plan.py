"""The plan of a step: which rank works on which samples, in which micro-batches. Every rank computes all of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import msgspec

from relax_rt.transport.queue.loader.packing import Oversize, balanced_partition, pack_ranks, partition_groups
from relax_rt.transport.rpc.errors import Refused


class Packing(msgspec.Struct, frozen=True, kw_only=True):
    """How a step is dealt out to the data-parallel ranks and packed into micro-batches.

    Attributes:
        max_tokens: tokens of a micro-batch; or
        size: samples of a micro-batch. With neither, a rank's share is one micro-batch.
        same_count: all ranks get the same number of micro-batches, some of them empty if need be.
        multiple_of: that number is rounded up to a multiple of this.
        equal_counts: ranks get the same number of samples (or groups, with keep_groups), up to one.
        keep_groups: a group goes to one rank, and with max_tokens to one micro-batch.
        keep_order: micro-batches are runs of a rank's samples in the order of the batch, not packed tightly.
        oversize: what becomes of a sample over max_tokens: `refuse`, or `alone` in a micro-batch of its own.
        cost: work that a sample of so many tokens makes, by which ranks are balanced; None: its tokens.
    """

    max_tokens: int = 0
    size: int = 0
    same_count: bool = True
    multiple_of: int = 1
    equal_counts: bool = False
    keep_groups: bool = False
    keep_order: bool = False
    oversize: Oversize = "refuse"
    cost: Callable[[int], int] | None = None

    def check(self) -> None:
        """Raises:
        Refused: it cannot be followed.
        """
        if min(self.max_tokens, self.size) < 0 or self.multiple_of < 1:
            raise Refused(
                "packing of micro-batches",
                why=f"max_tokens {self.max_tokens}, size {self.size} or multiple_of {self.multiple_of} cannot be",
            )
        if self.max_tokens and self.size:
            raise Refused("packing of micro-batches", why="both max_tokens and size are set", hint="choose one")

    def plan(
        self, lengths: Sequence[int], groups: Sequence[Hashable], ranks: int, names: Sequence[object] = ()
    ) -> list[list[list[int]]]:
        """Micro-batches of each data-parallel rank, as indices of the batch's samples.

        Raises:
            Refused: a sample is over max_tokens and is to be refused.
        """
        costs = lengths if self.cost is None else [self.cost(length) for length in lengths]
        if self.keep_groups:
            shares = partition_groups(costs, groups, ranks, equal_counts=self.equal_counts)
        else:
            shares = balanced_partition(costs, ranks, equal_counts=self.equal_counts)
        return pack_ranks(
            shares,
            lengths,
            max_tokens=self.max_tokens,
            size=self.size,
            same_count=self.same_count,
            multiple_of=self.multiple_of,
            keep_order=self.keep_order,
            groups=groups if self.keep_groups else (),
            oversize=self.oversize,
            names=names,
        )
