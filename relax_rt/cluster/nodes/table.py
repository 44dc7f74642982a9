"""The head's table of the nodes that joined: leases, epochs, orders and reports. Pure: no I/O, no clock.

Fencing is by time. A node ends its roles `lease_s` after it *made* the last call that was answered, on its own clock,
and has `stop_s` to see them dead. The head counts from when it *received* that call, which is later, and waits for
`patience_s`, which is longer than both together. So when the head declares a node lost, its processes are dead, and
others may be started in their slots at once. Where a node's clock stands still (its agent is stopped, the machine is
suspended) time does not fence: then the epochs do, which the registry issues anew with each replacement, and by which
registry, queue, weight stage and checkpoints refuse what the old processes still write.
"""

from __future__ import annotations

import collections
from typing import Literal

import msgspec

from relax_rt.cluster.nodes.api import (
    HEAD,
    MAX_ITEMS,
    NODES_PROTOCOL,
    NameTaken,
    NodeFacts,
    NodeMembership,
    Order,
    Orders,
)
from relax_rt.transport.rpc.errors import Refused, StaleEpoch

STOP_S = 2.0
"""Time that a node has to kill what ran there. SIGKILL takes milliseconds; a process in the kernel may take longer."""
DRIFT = 0.05
"""Fraction by which two clocks may run at different rates."""
TICK_S = 0.2
"""How often `tick` is called."""
AGENT_START_S = 60.0
"""Time from the answer to `join` to the first call of the node's agent, which has to start. Nothing runs there yet."""
PAUSE_S = 1.0
"""After a gap between ticks of this length every lease starts again: calls made meanwhile may wait to be read."""
MAX_NODES = 1024
REMEMBERED = 64
"""Nodes that are gone and still shown."""


def patience_s(lease_s: float) -> float:
    """Silence after which the head declares a node lost."""
    return lease_s * (1.0 + DRIFT) + STOP_S


class Departure(msgspec.Struct, frozen=True):
    """A node that left or was lost, and why: everything that ran there is dead, or fenced."""

    membership: NodeMembership
    reason: str


class NodeEntry:
    """A node that is there, or was; `seen` is the head's clock at its last call."""

    def __init__(self, membership: NodeMembership, facts: NodeFacts, token: str, now: float) -> None:
        self.membership, self.facts, self.token = membership, facts, token
        self.state: Literal["alive", "leaving", "lost", "left"] = "alive"
        self.seen = now
        self.agent_started = False
        self.reason = ""
        self.orders: collections.deque[Order] = collections.deque()
        self.confirmed = 0
        """Number of the last order that the node is known to have; orders[0] has the next."""
        self.reported = 0

    @property
    def present(self) -> bool:
        return self.state in ("alive", "leaving")


class NodeTable:
    """Who has joined, who is still there, and the orders of each.

    Args:
        run_id: of the run; a membership of another run is fenced.
        lease_s: see above.
        now: the time, monotonic seconds of the head's clock, as with every call.
    """

    def __init__(self, run_id: str, lease_s: float, now: float) -> None:
        self.run_id, self.lease_s = run_id, lease_s
        self._patience_s = patience_s(lease_s)
        self._nodes: dict[str, NodeEntry] = {}
        self._epoch = 0
        self._ticked = now
        self.addresses: dict[str, str] = {}
        self.addresses_version = 1

    def view(self) -> list[NodeEntry]:
        """Every node that is there, and the last ones that are gone."""
        return list(self._nodes.values())

    def join(self, facts: NodeFacts, token: str, now: float) -> tuple[NodeMembership, bool]:
        """Admit a node; returns its membership and whether it is new (else the same attempt asked twice).

        Raises:
            NameTaken: its name is not free.
            Refused: its code is of another version, its name is no name, or there are too many nodes.
        """
        if facts.protocol != NODES_PROTOCOL:
            why = f"it speaks version {facts.protocol} of the nodes' protocol, the head {NODES_PROTOCOL}"
            raise Refused(f"node {facts.name!r}", why=why, hint="install the same version of relax-rt on both")
        check_name(facts.name)
        known = self._nodes.get(facts.name)
        if known is not None and known.present:
            if known.token == token:
                known.seen = now
                return known.membership, False
            raise NameTaken(
                f"node {facts.name!r} cannot join",
                why=f"{known.membership} is here, last seen {now - known.seen:.1f} s ago",
                hint=f"choose another --name, or wait: it is lost {self._patience_s:g} s after its last call",
            )
        if sum(node.present for node in self._nodes.values()) >= MAX_NODES:
            raise Refused(f"node {facts.name!r}", why=f"{MAX_NODES} nodes have joined already")
        self._epoch += 1
        membership = NodeMembership(self.run_id, facts.name, self._epoch)
        self._nodes.pop(facts.name, None)
        self._nodes[facts.name] = NodeEntry(membership, facts, token, now)
        gone = [name for name, node in self._nodes.items() if not node.present]
        for name in gone[: max(0, len(gone) - REMEMBERED)]:
            del self._nodes[name]
        return membership, True

    def renew(self, membership: NodeMembership, now: float) -> bool:
        """Renew a node's lease; True if this is the first call of its agent: from now on it can be given orders. Raises
        StaleEpoch: it is fenced."""
        node = self._present(membership)
        first, node.seen, node.agent_started = not node.agent_started, now, True
        return first

    def order(self, name: str, order: Order) -> bool:
        """Queue an order for a node; False when the node is not there."""
        node = self._nodes.get(name)
        if node is None or not node.present:
            return False
        node.orders.append(order)
        return True

    def orders(self, membership: NodeMembership, since: int, addresses_version: int) -> Orders | None:
        """The orders and addresses that a node does not have yet; None when there are none. Raises StaleEpoch: it is
        fenced."""
        node = self._present(membership)
        while node.orders and node.confirmed < since:
            node.orders.popleft()
            node.confirmed += 1
        skipped = max(0, since - node.confirmed)
        items = list(node.orders)[skipped : skipped + MAX_ITEMS]
        changed = addresses_version != self.addresses_version
        if not items and not changed:
            return None
        return Orders(since + 1, items, self.addresses_version, dict(self.addresses) if changed else None)

    def report(self, membership: NodeMembership, first: int, count: int) -> int:
        """Accept a report of items `first` to `first + count - 1`; returns how many of the first are known already.

        Raises:
            StaleEpoch: it is fenced.
            Refused: something between is missing.
        """
        node = self._present(membership)
        if first > node.reported + 1:
            raise Refused(
                f"report {first} of {membership}", why=f"the one before it, {node.reported + 1}, has not come"
            )
        known = min(count, node.reported + 1 - first)
        node.reported = max(node.reported, first + count - 1)
        return known

    def reported(self, membership: NodeMembership) -> int:
        """Number of the last item reported by the node."""
        return self._present(membership).reported

    def set_address(self, slot: str, remote: str) -> None:
        """Set where a slot listens for other nodes; empty: nowhere."""
        if self.addresses.get(slot, "") == remote:
            return
        if remote:
            self.addresses[slot] = remote
        else:
            del self.addresses[slot]
        self.addresses_version += 1

    def request_leave(self, membership: NodeMembership, reason: str) -> bool:
        """Record that a node asks to leave; its slots run on until they are stopped. False when it has asked before."""
        node = self._present(membership)
        if node.state == "leaving":
            return False
        node.state, node.reason = "leaving", reason
        return True

    def is_leaving(self, membership: NodeMembership) -> bool:
        """Whether a node has asked to leave and has not left yet."""
        node = self._nodes.get(membership.node)
        return node is not None and node.membership == membership and node.state == "leaving"

    def leave(self, membership: NodeMembership, reason: str) -> Departure | None:
        """A node has left: nothing of the run lives on it. None when it was not there."""
        try:
            node = self._present(membership)
        except StaleEpoch:
            return None
        return self._drop(node, "left", reason)

    def tick(self, now: float) -> list[Departure]:
        """Declare the nodes lost that were silent for too long.

        After a gap (the head was stopped, its machine slept) nobody is lost: their calls may wait to be read.
        """
        gap, self._ticked = now - self._ticked, now
        if gap >= PAUSE_S:
            for node in self._nodes.values():
                node.seen = now if node.present else node.seen
            return []
        late = [node for node in self._nodes.values() if node.present and now - node.seen > self._limit_s(node)]
        return [self._drop(node, "lost", f"silent for {self._limit_s(node):.3g} s") for node in late]

    def _limit_s(self, node: NodeEntry) -> float:
        return self._patience_s if node.agent_started else max(self._patience_s, AGENT_START_S)

    def _drop(self, node: NodeEntry, state: Literal["lost", "left"], reason: str) -> Departure:
        node.state, node.reason = state, reason
        node.orders.clear()
        return Departure(node.membership, reason)

    def _present(self, membership: NodeMembership) -> NodeEntry:
        node = self._nodes.get(membership.node)
        if node is None or node.membership != membership or not node.present:
            if membership.run_id != self.run_id:
                why = f"run {membership.run_id} is over, this is run {self.run_id}"
            elif node is None:
                why = "no such node"
            elif node.membership != membership:
                why = f"{node.membership} has taken its place"
            else:
                why = f"it was declared lost, or left: {node.reason}"
            raise StaleEpoch(f"{membership} is fenced", why=why, hint="end its roles, then join anew")
        return node


def check_name(name: str) -> None:
    """Refuse what cannot be a node's name. Raises Refused: it has other characters, is too long, or is the head's."""
    if not name or len(name) > 40 or not all(c.isascii() and (c.isalnum() or c in "-_.") for c in name):
        hint = "1 to 40 ASCII letters, digits, '-', '_' or '.'; choose one with --name"
        raise Refused(f"node name {name[:60]!r}", why="it is no name", hint=hint)
    if name == HEAD:
        raise Refused(f"node name {name!r}", why="the head's own node is called so", hint="choose another --name")
