"""The head's account of the nodes that joined: leases, epochs, orders and reports. Pure: no I/O, no clock.

Fencing is by time. A node ends its roles `lease_s` after it *made* the last call that was answered, on its own clock,
and has `stop_s` to see them dead. The head counts from when it *received* that call, which is later, and waits for
`patience_s`, which is longer than both together. So when the head takes a node for lost, its processes are dead, and
others may be started in their slots at once. Where a node's clock stands still (its agent is stopped, the machine is
suspended) time does not fence: then the epochs do, which the registry issues anew with each replacement, and by which
registry, queue, weight stage and checkpoints refuse what the old processes still write.
"""

from __future__ import annotations

import collections
from typing import Literal

import msgspec

from relax_rt.cluster.nodes.api import HEAD, MAX_ITEMS, NODES_PROTOCOL, Facts, NameTaken, Order, Orders, Seat
from relax_rt.transport.rpc.errors import Refused, StaleEpoch

STOP_S = 2.0
"""Time that a node has to kill what ran there. SIGKILL takes milliseconds; a process in the kernel may take longer."""
DRIFT = 0.05
"""Part by which two clocks may run differently."""
TICK_S = 0.2
"""How often `tick` is called."""
BEGIN_S = 60.0
"""Time from the answer to `join` to the first call of the node's agent, which has to start. Nothing runs there yet."""
PAUSE_S = 1.0
"""A gap between ticks from which on every node has its full time again: calls wait that were made meanwhile."""
MAX_NODES = 1024
REMEMBERED = 64
"""Nodes that are gone and still shown."""


def patience_s(lease_s: float) -> float:
    """How long the head hears nothing of a node before it takes it for lost."""
    return lease_s * (1.0 + DRIFT) + STOP_S


class NodeView(msgspec.Struct, frozen=True):
    """A node as people see it; `heard` is the head's clock at its last call."""

    seat: Seat
    state: Literal["alive", "leaving", "lost", "left"]
    facts: Facts
    heard: float
    reason: str


class Departure(msgspec.Struct, frozen=True):
    """A node that is gone, and why: everything that ran there is dead, or fenced."""

    seat: Seat
    reason: str


class _Node:
    def __init__(self, seat: Seat, facts: Facts, token: str, now: float) -> None:
        self.seat, self.facts, self.token = seat, facts, token
        self.state: Literal["alive", "leaving", "lost", "left"] = "alive"
        self.heard = now
        self.begun = False
        self.reason = ""
        self.orders: collections.deque[Order] = collections.deque()
        self.confirmed = 0
        """Number of the last order that the node is known to have; orders[0] has the next."""
        self.reported = 0

    @property
    def here(self) -> bool:
        return self.state in ("alive", "leaving")

    def view(self) -> NodeView:
        return NodeView(self.seat, self.state, self.facts, self.heard, self.reason)


class HeadCore:
    """Who has joined, who is still there, what each is to do.

    Args:
        run_id: of the run; a seat of another run is fenced.
        lease_s: see above.
        now: the time, monotonic seconds of the head's clock, as with every call.
    """

    def __init__(self, run_id: str, lease_s: float, now: float) -> None:
        self.run_id, self.lease_s = run_id, lease_s
        self._patience_s = patience_s(lease_s)
        self._nodes: dict[str, _Node] = {}
        self._epoch = 0
        self._ticked = now
        self.places: dict[str, str] = {}
        self.map_version = 1

    def view(self) -> list[NodeView]:
        """Every node that is there, and the last ones that are gone."""
        return [node.view() for node in self._nodes.values()]

    def joins(self, facts: Facts, token: str, now: float) -> tuple[Seat, bool]:
        """A node asks to take part; answers with its seat, and whether it is a new one.

        Raises:
            NameTaken: its name is not free.
            Refused: its code is of another version, its name is no name, or there are too many nodes.
        """
        if facts.protocol != NODES_PROTOCOL:
            why = f"it speaks version {facts.protocol} of the nodes' protocol, the head {NODES_PROTOCOL}"
            raise Refused(f"node {facts.name!r}", why=why, hint="install the same version of relax-rt on both")
        check_name(facts.name)
        known = self._nodes.get(facts.name)
        if known is not None and known.here:
            if known.token == token:
                known.heard = now
                return known.seat, False
            raise NameTaken(
                f"node {facts.name!r} cannot join",
                why=f"{known.seat} is here, heard of {now - known.heard:.1f} s ago",
                hint=f"choose another --name, or wait: it is given up {self._patience_s:g} s after its last word",
            )
        if sum(node.here for node in self._nodes.values()) >= MAX_NODES:
            raise Refused(f"node {facts.name!r}", why=f"{MAX_NODES} nodes have joined already")
        self._epoch += 1
        seat = Seat(self.run_id, facts.name, self._epoch)
        self._nodes.pop(facts.name, None)
        self._nodes[facts.name] = _Node(seat, facts, token, now)
        gone = [name for name, node in self._nodes.items() if not node.here]
        for name in gone[: max(0, len(gone) - REMEMBERED)]:
            del self._nodes[name]
        return seat, True

    def heard(self, seat: Seat, now: float) -> bool:
        """A node has called; True if that is its agent's first word: from now on it can be given something to do.

        Raises:
            StaleEpoch: it is fenced.
        """
        node = self._here(seat)
        first, node.heard, node.begun = not node.begun, now, True
        return first

    def order(self, name: str, order: Order) -> bool:
        """Give a node an order; False when it is not there, and nothing comes of it."""
        node = self._nodes.get(name)
        if node is None or not node.here:
            return False
        node.orders.append(order)
        return True

    def orders(self, seat: Seat, since: int, map_version: int) -> Orders | None:
        """What a node does not know yet; None when there is nothing.

        Raises:
            StaleEpoch: it is fenced.
        """
        node = self._here(seat)
        while node.orders and node.confirmed < since:
            node.orders.popleft()
            node.confirmed += 1
        skipped = max(0, since - node.confirmed)
        items = list(node.orders)[skipped : skipped + MAX_ITEMS]
        changed = map_version != self.map_version
        if not items and not changed:
            return None
        return Orders(since + 1, items, self.map_version, dict(self.places) if changed else None)

    def report(self, seat: Seat, first: int, count: int) -> int:
        """A node reports items `first` to `first + count - 1`; answers how many of the first of them are known already.

        Raises:
            StaleEpoch: it is fenced.
            Refused: something between is missing.
        """
        node = self._here(seat)
        if first > node.reported + 1:
            raise Refused(f"report {first} of {seat}", why=f"the one before it, {node.reported + 1}, has not come")
        known = min(count, node.reported + 1 - first)
        node.reported = max(node.reported, first + count - 1)
        return known

    def reported(self, seat: Seat) -> int:
        """Number of the last item that the node's reports brought."""
        return self._here(seat).reported

    def put(self, slot: str, remote: str) -> None:
        """Where a slot listens for other nodes; empty: nowhere."""
        if self.places.get(slot, "") == remote:
            return
        if remote:
            self.places[slot] = remote
        else:
            del self.places[slot]
        self.map_version += 1

    def leaving(self, seat: Seat, reason: str) -> bool:
        """A node wants to leave: it still is there, and answers for what runs on it. False when that was known."""
        node = self._here(seat)
        if node.state == "leaving":
            return False
        node.state, node.reason = "leaving", reason
        return True

    def is_leaving(self, seat: Seat) -> bool:
        """Whether a node wants to leave and has not left yet."""
        node = self._nodes.get(seat.node)
        return node is not None and node.seat == seat and node.state == "leaving"

    def left(self, seat: Seat, reason: str) -> Departure | None:
        """Nothing of the run lives on the node any more; None when it was not there anyway."""
        try:
            node = self._here(seat)
        except StaleEpoch:
            return None
        return self._gone(node, "left", reason)

    def tick(self, now: float) -> list[Departure]:
        """Take those for lost that were not heard of for too long.

        After a gap (the head was stopped, its machine slept) nobody is lost: their calls may wait to be read.
        """
        gap, self._ticked = now - self._ticked, now
        if gap >= PAUSE_S:
            for node in self._nodes.values():
                node.heard = now if node.here else node.heard
            return []
        late = [node for node in self._nodes.values() if node.here and now - node.heard > self._limit_s(node)]
        return [self._gone(node, "lost", f"not heard of for {self._limit_s(node):.3g} s") for node in late]

    def _limit_s(self, node: _Node) -> float:
        return self._patience_s if node.begun else max(self._patience_s, BEGIN_S)

    def _gone(self, node: _Node, state: Literal["lost", "left"], reason: str) -> Departure:
        node.state, node.reason = state, reason
        node.orders.clear()
        return Departure(node.seat, reason)

    def _here(self, seat: Seat) -> _Node:
        node = self._nodes.get(seat.node)
        if node is None or node.seat != seat or not node.here:
            if seat.run_id != self.run_id:
                why = f"run {seat.run_id} is over, this is run {self.run_id}"
            elif node is None:
                why = "no such node"
            elif node.seat != seat:
                why = f"{node.seat} has taken its place"
            else:
                why = f"it was given up: {node.reason}"
            raise StaleEpoch(f"{seat} is fenced", why=why, hint="end its roles, then join anew")
        return node


def check_name(name: str) -> None:
    """Raises:
    Refused: a node cannot be called this.
    """
    if not name or len(name) > 40 or not all(c.isascii() and (c.isalnum() or c in "-_.") for c in name):
        hint = "1 to 40 ASCII letters, digits, '-', '_' or '.'; choose one with --name"
        raise Refused(f"node name {name[:60]!r}", why="it is no name", hint=hint)
    if name == HEAD:
        raise Refused(f"node name {name!r}", why="the head's own node is called so", hint="choose another --name")
