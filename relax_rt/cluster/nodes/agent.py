"""The agent of a node that joined: carries out the head's orders, and ends everything when it has lost the head."""

from __future__ import annotations

import asyncio
import os
import signal
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
import structlog

from relax_rt.cluster.nodes.api import (
    DOOR,
    Began,
    BindSlot,
    Bound,
    DumpSlot,
    EndNode,
    HeadApi,
    InjectSlot,
    KillSlot,
    Listens,
    Order,
    SlotEvent,
    StartSlot,
    StopSlot,
    WantsToLeave,
    Wrote,
)
from relax_rt.cluster.nodes.limb import LimbCore
from relax_rt.cluster.nodes.links import role_environment
from relax_rt.cluster.nodes.seat import End, Taken, boot_clock, write_end
from relax_rt.config.schema import RunConfig
from relax_rt.observe.events import EventFollower, EventLog
from relax_rt.process import procfs
from relax_rt.supervision.api import WhereApi
from relax_rt.supervision.local import KeeperWatch, LocalExecutor
from relax_rt.supervision.plan import RolePlan
from relax_rt.supervision.protocol import Event, SlotExited, SlotSpawned
from relax_rt.supervision.rundir import RunPaths, owner_of, slot_file, update_run
from relax_rt.supervision.system_roles import AGENT_SLOT
from relax_rt.transport.rpc.errors import Refused, RelaxError, StaleEpoch
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.rpc import Client, CurveKeys, Server, make_hello

T = TypeVar("T")

EXIT_LOST = 75
"""Exit code of an agent that lost the head: it may be worth while to join again."""
EXIT_FAULT = 70
"""Exit code of an agent that found a fault of its own."""
RETRY_S = 0.1
GATHER_S = 0.01
FOLLOW_S = 0.5
LOOK_S = 0.1
HOUSEKEEPING_S = 1.0
MIB = 1 << 20


class NodeAgent:
    """One seat of this node, from its first process to its last.

    Args:
        config: the resolved config; plans: its roles.
        paths: the seat's directories, already made.
        taken: the seat.
        keys: of the run.
        keeper_pid: the keeper above us; 0 when there is none.
    """

    def __init__(
        self,
        config: RunConfig,
        paths: RunPaths,
        plans: Sequence[RolePlan],
        taken: Taken,
        keys: CurveKeys,
        *,
        keeper_pid: int = 0,
    ) -> None:
        seat = taken.joined.seat
        self.paths, self.seat, self._taken, self._keys = paths, seat, taken, keys
        self._log = structlog.get_logger()
        self._core = LimbCore(taken.joined.lease_s, boot_clock())
        self._events = EventLog(
            paths.run_dir, f"agent@{seat.node}", config.events.segment_mib * MIB, config.events.keep_segments
        )
        self._local = LocalExecutor(
            config,
            paths,
            plans,
            on_event=self._on_event,
            on_address=self._on_address,
            emit=self._events.emit,
            node=seat.node,
            host=taken.host,
            environment=role_environment(paths, run_id=seat.run_id, node=seat.node, host=taken.host),
        )
        self._keeper = KeeperWatch(paths, self._local, self._events.emit)
        self._keeper_pid = keeper_pid
        self._client = Client(taken.head, make_hello(DOOR, Incarnation(f"{seat.node}/0", seat.epoch)), curve=keys)
        # Several calls fit into a lease, so that one that is lost does not cost it.
        self._head = self._client.bind(HeadApi, timeout_s=max(0.2, self._core.lease_s / 5))
        self._living: set[str] = set()
        self._bindings: set[asyncio.Task[None]] = set()
        self._said = asyncio.Event()
        self._over: asyncio.Future[End] | None = None
        self._trouble = ""
        self._signals = 0

    async def run(self) -> End:
        """Take part to the end; nothing of the run lives on this node when this returns."""
        loop = asyncio.get_running_loop()
        self._over = loop.create_future()
        procfs.become_subreaper()
        self.paths.own(os.getpid())
        update_run(self.paths.run_dir, agent=owner_of(os.getpid()))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._interrupted, signal.Signals(number).name)
        if self._keeper_pid:
            self._keeper.watch(self._keeper_pid)
        server = Server(make_hello(self.seat.run_id, Incarnation(AGENT_SLOT, 0)))
        server.offer(WhereApi, self)
        await server.listen(f"unix://{self.paths.agent_socket}")
        self._local.prepare()
        self._core.say(Began(os.getpid(), str(self.paths.run_dir)))
        self._said.set()
        self._events.emit("node_agent_started", node=self.seat.node, node_epoch=self.seat.epoch, pid=os.getpid())
        follower = EventFollower(self.paths.run_dir)
        # What an earlier seat wrote was reported by it.
        follower.poll()
        work = {
            "carrying orders out": self._obey(),
            "reporting": self._report(),
            "watching the lease": self._watch_lease(),
            "housekeeping": self._housekeep(),
            "telling events": self._follow(follower),
        }
        tasks = [loop.create_task(one, name=name) for name, one in work.items()]
        for task in tasks:
            task.add_done_callback(self._work_ended)
        try:
            end = await self._over
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._close(server, follower, end)
        return end

    def _work_ended(self, task: asyncio.Task[None]) -> None:
        """Without any of these a node would only seem to take part: the head starts its slots elsewhere."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        fault = f"{task.get_name()} has failed: {type(error).__name__}: {error}"
        self._log.error("node agent fault", error=fault, exc_info=error)
        self._events.emit("supervisor_fault", error=fault, trace="".join(traceback.format_exception(error)))
        self._finish(over=True, exit_code=EXIT_FAULT, reason=f"fault of the node's agent: {fault}")

    async def where(self, slot: str) -> str:
        """See WhereApi."""
        if self._local.has(slot):
            return f"unix://{self.paths.socket_dir / slot_file(slot, '.sock')}"
        return self._core.places.get(slot, "")

    def _finish(self, *, over: bool, exit_code: int, reason: str) -> None:
        """The first end counts."""
        assert self._over is not None
        if not self._over.done():
            # At once: the head counts on it that nothing lives here soon after the lease.
            for slot in self._living:
                self._local.kill(slot, "killed", reason)
            self._log.info("this node's part ends", reason=reason, over=over)
            self._over.set_result(End(seat=str(self.seat), over=over, exit_code=exit_code, reason=reason))

    def _interrupted(self, name: str) -> None:
        self._signals += 1
        if self._signals == 1:
            self._core.say(WantsToLeave(name))
            self._said.set()
        else:
            self._finish(over=True, exit_code=130, reason=f"{name} again")

    def _on_event(self, event: Event) -> None:
        assert isinstance(event, SlotEvent)
        if isinstance(event, SlotSpawned):
            self._living.add(event.slot)
        elif isinstance(event, SlotExited):
            self._living.discard(event.slot)
        self._core.happened(event)
        self._said.set()

    def _on_address(self, slot: str, address: str, remote: str) -> None:
        self._core.say(Listens(slot, address, remote))
        self._said.set()

    async def _asked(self, call: Callable[[], Awaitable[T]]) -> T | None:
        """One call of the head; None when it was not answered. Its answer renews the lease."""
        made = boot_clock()
        try:
            answer = await call()
        except StaleEpoch as error:
            self._finish(over=False, exit_code=EXIT_LOST, reason=str(error))
            return None
        except RelaxError as error:
            if not self._trouble:
                self._log.warning("the head does not answer", error=str(error), lease_s=self._core.lease_s)
            self._trouble = str(error)
            await asyncio.sleep(RETRY_S)
            return None
        if self._trouble:
            self._log.info("the head answers again")
        self._trouble = ""
        self._core.answered(made)
        return answer

    async def _obey(self) -> None:
        core = self._core
        while True:
            answer = await self._asked(lambda: self._head.orders(self.seat, core.since, core.map_version, core.poll_s))
            for order in core.take(answer) if answer is not None else ():
                self._carry_out(order)

    def _carry_out(self, order: Order) -> None:
        match order:
            case StartSlot(order=start):
                self._local.start(start)
            case StopSlot(slot=slot):
                self._local.stop(slot)
            case KillSlot(slot=slot, kind=kind, reason=reason):
                self._local.kill(slot, kind, reason)
            case DumpSlot(slot=slot):
                self._local.dump_stacks(slot)
            case InjectSlot(slot=slot, fault=fault, seconds=seconds, amount=amount):
                try:
                    self._local.inject(slot, fault, seconds, amount)
                except Refused as error:
                    self._log.warning("fault refused", error=str(error))
                    self._events.emit("fault_refused", slot=slot, name=fault, reason=str(error))
            case BindSlot():
                binding = asyncio.create_task(self._bind(order))
                self._bindings.add(binding)
                binding.add_done_callback(self._bindings.discard)
            case EndNode(exit_code=exit_code, reason=reason):
                self._finish(over=True, exit_code=exit_code, reason=reason)

    async def _bind(self, order: BindSlot) -> None:
        try:
            at = await self._local.rendezvous(order.slot, order.generation)
            answer = Bound(order.slot, order.generation, at.host, at.port)
        except OSError as error:
            answer = Bound(order.slot, order.generation, "", 0, str(error))
        self._core.say(answer)
        self._said.set()

    async def _report(self) -> None:
        while True:
            await self._said.wait()
            # What comes together goes together.
            await asyncio.sleep(GATHER_S)
            self._said.clear()
            await self._send()

    async def _send(self) -> None:
        while not self._core.silent:
            first, items = self._core.report()
            last = await self._asked(lambda first=first, items=items: self._head.report(self.seat, first, list(items)))  # type: ignore[misc]
            if last is not None:
                self._core.reported(last)

    async def _watch_lease(self) -> None:
        left_s = self._core.left_s(boot_clock())
        while left_s > 0:
            # The loop's clock stands still while the machine sleeps: look again soon.
            await asyncio.sleep(min(left_s, LOOK_S))
            left_s = self._core.left_s(boot_clock())
        reason = f"the head was not reached for lease_s = {self._core.lease_s:g} s: {self._trouble or 'no answer'}"
        self._finish(over=False, exit_code=EXIT_LOST, reason=reason)

    async def _housekeep(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            await self._local.housekeep()
            try:
                await asyncio.to_thread(self._events.rotate)
            except OSError as error:
                self._log.error("the event log cannot be rotated", error=str(error))

    async def _follow(self, follower: EventFollower) -> None:
        while True:
            await asyncio.sleep(FOLLOW_S)
            await self._tell_events(follower)

    async def _tell_events(self, follower: EventFollower) -> None:
        for event in await asyncio.to_thread(follower.poll):
            self._core.say(Wrote(msgspec.json.encode({**event, "node": self.seat.node})))
            self._said.set()

    async def _close(self, server: Server, follower: EventFollower, end: End) -> None:
        self._keeper.close()
        left = await self._local.close()
        await server.close()
        self._events.emit("node_ended", node=self.seat.node, node_epoch=self.seat.epoch, reason=end.reason)
        with suppress(TimeoutError, RelaxError):
            async with asyncio.timeout(2.0 if end.over else 0.5):
                await self._tell_events(follower)
                if end.over:
                    await self._send()
                if not left:
                    # To leave is to say that nothing of the run lives here; else the head waits for the lease.
                    await self._head.leave(self.seat, end.reason)
        await self._client.close()
        follower.close()
        self._events.close()
        self.paths.remove_private()
        self._write(end)

    def _write(self, end: End) -> None:
        fields: dict[str, Any] = {"exit_code": end.exit_code, "reason": end.reason}
        try:
            update_run(self.paths.run_dir, status="node ended", **fields)
            write_end(self.paths.run_dir, end)
        except OSError as error:
            self._log.error("how this node's part ended cannot be written", error=str(error))
