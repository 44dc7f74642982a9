"""How parts of the weights come from the ranks of a gang to rank 0.

For a publication every rank copies its part aside; from then on the weights may change. The copies then cross over a
process group that nothing else uses, on a thread of its own, so that they meet no collective of the next step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist

from relax_rt.roles.models.device import CPU
from relax_rt.transport.errors import RelaxError, Unreachable

T = TypeVar("T")

GATHER_S = 300.0
"""For one message, the other rank's copy aside included: after that the rank is taken for hung."""


def gathered(value: T, group: dist.ProcessGroup) -> list[T]:
    """A small plain value of each rank of a group, by rank, on all of them."""
    data = msgspec.msgpack.encode(value)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([len(data)]), group=group)
    longest = max(int(size) for size in sizes)
    mine = torch.zeros(longest, dtype=torch.uint8)
    mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    found = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(found, mine, group=group)
    return [
        msgspec.msgpack.decode(bytes(part[: int(size)].numpy()), type=type(value))
        for part, size in zip(found, sizes, strict=True)
    ]


class Channel:
    """From every rank of a group to rank 0, whose calls match theirs one by one. One thread of a rank uses it at a
    time.

    Args:
        group: gloo, over ordinary memory. Its timeout bounds each message.
        device: where this rank's weights are.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device = CPU) -> None:
        self.group, self.rank, self.world, self._device = group, group.rank(), group.size(), device
        self._memory = torch.empty(0, dtype=torch.uint8)

    @classmethod
    def beside_training(cls, device: torch.device, timeout_s: float = GATHER_S) -> Channel:
        """One over a group of all ranks that is made for it; all make it at the same time."""
        return cls(dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)), device)

    def memory(self, nbytes: int) -> torch.Tensor:
        """Where this rank's part is kept, uint8 [nbytes]; the same each time: fresh pages cost more than the copy."""
        if self._memory.numel() != nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8)
        return self._memory

    @contextmanager
    def copying(self, copied: Callable[[], None]) -> Iterator[None]:
        """Around a rank's copy of its part. All ranks leave it together.

        Args:
            copied: called when this rank's copy is made, or has failed.

        Raises:
            Exception: what this rank's copy raised. RelaxError: another rank's failed. Unreachable: one is gone.
        """
        failed: Exception | None = None
        try:
            with _own_stream(self._device):
                yield
        except Exception as error:  # noqa: BLE001 - the others are told before it is raised
            failed = error
        copied()
        with self._talk("whether all ranks have copied their weights aside"):
            told = gathered(f"{type(failed).__name__}: {failed}" if failed is not None else "", self.group)
        if failed is not None:
            raise failed
        for rank, why in enumerate(told):
            if why:
                raise RelaxError(f"rank {rank} could not copy its weights aside", why=why)

    def send(self, part: torch.Tensor, what: str) -> None:
        """To rank 0; uint8, contiguous, in ordinary memory.

        Raises:
            Unreachable: rank 0 is gone, or does not take it in time.
        """
        with self._talk(f"sending {what} to rank 0"):
            dist.send(part, 0, group=self.group)

    def receive(self, into: torch.Tensor, rank: int, what: str) -> None:
        """On rank 0, what a rank sends.

        Raises:
            Unreachable: the rank is gone, or does not send it in time.
        """
        with self._talk(f"{what} from rank {rank}"):
            dist.recv(into, rank, group=self.group)

    def whole(self, rows: torch.Tensor, each: int) -> torch.Tensor:
        """The rows of all ranks, one after the other, on each of them, in ordinary memory; all call it.

        Args:
            rows: this rank's, [at most each, ...].
        """
        mine = torch.zeros((each, *rows.shape[1:]), dtype=rows.dtype)
        mine[: len(rows)] = rows.detach()
        found = [torch.empty_like(mine) for _ in range(self.world)]
        with self._talk("rows of all ranks"):
            dist.all_gather(found, mine, group=self.group)
        return torch.cat(found)

    @contextmanager
    def _talk(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # gloo has one kind for a peer that is gone and for one that is late
            hint = "the trainer's gang begins again at its last checkpoint; was a rank killed, or did it hang?"
            raise Unreachable(f"the weights of the gang: {what}", why=_said(error), hint=hint) from error


def _said(error: RuntimeError) -> str:
    """What gloo says, without the place in its source before it and the advice on reading logs behind it."""
    return re.sub(r"^\[/\S+\] ", "", str(error)).partition(". ")[0]


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """On a GPU, copies within this wait for what was begun before them and hold up nothing that is begun after."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.default_stream(device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
