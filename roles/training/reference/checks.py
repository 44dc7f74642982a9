"""What keeps a model from being the reference of another."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from relax_rt.config.problems import KeyPath, Problem
from relax_rt.config.schema import RunConfig
from relax_rt.roles.models.resolve import resolve_model
from relax_rt.roles.models.tokenizer import ChatTokenizer
from relax_rt.roles.training.reference.settings import ReferenceSettings
from relax_rt.transport.rpc.errors import RelaxError

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
