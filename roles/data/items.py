"""One prompt, as read and as rendered."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from relax_rt.roles.models.chat_template import Message

EXACT = 2**53
"""Floats without a fraction below this are treated as integers that were stored as floats."""


class RawItem(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt as its source gives it.

    Attributes:
        question: what is asked; its canonical form decides the split.
        answer: the right answer, of any JSON type.
        metadata: JSON-like values handed to the reward function.
        messages: the conversation, when the source gives one instead of a question.
        tools: functions that the model may call, as OpenAI's `tools`.
        system: the row's own system message.
        where: file:line or task[index], for errors.
    """

    question: str
    answer: Any
    metadata: dict[str, Any]
    where: str
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    system: str | None = None


class PromptItem(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt ready to be generated from.

    Attributes:
        item: stable id: hash of the canonical question; of the whole row where several rows ask the same.
        split: train or held_out.
        answer: of any JSON type.
        tokens: the rendered prompt, opening of the assistant's turn included.
    """

    item: str
    split: str
    question: str
    answer: Any
    metadata: dict[str, Any]
    messages: list[Message]
    tokens: list[int]
    tools: list[dict[str, Any]] | None = None

    @property
    def info(self) -> dict[str, Any]:
        """The part of `SampleMeta.info` that the reward function may ask for."""
        return {"question": self.question, "metadata": self.metadata}


def answer_text(answer: Any) -> str:
    """Convert an answer to text: strings unchanged, other JSON values as JSON, None as the empty string.

    Parquet stores integer columns with nulls as floats, so a float without a fraction is written as an integer.
    """
    if isinstance(answer, str):
        return answer
    if answer is None:
        return ""
    if isinstance(answer, float) and answer.is_integer() and abs(answer) < EXACT:
        return str(int(answer))
    return json.dumps(answer, ensure_ascii=False, default=str)
