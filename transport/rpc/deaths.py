"""A request that may be repeated, and that kills whoever takes it, must not go through all of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

from relax_rt.transport.rpc.channel import Lost
from relax_rt.transport.rpc.errors import ActorDied
from relax_rt.transport.rpc.interface import Method

Alive = Callable[[Collection[str], float], Awaitable[Collection[str]]]
"""Those of some incarnations that are known to live, found out within some seconds."""


class Deaths:
    """The incarnations that were lost while they had one request.

    Args:
        most: with as many it is not sent again.
        alive: clears those of which only the connection was lost; without it each counts.
    """

    def __init__(self, most: int, alive: Alive | None = None) -> None:
        self._most = most
        self._alive = alive
        self._lost: dict[str, None] = {}

    async def count(self, what: str, lost: Lost, left_s: float) -> None:
        """Count a loss.

        Raises:
            ActorDied: it was one too many.
        """
        if not lost.sent:
            return
        self._lost[lost.who] = None
        if len(self._lost) >= self._most and self._alive is not None:
            for who in await self._alive(tuple(self._lost), left_s):
                self._lost.pop(who, None)
        if len(self._lost) >= self._most:
            raise died(
                f"{what} at {lost.where}",
                f"{lost}; {len(self._lost)} incarnations have died with it: {', '.join(self._lost)}",
                "the request itself may be what kills them, so it is not sent again",
                lost,
            )


def died_of(method: Method, lost: Lost) -> ActorDied:
    """What the caller of a method that must not be repeated is told of a loss."""
    why, hint = f"{lost}; the call may have been carried out", "it is not marked idempotent, so it is not sent again"
    return died(f"call of {method} at {lost.where}", why, hint, lost)


def died(what: str, why: str, hint: str, lost: Lost) -> ActorDied:
    """The error of a request whose incarnation was lost."""
    error = ActorDied(what, why=why, hint=hint)
    error.who = lost.who
    return error
