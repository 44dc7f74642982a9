"""A real SGLang server whose cache has room for less than is asked of it: others are told that it is full until it has
emptied, and what is under way is whole although the server puts sequences aside."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import DEADLINE_S, reference, torch
from sglang_parts import make_engine, needs_server

from relax_rt.roles.rollout.generation import GenerationService
from relax_rt.roles.rollout.router.admission import CapLimits, EngineCap
from relax_rt.roles.rollout.router.interface import EngineReport, SequenceRequest, SequenceUpdate

pytestmark = [pytest.mark.engines, needs_server]

KV_TOKENS = 1024
PROMPT = tuple(range(20, 40))
SEQUENCES, NEW = 12, 180
"""Together 2,400 positions. Five have room for all that is to come of them: these end first, the cache full."""
MARKS = CapLimits(most=SEQUENCES + 1)


async def test_a_full_cache_accepts_nothing_until_it_has_emptied(
    conformance_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("k")
    engine = make_engine(conformance_model, folder, arguments={"max-total-tokens": KV_TOKENS})
    failed: list[BaseException] = []
    service = GenerationService(1, engine, asyncio.Event(), EngineCap(MARKS))
    try:
        await engine.start(lambda chunks: service.take_chunks(chunks) and None, failed.append)
        players = [asyncio.create_task(played(service, seed, NEW)) for seed in range(SEQUENCES)]
        begun = await told(service, lambda report: report.running == SEQUENCES)
        assert begun.room == 1 and begun.kv_used < MARKS.high

        shut = await told(service, lambda report: not report.room)
        assert shut.kv_used >= MARKS.high and shut.running > 1
        assert [piece.rejected for piece in await played(service, 99, 8)] == ["full"]
        assert service.cap.cap <= MARKS.shrink * SEQUENCES, "and fewer are to be under way from now on"

        emptied = await told(service, lambda report: report.room > 0)
        assert emptied.kv_used <= MARKS.low and emptied.running > 0
        check(conformance_model, await played(service, 99, 8), 8)
        for player in players:
            check(conformance_model, await player, NEW)
        assert not failed
    finally:
        await engine.close(10.0)


async def played(service: GenerationService, seed: int, new: int) -> list[SequenceUpdate]:
    """A sequence of so many tokens."""
    order = SequenceRequest(prompt=list(PROMPT), seed=seed, max_new_tokens=new, allowed=[0])
    return [piece async for piece in service.generate(order)]


async def told(service: GenerationService, condition: Callable[[EngineReport], bool]) -> EngineReport:
    """What it says of itself once that holds."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition(report := await service.load()):  # noqa: ASYNC110 what it looks at tells nobody
            await asyncio.sleep(0.01)
    return report


def check(model: Path, pieces: list[SequenceUpdate], new: int) -> None:
    """A sequence is whole, each token with the log-probability that a plain forward pass gives it."""
    tokens = [token for piece in pieces for token in piece.tokens]
    got = [logprob for piece in pieces for logprob in piece.logprobs]
    assert (len(tokens), pieces[-1].finish_reason) == (new, "length")
    wanted = reference(model, 0, PROMPT, tokens, 1.0)
    torch.testing.assert_close(torch.tensor(got), wanted, atol=1e-4, rtol=0)
