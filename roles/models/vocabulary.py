"""Whether a model and a tokenizer belong together, as far as the number of their tokens tells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from relax_rt.config.problems import KeyPath, Problem
from relax_rt.roles.models.tokenizer import ChatTokenizer

FEWEST = 0.5
"""Share of the model's tokens below which a tokenizer is another model's. Padding of the embedding is some percent."""
PLACE: KeyPath = ("model", "path")


def vocabulary_size(folder: Path) -> int | None:
    """Rows of the embedding, by config.json; None if it does not say."""
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    size = (values.get("text_config") or values).get("vocab_size")
    return size if isinstance(size, int) else None


def check_vocabulary(folder: Path, tokenizer: ChatTokenizer, place: KeyPath = PLACE) -> list[Problem]:
    """What keeps the model in a folder from reading and writing this tokenizer's tokens.

    Args:
        place: the setting that named the model.
    """
    size = vocabulary_size(folder)
    if size is None:
        return []
    vocabulary: dict[str, int] = tokenizer.raw.get_vocab()
    beyond = sorted((number, token) for token, number in vocabulary.items() if number >= size)
    if beyond:
        number, token = beyond[0]
        message = (
            f"the tokenizer in {tokenizer.folder} has {len(beyond)} tokens that the model, with vocab_size = {size}, "
            f"does not know: {token!r} is token {number}"
        )
        hint = "use the model's own tokenizer; if tokens were added, resize_token_embeddings(len(tokenizer)) and save"
        return [Problem(place, message, hint)]
    if stops := sorted(stop for stop in tokenizer.stop_ids if stop >= size):
        message = f"completions are to end with token {stops[0]}, which a model with vocab_size = {size} never makes"
        return [Problem(place, message, "mend eos_token_id in generation_config.json")]
    highest = max(vocabulary.values(), default=-1) + 1
    if highest < FEWEST * size:
        message = (
            f"the tokenizer in {tokenizer.folder} has {highest} tokens, and the model can make {size}: it is another "
            "model's, and most of what is sampled would be no text"
        )
        return [Problem(place, message, "put the model's own tokenizer files into the folder")]
    return []
