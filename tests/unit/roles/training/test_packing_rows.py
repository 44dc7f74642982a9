"""Sequences one behind the other in a row: the numbers of each alone, no attention between them, and no padding."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from small_backend import torch_backend, without_updates

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from packing_samples import SAMPLES, make_sample  # noqa: E402
from packing_ways import APART, MASKED, WAYS, exactly, gradients_alone, load_exactly  # noqa: E402

from relax_rt.roles.base.sample import Sample  # noqa: E402
from relax_rt.roles.training.algorithms.objective import Objective  # noqa: E402
from relax_rt.roles.training.algorithms.settings import AlgorithmTable  # noqa: E402
from relax_rt.roles.training.backend.settings import (  # noqa: E402
    CriticSettings,
    TrainerSettings,
)
from relax_rt.roles.training.batch.attention import (  # noqa: E402
    NAME,
    packing_costs,
)
from relax_rt.roles.training.batch.collate import collate  # noqa: E402
from relax_rt.roles.training.batch.rows import Costs, SampleRow, plan_micro_batches, shared_rows  # noqa: E402  # noqa: E402
from relax_rt.roles.training.critic.model import CriticModel  # noqa: E402
from relax_rt.roles.training.open_backend import _cannot_pack  # noqa: E402
from relax_rt.roles.training.reference.model import FrozenModel  # noqa: E402
from relax_rt.roles.training.torch.backend import TorchBackend  # noqa: E402
from relax_rt.transport.rpc.errors import Refused  # noqa: E402

TEMPERATURE = 0.8
TABLES: list[dict[str, Any]] = [
    {"name": "sft"},
    {"name": "dpo"},
    {"name": "grpo"},
    {"name": "gspo"},
    {"kl": {"name": "unbiased", "coefficient": 0.3}, "entropy": {"name": "bonus", "coefficient": 0.2}},
]
PARTS = [
    make_sample(5, 0, [1, 2, 3], [4, 5, 6, 7], [1, 0, 0, 1]),
    make_sample(5, 1, [1, 2, 3, 4, 9], [10, 11]),
    make_sample(5, 2, [1, 2, 8], [12]),
]
COLUMNS = ("tokens", "loss_mask", "behaviour_logprobs", "advantages", "proximal_logprobs", "reference_logprobs")
PACKED = {name: costs for name, costs in WAYS.items() if costs is not None}


def episode() -> Sample:
    """Branches of one sample."""
    ends = np.cumsum([0, *(len(part.tokens) for part in PARTS)]).tolist()
    meta = msgspec.structs.replace(PARTS[0].meta, branches=list(itertools.pairwise(ends)))
    return Sample(
        meta=meta,
        versions=[],
        reward=0.5,
        **{name: np.concatenate([getattr(part, name) for part in PARTS]) for name in COLUMNS},
    )


def backend(model_dir: Path, costs: Costs | None, budget: int = 4096, **table: Any) -> TorchBackend:
    """One whose update is left out."""
    found = without_updates(
        torch_backend(model_dir, budget=budget, temperature=TEMPERATURE, learning_rate=1e-3, **table)
    )
    assert found.costs is not None, "the model's attention can"
    found.costs = costs
    return found


def batch(table: dict[str, Any]) -> tuple[Objective, list[Sample]]:
    samples = copy.deepcopy(SAMPLES)
    objective = Objective.of(AlgorithmTable(**table))
    objective.advantages(samples)
    # An episode has its own already.
    return objective, samples if "pairs" in objective.needs else [*samples, episode()]


@pytest.fixture(scope="session")
def sparse_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Qwen3-MoE of two layers and 64 words."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
    )
    folder: Path = tmp_path_factory.mktemp("sparse")
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def hold(folder: Path, table: dict[str, Any], costs: Costs | None, budget: int, atol: float = 1e-12) -> None:
    """Gradients in float64 against those of sequences computed alone by transformers' own attention."""
    objective, samples = batch(table)
    wanted = gradients_alone(load_exactly(folder), objective, samples, TEMPERATURE)
    assert max(float(gradient.abs().max()) for gradient in wanted.values()) > 1e-4
    trainer = backend(folder, costs, budget, **table)
    exactly(trainer._model)
    assert trainer.step(samples, 1).applied
    for name, parameter in trainer._model.named_parameters():
        assert parameter.grad.dtype == torch.float64
        torch.testing.assert_close(parameter.grad, wanted[name], atol=atol, rtol=1e-9, msg=name)


@pytest.mark.parametrize("budget", [16, 4096])
@pytest.mark.parametrize("costs", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("table", TABLES, ids=str)
def test_gradients_are_those_of_each_sequence_alone(
    model_dir: Path, table: dict[str, Any], costs: Costs | None, budget: int
) -> None:
    hold(model_dir, table, costs, budget)


@pytest.mark.parametrize("costs", PACKED.values(), ids=PACKED)
def test_experts_make_no_difference(sparse_dir: Path, costs: Costs) -> None:
    # Their gates are rounded to float32.
    hold(sparse_dir, {"name": "grpo"}, costs, 4096, atol=1e-8)


@pytest.mark.parametrize("costs", WAYS.values(), ids=WAYS)
def test_log_probabilities_are_the_same_to_the_last_digits_of_float64(model_dir: Path, costs: Costs | None) -> None:
    _, samples = batch({"name": "grpo"})
    trainers = [backend(model_dir, costs), backend(model_dir, None, budget=1)]  # each row alone
    for trainer in trainers:
        exactly(trainer._model)
    for found, wanted in zip(*(trainer.log_probabilities(samples) for trainer in trainers), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)  # they are given as float32
        assert found.any()


@pytest.mark.parametrize("costs", PACKED.values(), ids=PACKED)
@pytest.mark.parametrize("changed", range(len(SAMPLES) + 1))
def test_no_sequence_sees_another(model_dir: Path, costs: Costs, changed: int) -> None:
    _, samples = batch({"name": "grpo"})
    trainer = backend(model_dir, costs)
    before = trainer.log_probabilities(samples)
    one = samples[changed]
    at = one.meta.branches[1][0] + 3 if one.meta.branches else one.prompt_length
    one.tokens[at] = 63 - one.tokens[at]
    after = trainer.log_probabilities(samples)
    for index, (first, then) in enumerate(zip(before, after, strict=True)):
        if index != changed:
            np.testing.assert_array_equal(first, then)
    assert not np.array_equal(before[changed], after[changed])
    if one.meta.branches:
        # Nor does a branch see another.
        for number, (start, end) in enumerate(one.meta.branches):
            assert np.array_equal(before[changed][start:end], after[changed][start:end]) == (number != 1)


def test_critic_and_reference_compute_the_same(model_dir: Path) -> None:
    _, samples = batch({"name": "grpo"})
    returns = [np.sin(s.tokens).astype(np.float32) * s.loss_mask for s in samples]
    found: list[tuple[Any, ...]] = []
    for costs in WAYS.values():
        reference = FrozenModel(model_dir, dtype="float32", threads=1, budget=4096, temperature=TEMPERATURE)
        critic = CriticModel(model_dir, CriticSettings(dtype="float32", learning_rate=1e-2), lambda _: None)
        assert reference._costs is not None and critic._costs is not None
        reference._costs = critic._costs = costs
        old = critic.values(samples)
        report = critic.learn(samples, old, returns)
        found.append((reference.log_probabilities(samples), critic.values(samples), report.grad_norm))
    for logprobs, values, norm in found[1:]:
        for wanted, ours in zip((*found[0][0], *found[0][1]), (*logprobs, *values), strict=True):
            np.testing.assert_allclose(ours, wanted, atol=2e-5)
        assert norm == pytest.approx(found[0][2], rel=1e-5)


def test_a_row_has_no_padding_and_positions_of_each_sequence() -> None:
    rows = shared_rows(SAMPLES, 4096)
    for costs in (APART, MASKED):
        found = collate(rows, costs=costs)
        assert found.ids.shape == found.positions.shape == (1, 12 + 6 + 10) and found.mask is None
        assert found.ids[0, 12:18].tolist() == [20, 21, 22, 23, 24, 25]
        assert found.positions[0, 12:18].tolist() == [0, 1, 2, 3, 1, 2]
        assert found.ids[0, found.predict_at].tolist()[:3] == [4, 5, 4]  # what is before 5, 6 and 7
        assert found.segments is not None and sum(one.length for one in found.segments) == 28
    assert [(one.length, one.after) for one in collate(rows, costs=APART).segments or []] == [
        *((4, -1), (2, 0), (1, 0), (5, 0)),
        *((1, -1), (3, 4), (2, 4)),
        *((2, -1), (5, 7), (3, 7)),
    ]
    assert [one.length for one in collate(rows, costs=MASKED).segments or []] == [12, 6, 10]


def lengths(*several: int) -> list[SampleRow]:
    """A row of each length."""
    return shared_rows([make_sample(n, 0, [1], [2] * (length - 1)) for n, length in enumerate(several)], 4096)


@pytest.mark.parametrize(
    ("rows", "packs"),
    [([20] * 8, False), ([400, 380, 30, 20, 10, 10], True), ([20, 19, 18, 17], False), ([4096], True)],
    ids=["all alike", "uneven", "about alike", "no mask"],
)
def test_the_cheaper_way_is_taken(rows: list[int], packs: bool) -> None:
    costs = Costs(pair=1e-3, call=4.0)
    found = plan_micro_batches(lengths(*rows), 4096, costs)
    assert {one.costs is not None for one in found} == {packs}
    assert all(one.costs is None for one in plan_micro_batches(lengths(*rows), 4096, None))


def test_a_call_that_costs_much_is_not_made_for_a_few_tokens() -> None:
    rows = lengths(400, 380, 30, 20, 10, 10)
    assert all(one.costs is None for one in plan_micro_batches(rows, 4096, Costs(pair=1e-3, call=1000.0)))


@pytest.mark.parametrize("whole_groups", [False, True])
@pytest.mark.parametrize("costs", WAYS.values(), ids=WAYS)
def test_a_micro_batch_is_within_the_budget_and_leaves_nothing_out(costs: Costs | None, whole_groups: bool) -> None:
    random = np.random.default_rng(1)
    tails = random.integers(1, 40, 60)
    samples = [make_sample(n // 2, n % 2, [1 + n % 2], [5] * int(tail)) for n, tail in enumerate(tails)]
    rows = shared_rows(samples, 64)
    found = plan_micro_batches(rows, 100, costs, whole_groups=whole_groups)
    assert sorted(map(id, rows)) == sorted(id(row) for one in found for row in one.rows)
    assert all(one.tokens <= 100 for one in found)
    if costs is not None:
        assert all(one.tokens == sum(row.length for row in one.rows) for one in found)
        fewest = -(-sum(row.length for row in rows) // 100)
        assert len(found) <= (1.5 if whole_groups else 1.1) * fewest + 1
    if whole_groups:
        groups = [{row.members[0][1].meta.group for row in one.rows} for one in found]
        assert sum(map(len, groups)) == 30


def falcon(folder: Path) -> Path:
    """A model whose attention is its own, and hands nothing on."""
    torch.manual_seed(0)
    config = transformers.FalconConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        alibi=False,
        bias=False,
    )
    transformers.FalconForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_model_whose_attention_cannot_is_padded_and_stays_as_it_was(tmp_path: Path) -> None:
    folder = falcon(tmp_path)
    objective, samples = batch({"name": "grpo"})
    trainer = TorchBackend(
        folder,
        AlgorithmTable(name="grpo", learning_rate=1e-3, max_grad_norm=1e9),
        dtype="float32",
        threads=1,
        tokens_per_micro_batch=4096,
        temperature=TEMPERATURE,
        on_progress=lambda _: None,
    )
    assert trainer.costs is None and trainer._model.config._attn_implementation == "sdpa"
    trainer._optimizer.step = lambda *a, **k: None  # type: ignore[method-assign]
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    wanted = gradients_alone(plain, objective, samples, TEMPERATURE)
    assert trainer.step(samples, 1).applied
    for name, parameter in trainer._model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], atol=2e-6, rtol=2e-4, msg=name)


@pytest.mark.parametrize("widths", [{"intermediate_size": [64, 128]}, {"hidden_size": None}], ids=str)
def test_a_model_whose_layers_have_no_one_size_is_padded(model_dir: Path, widths: dict[str, Any]) -> None:
    layers = transformers.AutoModelForCausalLM.from_pretrained(model_dir).get_decoder()
    assert packing_costs(layers, torch.device("cpu")) is not None
    before = layers.config._attn_implementation = "sdpa"
    told = SimpleNamespace(**{**layers.config.to_dict(), "_attn_implementation": before, **widths})
    layers.config = told
    assert packing_costs(layers, torch.device("cpu")) is None and told._attn_implementation == "sdpa"


@pytest.mark.parametrize("error", [KeyError("sliding_attention"), IndexError("layer 7")], ids=str)
def test_a_model_that_stumbles_over_the_probe_is_padded(
    model_dir: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = transformers.AutoModelForCausalLM.from_pretrained(model_dir).get_decoder()

    def stumbles(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(layers, "forward", stumbles)
    assert packing_costs(layers, torch.device("cpu")) is None


def test_packing_that_is_required_of_such_a_model_is_refused() -> None:
    said: list[str] = []
    ctx: Any = SimpleNamespace(log=SimpleNamespace(warning=lambda text, **_: said.append(text)))
    table = TrainerSettings(packing="required")
    with pytest.raises(Refused, match=r"roles.trainer.packing.*cannot have several sequences in a row.*Qwen3"):
        _cannot_pack(ctx, table)
    assert not said
    _cannot_pack(ctx, TrainerSettings())
    assert len(said) == 1 and "padded" in said[0]


def test_the_model_is_given_attention_in_segments(model_dir: Path) -> None:
    assert backend(model_dir, APART)._model.config._attn_implementation == NAME
