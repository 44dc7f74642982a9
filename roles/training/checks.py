"""Checks of the training roles' models against their settings, before anything is loaded. Called by the preflight."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from relax_rt.config.problems import KeyPath, Problem
from relax_rt.config.schema import RunConfig
from relax_rt.roles.models.resolve import resolve_model
from relax_rt.roles.models.tokenizer import ChatTokenizer
from relax_rt.roles.training.backend.settings import ReferenceSettings, TrainerSettings
from relax_rt.transport.rpc.errors import RelaxError

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


PLACE: KeyPath = ("roles", "reference", "model")


def check_reference(config: RunConfig, config_dir: Path, tokenizer: ChatTokenizer, longest: int) -> Iterator[Problem]:
    """Whether the model of [roles.reference] is there and can judge the policy's tokens; a package is converted here.

    Args:
        tokenizer: the policy's.
        longest: tokens of the longest sequence that the policy may make.
    """
    table = config.role("reference", ReferenceSettings)
    if "reference" not in config.roles or table.target is not None or table.model is None:
        # None at all, or one's own, or the policy before its first step.
        return
    try:
        folder = resolve_model(table.model, config_dir)
    except RelaxError as error:
        message = error.what.replace("model.path", "roles.reference.model") + (f": {error.why}" if error.why else "")
        yield Problem(PLACE, message, error.hint)
        return
    if folder == tokenizer.folder:
        return
    if why := _other_tokens(tokenizer.raw.get_vocab(), folder):
        hint = "reference and teacher must have the policy's tokens under the same ids"
        yield Problem(PLACE, f"the model in {folder} has another vocabulary than the policy's: {why}", hint)
        return
    context = _text_config(folder).get("max_position_embeddings")
    if isinstance(context, int) and longest > context:
        message = f"sequences may have {longest} tokens, and the context of the model in {folder} is {context}"
        yield Problem(PLACE, message, "lower sampling.max_new_tokens or data.max_prompt_tokens")


def _other_tokens(ours: Mapping[str, int], folder: Path) -> str:
    """What of the policy's tokens (ids by text) the model in the folder lacks or numbers otherwise; else empty."""
    from transformers import AutoTokenizer

    try:
        theirs: dict[str, int] = AutoTokenizer.from_pretrained(folder, local_files_only=True).get_vocab()
    except (OSError, ValueError, KeyError) as error:
        return f"its tokenizer cannot be loaded: {str(error).splitlines()[0]}"
    other = sorted((number, token) for token, number in ours.items() if theirs.get(token) != number)
    if other:
        number, token = other[0]
        there = f"token {theirs[token]}" if token in theirs else "not there"
        return f"{token!r}, token {number} of the policy, is {there}; so with {len(other)} of {len(ours)} tokens"
    size = _text_config(folder).get("vocab_size")
    highest = max(ours.values())
    if isinstance(size, int) and highest >= size:
        return f"the policy's tokens go up to {highest}, and it has {size}"
    return ""


def _text_config(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return values.get("text_config") or values
