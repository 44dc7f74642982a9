"""The store within its limits: what is too much is refused, and what has no room waits for it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eventually import eventually
from store_driver import Driver

from relax_rt.transport.base.calls import SILENT_S
from relax_rt.transport.base.liveness import node_name
from relax_rt.transport.compat.store import ledger as ev
from relax_rt.transport.compat.store.api import FoundRows, RowNames, StoreConfig
from relax_rt.transport.compat.store.broker import StoreBroker
from relax_rt.transport.compat.store.client import StoreClient
from relax_rt.transport.compat.store.service import StoreService
from relax_rt.transport.memory.refs import BlobRef, BlockRef, Extent
from relax_rt.transport.rpc.errors import OutOfSpace, Refused, StaleEpoch
from relax_rt.transport.rpc.identity import Incarnation


def tight(**limits: int) -> Driver:
    return Driver(StoreConfig(expected=0), ev.StoreLimits(**limits))


def put(driver: Driver, *keys: str, field: str = "x") -> str:
    """Why it waits."""
    block = driver.block("a", len(keys), (field,))
    waiting_on: str = driver.call("a", ev.PutRows(RowNames("p", list(keys)), block=block)).waiting_on
    return waiting_on


def test_first_columns_wait_for_room_and_later_ones_do_not() -> None:
    driver = tight(capacity_bytes=128)
    assert driver.call("a", ev.PutRows(RowNames("p", ["empty"]))).waiting_on == ""
    assert put(driver, "k", "l") == ""
    before = driver.ledger.snapshot()
    assert put(driver, "m") == put(driver, "k", "m") == "payloads fill the capacity: 128 of 128 bytes"
    assert "128 of 128 bytes" in put(driver, "empty")
    assert driver.ledger.snapshot() == before
    assert put(driver, "k", field="y") == ""
    driver.call("b", ev.ClearRows(RowNames("p", ["k", "l"])))
    assert put(driver, "m") == ""


def test_what_makes_room_wakes_who_waits_for_it() -> None:
    driver = tight(capacity_bytes=64)
    put(driver, "k")
    pin = driver.get("b", RowNames("p", ["k"])).pin
    for name, event, wakes in (
        ("b", ev.UnpinRows([99]), False),
        ("c", ev.ClearRows(RowNames("p", ["k"])), True),
        ("b", ev.UnpinRows([pin]), True),
    ):
        assert ("room" in driver.outcome(name, event).touched) == wakes


def _block(nbytes: int, *fields: str) -> BlockRef:
    return BlockRef(Extent("a-0-1-1.slab", 0, nbytes), 1, fields)


@pytest.mark.parametrize(
    ("event", "names"),
    [
        (ev.PutRows(RowNames("p", ["k"]), block=_block(65, "x")), "65 bytes, max_row_bytes is 64"),
        (
            ev.PutRows(
                RowNames("p", ["k"]),
                block=_block(64, "x"),
                blobs=[BlobRef(b"d" * 16, Extent("a-0-1-1.slab", 64, 65))],
            ),
            "65 bytes, max_row_bytes is 64",
        ),
        (ev.PutRows(RowNames("p", ["k"]), block=_block(64)), "no fields"),
        (
            ev.PutRows(RowNames("p", ["k"]), blobs=[BlobRef(b"d" * 16, Extent("a-0-1-1.slab", 64, 6))]),
            "without a block",
        ),
    ],
)
def test_what_is_too_large_or_incomplete_is_refused(event: ev.PutRows, names: str) -> None:
    driver = tight(max_row_bytes=64)
    before = driver.ledger.snapshot()
    with pytest.raises(Refused, match=names):
        driver.call("a", event)
    assert driver.ledger.snapshot() == before


def broker(folder: Path, who: list[Incarnation]) -> StoreBroker:
    (folder / "shm").mkdir(parents=True, exist_ok=True)
    return StoreBroker(
        folder / "store",
        folder / "shm",
        folder / "spill",
        memory="m",
        limits=ev.StoreLimits(),
        identify=lambda: who[-1],
    )


async def test_an_unmet_wait_under_a_number_is_no_answer_to_another_call(tmp_path: Path) -> None:
    who: list[Incarnation] = []
    one = broker(tmp_path, who)
    await one.open()
    who.append((await one.join("a/0", node_name(), os.getpid())).who)
    assert (await one.sample(7, "p", "t", [], 1, None, None, 0.0)).waiting_on
    with pytest.raises(Refused, match="another call had this number"):
        await one.put(7, RowNames("p", ["k"]), 0, None, [], [], False, 0.0)
    await one.close()


async def test_a_caller_that_has_not_joined_this_memory_is_refused(tmp_path: Path) -> None:
    one = broker(tmp_path, [Incarnation("a/0", 1)])
    await one.open()
    with pytest.raises(StaleEpoch, match="has not joined"):
        await one.clear(1, RowNames("p"))
    with pytest.raises(Refused, match="another node"):
        await one.join("a/0", "elsewhere", os.getpid())
    await one.close()


async def test_a_folder_of_a_queue_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    with pytest.raises(Refused, match="begin in a new folder"):
        await StoreService(tmp_path, ev.StoreLimits()).open()


# --- with a service


@asynccontextmanager
async def served(folder: Path, **settings: Any) -> AsyncIterator[tuple[StoreService, StoreClient]]:
    service = StoreService(folder, ev.StoreLimits(1 << 16))
    await service.open()
    try:
        store = await StoreClient.connect(folder, "client/0", capacity_bytes=1 << 20, **settings)
        try:
            yield service, store
        finally:
            await store.close()
    finally:
        await service.close()


COLUMN = {"x": np.zeros((1, 12_000), np.int32)}
"""Two of them are more than the capacity."""


async def test_a_put_waits_for_room_for_all_to_see(tmp_path: Path) -> None:
    async with asyncio.timeout(120), served(tmp_path / "queue") as (service, store):
        await store.put(RowNames("p", ["k"]), COLUMN)
        await store.put(RowNames("p", ["l"]), COLUMN)
        waiting = asyncio.ensure_future(store.put(RowNames("p", ["m"]), COLUMN))
        while not (seen := service.broker.waiting()):  # noqa: ASYNC110 - there is nothing to wait on
            await asyncio.sleep(0.01)
        assert "payloads fill the capacity" in seen["client/0"]
        while not store.waiting_on:  # noqa: ASYNC110 - nor here
            await asyncio.sleep(0.01)
        assert store.waiting_on == seen["client/0"]
        assert not waiting.done()
        await store.clear(RowNames("p", ["k"]))
        assert (await waiting).indexes == [2]
        assert store.waiting_on == "" and service.broker.waiting() == {}


async def test_a_put_gives_up_in_time_and_takes_its_memory_back(tmp_path: Path) -> None:
    async with asyncio.timeout(120), served(tmp_path / "queue", space_wait_s=0.1) as (_, store):
        await store.put(RowNames("p", ["k"]), COLUMN)
        await store.put(RowNames("p", ["l"]), COLUMN)
        used = store.writer.statistics().used_bytes
        with pytest.raises(OutOfSpace, match="payloads fill the capacity"):
            await store.put(RowNames("p", ["m"]), COLUMN)
        assert store.writer.statistics().used_bytes == used
        assert store.waiting_on == ""
        assert list((await store.api.list_keys("p"))["p"]) == ["k", "l"]


async def test_a_wait_for_samples_is_no_silence_of_the_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slices: list[float] = []
    async with asyncio.timeout(120), served(tmp_path / "queue") as (_, store):
        ask = store.api.sample

        async def sample(*arguments: Any) -> FoundRows:
            slices.append(arguments[-1])
            return await ask(*arguments[:-1], 0.0)

        monkeypatch.setattr(store.api, "sample", sample)
        waiting = asyncio.ensure_future(store.sample("p", "t", ["x"], 1, wait_s=100.0))
        await eventually(lambda: len(slices) > 1)
        await store.put(RowNames("p", ["k"]), COLUMN)
        assert (await waiting).keys == ["k"] and store.waiting_on == ""
    assert max(slices) < SILENT_S, "a call without an answer for so long is reported as a silent broker"
