"""The mapping between Megatron's parameters and a checkpoint's tensors against golden tables of two released models.

`tests/engines/megatron_gang/test_full_size.py` holds the same tables against the models that
Megatron-Core itself makes.
"""

from __future__ import annotations

from functools import cache
from math import prod
from pathlib import Path

import pytest
from golden_tables import Layers, Parameter, read

from relax_rt.roles.models.parallel import Sizes
from relax_rt.roles.models.shape import read_shape, shape_of
from relax_rt.roles.training.megatron.layout import LocalParameter, ModelDivision, Naming, hf_tensors, naming_of
from relax_rt.roles.training.megatron.resharding import ReshardPlan, plan_buckets

EXAMPLES = Path(__file__).parents[4] / "examples"
FOLDERS = {"qwen3_8b_tp2_pp2": "h100x8_qwen3_8b", "qwen3_30b_a3b_tp2_pp2_ep8": "h100x16_qwen3_30b_a3b"}
NAMES: tuple[Layers, ...] = ("local", "transformer_engine")
each_table = pytest.mark.parametrize("table", FOLDERS)
both_namings = pytest.mark.parametrize("layers", NAMES)


@cache
def plan_of(table: str, layers: Layers) -> ReshardPlan:
    """What the mapping makes of the model, under the naming that it sees in the parameters' names."""
    golden = read(table)
    sizes = Sizes(
        world=golden.division["count"],
        tensor=golden.division["tensor_parallel"],
        pipeline=golden.division["pipeline_parallel"],
        expert=golden.division.get("expert_parallel", 1),
    )
    division = ModelDivision(sizes=sizes, naming=naming_of(golden.held(layers, 0)))
    return plan_buckets(shape_of(golden.config), division, dtype="bfloat16")


def as_golden(local: LocalParameter) -> Parameter:
    runs = sorted(local.runs, key=lambda run: run.local)
    return Parameter(local.shape, tuple(dict.fromkeys(run.name for run in runs)))


@each_table
def test_the_checkpoint_has_the_released_models_tensors(table: str) -> None:
    golden = read(table)
    found = list(hf_tensors(shape_of(golden.config)))
    assert {one.name: one.shape for one in found} == dict(golden.checkpoint())
    assert len({one.name for one in found}) == len(found)


@each_table
def test_the_example_is_of_the_released_model(table: str) -> None:
    assert read_shape(EXAMPLES / FOLDERS[table] / "model") == shape_of(read(table).config)


@each_table
@both_namings
def test_the_naming_is_seen_in_the_names_of_any_rank(table: str, layers: Layers) -> None:
    golden = read(table)
    fused = layers == "transformer_engine"
    for rank in range(golden.division["count"]):
        naming = naming_of(golden.held(layers, rank))
        assert naming == Naming(fused_norms=fused, grouped_experts=fused and bool(golden.experts))


@each_table
@both_namings
def test_each_rank_holds_the_parameters_of_the_table(table: str, layers: Layers) -> None:
    golden, plan = read(table), plan_of(table, layers)
    for rank in range(golden.division["count"]):
        held, besides = plan.held(rank)
        assert {name: as_golden(local) for (_, name), local in held.items()} == golden.held(layers, rank)
        assert {chunk for chunk, _ in held} == {0}
        assert not besides


@each_table
@both_namings
def test_the_parameters_of_all_ranks_are_the_whole_checkpoint(table: str, layers: Layers) -> None:
    golden, plan = read(table), plan_of(table, layers)
    parts: dict[str, set[tuple[int, int, int, int]]] = {}
    for rank in range(golden.division["count"]):
        for local in plan.held(rank)[0].values():
            assert sum(run.rows for run in local.runs) == local.shape[0]
            for run in local.runs:
                parts.setdefault(run.name, set()).add((run.row, run.rows, local.column, local.columns))
    whole = {name: prod(shape) for name, shape in golden.checkpoint()}
    assert {name: sum(rows * columns for _, rows, _, columns in places) for name, places in parts.items()} == whole
