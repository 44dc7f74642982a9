"""Shortens an overlong prompt by its oldest content. Beginning of sequence, system message and the marks of every turn
stay: a model has never seen a prompt that begins in the middle of a turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from relax_rt.roles.models.chat_template import Message, words

HEAD = ("system", "developer")


def truncated(
    messages: Sequence[Message], render: Callable[[list[Message]], list[int]], most: int
) -> tuple[list[Message], list[int]] | None:
    """The conversation without its oldest exchanges, and if need be without the beginning of what is asked in the last
    one, so that it has `most` tokens at most.

    An exchange is a message of the user with everything up to the next one. System messages at the beginning stay.

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

    # The fewest characters whose removal suffices. A cut within a token may make one more of the rest, so that the
    # number of tokens does not fall strictly: what the search ends with is known to fit all the same.
    low, high, found = 1, len(text) - 1, None
    while low <= high:
        middle = (low + high) // 2
        kept, tokens = without(middle)
        if len(tokens) <= most:
            found, high = (kept, tokens), middle - 1
        else:
            low = middle + 1
    return found
