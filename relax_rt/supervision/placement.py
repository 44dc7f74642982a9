"""Places slots on nodes and on their GPUs. Pure: no I/O, no clock. The supervisor calls it.

GPUs and pins are hard: what does not fit waits, with a reason. Memory and cores are preferences, in this order: a
role's limit is not what it uses, and threads share cores when there are too few. So nothing ever waits for either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from relax_rt.supervision.tree import SlotSpec
from relax_rt.transport.rpc.errors import Refused

PARTS = 1000
"""A GPU is allocated in thousandths, so that shares add up exactly."""


class Node(msgspec.Struct, frozen=True):
    """The resources of a node: its cores, its number of GPUs and its memory (0: not known, so any amount)."""

    name: str
    cores: int = 1
    gpus: int = 0
    memory_mib: int = 0


class Placement(msgspec.Struct, frozen=True):
    """Where a slot runs, and the numbers of the devices that are its own or that it shares."""

    slot: str
    node: str
    devices: tuple[int, ...] = ()


class NoRoom(msgspec.Struct, frozen=True):
    """There is no room now, and why."""

    reason: str


class _Allocation(msgspec.Struct):
    need: SlotSpec
    placement: Placement
    parts: int
    """Of each of its devices."""


class _NodeState:
    """The free resources of a node."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.free = [PARTS] * node.gpus
        self.threads = 0
        self.memory_mib = 0
        self.kinds: dict[str, int] = {}
        self.closed = ""

    def devices(self, gpus: float, ranks: int = 1) -> list[tuple[int, ...]]:
        """Return devices for as many of these ranks as fit, each with its own."""
        if gpus <= 0:
            return [()] * ranks
        left, found = list(self.free), []
        for _ in range(ranks):
            chosen = _choose(left, gpus)
            if chosen is None:
                break
            for device in chosen:
                left[device] -= _parts(gpus)
            found.append(chosen)
        return found


def _parts(gpus: float) -> int:
    """Return the thousandths of each device that a slot needs."""
    return PARTS if gpus >= 1 else max(1, round(gpus * PARTS))


def _choose(free: Sequence[int], gpus: float) -> tuple[int, ...] | None:
    if gpus < 1:
        # The fullest that still has room, so that whole devices stay whole.
        fits = [(parts, device) for device, parts in enumerate(free) if parts >= _parts(gpus)]
        return (min(fits)[1],) if fits else None
    whole = [device for device, parts in enumerate(free) if parts == PARTS]
    count = math.ceil(gpus)
    return tuple(whole[:count]) if len(whole) >= count else None


class Placer:
    """Allocates the resources of nodes to slots.

    Single slots are spread: to a node with memory to spare before one without, likewise with cores, then to the one
    with the fewest of the same role, then to the least loaded, then to where the slot was before. A gang is packed onto
    as few nodes as can hold it, its ranks in the order of the nodes, whole or not at all.
    """

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self._rooms: dict[str, _NodeState] = {}
        self._taken: dict[str, _Allocation] = {}
        self._before: dict[str, str] = {}
        self._kept: dict[str, str] = {}
        for node in nodes:
            self.add(node)

    @property
    def nodes(self) -> list[Node]:
        """The nodes, in the order in which they joined."""
        return [room.node for room in self._rooms.values()]

    def add(self, node: Node) -> None:
        """Add a node, with everything free. Raises Refused: one of this name is there."""
        if node.name in self._rooms:
            raise Refused(f"node {node.name!r}", why="there is one of this name")
        self._rooms[node.name] = _NodeState(node)

    def close(self, name: str, reason: str) -> None:
        """Place nothing more on a node: it is about to leave."""
        if name in self._rooms:
            self._rooms[name].closed = reason

    def open(self, name: str) -> None:
        """Place slots on a closed node again."""
        if name in self._rooms:
            self._rooms[name].closed = ""

    def closed(self, name: str) -> str:
        """Return why nothing more is placed on a node; empty when it is open, or unknown."""
        return self._rooms[name].closed if name in self._rooms else ""

    def barred(self, need: SlotSpec) -> str:
        """Return why no release by others can make room: the node that the slot needs is gone or closed, or all are."""
        pin = self._pin(need)
        return "" if self._open(pin) else self._why(need, pin, 1)

    def remove(self, name: str, *, keep: bool = False) -> list[str]:
        """Remove a node that is gone; return the slots that were on it.

        keep: these slots wait for a node of this name, instead of going elsewhere.
        """
        slots = [slot for slot, taken in self._taken.items() if taken.placement.node == name]
        for slot in slots:
            self.release(slot)
            if keep:
                self._kept[slot] = name
        self._rooms.pop(name, None)
        return slots

    def release(self, slot: str) -> None:
        """Free what the slot had: its process is gone."""
        taken = self._taken.pop(slot, None)
        if taken is None:
            return
        self._before[slot] = taken.placement.node
        room = self._rooms[taken.placement.node]
        room.threads -= taken.need.threads
        room.memory_mib -= taken.need.memory_mib
        room.kinds[taken.need.kind] -= 1
        for device in taken.placement.devices:
            room.free[device] += taken.parts

    def place(self, need: SlotSpec) -> Placement | NoRoom:
        """Place one slot. Raises Refused: it has one."""
        self._fresh(need)
        pin = self._pin(need)
        rooms = [room for room in self._open(pin) if room.devices(need.gpus)]
        if not rooms:
            return NoRoom(self._why(need, pin, 1))
        order = list(self._rooms)

        # Compared from left to right. Memory before cores: a node that swaps or kills costs a run more than one that
        # is slow. The number of the same role before the load: slots of one role do the same work at the same time,
        # and a lost node should cost a role as few of its slots as possible. The node before among equals, for its
        # warm caches.
        def cost(room: _NodeState) -> tuple[bool, bool, int, float, bool, int]:
            load = (room.threads + need.threads) / max(1, room.node.cores)
            elsewhere = self._before.get(need.slot) != room.node.name
            few = room.kinds.get(need.kind, 0)
            crowded = need.memory_mib > 0 and 0 < room.node.memory_mib < room.memory_mib + need.memory_mib
            return crowded, load > 1, few, load, elsewhere, order.index(room.node.name)

        room = min(rooms, key=cost)
        return self._take(need, room, room.devices(need.gpus)[0])

    def place_gang(self, needs: Sequence[SlotSpec]) -> list[Placement] | NoRoom:
        """Place all ranks of a gang, in their order, or none. Raises Refused: one of them has a place, or the ranks ask
        for different things."""
        if not needs:
            return []
        first = needs[0]
        for need in needs:
            self._fresh(need)
            if msgspec.structs.replace(need, slot=first.slot) != first:
                raise Refused(f"gang {first.kind}", why=f"{need.slot} asks for other things than {first.slot}")
        # The nodes of all ranks are waited for; once they are there the gang is packed anew.
        away = (kept for need in needs if (kept := self._kept.get(need.slot, "")) and kept not in self._rooms)
        pin = first.node or next(away, "")
        rooms = self._open(pin)
        fits = {room.node.name: room.devices(first.gpus, len(needs)) for room in rooms}
        chosen = _pack(rooms, fits, first, len(needs))
        if chosen is None:
            return NoRoom(self._why(first, pin, len(needs)))
        ranks, places = iter(needs), []
        for room, count in chosen:
            for devices in fits[room.node.name][:count]:
                places.append(self._take(next(ranks), room, devices))
        return places

    def _fresh(self, need: SlotSpec) -> None:
        if need.slot in self._taken:
            raise Refused(f"placing {need.slot}", why=f"it has a place on {self._taken[need.slot].placement.node!r}")

    def _pin(self, need: SlotSpec) -> str:
        return need.node or self._kept.get(need.slot, "")

    def _open(self, pin: str) -> list[_NodeState]:
        return [room for name, room in self._rooms.items() if pin in ("", name) and not room.closed]

    def _take(self, need: SlotSpec, room: _NodeState, devices: tuple[int, ...]) -> Placement:
        place = Placement(need.slot, room.node.name, devices)
        parts = _parts(need.gpus) if devices else 0
        self._taken[need.slot] = _Allocation(need, place, parts)
        self._kept.pop(need.slot, None)
        room.threads += need.threads
        room.memory_mib += need.memory_mib
        room.kinds[need.kind] = room.kinds.get(need.kind, 0) + 1
        for device in devices:
            room.free[device] -= parts
        return place

    def _why(self, need: SlotSpec, pin: str, ranks: int) -> str:
        """Return why there is no room: what is needed, and what each eligible node has."""
        if pin and pin not in self._rooms:
            known = ", ".join(self._rooms) or "none"
            kept = "was on" if not need.node else 'is pinned to (node = "…")'
            return f"node {pin!r}, which it {kept}, is not there; nodes: {known}"
        if pin and self._rooms[pin].closed:
            return f"node {pin!r}: {self._rooms[pin].closed}"
        asked = f"{need.gpus:g} GPUs" if need.gpus != 1 else "1 GPU"
        what = f"{ranks} ranks of {need.kind} with {asked} each" if ranks > 1 else asked
        having = []
        for room in (room for name, room in self._rooms.items() if pin in ("", name)):
            name = room.node.name or "this node"
            if room.closed:
                having.append(f"{name} ({room.closed})")
            elif ranks > 1:
                having.append(f"{name} has room for {len(room.devices(need.gpus, ranks))}")
            else:
                having.append(f"{name} has {sum(room.free) / PARTS:g} of {room.node.gpus} free")
        return f"no room for {what}: {', '.join(having) or 'there is no node'}"


def _pack(
    rooms: Sequence[_NodeState], fits: dict[str, list[tuple[int, ...]]], need: SlotSpec, ranks: int
) -> list[tuple[_NodeState, int]] | None:
    """Return how many ranks go to which node, or None when they do not fit: as few nodes as possible, in their order.

    Memory and cores decide only among ways that GPUs allow: a node takes as many ranks as it has both for if that is
    enough all in all, else as many as it has memory for, else as many as its devices hold.
    """
    hard, held, soft = {}, {}, {}
    for room in rooms:
        node = room.node
        hard[node.name] = held[node.name] = len(fits[node.name])
        if node.memory_mib and need.memory_mib:
            left = max(0, node.memory_mib - room.memory_mib)
            held[node.name] = min(hard[node.name], left // need.memory_mib)
        idle = max(0, node.cores - room.threads)
        soft[node.name] = min(held[node.name], idle // max(1, need.threads))
    for room_for in (soft, held, hard):
        if sum(room_for.values()) < ranks:
            continue
        # Stable: among equals the earlier node. The greedy choice of the largest is the fewest nodes.
        order = sorted(rooms, key=lambda room: -room_for[room.node.name])
        taken: dict[str, int] = {}
        left = ranks
        for room in order:
            count = min(left, room_for[room.node.name])
            if count == left:
                # The last node: the smallest that holds the rest leaves large ones whole.
                fitting = [r for r in order if r.node.name not in taken and room_for[r.node.name] >= left]
                room = min(fitting, key=lambda r: room_for[r.node.name])
            taken[room.node.name] = count
            left -= count
            if not left:
                return [(room, taken[room.node.name]) for room in rooms if room.node.name in taken]
    return None
