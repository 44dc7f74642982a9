"""Weights as a folder of safetensors: whole or not there, each tensor checked, nothing believed that a file says."""

from __future__ import annotations

import errno
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weight_versions import LAYOUT, fill, version_of

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import Corrupt, DeadlineExceeded, Gone, Refused, RelaxError, StaleEpoch
from relax_rt.transport.weights import directory
from relax_rt.transport.weights.directory import INDEX_FILE, MANIFEST_FILE, DirectorySource, WeightDirectory
from relax_rt.transport.weights.manifest import layout_of
from relax_rt.transport.weights.safetensors_header import decode_header, encode_header

TIMEOUT_S = 20.0


def write(root: Path, version: int = 7, **settings: Any) -> tuple[VersionRecord, bytearray, Path]:
    data = fill(LAYOUT, version)
    record, manifest = version_of(data, version=version)
    folder = WeightDirectory(root, 1, **settings).write(record, manifest, memoryview(data), TIMEOUT_S)
    return record, data, folder


def read(root: Path, record: VersionRecord) -> bytearray:
    into = bytearray(b"\xee" * LAYOUT.nbytes)
    DirectorySource(root, record).copy_into(memoryview(into))
    return into


@pytest.mark.parametrize("shard_bytes", [1, 70, 1 << 20])
def test_what_is_written_is_read(tmp_path: Path, shard_bytes: int) -> None:
    record, data, folder = write(tmp_path, shard_bytes=shard_bytes)
    source = DirectorySource(tmp_path, record)
    source.check()
    assert read(tmp_path, record) == data and source.folder == folder
    assert len(list(folder.glob("*.safetensors"))) == {1: 4, 70: 2, 1 << 20: 1}[shard_bytes]
    with pytest.raises(Refused, match="copy it"):
        source.mapped()


def test_the_library_of_the_format_reads_it_and_finds_the_same(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors import safe_open

    _, data, folder = write(tmp_path, shard_bytes=70)
    index = json.loads((folder / INDEX_FILE).read_bytes())
    for entry in LAYOUT.entries:
        with safe_open(folder / index["weight_map"][entry.name], "pt") as file:
            tensor = file.get_tensor(entry.name)
        assert tuple(tensor.shape) == entry.shape and str(tensor.dtype) == f"torch.{entry.dtype}"
        raw = bytes(data[entry.offset : entry.offset + entry.nbytes])
        assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == raw
    assert index["metadata"]["total_size"] == 78


def test_a_file_of_the_library_has_a_header_that_is_understood(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    save_file({"x": torch.ones(2, 3), "y": torch.zeros(4, dtype=torch.bfloat16)}, tmp_path / "f", {"a": "b"})
    raw = (tmp_path / "f").read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = decode_header(raw[8 : 8 + length], len(raw) - 8 - length, "f")
    assert {(t.name, t.dtype, t.shape) for t in header.tensors} == {("x", "float32", (2, 3)), ("y", "bfloat16", (4,))}
    assert header.metadata == {"a": "b"}


def test_a_damaged_tensor_is_named(tmp_path: Path) -> None:
    record, _, folder = write(tmp_path)
    (shard,) = folder.glob("*.safetensors")
    raw = bytearray(shard.read_bytes())
    raw[-5] ^= 1  # behind it lies the scalar
    shard.write_bytes(raw)
    with pytest.raises(Corrupt, match=r"tensor b of policy version 7 .* were damaged"):
        read(tmp_path, record)
    with pytest.raises(Corrupt, match="tensor b of"):
        DirectorySource(tmp_path, record).check()


def test_a_shard_that_is_cut_off_lost_or_a_link_is_an_error(tmp_path: Path) -> None:
    record, _, folder = write(tmp_path)
    (shard,) = folder.glob("*.safetensors")
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-1])
    with pytest.raises(Corrupt, match="the file 77"):
        read(tmp_path, record)
    shard.unlink()
    with pytest.raises(Gone, match="is not there"):
        read(tmp_path, record)
    (tmp_path / "elsewhere").write_bytes(raw)
    shard.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Corrupt, match="symbolic links"):
        read(tmp_path, record)


def test_another_version_under_this_number_is_refused(tmp_path: Path) -> None:
    record, _, folder = write(tmp_path)
    with pytest.raises(Corrupt, match="committed with digest 00"):
        DirectorySource(tmp_path, msgspec.structs.replace(record, digest="00"))
    folder.rename(tmp_path / "v00000008")
    with pytest.raises(Corrupt, match="says that it is version 7"):
        DirectorySource(tmp_path, msgspec.structs.replace(record, version=8))
    with pytest.raises(Gone):
        DirectorySource(tmp_path, record)


def test_retired_versions_go_and_an_open_one_can_be_read_to_its_end(tmp_path: Path) -> None:
    old, data, _ = write(tmp_path, 1)
    new, _, _ = write(tmp_path, 2)
    source = DirectorySource(tmp_path, old)
    into = bytearray(LAYOUT.nbytes)
    with source._tensors() as tensors:
        WeightDirectory(tmp_path, 1).retire(2)
        for stored, tensor, descriptor, start in tensors:
            entry = next(e for e in LAYOUT.entries if e.name == stored.name)
            room = memoryview(into)[entry.offset : entry.offset + entry.nbytes]
            source._read(stored, tensor, descriptor, start, lambda at, n, room=room: room[at : at + n])  # type: ignore[misc]
    assert into == data
    with pytest.raises(Gone):
        read(tmp_path, old)
    read(tmp_path, new)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["epoch", "v00000002"]


def test_an_older_incarnation_is_fenced_and_its_half_written_version_goes(tmp_path: Path) -> None:
    old = WeightDirectory(tmp_path, 1)
    (tmp_path / ".writing-1-v00000007").mkdir()
    (tmp_path / ".writing-1-v00000007" / "model-00001-of-00001.safetensors").write_bytes(b"half")
    new = WeightDirectory(tmp_path, 2)
    data = fill(LAYOUT)
    record, manifest = version_of(data)
    with pytest.raises(StaleEpoch):
        old.write(record, manifest, memoryview(data), TIMEOUT_S)
    new.write(record, manifest, memoryview(data), TIMEOUT_S)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["epoch", "v00000007"]
    with pytest.raises(Refused, match="there already"):
        new.write(record, manifest, memoryview(data), TIMEOUT_S)


def test_a_slow_disk_ends_at_the_deadline_and_leaves_nothing(tmp_path: Path) -> None:
    now = iter(range(100))
    data = fill(LAYOUT)
    record, manifest = version_of(data)
    writer = WeightDirectory(tmp_path, 1, clock=lambda: next(now))
    with pytest.raises(DeadlineExceeded, match=r"at tensor b\b|at tensor scalar"):
        writer.write(record, manifest, memoryview(data), 1.5)
    assert [p.name for p in tmp_path.iterdir()] == ["epoch"]


def test_a_folder_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Refused, match="weight directory"):
        WeightDirectory(tmp_path / "file", 1)
    writer = WeightDirectory(tmp_path, 1)
    (tmp_path / "epoch").unlink()
    (tmp_path / "epoch").mkdir()
    data = fill(LAYOUT)
    record, manifest = version_of(data)
    with pytest.raises(Refused, match="may write in"):
        writer.write(record, manifest, memoryview(data), 10.0)


FULL = """
import sys, pathlib
sys.path[:0] = sys.argv[2:]
from weight_versions import *
from relax_rt.transport.weights.directory import *
root = pathlib.Path(sys.argv[1])
layout = layout_of([(f"t{n}", "uint8", (1 << 19,), 1 << 19) for n in range(8)])
writer = WeightDirectory(root, 1, shard_bytes=1 << 20)
for version in (1, 2):
    data = fill(layout, version)
    record, manifest = version_of(data, layout, version)
    try:
        writer.write(record, manifest, memoryview(data), 20.0)
    except OutOfSpace as error:
        print("full:", error)
print(sorted(p.name for p in root.iterdir()))
DirectorySource(root, version_of(fill(layout, 1), layout, 1)[0]).check()
writer.retire(2)
print(writer.write(record, manifest, memoryview(data), 20.0).name)
"""


def test_a_full_disk_is_told_and_the_version_before_stays(tmp_path: Path) -> None:
    mount = f'mount -t tmpfs -o size=6m tmpfs {tmp_path} && exec "$0" "$@"'
    command = ["unshare", "--mount", "sh", "-c", mount]
    if os.geteuid() != 0 or subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no file system of its own can be made here")
    here = [str(Path(__file__).parents[3])]
    done = subprocess.run(
        [*command, sys.executable, "-c", FULL, str(tmp_path), *here], capture_output=True, text=True, timeout=300
    )
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"full: policy version 2 in {tmp_path}: [Errno {errno.ENOSPC}]"), done.stderr
    assert lines[1:] == ["['epoch', 'v00000001']", "v00000002"], done.stderr


def test_bytes_between_tensors_are_not_lost_silently(tmp_path: Path) -> None:
    data = fill(LAYOUT)
    data[61] = 1
    record, manifest = version_of(data)
    with pytest.raises(Refused, match="bytes 60 to 64, which belong to no tensor"):
        WeightDirectory(tmp_path, 1).write(record, manifest, memoryview(data), TIMEOUT_S)


def header(**entries: Any) -> bytes:
    return msgspec.json.encode(entries)


@pytest.mark.parametrize(
    ("text", "data_bytes", "why"),
    [
        (b"{", 0, "truncated"),
        (b"[]", 0, "Expected `object`"),
        (b"[" * 100_000, 0, "Expected `object`"),
        (header(x={"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}), 8, "are not those of float32"),
        (header(x={"dtype": "F32", "shape": [2**61, 8], "data_offsets": [0, 0]}), 0, "are not those of"),
        (header(x={"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}), 4, "Expected `int` >= 0"),
        (header(x={"dtype": "F31", "shape": [], "data_offsets": [0, 4]}), 4, "'F31' is not known"),
        (header(x={"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}), 3, "have 4 bytes, the file 3"),
        (header(x={"dtype": "U8", "shape": [4], "data_offsets": [1, 5]}), 5, "begins at byte 1, not at 0"),
        (
            header(
                x={"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
                y={"dtype": "U8", "shape": [4], "data_offsets": [2, 6]},
            ),
            6,
            "tensor y in f: it begins at byte 2, not at 4",
        ),
        (header(x={"dtype": "U8", "shape": [1], "data_offsets": [0, 1], "more": 1}), 1, "unknown field"),
        (header(x={"dtype": "U8", "shape": [1] * 17, "data_offsets": [0, 1]}), 1, "length <= 16"),
        (header(**{"x" * 2000: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}), 1, "2000 characters"),
        (header(__metadata__={"a": 1}), 0, "Expected `str`"),
    ],
)
def test_a_hostile_header_is_refused(text: bytes, data_bytes: int, why: str) -> None:
    with pytest.raises(Corrupt, match=why):
        decode_header(text, data_bytes, "f")


@pytest.mark.parametrize("length", [2**63, 1 << 40, 500])
def test_a_length_beyond_the_file_is_refused(tmp_path: Path, length: int) -> None:
    record, _, folder = write(tmp_path)
    (shard,) = folder.glob("*.safetensors")
    shard.write_bytes(struct.pack("<Q", length) + shard.read_bytes()[8:])
    with pytest.raises(Corrupt, match=f"a header of {length} bytes is announced"):
        read(tmp_path, record)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: m.update(format=9), "format 9"),
        (lambda m: m["tensors"][0].__setitem__(1, "../../../etc/passwd"), "matching regex"),
        (lambda m: m["tensors"].pop(), "checksums are not those"),
        (lambda m: m["manifest"]["layout"]["entries"][1].__setitem__(3, 0), "overlaps another"),
        (lambda m: m["manifest"]["layout"].update(nbytes=10), "do not lie inside"),
        (lambda m: m["manifest"]["layout"]["entries"][0].__setitem__(2, [5, 3]), "in the manifest"),
    ],
)
def test_a_manifest_that_cannot_be_is_refused(tmp_path: Path, change: Any, why: str) -> None:
    record, _, folder = write(tmp_path)
    values = json.loads((folder / MANIFEST_FILE).read_bytes())
    change(values)
    (folder / MANIFEST_FILE).write_text(json.dumps(values))
    with pytest.raises(Corrupt, match=why):
        read(tmp_path, record)


TENSORS = st.lists(
    st.tuples(st.text(min_size=1, max_size=20), st.lists(st.integers(0, 5), max_size=4)),
    max_size=5,
    unique_by=lambda t: t[0],
)


@given(TENSORS, st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3), st.data())
@settings(max_examples=150, deadline=None)
def test_any_header_is_read_as_it_was_written_and_any_other_refused(
    tensors: list[tuple[str, list[int]]], metadata: dict[str, str], data: st.DataObject
) -> None:
    layout = layout_of([(n, "int8", tuple(s), _product(s)) for n, s in tensors if n != "__metadata__"])
    raw = encode_header([(e.name, e.dtype, e.shape, e.nbytes) for e in layout.entries], metadata)
    total = sum(e.nbytes for e in layout.entries)
    found = decode_header(raw[8:], total, "f")
    assert {(t.name, t.shape) for t in found.tensors} == {(e.name, e.shape) for e in layout.entries}
    assert found.metadata == metadata and len(raw) % 8 == 0
    damaged = bytearray(raw[8:])
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        again = decode_header(bytes(damaged), total, "f")
    except RelaxError:
        return
    assert all(0 <= t.start <= t.stop <= total for t in again.tensors)


def _product(sizes: list[int]) -> int:
    out = 1
    for size in sizes:
        out *= size
    return out


def test_pieces_of_large_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "PIECE_BYTES", 7)
    record, data, _ = write(tmp_path)
    assert read(tmp_path, record) == data
    DirectorySource(tmp_path, record).check()
