"""Streams: credit, early ends, errors in the middle, deadlines between items."""

from __future__ import annotations

import asyncio
import gc
import pathlib

import pytest
from actor_far_end import Judge, directory, fails, living
from waiting import eventually

from relax_rt.transport.rpc.errors import DeadlineExceeded, Refused, RemoteError
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.rpc import CurveKeys, RpcClient, make_hello


@pytest.mark.parametrize("window", [1, 2, 7, 64])
@pytest.mark.parametrize("carrier", ["unix", "curve"])
async def test_the_producer_is_never_more_than_the_window_ahead(
    carrier: str, window: int, tmp_path: pathlib.Path
) -> None:
    keys = CurveKeys.make() if carrier == "curve" else None
    address = f"unix://{tmp_path}/j.sock" if carrier == "unix" else "tcp://127.0.0.1:0"
    async with living(address, curve=keys) as (actor, real), directory({"judge/0": real}, curve=keys) as known:
        judge = known.actor("judge/0", Judge).with_options(window=window)
        taken = 0
        async for i in judge.count(150):
            assert i == taken
            taken += 1
            if taken % 10 == 0:
                await asyncio.sleep(0.01)
            # `made` counts the item that this loop holds too.
            assert len(actor.made) <= taken + window
        assert taken == 150
        await eventually(lambda: actor.ended == ["whole"])


async def test_a_consumer_that_stands_still_stops_the_producer(tmp_path: pathlib.Path) -> None:
    async with living(f"unix://{tmp_path}/j.sock") as (actor, real), directory({"judge/0": real}) as known:
        items = known.actor("judge/0", Judge).with_options(window=10).count(1000)
        assert await anext(items) == 0
        await asyncio.sleep(0.1)
        assert len(actor.made) == 10
        await items.aclose()  # type: ignore[attr-defined]
        await eventually(lambda: actor.ended == ["cancelled"])
        with pytest.raises(StopAsyncIteration):
            await anext(items)


async def test_leaving_the_loop_ends_the_producer(tmp_path: pathlib.Path) -> None:
    async with living(f"unix://{tmp_path}/j.sock") as (actor, real), directory({"judge/0": real}) as known:
        async for i in known.actor("judge/0", Judge).count(100_000):
            if i == 5:
                break
        gc.collect()
        await eventually(lambda: actor.ended == ["cancelled"])
        assert len(actor.made) < 200


async def test_cancelling_the_consumer_ends_the_producer(tmp_path: pathlib.Path) -> None:
    async with living(f"unix://{tmp_path}/j.sock") as (actor, real), directory({"judge/0": real}) as known:

        async def consume() -> None:
            async for _ in known.actor("judge/0", Judge).count(3, wait_at=2):
                pass

        task = asyncio.create_task(consume())
        await eventually(lambda: actor.made == [0, 1])
        task.cancel()
        await eventually(lambda: actor.ended == ["cancelled"])


async def test_an_error_in_the_middle_comes_after_the_items_before_it(tmp_path: pathlib.Path) -> None:
    async with living(f"unix://{tmp_path}/j.sock") as (_, real), directory({"judge/0": real}) as known:
        seen = []
        with pytest.raises(RemoteError, match=r"ValueError: no item 3") as found:
            async for i in known.actor("judge/0", Judge).count(10, fail_at=3):
                seen.append(i)
        assert seen == [0, 1, 2]
        assert "raise ValueError" in "".join(found.value.__notes__)


async def test_the_deadline_is_between_items(tmp_path: pathlib.Path) -> None:
    async with living(f"unix://{tmp_path}/j.sock") as (actor, real), directory({"judge/0": real}) as known:
        judge = known.actor("judge/0", Judge).with_options(timeout_s=1.0, window=2)
        seen = []
        # Slower as a whole than the deadline of one item, and the consumer's own pauses do not count.
        async for i in judge.count(4):
            seen.append(i)
            await asyncio.sleep(0.35)
        assert seen == [0, 1, 2, 3]
        actor.ended.clear()
        with pytest.raises(DeadlineExceeded, match="no item in the 1 s"):
            async for _ in judge.count(4, wait_at=2):
                pass
        await eventually(lambda: actor.ended == ["cancelled"])


async def test_a_consumer_that_takes_nothing_loses_its_stream(tmp_path: pathlib.Path) -> None:
    async with (
        living(f"unix://{tmp_path}/j.sock", stream_idle_s=1.0) as (actor, real),
        directory({"judge/0": real}) as known,
    ):
        items = known.actor("judge/0", Judge).with_options(window=3, timeout_s=60.0).count(100)
        assert await anext(items) == 0
        await eventually(lambda: actor.ended == ["cancelled"])
        # What was under way is still delivered.
        assert [await anext(items) for _ in range(3)] == [1, 2, 3]
        error = await fails(anext(items), DeadlineExceeded)
        assert "its consumer took nothing for 1 s" in str(error)


async def test_wrong_arguments_and_a_call_for_a_stream(tmp_path: pathlib.Path) -> None:
    async with living(f"unix://{tmp_path}/j.sock") as (_, real), directory({"judge/0": real}) as known:
        judge = known.actor("judge/0", Judge)
        with pytest.raises(Refused, match=r"arguments of Judge\.count: Expected `int`, got `str` - at `n`"):
            await anext(judge.count("many"))  # type: ignore[arg-type]

        class Other(Judge):
            async def count(self, n: int) -> int:  # type: ignore[override]
                return n

        Other.__name__ = "Judge"
        with pytest.raises(Refused, match="it gives a stream"):
            await known.actor("judge/0", Other).count(1)


async def test_items_beyond_the_credit_end_the_connection(tmp_path: pathlib.Path) -> None:
    """A producer that minds no credit is not let into memory."""
    import msgspec

    from relax_rt.transport.rpc.wire import HelloFrame as Greeting
    from relax_rt.transport.rpc.wire import (
        ItemFrame,
        OpenStreamFrame,
        decode_from_client,
        encode,
        encode_frame,
        encode_message,
    )

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def read() -> bytes:
            return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "little"))

        await read()
        hello = make_hello("cafe0001", Incarnation("judge/0", 1))
        writer.write(encode_frame(encode_message(Greeting(hello.protocol, hello.run_id, hello.who, hello.pid))))
        request = decode_from_client(await read())
        assert isinstance(request, OpenStreamFrame)
        for i in range(100):
            item = ItemFrame(request.id, msgspec.Raw(encode(i, "item")))
            writer.write(encode_frame(encode_message(item)))
        await reader.read()
        writer.close()

    server = await asyncio.start_unix_server(flood, tmp_path / "f.sock")
    client = RpcClient(f"unix://{tmp_path}/f.sock", make_hello("cafe0001", Incarnation("tester/0", 2)))
    items = client.bind(Judge, timeout_s=60.0, window=4).count(100)
    with pytest.raises(Exception, match="beyond the 4 granted"):
        async for _ in items:
            await asyncio.sleep(0.01)
    await client.close()
    server.close()


async def test_each_item_is_progress(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that is longer than the watchdog's patience is not taken for a hang."""
    monkeypatch.setattr("relax_rt.actors.actor.REPORT_EVERY_S", 0.01)
    async with living(f"unix://{tmp_path}/j.sock") as (actor, real), directory({"judge/0": real}) as known:
        items = known.actor("judge/0", Judge).count(6, wait_at=5)
        for n in range(5):
            assert await anext(items) == n
        await eventually(lambda: actor.ctx.advanced == 5)
        # It makes the next one: that is work, and may hang.
        await eventually(lambda: actor.ctx.waits[-1] == "")
        await items.aclose()  # type: ignore[attr-defined]
        await eventually(lambda: actor.ctx.waits[-1] == "calls")


async def test_a_slow_consumer_does_not_make_its_producer_look_hung(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relax_rt.actors.actor.REPORT_EVERY_S", 0.01)
    async with living(f"unix://{tmp_path}/j.sock") as (actor, real), directory({"judge/0": real}) as known:
        judge = known.actor("judge/0", Judge)
        items = judge.with_options(window=2).count(10)
        assert await anext(items) == 0
        await eventually(lambda: len(actor.made) == 3)
        await eventually(lambda: actor.ctx.waits[-1] == "calls")
        # A call that hangs beside it is seen.
        call = asyncio.create_task(judge.hold())
        await eventually(lambda: actor.ctx.waits[-1] == "")
        actor.release.set()
        await call
        assert [i async for i in items] == list(range(1, 10))
        await eventually(
            lambda: actor.ctx.waits[-1] == "calls" and actor._mailbox.with_consumer == actor._mailbox.running == 0
        )
