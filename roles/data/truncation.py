"""Truncate an overlong prompt by its oldest content.

The beginning of sequence, the system message and the marks of every turn stay, because models are not trained on
prompts that begin in the middle of a turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from relax_rt.roles.models.chat_template import Message, words

HEAD = ("system", "developer")


def truncated(
    messages: Sequence[Message], render: Callable[[list[Message]], list[int]], most: int
) -> tuple[list[Message], list[int]] | None:
    """Shorten a conversation to at most `most` tokens.

    Drops the oldest exchanges, then if necessary the beginning of the last user message. An exchange is a user message
    with everything up to the next one. System messages at the beginning stay.

    Args:
        render: token ids of a conversation, the opening of the assistant's turn included.

    Returns:
        The messages and their tokens; None if what has to stay is too long already, or the text to be shortened is
        none (pictures).
    """
    first = next((at for at, one in enumerate(messages) if one["role"] not in HEAD), len(messages))
    head, rest = list(messages[:first]), list(messages[first:])
    asked = [at for at, one in enumerate(rest) if one["role"] == "user"]
    for begin in asked:
        if not begin:
            continue
        kept = [*head, *rest[begin:]]
        tokens = render(kept)
        if len(tokens) <= most:
            return kept, tokens
    if not asked:
        return None
    return _shortened(head, rest[asked[-1] :], render, most)


def _shortened(
    head: list[Message], last: list[Message], render: Callable[[list[Message]], list[int]], most: int
) -> tuple[list[Message], list[int]] | None:
    text = words(last[0].get("content"))
    if not isinstance(text, str) or not text:
        return None

    def without(count: int) -> tuple[list[Message], list[int]]:
        kept = [*head, {**last[0], "content": text[count:]}, *last[1:]]
        return kept, render(kept)

    # Binary search for the fewest characters to remove. A cut inside a token may add one token, so the count is not
    # strictly monotonic; the result is only taken from cuts that were rendered and fit.
    low, high, found = 1, len(text) - 1, None
    while low <= high:
        middle = (low + high) // 2
        kept, tokens = without(middle)
        if len(tokens) <= most:
            found, high = (kept, tokens), middle - 1
        else:
            low = middle + 1
    return found
