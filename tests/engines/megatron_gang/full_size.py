"""Names and shapes of the parameters that Megatron-Core itself makes for a rank of a large gang, without their memory.

``python full_size.py CONFIG_FOLDER SIZES RANK…``: a fake process group stands for the other ranks, and tensors are on
the meta device. One line of JSON for each rank.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from relax_rt.roles.training.backend.settings import TrainerSettings
from relax_rt.roles.training.megatron.model import build, read_architecture, sizes_of, transformer_config
from relax_rt.roles.training.megatron.shims import prepare


def parameters(folder: Path, table: TrainerSettings, rank: int) -> dict[str, list[int]]:
    """Of one rank, by Megatron's name."""
    from megatron.core import parallel_state, tensor_parallel

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=table.count)
    parallel_state.initialize_model_parallel(
        table.tensor_parallel,
        table.pipeline_parallel,
        expert_model_parallel_size=table.expert_parallel,
        expert_tensor_parallel_size=table.expert_tensor_parallel,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    architecture = read_architecture(folder)
    config = transformer_config(architecture, table, "local")
    config.use_cpu_initialization = False
    with torch.device("meta"):
        model = build(architecture, config, sizes_of(table), "local")
    found = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return found


def main() -> None:
    prepare()
    meta = torch.device("meta")
    torch.cuda.current_device = lambda: meta  # type: ignore[assignment,return-value]
    table = TrainerSettings(**{"backend": "megatron", "dtype": "bfloat16", **json.loads(sys.argv[2])})
    for rank in map(int, sys.argv[3:]):
        sys.stdout.write(json.dumps(parameters(Path(sys.argv[1]), table, rank)) + "\n")


if __name__ == "__main__":
    main()
