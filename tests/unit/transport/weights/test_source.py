"""Sources over the stage: mapped or copied, always verified, and no reader can hold the writer up for ever."""

from __future__ import annotations

import gc
from pathlib import Path

import msgspec
import numpy as np
import pytest

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import Corrupt, Gone, OutOfSpace
from relax_rt.transport.weights.manifest import BUCKET_BYTES, Layout, Manifest, bucket_digest, layout_of
from relax_rt.transport.weights.source import DeltaSource, StageSource
from relax_rt.transport.weights.stage import MAX_BUFFERS, WeightStage, read_manifest

SMALL = layout_of([("w", "bfloat16", (1000,), 2000)])
LARGE = layout_of([("w", "float32", (BUCKET_BYTES // 2,), BUCKET_BYTES * 2)])


def publish(stage: WeightStage, version: int, layout: Layout = SMALL) -> VersionRecord:
    with stage.writing(layout, version - 1) as (file, view):
        view[:] = bytes([version]) * layout.nbytes
        return VersionRecord(version, version - 1, version, stage.seal(version, layout, file, view).digest)


def damage(folder: Path, at: int) -> None:
    with (folder / "w0.buf").open("r+b") as file:
        file.seek(at)
        file.write(b"\xee")


def test_a_mapping_is_the_version_itself_and_cannot_be_written(tmp_path: Path) -> None:
    stage = WeightStage(tmp_path, 1)
    source = StageSource(tmp_path, publish(stage, 1))
    with source.mapped() as view:
        assert bytes(view) == b"\x01" * SMALL.nbytes
        assert view.readonly
        with pytest.raises(TypeError, match="read-only"):
            view[0] = 2
    assert publish(stage, 2).version == 2


def test_a_mapping_is_pinned_for_as_long_as_a_view_of_it_is_used(tmp_path: Path) -> None:
    stage = WeightStage(tmp_path, 1)
    kept: dict[int, np.ndarray] = {}
    for version in range(1, MAX_BUFFERS + 1):
        with StageSource(tmp_path, publish(stage, version)).mapped() as view:
            kept[version] = np.frombuffer(view, np.uint8)
    with pytest.raises(OutOfSpace, match="pinned by readers"):
        publish(stage, MAX_BUFFERS + 1)
    assert all(bool((weights == version).all()) for version, weights in kept.items())
    del kept[2], view
    gc.collect()
    assert publish(stage, MAX_BUFFERS + 1).version == MAX_BUFFERS + 1


def test_the_writer_goes_on_without_a_reader_that_never_lets_go(tmp_path: Path) -> None:
    stage = WeightStage(tmp_path, 1)
    held = []
    for version in range(1, MAX_BUFFERS + 1):
        with StageSource(tmp_path, publish(stage, version)).mapped() as view:
            held.append(np.frombuffer(view, np.uint8))
    with pytest.raises(OutOfSpace):
        publish(stage, 9)
    assert stage.evict(8) == "w0.buf"
    assert stage.evict(8) == "", "there is room now"
    record = publish(stage, 9)
    into = bytearray(SMALL.nbytes)
    StageSource(tmp_path, record).copy_into(memoryview(into))
    assert into == b"\x09" * SMALL.nbytes
    assert [int(weights[0]) for weights in held] == [1, 2, 3, 4], "what a reader had has not changed under it"
    with pytest.raises(Gone):
        StageSource(tmp_path, VersionRecord(1, 0, 1))
    assert len(list(tmp_path.glob("w*.buf"))) == MAX_BUFFERS


def test_nothing_is_taken_from_readers_where_a_buffer_is_free(tmp_path: Path) -> None:
    stage = WeightStage(tmp_path, 1)
    assert stage.evict(0) == ""
    for version in range(1, MAX_BUFFERS + 1):
        with stage.writing(SMALL, version - 1) as (file, view):
            stage.seal(version, SMALL, file, view)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert stage.evict(MAX_BUFFERS) == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == names


@pytest.mark.parametrize("bucket", [0, 1])
def test_damage_is_found_by_copy_and_by_mapping(tmp_path: Path, bucket: int) -> None:
    source = StageSource(tmp_path, publish(WeightStage(tmp_path, 1), 1, LARGE))
    damage(tmp_path, bucket * BUCKET_BYTES + BUCKET_BYTES // 2 + 3)
    named = f"bytes {bucket * BUCKET_BYTES}-{(bucket + 1) * BUCKET_BYTES}"
    with pytest.raises(Corrupt, match=named):
        source.copy_into(memoryview(bytearray(LARGE.nbytes)))
    with pytest.raises(Corrupt, match=named), source.mapped():
        pass
    # The pin ended with the failure, though a traceback is still held.
    publish(WeightStage(tmp_path, 2), 2)


def test_what_was_committed_is_what_is_read(tmp_path: Path) -> None:
    record = publish(WeightStage(tmp_path, 1), 1)
    with pytest.raises(Corrupt, match="committed with digest feed, here is"):
        StageSource(tmp_path, msgspec.structs.replace(record, digest="feed"))


def rewrite(path: Path, **change: object) -> None:
    manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(manifest, **change)))


def test_digests_of_buckets_are_those_that_were_committed(tmp_path: Path) -> None:
    """Other bytes with other digests, under the committed digest of the whole."""
    record = publish(WeightStage(tmp_path, 1), 1, LARGE)
    damage(tmp_path, 5)
    other = bucket_digest(memoryview((tmp_path / "w0.buf").read_bytes())[:BUCKET_BYTES])
    buckets = read_manifest(tmp_path, 1).buckets
    rewrite(tmp_path / "v00000001.json", buckets=(other, *buckets[1:]))
    with pytest.raises(Corrupt, match="do not make that of the whole"):
        StageSource(tmp_path, record)


def test_a_damaged_manifest_is_an_error_of_its_reader_and_not_the_end_of_the_writer(tmp_path: Path) -> None:
    stage = WeightStage(tmp_path, 1)
    record = publish(stage, 1)
    (tmp_path / "v00000001.json").write_bytes(b'{"version":1')
    with pytest.raises(Corrupt, match="the manifest of weights of policy version 1"):
        StageSource(tmp_path, record)
    with pytest.raises(Corrupt, match="the manifest of weights of policy version 1"):
        DeltaSource(tmp_path, record, record)
    with stage.writing(SMALL, 1) as (file, view):
        view[:] = b"\x02" * SMALL.nbytes
        manifest = stage.seal(2, SMALL, file, view)
        assert not stage.seal_delta(manifest, view, 1).deltas
    StageSource(tmp_path, VersionRecord(2, 1, 2, manifest.digest))


def test_a_version_staged_again_is_not_the_one_that_was_looked_at(tmp_path: Path) -> None:
    source = StageSource(tmp_path, publish(WeightStage(tmp_path, 1), 1))
    publish(WeightStage(tmp_path, 2), 1)
    with pytest.raises(Gone, match="another incarnation"):
        source.copy_into(memoryview(bytearray(SMALL.nbytes)))


@pytest.mark.parametrize("missing", ["buffer", "bytes"])
def test_a_buffer_that_is_not_there_or_cut_is_named(tmp_path: Path, missing: str) -> None:
    source = StageSource(tmp_path, publish(WeightStage(tmp_path, 1), 1))
    if missing == "buffer":
        (tmp_path / "w0.buf").unlink()
    else:
        (tmp_path / "w0.buf").write_bytes(b"short")
    with pytest.raises(Gone if missing == "buffer" else Corrupt, match=r"w0\.buf"):
        source.copy_into(memoryview(bytearray(SMALL.nbytes)))


def test_a_stage_closes_while_a_view_of_what_was_written_is_left(tmp_path: Path) -> None:
    stage = WeightStage(tmp_path, 1)
    with stage.writing(SMALL, 0) as (_, view):
        kept = np.frombuffer(view, np.uint8)
    stage.close()
    assert len(kept) == SMALL.nbytes
    with stage.writing(SMALL, 0) as (_, view):
        pass
    with pytest.raises(ValueError, match="released"):
        view[0]
