"""Weights from process to process on one device."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import device_far_end
import pytest
import torch

from relax_rt.roles.rollout.engines.sglang.weight_loading import SharedTensors
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import Corrupt, Gone, Refused
from relax_rt.transport.weights import device
from relax_rt.transport.weights.cuda_ipc import CudaIpcSource, CudaStage
from relax_rt.transport.weights.device import DeviceBuffer

MIB = 256
NBYTES = MIB << 20
DEADLINE_S = 120.0


@contextmanager
def far_end(what: str, folder: Path, mib: int = MIB) -> Iterator[subprocess.Popen[str]]:
    program = Path(__file__).with_name("device_far_end.py")
    process = subprocess.Popen(
        [sys.executable, str(program), what, str(folder), str(mib)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    return dict(json.loads(process.stdout.readline()))


def free_bytes() -> int:
    return int(torch.cuda.mem_get_info()[0])


def comes_back(before: int, slack: int = 64 << 20) -> None:
    """The device has as much room as before, up to what drivers keep."""
    deadline = time.monotonic() + 30
    while free_bytes() < before - slack:
        assert time.monotonic() < deadline, f"{(before - free_bytes()) >> 20} MiB did not come back"
        time.sleep(0.1)


def record() -> VersionRecord:
    return VersionRecord(1, 0, 1, device_far_end.manifest_of(NBYTES).digest)


def test_a_version_arrives_whole_on_the_device_and_on_the_host(tmp_path: Path) -> None:
    manifest = device_far_end.manifest_of(NBYTES)
    with far_end("send", tmp_path) as sender:
        assert line(sender)["did"] == "shown"
        source = CudaIpcSource(tmp_path, record(), manifest)
        into = DeviceBuffer(NBYTES)
        source.copy_to_device(into.view)
        expected = device_far_end.pattern(NBYTES)
        assert bool((into.view.array() == expected).all())
        host = bytearray(NBYTES)
        source.copy_into(memoryview(host))
        assert host == expected.get().tobytes()
        with pytest.raises(Refused, match="device memory"):
            source.mapped()
        into.free()


def test_bytes_that_changed_since_they_were_shown_are_found(tmp_path: Path) -> None:
    manifest = device_far_end.manifest_of(NBYTES)
    other = device_far_end.manifest_of(NBYTES // 2)
    with far_end("send", tmp_path) as sender:
        line(sender)
        with pytest.raises(Corrupt, match="committed with digest"):
            CudaIpcSource(tmp_path, VersionRecord(1, 0, 1, other.digest), manifest)
        source = CudaIpcSource(tmp_path, record(), manifest)
        with source._pinned() as view:
            view.part(NBYTES // 2, NBYTES // 2 + 1).array()[:] += 1
        into = DeviceBuffer(NBYTES)
        with pytest.raises(Corrupt, match="bytes"):
            source.copy_to_device(into.view)
        into.free()


def test_a_dead_senders_version_is_gone_and_its_memory_comes_back(tmp_path: Path) -> None:
    manifest = device_far_end.manifest_of(NBYTES)
    torch.cuda.init()
    before = free_bytes()
    with far_end("send", tmp_path) as sender:
        line(sender)
        source = CudaIpcSource(tmp_path, record(), manifest)
        sender.send_signal(signal.SIGKILL)
        sender.wait(DEADLINE_S)
        into = DeviceBuffer(NBYTES)
        with pytest.raises(Gone, match="has ended"):
            source.copy_to_device(into.view)
        into.free()
    comes_back(before)


@pytest.mark.parametrize("moment_s", [0.0, 0.005, 0.02, 0.1])
def test_a_receiver_whose_sender_is_killed_in_mid_copy_says_so_and_leaves_nothing(
    tmp_path: Path, moment_s: float
) -> None:
    torch.cuda.init()
    before = free_bytes()
    with far_end("send", tmp_path, 2048) as sender, far_end("receive", tmp_path, 2048) as receiver:
        line(sender)
        while line(receiver)["did"] != "copied":
            pass
        assert line(receiver)["did"] == "begin"
        time.sleep(moment_s)
        sender.send_signal(signal.SIGKILL)
        while (said := line(receiver))["did"] != "failed":
            pass
        assert said["kind"] in ("Gone", "DeviceFailed"), said
        assert receiver.wait(DEADLINE_S) == 0, "it ends by itself: no crash"
    comes_back(before)


def test_slots_are_used_again_and_a_pinned_one_is_left_alone(tmp_path: Path) -> None:
    stage = CudaStage(tmp_path)
    manifest = device_far_end.manifest_of(1 << 20)
    pointers = set()
    for _ in range(4):
        export = stage.publish(manifest, device_far_end.fill)
        pointers.add(export.memory.handle)
    assert len(pointers) <= 2
    stage.close()
    with pytest.raises(Gone):
        CudaIpcSource(tmp_path, VersionRecord(1, 0, 1, manifest.digest), manifest)


def test_memory_of_another_device_is_refused(tmp_path: Path) -> None:
    buffer = DeviceBuffer(1024)
    memory = buffer.export()
    with (
        pytest.raises(Refused, match="works on"),
        device.open_device_memory(type(memory)(memory.handle, "GPU-other", 0, 1024)),
    ):
        pass
    buffer.free()


def test_what_sglang_is_sent_opens_in_another_process(tmp_path: Path) -> None:
    layout = device_far_end.manifest_of(1 << 20).layout
    data = device_far_end.pattern(1 << 20).get()
    torch.cuda.init()
    before = free_bytes()
    shown = SharedTensors(layout, memoryview(data), tmp_path / "unused", 0, "cuda")
    program = (
        "import base64, pickle, sys, torch\n"
        "import torch.multiprocessing\n"
        "pairs = pickle.loads(base64.b64decode(sys.stdin.read()))\n"
        "print(*[(name, int(t.to(torch.int64).sum())) for name, t in pairs])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=shown.message(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(("w", int(data.astype("int64").sum())))
    shown.close()
    comes_back(before)
