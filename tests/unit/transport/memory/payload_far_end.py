"""The far end of the payload tests: slabs with known bytes, servers in this process and in others."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator

import numpy as np
import xxhash
from numpy.typing import NDArray
from server_process import ServerProcess, given_keys, tell

from relax_rt.transport.memory.payload_fetcher import Fetcher
from relax_rt.transport.memory.payload_server import PayloadServer
from relax_rt.transport.memory.refs import Extent
from relax_rt.transport.rpc.errors import RelaxError
from relax_rt.transport.rpc.identity import CurveKeys

SLAB = "rollout-0-7-1.slab"
KEYS = CurveKeys.make()


@contextlib.contextmanager
def shm_dir() -> Iterator[pathlib.Path]:
    """A private directory in shared memory, as a run has one."""
    with tempfile.TemporaryDirectory(prefix="relax-test-", dir="/dev/shm") as path:
        yield pathlib.Path(path)


def write_slab(directory: pathlib.Path, nbytes: int, *, name: str = SLAB, seed: int = 0) -> NDArray[np.uint8]:
    """A slab of random bytes; returns these."""
    data = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    (directory / name).write_bytes(data.data)
    return data


def extents_of(nbytes: int, size: int, *, name: str = SLAB) -> list[Extent]:
    """Extents of one size that cover a slab."""
    return [Extent(name, offset, min(size, nbytes - offset)) for offset in range(0, nbytes, size)]


@contextlib.asynccontextmanager
async def serving(
    directory: pathlib.Path, *, address: str = "tcp://127.0.0.1:0", keys: CurveKeys | None = KEYS
) -> AsyncIterator[PayloadServer]:
    """A payload server in this process."""
    server = PayloadServer(directory, keys=keys)
    await server.listen(address)
    try:
        yield server
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def reading(keys: CurveKeys | None = KEYS, **settings: float) -> AsyncIterator[Fetcher]:
    """A fetcher with a small cache."""
    sizes = {"capacity_bytes": 8 << 20, "segment_bytes": 4 << 20, "chunk_bytes": 256 << 10, **settings}
    async with Fetcher(keys, **sizes) as fetcher:  # type: ignore[arg-type]
        yield fetcher


def far_server(directory: pathlib.Path, host: str = "127.0.0.1", node: list[str] | None = None) -> ServerProcess:
    """A payload server in a process of its own, always at the same address."""
    command = [*(node or []), sys.executable, __file__, "serve", str(directory)]
    return ServerProcess(command, KEYS, host, keeps_port=True)


async def read_all(how: str, address: str, nbytes: int, size: int) -> None:
    """In a process on another node: fetch a slab and tell the digest of what came, or the error.

    how: ``read``; ``slowly`` tells when the first bytes are there; ``stranger`` has a key that the server does not know
    and tells why it waits; ``hopeless`` has a short deadline.
    """
    keys = given_keys()
    if how == "stranger":
        other = CurveKeys.make()
        keys = CurveKeys(other.public, other.secret, server=keys.public)
    extents = extents_of(nbytes, size)
    chunk = 65536 if how == "slowly" else 1 << 20
    async with Fetcher(keys, chunk_bytes=chunk, window_bytes=4 * chunk) as fetcher:
        task = asyncio.create_task(
            fetcher.fetch(address, extents, lease=1, deadline_s=1.0 if how == "hopeless" else 30.0)
        )
        if how == "stranger":
            while not any("attempt" in text for text in fetcher.waiting_on()):  # noqa: ASYNC110 - nothing to wait on
                await asyncio.sleep(0.01)
            tell(f"{fetcher.waiting_on()}; {fetcher.statistics().bytes_in} bytes came")
            fetcher.release(1)
        if how == "slowly":
            while not fetcher.statistics().bytes_in:  # noqa: ASYNC110 - nothing to wait on
                await asyncio.sleep(0.01)
            tell("begun")
        try:
            found = await task
        except RelaxError as error:
            tell(f"{type(error).__name__}: {error}")
            return
        digest = xxhash.xxh3_64()
        for extent in extents:
            digest.update(found[extent])
        tell(digest.hexdigest())


def main(how: str, where: str, *more: str) -> None:
    """Entry of the other processes."""
    if how == "serve":
        tell(PayloadServer(pathlib.Path(where), keys=given_keys()).start(more[0]))
        time.sleep(60)
    else:
        asyncio.run(read_all(how, where, *map(int, more)))


if __name__ == "__main__":
    main(*sys.argv[1:])
