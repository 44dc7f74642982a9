"""One prompt, as read and as rendered."""

from __future__ import annotations

from typing import Any

import msgspec

Message = dict[str, Any]


class RawItem(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt as its source gives it.

    Attributes:
        question: what is asked; its canonical form identifies the item.
        answer: the right answer, as text.
        metadata: JSON-like values handed to the reward function.
        messages: the conversation, when the source gives one instead of a question.
        where: file:line or task[index], for errors.
    """

    question: str
    answer: str
    metadata: dict[str, Any]
    where: str
    messages: list[Message] | None = None


class PromptItem(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt ready to be generated from.

    Attributes:
        item: stable id (hash of the canonical question).
        split: train or held_out.
        tokens: the rendered prompt, opening of the assistant's turn included.
    """

    item: str
    split: str
    question: str
    answer: str
    metadata: dict[str, Any]
    messages: list[Message]
    tokens: list[int]

    @property
    def info(self) -> dict[str, Any]:
        """What goes into `SampleMeta.info` for the reward function."""
        return {"question": self.question, "metadata": self.metadata}
