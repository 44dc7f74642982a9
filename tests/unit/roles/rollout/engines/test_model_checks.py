"""Checks of engines that need the model: rows of dense models, and what SGLang computes differently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from relax_rt.roles.agentic.settings import EnvSettings
from relax_rt.roles.config.engine_checks import check_engines
from relax_rt.roles.config.model_checks import check_engine_model, engine_warnings
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.data.settings import DataTable
from relax_rt.roles.evaluation.settings import EvaluatorSettings
from relax_rt.roles.rollout.engines.settings import RolloutSettings, SamplingTable

MOE = {
    "model_type": "qwen3_moe", "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 128,
    "num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip
PATH = ("roles", "rollout", "routing")


def config(capacity_mib: int = 1024, new: int = 256, marks_mib: int = 4096, **rollout: Any) -> RLConfig:
    whole = {
        "run": {"name": "r"},
        "model": {"path": "model"},
        "data": {"task": "chain_sum"},
        "reward": {"function": "r.py:r"},
        "sampling": {"max_new_tokens": new},
        "queue": {"capacity_mib": capacity_mib, "marks_mib": marks_mib},
    }
    made = RLConfig.model_validate(whole)
    object.__setattr__(made, "roles", {"rollout": RolloutSettings.model_validate(rollout)})
    assert isinstance(made.data, DataTable) and isinstance(made.sampling, SamplingTable)
    return made


def problems(folder: Path, values: dict[str, Any], **settings: Any) -> dict[tuple[str | int, ...], str]:
    (folder / "config.json").write_text(json.dumps(values))
    return {p.path: p.message for p in check_engine_model(config(**settings), folder)}


def test_routing_rows_need_experts(tmp_path: Path) -> None:
    assert problems(tmp_path, MOE, routing=True) == {}
    dense = {**MOE, "model_type": "qwen3"}
    assert problems(tmp_path, dense) == {}
    assert "it is dense" in problems(tmp_path, dense, routing=True)[PATH]
    assert "it is dense" in problems(tmp_path, {**MOE, "mlp_only_layers": [0, 1, 2]}, routing=True)[PATH]
    assert "how it routes is not known" in problems(tmp_path, {**MOE, "model_type": "mixtral"}, routing=True)[PATH]


def test_the_queue_must_hold_routing_rows(tmp_path: Path) -> None:
    said = problems(tmp_path, {**MOE, "num_hidden_layers": 48, "num_experts_per_tok": 8}, routing=True)
    assert "768 bytes a token, up to 589824 a sample" in said[PATH]
    assert problems(tmp_path, {**MOE, "num_hidden_layers": 48}, capacity_mib=65_536, routing=True) == {}


def test_models_that_sglang_computes_differently_are_refused(tmp_path: Path) -> None:
    place = ("roles", "rollout", "engine")
    tied, mixed = {**MOE, "tie_word_embeddings": True}, {**MOE, "mlp_only_layers": [1]}
    assert problems(tmp_path, MOE, engine="sglang", routing=True) == {}
    assert "all its logits are zero" in problems(tmp_path, tied, engine="sglang")[place]
    assert "none in layer 1" in problems(tmp_path, mixed, engine="sglang")[place]
    assert problems(tmp_path, tied) == problems(tmp_path, mixed, routing=True) == {}
    assert problems(tmp_path, {**tied, "model_type": "qwen3"}, engine="sglang") == {}


def test_an_evaluator_on_sglang_is_checked_as_well(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**MOE, "tie_word_embeddings": True}))
    made = config()
    evaluator = EvaluatorSettings.model_validate({"engine": "sglang"})
    object.__setattr__(made, "roles", {**made.roles, "evaluator": evaluator})
    (problem,) = check_engine_model(made, tmp_path)
    assert problem.path == ("roles", "evaluator", "engine") and "all its logits are zero" in problem.message


def playing(made: RLConfig, **env: Any) -> RLConfig:
    """The same with episodes."""
    table = EnvSettings.model_validate({"environment": "game.py:Game", "tasks": 9, **env})
    object.__setattr__(made, "roles", {**made.roles, "env": table})
    return made


def test_rows_of_episodes_must_fit_into_messages(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**MOE, "num_hidden_layers": 48, "num_experts_per_tok": 8}))

    def said(new: int, **env: Any) -> list[str]:
        made = playing(config(1 << 20, new, routing=True), **env)
        assert not list(check_engines(made))
        found = list(check_engine_model(made, tmp_path))
        assert all(problem.path == PATH and problem.hint for problem in found)
        return [problem.message for problem in found]

    # 768 bytes a row: 64 MiB hold an episode of 80 thousand tokens, 32 MiB a reply of 43 thousand.
    assert said(256) == said(43_690, max_tokens=80_659) == []
    (message,) = said(256, max_tokens=80_660)
    assert "768 bytes a token" in message and "roles.env.max_tokens = 80660 is above 80659" in message
    (message,) = said(43_691, max_tokens=80_000)
    assert "32 MiB at most: sampling.max_new_tokens = 43691 is above 43690" in message


def test_rows_of_many_long_episodes_are_warned_of(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**MOE, "num_hidden_layers": 48, "num_experts_per_tok": 8}))
    # Nor is anything of episodes journaled: what is said of marks does not hold for them.
    assert not list(engine_warnings(playing(config(new=4096, routing=True), max_tokens=8192), tmp_path))
    (said,) = engine_warnings(playing(config(routing=True), max_tokens=8192, episodes_in_flight=512), tmp_path)
    assert "768 bytes a token the 512 episodes" in said and "may have 3072 MiB" in said
    assert not list(engine_warnings(playing(config(), max_tokens=8192, episodes_in_flight=512), tmp_path))


def test_a_journal_without_room_is_reported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**MOE, "num_hidden_layers": 48, "num_experts_per_tok": 8}))
    (said,) = engine_warnings(config(new=4096, routing=True), tmp_path)
    assert "keeps the first 2702 tokens" in said
    (said,) = engine_warnings(config(new=1000, marks_mib=32, routing=True, groups_in_flight=8), tmp_path)
    assert "the 64 sequences in flight may have 48 MiB" in said and "marks_mib = 32" in said
    assert not list(engine_warnings(config(new=2702, routing=True), tmp_path))
    assert not list(engine_warnings(config(new=4096), tmp_path))
    assert not list(engine_warnings(config(new=4096, routing=True, journal_every_tokens=0), tmp_path))
