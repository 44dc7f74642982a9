"""Runs with a reference: real processes, real model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_run import TinyRun, steps_that_count

from relax_rt.roles.models.resolve import resolve_model

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.integration

PROMPTS = [f"<|user|>{a} + {b} =<|end|><|assistant|>" for a in range(12, 90, 7) for b in range(15, 80, 9)]


@pytest.fixture
def start(tmp_path: Path, runs: list[TinyRun]) -> Any:
    """Starts a run of the tiny job; whatever is left of it is ended here."""

    def begin(reward: str = "", **overrides: Any) -> TinyRun:
        config = None
        if reward:
            shutil.copytree(Path(__file__).parent.parent / "tiny_job", tmp_path / "job")
            (tmp_path / "job" / "reward.py").write_text(f"def right(completion, answer):\n    return {reward}\n")
            config = tmp_path / "job" / "roles.toml"
        given = {"roles.reference.dtype": '"float32"', "roles.evaluator.count": 0, **overrides}
        runs.append(TinyRun(tmp_path / "run", *([config] if config else []), **given).start())
        return runs[-1]

    return begin


def model_of(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def final(run: TinyRun, steps: int) -> Any:
    return model_of(run.run_dir / "checkpoints" / f"step-{steps:06d}")


def first_tokens(model: Any) -> Any:
    """Log-probabilities of the first answered token of each prompt, [prompts, vocabulary]."""
    tokenizer = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(resolve_model("package:tiny", Path()))
    with torch.no_grad():
        rows = [
            model(torch.tensor([tokenizer(p, add_special_tokens=False)["input_ids"]])).logits[0, -1] for p in PROMPTS
        ]
    return torch.log_softmax(torch.stack(rows), -1)


def divergence(policy: Any, teacher: Any) -> float:
    """KL(policy, teacher) of the first answered token, nats, mean over prompts."""
    ours, theirs = first_tokens(policy), first_tokens(teacher)
    return float((ours.exp() * (ours - theirs)).sum(-1).mean())


def test_the_distance_to_the_reference_is_measured_from_the_start_and_its_death_costs_nothing(start: Any) -> None:
    steps = 24
    run = start(
        **{"algorithm.steps": steps, "algorithm.kl": '{ name = "k2", coefficient = 0.01 }', "roles.reference.batch": 16}
    )
    run.kill("reference/0")
    assert run.wait() == 0, run.text()
    path = steps_that_count(run.records("step"))
    assert sorted(path) == list(range(1, steps + 1))
    # The first step's weights are the reference's, by the same numerics: k2 is the square of nothing.
    assert path[1]["kl_reference"] < 1e-9
    assert path[steps]["kl_reference"] > 1e-5
    keys = [key for record in path.values() for key in record["keys"]]
    assert len(set(keys)) == len(keys) == 64 * steps
    judged = run.records("reference")
    assert sum(record["samples"] for record in judged) > 0 and not any(record["failed"] for record in judged)
    assert {e["slot"] for e in run.events("slot_exited") if e["diagnosis"]["signal"] == "SIGKILL"} == {"reference/0"}


def noisy(folder: Path) -> Path:
    """The tiny model with other answers: a teacher."""
    shutil.copytree(resolve_model("package:tiny", Path()), folder)
    model = model_of(folder)
    with torch.no_grad():
        torch.manual_seed(3)
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter += 0.4 * parameter.std() * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


@pytest.mark.long
def test_distillation_comes_nearer_to_its_teacher(start: Any, tmp_path: Path) -> None:
    steps, teacher = 120, noisy(tmp_path / "teacher")
    run = start(
        **{
            "algorithm.name": '"distillation"',
            "algorithm.group_size": 1,
            "algorithm.prompts_per_step": 64,
            "algorithm.steps": steps,
            "algorithm.learning_rate": 1e-3,
            "checkpoint.every_steps": 40,
            "roles.reference.model": json.dumps(str(teacher)),
        }
    )
    assert run.wait() == 0, run.text()
    before = divergence(model_of(resolve_model("package:tiny", Path())), model_of(teacher))
    after = divergence(final(run, steps), model_of(teacher))
    assert before > 0.05, "the teacher says what the policy says already: the test tells nothing"
    assert after < 0.6 * before


@pytest.mark.long
def test_dpo_prefers_what_is_rewarded(start: Any) -> None:
    steps = 40
    run = start(
        "float(sum(c in '13579' for c in completion))",
        **{
            "algorithm.name": '"dpo"',
            "algorithm.steps": steps,
            "algorithm.learning_rate": 1e-3,
            "checkpoint.every_steps": steps,
        },
    )
    assert run.wait() == 0, run.text()
    path = steps_that_count(run.records("step"))
    rewards = [path[step]["reward_mean"] for step in range(1, steps + 1)]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.2, rewards
    # At the first step chosen and rejected are as likely as the reference has them.
    assert path[1]["loss"] == pytest.approx(np.log(2), abs=1e-3)
