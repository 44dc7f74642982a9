"""One rank of a torch trainer on a device of its own; rank 0 writes a line of JSON.

python trainer_far_end.py MODEL FOLDER RANK WORLD
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1] / "engines"))

from gang_harness import samples
from harness import VOCABULARY

from relax_rt.roles.training.algorithms.settings import AlgorithmTable
from relax_rt.roles.training.batch.rows import replica_share
from relax_rt.roles.training.torch.backend import TorchBackend
from relax_rt.roles.training.torch.sharding import TorchRanks


def main(model: Path, folder: Path, rank: int, world: int) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    ranks = TorchRanks(dist.FileStore(str(folder / "store"), world), rank, world, device) if world > 1 else None
    trainer = TorchBackend(
        model,
        AlgorithmTable(learning_rate=1e-3),
        dtype="float32",
        threads=1,
        tokens_per_micro_batch=64,
        temperature=0.8,
        on_progress=lambda _: None,
        device=device,
        ranks=ranks,
    )
    batch = samples(9)
    for sample in batch:
        sample.tokens %= VOCABULARY
    mine = (
        batch
        if ranks is None
        else [s for _, s in replica_share(batch, rank, world, whole_groups=trainer.keeps_groups_together(batch))]
    )
    trainer.accumulate(mine)
    result = trainer.apply(40.0, 1)
    into = bytearray(trainer.layout("float32").nbytes) if rank == 0 else None
    trainer.export(memoryview(into) if into is not None else None, "float32")
    (folder / f"checkpoint-{rank}").mkdir()
    trainer.snapshot()
    if ranks is not None:
        ranks.close()
    if into is not None:
        weights = float(np.abs(np.frombuffer(into, np.float32)).sum())
        told = {"loss": result.loss, "grad_norm": result.grad_norm, "weights": weights}
        sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
