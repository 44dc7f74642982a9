"""A group of ranks with its machine's decisions carried out: the part that an owner of weights holds."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from relax_rt.transport.rpc.errors import Corrupt, DeadlineExceeded, Refused, RelaxError
from relax_rt.transport.weights.collective import events as ev
from relax_rt.transport.weights.collective.communicator import (
    CollectiveFailed,
    DuplicateDevice,
    Memory,
    PeerLost,
    Rendezvous,
    bucket_bounds,
)
from relax_rt.transport.weights.collective.machine import GroupMachine
from relax_rt.transport.weights.collective.messages import (
    AbortedSaid,
    AbortOrder,
    BroadcastOrder,
    DoneSaid,
    FailedSaid,
    HeardSaid,
    HelloSaid,
    InitOrder,
    JoinedSaid,
    ProgressSaid,
    Said,
)
from relax_rt.transport.weights.collective.ranks import GONE_WITHIN_S, Key, Ranks
from relax_rt.transport.weights.manifest import BUCKET_BYTES

GLOO = "relax_rt.transport.weights.collective.gloo:GlooCommunicator"
NCCL = "relax_rt.transport.weights.collective.nccl:NcclCommunicator"


class RankSpec(msgspec.Struct, frozen=True):
    """A rank: its name, and what CUDA_VISIBLE_DEVICES of its process is to be (empty: nothing is set)."""

    name: str
    device: str = ""


class _Writing(msgspec.Struct):
    """A rank that was told to write into its memory, until it says or shows that it does so no more."""

    transfer: int
    generation: int
    over: asyncio.Future[None]


class Collective:
    """Broadcasts from the first rank's memory to the others', in processes that may be lost without harm to this one.

    Use it as an async context manager, on one event loop.

    Args:
        ranks: who may take part; others can be admitted later.
        communicator: class of the communicator, ``module:Class``.
        limits: how long each step may take.
        address: where ranks meet; they all must reach it. gloo and NCCL neither encrypt nor authenticate.
        bucket_bytes: what is broadcast at a time, and digested.
        shared_devices: see GroupMachine.
        environment: further variables of the ranks' processes.
    """

    def __init__(
        self,
        ranks: Sequence[RankSpec],
        communicator: str,
        limits: ev.Limits | None = None,
        *,
        address: str = "127.0.0.1",
        bucket_bytes: int = BUCKET_BYTES,
        shared_devices: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.machine = GroupMachine(limits or ev.Limits(), shared_devices=shared_devices)
        self._address, self._bucket_bytes = address, bucket_bytes
        self._devices = {rank.name: rank.device for rank in ranks}
        self.ranks = Ranks(communicator, self._devices, self._said, self._exited, environment)
        self._known = set(self._devices)
        self._transfers: dict[int, dict[str, Memory]] = {}
        self._asking: dict[int, asyncio.Future[ev.Outcome]] = {}
        self._writing: dict[Key, _Writing] = {}
        self._asked = 0
        self._timer: asyncio.TimerHandle | None = None
        self._store: Any = None
        self._serial = time.monotonic_ns()

    async def __aenter__(self) -> Collective:
        self._store = await asyncio.to_thread(_serve_store, self._address)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._step(ev.Closed())
        await self.ranks.close()
        for key in list(self._writing):
            self._rests(key)
        self._store = None

    def admit(self, rank: RankSpec) -> None:
        """Let a rank take part from now on; one of that name works on this device from its next process on."""
        self._known.add(rank.name)
        self._devices[rank.name] = rank.device

    def want(self, *names: str) -> None:
        """Have the processes of these ranks started now, if they are not there; a start costs no broadcast its time."""
        self._step(ev.Wanted(names))

    @property
    def present(self) -> frozenset[str]:
        """The ranks whose processes are there."""
        return self.machine.present

    @property
    def given_up(self) -> dict[str, str]:
        """The ranks whose processes could not be started and are tried no more, and why."""
        return self.machine.given_up

    async def broadcast(self, memories: Mapping[str, Memory], digest: str, timeout_s: float) -> ev.Outcome:
        """Bring what lies in the first rank's memory into all others'.

        However it ends, cancelled or not: no rank writes into any of the memories after it.

        Args:
            memories: by rank, the root first, all of one size.
            digest: over the buckets' digests, see `worker.digest_of`; a rank that has another is lost as corrupt.

        Returns:
            Who has it, and who is lost for which reason (`error_of` makes it an exception).

        Raises:
            Refused: an unknown rank, or memories of different sizes.
            CollectiveFailed: it was given up as a whole; attribute `outcome` says who has it all the same. Without an
                outcome: a rank could not be ended, and its memory must not be used again.
        """
        if unknown := [name for name in memories if name not in self._known]:
            raise Refused(f"a broadcast to {', '.join(unknown)}", why="no rank of this group has that name")
        sizes = {memory.nbytes for memory in memories.values()}
        if len(sizes) != 1 or not min(sizes):
            raise Refused(f"a broadcast of memories with {sorted(sizes)} bytes", why="they must have one size, not 0")
        self._asked += 1
        number = self._asked
        self._transfers[number] = dict(memories)
        self._asking[number] = asyncio.get_running_loop().create_future()
        buckets = len(bucket_bounds(sizes.pop(), self._bucket_bytes))
        try:
            self._step(ev.Asked(number, tuple(memories), buckets, digest, timeout_s))
            outcome = await self._asking[number]
        finally:
            self._asking.pop(number).cancel()
            try:
                self._step(ev.Cancelled(number))  # without effect on one that has its outcome
                await self._at_rest(number)
            finally:
                self._transfers.pop(number)
        if outcome.error:
            failure = CollectiveFailed(f"broadcast from {next(iter(memories))}", why=outcome.error)
            failure.outcome = outcome
            raise failure
        return outcome

    async def _at_rest(self, transfer: int) -> None:
        """Wait until no rank writes for a transfer any more, however often the caller is cancelled meanwhile.

        Raises:
            CollectiveFailed: the kernel has not ended a rank that was killed.
        """
        loop, cancelled = asyncio.get_running_loop(), None
        deadline = loop.time() + GONE_WITHIN_S
        while writing := {key[0]: one.over for key, one in self._writing.items() if one.transfer == transfer}:
            if loop.time() >= deadline:
                raise CollectiveFailed(
                    f"the end of a broadcast to {', '.join(sorted(writing))}",
                    why=f"killed {GONE_WITHIN_S:g} s ago, the process still has the memory mapped",
                    hint="do not use that memory again; the kernel's log may say what the process waits for",
                )
            try:
                await asyncio.wait(writing.values(), timeout=deadline - loop.time())
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    def _rests(self, key: Key, generation: int | None = None) -> None:
        """A rank writes no more for a generation; None: for any."""
        one = self._writing.get(key)
        if one is not None and generation in (None, one.generation):
            del self._writing[key]
            if not one.over.done():
                one.over.set_result(None)

    def _step(self, event: ev.Event) -> None:
        """Let the machine decide, and do as it says."""
        loop = asyncio.get_running_loop()
        for action in self.machine.step(event, loop.time()):
            self._carry_out(action)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (deadline := self.machine.deadline) is not None:
            self._timer = loop.call_at(deadline, self._step, ev.Tick())

    def _carry_out(self, action: ev.Action) -> None:
        if isinstance(action, ev.Report):
            asking = self._asking.get(action.outcome.transfer)
            if asking is not None and not asking.done():
                asking.set_result(action.outcome)
            return
        key = (action.member, action.incarnation)
        if isinstance(action, ev.Spawn):
            self.ranks.spawn(key)
        elif isinstance(action, ev.Kill):
            self.ranks.kill(key)
        elif isinstance(action, ev.Abort):
            self.ranks.tell(key, AbortOrder(action.generation))
        elif isinstance(action, ev.Init):
            where = Rendezvous(self._address, self._store.port, f"{self._serial}/{action.generation}")
            order = InitOrder(action.generation, action.rank, action.world, where, action.timeout_s)
            self.ranks.tell(key, order)
        else:
            self._send_broadcast(key, action)

    def _send_broadcast(self, key: Key, action: ev.Broadcast) -> None:
        memories = self._transfers[action.transfer]
        root = action.member == next(iter(memories))
        if not root:
            over = asyncio.get_running_loop().create_future()
            self._writing[key] = _Writing(action.transfer, action.generation, over)
        self.ranks.tell(
            key,
            BroadcastOrder(
                action.generation,
                action.transfer,
                memories[action.member],
                self._bucket_bytes,
                action.first,
                root,
                action.stall_s,
            ),
        )

    def _said(self, key: Key, said: Said) -> None:
        name, incarnation = key
        if isinstance(said, DoneSaid | FailedSaid | AbortedSaid):
            self._rests(key, said.generation)
        event: ev.Event
        if isinstance(said, HelloSaid):
            event = ev.Hello(name, incarnation, said.device)
        elif isinstance(said, JoinedSaid):
            event = ev.Joined(name, incarnation, said.generation)
        elif isinstance(said, ProgressSaid):
            event = ev.Progressed(name, incarnation, said.generation, said.buckets)
        elif isinstance(said, DoneSaid):
            event = ev.Done(name, incarnation, said.generation, said.transfer, said.digest)
        elif isinstance(said, FailedSaid):
            event = ev.Failed(name, incarnation, said.generation, said.own, said.error)
        elif isinstance(said, HeardSaid):
            event = ev.Heard(name, incarnation, said.generation)
        else:
            assert isinstance(said, AbortedSaid)
            event = ev.Aborted(name, incarnation, said.generation)
        self._step(event)

    def _exited(self, key: Key, how: str) -> None:
        self._rests(key)
        self._step(ev.Died(*key, how))


def error_of(lost: ev.Lost) -> RelaxError:
    """The error of a rank that did not get a transfer."""
    what = f"weights for {lost.member}"
    kinds: dict[ev.Fate, type[RelaxError]] = {
        "duplicate_device": DuplicateDevice,
        "corrupt": Corrupt,
        "failed": CollectiveFailed,
        "late": DeadlineExceeded,
    }
    return kinds.get(lost.fate, PeerLost)(what, why=f"{lost.fate}: {lost.why}")


def _serve_store(address: str) -> Any:
    """The store in which ranks find each other. It lives here: no rank's end takes it away.

    torch would listen on every address of this host, and nothing here asks who connects: it gets a bound socket.

    Raises:
        Refused: the address is none of this host's.
    """
    from relax_rt.transport.weights.collective.meeting import dist  # imports torch

    try:
        family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((address, 0), family=family)
    except OSError as error:
        what, hint = f"a store for ranks at {address}", "give an address of this host that all ranks reach"
        raise Refused(what, why=str(error), hint=hint) from None
    port = listening.getsockname()[1]
    return dist.TCPStore(address, port, None, True, wait_for_workers=False, master_listen_fd=listening.detach())
