"""Why the calls of a client wait. Several may at a time, and the end of one says nothing of the others."""

from __future__ import annotations

from collections.abc import Callable


class WaitReasons:
    """Reasons of the waits under way.

    Args:
        on_change: gets the reason of the wait that began last, and an empty string when none is left.
    """

    def __init__(self, on_change: Callable[[str], None] | None = None) -> None:
        self._on_change = on_change
        self._waits: dict[object, str] = {}
        self.current = ""
        """Of the wait that began last; empty when there is none."""

    def wait(self) -> Wait:
        """A wait that may come: it begins with its first reason."""
        return Wait(self)

    def tell(self, wait: object, reason: str) -> None:
        """The reason of a wait is this now; empty: it is over."""
        if reason:
            self._waits[wait] = reason
        elif self._waits.pop(wait, None) is None:
            return
        current = next(reversed(self._waits.values()), "")
        if current != self.current:
            self.current = current
            if self._on_change is not None:
                self._on_change(current)


class Wait:
    """One wait; called with its reason, and with an empty string when it is over."""

    __slots__ = ("_reasons",)

    def __init__(self, reasons: WaitReasons) -> None:
        self._reasons = reasons

    def __call__(self, reason: str) -> None:
        self._reasons.tell(self, reason)

    def __enter__(self) -> Wait:
        return self

    def __exit__(self, *_: object) -> None:
        self("")
