"""[roles.reference]: when it must be there, when it must not, and which model it may name."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from fresh_model import save_fresh
from job_config import ROLES_TOML, problems

pytest.importorskip("torch")

from relax_rt.config.job import PlanLine
from relax_rt.config.loader import load_config
from relax_rt.roles.config.checks import sample_bytes
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.job.job import RLJob
from relax_rt.roles.planning.estimate import model_size
from relax_rt.roles.training.backend.settings import ReferenceSettings

HERE, KL = "roles.reference.count=1", 'algorithm.kl={name="k3", coefficient=0.1}'


@pytest.fixture(scope="module")
def toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    save_fresh(folder / "model")
    save_fresh(folder / "larger", characters="äöü")
    save_fresh(folder / "other")
    core = json.loads((folder / "other/tokenizer.json").read_text())
    words = core["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    (folder / "other/tokenizer.json").write_text(json.dumps(core))
    save_fresh(folder / "short")
    config = json.loads((folder / "short/config.json").read_text())
    (folder / "short/config.json").write_text(json.dumps({**config, "max_position_embeddings": 16}))
    path = folder / "roles.toml"
    path.write_text(ROLES_TOML.format(dir=folder))
    return path


@pytest.mark.parametrize("algorithm", [KL, 'algorithm.name="dpo"', 'algorithm.name="distillation"'])
def test_it_must_be_there_where_it_is_needed(toml: Path, algorithm: str) -> None:
    (problem,) = problems(toml, algorithm).values()
    assert "the run has no reference role" in problem.message and "[roles.reference]" in problem.hint
    assert problems(toml, algorithm, HERE) == {}
    (problem,) = problems(toml, algorithm, "roles.reference.count=0").values()
    assert "for ever" in problem.message


def test_it_must_not_be_there_where_nothing_needs_it(toml: Path) -> None:
    found = problems(toml, HERE)
    assert list(found) == ["roles.reference"] and "nothing in [algorithm] needs" in found["roles.reference"].message


def test_it_is_a_pool_and_has_one_backend(toml: Path) -> None:
    assert problems(toml, KL, "roles.reference.count=2") == {}
    found = problems(toml, KL, HERE, 'roles.reference.backend="megatron"')
    assert "only planned" in found["roles.reference.backend"].message
    assert list(problems(toml, KL, HERE, "roles.reference.tensor_parallel=2")) == ["roles.reference.tensor_parallel"]
    assert "did you mean 'model'" in problems(toml, KL, HERE, 'roles.reference.modle="x"')["roles.reference.modle"].hint


def test_training_waits_for_it_where_it_is(toml: Path) -> None:
    with_it, without = load_config(toml, (KL, HERE)), load_config(toml)
    assert isinstance(with_it, RLConfig) and isinstance(without, RLConfig)
    assert isinstance(with_it.roles["reference"], ReferenceSettings)
    tasks = RLJob().ledger_policy(with_it).tasks
    assert set(tasks) == {"reward", "reference", "train"} and "reference_logprobs" in tasks["train"]
    assert "reference_logprobs" not in tasks["reference"]
    plain = RLJob().ledger_policy(without).tasks
    assert set(plain) == {"reward", "train"} and "reference_logprobs" not in plain["train"]
    assert sample_bytes(with_it) - sample_bytes(without) == 4 * (512 + 8)
    (line,) = (line for line in RLJob().plan(with_it) if line.name == "reference" and "memory" in line.section)
    assert "float32" in line.how


def test_the_plan_has_the_teacher_s_memory_and_says_what_it_cannot_know(toml: Path) -> None:
    def line(name: str, *overrides: str) -> PlanLine:
        config = load_config(toml, (KL, HERE, *overrides))
        (found,) = (line for line in RLJob().plan(config) if line.name == name and "memory" in line.section)
        return found

    assert "of larger" in line("reference", 'roles.reference.model="larger"').how
    unknown = line("reference", 'roles.reference.model="nowhere"')
    assert unknown.value == "unknown" and "nowhere cannot be read" in unknown.how
    cold = ("cold_start.answers=true", "cold_start.max_tokens=5000")
    parameters = model_size("model", toml.parent)
    found = line("trainer, cold start", *cold)
    assert "5000 tokens" in found.how and found.value == f"{math.ceil(5000 * parameters.vocabulary * 14 / 2**20)} MiB"
    assert "of each GPU" in line("rollout", 'roles.rollout.engine="sglang"', "roles.rollout.gpus=1").value


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("modle", "roles.reference.model = 'modle': there is no folder"),
        ("other", "another vocabulary than the policy's: 'a', token"),
        ("short", "the context of the model in"),
    ],
)
def test_a_model_that_cannot_judge_the_policy_is_refused(toml: Path, model: str, words: str) -> None:
    found = problems(toml, KL, f'roles.reference.model="{model}"', preflight=True)
    assert list(found) == ["roles.reference.model"]
    assert words in found["roles.reference.model"].message


def test_a_model_with_further_tokens_may_judge_and_one_with_fewer_not(toml: Path) -> None:
    assert problems(toml, KL, 'roles.reference.model="larger"', preflight=True) == {}
    found = problems(toml, KL, 'model.path="larger"', 'roles.reference.model="model"', preflight=True)
    assert "'ä', token 102 of the policy, is not there" in found["roles.reference.model"].message


def test_a_critic_is_there_where_values_are_needed_and_only_there(toml: Path) -> None:
    ppo, here = ('algorithm.name="ppo"', "algorithm.group_size=1"), "roles.critic.count=1"
    assert "has no critic role" in problems(toml, *ppo)["algorithm.advantage"].message
    assert problems(toml, *ppo, here) == {}
    assert "nothing in [algorithm] needs the values" in problems(toml, here)["roles.critic"].message
    for count in (0, 2):
        assert list(problems(toml, *ppo, f"roles.critic.count={count}")) == ["roles.critic.count"]
    assert "only planned" in problems(toml, *ppo, 'roles.critic.backend="megatron"')["roles.critic.backend"].message
    config = load_config(toml, (*ppo, here))
    assert set(RLJob().ledger_policy(config).tasks) == {"reward", "train"}
    assert any(line.name == "critic" and "memory" in line.section for line in RLJob().plan(config))
