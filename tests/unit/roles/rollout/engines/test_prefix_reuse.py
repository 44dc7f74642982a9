"""Prompts with a common prefix: positions that go through the model, counted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from harness import Driver, Traits, torch

from relax_rt.roles.rollout.engines.decoder import Decoder
from relax_rt.roles.rollout.engines.embedded import EmbeddedEngine
from relax_rt.roles.rollout.engines.kv_cache import Fill

NEW = 6
NEVER: frozenset[int] = frozenset()


class Counted:
    """Positions that an engine's passes compute, prompts and decoding apart."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.filled = self.decoded = 0
        fill, forward = Decoder._fill_pass, Decoder._forward

        def counted_fill(decoder: Decoder, fills: list[Fill]) -> object:
            self.filled += sum(len(one.tokens) for one in fills)
            return fill(decoder, fills)

        def counted_forward(decoder: Decoder, ids: torch.Tensor, *rest: object, **more: object) -> torch.Tensor:
            if ids.shape[1] == 1 and "segments" in more:
                self.decoded += ids.numel()
            return forward(decoder, ids, *rest, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(Decoder, "_fill_pass", counted_fill)
        monkeypatch.setattr(Decoder, "_forward", counted_forward)

    def take(self) -> tuple[int, int]:
        """Since the last time."""
        found, self.filled, self.decoded = (self.filled, self.decoded), 0, 0
        return found


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


@pytest.fixture(params=[4096, 0], ids=["prompts kept", "none kept"])
def positions(request: pytest.FixtureRequest) -> int:
    """Of prompts that are kept for others."""
    kept: int = request.param
    return kept


@pytest_asyncio.fixture
async def driver(conformance_model: Path, positions: int) -> AsyncIterator[Driver]:
    engine = EmbeddedEngine(conformance_model, dtype="float32", max_sequences=12, threads=1, prefix_positions=positions)
    yield await Driver(engine, conformance_model, Traits()).start()
    await engine.close(10.0)


async def test_a_prompt_is_computed_once_and_prefixes_are_shared(
    driver: Driver, counted: Counted, positions: int
) -> None:
    prompt, other = [*range(20, 84)], [*range(20, 52), *range(90, 118), 7, 8, 9, 10]

    async def made(prompt: list[int], members: int) -> int:
        """Positions of the prompt that were computed for a group."""
        asked = driver.request(prompt, members, new=NEW, stop_ids=NEVER)
        for completion in await driver.complete(asked):
            driver.check(asked, completion)
        filled, decoded = counted.take()
        # The first token is of the prompt's pass.
        assert decoded == members * (NEW - 1)
        return filled

    assert await made(prompt, 8) == 64
    assert await made(other, 8) == (32 if positions else 64)
    # The last position is always computed: a token is sampled from it.
    assert await made(prompt, 2) == (1 if positions else 64)

    source = driver.source()
    await driver.engine.prepare(source)
    await driver.engine.commit(source.record, "keep")
    assert await made(prompt, 2) == 64, "what older weights computed is of no use"


async def test_resumed_members_share_their_prompt(driver: Driver, counted: Counted) -> None:
    prompt = [*range(20, 84)]
    asked, source = driver.request(prompt, 4, new=200, stop_ids=NEVER), driver.source()
    driver.submit(asked)
    await driver.tokens(40)
    counted.take()
    await driver.engine.prepare(source)
    swap = await driver.engine.commit(source.record, "recompute")
    done = await driver.finished(asked)
    filled, _ = counted.take()
    # The prompt once, and of each member what it had but for its newest token, which comes with its step.
    assert filled == swap.recomputed_tokens == 64 + sum(c.versions[0].end - 1 for c in done)
