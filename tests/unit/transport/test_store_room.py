"""The keyed store within the limits of its queue: what is too much is refused, and what has no room waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_driver import WHO, Driver

from relax_rt.transport.compat.store import state as sv
from relax_rt.transport.compat.store.api import Rows, StoreConfig
from relax_rt.transport.compat.store.client import StoreClient
from relax_rt.transport.compat.store.desk import StoreDesk
from relax_rt.transport.memory.refs import BlobRef, BlockRef, Extent
from relax_rt.transport.queue.hosting import Host
from relax_rt.transport.queue.ledger import events as ev
from relax_rt.transport.queue.ledger.messages import Put
from relax_rt.transport.queue.ledger.policy import LedgerPolicy, QueueLimits
from relax_rt.transport.rpc.errors import OutOfSpace, Refused

POLICY = LedgerPolicy(tasks={"t": ("x",)}, step_task="", fields={"x": "int32[*]", "y": "int32[*]"})


def tight(**limits: int) -> Driver:
    return Driver(StoreConfig(expected=0), QueueLimits(**limits), POLICY)  # type: ignore[arg-type]


def put(driver: Driver, *keys: str, field: str = "x") -> str:
    """Why it waits."""
    block = driver.block("a", len(keys), (field,))
    waiting_on: str = driver.call("a", sv.Put(Rows("p", list(keys)), block=block)).waiting_on
    return waiting_on


def test_first_columns_wait_for_room_and_later_ones_do_not() -> None:
    driver = tight(capacity_bytes=128)
    assert driver.call("a", sv.Put(Rows("p", ["empty"]))).waiting_on == ""
    assert put(driver, "k", "l") == ""
    before = driver.ledger.snapshot()
    assert put(driver, "m") == put(driver, "k", "m") == "payloads fill the capacity: 128 of 128 bytes"
    assert "128 of 128 bytes" in put(driver, "empty")
    assert driver.ledger.snapshot() == before
    assert put(driver, "k", field="y") == ""
    driver.call("b", sv.Clear(Rows("p", ["k", "l"])))
    assert put(driver, "m") == ""


def test_rows_count_beside_the_samples_of_the_queue() -> None:
    driver = tight(capacity_samples=3)
    offered = ev.PutGroups([Put(driver.block("a", 1, ("x",)), [])], [1])
    driver.seq["a"] += 1
    driver.enter(offered, WHO["a"], driver.seq["a"])
    assert put(driver, "k", "l") == ""
    for event in (sv.Put(Rows("p"), new=1), sv.Put(Rows("q", ["m"]))):
        assert driver.call("b", event).waiting_on == "3 samples and rows are in the queue, 3 allowed"
    assert put(driver, "k", "l") == ""
    with pytest.raises(Refused, match="3 are allowed"):
        driver.call("b", sv.Put(Rows("p"), new=4))
    driver.call("b", sv.Clear(Rows("p", ["k"])))
    assert driver.call("b", sv.Put(Rows("p"), new=1)).waiting_on == ""


def test_what_makes_room_wakes_who_waits_for_it() -> None:
    driver = tight(capacity_bytes=64)
    put(driver, "k")
    pin = driver.get("b", Rows("p", ["k"])).pin
    for name, event, wakes in (
        ("b", sv.Unpin([99]), False),
        ("c", sv.Clear(Rows("p", ["k"])), True),
        ("b", sv.Unpin([pin]), True),
    ):
        assert ("room" in driver.outcome(name, event).touched) == wakes


def _block(nbytes: int, *fields: str) -> BlockRef:
    return BlockRef(Extent("a-0-1-1.slab", 0, nbytes), 1, fields)


@pytest.mark.parametrize(
    ("event", "names"),
    [
        (sv.Put(Rows("p", ["k"]), block=_block(65, "x")), "65 bytes, max_sample_bytes is 64"),
        (
            sv.Put(
                Rows("p", ["k"]),
                block=_block(64, "x"),
                blobs=[BlobRef(b"d" * 16, Extent("a-0-1-1.slab", 64, 65))],
            ),
            "65 bytes, max_sample_bytes is 64",
        ),
        (sv.Put(Rows("p", ["k"]), block=_block(64, "z")), "the declared fields are x, y"),
        (sv.Put(Rows("p", ["k"]), block=_block(64)), "no fields"),
        (sv.Put(Rows("p", ["k"]), blobs=[BlobRef(b"d" * 16, Extent("a-0-1-1.slab", 64, 6))]), "without a block"),
    ],
)
def test_what_is_too_large_or_not_declared_is_refused(event: sv.Put, names: str) -> None:
    driver = tight(max_sample_bytes=64)
    before = driver.ledger.snapshot()
    with pytest.raises(Refused, match=names):
        driver.call("a", event)
    assert driver.ledger.snapshot() == before


async def test_an_answer_of_another_call_is_refused() -> None:
    async def wait(event: Any, seq: int, wait_s: float, kind: type[Any]) -> Any:
        raise AssertionError

    desk = StoreDesk(lambda: Driver().ledger.core.store, lambda event, seq: None, wait)
    with pytest.raises(Refused, match="another call had this number"):
        await desk.store_clear(7, Rows("p"))


# --- with a broker


@asynccontextmanager
async def served(folder: Path, **settings: Any) -> AsyncIterator[tuple[Host, StoreClient]]:
    host = Host(folder, LedgerPolicy(tasks={"t": ("x",)}, step_task=""), QueueLimits(capacity_bytes=1 << 16))
    await host.open()
    try:
        store = await StoreClient.connect(folder, "door/0", capacity_bytes=1 << 20, **settings)
        try:
            yield host, store
        finally:
            await store.close()
    finally:
        await host.close()


COLUMN = {"x": np.zeros((1, 12_000), np.int32)}
"""Two of them are more than the capacity."""


async def test_a_put_waits_for_room_for_all_to_see(tmp_path: Path) -> None:
    async with asyncio.timeout(120), served(tmp_path / "queue") as (host, store):
        await store.put(Rows("p", ["k"]), COLUMN)
        await store.put(Rows("p", ["l"]), COLUMN)
        waiting = asyncio.ensure_future(store.put(Rows("p", ["m"]), COLUMN))
        assert host.broker is not None
        while not (seen := (await host.broker.stats()).waiting):  # noqa: ASYNC110 - there is nothing to wait on
            await asyncio.sleep(0.01)
        assert "payloads fill the capacity" in seen["door/0"]
        while not store.waiting_on:  # noqa: ASYNC110 - nor here
            await asyncio.sleep(0.01)
        assert store.waiting_on == seen["door/0"]
        assert not waiting.done()
        await store.clear(Rows("p", ["k"]))
        assert (await waiting).indexes == [2]
        assert store.waiting_on == "" and (await host.broker.stats()).waiting == {}


async def test_a_put_gives_up_in_time_and_takes_its_memory_back(tmp_path: Path) -> None:
    async with asyncio.timeout(120), served(tmp_path / "queue", space_wait_s=0.1) as (_, store):
        await store.put(Rows("p", ["k"]), COLUMN)
        await store.put(Rows("p", ["l"]), COLUMN)
        used = store.writer.statistics().used_bytes
        with pytest.raises(OutOfSpace, match="payloads fill the capacity"):
            await store.put(Rows("p", ["m"]), COLUMN)
        assert store.writer.statistics().used_bytes == used
        assert store.waiting_on == ""
        assert list((await store.list_keys("p"))["p"]) == ["k", "l"]
