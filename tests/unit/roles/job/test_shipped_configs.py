"""The configs that ship: they load, their data is what they say, and their rewards order completions rightly."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from relax_rt.config.job import load_job
from relax_rt.config.loader import load_config
from relax_rt.roles.config import checks as config_checks
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.data.gym import GymTask
from relax_rt.roles.data.source import fill_template
from relax_rt.roles.job.job import RLJob
from relax_rt.roles.rewards.library.functions import load_reward
from relax_rt.roles.rewards.scoring import parse_score
from relax_rt.roles.rollout.engines.settings import RolloutSettings

ROOT = Path(__file__).resolve().parents[4]
QUICKSTART, SGLANG_CPU = ROOT / "examples/quickstart/roles.toml", ROOT / "examples/sglang_cpu/roles.toml"
CONFIGS = [QUICKSTART, SGLANG_CPU, ROOT / "tests/tiny_job/roles.toml"]
RUN_HERE = sorted(path for path in ROOT.glob("examples/*/roles.toml") if not (path.parent / "nodes.toml").exists())
"""Those with an inventory are planned for other machines (test_plan_examples)."""


@pytest.fixture(params=CONFIGS, ids=lambda path: path.parent.name)
def config(request: pytest.FixtureRequest) -> RLConfig:
    found = load_config(request.param)
    assert isinstance(found, RLConfig)
    return found


def test_it_loads_and_plans(config: RLConfig) -> None:
    RLJob().ledger_policy(config).check()
    assert RLJob().plan(config)


@pytest.mark.parametrize("path", RUN_HERE, ids=lambda path: path.parent.name)
def test_every_example_that_runs_here_has_keys_that_there_are_and_parts_that_fit(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Extras that an example names need not be installed to check its keys.
    monkeypatch.setattr(config_checks, "find_spec", lambda name: name)
    config = load_config(path)
    if isinstance(config, RLConfig):
        RLJob().ledger_policy(config).check()
    assert load_job(config.run.job).plan(config)


def test_its_questions_are_many_and_fill_the_template(config: RLConfig) -> None:
    assert config.data.task is not None
    task = GymTask(config.data.task, config.data.options, config.data.size)
    raws = {raw.question: raw for raw in task.items()}.values()
    assert len(raws) > (1500 if config.run.name == "tiny" else 5000)
    texts = {fill_template(config.data.template, raw) for raw in raws}
    assert len(texts) == len(raws)


def test_its_reward_prefers_the_right_answer(config: RLConfig) -> None:
    function = load_reward(config.reward.function, Path(config.config_dir))

    def reward(completion: str, finish_reason: str = "stop") -> float:
        return parse_score(function.call(completion, "46", {"finish_reason": finish_reason})).total

    assert reward("46") == pytest.approx(1.0)
    assert reward("46") > reward("45") >= reward("3") >= reward("it is 46") == 0.0
    assert reward("46", finish_reason="length") == 0.0
    assert reward("") == reward("\u0664\u0666") == 0.0


def test_the_quickstart_with_sglang_differs_by_its_engine_alone() -> None:
    ours, theirs = ([line.split("#")[0].rstrip() for line in path.read_text().splitlines()] for path in CONFIGS[:2])
    changes = [line for line in difflib.ndiff(ours, theirs) if line[0] in "+-"]
    elsewhere = ['- name = "quickstart"', '+ name = "sglang-cpu"']
    elsewhere += ['- function = "reward.py:score"', '+ function = "../quickstart/reward.py:score"']
    assert changes == [*elsewhere, '+ engine = "sglang"']


def test_a_role_has_the_time_that_its_server_takes_to_start() -> None:
    def rollout(*overrides: str) -> RolloutSettings:
        table = load_config(SGLANG_CPU, [f"roles.rollout.{one}" for one in overrides]).roles["rollout"]
        assert isinstance(table, RolloutSettings)
        return table

    table = rollout()
    assert table.start_timeout_s is not None and table.start_timeout_s > table.sglang.boot_timeout_s
    assert rollout("sglang.boot_timeout_s=900").start_timeout_s == 960
    assert rollout("start_timeout_s=700").start_timeout_s == 700
    assert rollout('engine="embedded"').start_timeout_s is None
    slow = load_config(SGLANG_CPU, ["supervision.start_timeout_s=2000"]).roles["rollout"]
    assert slow.start_timeout_s == 2000
