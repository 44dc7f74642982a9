"""Models that trainer and embedded engine would compute in part only are refused when they are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from relax_rt.roles.config.model_checks import check_computed  # noqa: E402
from relax_rt.roles.config.sections import RLConfig  # noqa: E402
from relax_rt.roles.models.forward import check_forward  # noqa: E402
from relax_rt.roles.rollout.engines.decoder import Decoder  # noqa: E402
from relax_rt.roles.rollout.engines.settings import RolloutSettings  # noqa: E402
from relax_rt.roles.training.algorithms.settings import AlgorithmTable  # noqa: E402
from relax_rt.roles.training.backend.settings import TrainerSettings  # noqa: E402
from relax_rt.roles.training.torch.backend import TorchBackend  # noqa: E402
from relax_rt.transport.rpc.errors import Refused  # noqa: E402

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
}


def model(kind: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SHAPE, **settings)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Qwen3", {}),
        ("Qwen2", {"sliding_window": 64, "use_sliding_window": False}),
        ("Llama", {"tie_word_embeddings": True}),
        ("Mistral", {"sliding_window": None}),
        ("Mistral", {"sliding_window": 128}),
        ("Granite", {"logits_scaling": 1.0}),
    ],
)
def test_full_attention_and_plain_logits_are_taken(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    check_forward(model(kind, **settings), tmp_path)


@pytest.mark.parametrize(
    ("kind", "settings", "why"),
    [
        ("Mistral", {"sliding_window": 64}, "sliding_window = 64 is below the context of 128"),
        (
            "Qwen2",
            {"sliding_window": 64, "use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
            "sliding_window = 64",
        ),
        ("Granite", {"logits_scaling": 8.0}, "logits_scaling = 8.0"),
        ("Gemma2", {"final_logit_softcapping": 30.0}, "softcapping"),
    ],
)
def test_what_would_be_left_out_is_refused(kind: str, settings: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=why):
        check_forward(model(kind, **settings), tmp_path)


def test_a_setting_that_nobody_knows_shows_in_the_logits(tmp_path: Path) -> None:
    odd = model("Qwen3")
    odd.register_forward_hook(lambda _, args, out: transformers.modeling_outputs.CausalLMOutput(logits=out.logits / 2))
    with pytest.raises(Refused, match="logits differ"):
        check_forward(odd, tmp_path)


def test_engine_and_trainer_refuse_it_when_they_load_it(tmp_path: Path) -> None:
    model("Granite", logits_scaling=8.0).save_pretrained(tmp_path)
    with pytest.raises(Refused, match="logits_scaling"):
        Decoder(tmp_path, dtype="float32", max_sequences=2, prefix_positions=0)
    with pytest.raises(Refused, match="logits_scaling"):
        TorchBackend(
            tmp_path,
            AlgorithmTable(steps=1),
            dtype="float32",
            threads=1,
            tokens_per_micro_batch=64,
            temperature=1.0,
            on_progress=lambda _: None,
        )


def test_a_model_without_what_the_engine_asks_for_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2)
    with pytest.raises(Refused, match="its config has no max_position_embeddings"):
        check_forward(transformers.BloomForCausalLM(config).eval(), tmp_path)
    run = RLConfig.model_validate(
        {"run": {"name": "x"}, "model": {"path": "m"}, "data": {"path": "d"}, "reward": {"function": "f.py:f"}}
    )
    engine, trainer = RolloutSettings(), TrainerSettings()
    run = run.model_copy(update={"roles": {"rollout": engine, "trainer": trainer}})
    config.save_pretrained(tmp_path)
    (problem,) = check_computed(run, tmp_path)
    assert problem.path == ("model", "path") and "no max_position_embeddings" in problem.message
    assert "Qwen3" in problem.hint
    transformers.Qwen3Config(**SHAPE).save_pretrained(tmp_path)
    assert not list(check_computed(run, tmp_path))
