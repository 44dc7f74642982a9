"""Brings each rank's part of the weights to rank 0.

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
from relax_rt.transport.rpc.errors import RelaxError, Unreachable

T = TypeVar("T")

GATHER_S = 300.0
"""Rank 0's limit for another rank's copy, and for each of its messages; then the rank counts as hung."""
COMMAND_S = 1800.0
"""Rank 0's limit until a rank takes the command: it may be busy with the step, whose collectives wait as long."""
SEND_WAIT_S = 86_400.0
"""Limit of the other ranks' sends: gloo sends when rank 0 receives. A rank 0 that is gone ends the wait; one that
hangs is ended by its supervisor."""
COLLECTIVE_S = 1800.0
"""Limit of one collective of a step; then a rank counts as hung."""
IDLE = timedelta(days=365)
"""Ranks wait for the next command without a limit."""
TEXT_BYTES = 512
STARTED, COPIED = "the start of its copy of the weights", "the end of its copy of the weights"


def all_gather_values(value: T, group: dist.ProcessGroup) -> list[T]:
    """Gather a small plain value of each rank of a group, by rank, on all of them."""
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


class WeightChannel:
    """Messages from every rank of a group to rank 0, whose calls match theirs one by one. Used by one thread of a
    rank at a time.

    Args:
        group: gloo, over ordinary memory. Its timeout bounds the wait of a rank for its turn.
        device: where this rank's weights are.
        gather_s: deadline of what rank 0 receives; unless given, that of the group.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device = CPU, gather_s: float | None = None) -> None:
        self.group, self.rank, self.world, self._device = group, group.rank(), group.size(), device
        self._gather_s = gather_s
        self._memory = torch.empty(0, dtype=torch.uint8)

    @classmethod
    def beside_training(cls, device: torch.device, gather_s: float = GATHER_S) -> WeightChannel:
        """Make a channel over a new group of all ranks; all make it at the same time."""
        return cls(dist.new_group(backend="gloo", timeout=timedelta(seconds=SEND_WAIT_S)), device, gather_s)

    def memory(self, nbytes: int) -> torch.Tensor:
        """Return the buffer of this rank's part, uint8 [nbytes]; it is reused: fresh pages cost more than the copy."""
        if self._memory.numel() != nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8)
        return self._memory

    @contextmanager
    def copying(self, copied: Callable[[], None]) -> Iterator[None]:
        """Wrap a rank's copy of its part. All ranks leave the context together.

        Args:
            copied: called once this rank's copy is made or has failed.

        Raises:
            Exception: what this rank's copy raised. RelaxError: another rank's failed. Unreachable: one is gone.
        """
        arrived = self._begin_send(_encode_text(""), 0, STARTED) if self.rank != 0 else None
        failed: Exception | None = None
        try:
            with _own_stream(self._device):
                yield
        except Exception as error:  # noqa: BLE001 - the others learn of it before it is raised
            failed = error
        copied()
        failure = self._agreed(arrived, f"{type(failed).__name__}: {failed}" if failed is not None else "")
        if failed is not None:
            raise failed
        if failure:
            who, _, why = failure.partition(" ")
            raise RelaxError(f"rank {who} could not copy its weights aside", why=why)

    def _agreed(self, arrived: dist.Work | None, why: str) -> str:
        """Agree on the first rank whose copy failed, and why; empty if none did. All ranks get the same."""
        word = _encode_text(why)
        if arrived is not None:
            self._end(arrived, f"sending {STARTED} to rank 0")
            self._send(word, 0, COPIED)
            self._receive(word, 0, "whether all ranks have copied their weights aside")
            return _decode_text(word)
        failure = f"0 {why}" if why else ""
        for rank in range(1, self.world):
            self._receive(word, rank, STARTED, self._order_s)
            self._receive(word, rank, COPIED, self._gather_s)
            failure = failure or (f"{rank} {_decode_text(word)}" if _decode_text(word) else "")
        for rank in range(1, self.world):
            self._send(_encode_text(failure), rank, "whether all ranks have copied their weights aside")
        return failure

    def send(self, part: torch.Tensor, what: str) -> None:
        """Send to rank 0: uint8, contiguous, in CPU memory. Returns when rank 0 has received it.

        Raises:
            Unreachable: rank 0 is gone.
        """
        self._send(part, 0, what)

    def receive(self, into: torch.Tensor, rank: int, what: str) -> None:
        """Receive on rank 0 what a rank sends.

        Raises:
            Unreachable: the rank is gone, or does not send it in time.
        """
        self._receive(into, rank, what, self._gather_s)

    def whole(self, rows: torch.Tensor, each: int) -> torch.Tensor:
        """Gather the rows of all ranks, in order, on each of them, in CPU memory; all call it, as the first part of a
        command.

        Args:
            rows: this rank's, [at most each, ...].
        """
        found = torch.zeros((self.world, each, *rows.shape[1:]), dtype=rows.dtype)
        found[self.rank, : len(rows)] = rows.detach()
        what = "rows of an adapter"
        if self.rank == 0:
            for rank in range(1, self.world):
                self._receive(found[rank], rank, what, self._order_s)
            for rank in range(1, self.world):
                self._send(found, rank, what)
        else:
            self._send(found[self.rank], 0, what)
            self._receive(found, 0, what)
        return found.flatten(0, 1)

    @property
    def _order_s(self) -> float | None:
        return None if self._gather_s is None else max(COMMAND_S, self._gather_s)

    def _receive(self, into: torch.Tensor, rank: int, what: str, timeout_s: float | None = None) -> None:
        what = f"{what} from rank {rank}"
        with _gloo_errors(what):
            work = self.group.recv([into], rank, 0)
        self._end(work, what, timeout_s)

    def _send(self, part: torch.Tensor, rank: int, what: str) -> None:
        self._end(self._begin_send(part, rank, what), f"sending {what} to rank {rank}")

    def _begin_send(self, part: torch.Tensor, rank: int, what: str) -> dist.Work:
        with _gloo_errors(f"sending {what} to rank {rank}"):
            return self.group.send([part], rank, 0)

    @staticmethod
    def _end(work: dist.Work, what: str, timeout_s: float | None = None) -> None:
        with _gloo_errors(what):
            if timeout_s is None:
                work.wait()
            else:
                work.wait(timedelta(seconds=timeout_s))


@contextmanager
def _gloo_errors(what: str) -> Iterator[None]:
    """Turn gloo's RuntimeError into Unreachable. Wrap calls of gloo alone: other RuntimeErrors are no lost rank."""
    try:
        yield
    except RuntimeError as error:  # gloo has one kind for a peer that is gone and for one that is late
        hint = "the trainer's gang begins again at its last checkpoint; was a rank killed, or did it hang?"
        # Without the source location before gloo's message and the advice on logs after it.
        why = re.sub(r"^\[/\S+\] ", "", str(error)).partition(". ")[0]
        raise Unreachable(f"the weights of the gang: {what}", why=why, hint=hint) from error


def _encode_text(text: str) -> torch.Tensor:
    """Encode text as a message of fixed size."""
    return torch.frombuffer(bytearray(text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")), dtype=torch.uint8)


def _decode_text(word: torch.Tensor) -> str:
    return word.numpy().tobytes().rstrip(b"\0").decode(errors="ignore")


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """On a GPU: copies in this context wait for earlier work and delay no later work."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.default_stream(device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


class GangRanks:
    """This process's place among the ranks of a gang, and the process groups that they share beside the model's.

    Attributes:
        replica, replicas: its place among those that have samples of their own.
        reports_loss: whether its losses are counted: one of those that compute the same ones.
        control: for commands, over CPU memory; it waits without a timeout.
        publication: to rank 0's processor, beside all else.
    """

    replica: int
    replicas: int
    reports_loss: bool

    def __init__(self, rank: int, device: torch.device, gather_s: float) -> None:
        """Make the groups; all ranks make them at the same time, after those that the device talks over."""
        self.rank = rank
        self.control: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=IDLE)
        self.publication = WeightChannel.beside_training(device, gather_s)

    def gather(self, value: T) -> list[T]:
        """Gather a small plain value of each rank, by rank, on all of them."""
        return all_gather_values(value, self.control)

    def close(self) -> None:
        """Leave all groups, each of which has a thread of its own; the process can join others, in another store."""
        dist.destroy_process_group()
