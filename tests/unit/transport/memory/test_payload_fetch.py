"""Payloads over ZeroMQ, within this machine: what arrives, what is refused, and what hostile peers can do."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pathlib
import re
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio
from eventually import eventually
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from payload_far_end import KEYS, SLAB, extents_of, reading, serving, shm_dir, write_slab

from relax_rt.transport.memory import payload_wire
from relax_rt.transport.memory.arena import ArenaReader, ArenaWriter
from relax_rt.transport.memory.payload_server import PayloadServer
from relax_rt.transport.memory.payload_wire import GetRanges, Range, RangeHead
from relax_rt.transport.memory.refs import Extent
from relax_rt.transport.rpc.channel import AddressError
from relax_rt.transport.rpc.errors import (
    Corrupt,
    DeadlineExceeded,
    Gone,
    OutOfSpace,
    ProtocolError,
    Refused,
    RelaxError,
    Unreachable,
)
from relax_rt.transport.rpc.identity import CurveKeys, Incarnation

MIB = 1 << 20


async def test_extents_arrive_whole_whatever_their_sizes() -> None:
    sizes = [1, 63, 8 * 1024, 255 * 1024, 256 * 1024, 256 * 1024 + 1, MIB + 7, 0]
    offsets = np.cumsum([0, *sizes]).tolist()
    extents = [Extent(SLAB, offset, size) for offset, size in zip(offsets, sizes, strict=False)]
    with shm_dir() as directory:
        data = write_slab(directory, offsets[-1])
        for verify in (False, True):
            async with serving(directory) as server, reading(verify=verify, connections=2) as fetcher:
                found = await fetcher.fetch(server.address, extents, lease=1, deadline_s=60.0)
                assert list(found) == extents
                for extent in extents:
                    expected = data[extent.offset : extent.offset + extent.nbytes]
                    assert np.array_equal(found[extent], expected)
                    held = fetcher.memory(extent)
                    assert held is not None and np.array_equal(held, expected) and not held.flags.writeable
                assert fetcher.statistics().bytes_in == offsets[-1]
                assert fetcher.memory(Extent(SLAB, 1, 5)) is None


async def test_a_readers_blocks_are_decoded_from_what_was_fetched(tmp_path: pathlib.Path) -> None:
    """Tokens and an image that the samples of a group share, from a writer on one node to a reader on another."""
    image = os.urandom(50_000)
    with shm_dir() as directory:
        writer = ArenaWriter(directory, Incarnation("rollout/0", 7), slab_bytes=MIB, capacity_bytes=4 * MIB)
        rows = [{"tokens": np.arange(5_000 + n, dtype=np.int32), "image": image, "n": n} for n in range(3)]
        ((placed, _),) = writer.put_rows(rows)
        assert placed.block.extent is not None
        extents = [placed.block.extent, *(blob.extent for blob in placed.blobs)]
        async with serving(directory) as server, reading() as fetcher:
            await fetcher.fetch(server.address, extents, lease=1, deadline_s=60.0)
            writer.close()
            blobs = {blob.digest: blob.extent for blob in placed.blobs}
            block = ArenaReader(tmp_path, source=fetcher.memory).block(placed.block, blobs)
            tokens = block.value("tokens", 2)
            assert block.value("image", 1) == image
            fetcher.release(1)
            await eventually(lambda: fetcher.statistics().cache.entries == 0)
            assert np.array_equal(tokens, np.arange(5_002))


async def test_a_prefetched_extent_is_there_when_it_is_fetched() -> None:
    with shm_dir() as directory:
        data = write_slab(directory, MIB)
        extent = Extent(SLAB, 0, MIB)
        async with serving(directory) as server, reading() as fetcher:
            fetcher.prefetch(server.address, [extent], lease=1)
            await eventually(lambda: fetcher.memory(extent) is not None)
            # The server is not needed any more.
            await server.close()
            found = await fetcher.fetch(server.address, [extent], lease=1, deadline_s=60.0)
            assert np.array_equal(found[extent], data)
            assert fetcher.statistics().cache.hits == 1


async def test_an_extent_that_its_owner_used_again_is_fetched_again() -> None:
    with shm_dir() as directory:
        write_slab(directory, MIB)
        extent = Extent(SLAB, 4096, 100_000)
        async with serving(directory) as server, reading() as fetcher:
            first = (await fetcher.fetch(server.address, [extent], lease=1, deadline_s=60.0))[extent]
            kept = first.copy()
            fetcher.release(1)
            slab = np.memmap(directory / SLAB, np.uint8, "r+")
            slab[4096:104_096] ^= 0xFF
            second = (await fetcher.fetch(server.address, [extent], lease=2, deadline_s=60.0))[extent]
            assert np.array_equal(second, kept ^ 0xFF)
            assert np.array_equal(first, kept)


@pytest.mark.parametrize(
    ("extent", "kind", "text"),
    [
        (Extent("rollout-0-8-1.slab", 0, 10), Gone, "slab 'rollout-0-8-1.slab'"),
        (Extent(SLAB, MIB - 5, 10), Corrupt, f"bytes {MIB - 5} to {MIB + 5} are outside its {MIB} bytes"),
        (Extent(SLAB, 2**62, 10), Corrupt, "are outside"),
        (Extent("../../etc/passwd", 0, 10), Corrupt, "not a slab's name"),
        (Extent("spill-1", 0, 10), Corrupt, "not a slab's name"),
    ],
)
async def test_the_servers_refusal_keeps_its_type_and_names_slab_and_server(
    extent: Extent, kind: type[RelaxError], text: str
) -> None:
    with shm_dir() as directory:
        write_slab(directory, MIB)
        async with serving(directory) as server, reading() as fetcher:
            with pytest.raises(kind, match=text) as caught:
                await fetcher.fetch(server.address, [Extent(SLAB, 0, 100), extent], lease=1, deadline_s=5.0)
            assert server.address in str(caught.value)
            # The other extent, and the fetcher, are none the worse.
            await fetcher.fetch(server.address, [Extent(SLAB, 0, 100)], lease=1, deadline_s=5.0)
            assert server.statistics().faults == 1


async def test_an_extent_that_no_slab_can_have_is_refused_before_it_is_asked_for() -> None:
    async with reading() as fetcher:
        for extent in (Extent(SLAB, -1, 5), Extent(SLAB, 2**63, 5), Extent(SLAB, 0, -5), Extent("x" * 300, 0, 5)):
            with pytest.raises(Corrupt, match="no slab has such bytes"):
                await fetcher.fetch("tcp://127.0.0.1:9", [extent], lease=1, deadline_s=5.0)
            with pytest.raises(Corrupt, match="no slab has such bytes"):
                fetcher.prefetch("tcp://127.0.0.1:9", [extent], lease=1)


async def test_spilled_extents_are_served_from_disk(tmp_path: pathlib.Path) -> None:
    with shm_dir() as directory:
        data = write_slab(tmp_path, 10_000, name="spill-17")
        server = PayloadServer(directory, tmp_path, keys=KEYS)
        await server.listen("tcp://127.0.0.1:0")
        async with reading() as fetcher:
            extent = Extent("spill-17", 0, 10_000)
            found = await fetcher.fetch(server.address, [extent], lease=1, deadline_s=60.0)
            assert np.array_equal(found[extent], data)
        await server.close()


async def test_a_removed_slab_is_unmapped() -> None:
    with shm_dir() as directory:
        write_slab(directory, MIB)
        async with serving(directory) as server, reading() as fetcher:
            await fetcher.fetch(server.address, [Extent(SLAB, 0, 100)], lease=1, deadline_s=5.0)
            assert server.statistics().slabs == 1
            (directory / SLAB).unlink()
            await eventually(lambda: server.statistics().slabs == 0)
            with pytest.raises(Gone):
                await fetcher.fetch(server.address, [Extent(SLAB, 100, 100)], lease=1, deadline_s=5.0)


async def test_a_full_cache_reports_and_resumes_when_a_lease_ends() -> None:
    with shm_dir() as directory:
        write_slab(directory, 12 * MIB)
        first, second = [Extent(SLAB, 0, 6 * MIB)], [Extent(SLAB, 6 * MIB, 6 * MIB)]
        async with serving(directory) as server, reading(segment_bytes=8 * MIB) as fetcher:
            held = await fetcher.fetch(server.address, first, lease=1, deadline_s=60.0)
            with pytest.raises(OutOfSpace, match="are in use by 1 leases"):
                await fetcher.fetch(server.address, second, lease=2, deadline_s=0.05)
            waiting = asyncio.create_task(fetcher.fetch(server.address, second, lease=2, deadline_s=60.0))
            await eventually(lambda: any("waits for room" in text for text in fetcher.waiting_on()))
            cancelled = asyncio.create_task(fetcher.fetch(server.address, second, lease=9, deadline_s=60.0))
            await eventually(lambda: fetcher.statistics().cache.waiting_for_space == 2)
            cancelled.cancel()
            fetcher.release(1)
            await asyncio.sleep(0.05)
            # The lease is over, but somebody still looks.
            assert not waiting.done()
            del held
            await waiting
            await eventually(lambda: fetcher.statistics().cache.waiting_for_space == 0)
            with pytest.raises(OutOfSpace, match="the capacity is"):
                await fetcher.fetch(server.address, extents_of(12 * MIB, MIB), lease=3, deadline_s=60.0)


async def test_a_released_lease_ends_its_waits() -> None:
    async with reading() as fetcher:
        waiting = asyncio.create_task(
            fetcher.fetch("tcp://127.0.0.1:9", [Extent(SLAB, 0, 100)], lease=1, deadline_s=60.0)
        )
        await eventually(lambda: any("attempt" in text for text in fetcher.waiting_on()))
        fetcher.release(1)
        with pytest.raises(Refused, match="the lease was released"):
            await waiting


async def test_a_missing_server_is_reported_while_waiting_and_at_the_deadline() -> None:
    async with reading() as fetcher:
        waiting = asyncio.create_task(
            fetcher.fetch("tcp://127.0.0.1:9", [Extent(SLAB, 0, 100)], lease=1, deadline_s=1.0)
        )
        reason = "0 of 100 bytes are here; nothing answers there (attempt "
        await eventually(lambda: any(reason in text for text in fetcher.waiting_on()))
        with pytest.raises(Unreachable, match=rf"slab {SLAB}.* tcp://127.0.0.1:9 for lease 1: 0 of 100 bytes are here"):
            await waiting
        for address in ("unix:///tmp/x", "tcp://127.0.0.1:0", "nonsense"):
            with pytest.raises(AddressError):
                await fetcher.fetch(address, [Extent(SLAB, 0, 100)], lease=1, deadline_s=5.0)


async def test_a_peer_without_the_key_gets_nothing() -> None:
    stranger = CurveKeys.make()
    knows_the_server = dataclasses.replace(stranger, server=KEYS.public)
    with shm_dir() as directory:
        write_slab(directory, MIB)
        async with serving(directory) as server:
            for keys, why in (
                (None, "only one end uses CURVE keys|the secure handshake failed"),
                (stranger, "the secure handshake failed|attempt"),
                (knows_the_server, "does not admit this process's key"),
            ):
                async with reading(keys) as fetcher:
                    waiting = asyncio.create_task(
                        fetcher.fetch(server.address, [Extent(SLAB, 0, MIB)], lease=1, deadline_s=60.0)
                    )
                    await eventually(lambda: any(re.search(why, text) for text in fetcher.waiting_on()))  # noqa: B023
                    assert fetcher.statistics().bytes_in == 0
                with pytest.raises(Refused, match="closed"):
                    await waiting
            assert server.statistics().requests == 0
            async with reading() as fetcher:
                await fetcher.fetch(server.address, [Extent(SLAB, 0, MIB)], lease=1, deadline_s=5.0)


async def test_without_keys_only_loopback_is_served() -> None:
    with shm_dir() as directory:
        server = PayloadServer(directory, keys=None)
        with pytest.raises(AddressError, match="there are no CURVE keys"):
            await server.listen("tcp://0.0.0.0:0")
        await server.listen("tcp://localhost:0")
        with pytest.raises(Refused, match="already"):
            await server.listen("tcp://127.0.0.1:0")
        with pytest.raises(AddressError, match="Address already in use"):
            await PayloadServer(directory, keys=None).listen(server.address)
        await server.close()


async def test_closing_ends_what_waits() -> None:
    with shm_dir() as directory:
        write_slab(directory, MIB)
        async with reading() as fetcher:
            waiting = asyncio.create_task(
                fetcher.fetch("tcp://127.0.0.1:9", [Extent(SLAB, 0, 100)], lease=1, deadline_s=60.0)
            )
            await eventually(lambda: bool(fetcher.waiting_on()))
        with pytest.raises(Refused, match="closed"):
            await waiting
        with pytest.raises(Refused, match="closed"):
            await fetcher.fetch("tcp://127.0.0.1:9", [], lease=1, deadline_s=1.0)
        fetcher.release(1)


async def test_a_cancelled_fetch_leaves_the_fetcher_well() -> None:
    with shm_dir() as directory:
        write_slab(directory, 4 * MIB)
        async with serving(directory) as server, reading() as fetcher:
            for lease in range(10):
                task = asyncio.create_task(
                    fetcher.fetch(server.address, [Extent(SLAB, 0, 4 * MIB)], lease=lease, deadline_s=5.0)
                )
                await asyncio.sleep(0.001)
                task.cancel()
                fetcher.release(lease)
            await fetcher.fetch(server.address, [Extent(SLAB, 0, 4 * MIB)], lease=99, deadline_s=5.0)
            assert fetcher.statistics().cache.leases == 1


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.binary(max_size=60), min_size=1, max_size=4), max_size=10), st.binary(max_size=40))
def test_the_server_goes_on_whatever_a_peer_sends(messages: list[list[bytes]], tail: bytes) -> None:
    async def run() -> None:
        with shm_dir() as directory:
            data = write_slab(directory, 1000)
            async with serving(directory, keys=None) as server, reading(None, segment_bytes=65536) as fetcher:
                context: zmq.asyncio.Context = zmq.asyncio.Context()
                intruder = context.socket(zmq.DEALER)
                intruder.connect(server.address)
                good = payload_wire.encode_get(GetRanges(True, [Range(2**63 - 1, SLAB, 0, 1000)]))
                for parts in [*messages, [good[:6] + tail], [good[: len(good) // 2]], [good, good]]:
                    await intruder.send_multipart(parts)
                await intruder.send(good)
                extent = Extent(SLAB, 0, 1000)
                found = await fetcher.fetch(server.address, [extent], lease=1, deadline_s=60.0)
                assert np.array_equal(found[extent], data)
                await eventually(lambda: server.statistics().protocol_errors >= 2)
                intruder.close(linger=0)
                context.term()

    asyncio.run(run())


async def test_a_peer_that_asks_and_does_not_read_is_bounded_and_holds_up_nobody() -> None:
    with shm_dir() as directory:
        write_slab(directory, 4 * MIB)
        server = PayloadServer(directory, keys=None, max_reader_ranges=16, max_held_bytes=8 * MIB)
        await server.listen("tcp://127.0.0.1:0")
        context: zmq.asyncio.Context = zmq.asyncio.Context()
        lazy = context.socket(zmq.DEALER)
        lazy.setsockopt(zmq.RCVHWM, 1)
        lazy.connect(server.address)
        for number in range(100):
            await lazy.send(payload_wire.encode_get(GetRanges(False, [Range(number, SLAB, 0, 4 * MIB)])))
        await eventually(lambda: server.statistics().dropped > 0)
        assert server.statistics().held_bytes <= 8 * MIB
        async with reading(None) as fetcher:
            await fetcher.fetch(server.address, [Extent(SLAB, 0, 4 * MIB)], lease=1, deadline_s=60.0)
        lazy.close(linger=0)
        context.term()
        await eventually(lambda: server.statistics().held_ranges == 0)
        await server.close()


Answer = Callable[[Range], list[bytes]]


def correct(wanted: Range, body: bytes = b"") -> list[bytes]:
    body = body or bytes(wanted.nbytes)
    return [payload_wire.encode_head(payload_wire.BYTES, [RangeHead(wanted.id, len(body), 0)]), body]


async def from_hostile_server(*answers: Answer, deadline_s: float = 5.0) -> int:
    """Fetch an extent from a server that gives one of these answers after the other; returns the protocol errors."""
    context: zmq.asyncio.Context = zmq.asyncio.Context()
    sock = context.socket(zmq.ROUTER)
    port = sock.bind_to_random_port("tcp://127.0.0.1")

    async def serve() -> None:
        reader, frame = await sock.recv_multipart()
        (wanted,) = payload_wire.decode_get(frame).ranges
        for answer in answers:
            await sock.send_multipart([reader, *answer(wanted)])

    task = asyncio.create_task(serve())
    try:
        async with reading(None, verify=False) as fetcher:
            extent = Extent(SLAB, 0, 1000)
            found = await fetcher.fetch(f"tcp://127.0.0.1:{port}", [extent], lease=1, deadline_s=deadline_s)
            assert not found[extent].any()
            return fetcher.statistics().protocol_errors
    finally:
        task.cancel()
        sock.close(linger=0)
        context.term()


@pytest.mark.parametrize(
    "noise",
    [
        lambda wanted: [b""],
        lambda wanted: [b"RLXP"],
        lambda wanted: [b"x" * 100_000, b"y"],
        lambda wanted: [payload_wire.encode_head(payload_wire.BYTES, [RangeHead(wanted.id + 1, 5, 0)]), b"hello"],
        lambda wanted: [
            payload_wire.encode_head(payload_wire.BYTES, [RangeHead(2**64 - 1, 2**24, 0)]),
            b"hello",
            b"more",
        ],
        lambda wanted: [payload_wire.encode_head(payload_wire.BYTES, [RangeHead(7, 2**32 - 1, 0)] * 3), b""],
        lambda wanted: [payload_wire.encode_head(payload_wire.FAULT, [RangeHead(9, 5, 0)]), b"hello"],
    ],
)
async def test_noise_from_a_server_is_counted_and_passed_over(noise: Answer) -> None:
    assert await from_hostile_server(noise, correct, correct) >= 1


@pytest.mark.parametrize(
    "wrong",
    [
        lambda wanted: correct(wanted, b"short"),
        lambda wanted: correct(wanted, bytes(2000)),
        lambda wanted: [correct(wanted)[0], bytes(2000)],
        lambda wanted: [correct(wanted)[0], b""],
        lambda wanted: [payload_wire.encode_head(payload_wire.BYTES, [RangeHead(wanted.id, 2000, 0)]), bytes(1000)],
        lambda wanted: [
            payload_wire.encode_head(payload_wire.BYTES, [RangeHead(wanted.id, 1000, 0), RangeHead(3, 1000, 0)]),
            bytes(1500),
        ],
    ],
)
async def test_an_answer_of_the_wrong_size_is_an_error_of_that_extent(wrong: Answer) -> None:
    with pytest.raises(ProtocolError, match=f"slab {SLAB}.*1000 bytes"):
        await from_hostile_server(wrong)


async def test_a_server_of_another_version_is_named_as_such() -> None:
    def newer(wanted: Range) -> list[bytes]:
        head = bytearray(correct(wanted)[0])
        head[4] = 9
        return [bytes(head), b""]

    with pytest.raises(ProtocolError, match="it is of version 9"):
        await from_hostile_server(newer)


async def test_a_server_tells_a_reader_of_another_version() -> None:
    with shm_dir() as directory:
        async with serving(directory, keys=None) as server:
            context: zmq.asyncio.Context = zmq.asyncio.Context()
            old = context.socket(zmq.DEALER)
            old.connect(server.address)
            await old.send(b"RLXP\x00\x01")
            kind, (part,) = payload_wire.decode_head((await old.recv_multipart())[0])
            assert (kind, part.id) == (payload_wire.FAULT, 0)
            old.close(linger=0)
            context.term()


async def test_a_silent_server_is_reported() -> None:
    with pytest.raises(Unreachable, match=r"0 of 1000 bytes are here; connected, nothing came yet"):
        await from_hostile_server(deadline_s=1.0)


async def test_overwritten_bytes_do_not_match_their_digest() -> None:
    """The owner writes an extent that a reader still wants: what arrives is not taken for what was there."""
    context: zmq.asyncio.Context = zmq.asyncio.Context()
    sock = context.socket(zmq.ROUTER)
    port = sock.bind_to_random_port("tcp://127.0.0.1")
    async with reading(None) as fetcher:
        waiting = asyncio.create_task(
            fetcher.fetch(f"tcp://127.0.0.1:{port}", [Extent(SLAB, 64, 1000)], lease=1, deadline_s=5.0)
        )
        reader, frame = await sock.recv_multipart()
        get = payload_wire.decode_get(frame)
        assert get.digest
        await sock.send_multipart([reader, *correct(get.ranges[0])])
        with pytest.raises(Corrupt, match=rf"slab {SLAB}.*the bytes at 64 do not match their digest"):
            await waiting
    sock.close(linger=0)
    context.term()


async def test_a_slow_transfer_exceeds_its_deadline() -> None:
    context: zmq.asyncio.Context = zmq.asyncio.Context()
    sock = context.socket(zmq.ROUTER)
    port = sock.bind_to_random_port("tcp://127.0.0.1")

    async def serve() -> None:
        while True:
            reader, frame = await sock.recv_multipart()
            for wanted in payload_wire.decode_get(frame).ranges:
                await asyncio.sleep(0.01)
                await sock.send_multipart([reader, *correct(wanted)])

    task = asyncio.create_task(serve())
    async with reading(None, verify=False, chunk_bytes=1024) as fetcher:
        with pytest.raises(DeadlineExceeded, match=rf"slab {SLAB}.* of {MIB} bytes are here"):
            await fetcher.fetch(f"tcp://127.0.0.1:{port}", [Extent(SLAB, 0, MIB)], lease=1, deadline_s=1.0)
    task.cancel()
    sock.close(linger=0)
    context.term()


def test_the_statistics_are_plain_data() -> None:
    server = PayloadServer(pathlib.Path("/nonexistent"), keys=None)
    assert msgspec.to_builtins(server.statistics())["slabs"] == 0
    server.stop()
