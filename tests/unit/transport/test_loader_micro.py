"""Micro-batches as arrays: what a trainer feeds to its model, against the rows that were put."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_rt.transport.memory.arena import Bf16, Reader, Writer
from relax_rt.transport.memory.refs import BlockRef
from relax_rt.transport.queue.api import Batch, SampleInfo, SampleKey
from relax_rt.transport.queue.batch import LeasedBatch
from relax_rt.transport.queue.loader.micro import MicroBatch
from relax_rt.transport.queue.loader.plan import Packing
from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.rpc.identity import Incarnation

LENGTHS = [3, 5, 1, 4]
ROWS: list[dict[str, Any]] = [
    {
        "tokens": np.arange(100 * at, 100 * at + length, dtype=np.int32),
        "hidden": np.full((length, 2), at, np.float32),
        "reward": float(at),
        "state": np.full(3, at, np.int16),
        "bits": Bf16(np.full(length, 0x3F80 + at, np.uint16)),
        "text": "x" * at,
    }
    for at, length in enumerate(LENGTHS)
]


@pytest.fixture
def batch(tmp_path: Path) -> Iterator[LeasedBatch]:
    writer = Writer(tmp_path, Incarnation("rollout/0", 1), slab_bytes=1 << 20, capacity_bytes=1 << 22)
    yield lease(writer, Reader(tmp_path), ROWS)
    writer.close()


def lease(writer: Writer, reader: Reader, rows: Sequence[Mapping[str, Any]]) -> LeasedBatch:
    blocks: list[BlockRef] = []
    parts: dict[int, tuple[int, int]] = {}
    for placed, indices in writer.put_rows(rows):
        parts.update({at: (len(blocks), row) for row, at in enumerate(indices)})
        blocks.append(placed.block)
    infos = [
        SampleInfo(SampleKey(at, 0), at, 0, [parts[at]], [], len(row["tokens"]), 0, [(1, 2)] if at == 1 else [])
        for at, row in enumerate(rows)
    ]
    return LeasedBatch("train", Batch(1, infos, blocks=blocks), reader.block)


def micro(batch: LeasedBatch, indices: Sequence[int]) -> MicroBatch:
    return MicroBatch([batch.samples[at] for at in indices], [LENGTHS[at] for at in indices], batch.samples[0])


def test_packed_rows_stand_back_to_back(batch: LeasedBatch) -> None:
    three = micro(batch, [3, 0, 2])
    values, offsets = three.packed("tokens")
    assert values.dtype == np.int32 and offsets.dtype == np.int64
    np.testing.assert_array_equal(values, [300, 301, 302, 303, 0, 1, 2, 200])
    np.testing.assert_array_equal(offsets, [0, 4, 7, 8])
    hidden = three.packed("hidden")
    assert hidden.values.shape == (8, 2) and hidden.values[4:7].tolist() == [[0, 0]] * 3
    values[0] = -1
    assert batch.samples[3]["tokens"][0] == 300


def test_places_of_tokens(batch: LeasedBatch) -> None:
    three = micro(batch, [3, 1, 2])
    assert (len(three), three.tokens, three.max_length) == (3, 10, 5)
    assert three.cu_seqlens.dtype == np.int32 and three.cu_seqlens.tolist() == [0, 4, 9, 10]
    assert three.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 0]
    assert three.sample_ids.tolist() == [0] * 4 + [1] * 5 + [2]
    assert np.flatnonzero(~three.within_bound).tolist() == [5]


def test_padded_rows(batch: LeasedBatch) -> None:
    two = micro(batch, [0, 3])
    assert two.padded("tokens", fill=-1).tolist() == [[0, 1, 2, -1], [300, 301, 302, 303]]
    assert two.padded("tokens", multiple_of=8).shape == (2, 8)
    assert two.padded("hidden", length=6).shape == (2, 6, 2)
    with pytest.raises(Refused, match="column 'tokens' padded to 3: a row has 4 elements"):
        two.padded("tokens", length=3)


def test_stacked_rows(batch: LeasedBatch) -> None:
    two = micro(batch, [2, 1])
    assert two.stacked("reward").tolist() == [2.0, 1.0]
    assert two.stacked("state").tolist() == [[2] * 3, [1] * 3] and two.stacked("state").dtype == np.int16
    with pytest.raises(Refused, match=r"column 'tokens' stacked: its values are int32\[1\] and int32\[5\]"):
        two.stacked("tokens")
    with pytest.raises(Refused, match="column 'text' stacked: its values are str"):
        two.stacked("text")
    with pytest.raises(Refused, match="column 'reward' packed: its values are float"):
        two.packed("reward")


def test_an_empty_micro_batch_has_arrays_of_no_rows(batch: LeasedBatch) -> None:
    none = micro(batch, [])
    assert none.packed("hidden").values.shape == (0, 2) and none.packed("hidden").values.dtype == np.float32
    assert none.packed("tokens").offsets.tolist() == [0] and none.cu_seqlens.tolist() == [0]
    assert none.padded("tokens").shape == (0, 0) and none.stacked("state").shape == (0, 3)
    assert len(none.position_ids) == len(none.within_bound) == none.max_length == 0
    assert none.stacked("reward").shape == (0,) and none.values("text") == []


def test_tensors_keep_dtypes_that_numpy_lacks(batch: LeasedBatch) -> None:
    torch = pytest.importorskip("torch")
    values = micro(batch, [1, 2]).tensor("bits")
    assert values.dtype == torch.bfloat16 and values.shape == (6,)
    assert values.view(torch.int16).tolist() == [0x3F81] * 5 + [0x3F82]
    assert micro(batch, []).tensor("bits").shape == (0,)
    values.zero_()


def test_values_of_different_kinds_are_an_error_that_names_them(tmp_path: Path) -> None:
    writer = Writer(tmp_path, Incarnation("rollout/0", 1), slab_bytes=1 << 20, capacity_bytes=1 << 22)
    rows = [{"tokens": np.zeros(2, np.int32)}, {"tokens": np.zeros(2, np.int64)}]
    batch = lease(writer, Reader(tmp_path), rows)
    with pytest.raises(Refused, match=r"column 'tokens' packed: its values are int32\[2\] and int64\[2\]"):
        MicroBatch(batch.samples, [2, 2], batch.samples[0]).packed("tokens")
    writer.close()


def test_a_plan_balances_by_the_cost_that_is_given() -> None:
    lengths, groups = [10, 5, 5, 5, 5], [0, 0, 1, 1, 1]
    assert [sum(map(len, own)) for own in Packing().plan(lengths, groups, 2)] == [2, 3]
    by_attention = Packing(cost=lambda length: length * length, size=3)
    assert by_attention.plan(lengths, groups, 2) == [[[0], []], [[1, 2, 3], [4]]]
    kept = Packing(keep_groups=True, equal_counts=True, max_tokens=15)
    assert kept.plan(lengths, groups, 2) == [[[0, 1]], [[2, 3, 4]]]


@pytest.mark.parametrize(
    ("packing", "message"),
    [
        (Packing(max_tokens=4, size=4), "both max_tokens and size are set"),
        (Packing(max_tokens=-1), "max_tokens -1, size 0 or multiple_of 1 cannot be"),
        (Packing(multiple_of=0), "multiple_of 0 cannot be"),
    ],
)
def test_a_packing_that_cannot_be_is_refused(packing: Packing, message: str) -> None:
    with pytest.raises(Refused, match=message):
        packing.check()
