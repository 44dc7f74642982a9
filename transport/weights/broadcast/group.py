"""A broadcast group: the owner of weights calls `broadcast`; the machine decides, this module carries it out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from relax_rt.transport.rpc.errors import Corrupt, DeadlineExceeded, Refused, RelaxError
from relax_rt.transport.weights.broadcast.machine import (
    AbortRank,
    Action,
    BroadcastLimits,
    BroadcastMachine,
    CancelTransfer,
    ClockTick,
    CloseGroup,
    Event,
    FinishTransfer,
    InitRank,
    KillRank,
    PrestartRanks,
    RankExited,
    RankReport,
    RequestTransfer,
    SpawnRank,
)
from relax_rt.transport.weights.broadcast.processes import EXIT_TIMEOUT_S, Key, RankProcesses
from relax_rt.transport.weights.broadcast.protocol import (
    AbortCommand,
    BroadcastCommand,
    BroadcastFailed,
    BroadcastOutcome,
    DuplicateDevice,
    Fate,
    InitCommand,
    LostRank,
    PeerLost,
    RankAborted,
    RankFailed,
    Rendezvous,
    Report,
    TransferDone,
    bucket_bounds,
)
from relax_rt.transport.weights.manifest import BUCKET_BYTES
from relax_rt.transport.weights.memory import Memory

GLOO = "relax_rt.transport.weights.broadcast.backends:GlooCommunicator"
NCCL = "relax_rt.transport.weights.broadcast.backends:NcclCommunicator"


class RankSpec(msgspec.Struct, frozen=True):
    """A rank: its name, and what CUDA_VISIBLE_DEVICES of its process is to be (empty: nothing is set)."""

    name: str
    device: str = ""


class _Writing(msgspec.Struct):
    """A rank that was commanded to write into its memory, until it reports the end or its process has ended."""

    transfer: int
    generation: int
    over: asyncio.Future[None]


class BroadcastGroup:
    """Broadcasts from the first rank's memory to the others', in processes that may be lost without harm to this one.

    Use it as an async context manager, on one event loop.

    Args:
        ranks: who may take part; others can be admitted later.
        communicator: class of the communicator, ``module:Class``.
        limits: how long each step may take.
        address: where ranks meet; they all must reach it. gloo and NCCL neither encrypt nor authenticate.
        bucket_bytes: what is broadcast at a time, and digested.
        shared_devices: two ranks may have one device (a library that allows it).
        environment: further variables of the ranks' processes.
    """

    def __init__(
        self,
        ranks: Sequence[RankSpec],
        communicator: str,
        limits: BroadcastLimits | None = None,
        *,
        address: str = "127.0.0.1",
        bucket_bytes: int = BUCKET_BYTES,
        shared_devices: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.machine = BroadcastMachine(limits or BroadcastLimits(), shared_devices=shared_devices)
        self._address, self._bucket_bytes = address, bucket_bytes
        self._devices = {rank.name: rank.device for rank in ranks}
        self.ranks = RankProcesses(communicator, self._devices, self._reported, self._exited, environment)
        self._known = set(self._devices)
        self._transfers: dict[int, dict[str, Memory]] = {}
        self._waiting: dict[int, asyncio.Future[BroadcastOutcome]] = {}
        self._writing: dict[Key, _Writing] = {}
        self._requests = 0
        self._timer: asyncio.TimerHandle | None = None
        self._store: Any = None
        self._serial = time.monotonic_ns()

    async def __aenter__(self) -> BroadcastGroup:
        self._store = await asyncio.to_thread(_serve_store, self._address)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._step(CloseGroup())
        await self.ranks.close()
        for key in list(self._writing):
            self._write_ended(key)
        self._store = None

    def admit(self, rank: RankSpec) -> None:
        """Let a rank take part from now on; one of that name works on this device from its next process on."""
        self._known.add(rank.name)
        self._devices[rank.name] = rank.device

    def prestart(self, *names: str) -> None:
        """Have the processes of these ranks started now, if they are not there; a start costs no broadcast its time."""
        self._step(PrestartRanks(names))

    @property
    def present(self) -> frozenset[str]:
        """The ranks whose processes are there."""
        return self.machine.present

    @property
    def given_up(self) -> dict[str, str]:
        """The ranks whose processes could not be started and are tried no more, and why."""
        return self.machine.given_up

    async def broadcast(self, memories: Mapping[str, Memory], digest: str, timeout_s: float) -> BroadcastOutcome:
        """Bring what lies in the first rank's memory into all others'.

        However it ends, cancelled or not: no rank writes into any of the memories after it.

        Args:
            memories: by rank, the root first, all of one size.
            digest: over the buckets' digests, see `rank.digest_of`; a rank that has another is lost as corrupt.

        Returns:
            Who has it, and who is lost for which reason (`error_of` makes it an exception).

        Raises:
            Refused: an unknown rank, or memories of different sizes.
            BroadcastFailed: it failed as a whole; attribute `outcome` says which ranks have it all the same. Without an
                outcome: a rank could not be ended, and its memory must not be used again.
        """
        if unknown := [name for name in memories if name not in self._known]:
            raise Refused(f"a broadcast to {', '.join(unknown)}", why="no rank of this group has that name")
        sizes = {memory.nbytes for memory in memories.values()}
        if len(sizes) != 1 or not min(sizes):
            raise Refused(f"a broadcast of memories with {sorted(sizes)} bytes", why="they must have one size, not 0")
        self._requests += 1
        number = self._requests
        self._transfers[number] = dict(memories)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        buckets = len(bucket_bounds(sizes.pop(), self._bucket_bytes))
        try:
            self._step(RequestTransfer(number, tuple(memories), buckets, digest, timeout_s))
            outcome = await self._waiting[number]
        finally:
            self._waiting.pop(number).cancel()
            try:
                self._step(CancelTransfer(number))  # without effect on one that has its outcome
                await self._wait_until_unwritten(number)
            finally:
                self._transfers.pop(number)
        if outcome.error:
            failure = BroadcastFailed(f"broadcast from {next(iter(memories))}", why=outcome.error)
            failure.outcome = outcome
            raise failure
        return outcome

    async def _wait_until_unwritten(self, transfer: int) -> None:
        """Wait until no rank writes for a transfer any more, however often the caller is cancelled meanwhile.

        Raises:
            BroadcastFailed: the kernel has not ended a rank that was killed.
        """
        loop, cancelled = asyncio.get_running_loop(), None
        deadline = loop.time() + EXIT_TIMEOUT_S
        while writing := {key[0]: one.over for key, one in self._writing.items() if one.transfer == transfer}:
            if loop.time() >= deadline:
                raise BroadcastFailed(
                    f"the end of a broadcast to {', '.join(sorted(writing))}",
                    why=f"killed {EXIT_TIMEOUT_S:g} s ago, the process still has the memory mapped",
                    hint="do not use that memory again; the kernel's log may say what the process waits for",
                )
            try:
                await asyncio.wait(writing.values(), timeout=deadline - loop.time())
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    def _write_ended(self, key: Key, generation: int | None = None) -> None:
        """Note that a rank no longer writes for a generation; None: for any."""
        one = self._writing.get(key)
        if one is not None and generation in (None, one.generation):
            del self._writing[key]
            if not one.over.done():
                one.over.set_result(None)

    def _step(self, event: Event) -> None:
        """Pass an event to the machine and carry out its actions."""
        loop = asyncio.get_running_loop()
        for action in self.machine.step(event, loop.time()):
            self._execute(action)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (deadline := self.machine.deadline) is not None:
            self._timer = loop.call_at(deadline, self._step, ClockTick())

    def _execute(self, action: Action) -> None:
        if isinstance(action, FinishTransfer):
            waiting = self._waiting.get(action.outcome.transfer)
            if waiting is not None and not waiting.done():
                waiting.set_result(action.outcome)
            return
        key = (action.member, action.incarnation)
        if isinstance(action, SpawnRank):
            self.ranks.spawn(key)
        elif isinstance(action, KillRank):
            self.ranks.kill(key)
        elif isinstance(action, AbortRank):
            self.ranks.send(key, AbortCommand(action.generation))
        elif isinstance(action, InitRank):
            where = Rendezvous(self._address, self._store.port, f"{self._serial}/{action.generation}")
            command = InitCommand(action.generation, action.rank, action.world, where, action.timeout_s)
            self.ranks.send(key, command)
        else:
            memories = self._transfers[action.transfer]
            root = action.member == next(iter(memories))
            if not root:
                over = asyncio.get_running_loop().create_future()
                self._writing[key] = _Writing(action.transfer, action.generation, over)
            memory, bucket_bytes = memories[action.member], self._bucket_bytes
            first, stall_s = action.first, action.stall_s
            self.ranks.send(
                key,
                BroadcastCommand(action.generation, action.transfer, memory, bucket_bytes, first, root, stall_s),
            )

    def _reported(self, key: Key, report: Report) -> None:
        if isinstance(report, TransferDone | RankFailed | RankAborted):
            self._write_ended(key, report.generation)
        self._step(RankReport(*key, report))

    def _exited(self, key: Key, how: str) -> None:
        self._write_ended(key)
        self._step(RankExited(*key, how))


def error_of(lost: LostRank) -> RelaxError:
    """The error of a rank that did not get a transfer."""
    what = f"weights for {lost.member}"
    kinds: dict[Fate, type[RelaxError]] = {
        "duplicate_device": DuplicateDevice,
        "corrupt": Corrupt,
        "failed": BroadcastFailed,
        "late": DeadlineExceeded,
    }
    return kinds.get(lost.fate, PeerLost)(what, why=f"{lost.fate}: {lost.why}")


def _serve_store(address: str) -> Any:
    from relax_rt.transport.weights.broadcast.backends import serve_store  # imports torch

    return serve_store(address)
