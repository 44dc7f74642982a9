"""The agent of a node that joined: carries out the head's orders, and ends everything when it has lost the head.

Its process is ``python -m relax_rt.cluster.nodes.agent``, started by the keeper on that node.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog
import uvloop

from relax_rt.cluster.nodes.api import (
    HELLO_NAME,
    AgentStarted,
    BindRendezvous,
    EndNode,
    EventLine,
    HeadApi,
    LeaveRequested,
    Order,
    RendezvousBound,
    SlotAddress,
)
from relax_rt.cluster.nodes.links import role_environment
from relax_rt.cluster.nodes.membership import (
    JoinRecord,
    MembershipEnd,
    boot_clock,
    read_keys,
    read_record,
    write_end,
)
from relax_rt.cluster.nodes.session import HeadSession
from relax_rt.config.loader import read_resolved
from relax_rt.config.schema import RunConfig
from relax_rt.interfaces.agent import WhereApi
from relax_rt.observe.events import EventFollower, EventLog
from relax_rt.observe.logs import open_log, setup_logging
from relax_rt.process import procfs
from relax_rt.supervision.executor import InjectFault
from relax_rt.supervision.local import LocalExecutor, failure_of
from relax_rt.supervision.plan import RolePlan, plan_roles
from relax_rt.supervision.protocol import Kill, SlotEvent, SlotExited, SlotSpawned
from relax_rt.supervision.rundir import RESOLVED_CONFIG, RunPaths, owner_of, slot_file, update_run
from relax_rt.supervision.system_roles import AGENT_SLOT
from relax_rt.transport.rpc.errors import Refused, RelaxError, StaleEpoch
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.rpc import CurveKeys, RpcClient, RpcServer, make_hello

T = TypeVar("T")

EXIT_CONFIG = 2
EXIT_HEAD_LOST = 75
"""Exit code of an agent that lost the head: joining again may succeed."""
EXIT_FAULT = 70
"""Exit code of an agent that failed itself."""
RETRY_S = 0.1
GATHER_S = 0.01
FOLLOW_S = 0.5
LEASE_CHECK_S = 0.1
MIB = 1 << 20


class NodeAgent:
    """One membership of this node, from its first process to its last.

    Args:
        config: the resolved config; plans: its roles.
        paths: the membership's directories, already made.
        record: the membership.
        keys: of the run.
        keeper_pid: the keeper above us; 0 when there is none.
    """

    def __init__(
        self,
        config: RunConfig,
        paths: RunPaths,
        plans: Sequence[RolePlan],
        record: JoinRecord,
        keys: CurveKeys,
        *,
        keeper_pid: int = 0,
    ) -> None:
        membership = record.reply.membership
        self.paths, self.membership, self._record, self._keys = paths, membership, record, keys
        self._log = structlog.get_logger()
        self._session = HeadSession(record.reply.lease_s, boot_clock())
        self._events = EventLog(
            paths.run_dir, f"agent@{membership.node}", config.events.segment_mib * MIB, config.events.keep_segments
        )
        self._local = LocalExecutor(
            config,
            paths,
            plans,
            on_event=self._on_event,
            on_address=self._on_address,
            emit=self._events.emit,
            node=membership.node,
            host=record.host,
            environment=role_environment(paths, run_id=membership.run_id, node=membership.node, host=record.host),
        )
        self._keeper_pid = keeper_pid
        self._client = RpcClient(
            record.head, make_hello(HELLO_NAME, Incarnation(f"{membership.node}/0", membership.epoch)), curve=keys
        )
        # Several calls fit into a lease, so that one that is lost does not cost it.
        self._head = self._client.bind(HeadApi, timeout_s=max(0.2, self._session.lease_s / 5))
        self._living: set[str] = set()
        self._bindings: set[asyncio.Task[None]] = set()
        self._to_report = asyncio.Event()
        self._over: asyncio.Future[MembershipEnd] | None = None
        self._unanswered = ""
        self._signals = 0

    async def run(self) -> MembershipEnd:
        """Run until the membership ends; nothing of the run lives on this node when this returns."""
        loop = asyncio.get_running_loop()
        self._over = loop.create_future()
        procfs.become_subreaper()
        self.paths.own(os.getpid())
        update_run(self.paths.run_dir, agent=owner_of(os.getpid()))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._interrupted, signal.Signals(number).name)
        if self._keeper_pid:
            self._local.watch_keeper(self._keeper_pid)
        server = RpcServer(make_hello(self.membership.run_id, Incarnation(AGENT_SLOT, 0)))
        server.offer(WhereApi, self)
        await server.listen(f"unix://{self.paths.agent_socket}")
        self._local.prepare()
        self._session.add(AgentStarted(os.getpid(), str(self.paths.run_dir)))
        self._to_report.set()
        self._events.emit(
            "node_agent_started", node=self.membership.node, node_epoch=self.membership.epoch, pid=os.getpid()
        )
        follower = EventFollower(self.paths.run_dir)
        # Events of an earlier membership were reported by its own agent.
        follower.poll()
        work = {
            "carrying out orders": self._follow_orders(),
            "reporting": self._report(),
            "watching the lease": self._watch_lease(),
            "housekeeping": self._local.run_housekeeping(self._events),
            "following events": self._follow_events(follower),
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
        if fault := failure_of(task, self._events):
            self._finish(over=True, exit_code=EXIT_FAULT, reason=f"fault of the node's agent: {fault}")

    async def where(self, slot: str) -> str:
        if self._local.has(slot):
            return f"unix://{self.paths.socket_dir / slot_file(slot, '.sock')}"
        return self._session.addresses.get(slot, "")

    def _finish(self, *, over: bool, exit_code: int, reason: str) -> None:
        """End the membership; the first call decides how."""
        assert self._over is not None
        if not self._over.done():
            # Kill before anything else: the head starts these slots elsewhere soon after the lease has ended.
            for slot in self._living:
                self._local.carry_out(Kill(slot, "killed", reason))
            self._log.info("the membership ends", reason=reason, over=over)
            self._over.set_result(
                MembershipEnd(membership=str(self.membership), over=over, exit_code=exit_code, reason=reason)
            )

    def _interrupted(self, name: str) -> None:
        self._signals += 1
        if self._signals == 1:
            self._session.add(LeaveRequested(name))
            self._to_report.set()
        else:
            self._finish(over=True, exit_code=130, reason=f"{name} again")

    def _on_event(self, event: SlotEvent) -> None:
        if isinstance(event, SlotSpawned):
            self._living.add(event.slot)
        elif isinstance(event, SlotExited):
            self._living.discard(event.slot)
        self._session.add(event)
        self._to_report.set()

    def _on_address(self, slot: str, address: str, remote: str) -> None:
        self._session.add(SlotAddress(slot, address, remote))
        self._to_report.set()

    async def _call(self, call: Callable[[], Awaitable[T]]) -> T | None:
        """Call the head; None when it does not answer. An answer renews the lease, from the time of the call."""
        made = boot_clock()
        try:
            answer = await call()
        except StaleEpoch as error:
            self._finish(over=False, exit_code=EXIT_HEAD_LOST, reason=str(error))
            return None
        except RelaxError as error:
            if not self._unanswered:
                self._log.warning("the head does not answer", error=str(error), lease_s=self._session.lease_s)
            self._unanswered = str(error)
            await asyncio.sleep(RETRY_S)
            return None
        if self._unanswered:
            self._log.info("the head answers again")
        self._unanswered = ""
        self._session.renew(made)
        return answer

    async def _follow_orders(self) -> None:
        session = self._session
        while True:
            answer = await self._call(
                lambda: self._head.orders(self.membership, session.since, session.addresses_version, session.poll_s)
            )
            for order in session.new_orders(answer) if answer is not None else ():
                self._carry_out(order)

    def _carry_out(self, order: Order) -> None:
        match order:
            case InjectFault(slot=slot, fault=fault):
                try:
                    self._local.carry_out(order)
                except Refused as error:
                    self._log.warning("fault refused", error=str(error))
                    self._events.emit("fault_refused", slot=slot, name=fault, reason=str(error))
            case BindRendezvous():
                binding = asyncio.create_task(self._bind(order))
                self._bindings.add(binding)
                binding.add_done_callback(self._bindings.discard)
            case EndNode(exit_code=exit_code, reason=reason):
                self._finish(over=True, exit_code=exit_code, reason=reason)
            case _:
                self._local.carry_out(order)

    async def _bind(self, order: BindRendezvous) -> None:
        try:
            at = await self._local.rendezvous(order.slot, order.generation)
            answer = RendezvousBound(order.slot, order.generation, at.host, at.port)
        except OSError as error:
            answer = RendezvousBound(order.slot, order.generation, "", 0, str(error))
        self._session.add(answer)
        self._to_report.set()

    async def _report(self) -> None:
        while True:
            await self._to_report.wait()
            # Items that come together are sent together.
            await asyncio.sleep(GATHER_S)
            self._to_report.clear()
            await self._send()

    async def _send(self) -> None:
        while not self._session.nothing_to_report:
            first, items = self._session.report()
            last = await self._call(functools.partial(self._head.report, self.membership, first, list(items)))
            if last is not None:
                self._session.reported(last)

    async def _watch_lease(self) -> None:
        left_s = self._session.left_s(boot_clock())
        while left_s > 0:
            # The loop's clock stands still while the machine sleeps: check often by the boot clock.
            await asyncio.sleep(min(left_s, LEASE_CHECK_S))
            left_s = self._session.left_s(boot_clock())
        reason = (
            f"the head was not reached for lease_s = {self._session.lease_s:g} s: {self._unanswered or 'no answer'}"
        )
        self._finish(over=False, exit_code=EXIT_HEAD_LOST, reason=reason)

    async def _follow_events(self, follower: EventFollower) -> None:
        while True:
            await asyncio.sleep(FOLLOW_S)
            await self._queue_events(follower)

    async def _queue_events(self, follower: EventFollower) -> None:
        for event in await asyncio.to_thread(follower.poll):
            self._session.add(EventLine(msgspec.json.encode({**event, "node": self.membership.node})))
            self._to_report.set()

    async def _close(self, server: RpcServer, follower: EventFollower, end: MembershipEnd) -> None:
        left = await self._local.close()
        await server.close()
        self._events.emit("node_ended", node=self.membership.node, node_epoch=self.membership.epoch, reason=end.reason)
        with suppress(TimeoutError, RelaxError):
            async with asyncio.timeout(2.0 if end.over else 0.5):
                await self._queue_events(follower)
                if end.over:
                    await self._send()
                if not left:
                    # Leaving means that nothing of the run lives here; else the head waits for the lease to end.
                    await self._head.leave(self.membership, end.reason)
        await self._client.close()
        follower.close()
        self._events.close()
        self.paths.remove_private()
        try:
            update_run(self.paths.run_dir, status="node ended", exit_code=end.exit_code, reason=end.reason)
            write_end(self.paths.run_dir, end)
        except OSError as error:
            self._log.error("the end of the membership cannot be written", error=str(error))


def main(argv: list[str] | None = None) -> int:
    """Run the agent; answers with the exit code."""
    parser = argparse.ArgumentParser(
        prog="relax_rt.cluster.nodes.agent", description="Internal process of `relax-rt up --join`."
    )
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--keeper-pid", type=int, default=0)
    options = parser.parse_args(argv)
    paths = RunPaths(options.run_id, options.run_dir)
    paths.logs.mkdir(parents=True, exist_ok=True)
    with open_log(paths.log("agent")) as log:
        setup_logging(os.environ.get("RELAX_LOG_LEVEL", "info"), log)
        return run_member(paths, options.keeper_pid)


def run_member(paths: RunPaths, keeper_pid: int) -> int:
    """Run the membership recorded in the private directory, until it ends."""
    record = read_record(paths)
    try:
        config = read_resolved(paths.run_dir / RESOLVED_CONFIG)
        plans = plan_roles(config, record.reply.system)
    except RelaxError as error:
        # The head could read it: what is missing here is code.
        reason = f"this node cannot take part: {error}"
        write_end(
            paths.run_dir,
            MembershipEnd(membership=str(record.reply.membership), over=True, exit_code=EXIT_CONFIG, reason=reason),
        )
        return EXIT_CONFIG

    async def live() -> MembershipEnd:
        agent = NodeAgent(config, paths, plans, record, read_keys(paths), keeper_pid=keeper_pid)
        return await agent.run()

    return uvloop.run(live()).exit_code


if __name__ == "__main__":
    sys.exit(main())
