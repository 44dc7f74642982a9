"""The store of a gang: a generation reads and writes its own keys only."""

from __future__ import annotations

import os
import socket

import msgspec
import pytest

from relax_rt.hosting import gang as module
from relax_rt.hosting.gang import RENDEZVOUS_FD, Gang
from relax_rt.supervision.executor import GangRendezvous, gang_orders
from relax_rt.supervision.local import gang_environment
from relax_rt.supervision.protocol import Start, StartGang


def test_ranks_of_one_start_have_one_key_and_the_next_start_another() -> None:
    gang = StartGang("ranks", 1, [Start("ranks/0", "a", ()), Start("ranks/1", "b", ())])
    first, again = (gang_orders(gang, GangRendezvous("10.0.0.1", 7)) for _ in range(2))
    assert len({order.key for order in first}) == 1 and len({order.key for order in first + again}) == 2
    place = Gang.here(gang_environment(first[1]))
    assert (place.key, place.rank, place.world_size) == (first[0].key, 1, 2)


def test_a_rank_of_another_generation_at_the_same_store_spoils_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    listener = socket.create_server(("127.0.0.1", 0))
    place = Gang(
        generation=2,
        rank=0,
        world_size=2,
        local_rank=0,
        local_world_size=2,
        master_addr="127.0.0.1",
        master_port=listener.getsockname()[1],
        key="two",
    )
    monkeypatch.setenv(RENDEZVOUS_FD, str(os.dup(listener.fileno())))
    monkeypatch.setattr(module, "_serving", [])
    listener.close()
    mine = place.store(5.0)
    peer = msgspec.structs.replace(place, rank=1).store(5.0)
    stranger = msgspec.structs.replace(place, rank=1, generation=1, key="one").store(0.2)
    mine.set("address", "of two")
    stranger.set("address", "of one")
    stranger.set("stale", "of one")
    assert peer.get("address") == b"of two"
    assert not peer.check(["stale"])
