"""Who is served by a broadcast is known to all before the commit; nobody waits for what will not come."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from weight_versions import LAYOUT, fill, version_of

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import Corrupt, Gone, OutOfSpace
from relax_rt.transport.weights.broadcast.receivers import (
    BroadcastReceiver,
    BroadcastReceivers,
    ReservedReceivers,
    read_record,
)
from relax_rt.transport.weights.broadcast.source import BroadcastSource, HostReceiveBuffer
from relax_rt.transport.weights.manifest import Manifest, layout_of
from relax_rt.transport.weights.memory import HostMemory

NBYTES = LAYOUT.nbytes


def receiver(folder: Path, slot: str = "rollout/0", epoch: int = 1, *, offered: bool = True) -> BroadcastReceiver:
    one = BroadcastReceiver(folder, slot, epoch, HostReceiveBuffer)
    if offered:
        one.register(NBYTES)
    return one


def take(folder: Path, record: VersionRecord, timeout_s: float = 5.0) -> ReservedReceivers | None:
    return BroadcastReceivers(folder).reserve(record.version, record.digest, NBYTES, timeout_s)


def write(taken: ReservedReceivers, slot: str, data: bytes | bytearray) -> None:
    """As a rank does."""
    memory = taken.receivers[slot].memory
    assert isinstance(memory, HostMemory)
    with Path(memory.path).open("r+b") as file:
        file.write(data)


def test_a_version_comes_to_those_who_were_there_at_its_commit(tmp_path: Path) -> None:
    first, second = receiver(tmp_path), receiver(tmp_path, "rollout/1", 4)
    data = fill(LAYOUT)
    record, manifest = version_of(data)
    assert not first.wait(record), "nobody has said that it will come"
    taken = take(tmp_path, record)
    assert taken is not None and sorted(taken.receivers) == ["rollout/0", "rollout/1"]
    late = receiver(tmp_path, "rollout/10", 2)
    assert not late.wait(record)
    assert not receiver(tmp_path, "rollout/11", offered=False).wait(record)
    for slot in taken.receivers:
        write(taken, slot, data)
    with pytest.raises(Gone, match="newer one is being received"):
        first.copy_into(manifest, memoryview(bytearray(NBYTES)))
    threading.Timer(0.1, taken.finish, [{}]).start()
    assert first.wait(record) and second.wait(record), "once it is over"
    into = bytearray(NBYTES)
    source = BroadcastSource(record, manifest, first)
    source.copy_into(memoryview(into))
    assert (into, source.carrier) == (data, "collective")
    assert not first.wait(VersionRecord(8, 7, 8, "other")), "of another version nothing is said"
    assert not first.wait(VersionRecord(record.version, 0, 0, "other")), "nor of another content under its number"


def test_who_is_lost_knows_at_once_and_what_differs_is_found(tmp_path: Path) -> None:
    first, second = receiver(tmp_path), receiver(tmp_path, "rollout/1")
    record, manifest = version_of(fill(LAYOUT))
    taken = take(tmp_path, record)
    assert taken is not None
    write(taken, "rollout/0", os.urandom(NBYTES))
    taken.finish({"rollout/1": "died: struck by the test"})
    assert first.wait(record) and not second.wait(record)
    with pytest.raises(Corrupt, match="bytes 0-"):
        first.copy_into(manifest, memoryview(bytearray(NBYTES)))


class Looked:
    """Memory that is looked at while it is read."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.memory = HostReceiveBuffer(path, nbytes).memory
        self.taken: list[ReservedReceivers | None] = []

    def copy_into(self, manifest: Manifest, into: memoryview) -> None:
        self.taken.append(take(Path(self.memory.path).parent, VersionRecord(9, 7, 9, "d")))  # type: ignore[union-attr]


def test_memory_that_is_read_is_not_written(tmp_path: Path) -> None:
    _, manifest = version_of(fill(LAYOUT))
    places: list[Looked] = []
    one = BroadcastReceiver(tmp_path, "rollout/0", 1, lambda path, n: places.append(Looked(path, n)) or places[-1])  # type: ignore[func-returns-value]
    one.register(NBYTES)
    one.copy_into(manifest, memoryview(bytearray(NBYTES)))
    assert places[0].taken == [None]
    assert take(tmp_path, VersionRecord(9, 7, 9, "d")) is not None, "afterwards it may be"


def test_memory_that_somebody_may_still_write_is_never_taken_again(tmp_path: Path) -> None:
    receiver(tmp_path)
    record, _ = version_of(fill(LAYOUT))
    taken = take(tmp_path, record)
    assert taken is not None
    taken.finish({"rollout/0": "nobody knows"}, unusable=True)
    assert take(tmp_path, record) is None


DEAD = """
import sys
from pathlib import Path
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.weights.broadcast.source import HostReceiveBuffer
from relax_rt.transport.weights.broadcast.receivers import BroadcastReceiver, BroadcastReceivers
folder, what = Path(sys.argv[1]), sys.argv[2]
if what == "offer":
    BroadcastReceiver(folder, "rollout/1", 3, HostReceiveBuffer).register(int(sys.argv[3]))
else:
    assert BroadcastReceivers(folder).reserve(7, sys.argv[4], int(sys.argv[3]), 60.0)
"""


def in_a_process_that_ends(folder: Path, *words: str) -> None:
    subprocess.run([sys.executable, "-c", DEAD, str(folder), *words], check=True, timeout=120)


def test_the_dead_are_served_by_nobody_and_their_files_go(tmp_path: Path) -> None:
    receiver(tmp_path)
    in_a_process_that_ends(tmp_path, "offer", str(NBYTES))
    assert list(tmp_path.glob("rollout~1-*.mem"))
    taken = take(tmp_path, version_of(fill(LAYOUT))[0])
    assert taken is not None and list(taken.receivers) == ["rollout/0"]
    assert not list(tmp_path.glob("rollout~1-*"))


def test_a_sender_that_is_dead_or_says_nothing_is_waited_for_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = receiver(tmp_path)
    record, _ = version_of(fill(LAYOUT))
    in_a_process_that_ends(tmp_path, "take", str(NBYTES), record.digest)
    served = read_record(tmp_path, record)
    assert served is not None and served.timeout_s == 60.0 and not served.finished
    assert not one.wait(record), "long before its time is over"
    monkeypatch.setattr("relax_rt.transport.weights.broadcast.receivers.GRACE_S", 0.05)
    silent = take(tmp_path, record, timeout_s=0.05)
    assert silent is not None
    assert not one.wait(record)
    silent.finish({})


def test_a_successor_has_memory_of_its_own_and_another_size_is_left_alone(tmp_path: Path) -> None:
    receiver(tmp_path)
    record, _ = version_of(fill(LAYOUT))
    taken = take(tmp_path, record)
    successor = receiver(tmp_path, epoch=2)
    assert taken is not None
    taken.finish({})
    assert not successor.wait(record), "it was brought to its predecessor"
    assert [path.name for path in tmp_path.glob("*.receiver")] == ["rollout~0-00000002.receiver"]
    assert BroadcastReceivers(tmp_path).reserve(8, "d", NBYTES + 1, 5.0) is None
    successor.register(NBYTES + 1)
    larger = BroadcastReceivers(tmp_path).reserve(9, "d", NBYTES + 1, 5.0)
    assert larger is not None
    larger.finish({})
    successor.close()
    assert not list(tmp_path.glob("rollout*"))
    BroadcastReceivers(tmp_path).retire(9)
    assert [path.name for path in tmp_path.iterdir()] == ["b00000009.broadcast"]


def test_what_cannot_be_read_or_made_is_passed_over(tmp_path: Path) -> None:
    record, _ = version_of(fill(LAYOUT))
    (tmp_path / "rollout~5-00000001.receiver").write_bytes(b"\x93nothing")
    (tmp_path / f"b{record.version:08d}.broadcast").write_bytes(b"")
    assert read_record(tmp_path, record) is None
    assert take(tmp_path, record) is None
    full = BroadcastReceiver(tmp_path, "rollout/0", 1, HostReceiveBuffer)
    with pytest.raises(OutOfSpace):
        full.register(1 << 60)
    assert take(tmp_path, record) is None and not full.wait(record)
    assert BroadcastReceivers(tmp_path / "none").reserve(1, "d", 1, 1.0) is None


def narrow_version() -> tuple[bytearray, bytes, VersionRecord, Manifest]:
    """A version that is sent as float8: what arrives, and what is sent of it."""
    torch = pytest.importorskip("torch")
    from relax_rt.transport.weights.payloads import wire_version

    layout = layout_of([("w", "float32", (64, 32), 64 * 32 * 4), ("norm", "float32", (32,), 128)])
    data = bytearray(layout.nbytes)
    torch.frombuffer(data, dtype=torch.float32).copy_(torch.linspace(-3, 5, layout.nbytes // 4))
    sent = wire_version(layout, memoryview(data), "float8_e4m3fn")
    record, manifest = version_of(data, layout)
    return data, sent, record, msgspec.structs.replace(manifest, wire_bytes=len(sent))


def test_a_version_in_fewer_bits_arrives_as_what_was_committed(tmp_path: Path) -> None:
    data, sent, record, manifest = narrow_version()
    assert len(sent) < manifest.layout.nbytes / 3
    one = receiver(tmp_path, offered=False)
    one.register(manifest.sent_bytes)
    taken = BroadcastReceivers(tmp_path).reserve(record.version, record.digest, len(sent), 5.0)
    assert taken is not None
    write(taken, "rollout/0", sent)
    taken.finish({})
    into = bytearray(manifest.layout.nbytes)
    one.copy_into(manifest, memoryview(into))
    assert into == data
    write(taken, "rollout/0", sent[:-5] + b"\x01" + sent[-4:])
    with pytest.raises(Corrupt, match="does not match"):
        one.copy_into(manifest, memoryview(into))
    write(taken, "rollout/0", sent.replace(b'"norm"', b'"morn"'))
    with pytest.raises(Corrupt, match="norm"):
        one.copy_into(manifest, memoryview(into))
