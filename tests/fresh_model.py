"""The tiny model without its warm start."""

from __future__ import annotations

from pathlib import Path


def save_fresh(folder: Path, *, characters: str = "", seed: int = 0) -> Path:
    """Save it with random weights; its tokenizer may know further characters."""
    from relax_rt.roles.models.tiny import character_tokenizer, tiny_model

    tokenizer = character_tokenizer()
    tokenizer.add_tokens(list(characters))
    tokenizer.save_pretrained(folder)
    tiny_model(len(tokenizer), seed=seed).save_pretrained(folder)
    return folder
