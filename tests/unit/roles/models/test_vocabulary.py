"""A tokenizer that is not the model's is refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relax_rt.roles.models.tokenizer import ChatTokenizer, check_vocabulary, vocabulary_size


def folder_of(tmp_path: Path, **config: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def tokenizer_of(folder: Path, tokens: int, *, eos: int = 0) -> ChatTokenizer:
    raw = SimpleNamespace(
        get_vocab=lambda: {f"t{n}": n for n in range(tokens)},
        eos_token_id=eos,
        all_special_ids=[eos],
        chat_template="",
        apply_chat_template=lambda *_, **__: "",
    )
    raw_call = type("Raw", (SimpleNamespace,), {"__call__": lambda self, *_, **__: {"input_ids": []}})
    return ChatTokenizer(raw_call(**vars(raw)), folder)


def test_a_model_may_have_rows_that_no_token_uses(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, vocab_size=128)
    assert check_vocabulary(folder, tokenizer_of(folder, 128)) == []
    assert check_vocabulary(folder, tokenizer_of(folder, 100)) == []
    nested = folder_of(tmp_path, text_config={"vocab_size": 64})
    assert vocabulary_size(nested) == 64


@pytest.mark.parametrize(
    ("tokens", "eos", "message", "hint"),
    [
        (130, 0, "2 tokens that the model, with vocab_size = 128, does not know: 't128' is token 128", "resize_token"),
        (128, 500, "completions are to end with token 500", "generation_config.json"),
        (60, 0, "has 60 tokens, and the model can make 128: it is another model's", "the model's own tokenizer"),
    ],
)
def test_another_models_tokenizer_is_refused(tmp_path: Path, tokens: int, eos: int, message: str, hint: str) -> None:
    folder = folder_of(tmp_path, vocab_size=128)
    (found,) = check_vocabulary(folder, tokenizer_of(folder, tokens, eos=eos))
    assert message in found.message and hint in found.hint and found.path == ("model", "path")


def test_a_model_that_does_not_say_is_let_through(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, model_type="x")
    assert check_vocabulary(folder, tokenizer_of(folder, 5)) == []
