"""The head's door: HeadApi over tcp with CURVE, for nodes that hold the run's key."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress

import structlog

from relax_rt.cluster.nodes.api import DOOR, HEAD, Facts, HeadApi, Item, Joined, Orders, Seat
from relax_rt.cluster.nodes.base import SYSTEM, HeadBase
from relax_rt.cluster.nodes.fleet import Fleet
from relax_rt.cluster.nodes.head import STOP_S, TICK_S, HeadCore
from relax_rt.cluster.nodes.listen import check_listen
from relax_rt.cluster.nodes.seat import read_keys
from relax_rt.supervision.executor import EmitEvent
from relax_rt.supervision.rundir import RESOLVED_CONFIG, read_run
from relax_rt.transport.rpc.address import AddressError, parse_address
from relax_rt.transport.rpc.errors import Refused, StaleEpoch
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.rpc import CurveKeys, Server, make_hello

MAX_WAIT_S = 30.0


class Door:
    """Serves HeadApi, and lets leases lapse.

    Args:
        fleet: what becomes of what nodes say.
        core: the account; the fleet's.
        config: the resolved config, JSON; system: the system roles of the run.
        keys: of the run.
        emit: appends to the run's event log.
    """

    def __init__(
        self, fleet: Fleet, core: HeadCore, *, config: str, system: list[str], keys: CurveKeys, emit: EmitEvent
    ) -> None:
        self._fleet, self._core = fleet, core
        self._config, self._system = config, system
        self._emit = emit
        self._log = structlog.get_logger()
        self._server = Server(make_hello(DOOR, Incarnation(f"{HEAD}/0", 0)), curve=keys)
        self._server.offer(HeadApi, self)
        self._ticking: asyncio.Task[None] | None = None
        self.address = ""

    async def open(self, listen: str) -> str:
        """Listen at an address; answers with it, its port the real one.

        Raises:
            AddressError: nothing can listen there.
        """
        self.address = await self._server.listen(listen)
        self._ticking = asyncio.create_task(self._tick())
        return self.address

    async def close(self) -> None:
        """Hear nobody any more."""
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.wait([self._ticking])
        await self._server.close()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for departure in self._core.tick(time.monotonic()):
                self._fleet.gone(departure, lost=True)

    async def join(self, facts: Facts, token: str) -> Joined:
        """See HeadApi."""
        if self._fleet.ending is not None:
            raise Refused(f"node {facts.name!r} cannot join", why=f"the run is over: {self._fleet.ending.reason}")
        seat, new = self._core.joins(facts, token, time.monotonic())
        if new:
            self._fleet.joined(seat, facts)
        return Joined(seat=seat, config=self._config, system=self._system, lease_s=self._core.lease_s, stop_s=STOP_S)

    async def orders(self, seat: Seat, since: int, map_version: int, wait_s: float) -> Orders:
        """See HeadApi."""
        self._heard(seat)
        deadline = time.monotonic() + min(max(0.0, wait_s), MAX_WAIT_S)
        while True:
            news = self._fleet.news
            found = self._core.orders(seat, since, map_version)
            left_s = deadline - time.monotonic()
            if found is not None or left_s <= 0:
                return found or Orders(since + 1, [], map_version)
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await news.wait()

    async def report(self, seat: Seat, first: int, items: list[Item]) -> int:
        """See HeadApi."""
        self._heard(seat)
        known = self._core.report(seat, first, len(items))
        self._fleet.reported(seat, items[known:])
        return first + len(items) - 1

    async def leave(self, seat: Seat, reason: str) -> None:
        """See HeadApi."""
        departure = self._core.left(seat, reason)
        if departure is not None:
            self._fleet.gone(departure, lost=False)

    def _heard(self, seat: Seat) -> None:
        try:
            first = self._core.heard(seat, time.monotonic())
        except StaleEpoch as error:
            self._emit("node_fenced", node=seat.node, node_epoch=seat.epoch, reason=str(error.why))
            raise
        if first:
            self._fleet.began(seat)


async def _open(door: Door, wanted: str, before: str) -> str:
    """Where any port will do, the one before: nodes that knew the head before it died find it there again."""
    if before and parse_address(wanted).port == 0 and parse_address(before).host == parse_address(wanted).host:
        try:
            return await door.open(before)
        except AddressError:
            pass
    return await door.open(wanted)


async def open_door(fleet: Fleet, base: HeadBase, listen: str, kinds: Sequence[str]) -> Door | None:
    """The head's door, opened; None in a run of one node.

    Args:
        listen: HOST:PORT.
        kinds: the roles of the run.

    Raises:
        AddressError: nothing can listen there.
    """
    if fleet.core is None:
        return None
    config = (base.paths.run_dir / RESOLVED_CONFIG).read_text()
    door = Door(
        fleet,
        fleet.core,
        config=config,
        system=[kind for kind in SYSTEM if kind in kinds],
        keys=read_keys(base.paths),
        emit=fleet.emit,
    )
    address = await _open(door, check_listen(listen), str((read_run(base.paths.run_dir) or {}).get("listen", "")))
    fleet.emit("listening_for_nodes", address=address)
    return door
