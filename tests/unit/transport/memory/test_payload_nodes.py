"""Payloads between two nodes: processes in network namespaces of their own, killed, stopped and cut off."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import payload_far_end
import pytest
import xxhash
from eventually import eventually
from netns import Nodes, cut
from payload_far_end import KEYS, SLAB, extents_of, far_server, reading, shm_dir, write_slab
from server_process import environment

from relax_rt.transport.memory.refs import Extent
from relax_rt.transport.rpc.errors import Unreachable

MIB = 1 << 20


@pytest.fixture
def slabs() -> Iterator[pathlib.Path]:
    with shm_dir() as directory:
        yield directory


@contextlib.contextmanager
def read_from(nodes: Nodes, address: str, nbytes: int, *, how: str = "read") -> Iterator[subprocess.Popen[str]]:
    """A reader on the second node, which tells what it got."""
    command = [*nodes.second, sys.executable, payload_far_end.__file__, how, address, str(nbytes), str(3 * MIB)]
    with subprocess.Popen(command, env=environment(KEYS), stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_reader_on_another_node_gets_every_byte_and_a_stranger_none(nodes: Nodes, slabs: pathlib.Path) -> None:
    data = write_slab(slabs, 40 * MIB)
    with (
        far_server(slabs, nodes.host, nodes.first) as far,
        read_from(nodes, far.address, len(data)) as reader,
        read_from(nodes, far.address, len(data), how="stranger") as stranger,
    ):
        assert line(reader) == xxhash.xxh3_64_hexdigest(data.data)
        refusal = line(stranger)
        assert far.address in refusal
        assert "does not admit this process's key" in refusal and refusal.endswith("; 0 bytes came")


def test_a_killed_and_restarted_server_is_found_again(nodes: Nodes, slabs: pathlib.Path) -> None:
    data = write_slab(slabs, 64 * MIB)
    with (
        far_server(slabs, nodes.host, nodes.first) as far,
        read_from(nodes, far.address, len(data), how="slowly") as reader,
    ):
        assert line(reader) == "begun"
        far.kill()
        far.start()
        assert line(reader) == xxhash.xxh3_64_hexdigest(data.data)


def test_a_cut_cable_is_waited_out_until_the_deadline(nodes: Nodes, slabs: pathlib.Path) -> None:
    write_slab(slabs, MIB)
    with far_server(slabs, nodes.host, nodes.first) as far:
        cut(nodes.second)
        with read_from(nodes, far.address, MIB, how="hopeless") as reader:
            assert line(reader).startswith(f"Unreachable: slab {SLAB}")


async def test_a_server_killed_during_a_fetch_fails_it(slabs: pathlib.Path) -> None:
    write_slab(slabs, 64 * MIB)
    extents = extents_of(64 * MIB, 4 * MIB)
    # A small window makes the transfer slow enough to be hit in the middle.
    async with reading(
        capacity_bytes=80 * MIB, segment_bytes=80 * MIB, chunk_bytes=65536, window_bytes=65536
    ) as fetcher:
        with far_server(slabs) as far:
            address = far.address
            waiting = asyncio.create_task(fetcher.fetch(address, extents, lease=1, deadline_s=8.0))
            await eventually(lambda: fetcher.statistics().bytes_in > 5 * MIB)
            far.kill()
            with pytest.raises(Unreachable, match=rf"slab {SLAB} bytes \d+ to \d+, asked of {address}") as caught:
                await waiting
            assert "nothing answers there" in str(caught.value)
        # What had come whole is there, and nothing of the rest.
        assert fetcher.memory(extents[0]) is not None
        assert fetcher.memory(extents[-1]) is None
        fetcher.release(1)
        await eventually(lambda: fetcher.statistics().cache.entries == 0)


async def test_a_transfer_goes_on_where_it_was_when_the_server_is_back(slabs: pathlib.Path) -> None:
    data = write_slab(slabs, 32 * MIB)
    whole = Extent(SLAB, 0, 32 * MIB)
    async with reading(
        capacity_bytes=80 * MIB, segment_bytes=80 * MIB, chunk_bytes=65536, window_bytes=131072
    ) as fetcher:
        with far_server(slabs) as far:
            waiting = asyncio.create_task(fetcher.fetch(far.address, [whole], lease=1, deadline_s=60.0))
            for share in (1, 2):
                await eventually(lambda share=share: fetcher.statistics().bytes_in > share * 8 * MIB)
                far.kill()
                await eventually(lambda: any("attempt" in text for text in fetcher.waiting_on()))
                await asyncio.to_thread(far.start)
            assert np.array_equal((await waiting)[whole], data)
            statistics = fetcher.statistics()
            assert statistics.reconnects >= 2
            # Only what was under way is sent twice.
            assert statistics.bytes_in <= len(data) + 2 * 131072


async def test_a_stopped_server_is_waited_for_and_goes_on(slabs: pathlib.Path) -> None:
    data = write_slab(slabs, 8 * MIB)
    whole = Extent(SLAB, 0, 8 * MIB)
    async with reading(capacity_bytes=16 * MIB, segment_bytes=16 * MIB) as fetcher:
        with far_server(slabs) as far:
            await fetcher.fetch(far.address, [Extent(SLAB, 0, 100)], lease=1, deadline_s=60.0)
            far.signal(signal.SIGSTOP)
            with pytest.raises(Unreachable, match="bytes are here; the last came"):
                await fetcher.fetch(far.address, [whole], lease=2, deadline_s=0.6)
            waiting = asyncio.create_task(fetcher.fetch(far.address, [whole], lease=3, deadline_s=60.0))
            far.signal(signal.SIGCONT)
            assert np.array_equal((await waiting)[whole], data)


async def test_several_servers_are_read_side_by_side_and_one_lost_does_not_hurt_the_others(
    slabs: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    data = write_slab(slabs, 8 * MIB)
    whole = Extent(SLAB, 0, 8 * MIB)
    lost = Extent("rollout-1-8-1.slab", 0, MIB)
    async with reading(capacity_bytes=16 * MIB, segment_bytes=16 * MIB) as fetcher:
        with far_server(slabs) as first, far_server(tmp_path) as second:
            second.kill()
            results = await asyncio.gather(
                fetcher.fetch(second.address, [lost], lease=1, deadline_s=0.5),
                fetcher.fetch(first.address, [whole], lease=1, deadline_s=60.0),
                return_exceptions=True,
            )
            assert isinstance(results[0], Unreachable) and lost.slab in str(results[0])
            assert not isinstance(results[1], BaseException) and np.array_equal(results[1][whole], data)
