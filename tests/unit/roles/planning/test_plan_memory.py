"""Memory by formula: the paper's results for the paper's shapes, worked examples, and sums that add up."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_rt.roles.models.parallel import ParallelSizes
from relax_rt.roles.models.shape import ModelShape, read_shape
from relax_rt.roles.planning.memory import (
    engine_elements,
    engine_memory,
    gang_memory,
    kv_token_bytes,
    layer_activations,
    micro_batches,
    rank_weights,
    total_bytes,
)
from relax_rt.roles.rollout.engines.settings import EngineSettings
from relax_rt.roles.training.backend.settings import TrainerSettings

EXAMPLES = Path(__file__).resolve().parents[4] / "examples"
DENSE = read_shape(EXAMPLES / "h100x8_qwen3_8b/model")
EXPERTS = read_shape(EXAMPLES / "h100x16_qwen3_30b_a3b/model")


def gpt(hidden: int, heads: int) -> ModelShape:
    """A layer as in Korthikanti et al.: all heads their own, an MLP of four times the hidden width."""
    return ModelShape(
        family="gpt",
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=4 * hidden,
        vocabulary=51_200,
        context=2048,
        sparse=(False,),
    )


# Table 3 of the paper: hidden width h, heads a, tensor parallelism t, micro-batch b; sequences of 2,048.
@pytest.mark.parametrize(("h", "a", "t", "b"), [(6144, 64, 8, 4), (12_288, 96, 8, 1), (20_480, 128, 8, 1)])
def test_activations_of_the_papers_models_are_the_papers(h: int, a: int, t: int, b: int) -> None:
    s = 2048
    sbh, attention = s * b * h, 5 * a * s / h

    def kept(tensor: int = 1, sequence_parallel: bool = False, recompute: str = "none") -> float:
        store = layer_activations(
            gpt(h, a),
            sparse=False,
            tokens=s * b,
            sequence=s,
            tensor=tensor,
            sequence_parallel=sequence_parallel,
            recompute=recompute,
            fused=False,
            gated=False,
            dropout=True,
        )
        return store.kept

    assert kept() == pytest.approx(sbh * (34 + attention))
    assert kept(t) == pytest.approx(sbh * (10 + 24 / t + attention / t))
    assert kept(t, True) == pytest.approx(sbh / t * (34 + attention))
    assert kept(t, False, "selective") == pytest.approx(sbh * (10 + 24 / t))
    assert kept(t, True, "selective") == pytest.approx(sbh * 34 / t)
    assert kept(1, False, "full") == pytest.approx(2 * sbh)


def test_activations_of_the_dense_model_worked_by_hand() -> None:
    tokens, h, q, kv, f = 1000, 4096, 4096, 1024, 12_288
    store = layer_activations(DENSE, sparse=False, tokens=tokens, sequence=tokens)
    by_hand = 2 * tokens * (4 * h + (q + 2 * kv + q) + (q + kv) + 3 * f) + 4 * tokens * 32
    assert store.kept == by_hand


def test_memory_of_the_dense_example_worked_by_hand() -> None:
    table = TrainerSettings(
        backend="megatron", dtype="bfloat16", count=4, tensor_parallel=2, tokens_per_micro_batch=16_384
    )
    sizes = ParallelSizes(world=4, tensor=2)
    found = gang(DENSE, table, sizes, 0)
    # Norms are whole on both: 36 layers x (2 x 4,096 + 2 x 128) + 4,096 last.
    whole = 36 * (2 * 4096 + 256) + 4096
    held = (8_190_735_360 - whole) // 2 + whole
    assert found["weights"] == 2 * held
    assert found["gradients"] == 4 * held
    assert found["optimizer"] == 12 * held // 2
    assert found["logits"] == 16_384 * 151_936 // 2 * 10


def test_bytes_a_parameter_are_those_of_the_distributed_optimizer() -> None:
    """6 + 12/d for bfloat16 parameters and float32 gradients, 18 when nothing is divided."""
    for data, each in ((1, 18), (2, 12), (4, 9)):
        table = TrainerSettings(backend="megatron", dtype="bfloat16", count=data)
        found = gang(DENSE, table, ParallelSizes(world=data), 0)
        assert found["weights"] + found["gradients"] + found["optimizer"] == each * DENSE.parameters
    table = TrainerSettings(backend="megatron", dtype="bfloat16", count=4, distributed_optimizer=False)
    assert gang(DENSE, table, ParallelSizes(world=4), 0)["optimizer"] == 12 * DENSE.parameters


def gang(shape: ModelShape, table: TrainerSettings, sizes: ParallelSizes, rank: int) -> dict[str, int]:
    found = gang_memory(
        shape, table, sizes, rank, longest=4096, tokens_a_step=1 << 20, communicators=0, sends=rank == 0
    )
    assert total_bytes(found) == sum(part.bytes for part in found)
    assert all(part.bytes >= 0 for part in found)
    return {part.name: part.bytes for part in found}


@st.composite
def divisions(draw: st.DrawFn) -> tuple[ModelShape, ParallelSizes]:
    shape = draw(st.sampled_from((DENSE, EXPERTS)))
    tensor, pipeline = draw(st.sampled_from((1, 2, 4))), draw(st.sampled_from((1, 2, 4)))
    world = tensor * pipeline * draw(st.sampled_from((1, 2, 4)))
    inner = world // pipeline
    expert = draw(st.sampled_from([n for n in (1, 2, 4, 8) if inner % n == 0])) if shape.experts else 1
    return shape, ParallelSizes(world=world, tensor=tensor, pipeline=pipeline, expert=expert)


@given(divisions())
def test_the_ranks_hold_the_whole_model(division: tuple[ModelShape, ParallelSizes]) -> None:
    """Experts exactly once an expert replica; dense layers once a replica, and a little more for what is not cut."""
    shape, sizes = division
    held = [rank_weights(shape, sizes, rank) for rank in range(sizes.world)]
    experts = sum(part.elements for part in shape.all_weights() if part.split == "expert")
    assert sum(rank[1] for rank in held) == experts * sizes.expert_data
    dense = shape.parameters - experts
    total = sum(rank[0] for rank in held)
    assert total >= dense * sizes.data * sizes.context
    whole = sum(part.elements for part in shape.all_weights() if part.split == "none")
    assert total == (dense + (sizes.tensor - 1) * whole) * sizes.data


@given(divisions(), st.sampled_from(("none", "selective", "full")), st.sampled_from(("fused", "unfused")))
def test_recomputing_more_never_stores_more(
    division: tuple[ModelShape, ParallelSizes], recompute: str, attention: str
) -> None:
    shape, sizes = division
    settings = {
        "backend": "megatron",
        "count": sizes.world,
        "tensor_parallel": sizes.tensor,
        "pipeline_parallel": sizes.pipeline,
        "expert_parallel": sizes.expert,
        "attention": attention,
    }
    base = gang(shape, TrainerSettings(**settings, recompute="none"), sizes, 0)
    less = gang(shape, TrainerSettings(**settings, recompute=recompute), sizes, 0)
    assert less["activations"] <= base["activations"]
    assert {k: v for k, v in less.items() if k not in ("activations", "fragmentation")} == {
        k: v for k, v in base.items() if k not in ("activations", "fragmentation")
    }


def test_fully_sharded_torch_divides_everything_by_the_ranks() -> None:
    one = gang(DENSE, TrainerSettings(backend="torch"), ParallelSizes(world=1), 0)
    four = gang(DENSE, TrainerSettings(backend="torch", count=4), ParallelSizes(world=4), 0)
    for name in ("weights", "gradients", "optimizer"):
        assert one[name] == pytest.approx(4 * four[name], abs=16)
    assert "gathered layers" in four and "gathered layers" not in one


def test_the_first_stage_holds_activations_of_as_many_micro_batches_as_there_are_stages() -> None:
    table = TrainerSettings(backend="megatron", count=4, pipeline_parallel=4)
    sizes = ParallelSizes(world=4, pipeline=4)
    stored = [gang(DENSE, table, sizes, rank)["activations"] for rank in range(4)]
    assert stored == pytest.approx([stored[3] * n for n in (4, 3, 2, 1)], rel=1e-6)
    assert "logits" not in gang(DENSE, table, sizes, 0) and "logits" in gang(DENSE, table, sizes, 3)


def test_micro_batches_cover_the_step() -> None:
    table = TrainerSettings(backend="megatron", count=2, tokens_per_micro_batch=4096)
    assert micro_batches(table, ParallelSizes(world=2), 100_000, longest=1000) == 13
    assert micro_batches(table, ParallelSizes(world=2), 100_000, longest=10_000) == 5


def test_key_value_heads_fewer_than_gpus_are_held_more_than_once() -> None:
    assert kv_token_bytes(EXPERTS, 1, 2) == 48 * 2 * 4 * 128 * 2
    assert kv_token_bytes(EXPERTS, 4, 2) == kv_token_bytes(EXPERTS, 8, 2) == 48 * 2 * 128 * 2
    kv = 48 * 2 * 2048 * 512
    assert 8 * engine_elements(EXPERTS, 8) > EXPERTS.parameters + kv


def test_an_engine_fills_its_part_of_the_memory_and_no_more() -> None:
    table = EngineSettings(engine="sglang", memory_fraction=0.8)
    found = {p.name: p.bytes for p in engine_memory(DENSE, table, 80 << 30, longest=8192, communicators=2)}
    assert found["weights"] + found["KV cache"] == int(0.8 * (80 << 30))
    assert found["NCCL"] == 2 * (256 << 20)
    embedded = EngineSettings(dtype="bfloat16", max_sequences=16)
    found = {p.name: p.bytes for p in engine_memory(DENSE, embedded, 80 << 30, longest=1024, communicators=0)}
    assert found["weights"] == 4 * DENSE.parameters
    assert found["KV cache"] == 16 * 1024 * DENSE.kv_values_a_token * 2
