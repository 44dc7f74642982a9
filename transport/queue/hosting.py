"""A queue in a folder: its broker, for processes that no supervisor runs, and the way to it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import secrets
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn, TypeVar, cast

import msgspec

from relax_rt.transport.base.folder import (
    RUN_ID,
    SHM_PREFIX,
    SHM_ROOT,
    BrokerLocation,
    ServedFolder,
    find,
    remove_abandoned_memory,
    socket_path,
    write_private,
)
from relax_rt.transport.base.journal import SEGMENT_BYTES
from relax_rt.transport.base.liveness import node_name
from relax_rt.transport.base.process_stat import start_time
from relax_rt.transport.memory.fields import parse_fields
from relax_rt.transport.memory.payload_server import PayloadServer
from relax_rt.transport.queue.api import QueueApi
from relax_rt.transport.queue.broker import Broker
from relax_rt.transport.queue.ledger.messages import Membership
from relax_rt.transport.queue.ledger.policy import LedgerPolicy, QueueLimits
from relax_rt.transport.rpc import rpc
from relax_rt.transport.rpc.channel import AddressError, parse_address
from relax_rt.transport.rpc.errors import Corrupt, DeadlineExceeded, OutOfSpace, Refused, RelaxError, Unreachable
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.interface import methods_of

BROKER = "broker/0"
KEYS = "keys.json"
CALL_TIMEOUT_S = 15.0
"""Deadline of one message to the broker; a call is sent again until patience_s is over."""
_REOPEN_S, _REOPEN_MAX_S = 0.2, 5.0
_FIND_POLL_S = 0.05
_SAY_AFTER_S = 1.5

log = logging.getLogger(__name__)

A = TypeVar("A")


class QueueKeys(msgspec.Struct, frozen=True):
    """Whoever has this file may use the queue from another node."""

    public: str
    secret: str

    def curve(self) -> rpc.CurveKeys:
        """As the message layer takes them."""
        return rpc.CurveKeys(self.public.encode(), self.secret.encode())


def read_keys(path: Path) -> QueueKeys:
    """Raises:
    Corrupt: the file does not hold keys.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=QueueKeys)
    except FileNotFoundError as error:
        raise Refused(
            f"keys {path}", why="there is no such file", hint="copy keys.json of the queue's folder"
        ) from error
    except (OSError, msgspec.DecodeError) as error:
        raise Corrupt(f"keys {path}", why=str(error)) from error


def make_keys(folder: Path) -> QueueKeys:
    """The folder's keys, made when they are first needed (0600)."""
    path = folder / KEYS
    if not path.exists():
        made = rpc.CurveKeys.make()
        write_private(path, msgspec.json.encode(QueueKeys(made.public.decode(), made.secret.decode())))
    return read_keys(path)


class Host:
    """The broker of a queue in a folder.

    Args:
        folder: made if it is not there (0700); holds the journal, and with limits.durable the payloads.
        policy, limits: see LedgerPolicy and QueueLimits.
        listen: a tcp address for other nodes, as ``tcp://10.0.0.1:0``; empty: this node only.
        fsync_every_s: how often the journal is forced to disk.
        segment_bytes: size of the journal from which on a snapshot is made.
    """

    def __init__(
        self,
        folder: Path,
        policy: LedgerPolicy,
        limits: QueueLimits,
        *,
        listen: str = "",
        fsync_every_s: float = 1.0,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self._folder = ServedFolder(folder, durable=limits.durable)
        self.folder, self._policy, self._limits, self._listen = folder.absolute(), policy, limits, listen
        self._fsync_every_s, self._segment_bytes = fsync_every_s, segment_bytes
        self._server: rpc.RpcServer | None = None
        self._curve: rpc.CurveKeys | None = None
        self._payload_server: PayloadServer | None = None
        self.broker: Broker | None = None
        self.location: BrokerLocation | None = None

    async def open(self) -> BrokerLocation:
        """Recover the ledger and listen.

        Raises:
            Refused: another process hosts the queue, the policy cannot work, or payloads that lie in memory are to be
                durable (or the other way round).
            Corrupt: the journal is damaged, or written by another version.
        """
        self._policy.check()
        parse_fields(self._policy.fields)
        self._folder.lock()
        try:
            return await self._open()
        except BaseException:
            await self.close()
            raise

    async def _open(self) -> BrokerLocation:
        await asyncio.to_thread(remove_abandoned_memory)
        memory, shm_dir = self._folder.open_memory()
        spill_dir, node = self.folder / "spill", node_name()
        payloads = ""
        if self._listen:
            address = parse_address(self._listen)
            if address.scheme != "tcp":
                raise Refused(f"listening on {self._listen}", why="other nodes come by tcp", hint="tcp://host:port")
            self._curve = make_keys(self.folder).curve()
            self._payload_server = PayloadServer(shm_dir, spill_dir, keys=self._curve)
            payloads = await self._payload_server.listen(str(dataclasses.replace(address, port=0)))
        self.broker = Broker(
            self.folder / "journal",
            shm_dir,
            run_id=memory,
            policy=self._policy,
            limits=self._limits,
            spill_dir=spill_dir,
            node=node,
            payloads=payloads,
            fsync_every_s=self._fsync_every_s,
            segment_bytes=self._segment_bytes,
        )
        await self.broker.open()
        addresses = await self._answer(self.broker)
        self.location = BrokerLocation(addresses, payloads, node, os.getpid(), str(shm_dir))
        self._folder.publish(self.location)
        return self.location

    async def _answer(self, queue: QueueApi) -> list[str]:
        """Listen; answers with the addresses."""
        hello = rpc.make_hello(RUN_ID, Incarnation(BROKER, 0))
        self._server = rpc.RpcServer(hello, curve=self._curve, max_connections=16_384)
        self._server.offer(QueueApi, queue)
        addresses = [await self._server.listen(f"unix://{socket_path(self.folder)}")]
        if self._listen:
            addresses.append(await self._server.listen(self._listen))
            # Whoever knows the address finds us there again.
            self._listen = addresses[-1]
        return addresses

    async def keep(self) -> NoReturn:
        """Begin again from the journal whenever the broker fails (its disk was full, say), until cancelled.

        Raises:
            Exception: what trying again does not mend (Corrupt: the journal is damaged). Clients get it, too.
        """
        (error,) = await asyncio.gather(self._keep(), return_exceptions=True)
        await self._give_up(error)
        raise error

    async def _keep(self) -> NoReturn:
        while True:
            assert self.broker is not None
            # Whatever stopped it: what was acknowledged is in the journal.
            (error,) = await asyncio.gather(self.broker.run(), return_exceptions=True)
            if isinstance(error, Corrupt):
                raise error
            log.error("queue %s: its broker failed and begins again: %s", self.folder, error)
            delay_s = _REOPEN_S
            await asyncio.sleep(delay_s)
            while not await self._opened_again():
                delay_s = min(2 * delay_s, _REOPEN_MAX_S)
                await asyncio.sleep(delay_s)

    async def _opened_again(self) -> bool:
        try:
            await self._stop()
            await self._open()
        # Where it listens it has listened before: what keeps it from that passes.
        except (OutOfSpace, Unreachable, AddressError, OSError) as error:
            log.error("queue %s: its broker cannot begin again: %s", self.folder, error)
            return False
        return True

    async def _give_up(self, cause: BaseException) -> None:
        """Refuse all further calls, so that no client waits for a broker that will not be restarted."""
        log.error("queue %s: its broker failed for good: %s", self.folder, cause)
        try:
            await self._stop()
            await self._answer(_refusing(QueueApi, cause))
        except (RelaxError, OSError) as error:
            log.error("queue %s: its clients cannot be refused: %s", self.folder, error)

    async def _stop(self) -> None:
        if self._server is not None:
            await self._server.close()
        if self.broker is not None:
            await self.broker.close()
        if self._payload_server is not None:
            await self._payload_server.close()
        self._server = self._payload_server = None

    async def close(self, *, keep_memory: bool = False) -> None:
        """Stop. Without keep_memory the payloads in shared memory end as well, unless they are durable."""
        await self._stop()
        ends = self.location is not None and not keep_memory and not self._limits.durable
        if ends and self.broker is not None and (held := self.broker.held):
            log.warning(
                "queue %s ends with %d samples that were not consumed: they are lost (durable keeps them)",
                self.folder,
                held,
            )
        await asyncio.to_thread(self._folder.release, keep_memory=keep_memory)


def _refusing(api: type[A], cause: BaseException) -> A:
    """An implementation that refuses everything."""

    async def refuse(*_: object) -> NoReturn:
        raise Refused(
            "call of the queue", why=f"its broker failed for good: {cause}", hint="mend that, and serve the queue again"
        )

    return cast(A, SimpleNamespace(**dict.fromkeys(methods_of(api), refuse)))


def tasks_of(tasks: Mapping[str, object]) -> dict[str, tuple[str, ...]]:
    """Tasks with the fields they need, checked.

    Raises:
        Refused: a task names its fields in another way than as a list of names.
    """
    found: dict[str, tuple[str, ...]] = {}
    for task, fields in tasks.items():
        if isinstance(fields, str) or not isinstance(fields, list | tuple | set | frozenset):
            raise Refused(f"task '{task}'", why=f"its fields are {fields!r}", hint="give a list of field names")
        found[task] = tuple(str(field) for field in fields)
    return found


# --- the way to the broker


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
            _SAY_AFTER_S, log.warning, "queue %s: no broker serves it, waiting %g s", self.where, self._patience_s
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
            self.near = place.node == node_name()
            if self.near:
                return place.addresses[0]
            if len(place.addresses) < 2:
                raise Refused(
                    f"queue {self.where}",
                    why="its broker is on another node, and listens on its own only",
                    hint="listen=…",
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
