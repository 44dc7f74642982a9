"""From the stage through a collective to an engine's memory; and device memory whose owner is dead."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from relax_rt.transport.base.process_stat import start_time
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import Corrupt, Gone, Refused
from relax_rt.transport.weights.broadcast.group import GLOO, BroadcastGroup, RankSpec, _serve_store
from relax_rt.transport.weights.broadcast.machine import BroadcastLimits
from relax_rt.transport.weights.broadcast.source import HostReceiveBuffer, broadcast_version, host_send_buffer
from relax_rt.transport.weights.cuda_ipc import CudaIpcSource, Export, read_export
from relax_rt.transport.weights.manifest import BUCKET_BYTES, Manifest, layout_of, total_digest
from relax_rt.transport.weights.memory import DeviceMemory, HostMemory, allocate_host_memory, map_host_memory
from relax_rt.transport.weights.stage import WeightStage, read_manifest, wire_file

DIGEST = total_digest(["x"])
SIZE = BUCKET_BYTES + (1 << 20)
"""More than one bucket, so that digests of several are put together as the manifest has them."""


async def test_a_staged_version_is_whole_at_every_receiver(tmp_path: Path) -> None:
    stage = WeightStage(tmp_path / "stage", 1)
    layout = layout_of([("w", "uint8", (SIZE,), SIZE)])
    with stage.writing(layout, 0) as (file, view):
        view[:] = os.urandom(layout.nbytes)
        manifest = stage.seal(1, layout, file, view)
    places = {name: HostReceiveBuffer(tmp_path / name, layout.nbytes) for name in ("a", "b")}
    receivers = {name: place.memory for name, place in places.items()}
    group = BroadcastGroup([RankSpec(n) for n in ("trainer", "a", "b")], GLOO, BroadcastLimits(hello_s=60.0))
    async with group:
        outcome = await broadcast_version(group, "trainer", stage.folder, manifest, receivers, 90.0)
    assert sorted(outcome.delivered) == ["a", "b"] and not outcome.lost
    sent = (stage.folder / manifest.file).read_bytes()[:SIZE]
    into = bytearray(layout.nbytes)
    place, staged = places["a"], read_manifest(stage.folder, 1)
    place.copy_into(staged, memoryview(into))
    assert into == sent
    with map_host_memory(receivers["a"], writable=True) as memory:
        memory.data[BUCKET_BYTES + 3] ^= 1
    with pytest.raises(Corrupt, match=f"bytes {BUCKET_BYTES}-"):
        place.copy_into(staged, memoryview(into))
    stage.retire(2)
    with pytest.raises(Gone):
        await broadcast_version(group, "trainer", stage.folder, manifest, receivers, 1.0)
    stage.close()


def test_a_version_in_fewer_bits_stays_by_its_name_while_it_is_broadcast(tmp_path: Path) -> None:
    """Ranks open it some time after the broadcast has begun, and a newer version may be committed meanwhile."""
    stage = WeightStage(tmp_path, 1)
    layout = layout_of([("w", "uint8", (SIZE,), SIZE)])
    for version in (1, 2):
        with stage.writing(layout, version - 1) as (file, view):
            view[:] = os.urandom(layout.nbytes)
            stage.seal(version, layout, file, view, os.urandom(1000))
    first = read_manifest(stage.folder, 1)
    with host_send_buffer(stage.folder, first) as (memory, _):
        stage.retire(2)
        with map_host_memory(memory, writable=False) as narrow:
            assert len(narrow.data) == 1000
    assert isinstance(memory, HostMemory) and memory.path.endswith(wire_file(1))
    stage.retire(2)
    assert [path.name for path in stage.folder.glob("x*.bin")] == [wire_file(2)], "nobody wants it any more"
    with pytest.raises(Gone), host_send_buffer(stage.folder, first):
        pass
    stage.close()


def test_ranks_meet_at_the_given_address_alone() -> None:
    store = _serve_store("127.0.0.1")
    listening = [c for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert [c.laddr.ip for c in listening if c.laddr.port == store.port] == ["127.0.0.1"]
    with pytest.raises(Refused, match=r"192\.0\.2\.1.*an address of this host"):
        _serve_store("192.0.2.1")


def test_memory_that_is_not_there_too_short_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    memory = allocate_host_memory(tmp_path / "m", 100)
    for wrong, why in (
        (HostMemory(memory.path, 101), "it has 100 bytes"),
        (HostMemory(str(tmp_path / "n"), 1), "No such file"),
        (DeviceMemory(b"", "GPU-1", 0, 1), "shared memory of the CPU is wanted"),
    ):
        with pytest.raises(Refused, match=why), map_host_memory(wrong, writable=True):
            pass


def test_what_a_reader_does_to_a_private_mapping_stays_with_it(tmp_path: Path) -> None:
    memory = allocate_host_memory(tmp_path / "m", 100)
    with map_host_memory(memory, writable=False) as view:
        view.data[0] = 1
    assert (tmp_path / "m").read_bytes()[0] == 0


def shown(folder: Path, pid: int, started: int) -> Manifest:
    """Version 1 as that process would have shown it."""
    layout = layout_of([("w", "uint8", (8,), 8)])
    manifest = Manifest(1, 1, "", layout, ("x",), DIGEST)
    export = Export(1, DIGEST, DeviceMemory(b"h" * 64, "GPU-1", 0, 8), ("x",), "cuda0.pin", pid, started)
    (folder / "v00000001.cuda").write_bytes(msgspec.msgpack.encode(export))
    (folder / "cuda0.pin").touch()
    return manifest


def test_device_memory_of_a_dead_owner_is_gone_before_any_call_of_cuda(tmp_path: Path) -> None:
    with pytest.raises(Gone, match="not exported"):
        read_export(tmp_path, 1)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    manifest = shown(tmp_path, child.pid, start_time(child.pid))
    record = VersionRecord(1, 0, 1, DIGEST)
    source = CudaIpcSource(tmp_path, record, manifest)
    child.kill()
    child.communicate()
    with pytest.raises(Gone, match=f"process {child.pid}.*has ended"):
        source.copy_into(memoryview(bytearray(8)))
    with pytest.raises(Gone, match="has ended"):
        CudaIpcSource(tmp_path, record, manifest)
    shown(tmp_path, os.getpid(), start_time(os.getpid()) + 1)
    with pytest.raises(Gone, match="has ended"):
        read_export(tmp_path, 1)  # another process got its number


def test_another_content_than_was_committed_is_corrupt_and_nothing_of_it_maps(tmp_path: Path) -> None:
    manifest = shown(tmp_path, os.getpid(), start_time(os.getpid()))
    with pytest.raises(Corrupt, match=f"committed with digest other, exported with {DIGEST}"):
        CudaIpcSource(tmp_path, VersionRecord(1, 0, 1, "other"), manifest)
    with pytest.raises(Refused, match="device memory"):
        CudaIpcSource(tmp_path, VersionRecord(1, 0, 1, DIGEST), manifest).mapped()
