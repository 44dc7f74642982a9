"""The critic: it learns returns, one step is the same however it is cut, and it never trains beside another policy."""

from __future__ import annotations

import asyncio
import copy
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from packing_samples import SAMPLES  # noqa: E402

from relax_rt.roles.base.sample import Sample  # noqa: E402
from relax_rt.roles.training.algorithms.objective import Objective  # noqa: E402
from relax_rt.roles.training.algorithms.settings import AlgorithmTable  # noqa: E402
from relax_rt.roles.training.backend.settings import CriticSettings  # noqa: E402
from relax_rt.roles.training.critic import client as link_module  # noqa: E402
from relax_rt.roles.training.critic.client import (  # noqa: E402  # noqa: E402
    SKIPPED_IN_A_ROW,
    CriticClient,
    CriticReport,
    CriticSample,
    TrainingPosition,
)
from relax_rt.roles.training.critic.model import MODEL_FILE, CriticModel  # noqa: E402
from relax_rt.roles.training.critic.role import CriticService  # noqa: E402
from relax_rt.transport.rpc.errors import GivenUp, Refused, StaleEpoch  # noqa: E402


def critic(model_dir: Path, updates: int = 1, **settings: Any) -> CriticModel:
    given = {"dtype": "float32", "learning_rate": 1e-3, "value_clip": 0.0, **settings}
    return CriticModel(model_dir, CriticSettings(**given), lambda _: None, updates=updates)


def wanted(sample: Sample) -> Any:
    """Returns that can be learnt: of the token before."""
    before = np.concatenate([[0], sample.tokens[:-1]])
    return (np.sin(before) * sample.loss_mask).astype(np.float32)


RETURNS = [wanted(sample) for sample in SAMPLES]


def weights(model: CriticModel) -> dict[str, Any]:
    return {name: p.detach().clone() for name, p in model._model.named_parameters()}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_values_begin_as_nothing_and_become_the_returns(model_dir: Path) -> None:
    model = critic(model_dir, learning_rate=3e-3)
    old = model.values(SAMPLES)
    assert all(v.dtype == np.float32 and v.shape == s.tokens.shape for v, s in zip(old, SAMPLES, strict=True))
    assert not any(v.any() for v in old)
    reports = []
    for _ in range(60):
        reports.append(model.learn(SAMPLES, model.values(SAMPLES), RETURNS))
    assert reports[0].tokens == sum(int(s.loss_mask.sum()) for s in SAMPLES)
    assert reports[0].explained == pytest.approx(0.0, abs=1e-9) and reports[-1].explained > 0.9
    assert reports[-1].loss < 0.1 * reports[0].loss
    for sample, values in zip(SAMPLES, model.values(SAMPLES), strict=True):
        assert not values[sample.loss_mask == 0].any()


def test_the_value_of_a_token_is_of_the_state_before_it(model_dir: Path) -> None:
    model = critic(model_dir)
    for _ in range(3):
        model.learn(SAMPLES, model.values(SAMPLES), RETURNS)
    one = copy.deepcopy(SAMPLES[2])
    (before,) = model.values([one])
    one.tokens[6] += 1
    (after,) = model.values([one])
    np.testing.assert_allclose(after[:7], before[:7], atol=1e-6)
    assert np.abs(after[7:] - before[7:]).min() > 1e-7
    # And it is what the layers and the head say there, computed plainly.
    with torch.no_grad():
        hidden = model._model.body(input_ids=torch.from_numpy(one.tokens.astype(np.int64))[None]).last_hidden_state
        plain = model._model.head(hidden)[0, :-1, 0].numpy()
    np.testing.assert_allclose(after[1:], plain * one.loss_mask[1:], atol=1e-6)


def test_a_step_is_the_same_however_it_is_cut(model_dir: Path) -> None:
    found = []
    for budget in (4096, 6):
        model = critic(model_dir, tokens_per_micro_batch=budget, value_clip=0.1, max_grad_norm=1e9)
        old = [np.full(len(s.tokens), 0.3, np.float32) for s in SAMPLES]
        report = model.learn(SAMPLES, old, RETURNS)
        found.append((report, {name: p.grad.clone() for name, p in model._model.named_parameters()}))
    (whole, one), (parts, other) = found
    assert whole.loss == pytest.approx(parts.loss, rel=1e-5) and whole.clipped == parts.clipped > 0
    for name, gradient in one.items():
        torch.testing.assert_close(other[name], gradient, rtol=1e-4, atol=1e-6)


def test_a_step_that_is_not_finite_is_updates_skipped(model_dir: Path) -> None:
    model = critic(model_dir)
    before = weights(model)
    spoiled = [np.where(s.loss_mask, np.nan, 0).astype(np.float32) for s in SAMPLES]
    report = model.learn(SAMPLES, model.values(SAMPLES), spoiled)
    assert not report.applied and same(weights(model), before)
    assert model.learn([], [], []).applied is False


def test_the_updates_of_a_step_are_those_of_its_groups(model_dir: Path) -> None:
    several, by_hand = critic(model_dir, 3, learning_rate=1e-2), critic(model_dir, learning_rate=1e-2)
    old = several.values(SAMPLES)
    report = several.learn(SAMPLES, old, RETURNS)
    found = []
    for group in range(3):
        at = [i for i, sample in enumerate(SAMPLES) if sample.meta.group == group]
        found.append(by_hand.learn([SAMPLES[i] for i in at], [old[i] for i in at], [RETURNS[i] for i in at]))
    assert same(weights(several), weights(by_hand)) and report.applied and report.updates_skipped == 0
    tokens = [one.tokens for one in found]
    assert report.tokens == sum(tokens)
    assert report.loss == pytest.approx(np.average([one.loss for one in found], weights=tokens))
    assert report.grad_norm == pytest.approx(np.mean([one.grad_norm for one in found]))
    assert report.value == pytest.approx(np.average([one.value for one in found], weights=tokens))
    one_update = critic(model_dir, learning_rate=1e-2)
    one_update.learn(SAMPLES, old, RETURNS)
    assert not same(weights(several), weights(one_update))


def test_values_are_held_to_those_before_the_step_in_its_later_updates(model_dir: Path) -> None:
    reports = []
    for updates in (1, 3):
        model = critic(model_dir, updates, learning_rate=0.05, value_clip=0.01)
        reports.append(model.learn(SAMPLES, model.values(SAMPLES), RETURNS))
    assert reports[0].clipped == 0 < reports[1].clipped


def test_an_update_that_is_not_finite_is_updates_skipped_and_the_others_are_taken(model_dir: Path) -> None:
    model, other = critic(model_dir, 3), critic(model_dir, 2)
    old = model.values(SAMPLES)
    spoilt = [
        np.full(len(s.tokens), np.nan, np.float32) if s.meta.group == 1 else r
        for s, r in zip(SAMPLES, RETURNS, strict=True)
    ]
    report = model.learn(SAMPLES, old, spoilt)
    assert report.applied and report.updates_skipped == 1 and np.isfinite([report.loss, report.grad_norm]).all()
    rest = [i for i, s in enumerate(SAMPLES) if s.meta.group != 1]
    other.learn([SAMPLES[i] for i in rest], [old[i] for i in rest], [RETURNS[i] for i in rest])
    assert same(weights(model), weights(other))


def test_a_critic_goes_on_from_what_it_wrote(model_dir: Path, tmp_path: Path) -> None:
    model, other = critic(model_dir), critic(model_dir)
    model.learn(SAMPLES, model.values(SAMPLES), RETURNS)
    model.snapshot()
    model.learn(SAMPLES, model.values(SAMPLES), RETURNS)
    (tmp_path / "a").mkdir()
    model.write(tmp_path / "a")
    other.restore(tmp_path / "a")
    other.learn(SAMPLES, other.values(SAMPLES), RETURNS)
    assert same(weights(model), weights(other))
    with pytest.raises(Refused, match="critic of checkpoint"):
        other.restore(tmp_path)
    (tmp_path / "a" / MODEL_FILE).write_bytes(b"short")
    with pytest.raises(Refused, match="critic of checkpoint"):
        other.restore(tmp_path / "a")


class World:
    """A trainer's link to a critic that may be started again, without the wire."""

    def __init__(self, model_dir: Path, run_dir: Path) -> None:
        self.model_dir, self.run_dir = model_dir, run_dir
        self.reports: list[tuple[int, CriticReport]] = []
        self.start()

    def start(self) -> None:
        self.model = critic(self.model_dir)
        self.service = CriticService(
            self.model, lambda _: None, lambda step, report: self.reports.append((step, report))
        )

    def link(self, epoch: int) -> CriticClient:
        async def peer(slot: str, api: type, *, timeout_s: float) -> CriticService:
            assert slot == "critic/0"
            return self.service

        silent = SimpleNamespace(waiting=lambda _: None)
        ctx = SimpleNamespace(who=SimpleNamespace(epoch=epoch), run_dir=self.run_dir, peer=peer, progress=silent)
        return CriticClient(ctx)  # type: ignore[arg-type]

    async def step(self, link: CriticClient, step: int) -> None:
        samples = copy.deepcopy(SAMPLES)
        await link.compute_values(samples, step)
        await link.learn(samples, RETURNS, step)


async def test_trainer_and_critic_go_through_steps_and_checkpoints_together(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "CALL_BYTES", 60)
    world = World(model_dir, tmp_path)
    link = world.link(1)
    await link.begin(0, None)
    samples = copy.deepcopy(SAMPLES)
    await link.compute_values(samples, 0)
    for sample, values in zip(samples, world.model.values(SAMPLES), strict=True):
        np.testing.assert_array_equal(sample.values, values)
    await link.learn(samples, [*RETURNS[:-1], None], 0)
    ((number, report),) = world.reports
    assert number == 1 and report.tokens == sum(int(s.loss_mask.sum()) for s in SAMPLES[:-1])
    await world.step(link, 1)
    await link.snapshot(2)
    at_two = weights(world.model)
    await world.step(link, 2)
    files = await link.write(2)
    files.rename(tmp_path / "checkpoint")
    assert {path.name for path in (tmp_path / "checkpoint").iterdir()} >= {MODEL_FILE}
    at_three = weights(world.model)
    # The trainer dies at step 3 and goes back to the checkpoint: so does the critic.
    link = world.link(2)
    await link.begin(2, tmp_path / "checkpoint")
    assert same(weights(world.model), at_two)
    await world.step(link, 2)
    assert same(weights(world.model), at_three)


@pytest.mark.parametrize("whole", [range(0), range(2, 3)], ids=["in a row", "with a good one between"])
async def test_too_many_steps_that_are_not_finite_end_the_run(model_dir: Path, tmp_path: Path, whole: range) -> None:
    world = World(model_dir, tmp_path)
    link = world.link(1)
    await link.begin(0, None)
    spoilt = [np.where(s.loss_mask, np.nan, 0).astype(np.float32) for s in SAMPLES]
    last = (max(whole) + 1 if whole else 0) + SKIPPED_IN_A_ROW - 1
    for step in range(last + 1):
        samples = copy.deepcopy(SAMPLES)
        await link.compute_values(samples, step)
        if step == last:
            with pytest.raises(GivenUp, match=f"{SKIPPED_IN_A_ROW} steps of the critic.*not finite") as caught:
                await link.learn(samples, spoilt, step)
            assert "roles.critic.learning_rate" in caught.value.hint
        else:
            await link.learn(samples, RETURNS if step in whole else spoilt, step)
    assert [report.applied for _, report in world.reports] == [step in whole for step in range(last + 1)]


async def test_steps_without_a_token_are_not_held_against_it(model_dir: Path, tmp_path: Path) -> None:
    world = World(model_dir, tmp_path)
    link = world.link(1)
    await link.begin(0, None)
    for step in range(SKIPPED_IN_A_ROW + 1):
        samples = copy.deepcopy(SAMPLES)
        await link.compute_values(samples, step)
        await link.learn(samples, [None] * len(samples), step)
    assert not any(report.applied for _, report in world.reports)


def test_dropout_is_off(model_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "with_dropout"
    shutil.copytree(model_dir, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.5}))
    found, reports = [], []
    for of in (model_dir, folder):
        model = critic(of)
        reports.append([model.learn(SAMPLES, model.values(SAMPLES), RETURNS) for _ in range(3)])
        found.append(model.values(SAMPLES))
    assert reports[0] == reports[1]
    for plain, ours in zip(*found, strict=True):
        np.testing.assert_array_equal(plain, ours)


async def test_a_critic_at_another_place_refuses(model_dir: Path, tmp_path: Path) -> None:
    world = World(model_dir, tmp_path)
    link, older = world.link(5), world.link(4)
    for _ in range(2):
        with pytest.raises(Refused, match="it is new, and the trainer at step 3"):
            await link.compute_values(copy.deepcopy(SAMPLES), 3)
        await link.begin(3, None)
        await world.step(link, 3)
        for wrong in (3, 5):
            with pytest.raises(Refused, match=f"it is at step 4 .* and the trainer at step {wrong}"):
                await link.compute_values(copy.deepcopy(SAMPLES), wrong)
        with pytest.raises(StaleEpoch):
            await older.begin(0, None)
        with pytest.raises(StaleEpoch):
            await older.compute_values(copy.deepcopy(SAMPLES), 4)
        # It is started again, and knows nothing.
        world.start()


async def test_calls_may_come_twice(model_dir: Path, tmp_path: Path) -> None:
    world = World(model_dir, tmp_path)
    at = TrainingPosition(1, 0)
    pieces = [CriticSample(s.meta.group, s.tokens.tobytes(), s.loss_mask.tobytes()) for s in SAMPLES]
    raw = [r.tobytes() for r in RETURNS]
    calls: list[Callable[[], Any]] = [
        lambda: world.service.begin(at, ""),
        lambda: world.service.values(at, 0, pieces),
        lambda: world.service.returns(at, 0, raw),
        lambda: world.service.learn(at),
    ]
    for call in calls:
        assert await call() == await call()
    assert [step for step, _ in world.reports] == [1]
    with pytest.raises(Refused, match="were asked for"):
        await world.service.returns(TrainingPosition(1, 1), 0, raw)
    await world.service.values(TrainingPosition(1, 1), 0, pieces)
    with pytest.raises(Refused, match="not all have returns"):
        await world.service.learn(TrainingPosition(1, 1))


class Slow:
    """A model whose work takes until it is let go on; says what begins and ends."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.begun, self.again, self.go_on = threading.Event(), threading.Event(), threading.Event()

    def _work(self, what: str) -> None:
        self.said.append(f"{what} begins")
        (self.again if self.begun.is_set() else self.begun).set()
        self.go_on.wait(120)
        self.said.append(f"{what} ends")

    def values(self, samples: list[Sample]) -> list[Any]:
        return [np.zeros(len(sample.tokens), np.float32) for sample in samples]

    def learn(self, *_: Any) -> CriticReport:
        self._work("learn")
        return CriticReport(True, 1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

    def write(self, folder: Path) -> None:
        self._work("write")

    def reset(self) -> None:
        self.said.append("reset")
        self.again.set()

    def snapshot(self) -> None:
        pass

    async def left_at_work(self, call: Callable[[], Any], *others: Callable[[], Any]) -> list[Any]:
        """The caller is gone in the middle of the work, and these come before its end."""
        first = asyncio.create_task(call())
        assert await asyncio.to_thread(self.begun.wait, 120)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        found = asyncio.gather(*(other() for other in others), return_exceptions=True)
        # Who does not wait for its end has time to show it.
        await asyncio.to_thread(self.again.wait, 0.2)
        self.go_on.set()
        return await found


async def test_a_step_whose_caller_is_gone_is_alone_to_its_end_and_done_once(tmp_path: Path) -> None:
    model: Any = Slow()
    service, at = CriticService(model, lambda _: None, lambda *_: None), TrainingPosition(1, 0)
    await service.begin(at, "")
    await service.values(
        at, 0, [CriticSample(s.meta.group, s.tokens.tobytes(), s.loss_mask.tobytes()) for s in SAMPLES]
    )
    await service.returns(at, 0, [r.tobytes() for r in RETURNS])
    model.again.clear()
    found = await model.left_at_work(
        lambda: service.learn(at), lambda: service.learn(at), lambda: service.begin(TrainingPosition(2, 0), "")
    )
    assert isinstance(found[0], CriticReport) and found[1] is None
    assert model.said == ["reset", "learn begins", "learn ends", "reset"]


async def test_a_write_whose_caller_is_gone_is_alone_in_its_folder(tmp_path: Path) -> None:
    model: Any = Slow()
    service, at = CriticService(model, lambda _: None, lambda *_: None), TrainingPosition(1, 0)
    await service.begin(at, "")
    await service.snapshot(at)
    model.again.clear()
    call: Callable[[], Any] = lambda: service.write(at, str(tmp_path))  # noqa: E731
    assert await model.left_at_work(call, call) == [None]
    assert model.said == ["reset", *["write begins", "write ends"] * 2]


async def test_a_critic_that_could_not_begin_is_nowhere(model_dir: Path, tmp_path: Path) -> None:
    world = World(model_dir, tmp_path)
    link = world.link(1)
    await link.begin(0, None)
    with pytest.raises(Refused, match="critic of checkpoint"):
        await link.begin(0, tmp_path)
    with pytest.raises(Refused, match="go back to the last checkpoint"):
        await link.compute_values(copy.deepcopy(SAMPLES), 0)
    await asyncio.wait_for(link.begin(0, None), 120)
    await world.step(link, 0)


def test_returns_are_what_values_should_have_been() -> None:
    samples = copy.deepcopy(SAMPLES)
    rng = np.random.default_rng(1)
    for sample in samples:
        sample.values = rng.normal(size=len(sample.tokens)).astype(np.float32)
    samples[1].meta = msgspec.structs.replace(samples[1].meta, truncated=True)
    table = AlgorithmTable(name="ppo", advantage={"name": "gae", "lam": 1.0, "whiten": False}, truncated="mask")
    objective = Objective.of(table)
    objective.advantages(samples)
    found = objective.returns(samples)
    assert found[1] is None
    for sample, returns in zip(samples, found, strict=True):
        if returns is not None:
            # With lam = gamma = 1 the return of each token is the reward at the end, whatever the values say.
            np.testing.assert_allclose(returns, sample.loss_mask * np.float32(sample.reward), atol=1e-5)
            assert sample.advantages is not None and sample.values is not None
            np.testing.assert_allclose(sample.advantages, (returns - sample.values) * sample.loss_mask, atol=1e-5)


OPTIONS = """
from relax_rt.roles.training.algorithms.advantages import GaeOptions, gae, gae_returns
from relax_rt.roles.training.algorithms.registry import part

@part("advantage", options=GaeOptions, needs={"values", "rewards"}, returns=gae_returns)
def mine(batch, options):
    return [2 * one for one in gae(batch, options)]
"""


def test_returns_are_by_the_options_of_a_users_advantage(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OPTIONS)
    samples = copy.deepcopy(SAMPLES)
    for sample in samples:
        sample.values = np.linspace(-1, 1, len(sample.tokens), dtype=np.float32)
    found = []
    for name in ("gae", "mine.py:mine"):
        options = {"name": name, "gamma": 0.5, "lam": 0.3, "whiten": False}
        objective = Objective.of(AlgorithmTable(name="ppo", advantage=options), base=tmp_path)
        objective.advantages(samples)
        found.append(objective.returns(samples))
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    by_default = Objective.of(AlgorithmTable(name="ppo")).returns(samples)
    assert any(np.abs(a - b).max() > 0.1 for a, b in zip(found[0], by_default, strict=True))
    with pytest.raises(Refused, match="a critic learns returns"):
        Objective.of(AlgorithmTable()).returns(samples)
