"""The mapping of Qwen3-8B and Qwen3-30B-A3B, and the golden tables of their names and shapes, against the parameters
that Megatron-Core itself makes for their ranks.

Its TransformerEngine layers are made with a stand-in for TransformerEngine's own modules.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relax_rt.roles.models.shape import read_shape
from relax_rt.roles.training.backend.settings import TrainerSettings
from relax_rt.roles.training.megatron.layout import ModelDivision, naming_of
from relax_rt.roles.training.megatron.model import Layers, padded_vocabulary, sizes_of
from relax_rt.roles.training.megatron.resharding import plan_buckets

HERE = Path(__file__).parent
UNIT = HERE.parents[1] / "unit" / "roles" / "training"
sys.path.append(str(UNIT))

from golden_tables import read  # noqa: E402

EXAMPLES = HERE.parents[2] / "examples"
DENSE, EXPERTS = EXAMPLES / "h100x8_qwen3_8b" / "model", EXAMPLES / "h100x16_qwen3_30b_a3b" / "model"
MAKERS: dict[Layers, Path] = {
    "local": HERE / "full_size.py",
    "transformer_engine": UNIT / "transformer_engine_stand_in.py",
}
PLACES = """
import json, sys
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from relax_rt.roles.training.megatron.shims import prepare
prepare()
from megatron.core import parallel_state as state
at = json.loads(sys.argv[1])
for rank in range(at["count"]):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=at["count"])
    state.initialize_model_parallel(
        at["tensor_parallel"],
        at["pipeline_parallel"],
        expert_model_parallel_size=at["expert_parallel"],
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
    )
    print(json.dumps([state.get_pipeline_model_parallel_rank(), state.get_expert_model_parallel_rank()]))
    state.destroy_model_parallel()
    dist.destroy_process_group()
"""
"""Stage and place along the experts' ranks, of each rank."""
Shapes = dict[str, list[int]]
CASES = [
    (DENSE, {"count": 1}, (0,)),
    (EXPERTS, {"count": 8, "expert_parallel": 8}, (5,)),
]
TABLES = [
    (DENSE, "qwen3_8b_tp2_pp2", (0, 1, 2, 3)),
    (EXPERTS, "qwen3_30b_a3b_tp2_pp2_ep8", (0, 7, 15)),
]


def lines_of(*command: str) -> list[Any]:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line[:1] in ("{", "[")]


def made(folder: Path, division: dict[str, Any], layers: Layers, *ranks: int) -> list[Shapes]:
    """What Megatron-Core makes for these ranks."""
    found = lines_of(str(MAKERS[layers]), str(folder), json.dumps(division), *map(str, ranks))
    assert len(found) == len(ranks)
    return found


def planned(folder: Path, division: dict[str, Any], rank: int, names: Shapes) -> Shapes:
    """What the mapping wants of a rank that has parameters of these names."""
    table, shape = TrainerSettings(**{"backend": "megatron", "dtype": "bfloat16", **division}), read_shape(folder)
    sizes = sizes_of(table)
    rows = padded_vocabulary(shape, sizes)
    plan = plan_buckets(
        shape, ModelDivision(sizes=sizes, naming=naming_of(names), padded_vocabulary=rows), dtype="bfloat16"
    )
    return {name: list(local.shape) for (_, name), local in plan.held(rank)[0].items()}


@pytest.mark.parametrize("layers", MAKERS)
@pytest.mark.parametrize(("folder", "division", "ranks"), CASES)
def test_every_parameter_has_its_name_and_shape(
    folder: Path, division: dict[str, Any], ranks: tuple[int, ...], layers: Layers
) -> None:
    for rank, shapes in zip(ranks, made(folder, division, layers, *ranks), strict=True):
        assert planned(folder, division, rank, shapes) == shapes
        assert sum(name.endswith("linear_qkv.weight") for name in shapes) == read_shape(folder).layers


@pytest.mark.parametrize("layers", MAKERS)
@pytest.mark.parametrize(("folder", "table", "ranks"), TABLES)
def test_the_golden_tables_have_what_megatron_makes(
    folder: Path, table: str, ranks: tuple[int, ...], layers: Layers
) -> None:
    golden = read(table)
    for rank, shapes in zip(ranks, made(folder, golden.division, layers, *ranks), strict=True):
        assert {name: list(one.shape) for name, one in golden.held(layers, rank).items()} == shapes
        assert planned(folder, golden.division, rank, shapes) == shapes


def test_the_golden_table_deals_out_layers_and_experts_as_megatron_does() -> None:
    golden = read("qwen3_30b_a3b_tp2_pp2_ep8")
    places = lines_of("-c", PLACES, json.dumps(golden.division))
    assert len(places) == golden.division["count"]
    for rank, (stage, expert) in enumerate(places):
        first, last = golden.experts[rank]
        assert rank in golden.stages[stage].ranks
        assert first == expert * (last - first + 1)
