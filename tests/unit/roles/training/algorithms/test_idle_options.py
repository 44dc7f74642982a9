"""Settings of [algorithm] that no part makes use of, or that could not act, are refused where they were written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_rt.roles.config.algorithm_checks import check_algorithm
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.training.algorithms.settings import PRESETS
from relax_rt.roles.training.backend.settings import CriticSettings

HERE: dict[str, Any] = {"critic": CriticSettings(), "reference": None}
PROXIMAL = {"name": "ppo_clip", "ratio_to": "proximal"}


def problems(keys: dict[str, Any], roles: dict[str, Any] | None = None) -> dict[str, tuple[str, str]]:
    """Message and hint of each problem of an algorithm table, by its place."""
    config = RLConfig.model_validate(
        {
            "run": {"name": "x"},
            "model": {"path": "m"},
            "data": {"path": "d"},
            "reward": {"function": "f.py:f"},
            "algorithm": keys,
            "config_dir": str(Path.cwd()),
        }
    )
    config = config.model_copy(update={"roles": HERE if roles is None else roles})
    return {".".join(map(str, p.path)): (p.message, p.hint) for p in check_algorithm(config)}


@pytest.mark.parametrize("name", PRESETS)
def test_no_preset_refuses_itself(name: str) -> None:
    assert problems({"name": name}) == {}


NO_OPTION = [
    *(({"loss": loss}, key) for loss in ("m2po", "sapo") for key in ("clip_low", "clip_high")),
    ({"loss": "policy_gradient", "corrections": ["tis"]}, "clip_high"),
    ({"name": "sft"}, "clip_low"),
    ({"name": "dpo"}, "clip_low"),
    *(({"advantage": one}, "normalise_std") for one in ("rloo", "gae", "reinforce_pp", "reinforce_pp_baseline")),
    ({"name": "distillation"}, "normalise_std"),
    ({"name": "dpo"}, "normalise_std"),
]


@pytest.mark.parametrize(("table", "key"), NO_OPTION, ids=str)
def test_what_the_chosen_part_has_no_option_for(table: dict[str, Any], key: str) -> None:
    value = False if key == "normalise_std" else 0.3
    assert problems(table) == {}, "it is the key that is refused"
    ((place, (message, hint)),) = problems({**table, key: value}).items()
    assert place == f"algorithm.{key}" and "has no such option" in message
    assert ("turn_grpo" if key == "normalise_std" else "dual_clip") in hint


def test_what_the_part_s_own_table_overrides() -> None:
    loss = {"name": "ppo_clip", "clip_low": 0.1}
    ((place, (message, hint)),) = problems({"loss": loss, "clip_low": 0.3}).items()
    assert place == "algorithm.clip_low" and "has its own in its table" in message and "take it out there" in hint
    assert problems({"loss": loss, "clip_high": 0.3}) == {}


def test_a_user_s_loss_that_does_not_ask_for_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def loss(tokens, options):\n    return -tokens.logprobs, {}\n")
    ((place, (message, _)),) = problems({"loss": f"{file}:loss", "clip_low": 0.3}).items()
    assert place == "algorithm.clip_low" and "has no such option" in message
    assert problems({"loss": {"name": f"{file}:loss", "clip_low": 0.3}}) == {}


@pytest.mark.parametrize(
    ("keys", "place"),
    [
        ({"clip_low": 0.1}, "algorithm.clip_low"),
        ({"clip_high": 0.2}, "algorithm.clip_high"),
        ({"name": "ppo", "clip_high": 0.2}, "algorithm.clip_high"),
        ({"loss": {"name": "decoupled_ppo", "clip_high": 0.2}}, "algorithm.loss.clip_high"),
        ({"loss": PROXIMAL, "clip_low": 0.2}, "algorithm.clip_low"),
        ({"loss": {**PROXIMAL, "name": "dual_clip", "dual_clip": 4.0}}, "algorithm.loss.dual_clip"),
        ({"loss": {**PROXIMAL, "name": "cispo", "clip_high": 3.0}}, "algorithm.loss.clip_high"),
        ({"loss": {**PROXIMAL, "name": "sapo", "tau_negative": 2.0}}, "algorithm.loss.tau_negative"),
        ({"name": "gspo", "updates_per_step": 1, "clip_low": 1e-3}, "algorithm.clip_low"),
    ],
    ids=str,
)
def test_bounds_of_a_ratio_that_is_always_one(keys: dict[str, Any], place: str) -> None:
    ((found, (message, hint)),) = problems(keys).items()
    assert found == place and "no effect with updates_per_step = 1" in message and "to 2 or more" in hint
    assert problems({**keys, "updates_per_step": 2}) == {}


@pytest.mark.parametrize(
    "keys",
    [
        {"loss": "ppo_clip", "clip_low": 0.1, "clip_high": 0.3},
        {"name": "dapo", "clip_high": 0.3},
        {"name": "cispo", "clip_high": 3.0},
        {"name": "gspo", "clip_low": 1e-3},
        {"loss": {"name": "decoupled_ppo", "weight_cap": 2.0}},
        {"loss": {"name": "sapo", "tau_positive": 2.0}},
        {"normalise_std": False},
        {"advantage": {"name": "grpo", "std_of": "batch"}},
        {"truncated": "zero_reward"},
        {"name": "distillation", "truncated": "mask"},
        {"name": "distillation", "truncated": "none"},
        {"corrections": ["rejection"]},
    ],
    ids=str,
)
def test_what_has_an_effect_passes(keys: dict[str, Any]) -> None:
    assert problems(keys) == {}


@pytest.mark.parametrize(
    ("keys", "place", "message"),
    [
        (
            {"advantage": {"name": "grpo", "std_of": "batch", "normalise_std": False}},
            "algorithm.advantage.std_of",
            "no effect with normalise_std = false",
        ),
        (
            {"advantage": {"name": "grpo", "std_of": "group"}, "normalise_std": False},
            "algorithm.advantage.std_of",
            "no effect with normalise_std = false",
        ),
        ({"name": "distillation", "truncated": "zero_reward"}, "algorithm.truncated", "changes the reward"),
        ({"name": "sft", "truncated": "soft_penalty"}, "algorithm.truncated", "advantage 'none' does not look at it"),
        ({"name": "process_grpo", "truncated": "zero_reward"}, "algorithm.truncated", "changes the reward"),
        ({"name": "dpo", "corrections": ["tis"]}, "algorithm.corrections.0", "loss 'dpo' is of a pair as a whole"),
        ({"name": "sft", "corrections": ["rejection"]}, "algorithm.corrections.0", "completions as they are given"),
    ],
    ids=str,
)
def test_what_nobody_looks_at(keys: dict[str, Any], place: str, message: str) -> None:
    ((found, (why, hint)),) = problems(keys).items()
    assert found == place and message in why and "leave" in hint


def test_a_critic_s_clip_acts_from_the_second_update_on() -> None:
    roles = {"critic": CriticSettings(value_clip=0.1)}
    ((place, (message, _)),) = problems({"name": "ppo"}, roles).items()
    assert place == "roles.critic.value_clip" and "no effect with algorithm.updates_per_step = 1" in message
    assert problems({"name": "ppo", "updates_per_step": 4}, roles) == {}
    assert problems({"name": "ppo"}, {"critic": CriticSettings(value_clip=0.0)}) == {}


@pytest.mark.parametrize(
    ("keys", "place", "message"),
    [
        ({"updates_per_step": 5, "prompts_per_step": 4}, "algorithm.updates_per_step", "more than prompts_per_step"),
        ({"name": "gspo", "prompts_per_step": 2}, "algorithm.updates_per_step", "4 (preset 'gspo') is more than"),
        ({"updates_per_step": 2, "streaming": True}, "algorithm.streaming", "when all of them are there"),
        ({"updates_per_step": 2, "name": "m2po"}, "algorithm.updates_per_step", "loss 'm2po' decides by the weights"),
    ],
    ids=str,
)
def test_updates_that_cannot_be(keys: dict[str, Any], place: str, message: str) -> None:
    ((found, (why, _)),) = problems(keys).items()
    assert found == place and message in why
    assert problems({**keys, "updates_per_step": 1}) == {}
