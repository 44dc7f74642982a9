"""Adapters in a model, by peft, and their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from relax_rt.roles.training.backend.settings import LoraTable
from relax_rt.roles.training.torch.weights import ADAPTER
from relax_rt.transport.rpc.errors import Refused

FOLDER = "adapter"
"""In a checkpoint: beside the merged model, where transformers does not take it for a part of that."""
WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
"""Before every name in peft's files."""


def add_adapters(model: Any, table: LoraTable, *, seed: int) -> None:
    """Put adapters into the model, which is changed by nothing yet (B is 0); only they are trained from now on.

    Args:
        seed: of A's first values, which all ranks of a gang and every new beginning must draw alike.

    Raises:
        Refused: peft is not installed, or no linear layer has such a name.
    """
    try:
        import peft
    except ImportError as error:
        raise Refused("roles.trainer.lora", why="peft is not installed", hint="pip install 'relax-rt[lora]'") from error
    config = peft.LoraConfig(
        r=table.rank, lora_alpha=table.alpha, target_modules=table.targets, lora_dropout=0.0, bias="none"
    )
    for name in () if isinstance(table.targets, str) else sorted(tied_modules(model)):
        if any(f".{name}".endswith(f".{target}") for target in table.targets):
            why = "its weight is the embedding's as well, so that the change could not be merged"
            raise Refused(f"roles.trainer.lora.targets: {name}", why=why, hint="leave it out")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(config, model, adapter_name=ADAPTER)
        except ValueError as error:
            raise Refused(f"roles.trainer.lora.targets = {table.targets}", why=str(error).splitlines()[0]) from error
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and not isinstance(module, peft.tuners.lora.Linear):
            raise Refused(f"roles.trainer.lora.targets: {name}", why="it is no linear layer")


def tied_modules(model: Any) -> frozenset[str]:
    """Names of modules whose weight another one has as well."""
    seen: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        seen.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    return frozenset(name for names in seen.values() if len(names) > 1 for name in names)


def write_config(folder: Path, table: LoraTable, base: Path) -> None:
    """peft's description of the adapters, so that `PeftModel.from_pretrained` reads them over the base model."""
    targets = table.targets if isinstance(table.targets, str) else sorted(table.targets)
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": table.rank,
        "lora_alpha": table.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": targets,
        "inference_mode": True,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(described, indent=2))
