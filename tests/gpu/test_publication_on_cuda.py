"""1.5 billion random parameters from a trainer's device memory into an engine's, and into the node's stage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.weights import device
from relax_rt.transport.weights.device import DeviceBuffer, DeviceView
from relax_rt.transport.weights.manifest import layout_of
from relax_rt.transport.weights.source import StageSource
from relax_rt.transport.weights.stage import WeightStage

PARAMETERS, TENSORS = 1_500_000_000, 250


def test_every_byte_goes_from_the_device_through_the_stage_to_the_device(tmp_path: Path) -> None:
    """What CUDA IPC does between processes is in test_cuda_ipc; this is the size, and the way by shared memory."""
    free = shutil.disk_usage("/dev/shm").free
    if free < 3 * PARAMETERS:
        pytest.skip(f"/dev/shm has {free >> 20} MiB free, and the stage needs {3 * PARAMETERS >> 20} MiB")
    each = PARAMETERS // TENSORS
    layout = layout_of([(f"w{i}", "bfloat16", (each,), 2 * each) for i in range(TENSORS)])
    generator = torch.Generator("cuda").manual_seed(1)
    flat = torch.empty(layout.nbytes, dtype=torch.uint8, device="cuda")
    flat.random_(0, 256, generator=generator)
    shm = Path("/dev/shm") / f"relax-{tmp_path.name}"
    stage = WeightStage(shm, 1)
    try:
        with stage.writing(layout, 0) as (file, view):
            sent = DeviceView(flat.data_ptr(), layout.nbytes, flat)
            device.copy_to_host(view, sent)
            manifest = stage.seal(1, layout, file, view)
        host = torch.empty(layout.nbytes, dtype=torch.uint8, pin_memory=True)
        StageSource(shm, VersionRecord(1, 0, 1, manifest.digest)).copy_into(memoryview(host.numpy()))
        into = DeviceBuffer(layout.nbytes)
        torch.as_tensor(into.view.array(), device="cuda").copy_(host)
        torch.cuda.synchronize()
        assert into.view.digest() == sent.digest()
        assert bool((torch.as_tensor(into.view.array(), device="cuda") == flat).all())
        into.free()
    finally:
        stage.close()
        for file in shm.iterdir():
            file.unlink()
        shm.rmdir()
