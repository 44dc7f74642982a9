"""The head agent's client of registry and queue: issues epochs, reports exits, follows policy versions."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Awaitable, Callable

import structlog

from relax_rt.interfaces.registry import QUEUE_SLOT, REGISTRY_SLOT, RegistryApi
from relax_rt.supervision.rundir import RunPaths, slot_file
from relax_rt.transport.queue.api import QueueApi
from relax_rt.transport.rpc.backoff import BackoffPolicy
from relax_rt.transport.rpc.errors import DeadlineExceeded, RelaxError, Unreachable
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.rpc import RpcClient, make_hello

AGENT_SLOT = "agent/0"
CALL_TIMEOUT_S = 5.0
RETRY_S = 0.1
RECONNECT = BackoffPolicy(base_s=0.01, cap_s=0.05)
"""Short: every start waits for the registry's next epoch, and its socket is on this machine."""
WATCH_S, WATCH_EVERY_S = 2.0, 1.0
MAX_PENDING = 10_000


class SystemRoles:
    """Talks to registry and queue for the agent, and waits for one that is down.

    Without a registry (a supervised tree on its own) epochs are counted here.
    """

    def __init__(self, paths: RunPaths, *, has_registry: bool, has_queue: bool) -> None:
        self._paths = paths
        self._has_registry, self._has_queue = has_registry, has_queue
        self._log = structlog.get_logger()
        self._clients: list[RpcClient] = []
        self._registry: RegistryApi | None = None
        self._last_epoch = 0
        self.policy_versions: dict[str, int] = {}
        """Of each slot, as it reported it to the registry; up to a few seconds old."""
        self._exits: dict[str, asyncio.Queue[tuple[Incarnation, str]]] = {}
        """Exits to report, by receiver."""
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to deliver. Call it on the loop."""
        if self._has_registry:
            self._exits[REGISTRY_SLOT] = asyncio.Queue(MAX_PENDING)
            self._tasks.append(asyncio.create_task(self._report_to_registry()))
            self._tasks.append(asyncio.create_task(self._follow_versions()))
            if self._has_queue:
                self._exits[QUEUE_SLOT] = asyncio.Queue(MAX_PENDING)
                self._tasks.append(asyncio.create_task(self._report_to_queue()))

    async def issue_epoch(self, slot: str) -> int:
        """Return a new epoch for the slot; waits while the registry is away. The registry issues its own (0 here)."""
        if slot == REGISTRY_SLOT:
            return 0
        if not self._has_registry:
            self._last_epoch += 1
            return self._last_epoch
        # One token for all attempts: the registry answers a repeated call with the epoch that it issued for the first,
        # so that a lost reply costs no epoch.
        token = secrets.token_hex(8)
        while True:
            try:
                return await self._bound_registry().issue_epoch(slot, token)
            except (Unreachable, DeadlineExceeded) as error:
                self._log.info("waiting for the registry to issue an epoch", slot=slot, error=str(error))
                await asyncio.sleep(RETRY_S)

    def report_exit(self, who: Incarnation, reason: str) -> None:
        """Report to the system roles that this incarnation is dead."""
        for slot, exits in self._exits.items():
            if who.slot not in (slot, REGISTRY_SLOT) and who.epoch > 0:
                try:
                    exits.put_nowait((who, reason))
                except asyncio.QueueFull:
                    self._log.error("too many exits to report", to=slot, lost=str(who))

    async def close(self) -> None:
        """Stop delivering and end the connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in self._clients:
            await client.close()

    async def _report_to_registry(self) -> None:
        registry = self._bound_registry()
        await self._report(REGISTRY_SLOT, lambda _, who, reason: registry.process_exited(who, reason))

    async def _report_to_queue(self) -> None:
        # The queue recognises repeated calls by (incarnation, number): each agent needs an epoch of its own.
        epoch = await self.issue_epoch(AGENT_SLOT)
        queue = self._client(QUEUE_SLOT, Incarnation(AGENT_SLOT, epoch)).bind(QueueApi, timeout_s=CALL_TIMEOUT_S)
        await self._report(QUEUE_SLOT, queue.process_exited)

    async def _follow_versions(self) -> None:
        revision = 0
        while True:
            try:
                changes = await self._bound_registry().watch(revision, WATCH_S)
            except RelaxError as error:
                self._log.debug("registry cannot be watched now", error=str(error))
            else:
                revision = changes.revision
                self.policy_versions.update({m.who.slot: m.policy_version for m in changes.members})
            await asyncio.sleep(WATCH_EVERY_S)

    async def _report(self, to: str, call: Callable[[int, Incarnation, str], Awaitable[None]]) -> None:
        """Report exits one after the other; retry each until it is delivered: a system role that is down comes back,
        or the run ends."""
        for number in itertools.count(1):
            who, reason = await self._exits[to].get()
            while True:
                try:
                    await call(number, who, reason)
                    break
                except (Unreachable, DeadlineExceeded) as error:
                    self._log.info("waiting to report an exit", to=to, who=str(who), error=str(error))
                except RelaxError as error:
                    self._log.error("report of an exit was refused", to=to, who=str(who), error=str(error))
                    break
                await asyncio.sleep(RETRY_S)

    def _bound_registry(self) -> RegistryApi:
        if self._registry is None:
            client = self._client(REGISTRY_SLOT, Incarnation(AGENT_SLOT, 0))
            self._registry = client.bind(RegistryApi, timeout_s=CALL_TIMEOUT_S)
        return self._registry

    def _client(self, slot: str, who: Incarnation) -> RpcClient:
        address = f"unix://{self._paths.socket_dir / slot_file(slot, '.sock')}"
        client = RpcClient(address, make_hello(self._paths.run_id, who), backoff=RECONNECT)
        self._clients.append(client)
        return client
