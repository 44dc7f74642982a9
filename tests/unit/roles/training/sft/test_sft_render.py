"""Conversations as tokens: the prompt is what a rollout gets, and only what the assistant says is learnt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_rt.roles.models.tiny import character_tokenizer
from relax_rt.roles.models.tokenizer import ChatTokenizer
from relax_rt.roles.training.sft.data import EncodedSequence, encode_texts, split_conversation

SYSTEM, HI, HO = (
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "ho"},
)
CHATML = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
FORGETFUL = (
    # As Qwen3's: what was thought stays in the last turn only.
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}"
    "{{ m['content'] if loop.last or m['role'] != 'assistant' else m['content'].split('!')[-1] }}{{ '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
THINKING = (
    # The opening of a turn is not how an answered turn begins.
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>think' }}{% endif %}"
)
ENDLESS = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def tokenizer(template: str | None = None) -> ChatTokenizer:
    raw = character_tokenizer()
    if template is not None:
        raw.chat_template = template
    return ChatTokenizer(raw, Path("/nonexistent"))


def one(made: ChatTokenizer, messages: list[Any], completion: str, **options: Any) -> EncodedSequence:
    (found,) = encode_texts(made, [split_conversation(made, messages, completion, **options)])
    return found


def learnt(made: ChatTokenizer, found: EncodedSequence) -> list[str]:
    """The stretches that are learnt, as text."""
    parts, last = [], -2
    for place in found.mask.nonzero()[0]:
        if place != last + 1:
            parts.append([])
        parts[-1].append(int(found.tokens[place]))
        last = place
    return [made.spell(part) for part in parts]


@pytest.mark.parametrize("template", [None, CHATML])
def test_the_answer_and_the_token_that_stops_it_are_learnt_and_nothing_else(template: str | None) -> None:
    made = tokenizer(template)
    found = one(made, [SYSTEM, HI], "ho")
    assert learnt(made, found) == ["ho<|end|>"]
    prompt = made.render([SYSTEM, HI])
    assert found.tokens[: len(prompt)].tolist() == prompt, "the prompt is that of a rollout"
    assert made.spell(found.tokens.tolist()).endswith("<|assistant|>ho<|end|>"), "nothing follows the stop"


@pytest.mark.parametrize("template", [None, CHATML])
def test_every_turn_of_the_assistant_is_learnt_and_what_is_between_them_is_not(template: str | None) -> None:
    made = tokenizer(template)
    messages = [HI, HO, {"role": "user", "content": "and?"}]
    found = one(made, messages, "fin")
    assert learnt(made, found) == ["ho<|end|>", "fin<|end|>"]
    assert found.tokens[: len(made.render(messages))].tolist() == made.render(messages)
    assert learnt(made, one(made, messages, "fin", every_turn=False)) == ["fin<|end|>"]


def test_a_template_that_drops_thoughts_is_followed() -> None:
    made = tokenizer(FORGETFUL)
    found = one(made, [HI, {"role": "assistant", "content": "hm!ho"}, HI], "ah!fin")
    assert learnt(made, found) == ["ho<|end|>", "ah!fin<|end|>"], "as the model sees and makes them"


def test_where_an_answered_turn_is_written_otherwise_the_completion_follows_the_prompt_as_it_stands() -> None:
    made = tokenizer(THINKING)
    found = one(made, [HI], "so ho")
    assert made.spell(found.tokens.tolist()) == "<|user|>hi<|end|><|assistant|>thinkso ho<|end|>"
    assert learnt(made, found) == ["so ho<|end|>"]


def test_a_template_that_ends_no_turn_gets_an_end() -> None:
    made = tokenizer(ENDLESS)
    found = one(made, [HI, HO, HI], "fin")
    # Where an earlier turn ends cannot be told, so it is not learnt.
    assert learnt(made, found) == ["fin<|end|>"]


def test_a_known_prompt_is_kept_token_by_token() -> None:
    made = tokenizer()
    prompt = made.render([HI])[-5:]
    found = one(made, [HI], "ho", prompt=prompt)
    assert found.tokens[:5].tolist() == prompt and found.mask[:5].sum() == 0
    assert learnt(made, found) == ["ho<|end|>"]


def test_many_are_encoded_as_one_by_one() -> None:
    made = tokenizer()
    texts = [split_conversation(made, [HI] * n, "a" * n) for n in range(1, 6)]
    alone = [encode_texts(made, [text])[0] for text in texts]
    for together, single in zip(encode_texts(made, texts), alone, strict=True):
        assert together.tokens.tolist() == single.tokens.tolist() and together.mask.tolist() == single.mask.tolist()
