"""The collective over NCCL: what is in test_collective_gloo.py, where only the class differs.

On one device, two ranks can meet only with an NCCL that allows it (2.30.3 and later, NCCL_MULTI_RANK_GPU_ENABLE=1);
what is tested without that is how NCCL behaves when a peer is absent or has the same device.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from relax_rt.transport.weights import device
from relax_rt.transport.weights.broadcast.backends import SHARED_DEVICES
from relax_rt.transport.weights.broadcast.group import BroadcastGroup, RankSpec, error_of
from relax_rt.transport.weights.broadcast.machine import BroadcastLimits
from relax_rt.transport.weights.broadcast.protocol import BroadcastFailed, BroadcastOutcome, DuplicateDevice
from relax_rt.transport.weights.broadcast.rank import digest_of
from relax_rt.transport.weights.device import DeviceBuffer
from relax_rt.transport.weights.memory import Memory

UNIT = Path(__file__).resolve().parents[1] / "unit" / "transport" / "weights"

BUCKET, NBYTES = 1 << 20, 16 << 20
LIMITS = BroadcastLimits(hello_s=90.0, join_s=20.0, stall_s=10.0, abort_s=10.0)
SHARED_SINCE = 23003


def nccl_version() -> int:
    return int(device.cupy().cuda.nccl.get_version())


class Ranks:
    """A group over NCCL on one device or more; memory of all ranks is this process's, shown by CUDA IPC."""

    def __init__(self, folder: Path, names: tuple[str, ...], *, shared: bool, lonely: bool = False) -> None:
        self.names, self.faults = names, folder / "faults"
        self.faults.mkdir()
        count = torch.cuda.device_count()
        self.devices = [0 if shared or count < len(names) else i for i in range(len(names))]
        self.buffers = {}
        for name, index in zip(names, self.devices, strict=True):
            with device.cupy().cuda.Device(index):
                self.buffers[name] = DeviceBuffer(NBYTES)
        visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))).split(",")
        paths = [str(Path(__file__).parent), str(UNIT), os.environ.get("PYTHONPATH", "")]
        environment = {
            "RELAX_FAULTS": str(self.faults),
            "PYTHONPATH": os.pathsep.join(paths),
            "RELAX_LONELY": "1" if lonely else "0",
            **({SHARED_DEVICES: "1"} if shared else {}),
        }
        self.collective = BroadcastGroup(
            [RankSpec(name, visible[index]) for name, index in zip(names, self.devices, strict=True)],
            "faulty_nccl:FaultyNccl",
            LIMITS,
            bucket_bytes=BUCKET,
            shared_devices=shared or lonely,
            environment=environment,
        )

    def fill(self) -> tuple[dict[str, Memory], str]:
        cp = device.cupy()
        memories: dict[str, Memory] = {}
        for name, index in zip(self.names, self.devices, strict=True):
            with cp.cuda.Device(index):
                self.buffers[name].view.array()[:] = cp.random.randint(0, 256, NBYTES, dtype=cp.uint8)
                cp.cuda.Device().synchronize()
                memories[name] = self.buffers[name].export()
        with cp.cuda.Device(self.devices[0]):
            return memories, digest_of(self.buffers[self.names[0]].view, BUCKET)

    async def send(self, timeout_s: float = 180.0) -> tuple[BroadcastOutcome, float]:
        memories, digest = self.fill()
        begin = time.monotonic()
        outcome = await self.collective.broadcast(memories, digest, timeout_s)
        seconds = time.monotonic() - begin
        root = self.buffers[self.names[0]].view.array().get()
        assert all((self.buffers[n].view.array().get() == root).all() for n in outcome.delivered)
        return outcome, seconds

    def order(self, who: str, where: str, what: str) -> None:
        (self.faults / who).write_text(f"{where} {what} always")


@pytest.fixture
def room() -> Iterator[None]:
    """All memory of the device comes back."""
    torch.cuda.init()
    before = torch.cuda.mem_get_info()[0]
    yield
    deadline = time.monotonic() + 30
    while torch.cuda.mem_get_info()[0] < before - 2 * 4 * NBYTES - (64 << 20):
        assert time.monotonic() < deadline, "memory of the device did not come back"
        time.sleep(0.1)


async def test_nccl_whose_peer_never_comes_is_ended_and_the_process_reaped(tmp_path: Path, room: None) -> None:
    """Rank a hangs before it calls NCCL; the root is inside ncclCommInitRank, which knows no deadline of its own."""
    ranks = Ranks(tmp_path, ("root", "a"), shared=True, lonely=True)
    ranks.order("a", "rendezvous", "hang")
    async with ranks.collective:
        outcome, seconds = await ranks.send()
        assert [(lost.member, lost.fate) for lost in outcome.lost] == [("a", "stuck")]
        assert seconds < 90 + 2 * (LIMITS.join_s + LIMITS.abort_s) + 20
    assert not ranks.collective.ranks.living


async def test_two_ranks_on_one_device_are_refused_by_name(tmp_path: Path, room: None) -> None:
    ranks = Ranks(tmp_path, ("root", "a"), shared=False)
    if torch.cuda.device_count() > 1:
        ranks.collective.ranks._devices = dict.fromkeys(ranks.names, "0")  # type: ignore[assignment]
    async with ranks.collective:
        outcome, _ = await ranks.send()
        (lost,) = outcome.lost
        assert (lost.member, lost.fate) == ("a", "duplicate_device")
        assert isinstance(error_of(lost), DuplicateDevice) and "GPU-" in lost.why
    assert not ranks.collective.ranks.living


async def test_nccl_itself_that_finds_a_device_twice_ends_with_a_reason(tmp_path: Path, room: None) -> None:
    """As if nobody had looked before: whatever NCCL does, it is over by the deadlines."""
    ranks = Ranks(tmp_path, ("root", "a"), shared=False, lonely=True)
    if torch.cuda.device_count() > 1:
        pytest.skip("on several devices each rank has its own")
    async with ranks.collective:
        try:
            outcome, _ = await ranks.send()
            assert outcome.lost and not outcome.delivered
        except BroadcastFailed as error:
            assert error.outcome is not None and not error.outcome.delivered
    assert not ranks.collective.ranks.living


@pytest.mark.parametrize(("where", "what", "fate"), [("middle", "kill", "died"), ("before", "stop", "silent")])
async def test_ranks_meet_broadcast_and_lose_one(tmp_path: Path, room: None, where: str, what: str, fate: str) -> None:
    shared = torch.cuda.device_count() < 3
    if shared and nccl_version() < SHARED_SINCE:
        pytest.skip(f"NCCL {nccl_version()} allows one rank a device, and there are fewer than three devices")
    ranks = Ranks(tmp_path, ("root", "a", "b"), shared=shared)
    async with ranks.collective:
        outcome, _ = await ranks.send()
        assert set(outcome.delivered) == {"a", "b"}
        ranks.order("b", where, what)
        outcome, _ = await ranks.send()
        assert set(outcome.delivered) == {"a"}
        assert [(lost.member, lost.fate) for lost in outcome.lost] == [("b", fate)]
        (ranks.faults / "b").unlink()
        outcome, _ = await ranks.send()
        assert set(outcome.delivered) == {"a", "b"}, "a new process has taken its place"
    assert not ranks.collective.ranks.living
