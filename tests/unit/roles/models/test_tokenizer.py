"""Which tokens end a completion: every place where a model's files name them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relax_rt.roles.models.tiny import SPECIALS, character_tokenizer
from relax_rt.roles.models.tokenizer import ChatTokenizer, check_vocabulary, vocabulary_size
from relax_rt.transport.rpc.errors import RelaxError

END = SPECIALS.index("<|end|>")
"""Of the tokenizer and of its template."""


def stops(folder: Path, config: Any = None, generation: Any = None) -> set[int]:
    for name, values in (("config.json", config), ("generation_config.json", generation)):
        if values is not None:
            (folder / name).write_text(values if isinstance(values, str) else json.dumps(values))
    return set(ChatTokenizer(character_tokenizer(), folder).stop_ids) - {END}


@pytest.mark.parametrize(
    ("config", "generation", "found"),
    [
        ({"eos_token_id": [7, 8]}, None, {7, 8}),
        ({"eos_token_id": 7}, None, {7}),
        ({"eos_token_id": [7, 8]}, {"temperature": 0.6}, {7, 8}),
        ({"eos_token_id": [7, 8]}, {"eos_token_id": None}, {7, 8}),
        ({"eos_token_id": [7, 8]}, {"eos_token_id": []}, {7, 8}),
        ({"text_config": {"eos_token_id": [7, 8]}}, None, {7, 8}),
        ({"thinker_config": {"text_config": {"eos_token_id": 7}}}, {}, {7}),
        ({"llm_config": {"eos_token_id": 7}}, None, {7}),
        # Those of both files count: SGLang ends at either.
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 9}, {7, 8, 9}),
        ({"eos_token_id": 7}, {"eos_token_id": [9, 10]}, {7, 9, 10}),
        ({}, {"eos_token_id": [9, 10]}, {9, 10}),
        # A part's may be a default that nobody set: it counts where nothing else is named.
        ({"eos_token_id": 9, "text_config": {"eos_token_id": [7, 8]}}, None, {9}),
        ({"text_config": {"eos_token_id": 7}}, {"eos_token_id": 9}, {9}),
        ({"eos_token_id": None, "text_config": None}, None, set()),
        ({}, {}, set()),
        (None, None, set()),
        # A vision tower's are not the language model's.
        ({"vision_config": {"eos_token_id": 7}}, None, set()),
    ],
)
def test_ends_of_the_models_files(tmp_path: Path, config: Any, generation: Any, found: set[int]) -> None:
    assert stops(tmp_path, config, generation) == found


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", r"config\.json: it cannot be read as JSON"),
        ("[1]", "it is not a JSON object"),
        ('{"eos_token_id": "</s>"}', r"eos_token_id = '</s>' is not a token id"),
        ('{"eos_token_id": [7, "x"]}', "is not a token id or a list of them"),
        ('{"eos_token_id": true}', "is not a token id"),
        ('{"eos_token_id": 7.5}', "is not a token id"),
        ('{"text_config": {"eos_token_id": {}}}', "is not a token id"),
    ],
)
def test_a_file_that_names_no_token_id_is_told(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(RelaxError, match=why):
        stops(tmp_path, text)


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
