"""A broker that fails begins again; where it cannot, nobody waits for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from relax_rt.transport import TransferQueue
from relax_rt.transport.queue import hosting
from relax_rt.transport.queue.hosting import Host
from relax_rt.transport.rpc.channel import AddressError
from relax_rt.transport.rpc.errors import Corrupt, OutOfSpace, Refused

SAMPLE = [{"x": np.arange(3)}]


def fails(monkeypatch: pytest.MonkeyPatch, host: Host | None, *errors: Exception) -> None:
    """The broker fails now, and so does beginning again, with these."""
    assert host is not None and host.broker is not None
    opened, left = host._open, list(errors)

    async def open_() -> hosting.BrokerLocation:
        if left:
            raise left.pop(0)
        return await opened()

    monkeypatch.setattr(host, "_open", open_)
    monkeypatch.setattr(hosting, "_REOPEN_S", 0.01)
    host.broker._fail(OutOfSpace("journal", why="the disk is full"))


@pytest.mark.parametrize("error", [Corrupt("journal record 7"), Refused("sampler 'mine'"), RuntimeError("a bug")])
async def test_what_cannot_be_mended_is_told_to_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    folder = tmp_path / "queue"
    async with (
        asyncio.timeout(120),
        TransferQueue.serve(folder, {"t": ["x"]}, listen="tcp://127.0.0.1:0") as queue,
        TransferQueue.connect(folder) as other,
    ):
        assert queue.host is not None and queue.host.location is not None
        address, keys = queue.host.location.addresses[1], folder / "keys.json"
        waiting = asyncio.create_task(other.lease("t", samples=1, wait_s=60))
        fails(monkeypatch, queue.host, error)
        told = f"its broker failed for good: {error}"
        for call in (waiting, queue.put(SAMPLE), other.put(SAMPLE), queue.lease("t", samples=1, wait_s=60)):
            with pytest.raises(Refused, match=told):
                await call
        for where in (folder, address):
            with pytest.raises(Refused, match=told):
                async with TransferQueue.connect(where, keys=keys):
                    pass
    assert told in caplog.text


async def test_what_passes_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with asyncio.timeout(120), TransferQueue.serve(tmp_path / "queue", {"t": ["x"]}) as queue:
        fails(monkeypatch, queue.host, OutOfSpace("journal"), AddressError("listening"), OSError("a file"))
        keys = await queue.put(SAMPLE)
        batch = await queue.lease("t", samples=1, wait_s=20)
        assert batch.keys == keys
        await queue.complete(batch)
