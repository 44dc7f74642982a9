"""Shards of a Megatron-Core gang become the Hugging Face model again, bit by bit, whatever the division."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import assume, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from megatron_sharder import Gang, State, make_state, shard  # noqa: E402

from relax_rt.roles.models.parallel import Sizes  # noqa: E402
from relax_rt.roles.models.shape import shape_of  # noqa: E402
from relax_rt.roles.training.megatron.layout import ModelDivision, Naming, hf_tensors, naming_of  # noqa: E402
from relax_rt.roles.training.megatron.resharding import (  # noqa: E402  # noqa: E402
    ReshardPlan,
    check_shards,
    extract_part,
    place_part,
    plan_buckets,
    publish_weights,
)
from relax_rt.transport.rpc.errors import Refused  # noqa: E402


def config_of(kind: str, **more: Any) -> dict[str, Any]:
    config = {
        "model_type": kind,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "vocab_size": 19,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    if kind == "qwen3_moe":
        config |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 4}
    return config | more


def division_of(gang: Gang, config: dict[str, Any]) -> ModelDivision:
    sizes = Sizes(
        world=gang.world, tensor=gang.tp, pipeline=gang.pp, context=gang.cp, expert=gang.ep, expert_tensor=gang.etp
    )
    multiple = gang.pad_to * gang.tp
    padded = -(-config["vocab_size"] // multiple) * multiple
    naming = Naming(fused_norms=gang.fused_norms, grouped_experts=gang.grouped)
    return ModelDivision(sizes=sizes, naming=naming, virtual=gang.vpp, padded_vocabulary=padded)


def gather(plan: ReshardPlan, ranks: list[list[State]]) -> bytearray:
    for rank, shards in enumerate(ranks):
        check_shards(plan, rank, shards)
    into = bytearray(plan.layout.nbytes)
    for bucket in plan.buckets:
        for rank in bucket.ranks:
            place_part(plan, bucket, rank, extract_part(plan, bucket, rank, ranks[rank]), memoryview(into))
    return into


def tensors_of(plan: ReshardPlan, flat: bytearray) -> State:
    raw = torch.frombuffer(flat, dtype=torch.uint8)
    dtype = getattr(torch, plan.dtype)
    return {e.name: raw[e.offset : e.offset + e.nbytes].view(dtype).view(e.shape) for e in plan.layout.entries}


GANGS = st.builds(
    Gang,
    tp=st.sampled_from([1, 2, 4, 8]),
    cp=st.sampled_from([1, 2]),
    dp=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2, 4]),
    ep=st.sampled_from([1, 2, 4]),
    etp=st.sampled_from([1, 2]),
    vpp=st.sampled_from([1, 2]),
    pad_to=st.sampled_from([1, 4, 16]),
    fused_norms=st.booleans(),
    grouped=st.booleans(),
)


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(["llama", "qwen2", "qwen3", "qwen3_moe"]),
    tied=st.booleans(),
    gang=GANGS,
    bucket_bytes=st.sampled_from([128, 1000, 1 << 20]),
)
def test_what_was_cut_for_a_gang_is_the_model_again(kind: str, tied: bool, gang: Gang, bucket_bytes: int) -> None:
    assume(4 % (gang.pp * gang.vpp) == 0 and (gang.world // gang.pp) % (gang.ep * gang.etp) == 0)
    config = config_of(kind, tie_word_embeddings=tied)
    state = make_state(config)
    ranks = shard(state, config, gang)
    names = [name for chunk in ranks[0] for name in chunk]
    found = naming_of(names)
    assert found.fused_norms == gang.fused_norms
    assert kind != "qwen3_moe" or found.grouped_experts == gang.grouped
    plan = plan_buckets(shape_of(config), division_of(gang, config), dtype="float32", bucket_bytes=bucket_bytes)
    assert all(0 < bucket.stop - bucket.start <= bucket_bytes for bucket in plan.buckets)
    again = tensors_of(plan, gather(plan, ranks))
    assert sorted(again) == sorted(state)
    for name, value in state.items():
        assert torch.equal(again[name], value), name


def test_replicas_share_the_work() -> None:
    config = config_of("qwen3")
    gang = Gang(tp=2, dp=4)
    plan = plan_buckets(shape_of(config), division_of(gang, config), dtype="float32", bucket_bytes=256)
    sent = {rank: sum(p.rows * p.columns for b in plan.buckets for p in b.of(rank)) for rank in range(gang.world)}
    assert min(sent.values()) > 0.5 * max(sent.values())


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("tied", [False, True])
def test_names_and_order_are_those_of_transformers(kind: str, tied: bool) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = config_of(kind, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    wanted = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    assert [tuple(t) for t in hf_tensors(shape_of(config), stacked_experts=True)] == wanted


def test_experts_stacked_as_in_memory_have_the_same_rows() -> None:
    config = config_of("qwen3_moe")
    gang = Gang(tp=2, dp=2, ep=2, etp=2)
    state = make_state(config)
    plan = plan_buckets(
        shape_of(config), division_of(gang, config), dtype="float32", bucket_bytes=512, stacked_experts=True
    )
    again = tensors_of(plan, gather(plan, shard(state, config, gang)))
    stacked = again["model.layers.2.mlp.experts.gate_up_proj"]
    for e in range(4):
        gate, up = (state[f"model.layers.2.mlp.experts.{e}.{n}_proj.weight"] for n in ("gate", "up"))
        assert torch.equal(stacked[e], torch.cat([gate, up]))
        down = state[f"model.layers.2.mlp.experts.{e}.down_proj.weight"]
        assert torch.equal(again["model.layers.2.mlp.experts.down_proj"][e], down)


def test_layers_of_uneven_stages() -> None:
    division = ModelDivision(sizes=Sizes(world=3, pipeline=3), first_layers=1, last_layers=2)
    assert [list(division.layers(7, stage, 0)) for stage in range(3)] == [[0], [1, 2, 3, 4], [5, 6]]
    with pytest.raises(Refused, match="7 layers over 2 stages"):
        ModelDivision(sizes=Sizes(world=2, pipeline=2)).check(shape_of(config_of("qwen3", num_hidden_layers=7)))


def test_weights_are_published_in_another_dtype() -> None:
    config = config_of("qwen3")
    state = make_state(config)
    gang = Gang(tp=2, pp=2)
    plan = plan_buckets(shape_of(config), division_of(gang, config), dtype="bfloat16", bucket_bytes=300)
    again = tensors_of(plan, gather(plan, shard(state, config, gang)))
    assert all(torch.equal(again[name], value.bfloat16()) for name, value in state.items())


class Post:
    """A `Channel` of ranks that come one after the other, rank 0 last."""

    def __init__(self) -> None:
        self.rank, self.letters, self.kept = 0, dict[int, list[Any]](), 0

    def memory(self, nbytes: int) -> torch.Tensor:
        self.kept = nbytes
        return torch.empty(nbytes, dtype=torch.uint8)

    @contextmanager
    def copying(self, copied: Callable[[], None]) -> Iterator[None]:
        yield
        copied()

    def send(self, part: torch.Tensor, what: str) -> None:
        self.letters.setdefault(self.rank, []).append((what, part))

    def receive(self, into: torch.Tensor, rank: int, what: str) -> None:
        sent, part = self.letters[rank].pop(0)
        assert sent == what
        into.copy_(part)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("gang", [Gang(tp=2, pp=2), Gang(dp=4), Gang(tp=2, dp=2, ep=2, etp=2)], ids=str)
def test_what_is_published_was_copied_before_the_weights_changed(gang: Gang, dtype: str) -> None:
    config = config_of("qwen3_moe")
    ranks = shard(make_state(config), config, gang)
    plan = plan_buckets(shape_of(config), division_of(gang, config), dtype=dtype, bucket_bytes=300)
    wanted, into, post = gather(plan, ranks), bytearray(plan.layout.nbytes), Post()
    held = 0

    def next_step() -> None:
        for chunk in ranks[post.rank]:
            for value in chunk.values():
                value.fill_(float("nan"))

    for post.rank in reversed(range(gang.world)):
        shards = [{name: value.clone() for name, value in chunk.items()} for chunk in ranks[post.rank]]
        ranks[post.rank] = shards
        publish_weights(plan, post, shards, memoryview(into) if post.rank == 0 else None, next_step)  # type: ignore[arg-type]
        own = sum(value.numel() for chunk in shards for value in chunk.values()) * getattr(torch, dtype).itemsize
        assert post.kept <= own
        held += post.kept if post.rank else 0
    assert into == wanted and held < plan.layout.nbytes


def one_layer() -> tuple[ReshardPlan, list[list[State]]]:
    config = config_of("qwen3")
    gang = Gang(tp=2)
    plan = plan_buckets(shape_of(config), division_of(gang, config), dtype="float32", bucket_bytes=1 << 20)
    return plan, shard(make_state(config), config, gang)


QKV = "decoder.layers.1.self_attention.linear_qkv.weight"


def test_a_missing_shard_is_named_with_what_it_is_for() -> None:
    plan, ranks = one_layer()
    ranks[1][0]["decoder.layers.1.self_attention.linear_qkv2.weight"] = ranks[1][0].pop(QKV)
    expected = (
        rf"parameter {QKV} of rank 1, for model.layers.1.self_attn.\w_proj.weight: it is missing; there is decoder"
    )
    with pytest.raises(Refused, match=expected):
        check_shards(plan, 1, ranks[1])
    with pytest.raises(Refused, match=expected):
        extract_part(plan, plan.buckets[0], 1, ranks[1])


def test_a_misshapen_shard_is_named() -> None:
    plan, ranks = one_layer()
    ranks[0][0][QKV] = ranks[0][0][QKV][:-1]
    with pytest.raises(Refused, match=rf"{QKV} of rank 0, for .*its shape is \[23, 8\], the plan wants \[24, 8\]"):
        check_shards(plan, 0, ranks[0])
    with pytest.raises(Refused, match=rf"{QKV} of rank 0"):
        extract_part(plan, plan.buckets[0], 0, ranks[0])


def test_a_parameter_without_a_place_is_named() -> None:
    plan, ranks = one_layer()
    ranks[0][0]["decoder.layers.0.mlp.linear_fc1._extra_state"] = torch.zeros(1)
    check_shards(plan, 0, ranks[0])
    ranks[0][0]["decoder.layers.0.mlp.shared_experts.linear_fc1.weight"] = torch.zeros(1)
    with pytest.raises(Refused, match=r"shared_experts.linear_fc1.weight of rank 0: it has no place"):
        check_shards(plan, 0, ranks[0])


def test_a_part_that_is_not_whole_is_named() -> None:
    plan, ranks = one_layer()
    (bucket,) = plan.buckets
    part = extract_part(plan, bucket, 1, ranks[1])
    with pytest.raises(Refused, match=r"rows of model.embed_tokens.weight, .*rank 1 gave \d+ of \d+ bytes"):
        place_part(plan, bucket, 1, part[:-4], memoryview(bytearray(plan.layout.nbytes)))
    with pytest.raises(Refused, match="a buffer of 3 bytes"):
        place_part(plan, bucket, 1, part, memoryview(bytearray(3)))


@pytest.mark.parametrize(
    ("sizes", "config", "why"),
    [
        (Sizes(world=3, tensor=3), {}, "32 columns of the output projection over tensor = 3"),
        (Sizes(world=4, expert=4), {"kind": "qwen3_moe", "num_experts": 6}, "6 experts over expert = 4"),
        (Sizes(world=2, pipeline=2), {"num_hidden_layers": 3}, "3 layers over 2 stages"),
        (Sizes(world=2, tensor=2), {}, "19 rows of the padded vocabulary over tensor = 2"),
    ],
)
def test_what_does_not_divide_is_refused(sizes: Sizes, config: dict[str, Any], why: str) -> None:
    shape = shape_of(config_of(config.pop("kind", "qwen3"), **config))
    with pytest.raises(Refused, match=why):
        plan_buckets(shape, ModelDivision(sizes=sizes), dtype="float32")


def test_a_row_larger_than_a_bucket_is_refused() -> None:
    with pytest.raises(Refused, match=r"a row of model.embed_tokens.weight has 32"):
        plan_buckets(
            shape_of(config_of("qwen3")), ModelDivision(sizes=Sizes(world=1)), dtype="float32", bucket_bytes=16
        )


def test_stacked_experts_of_old_megatron_are_refused() -> None:
    with pytest.raises(Refused, match="experts stacked into one tensor"):
        naming_of(["decoder.layers.0.mlp.experts.weight1"])
