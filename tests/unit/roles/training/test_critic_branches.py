"""The critic sees each branch of an episode on its own, as the policy did."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from packing_samples import SAMPLES, make_sample  # noqa: E402

from relax_rt.roles.base.sample import Sample  # noqa: E402
from relax_rt.roles.training.backend.settings import CriticSettings  # noqa: E402
from relax_rt.roles.training.critic.client import (  # noqa: E402
    CriticClient,
    CriticSample,
    TrainingPosition,
)
from relax_rt.roles.training.critic.model import CriticModel  # noqa: E402
from relax_rt.roles.training.critic.role import CriticService  # noqa: E402
from relax_rt.transport.rpc.errors import Refused  # noqa: E402

PARTS = [make_sample(5, 0, [1, 2, 3], [4, 5, 6, 7], [1, 0, 0, 1]), make_sample(5, 1, [1, 2, 8], [12, 13])]


def joined() -> Sample:
    ends = np.cumsum([0, *(len(part.tokens) for part in PARTS)]).tolist()
    meta = msgspec.structs.replace(PARTS[0].meta, branches=list(itertools.pairwise(ends)), turn_order=[0, 1, 2])
    columns: Any = {
        name: np.concatenate([getattr(part, name) for part in PARTS])
        for name in ("tokens", "loss_mask", "behaviour_logprobs")
    }
    return Sample(meta=meta, versions=[], **columns)


def model(model_dir: Path) -> CriticModel:
    made = CriticModel(model_dir, CriticSettings(dtype="float32", learning_rate=1e-2, value_clip=0.0), lambda _: None)
    # Values that differ from place to place.
    made.learn(SAMPLES, made.values(SAMPLES), [np.sin(s.tokens).astype(np.float32) * s.loss_mask for s in SAMPLES])
    return made


async def test_values_and_a_step_are_those_of_branches_apart(model_dir: Path) -> None:
    critics = [model(model_dir), model(model_dir)]
    for critic in critics:
        for parameter in critic._model.parameters():
            parameter.grad = None
    service = CriticService(critics[0], lambda _: None, lambda *_: None)

    async def peer(slot: str, api: type, *, timeout_s: float) -> CriticService:
        return service

    who, silent = SimpleNamespace(epoch=1), SimpleNamespace(waiting=lambda _: None)
    link = CriticClient(SimpleNamespace(who=who, run_dir=model_dir, peer=peer, progress=silent))  # type: ignore[arg-type]
    service._at = TrainingPosition(1, 0)
    whole = [copy.deepcopy(SAMPLES[0]), joined()]
    await link.compute_values(whole, 0)
    apart = critics[1].values([SAMPLES[0], *PARTS])
    assert whole[1].values is not None and whole[1].values.any()
    np.testing.assert_allclose(whole[1].values, np.concatenate(apart[1:]), atol=1e-6)
    returns = [np.cos(s.tokens).astype(np.float32) * s.loss_mask for s in (SAMPLES[0], *PARTS)]
    await link.learn(whole, [returns[0], np.concatenate(returns[1:])], 0)
    report = critics[1].learn([SAMPLES[0], *PARTS], apart, returns)
    assert service._last is not None and service._last.loss == pytest.approx(report.loss, rel=1e-5)
    for one, other in zip(critics[0]._model.parameters(), critics[1]._model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-6, rtol=1e-4)


async def test_branches_that_are_not_the_tokens_are_refused(model_dir: Path) -> None:
    service = CriticService(model(model_dir), lambda _: None, lambda *_: None)
    service._at = TrainingPosition(1, 0)
    whole = joined()
    for branches in ([(0, 7)], [(0, 6), (7, 12)], [(1, 7), (7, 12)]):
        piece = CriticSample(5, whole.tokens.tobytes(), whole.loss_mask.tobytes(), branches)
        with pytest.raises(Refused, match="are not its tokens"):
            await service.values(TrainingPosition(1, 0), 0, [piece])
