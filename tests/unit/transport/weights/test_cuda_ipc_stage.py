"""The trainer's side of weights on a device, with memory of the CPU in the place of the device's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from weight_versions import version_of

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import Corrupt, Gone
from relax_rt.transport.weights import cuda_ipc, device
from relax_rt.transport.weights.cuda_ipc import CudaIpcSource, CudaStage
from relax_rt.transport.weights.manifest import BUCKET_BYTES, Manifest, bucket_digest, layout_of
from relax_rt.transport.weights.memory import DeviceMemory

LAYOUT = layout_of([("w", "uint8", (BUCKET_BYTES + 64,), BUCKET_BYTES + 64)])
"""Two buckets."""
MEMORY: dict[bytes, CpuView] = {}


class CpuView:
    """As DeviceView."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.nbytes = data, data.nbytes

    def part(self, start: int, stop: int) -> CpuView:
        return CpuView(self.data[start:stop])

    def digest(self) -> str:
        return "device " + bucket_digest(self.data)


class CpuBuffer:
    """As DeviceBuffer."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.view = nbytes, CpuView(memoryview(bytearray(nbytes)))
        MEMORY[str(id(self)).encode()] = self.view

    def export(self) -> DeviceMemory:
        return DeviceMemory(str(id(self)).encode(), "GPU-0", 0, self.nbytes)

    def free(self) -> None: ...


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def copy_to_host(into: memoryview, source: CpuView) -> None:
        into[:] = source.data

    @contextmanager
    def open_device_memory(memory: DeviceMemory) -> Iterator[CpuView]:
        yield MEMORY[memory.handle].part(0, memory.nbytes)

    monkeypatch.setattr(cuda_ipc, "DeviceBuffer", CpuBuffer)
    monkeypatch.setattr(device, "copy_to_host", copy_to_host)
    monkeypatch.setattr(device, "open_device_memory", open_device_memory)
    monkeypatch.setattr(device, "diagnosed", lambda *_: nullcontext())
    yield
    MEMORY.clear()


def weights(version: int = 1) -> tuple[bytearray, VersionRecord, Manifest]:
    data = bytearray([version]) * LAYOUT.nbytes
    return data, *version_of(data, LAYOUT, version)


def fill(data: bytearray) -> Callable[[Any], None]:
    def into(view: CpuView) -> None:
        view.data[:] = data

    return into


def test_what_is_shown_is_what_was_committed(tmp_path: Path) -> None:
    stage = CudaStage(tmp_path)
    for number in (1, 2, 3):
        data, record, manifest = weights(number)
        assert len(stage.publish(manifest, fill(data)).buckets) == 2
        into = bytearray(LAYOUT.nbytes)
        CudaIpcSource(tmp_path, record, manifest).copy_into(memoryview(into))
        assert into == data
    shown = list(tmp_path.glob("v*.cuda"))
    assert shown and {path.stat().st_mode & 0o777 for path in shown} == {0o600}


@pytest.mark.parametrize("at", [5, BUCKET_BYTES + 5])
def test_weights_on_the_device_that_are_not_the_committed_ones_are_not_shown(tmp_path: Path, at: int) -> None:
    stage = CudaStage(tmp_path)
    data, record, manifest = weights()
    data[at] ^= 1
    with pytest.raises(Corrupt, match=f"bytes {at // BUCKET_BYTES * BUCKET_BYTES}-.*digest of the staged version"):
        stage.publish(manifest, fill(data))
    with pytest.raises(Gone, match="not exported"):
        CudaIpcSource(tmp_path, record, manifest)
    data[at] ^= 1
    stage.publish(manifest, fill(data))
    CudaIpcSource(tmp_path, record, manifest).copy_into(memoryview(data))


def test_a_manifest_of_other_buckets_than_were_committed_is_found(tmp_path: Path) -> None:
    data, record, manifest = weights()
    CudaStage(tmp_path).publish(manifest, fill(data))
    other = Manifest(1, 1, "", LAYOUT, manifest.buckets[::-1], manifest.digest)
    with pytest.raises(Corrupt, match="the digests of its buckets"):
        CudaIpcSource(tmp_path, record, other)
