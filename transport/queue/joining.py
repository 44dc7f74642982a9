"""How a process comes to a queue: finds its broker, gets an epoch, and memory of its own where it needs that."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import socket
from pathlib import Path

import msgspec

from relax_rt.transport.base.folder import RUN_ID, SHM_PREFIX, SHM_ROOT, BrokerLocation, find
from relax_rt.transport.base.liveness import node_name
from relax_rt.transport.base.process_stat import start_time
from relax_rt.transport.memory.payload_server import PayloadServer
from relax_rt.transport.queue.api import QueueApi
from relax_rt.transport.queue.hosting import read_keys
from relax_rt.transport.queue.ledger.messages import Membership
from relax_rt.transport.rpc import rpc
from relax_rt.transport.rpc.channel import parse_address
from relax_rt.transport.rpc.errors import DeadlineExceeded, Refused, Unreachable
from relax_rt.transport.rpc.identity import Incarnation

CALL_TIMEOUT_S = 15.0
"""Deadline of one message to the broker; a call is sent again until patience_s is over."""
_FIND_POLL_S = 0.05
_SAY_AFTER_S = 1.5
_log = logging.getLogger("relax_rt.transport")


class BrokerFinder:
    """Finds the broker's address, also after it was started again.

    Args:
        where: folder of the queue, or a ``tcp://`` address.
        patience_s: how long to wait for a broker that is not there yet, at the first time.
    """

    def __init__(self, where: str, patience_s: float) -> None:
        self.where, self._patience_s = where, patience_s
        self._known = False
        self.near = False
        """The broker is known to be on this node."""

    async def find(self) -> str:
        """Waits only at the first time: later the caller's own deadline counts.

        Raises:
            Unreachable: no broker came in time.
            Refused: it is on another node, and does not listen to others.
        """
        if "://" in self.where:
            parse_address(self.where)
            return self.where
        if Path(self.where).is_file():  # noqa: ASYNC240 once, on connecting
            raise Refused(f"queue {self.where}", why="it is a file, not the folder of a queue")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience_s
        say = loop.call_later(
            _SAY_AFTER_S, _log.warning, "queue %s: no broker serves it, waiting %g s", self.where, self._patience_s
        )
        try:
            return await self._look(deadline)
        finally:
            say.cancel()

    async def _look(self, deadline: float) -> str:
        loop = asyncio.get_running_loop()
        command = f"python -m relax_rt.transport.queue {self.where} --task …"
        hint = f"start one with `{command}`, or TransferQueue.serve"
        while True:
            try:
                place = await asyncio.to_thread(find, Path(self.where), hint)
            except Refused as error:
                if self._known:
                    raise DeadlineExceeded(f"queue {self.where}", why="no broker serves it at the moment") from None
                if loop.time() >= deadline:
                    why = f"{error.why}, after {self._patience_s:g} s"
                    raise Unreachable(error.what, why=why, hint=error.hint) from None
                await asyncio.sleep(min(_FIND_POLL_S, self._patience_s))
                continue
            self._known = True
            return self._of(place)

    def _of(self, place: BrokerLocation) -> str:
        self.near = place.node == node_name()
        if self.near:
            return place.addresses[0]
        if len(place.addresses) < 2:
            raise Refused(
                f"queue {self.where}", why="its broker is on another node, and listens on its own only", hint="listen=…"
            )
        return place.addresses[1]


class JoinedQueue(msgspec.Struct, frozen=True):
    """A process of the queue. memory: where its slabs are to be; None: where all others of the broker's node are."""

    membership: Membership
    memory: Path | None


def bind(
    stack: contextlib.AsyncExitStack,
    who: Incarnation,
    address: BrokerFinder,
    curve: rpc.CurveKeys | None,
    timeout_s: float,
) -> QueueApi:
    """The broker as `who` calls it, until the stack ends."""
    client = rpc.RpcClient(address.find, rpc.make_hello(RUN_ID, who), curve=curve)
    stack.push_async_callback(client.close)
    return client.bind(QueueApi, timeout_s=timeout_s)


async def join(
    stack: contextlib.AsyncExitStack, name: str, address: BrokerFinder, curve: rpc.CurveKeys | None, patience_s: float
) -> JoinedQueue:
    """Get an epoch. On another node than the broker's there is memory of our own, served to others, until the stack
    ends.

    Raises:
        Unreachable: no broker answered for patience_s.
        Refused: it does not let us in.
    """
    deadline = asyncio.get_running_loop().time() + patience_s
    where, node = await address.find(), node_name()
    if curve is None or address.near:
        return JoinedQueue(await _ask(name, node, "", address, curve, deadline), None)
    async with contextlib.AsyncExitStack() as own:
        memory = await asyncio.to_thread(_make_memory)
        own.push_async_callback(asyncio.to_thread, shutil.rmtree, memory, ignore_errors=True)
        server = PayloadServer(memory, keys=curve)
        payloads = await server.listen(f"tcp://{_own_address(where)}:0")
        own.push_async_callback(server.close)
        membership = await _ask(name, node, payloads, address, curve, deadline)
        if membership.node == node:
            # It was the address of our own node: memory is shared with it.
            return JoinedQueue(membership, None)
        await stack.enter_async_context(own.pop_all())
    return JoinedQueue(membership, memory)


async def _ask(
    name: str, node: str, payloads: str, address: BrokerFinder, curve: rpc.CurveKeys | None, deadline: float
) -> Membership:
    slot = name or f"client-{os.getpid()}-{secrets.token_hex(3)}/0"
    loop = asyncio.get_running_loop()
    while True:
        left_s = deadline - loop.time()
        async with contextlib.AsyncExitStack() as stack:
            guest = bind(stack, Incarnation(slot, 0), address, curve, max(min(CALL_TIMEOUT_S, left_s), 0.1))
            try:
                return await guest.join(slot, node, os.getpid(), payloads)
            except (Unreachable, DeadlineExceeded) as error:
                if loop.time() >= deadline:
                    hint = "does its broker live, and do the keys fit?"
                    raise Unreachable(f"queue {address.where}", why=str(error), hint=hint) from None


def keys_for(where: str, keys: str | Path | None) -> rpc.CurveKeys | None:
    """The queue's keys: given for tcp, found in the folder when the broker listens to other nodes.

    Raises:
        Refused: there are none, and the address needs them.
    """
    if keys is not None:
        return read_keys(Path(keys)).curve()
    if "://" not in where:
        path = Path(where) / "keys.json"
        return read_keys(path).curve() if path.exists() else None
    if parse_address(where).scheme != "tcp":
        return None
    raise Refused(f"connecting to {where}", why="no keys were given", hint="keys='…/keys.json' of the queue's folder")


def _own_address(where: str) -> str:
    """The address of ours that the broker's node reaches us at."""
    target = parse_address(where)
    family = socket.AF_INET6 if ":" in target.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target.host, target.port))
            host: str = probe.getsockname()[0]
    except OSError as error:
        raise Unreachable(f"queue {where}", why=str(error)) from error
    return f"[{host}]" if ":" in host else host


def _make_memory() -> Path:
    """A directory in shared memory for this process alone; those of dead processes are removed."""
    for other in SHM_ROOT.glob(f"{SHM_PREFIX}p*-*-*"):
        pid, _, rest = other.name.removeprefix(f"{SHM_PREFIX}p").partition("-")
        with contextlib.suppress(FileNotFoundError, ValueError):
            if other.stat().st_uid == os.getuid() and start_time(int(pid)) != int(rest.split("-")[0]):
                shutil.rmtree(other, ignore_errors=True)
    path = SHM_ROOT / f"{SHM_PREFIX}p{os.getpid()}-{start_time(os.getpid())}-{secrets.token_hex(3)}"
    path.mkdir(mode=0o700)
    return path
