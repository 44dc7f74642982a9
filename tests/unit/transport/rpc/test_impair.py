"""Delay, partition and loss of this process's messages."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import pathlib
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from eventually import eventually
from rpc_far_end import FarEnd, calling, serving

from relax_rt.transport.rpc import impair
from relax_rt.transport.rpc.errors import RelaxError, Unreachable
from relax_rt.transport.rpc.rpc import RpcClient


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    yield
    impair.clear()
    impair.active = False


@contextlib.asynccontextmanager
async def pair(
    carrier: str, tmp_path: pathlib.Path, timeout_s: float = 10.0
) -> AsyncIterator[tuple[RpcClient, FarEnd]]:
    address = f"unix://{tmp_path}/q.sock" if carrier == "unix" else "tcp://127.0.0.1:0"
    async with serving(address) as (_, real, _), calling(real, timeout_s) as (client, far):
        await far.nothing()
        yield client, far


async def took_s(far: FarEnd) -> float:
    start = time.monotonic()
    await far.nothing()
    return time.monotonic() - start


@pytest.mark.parametrize("carrier", ["unix", "tcp"])
async def test_delay_keeps_order_both_ways_and_ends(carrier: str, tmp_path: pathlib.Path) -> None:
    async with pair(carrier, tmp_path) as (client, far):
        impair.impair(delay_s=0.05, for_s=0.5)
        # Both ends are this process: each of the two messages is late on its way out and on its way in.
        assert await took_s(far) >= 0.2
        answers = await asyncio.gather(*(far.echo(bytes([i])) for i in range(50)))
        assert answers == [bytes([i]) for i in range(50)]
        await asyncio.sleep(0.5)
        async with asyncio.timeout(120):
            while impair.active:
                await far.nothing()  # The end of the delay is noticed with a message.
        # Delayed, each of them would take so long.
        assert min([await took_s(far) for _ in range(20)]) < 0.2
        assert client.counters.reconnects == 0


@pytest.mark.parametrize("carrier", ["unix", "tcp"])
async def test_partition_holds_and_then_lets_pass(carrier: str, tmp_path: pathlib.Path) -> None:
    async with pair(carrier, tmp_path) as (client, far):
        impair.impair(drop=1.0, for_s=2.0)
        with pytest.raises(Unreachable, match="though the connection stands"):
            await client.bind(FarEnd, timeout_s=0.1).nothing()
        waiting = [asyncio.create_task(far.echo(bytes([i]))) for i in range(20)]
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in waiting)
        assert await asyncio.gather(*waiting) == [bytes([i]) for i in range(20)]
        assert client.counters.reconnects == 0
        await eventually(lambda: not impair.active)


async def test_partition_from_some_peers_only(tmp_path: pathlib.Path) -> None:
    for peer in ("queue/0", "queue", f"unix://{tmp_path}/q.sock"):
        async with pair("unix", tmp_path) as (client, far):
            impair.impair(drop=1.0, peers=("trainer/0", "trainer", "unix:///elsewhere"))
            await far.nothing()
            impair.impair(drop=1.0, peers=(peer,))
            with pytest.raises(Unreachable):
                await client.bind(FarEnd, timeout_s=0.1).nothing()
            impair.clear()
            await far.nothing()


async def test_a_partition_that_lasts_ends_the_connection(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(impair, "CUT_AFTER_S", 0.2)
    async with pair("unix", tmp_path) as (client, far):
        impair.impair(drop=1.0, for_s=2.0)
        # Sent again on another connection once there is one.
        assert await far.echo(b"late") == b"late"
        assert client.counters.reconnects >= 1


@pytest.mark.parametrize("carrier", ["unix", "tcp"])
async def test_a_lost_message_is_a_lost_connection(carrier: str, tmp_path: pathlib.Path) -> None:
    async with pair(carrier, tmp_path) as (client, far):
        impair.impair(drop=0.1, seed=1)
        for i in range(30):
            assert await far.echo(bytes([i])) == bytes([i])
        assert client.counters.reconnects > 0


async def test_what_was_written_before_a_close_is_still_sent(tmp_path: pathlib.Path) -> None:
    async with serving(f"unix://{tmp_path}/q.sock") as (_, real, implementation):
        async with calling(real) as (_, far):
            await far.nothing()
            impair.impair(delay_s=0.2)
            await far.note("parting word")
        await eventually(lambda: implementation.notes == ["parting word"])


async def test_what_is_held_is_bounded(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(impair, "HELD_MAX_BYTES", 10_000)
    async with pair("unix", tmp_path) as (client, far):
        impair.impair(drop=1.0)
        with pytest.raises(RelaxError):
            await client.bind(FarEnd, timeout_s=0.3).echo(bytes(20_000))
        assert not client.connected
        impair.clear()
        await far.nothing()
    gc.collect()
    assert not impair._lines


def test_values_that_cannot_be() -> None:
    for wrong in ({"delay_s": -1.0}, {"delay_s": float("inf")}, {"drop": 1.5}, {"for_s": -1.0}):
        with pytest.raises(RelaxError, match="impair"):
            impair.impair(**wrong)
    assert not impair.active
