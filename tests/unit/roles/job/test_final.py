"""Roles learn from queue and registry, wherever they run, that the last weights are the last."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from relax_rt.roles.base import final
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import Unreachable

LAST = VersionRecord(5, 4, 12)


class Far:
    """A queue and a registry of another node, which say what they are told to, or are away."""

    def __init__(self, *said: tuple[int, int] | None) -> None:
        self.said = list(said)
        self.stopping = asyncio.Event()
        self.progress = SimpleNamespace(waiting=lambda reason: None)
        self.registry = self

    async def queue(self) -> Any:
        return self

    async def stats(self) -> Any:
        if self.said[0] is None:
            self.said.pop(0)
            raise Unreachable("the queue", why="it is being started again")
        return SimpleNamespace(committed=self.said[0][0])

    async def versions(self) -> list[VersionRecord]:
        said = self.said.pop(0)
        assert said is not None
        return [VersionRecord(version, version - 1, 0) for version in range(1, said[1] + 1)]


async def test_the_end_is_waited_for_until_a_checkpoint_has_the_last_step(monkeypatch: Any) -> None:
    monkeypatch.setattr(final, "POLL_S", 0.0)
    far: Any = Far((0, 5), (10, 5), None, (12, 5))
    assert await final.is_final(far, LAST) and not far.said


async def test_weights_that_others_came_after_are_not_the_last(monkeypatch: Any) -> None:
    monkeypatch.setattr(final, "POLL_S", 0.0)
    far: Any = Far((10, 5), (10, 6))
    assert not await final.is_final(far, LAST)
    # The checkpoint of the step may be of the newer ones.
    far = Far((12, 7))
    assert not await final.is_final(far, LAST)
