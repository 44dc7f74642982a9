"""What a streamed answer has that its caller has not been sent yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from relax_rt.roles.gateway.calls import Call, Choice, Dialect, Head, Writer


class Outbox:
    """Takes an answer as it is made and gives it out as server-sent events. What comes between two looks is put
    together: a caller who reads slowly gets fewer and larger events, and it is bounded by the answer's own length.

    Args:
        gone: whether the caller's connection is no more.
    """

    def __init__(self, dialect: Dialect, call: Call, gone: Callable[[], bool] = lambda: False) -> None:
        self._dialect, self._call, self.gone = dialect, call, gone
        self.writer: Writer | None = None
        self.head: Head | None = None
        self.news = asyncio.Event()
        self._started = False
        self._texts: dict[int, str] = {}
        self._choices: list[Choice] = []

    def begin(self, head: Head) -> None:
        """See Sink."""
        self.head, self.writer = head, self._dialect.writer(self._call, head)
        self.news.set()

    def text(self, index: int, text: str) -> None:
        """See Sink."""
        self._texts[index] = self._texts.get(index, "") + text
        self.news.set()

    def choice(self, choice: Choice) -> None:
        """See Sink."""
        self._choices.append(choice)
        self.news.set()

    def take(self) -> bytes:
        """All that there is."""
        self.news.clear()
        assert self.writer is not None
        out = b"" if self._started else self.writer.begin()
        self._started = True
        texts, self._texts = self._texts, {}
        choices, self._choices = self._choices, []
        out += b"".join(self.writer.text(index, text) for index, text in texts.items())
        return out + b"".join(self.writer.choice(choice) for choice in choices)
