"""Other processes of the tests of CUDA IPC: `send` shows weights on the device, `receive` copies them again and again.

    python device_far_end.py send FOLDER MIB          prints "shown", then waits for a line; SIGKILL ends it
    python device_far_end.py receive FOLDER MIB       copies until something is wrong; prints one line of JSON a copy

Each runs in a process of its own, because an error of CUDA costs the whole context.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import RelaxError
from relax_rt.transport.weights import device
from relax_rt.transport.weights.cuda_ipc import CudaIpcSource, CudaStage
from relax_rt.transport.weights.device import DeviceBuffer, DeviceView
from relax_rt.transport.weights.manifest import Manifest, bucket_digest, bucket_slices, layout_of, total_digest


def pattern(nbytes: int) -> Any:
    """The bytes that are sent, on the device: no two buckets are alike."""
    cp = device.cupy()
    return (cp.arange(nbytes // 4, dtype=cp.uint32) * cp.uint32(2654435761)).view(cp.uint8)


def manifest_of(nbytes: int) -> Manifest:
    """What stands for version 1."""
    data = memoryview(pattern(nbytes).get())
    layout = layout_of([("w", "uint8", (nbytes,), nbytes)])
    buckets = tuple(bucket_digest(data[part]) for part in bucket_slices(nbytes))
    return Manifest(1, 1, "", layout, buckets, total_digest(buckets))


def fill(view: DeviceView) -> None:
    """Put the pattern there."""
    view.array()[:] = pattern(view.nbytes)
    device.cupy().cuda.Device().synchronize()


def say(**fields: Any) -> None:
    """One line of JSON to the test."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def send(folder: Path, nbytes: int) -> None:
    CudaStage(folder).publish(manifest_of(nbytes), fill)
    say(did="shown")
    sys.stdin.readline()


def receive(folder: Path, nbytes: int) -> None:
    manifest = manifest_of(nbytes)
    into = DeviceBuffer(nbytes)
    try:
        source = CudaIpcSource(folder, VersionRecord(1, 0, 1, manifest.digest), manifest)
        while True:
            say(did="begin")
            source.copy_to_device(into.view)
            say(did="copied")
    except RelaxError as error:
        say(did="failed", kind=type(error).__name__, error=str(error))


if __name__ == "__main__":
    {"send": send, "receive": receive}[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]) << 20)
