"""Placement: what fits is placed, nothing is given out twice, gangs are packed, and what waits says why."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_rt.supervision.placement import PARTS, Node, NoRoom, Placement, Placer
from relax_rt.supervision.tree import SlotSpec
from relax_rt.transport.rpc.errors import Refused


def need(slot: str, **fields: object) -> SlotSpec:
    return SlotSpec(slot=slot, kind=slot.partition("/")[0], **fields)  # type: ignore[arg-type]


def placed(found: Placement | NoRoom) -> Placement:
    assert isinstance(found, Placement), found
    return found


def test_slots_are_spread_over_nodes_with_cores_to_spare() -> None:
    placer = Placer([Node("head", 4), Node("b", 4)])
    nodes = [placed(placer.place(need(f"rollout/{n}", threads=2))).node for n in range(4)]
    assert nodes == ["head", "b", "head", "b"]
    # More threads than cores: nothing waits for a core.
    assert placed(placer.place(need("reward/0"))).node == "head"


def test_a_restart_returns_to_its_node_among_equals() -> None:
    placer = Placer([Node("head", 4), Node("b", 4)])
    placed(placer.place(need("x/0")))
    place = placed(placer.place(need("y/0")))
    placer.release("x/0")
    placer.release("y/0")
    assert placed(placer.place(need("y/0"))) == place


def test_gpus_are_given_out_once_and_shares_fill_one_before_the_next() -> None:
    placer = Placer([Node("", 8, 2)])
    assert placed(placer.place(need("a/0", gpus=0.5))).devices == (0,)
    assert placed(placer.place(need("a/1", gpus=0.5))).devices == (0,)
    assert placed(placer.place(need("b/0", gpus=1))).devices == (1,)
    found = placer.place(need("c/0", gpus=1))
    assert isinstance(found, NoRoom) and found.reason == "no room for 1 GPU: this node has 0 of 2 free"
    placer.release("b/0")
    assert placed(placer.place(need("c/0", gpus=1))).devices == (1,)


def test_a_pin_is_kept_and_one_to_an_unknown_node_waits() -> None:
    placer = Placer([Node("head", 4), Node("b", 1)])
    assert placed(placer.place(need("a/0", node="b"))).node == "b"
    assert placed(placer.place(need("a/1", node="b"))).node == "b"
    found = placer.place(need("a/2", node="c"))
    assert isinstance(found, NoRoom) and "'c'" in found.reason and "nodes: head, b" in found.reason
    placer.add(Node("c", 1))
    assert placed(placer.place(need("a/2", node="c"))).node == "c"


def test_slots_of_a_lost_node_go_elsewhere_or_wait_for_it() -> None:
    placer = Placer([Node("head", 4), Node("b", 8)])
    assert placed(placer.place(need("a/0", threads=5))).node == "b"
    assert placer.remove("b") == ["a/0"]
    assert placed(placer.place(need("a/0", threads=5))).node == "head"
    placer.add(Node("b", 8))
    assert placed(placer.place(need("c/0", threads=5))).node == "b"
    assert placer.remove("b", keep=True) == ["c/0"]
    found = placer.place(need("c/0", threads=5))
    assert isinstance(found, NoRoom) and "'b', which it was on" in found.reason
    placer.add(Node("b", 8))
    assert placed(placer.place(need("c/0", threads=5))).node == "b"


def test_a_gang_waits_for_a_lost_node_and_then_spreads_over_both_again() -> None:
    placer = Placer([Node("head", 4, 1), Node("b", 4, 1)])
    ranks = [need(f"trainer/{n}", gpus=1) for n in range(2)]
    assert [place.node for place in placer.place_gang(ranks)] == ["head", "b"]  # type: ignore[union-attr]
    assert placer.remove("b", keep=True) == ["trainer/1"]
    placer.release("trainer/0")
    found = placer.place_gang(ranks)
    assert isinstance(found, NoRoom) and "'b', which it was on" in found.reason
    placer.add(Node("b", 4, 1))
    assert [place.node for place in placer.place_gang(ranks)] == ["head", "b"]  # type: ignore[union-attr]


def test_closed_node_gets_no_more_slots() -> None:
    placer = Placer([Node("head", 1), Node("b", 9)])
    placer.close("b", "it is leaving")
    assert placed(placer.place(need("a/0"))).node == "head"
    found = placer.place(need("a/1", node="b"))
    assert found == NoRoom("node 'b': it is leaving")


def test_a_gang_is_packed_with_its_ranks_in_the_order_of_nodes() -> None:
    placer = Placer([Node("head", 8, 2), Node("b", 8, 4), Node("c", 8, 8)])
    whole = placer.place_gang([need(f"trainer/{n}", gpus=1) for n in range(3)])
    assert isinstance(whole, list) and {place.node for place in whole} == {"b"}
    rest = placer.place_gang([need(f"critic/{n}", gpus=1) for n in range(9)])
    assert isinstance(rest, list)
    assert [place.node for place in rest] == ["b"] + ["c"] * 8
    found = placer.place_gang([need(f"other/{n}", gpus=1) for n in range(3)])
    assert isinstance(found, NoRoom)
    assert (
        found.reason == "no room for 3 ranks of other with 1 GPU each: "
        "head has room for 2, b has room for 0, c has room for 0"
    )
    assert placed(placer.place(need("other/0", gpus=1))).node == "head", "no rank has a place"


def test_gang_without_gpus_is_packed_by_cores_and_shares_them_if_it_must() -> None:
    placer = Placer([Node("head", 2), Node("b", 2)])
    four = placer.place_gang([need(f"t/{n}") for n in range(4)])
    assert isinstance(four, list) and [place.node for place in four] == ["head", "head", "b", "b"]
    five = placer.place_gang([need(f"u/{n}") for n in range(5)])
    assert isinstance(five, list) and {place.node for place in five} == {"head"}


def test_ranks_of_a_gang_ask_for_the_same() -> None:
    with pytest.raises(Refused, match="t/1 asks for other things"):
        Placer([Node("", 8)]).place_gang([need("t/0"), need("t/1", threads=2)])
    placer = Placer([Node("", 8)])
    placer.place(need("a/0"))
    with pytest.raises(Refused, match="it has a place"):
        placer.place(need("a/0"))


NODES = st.lists(st.tuples(st.integers(1, 8), st.integers(0, 4)), min_size=1, max_size=4)
GPUS = st.sampled_from([0, 0.25, 0.3, 0.5, 1, 1.5, 2, 4])


@given(NODES, st.lists(st.tuples(GPUS, st.integers(1, 3), st.booleans()), max_size=30))
def test_nothing_is_given_out_twice_and_only_what_cannot_fit_waits(
    sizes: list[tuple[int, int]], asked: list[tuple[float, int, bool]]
) -> None:
    nodes = [Node(f"n{i}", cores, gpus) for i, (cores, gpus) in enumerate(sizes)]
    placer = Placer(nodes)
    holding: dict[str, tuple[Placement, float]] = {}

    def used(node: str, device: int) -> int:
        return sum(
            PARTS if gpus >= 1 else round(gpus * PARTS)
            for place, gpus in holding.values()
            if place.node == node and device in place.devices
        )

    for index, (gpus, threads, drop) in enumerate(asked):
        slot = f"r/{index}"
        found = placer.place(need(slot, gpus=gpus, threads=threads))
        want = PARTS if gpus >= 1 else round(gpus * PARTS)
        count = -(-gpus // 1) if gpus else 0
        fits = any(sum(used(n.name, d) + want <= PARTS for d in range(n.gpus)) >= count for n in nodes)
        assert isinstance(found, Placement) == fits
        if isinstance(found, Placement):
            assert len(set(found.devices)) == count
            holding[slot] = (found, gpus)
        for node in nodes:
            assert all(used(node.name, device) <= PARTS for device in range(node.gpus))
        if drop and holding:
            gone = next(iter(holding))
            del holding[gone]
            placer.release(gone)
    for slot in list(holding):
        placer.release(slot)
    for node in nodes:
        if node.gpus:
            assert placed(placer.place(need(f"all/{node.name}", gpus=node.gpus, node=node.name))).devices == tuple(
                range(node.gpus)
            )


@given(NODES, st.integers(1, 10), st.sampled_from([0, 1, 2]), st.integers(1, 3))
def test_a_gang_uses_the_fewest_nodes_that_hold_it(
    sizes: list[tuple[int, int]], ranks: int, gpus: int, threads: int
) -> None:
    nodes = [Node(f"n{i}", cores, count) for i, (cores, count) in enumerate(sizes)]
    found = Placer(nodes).place_gang([need(f"g/{n}", gpus=gpus, threads=threads) for n in range(ranks)])
    hard = [node.gpus // gpus if gpus else ranks for node in nodes]
    soft = [min(h, node.cores // threads) for h, node in zip(hard, nodes, strict=True)]
    room = soft if sum(min(s, ranks) for s in soft) >= ranks else hard
    if sum(room) < ranks:
        assert isinstance(found, NoRoom)
        return
    assert isinstance(found, list)
    runs = [node for node, _ in groupby(place.node for place in found)]
    assert len(runs) == len(set(runs)), "ranks of a node are next to each other"
    assert runs == sorted(runs), "in the order of the nodes"
    fewest, left = 0, ranks
    for size in sorted(room, reverse=True):
        if left <= 0:
            break
        fewest, left = fewest + 1, left - size
    assert len(runs) == fewest
    given_out = [(place.node, device) for place in found for device in place.devices]
    assert len(given_out) == len(set(given_out)) == ranks * gpus


def test_free_memory_is_preferred_to_free_cores() -> None:
    placer = Placer([Node("head", 8, 0, 1000), Node("b", 1, 0, 2000)])
    nodes = [placed(placer.place(need(f"r/{n}", memory_mib=900))).node for n in range(3)]
    assert nodes == ["head", "b", "b"]
    assert placed(placer.place(need("s/0"))).node == "head", "a slot without a limit is not counted"
    pinned = [placed(placer.place(need(f"p/{n}", memory_mib=900, node="head"))).node for n in range(2)]
    assert pinned == ["head", "head"], "nothing waits for memory"
    placer.add(Node("c", 1))
    some = [placed(placer.place(need(f"q/{n}", memory_mib=900))).node for n in range(9)]
    assert set(some) == {"c"}, "what is not known is no limit"


MEMORY = st.integers(0, 6)


@given(st.lists(st.tuples(st.integers(1, 4), MEMORY), min_size=1, max_size=4), st.lists(MEMORY, max_size=20), st.data())
def test_no_node_is_filled_over_its_memory_while_another_has_room(
    sizes: list[tuple[int, int]], asked: list[int], data: st.DataObject
) -> None:
    nodes = {f"n{i}": Node(f"n{i}", cores, 0, mib) for i, (cores, mib) in enumerate(sizes)}
    placer = Placer(nodes.values())
    held: dict[str, dict[str, int]] = {name: {} for name in nodes}

    def fits(name: str, mib: int) -> bool:
        return not mib or not nodes[name].memory_mib or sum(held[name].values()) + mib <= nodes[name].memory_mib

    for index, mib in enumerate(asked):
        place = placed(placer.place(need(f"r/{index}", memory_mib=mib)))
        assert fits(place.node, mib) or not any(fits(name, mib) for name in nodes)
        held[place.node][place.slot] = mib
        if data.draw(st.booleans()):
            slot, name = place.slot, place.node
            placer.release(slot)
            del held[name][slot]


@given(st.lists(st.tuples(st.integers(1, 4), MEMORY), min_size=1, max_size=4), st.integers(1, 8), st.integers(1, 3))
def test_a_gang_is_never_refused_for_memory_and_keeps_to_it_if_it_can(
    sizes: list[tuple[int, int]], ranks: int, mib: int
) -> None:
    nodes = {f"n{i}": Node(f"n{i}", cores, 0, memory) for i, (cores, memory) in enumerate(sizes)}
    found = Placer(nodes.values()).place_gang([need(f"g/{n}", memory_mib=mib) for n in range(ranks)])
    assert isinstance(found, list) and len(found) == ranks
    room = {name: node.memory_mib // mib if node.memory_mib else ranks for name, node in nodes.items()}
    if sum(min(ranks, count) for count in room.values()) >= ranks:
        assert all([place.node for place in found].count(name) <= count for name, count in room.items())
