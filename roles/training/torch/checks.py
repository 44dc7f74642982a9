"""Whether a model has what the trainer's settings ask of it; nothing of it is loaded."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from pathlib import Path

from relax_rt.config.problems import Problem
from relax_rt.config.schema import RunConfig
from relax_rt.roles.training.backend.settings import TrainerSettings

PATH = ("roles", "trainer", "lora", "targets")
CANNOT_PACK = "the model's attention cannot have several sequences in a row"
PACKS = 'use a model whose layers hand arguments on to their attention (Qwen3, Llama), or packing = "auto"'


def check_packing(config: RunConfig, folder: Path) -> Iterator[Problem]:
    """packing = "required" where the attention of the model in this folder cannot have several sequences in a row."""
    table = config.roles.get("trainer")
    if not isinstance(table, TrainerSettings) or table.packing != "required" or table.backend != "torch":
        return
    from relax_rt.roles.training.batch.attention import architecture_packs

    # Where no small model can be made of it, it shows when the trainer loads the model.
    if architecture_packs(folder) is False:
        yield Problem(("roles", "trainer", "packing"), f'packing = "required": {CANNOT_PACK}', PACKS)


def check_adapters(config: RunConfig, folder: Path) -> Iterator[Problem]:
    """Targets that no weight of the model in this folder is called by.

    Args:
        folder: with config.json and *.safetensors.
    """
    table = config.roles.get("trainer")
    if not isinstance(table, TrainerSettings) or table.lora is None or isinstance(table.lora.targets, str):
        return
    if not table.lora.targets:
        yield Problem(PATH, "targets is empty: nothing would be trained", 'leave it out, or ["q_proj", "v_proj"]')
    known = linear_layers(folder)
    for target in table.lora.targets:
        if target.split(".")[-1] not in known:
            close = difflib.get_close_matches(target, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "there are " + ", ".join(sorted(known))
            yield Problem(PATH, f"targets: the model has no linear layer {target!r}", hint)


def linear_layers(folder: Path) -> set[str]:
    """The last parts of the names of matrices in a model's layers, embeddings left out."""
    found = set()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, entry in header.items():
            parts = name.split(".")
            if parts[-1] == "weight" and len(entry["shape"]) == 2 and "embed" not in parts[-2]:
                found.add(parts[-2])
    return found
