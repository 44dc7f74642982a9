"""A queue in a folder: its broker, for processes that no supervisor runs, and the way to it."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn, TypeVar, cast

import msgspec

from relax_rt.transport.base.folder import (
    RUN_ID,
    BrokerLocation,
    ServedFolder,
    remove_abandoned_memory,
    socket_path,
    write_private,
)
from relax_rt.transport.base.journal import SEGMENT_BYTES
from relax_rt.transport.base.liveness import node_name
from relax_rt.transport.memory.fields import parse_fields
from relax_rt.transport.memory.payload_server import PayloadServer
from relax_rt.transport.queue.api import QueueApi
from relax_rt.transport.queue.broker import Broker
from relax_rt.transport.queue.ledger.policy import LedgerPolicy, QueueLimits
from relax_rt.transport.rpc import rpc
from relax_rt.transport.rpc.channel import AddressError, parse_address
from relax_rt.transport.rpc.errors import Corrupt, OutOfSpace, Refused, RelaxError, Unreachable
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.interface import methods_of

BROKER = "broker/0"
KEYS = "keys.json"
_REOPEN_S, _REOPEN_MAX_S = 0.2, 5.0

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
        """Refuse whoever calls from now on, so that nobody waits for a broker that nobody starts again."""
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
