"""A user's own part that fails in a run: the trainer ends with it, and no prompt is set aside for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from trainer_parts import GROUPS, SOON_S, Lives, lives_of, model_with_tokenizer  # noqa: E402

from relax_rt.config.problems import BadInput  # noqa: E402
from relax_rt.roles.training.algorithms.registry import UserPartFailed  # noqa: E402
from relax_rt.supervision.diagnosis import classify_exception  # noqa: E402
from relax_rt.transport.queue.client import QueueClient  # noqa: E402
from relax_rt.transport.queue.ledger.policy import QueueLimits  # noqa: E402
from relax_rt.transport.rpc.identity import Incarnation  # noqa: E402

MINE = """
def raises(*given):
    return given[-1].factor
"""


def told_gone(engine: QueueClient, who: Incarnation, seq: int) -> Awaitable[None]:
    return engine.api.process_exited(seq, who, "it failed")


@pytest.fixture
async def lives(tmp_path: Path) -> AsyncIterator[Lives]:
    async with lives_of(tmp_path) as found:
        yield found


@pytest.mark.parametrize(
    "algorithm",
    [
        {"advantage": "mine.py:raises"},
        {"loss": "mine.py:raises"},
        {"loss": "mine.py:raises", "streaming": True},
        {"corrections": ["mine.py:raises"]},
        {"filters": ["mine.py:raises"]},
        {"advantage": "mine.py:raises", "updates_per_step": 2},
    ],
    ids=str,
)
async def test_its_failure_costs_no_prompt(
    lives: Lives, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: dict[str, Any]
) -> None:
    model = model_with_tokenizer(model_dir, tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    lives.most = 2 * GROUPS
    engine = lives.world.engine
    async with asyncio.timeout(SOON_S):
        for _ in range(QueueLimits().quarantine_after + 1):
            with pytest.raises(
                UserPartFailed, match=rf"has no attribute 'factor' at {tmp_path / 'mine.py'}:3"
            ) as caught:
                await lives.life(model, steps=1, **algorithm)
            assert classify_exception(caught.value) == "config"
            # As the supervisor says when the process has ended.
            await engine._call(partial(told_gone, engine, lives.who))
        account = await lives.world.account()
        assert not [state for state in account if "dropped" in state or "quarantined" in state], account
        # Mended, it trains on what came first.
        ctx = await lives.life(model, steps=1)
    assert ctx.told("training_finished") and (await lives.world.account())["freed"] == 2 * GROUPS


@pytest.mark.parametrize(
    "algorithm", [{"loss": "mine.py:gone"}, {"filters": ["mine.py:gone"]}, {"sampler": "mine.py:gone"}], ids=str
)
async def test_one_that_is_not_there_any_more_ends_the_run(
    lives: Lives, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: dict[str, Any]
) -> None:
    model = model_with_tokenizer(model_dir, tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    async with asyncio.timeout(SOON_S):
        with pytest.raises(BadInput, match="gone") as caught:
            await lives.life(model, steps=1, **algorithm)
    assert classify_exception(caught.value) == "config"
