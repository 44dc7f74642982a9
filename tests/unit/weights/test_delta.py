"""Deltas: what was changed comes back bit for bit, from the right base only."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_rt.transport.errors import Corrupt, Gone, Refused
from relax_rt.transport.versions import VersionRecord
from relax_rt.transport.weights import delta as codec
from relax_rt.transport.weights.delta import apply, element_bytes, encode
from relax_rt.transport.weights.manifest import (
    BUCKET_BYTES,
    Layout,
    Manifest,
    bucket_digest,
    bucket_slices,
    layout_of,
    total_digest,
)
from relax_rt.transport.weights.source import DeltaSource, StageSource, stage_source
from relax_rt.transport.weights.stage import WeightStage, read_manifest

SIZES = {"float8_e4m3fn": 1, "bfloat16": 2, "float32": 4, "float64": 8}


def layout(dtype: str, elements: int) -> Layout:
    return layout_of([("w", dtype, (elements,), elements * SIZES[dtype])])


def manifest(of: Layout, data: bytes | bytearray) -> Manifest:
    buckets = tuple(bucket_digest(memoryview(data)[part]) for part in bucket_slices(of.nbytes))
    return Manifest(2, 1, "w0.buf", of, buckets, total_digest(buckets), "delta", 1)


def weights(of: Layout, seed: int) -> bytearray:
    return bytearray(np.random.default_rng(seed).integers(0, 256, of.nbytes, np.uint8).tobytes())


def change(data: bytearray, places: list[int], size: int) -> bytearray:
    changed = bytearray(data)
    for place in places:
        changed[place * size] ^= 0x5A
    return changed


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(sorted(SIZES)),
    elements=st.integers(1, 300_000),
    places=st.lists(st.integers(0, 299_999), max_size=40),
    seed=st.integers(0, 5),
)
def test_what_was_changed_comes_back(dtype: str, elements: int, places: list[int], seed: int) -> None:
    of = layout(dtype, elements)
    base = weights(of, seed)
    new = change(base, [p for p in places if p < elements], SIZES[dtype])
    blocks = b"".join(encode(memoryview(base), memoryview(new), of))
    into = bytearray(base)
    apply(memoryview(blocks), memoryview(into), manifest(of, new))
    assert into == new
    assert len(blocks) <= of.nbytes + 8 * len(bucket_slices(of.nbytes)), "never larger than the whole"


def test_one_in_a_hundred_changed_elements_moves_far_less_than_a_tenth() -> None:
    of = layout("bfloat16", 1_000_000)
    base = weights(of, 0)
    places = np.random.default_rng(1).choice(1_000_000, 10_000, replace=False)
    blocks = b"".join(encode(memoryview(base), memoryview(change(base, list(places), 2)), of))
    assert 10 * len(blocks) < of.nbytes


def test_the_smallest_dtype_is_compared() -> None:
    mixed = layout_of([("a", "float32", (3,), 12), ("b", "bfloat16", (5, 2), 20), ("empty", "float64", (0,), 0)])
    assert element_bytes(mixed) == 2
    assert element_bytes(layout_of([])) == 1


@pytest.mark.parametrize("cut", [0, 3, 8, 20, -1])
def test_a_torn_delta_is_refused(cut: int) -> None:
    of = layout("bfloat16", 5000)
    base = weights(of, 0)
    new = change(base, list(range(0, 5000, 50)), 2)
    blocks = b"".join(encode(memoryview(base), memoryview(new), of))
    with pytest.raises(Corrupt, match="delta from policy version 1 to 2"):
        apply(memoryview(blocks[:cut]), memoryview(bytearray(base)), manifest(of, new))
    with pytest.raises(Corrupt, match="2 bytes too many"):
        apply(memoryview(blocks + b"ab"), memoryview(bytearray(base)), manifest(of, new))


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=200))
def test_hostile_blocks_are_refused_or_give_exactly_the_version(data: bytes) -> None:
    of = layout("bfloat16", 64)
    new = weights(of, 3)
    into = bytearray(of.nbytes)
    try:
        apply(memoryview(data), memoryview(into), manifest(of, new))
    except Corrupt:
        return
    assert into == new


def test_another_base_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    of = layout("bfloat16", 5000)
    base = weights(of, 0)
    new = change(base, [7], 2)
    blocks = b"".join(encode(memoryview(base), memoryview(new), of))
    with pytest.raises(Corrupt, match="not of what was version 1 here"):
        apply(memoryview(blocks), memoryview(weights(of, 9)), manifest(of, new))
    # The safeguard is the digest of the result: without it the wrong weights would pass.
    monkeypatch.setattr(codec, "bucket_digest", lambda _: manifest(of, new).buckets[0])
    apply(memoryview(blocks), memoryview(weights(of, 9)), manifest(of, new))


class Published:
    """Two versions on a stage, the second with a delta."""

    def __init__(self, folder: Path, elements: int, changed: int) -> None:
        self.folder = folder
        self.layout = layout("bfloat16", elements)
        self.old = weights(self.layout, 0)
        self.new = change(self.old, list(range(0, elements, max(1, elements // max(1, changed)))), 2)
        self.stage = WeightStage(folder, 1)
        self.first = self.put(1, self.old, keep=0)
        self.second = self.put(2, self.new, keep=1)

    def put(self, version: int, data: bytearray, keep: int) -> VersionRecord:
        with self.stage.writing(self.layout, keep) as (file, view):
            view[:] = data
            sealed = self.stage.seal(version, self.layout, file, view)
            self.delta = self.stage.seal_delta(sealed, view, keep) if keep else None
        return VersionRecord(version, keep, version, sealed.digest)


def test_a_delta_on_the_stage_turns_the_base_into_the_version(tmp_path: Path) -> None:
    two = Published(tmp_path, BUCKET_BYTES, 1000)  # two buckets
    source = stage_source(tmp_path, two.second, two.first)
    assert isinstance(source, DeltaSource)
    assert source.nbytes * 10 < two.layout.nbytes
    into = bytearray(two.old)
    source.copy_into(memoryview(into))
    assert into == two.new
    with pytest.raises(Refused, match="not the whole version"):
        source.mapped()


@pytest.mark.parametrize(
    "holds", [VersionRecord(3, 0, 0, "a"), VersionRecord(1, 0, 0, "other"), VersionRecord(0, 0, 0)]
)
def test_who_holds_another_base_gets_the_version_in_full(tmp_path: Path, holds: VersionRecord) -> None:
    two = Published(tmp_path, 5000, 10)
    assert isinstance(stage_source(tmp_path, two.second, holds), StageSource)
    with pytest.raises(Refused, match="its base is version 1"):
        DeltaSource(tmp_path, two.second, holds)


def test_no_delta_where_it_would_not_be_smaller_or_the_base_is_gone(tmp_path: Path) -> None:
    two = Published(tmp_path, 5000, 5000)
    assert two.delta is None
    assert list(tmp_path.glob("d*")) == []
    with two.stage.writing(two.layout, 2) as (file, view):
        sealed = two.stage.seal(3, two.layout, file, view)
        assert two.stage.seal_delta(sealed, view, 1) is None, "version 1 lay in the buffer that was written"
        smaller = msgspec.structs.replace(sealed, layout=layout("bfloat16", 4000))
        assert two.stage.seal_delta(smaller, view, 2) is None


def test_a_retired_delta_is_gone_and_its_file_with_it(tmp_path: Path) -> None:
    two = Published(tmp_path, 5000, 10)
    source = DeltaSource(tmp_path, two.second, two.first)
    two.stage.retire(3)
    assert list(tmp_path.glob("d*")) == []
    with pytest.raises(Gone):
        source.copy_into(memoryview(bytearray(two.old)))
    with pytest.raises(Gone, match="delta to policy version 2"):
        read_manifest(tmp_path, 2, delta=True)
