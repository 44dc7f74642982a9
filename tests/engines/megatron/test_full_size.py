"""The mapping of Qwen3-8B and Qwen3-30B-A3B against the parameters that Megatron-Core itself makes for their ranks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relax_rt.roles.planning.shape import read_shape
from relax_rt.roles.sections import TrainerSettings
from relax_rt.roles.trainers.megatron.model import padded_vocabulary, sizes_of
from relax_rt.roles.trainers.resharding import Division, Naming, plan_buckets

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[2] / "examples"
DENSE, EXPERTS = EXAMPLES / "h100x8_qwen3_8b" / "model", EXAMPLES / "h100x16_qwen3_30b_a3b" / "model"
Shapes = dict[str, list[int]]


def made(folder: Path, division: dict[str, Any], *ranks: int) -> list[Shapes]:
    """What Megatron-Core makes for these ranks."""
    command = [sys.executable, str(HERE / "full_size.py"), str(folder), json.dumps(division), *map(str, ranks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()[-len(ranks) :]]


def planned(folder: Path, division: dict[str, Any], naming: Naming, rank: int) -> Shapes:
    table, shape = TrainerSettings(**{"backend": "megatron", **division}), read_shape(folder)
    sizes = sizes_of(table)
    rows = padded_vocabulary(shape, sizes)
    plan = plan_buckets(shape, Division(sizes=sizes, naming=naming, padded_vocabulary=rows), dtype="bfloat16")
    return {name: list(local.shape) for (_, name), local in plan.held(rank)[0].items()}


def as_transformer_engine(shapes: Shapes) -> Shapes:
    """The names that TransformerEngine's layers give the same parameters: a norm belongs to the linear layer behind it,
    save that of a router, and experts are one module."""
    found = {}
    for name, size in shapes.items():
        name = name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight")
        sparse = name.partition(".pre_mlp_layernorm")[0] + ".mlp.router.weight" in shapes
        if not sparse:
            name = name.replace(".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight")
        name = re.sub(r"\.local_experts\.(\d+)\.(linear_fc[12])\.weight$", r".\2.weight\1", name)
        found[name] = size
    return found


CASES = [
    (DENSE, {"count": 1}, (0,)),
    (DENSE, {"count": 4, "tensor_parallel": 2, "pipeline_parallel": 2}, (0, 1, 2, 3)),
    (EXPERTS, {"count": 16, "tensor_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 8}, (0, 7, 15)),
    (EXPERTS, {"count": 8, "expert_parallel": 8}, (5,)),
]


@pytest.mark.parametrize(("folder", "division", "ranks"), CASES)
def test_every_parameter_has_its_name_and_shape_in_both_namings(
    folder: Path, division: dict[str, Any], ranks: tuple[int, ...]
) -> None:
    for rank, shapes in zip(ranks, made(folder, division, *ranks), strict=True):
        assert planned(folder, division, Naming(), rank) == shapes
        fused = planned(folder, division, Naming(fused_norms=True, grouped_experts=True), rank)
        assert fused == as_transformer_engine(shapes)
    layers = read_shape(folder).layers // division.get("pipeline_parallel", 1)
    assert sum(name.endswith("linear_qkv.weight") for name in shapes) == layers
