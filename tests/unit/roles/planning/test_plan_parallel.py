"""Groups of ranks: those of Megatron-Core, and each rank in exactly one of each kind."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_rt.roles.models.parallel import ParallelSizes, coordinates, groups, rank_groups, stage_layers
from relax_rt.roles.planning.communicators import ranges, senders

WORLD_16 = ParallelSizes(world=16, tensor=2, context=2, pipeline=2, expert=4)
# What RankGenerator of megatron-core 0.16.1 gives for order "tp-cp-ep-dp-pp": dense layers with tp 2, cp 2, dp 2, pp 2,
# experts with etp 1, ep 4, dp 2, pp 2 and with etp 2, ep 2, dp 2, pp 2.
DENSE = {
    ("tensor",): [(n, n + 1) for n in range(0, 16, 2)],
    ("context",): [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)],
    ("data",): [(0, 4), (1, 5), (2, 6), (3, 7), (8, 12), (9, 13), (10, 14), (11, 15)],
    ("pipeline",): [(n, n + 8) for n in range(8)],
    ("data", "context"): [(0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15)],
}
EXPERTS = {
    ("expert",): [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)],
    ("data",): [(0, 4), (1, 5), (2, 6), (3, 7), (8, 12), (9, 13), (10, 14), (11, 15)],
    ("pipeline",): [(n, n + 8) for n in range(8)],
}
CUT_EXPERTS = {
    ("tensor",): [(n, n + 1) for n in range(0, 16, 2)],
    ("expert",): [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)],
    ("data",): [(0, 4), (1, 5), (2, 6), (3, 7), (8, 12), (9, 13), (10, 14), (11, 15)],
    ("tensor", "expert"): [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)],
}


def test_groups_are_those_of_megatron_core() -> None:
    assert {kinds: rank_groups(WORLD_16.dense, *kinds) for kinds in DENSE} == DENSE
    assert {kinds: rank_groups(WORLD_16.experts, *kinds) for kinds in EXPERTS} == EXPERTS
    cut = ParallelSizes(world=16, tensor=2, context=2, pipeline=2, expert=2, expert_tensor=2).experts
    assert {kinds: rank_groups(cut, *kinds) for kinds in CUT_EXPERTS} == CUT_EXPERTS


@pytest.mark.engines
@pytest.mark.filterwarnings("ignore")
def test_groups_against_megatron_core_itself_where_it_is_installed() -> None:
    parallel_state = pytest.importorskip("megatron.core.parallel_state")
    order = "tp-cp-ep-dp-pp"
    dense = parallel_state.RankGenerator(tp=4, ep=1, dp=3, pp=2, cp=2, order=order)
    experts = parallel_state.RankGenerator(tp=2, ep=4, dp=3, pp=2, cp=1, order=order)
    sizes = ParallelSizes(world=48, tensor=4, context=2, pipeline=2, expert=4, expert_tensor=2)
    for token, kinds in (("tp", "tensor"), ("cp", "context"), ("dp", "data"), ("pp", "pipeline")):
        assert [tuple(ranks) for ranks in dense.get_ranks(token)] == rank_groups(sizes.dense, kinds)
    for token, kinds in (("tp", "tensor"), ("ep", "expert"), ("dp", "data"), ("pp", "pipeline")):
        assert [tuple(ranks) for ranks in experts.get_ranks(token)] == rank_groups(sizes.experts, kinds)


@st.composite
def divided(draw: st.DrawFn) -> ParallelSizes:
    """Gangs whose dense layers and experts both divide the world."""
    tensor, context, pipeline = (draw(st.sampled_from((1, 2, 3, 4))) for _ in range(3))
    world = tensor * context * pipeline * draw(st.integers(1, 4))
    inner = world // pipeline
    expert = draw(st.sampled_from([n for n in range(1, inner + 1) if inner % n == 0]))
    expert_tensor = draw(st.sampled_from([n for n in range(1, inner // expert + 1) if inner // expert % n == 0]))
    return ParallelSizes(
        world=world, tensor=tensor, context=context, pipeline=pipeline, expert=expert, expert_tensor=expert_tensor
    )


@given(divided(), st.booleans(), st.booleans())
def test_every_rank_is_in_exactly_one_group_of_each_kind(sizes: ParallelSizes, tied: bool, experts: bool) -> None:
    found = groups(sizes, tied=tied, experts=experts)
    for kind in {group.kind for group in found}:
        ranks = sorted(rank for group in found if group.kind == kind for rank in group.ranks)
        if kind == "embedding":
            ends = (0, sizes.pipeline - 1)
            assert ranks == [rank for rank in range(sizes.world) if sizes.stage(rank) in ends]
        else:
            assert ranks == list(range(sizes.world))
    assert all(len(group.ranks) > 1 for group in found)


@given(divided())
def test_both_divisions_agree_on_the_stages(sizes: ParallelSizes) -> None:
    assert rank_groups(sizes.dense, "pipeline") == rank_groups(sizes.experts, "pipeline")
    for rank in range(sizes.world):
        assert coordinates(rank, sizes.dense)["pipeline"] == coordinates(rank, sizes.experts)["pipeline"]
    for stage, rank in senders(sizes).items():
        place = coordinates(rank, sizes.dense)
        assert place == {"tensor": 0, "context": 0, "data": 0, "pipeline": stage}


@given(st.integers(1, 8), st.integers(1, 12))
def test_stages_share_out_all_layers(stages: int, each: int) -> None:
    layers = [layer for stage in range(stages) for layer in stage_layers(stages * each, stages, stage)]
    assert layers == list(range(stages * each))


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([3], "3"), ([0, 1], "0-1"), ([0, 4], "0, 4"), ([0, 2, 4, 6], "0-6 by 2"), ([0, 1, 2, 5], "0-2, 5"), ([], "")],
)
def test_numbers_in_short(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text
