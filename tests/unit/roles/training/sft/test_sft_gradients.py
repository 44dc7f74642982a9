"""One gradient, however the sequences of a step are packed: that of each computed alone, by the formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sft_parts import config_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from relax_rt.roles.models.tokenizer import load_tokenizer  # noqa: E402
from relax_rt.roles.training.algorithms.objective import Objective  # noqa: E402
from relax_rt.roles.training.sft.data import SftItem, encode_texts, sft_samples, split_conversation  # noqa: E402  # noqa: E402
from relax_rt.roles.training.sft.phase import phase_algorithm  # noqa: E402
from relax_rt.roles.training.torch.backend import TorchBackend  # noqa: E402

BUDGETS = (16, 90, 4096)
BETA = 0.3


def items(home: Path, *, pairs: bool) -> list[SftItem]:
    """Conversations of any length, some of several turns; two share their prompt."""
    made = load_tokenizer(home / "model")
    found = []
    for number in range(7):
        messages: list[Any] = [{"role": "user", "content": "q" * (1 + 5 * (number % 3))}]
        if number % 2 and not pairs:
            messages += [{"role": "assistant", "content": "hm"}, {"role": "user", "content": "go on"}]
        said = ["a" * (1 + 3 * number), "b" * (8 - number)]
        texts = [split_conversation(made, messages, one, every_turn=not pairs) for one in said[: 2 if pairs else 1]]
        found.append(SftItem(tuple(encode_texts(made, texts))))
    return found


def logprobs(model: Any, tokens: Any) -> Any:
    """Of each token of one sequence computed alone, at temperature 1; [T], 0 for the first."""
    ids = torch.from_numpy(tokens.astype(np.int64))
    every = torch.log_softmax(model(ids[None]).logits[0, :-1], -1)
    return torch.cat([torch.zeros(1), every.gather(-1, ids[1:, None])[:, 0]])


def wanted_gradients(home: Path, loss_of: Any) -> dict[str, Any]:
    model = transformers.AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float32)
    loss_of(model).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def check(home: Path, kind: str, samples: list[Any], wanted: dict[str, Any]) -> None:
    config = config_of(home, 'cold_start.path="x.jsonl"', f'cold_start.kind="{kind}"', *_beta(kind))
    algorithm = phase_algorithm(config, 1).model_copy(update={"max_grad_norm": 1e9})
    assert max(float(gradient.abs().max()) for gradient in wanted.values()) > 1e-3
    for budget in BUDGETS:
        trainer = TorchBackend(
            home / "model",
            config.algorithm,
            dtype="float32",
            threads=1,
            tokens_per_micro_batch=budget,
            temperature=config.sampling.temperature,
            on_progress=lambda _: None,
        )
        objective = Objective.of(algorithm)
        trainer.use(objective, algorithm, temperature=1.0)
        trainer._optimizer.step = lambda *a, **k: None
        objective.advantages(samples)
        result = trainer.apply(trainer.accumulate(samples).count, 1)
        assert result.applied
        for name, parameter in trainer._model.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name], atol=3e-6, rtol=3e-4, msg=f"{budget} {name}")


def _beta(kind: str) -> list[str]:
    return [f"cold_start.beta={BETA}"] if kind == "dpo" else []


def test_supervised_steps_are_the_mean_cross_entropy_of_all_learnt_tokens(home: Path) -> None:
    rows = items(home, pairs=False)

    def loss(model: Any) -> Any:
        each = [logprobs(model, row.sequences[0].tokens)[row.sequences[0].mask != 0] for row in rows]
        return -torch.cat(each).mean()

    check(home, "sft", sft_samples(rows), wanted_gradients(home, loss))


def test_preference_steps_are_the_mean_loss_of_pairs(home: Path) -> None:
    rows = items(home, pairs=True)
    random = np.random.default_rng(0)
    reference = [
        [(-4 + random.normal(size=len(one.tokens)) * one.mask).astype(np.float32) * one.mask for one in row.sequences]
        for row in rows
    ]

    def loss(model: Any) -> Any:
        losses = []
        for row, before in zip(rows, reference, strict=True):
            gaps = [
                (logprobs(model, one.tokens) * torch.from_numpy(one.mask)).sum() - float(values.sum())
                for one, values in zip(row.sequences, before, strict=True)
            ]
            losses.append(-torch.nn.functional.logsigmoid(BETA * (gaps[0] - gaps[1])))
        return torch.stack(losses).mean()

    check(home, "dpo", sft_samples(rows, reference), wanted_gradients(home, loss))
