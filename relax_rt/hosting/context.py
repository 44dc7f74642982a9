"""The host's implementation of a role's context: registry lease, peers, server, events, metrics, progress."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import msgspec
import structlog

from relax_rt.actors.directory import Directory
from relax_rt.cluster.nodes.api import HEAD
from relax_rt.cluster.nodes.links import AddressResolver, Links, NodePayloads
from relax_rt.config.schema import RoleSettings, RunConfig
from relax_rt.interfaces.registry import QUEUE_SLOT, REGISTRY_SLOT, RegistryApi
from relax_rt.interfaces.role import Progress
from relax_rt.observe.events import EventLog
from relax_rt.observe.metrics import MetricsLog
from relax_rt.supervision.channel import AddressMsg, ProgressMsg, ReadyMsg, send_now
from relax_rt.supervision.rundir import slot_file
from relax_rt.transport.memory.payload_fetcher import Fetcher
from relax_rt.transport.queue.api import QueueApi
from relax_rt.transport.rpc.errors import Refused, RelaxError, StaleEpoch
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.rpc import RpcClient, RpcServer, make_hello

T = TypeVar("T")

CALL_TIMEOUT_S = 60.0
PROGRESS_EVERY_S = 0.2
HEARTBEAT_S = 1.0
RETRY_S = 0.5
FINISHED = "finished"


class HostEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent passed in environment variables."""

    who: Incarnation
    run_id: str
    run_dir: Path
    socket_dir: Path
    shm_dir: Path
    control_fd: int
    agent_pid: int
    target: str
    has_registry: bool

    @classmethod
    def from_environment(cls) -> HostEnvironment:
        """Read the RELAX_* variables; a host is never started by hand."""
        env = os.environ
        try:
            return cls(
                who=Incarnation(env["RELAX_SLOT"], int(env["RELAX_EPOCH"])),
                run_id=env.get("RELAX_RUN") or env["RELAX_RUN_ID"],
                run_dir=Path(env["RELAX_RUN_DIR"]),
                socket_dir=Path(env["RELAX_SOCKET_DIR"]),
                shm_dir=Path(env["RELAX_SHM_DIR"]),
                control_fd=int(env["RELAX_CONTROL_FD"]),
                agent_pid=int(env["RELAX_AGENT_PID"]),
                target=env.get("RELAX_ROLE_TARGET", ""),
                has_registry=env.get("RELAX_HAS_REGISTRY", "1") == "1",
            )
        except KeyError as error:
            raise SystemExit(
                f"relax_rt.hosting.host is started by `relax-rt up`, not by hand: {error} is not set"
            ) from error


class ProgressReporter:
    """Counts work and reports it to the agent, at most every 0.2 s, from its own thread: neither a blocked loop nor a
    busy thread of the role delays a report.

    While the role waits it repeats the report as a heartbeat, but only if the role's event loop has answered since the
    last one. So a role that waits with a blocked loop falls silent, and the watchdog sees it.
    """

    def __init__(self, control: socket.socket, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._control = control
        self._heartbeat_s = heartbeat_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._answered = True
        self._changed = threading.Condition()
        self._dirty = False
        self._n = 0
        self._detail = self._waiting = ""
        self._extend_s = 0.0
        threading.Thread(target=self._report, name="relax-progress", daemon=True).start()

    @property
    def state(self) -> tuple[int, str]:
        """The counter, and what the role does or waits for."""
        with self._changed:
            return self._n, f"waiting: {self._waiting}" if self._waiting else self._detail

    def advance(self, n: int = 1, detail: str = "") -> None:
        with self._changed:
            self._n += n
            self._detail = detail or self._detail
            self._mark()

    def waiting(self, reason: str) -> None:
        with self._changed:
            self._waiting = reason
            self._mark()

    def extend(self, seconds: float, reason: str) -> None:
        with self._changed:
            self._extend_s += seconds
            self._detail = reason
            self._mark()

    def watch_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send heartbeats only while this loop answers."""
        with self._changed:
            self._loop = loop

    def _mark(self) -> None:
        self._dirty = True
        self._changed.notify()

    def _await_change(self) -> None:
        """Return when there is something to report, or a heartbeat is due. The lock is held."""
        while not self._dirty:
            heartbeat_due = not self._changed.wait_for(
                lambda: self._dirty, self._heartbeat_s if self._waiting else None
            )
            if heartbeat_due and self._waiting:
                if self._loop is None:
                    return
                if self._answered:
                    # The loop ran the last callback; the next heartbeat needs an answer to this one.
                    self._answered = False
                    with suppress(RuntimeError):
                        self._loop.call_soon_threadsafe(self._answer)
                        return

    def _answer(self) -> None:
        self._answered = True

    def _report(self) -> None:
        pause = threading.Event()
        while True:
            with self._changed:
                self._await_change()
                self._dirty = False
                message = ProgressMsg(self._n, self._detail[:500], self._waiting[:500], self._extend_s)
                self._extend_s = 0.0
            if not send_now(self._control, message, socket.MSG_DONTWAIT):
                with self._changed:
                    self._extend_s += message.extend_s
                    self._dirty = True
            pause.wait(PROGRESS_EVERY_S)


class _NoRegistry:
    """Stands for the registry client where there is none; the first use raises an error with the reason."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> NoReturn:
        raise RelaxError(f"ctx.registry.{name} cannot be used here", why=self._why)


class HostContext:
    """Implements relax_rt.interfaces.role.RoleContext."""

    def __init__(
        self, host: HostEnvironment, config: RunConfig, settings: RoleSettings, control: socket.socket
    ) -> None:
        self.config, self.settings = config, settings
        self.who, self.run_id, self.run_dir, self.shm_dir = host.who, host.run_id, host.run_dir, host.shm_dir
        who, run_dir = self.who, self.run_dir
        self.spill_dir: Path | None = run_dir / "queue" / "spill"
        durable = config.queue.durability == "disk"
        self.payload_dir = run_dir / "queue" / "payloads" if durable else self.shm_dir
        if durable:
            self.payload_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._links = Links.from_environment()
        self._node_payloads = (
            NodePayloads(self.shm_dir, who, self._links) if self._links and self._links.node != HEAD else None
        )
        if self._node_payloads is not None:
            self.payload_dir, self.spill_dir = self._node_payloads.directory, None
        self._fetcher: Fetcher | None = None
        self.seed = derive_seed(config.run.seed, who)
        self.log = structlog.get_logger().bind(slot=who.slot, epoch=who.epoch)
        # Several heartbeats fit into the time after which silence counts as a hang.
        self.reporter = ProgressReporter(control, min(HEARTBEAT_S, settings.hang_after_s / 3))
        self.progress: Progress = self.reporter
        self.stopping = asyncio.Event()
        self.policy_version = 0
        self.is_ready = False
        self.address = ""
        self._socket_dir = host.socket_dir
        self._control = control
        self._hello = make_hello(self.run_id, who)
        self._clients: dict[str, RpcClient] = {}
        self._server: RpcServer | None = None
        self._resolver = AddressResolver(host.socket_dir, self._hello) if self._links else None
        self.remote = ""
        self._events = EventLog(run_dir, str(who))
        self._metrics = MetricsLog(run_dir, str(who))
        self.registry_lease: RegistryLease | None = None
        if who.slot == REGISTRY_SLOT or not host.has_registry:
            why = "this is the registry" if host.has_registry else "the run has no registry"
            self.registry = cast(RegistryApi, _NoRegistry(why))
        else:
            self.registry = self._client(REGISTRY_SLOT).bind(RegistryApi, timeout_s=CALL_TIMEOUT_S)
            self.registry_lease = RegistryLease(self, self._client(REGISTRY_SLOT))
        self._directory = Directory(self._client, self.registry if self.registry_lease is not None else None)

    async def queue(self) -> QueueApi:
        """The TransferQueue's broker."""
        queue = await self.peer(QUEUE_SLOT, QueueApi, timeout_s=CALL_TIMEOUT_S)
        if self._node_payloads is not None:
            await self._node_payloads.announce(queue)
        return queue

    @property
    def fetcher(self) -> Fetcher | None:
        if self._links is not None and self._fetcher is None:
            self._fetcher = Fetcher(self._links.keys)
        return self._fetcher

    async def peer(self, slot: str, api: type[T], *, timeout_s: float) -> T:
        """Another role's interface. The slot's socket keeps its path when it restarts, so the client follows."""
        return self._client(slot).bind(api, timeout_s=timeout_s)

    def actor(self, name: str, api: type[T], *, timeout_s: float = CALL_TIMEOUT_S) -> T:
        """A reference to an actor; see RoleContext.actor."""
        return self._directory.actor(name, api, timeout_s=timeout_s)

    def serve(self, api: type[T], implementation: T, *, max_calls: int | None = None) -> None:
        """Offer an interface at this role's address."""
        if self.address:
            raise RelaxError(f"{self.who} offers {api.__name__} too late", hint="call ctx.serve in setup")
        if self._server is None:
            self._server = RpcServer(self._hello, curve=self._links.keys if self._links else None)
        self._server.offer(api, implementation)
        if max_calls is not None:
            self._server.max_calls = min(self._server.max_calls, max_calls)
        if api is RegistryApi and self.who.slot == REGISTRY_SLOT:
            self.registry = cast(RegistryApi, implementation)

    async def ready(self, policy_version: int = 0) -> None:
        """Report readiness to the agent and the registry; a registry that is down does not delay the role."""
        self.policy_version = max(self.policy_version, policy_version)
        first, self.is_ready = not self.is_ready, True
        if first:
            await asyncio.to_thread(send_now, self._control, ReadyMsg())
        if self.registry_lease is not None:
            await self.registry_lease.renew_now()

    def event(self, kind: str, /, **fields: Any) -> None:
        """Append to the run's event log."""
        self._events.emit(kind, **fields)

    def metrics(self, record: dict[str, Any]) -> None:
        """Append to the run's metrics."""
        self._metrics.write(record)

    async def listen(self) -> None:
        """Serve what `setup` offered. The address is free: the agent has seen its last owner exit."""
        if self._server is None:
            return
        path = self._socket_dir / slot_file(self.who.slot, ".sock")
        path.unlink(missing_ok=True)
        self.address = await self._server.listen(f"unix://{path}")
        if self._links is not None:
            self.remote = await self._server.listen(self._links.listen)
        send_now(self._control, AddressMsg(self.address, self.remote))

    async def close(self, end: str = FINISHED) -> None:
        """Leave the registry, saying how this incarnation ended, and close all connections."""
        try:
            if self.registry_lease is not None:
                await self.registry_lease.leave(end)
            await self._directory.close()
            if self._server is not None:
                await self._server.close()
            for client in self._clients.values():
                await client.close()
            if self._resolver is not None:
                await self._resolver.close()
            if self._fetcher is not None:
                await self._fetcher.close()
            if self._node_payloads is not None:
                await self._node_payloads.close()
        finally:
            self._events.close()
            self._metrics.close()

    def _client(self, slot: str) -> RpcClient:
        if slot not in self._clients:
            if self._links is None or self._resolver is None:
                client = RpcClient(f"unix://{self._socket_dir / slot_file(slot, '.sock')}", self._hello)
            else:
                # A slot may move between nodes: its address is resolved before every connect.
                find = functools.partial(self._resolver.resolve, slot)
                client = RpcClient(find, self._hello, curve=self._links.keys, slot=slot)
            self._clients[slot] = client
        return self._clients[slot]

    @property
    def node(self) -> str:
        """This node's name; empty in a run of one node."""
        return self._links.node if self._links else ""


class RegistryLease:
    """A role's lease in the registry, renewed in the background.

    While the registry is away renewals are retried, and the role continues. `keep` ends only by raising StaleEpoch: a
    newer incarnation holds the slot, and this one must end.
    """

    def __init__(self, ctx: HostContext, client: RpcClient) -> None:
        self._ctx = ctx
        self._ttl_s = ctx.config.supervision.lease_s
        self._registry = client.bind(RegistryApi, timeout_s=min(self._ttl_s, CALL_TIMEOUT_S))
        self._announced = False
        self._away = False
        self._refusal = ""
        self._wake = asyncio.Event()
        self._renewed = asyncio.Condition()
        self.committed = 0

    async def keep(self) -> NoReturn:
        """Announce the role, then renew its lease for ever. Raises StaleEpoch: the slot has a newer incarnation."""
        while True:
            self._wake.clear()
            renewed = await self._renew()
            if renewed:
                async with self._renewed:
                    self._renewed.notify_all()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._ttl_s / 3 if renewed else RETRY_S):
                    await self._wake.wait()

    async def _renew(self) -> bool:
        ctx = self._ctx
        try:
            if not self._announced:
                await self._registry.announce(os.getpid(), ctx.address, self._ttl_s, ctx.node, ctx.remote)
                self._announced = True
            n, detail = ctx.reporter.state
            state = "draining" if ctx.stopping.is_set() else "ready" if ctx.is_ready else "starting"
            answer = await self._registry.renew(state, n, detail, ctx.policy_version)
        except StaleEpoch:
            raise
        except Refused as error:
            # The registry does not know this incarnation, or its lease has lapsed: announce it again.
            if str(error) != self._refusal:
                ctx.log.warning("registry refused the renewal", error=str(error))
            self._refusal = str(error)
            self._announced = False
            return False
        except RelaxError as error:
            if not self._away:
                ctx.log.warning("the registry does not answer; continuing without it", error=str(error))
            self._away = True
            return False
        if self._away:
            ctx.log.info("the registry answers again")
        self._away, self._refusal = False, ""
        self.committed = max(self.committed, answer.committed)
        return True

    async def renew_now(self, wait_s: float = 2.0) -> None:
        """Renew at once; stops waiting for the answer after wait_s, while the renewal continues."""
        async with self._renewed:
            self._wake.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._renewed.wait()

    async def leave(self, end: str = FINISHED, wait_s: float = 1.0) -> None:
        """Leave the registry and say why; if it does not answer, the agent's report does the same."""
        if not self._announced or self._away:
            return
        try:
            async with asyncio.timeout(wait_s):
                await self._registry.leave(end)
        except (RelaxError, TimeoutError) as error:
            self._ctx.log.info("the end was not reported to the registry", error=str(error))


def derive_seed(run_seed: int, who: Incarnation) -> int:
    """A 32-bit seed from (run seed, slot, epoch), so that no two incarnations draw the same numbers."""
    return int.from_bytes(hashlib.sha256(f"{run_seed}/{who.slot}/{who.epoch}".encode()).digest()[:4], "little")
