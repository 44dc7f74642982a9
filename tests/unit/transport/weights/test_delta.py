"""Deltas: what was changed comes back bit for bit, from the right base only."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import Corrupt, DeadlineExceeded, Gone, Refused, StaleEpoch
from relax_rt.transport.weights import delta as codec
from relax_rt.transport.weights.delta import apply, element_bytes, encode
from relax_rt.transport.weights.manifest import (
    BUCKET_BYTES,
    MAX_DELTAS,
    Delta,
    Layout,
    Manifest,
    bucket_digest,
    bucket_slices,
    check_manifest,
    layout_of,
    total_digest,
)
from relax_rt.transport.weights.source import DeltaSource, StageSource, stage_source
from relax_rt.transport.weights.stage import WeightStage, delta_file, read_manifest

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
    apply([memoryview(blocks)], memoryview(into), manifest(of, new))
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
        apply([memoryview(blocks[:cut])], memoryview(bytearray(base)), manifest(of, new))
    with pytest.raises(Corrupt, match="2 bytes too many"):
        apply([memoryview(blocks + b"ab")], memoryview(bytearray(base)), manifest(of, new))


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=200))
def test_hostile_blocks_are_refused_or_give_exactly_the_version(data: bytes) -> None:
    of = layout("bfloat16", 64)
    new = weights(of, 3)
    into = bytearray(of.nbytes)
    try:
        apply([memoryview(data)], memoryview(into), manifest(of, new))
    except Corrupt:
        return
    assert into == new


def test_another_base_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    of = layout("bfloat16", 5000)
    base = weights(of, 0)
    new = change(base, [7], 2)
    blocks = b"".join(encode(memoryview(base), memoryview(new), of))
    with pytest.raises(Corrupt, match="not of what was version 1 here"):
        apply([memoryview(blocks)], memoryview(weights(of, 9)), manifest(of, new))
    # The safeguard is the digest of the result: without it the wrong weights would pass.
    monkeypatch.setattr(codec, "bucket_digest", lambda _: manifest(of, new).buckets[0])
    apply([memoryview(blocks)], memoryview(weights(of, 9)), manifest(of, new))


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
            self.sealed = self.stage.seal(version, self.layout, file, view)
            if keep:
                self.sealed = self.stage.seal_delta(self.sealed, view, keep)
        return VersionRecord(version, keep, version, self.sealed.digest)


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
    with pytest.raises(Refused, match="there are some of version 1 with digest"):
        DeltaSource(tmp_path, two.second, holds)


def test_no_delta_where_it_would_not_be_smaller_or_the_base_is_gone(tmp_path: Path) -> None:
    two = Published(tmp_path, 5000, 5000)
    assert not two.sealed.deltas and "more than 0.5 of the version has changed" in two.sealed.no_delta
    assert read_manifest(tmp_path, 2) == two.sealed
    assert list(tmp_path.glob("d*")) == []
    with two.stage.writing(two.layout, 2) as (file, view):
        sealed = two.stage.seal(3, two.layout, file, view)
        gone = two.stage.seal_delta(sealed, view, 1)
        assert not gone.deltas and "policy version 1: not on the stage" in gone.no_delta, "it lay in this buffer"
        smaller = two.stage.seal_delta(msgspec.structs.replace(sealed, layout=layout("bfloat16", 4000)), view, 2)
        assert not smaller.deltas and "version 2 has other tensors" in smaller.no_delta


def test_an_older_incarnation_neither_names_deltas_nor_removes_any(tmp_path: Path) -> None:
    made = Published(tmp_path, 5000, 10)
    data = change(made.new, [7], 2)
    with made.stage.writing(made.layout, 2) as (file, view):
        view[:] = data
        sealed = made.stage.seal(3, made.layout, file, view)
        newer = WeightStage(tmp_path, 2)
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        with pytest.raises(StaleEpoch, match="epoch 2 writes here, this is 1"):
            made.stage.seal_delta(sealed, view, 1)
        with pytest.raises(StaleEpoch):
            made.stage.retire(3)
        assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    newer.close()


def test_one_that_is_overtaken_while_it_makes_a_delta_does_not_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Published(tmp_path, 5000, 10)
    write = made.stage._write_delta

    def overtaken(*args: Any) -> int:
        WeightStage(tmp_path, 2).close()
        return write(*args)

    monkeypatch.setattr(made.stage, "_write_delta", overtaken)
    with pytest.raises(StaleEpoch):
        made.put(3, change(made.new, [7], 2), keep=2)
    assert not read_manifest(tmp_path, 3).deltas


def test_a_retired_delta_is_gone_and_its_file_with_it(tmp_path: Path) -> None:
    two = Published(tmp_path, 5000, 10)
    source = DeltaSource(tmp_path, two.second, two.first)
    two.stage.retire(3)
    assert list(tmp_path.glob("d*")) == []
    with pytest.raises(Gone):
        source.copy_into(memoryview(bytearray(two.old)))
    with pytest.raises(Gone, match="policy version 2"):
        DeltaSource(tmp_path, two.second, two.first)


def test_who_is_some_versions_behind_applies_all_deltas_between(tmp_path: Path) -> None:
    made = Published(tmp_path, 5000, 10)
    records, data = [made.first, made.second], made.new
    for version in range(3, 3 + MAX_DELTAS):
        data = change(data, [version, 4000 - version], 2)
        records.append(made.put(version, data, keep=version - 1))
        made.stage.retire(version)
    newest = records[-1]
    for holds, start in zip(records[1:-1], range(2, newest.version), strict=True):
        source = stage_source(tmp_path, newest, holds)
        assert isinstance(source, DeltaSource) and source.manifest.base == start
        into = bytearray(made.new)
        for version in range(3, start + 1):
            into = change(into, [version, 4000 - version], 2)
        source.copy_into(memoryview(into))
        assert into == data
        assert source.nbytes == sum(delta.nbytes for delta in made.sealed.deltas[start - 2 :])
    # No more of them are kept than that.
    assert len(made.sealed.deltas) == MAX_DELTAS == len(list(tmp_path.glob("d*")))
    assert isinstance(stage_source(tmp_path, newest, made.first), StageSource)


def test_deltas_together_are_no_larger_than_one_may_be(tmp_path: Path) -> None:
    made, data = Published(tmp_path, 30_000, 3000), bytearray()
    for version in range(3, 9):
        data = change(made.new, list(range(version, 30_000, 10)), 2)
        made.new = data
        made.put(version, data, keep=version - 1)
        made.stage.retire(version)
        sizes = [delta.nbytes for delta in made.sealed.deltas]
        assert sum(sizes) <= made.layout.nbytes / 2 and len(sizes) <= version - 1
        assert sum(path.stat().st_size for path in tmp_path.glob("d*")) == sum(sizes)
    assert 2 <= len(sizes) < 6


def test_what_is_not_applied_in_time_is_given_up() -> None:
    of = layout("bfloat16", 64)
    data = weights(of, 3)
    blocks = b"".join(encode(memoryview(data), memoryview(data), of))
    apply([memoryview(blocks)], memoryview(data), manifest(of, data), until=time.monotonic() + 60)
    with pytest.raises(DeadlineExceeded, match="delta from policy version 1 to 2 was not applied in time"):
        apply([memoryview(blocks)], memoryview(data), manifest(of, data), until=time.monotonic() - 1)


@pytest.mark.parametrize(
    ("deltas", "why"),
    [
        ((Delta(2, "", 1, "", 1 << 40),), "its deltas have 1099511627776 bytes"),
        ((Delta(2, "", 1, "", 0),), r"it has 1 deltas, of \[0\] bytes"),
        ((Delta(2, "", 1, "", 1),) * (MAX_DELTAS + 1), "it has 17 deltas"),
        ((Delta(2, "other", 1, "", 9),), r"its deltas make the versions \[2\]"),
        ((Delta(1, "", 0, "", 9), Delta(2, "", 1, "other", 9)), r"versions \[1, 2\] one of another"),
    ],
)
def test_deltas_that_cannot_be_true_are_refused(deltas: tuple[Delta, ...], why: str) -> None:
    of = layout("bfloat16", 64)
    whole = msgspec.structs.replace(manifest(of, weights(of, 3)), payload="full", base=0)
    digests = [
        d if (d.version, d.digest) != (2, "") else msgspec.structs.replace(d, digest=whole.digest) for d in deltas
    ]
    with pytest.raises(Corrupt, match=why):
        check_manifest(msgspec.structs.replace(whole, deltas=tuple(digests)), VersionRecord(2, 1, 2, whole.digest), "v")
    link = Delta(2, whole.digest, 1, "ab", 9)
    check_manifest(msgspec.structs.replace(whole, deltas=(link,)), VersionRecord(2, 1, 2, whole.digest), "v")


def test_a_delta_is_found_by_the_version_and_its_digest(tmp_path: Path) -> None:
    """Not that of an incarnation that died before its commit and had made other weights under the same number."""
    two = Published(tmp_path, 5000, 10)
    path = tmp_path / delta_file(2, two.second.digest)
    path.rename(tmp_path / delta_file(2, "feed"))
    with pytest.raises(Gone, match="delta to policy version 2"):
        DeltaSource(tmp_path, two.second, two.first).copy_into(memoryview(bytearray(two.old)))
