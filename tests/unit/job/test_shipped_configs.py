"""The configs that ship: they load, their data is what they say, and their rewards order completions rightly."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_rt.config.loader import load_config
from relax_rt.roles.data.gym import GymTask
from relax_rt.roles.data.source import distinct, fill
from relax_rt.roles.job import RLJob
from relax_rt.roles.rewards.loader import load_reward
from relax_rt.roles.rewards.scoring import read_score
from relax_rt.roles.sections import RLConfig

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = [ROOT / "examples/quickstart/roles.toml", ROOT / "tests/tiny_job/roles.toml"]


@pytest.fixture(params=CONFIGS, ids=lambda path: path.parent.name)
def config(request: pytest.FixtureRequest) -> RLConfig:
    found = load_config(request.param)
    assert isinstance(found, RLConfig)
    return found


def test_it_loads_and_plans(config: RLConfig) -> None:
    RLJob().ledger_policy(config).check()
    assert RLJob().plan(config)


def test_its_questions_are_many_and_fill_the_template(config: RLConfig) -> None:
    assert config.data.task is not None
    raws, _ = distinct(GymTask(config.data.task, config.data.options, config.data.size).items())
    assert len(raws) > (5000 if config.run.name == "quickstart" else 1500)
    texts = {fill(config.data.template, raw) for raw in raws}
    assert len(texts) == len(raws)


def test_its_reward_prefers_the_right_answer(config: RLConfig) -> None:
    function = load_reward(config.reward.function, Path(config.config_dir))

    def reward(completion: str, finish_reason: str = "stop") -> float:
        return read_score(function.call(completion, "46", {"finish_reason": finish_reason})).total

    assert reward("46") == pytest.approx(1.0)
    assert reward("46") > reward("45") >= reward("3") >= reward("it is 46") == 0.0
    assert reward("46", finish_reason="length") == 0.0
    assert reward("") == reward("\u0664\u0666") == 0.0
