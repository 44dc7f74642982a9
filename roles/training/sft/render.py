"""Conversations as tokens, with the mask of what the assistant says."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from relax_rt.roles.data.items import Message
from relax_rt.roles.models.tokenizer import ChatTokenizer

AT_ONCE = 4096
"""Texts that go through the tokenizer together."""


class Encoded(msgspec.Struct, frozen=True):
    """A sequence: tokens int32 [T]; mask uint8 [T], 1 on what is learnt."""

    tokens: NDArray[np.int32]
    mask: NDArray[np.uint8]


class Text(msgspec.Struct, frozen=True):
    """A sequence before it is encoded.

    Attributes:
        prompt: token ids that go before everything; empty where `parts` begin with the prompt.
        parts: texts that are encoded each on its own, as a prompt and what a model adds to it are. Each but a first
            one of the prompt begins with a turn of the assistant.
        turns: whether the part begins with a turn that is learnt.
    """

    prompt: tuple[int, ...]
    parts: tuple[str, ...]
    turns: tuple[bool, ...]


def lay_out(
    tokenizer: ChatTokenizer,
    messages: Sequence[Message],
    completion: str,
    *,
    prompt: Sequence[int] = (),
    every_turn: bool = True,
) -> Text:
    """A conversation and its completion, cut where turns of the assistant begin.

    The prompt is what a rollout would be given. Where the template writes an answered turn otherwise than it opens one
    (it drops what was thought), the completion follows the prompt as it stands.

    Args:
        prompt: its tokens, if they are known; then nothing but the completion is learnt.
        every_turn: learn earlier turns of the assistant too; those that the template writes otherwise are not.
    """
    start = tokenizer.text(messages)
    whole = tokenizer.conversation([*messages, {"role": "assistant", "content": completion}])
    tail = whole[len(start) :] if whole.startswith(start) else completion
    if prompt:
        return Text(tuple(prompt), (tail,), (True,))
    cuts = [0]
    if every_turn:
        for index, message in enumerate(messages):
            if message["role"] == "assistant" and index:
                opened = tokenizer.text(messages[:index])
                if start.startswith(opened) and len(opened) > cuts[-1]:
                    cuts.append(len(opened))
    ends = [*cuts[1:], len(start)]
    parts = [start[a:b] for a, b in zip(cuts, ends, strict=True)]
    return Text((), (*parts, tail), (False, *[True] * len(parts)))


def encode(tokenizer: ChatTokenizer, texts: Sequence[Text]) -> list[Encoded]:
    """Tokens and masks. A turn is learnt up to the token that stops a completion, with it; the last one ends there."""
    flat = [part for text in texts for part in text.parts]
    ids: list[list[int]] = []
    for first in range(0, len(flat), AT_ONCE):
        ids += tokenizer.encode_many(flat[first : first + AT_ONCE])
    found, at = [], 0
    for text in texts:
        found.append(_joined(tokenizer, text, ids[at : at + len(text.parts)]))
        at += len(text.parts)
    return found


def _joined(tokenizer: ChatTokenizer, text: Text, parts: Sequence[list[int]]) -> Encoded:
    tokens: list[int] = list(text.prompt)
    mask = [0] * len(tokens)
    for number, (part, turn) in enumerate(zip(parts, text.turns, strict=True)):
        last = number == len(parts) - 1
        end = next((place + 1 for place, token in enumerate(part) if token in tokenizer.stop_ids), None)
        if last:
            part = part[:end] if end is not None else [*part, tokenizer.end_id]
            end = len(part)
        # What follows a turn that does not end cannot be told from it.
        learnt = end if turn and end is not None else 0
        tokens += part
        mask += [1] * learnt + [0] * (len(part) - learnt)
    # Nothing predicts the first token.
    mask[:1] = [0]
    return Encoded(np.array(tokens, np.int32), np.array(mask, np.uint8))
