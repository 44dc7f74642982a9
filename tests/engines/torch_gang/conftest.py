"""Gangs of the torch backend's ranks, and the models that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
pytest.register_assert_rewrite("gang_gradients", "gang_harness", "gang_publication")


@pytest.fixture(scope="session")
def torch_gang() -> Iterator[Callable[[int], object]]:
    """A gang of so many ranks, started once."""
    from gang_harness import Gang

    started: dict[int, Gang] = {}

    def of(world: int) -> Gang:
        if world not in started:
            started[world] = Gang(world, HERE / "torch_work.py")
        return started[world]

    yield of
    for one in started.values():
        one.close()


@pytest.fixture(scope="session")
def shared_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a small model: dense with tied embeddings, or with experts."""
    import torch
    import transformers
    from gang_harness import VOCABULARY

    made: dict[str, Path] = {}
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 24, "decoder_sparse_step": 1}

    def of(family: str) -> Path:
        if family not in made:
            torch.manual_seed(7)
            if family == "experts":
                config: Any = transformers.Qwen3MoeConfig(**common, **experts)
                model: Any = transformers.Qwen3MoeForCausalLM(config)
            else:
                config = transformers.Qwen3Config(**common, tie_word_embeddings=True)
                model = transformers.Qwen3ForCausalLM(config)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.05)
            made[family] = tmp_path_factory.mktemp(family)
            model.save_pretrained(made[family])
        return made[family]

    return of
