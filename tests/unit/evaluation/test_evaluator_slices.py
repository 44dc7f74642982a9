"""An evaluation of more items than an engine lets wait."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from relax_rt.roles import evaluator
from relax_rt.roles.engines.base import Assembly, Chunk, GroupRequest
from relax_rt.roles.evaluator import EvaluatorRole
from relax_rt.transport.errors import Refused


class Engine:
    """Takes no more than so many at a time, and completes a few in each turn of the loop."""

    def __init__(self, role: EvaluatorRole, limit: int) -> None:
        self.role, self.limit, self.tokens, self.most = role, limit, 0, 0
        self.held: list[GroupRequest] = []

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        if len(self.held) + len(requests) > self.limit:
            raise Refused("too many")
        if not self.held:
            asyncio.get_running_loop().call_soon(self.turn)
        self.held += requests
        self.most = max(self.most, len(self.held))

    def turn(self) -> None:
        some, self.held = self.held[:3], self.held[3:]
        self.tokens += len(some)
        if self.held:
            asyncio.get_running_loop().call_soon(self.turn)
        self.role._arrive([Chunk(one.id, 0, 0, [one.id], [-1.0], [], "stop") for one in some])

    def load(self) -> Any:
        return SimpleNamespace(tokens_generated=self.tokens)


@pytest.mark.parametrize("count", [1, 8, 9, 50])
async def test_items_are_submitted_as_there_is_room(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluator, "AT_A_TIME", 8)
    monkeypatch.setattr(evaluator, "PROGRESS_EVERY_S", 60.0)
    role = cast(Any, EvaluatorRole.__new__(EvaluatorRole))
    role._arrived, role._news, role._awaited, role.assembly = {}, asyncio.Event(), 0, Assembly()
    role.engine = Engine(role, 8)
    role.ctx = SimpleNamespace(progress=SimpleNamespace(advance=lambda *_: None))
    role.follower = SimpleNamespace(record=SimpleNamespace(version=1))
    role.tokenizer = SimpleNamespace(decode=str, stop_ids=frozenset([0]))
    role.source = SimpleNamespace(sample_seed=lambda *_: 1)
    role.config = SimpleNamespace(
        evaluation=SimpleNamespace(temperature=1.0), sampling=SimpleNamespace(max_new_tokens=4)
    )
    async with asyncio.timeout(5.0):
        for _ in range(2):
            texts = await role._generate([SimpleNamespace(tokens=[1])] * count)
            assert texts == [(f"[{number}]", True) for number in range(count)]
    assert role.engine.most == min(count, 8)
