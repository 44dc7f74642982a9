"""The objective as a whole: one gradient however a batch is cut, nothing from under the mask, presets, state."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from algorithm_samples import bound, sample, tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_rt.roles.base.sample import Sample
from relax_rt.roles.training.algorithms.advantages import apply_truncation, group_advantages
from relax_rt.roles.training.algorithms.inputs import TokenTensors, merge
from relax_rt.roles.training.algorithms.objective import Objective
from relax_rt.roles.training.algorithms.registry import UserPartFailed, parts
from relax_rt.roles.training.algorithms.settings import PRESETS, AlgorithmTable
from relax_rt.transport.rpc.errors import Refused

FEATURES, ACTIONS = 3, 7
COLUMNS = ("proximal", "reference")
LOSSES: list[dict[str, Any]] = [
    *({"loss": name} for name in ("ppo_clip", "dual_clip", "decoupled_ppo", "gspo", "cispo", "sapo", "m2po")),
    {"loss": "policy_gradient", "corrections": [{"name": "tis", "level": "sequence"}]},
    {"loss": "policy_gradient", "corrections": [{"name": "icepop", "low": 0.1}, {"name": "rejection", "low": 0.2}]},
    {"loss": {"name": "ppo_clip", "ratio_to": "proximal"}, "corrections": ["mis", "stale_sequences"]},
    {"kl": {"name": "unbiased", "coefficient": 0.5}, "entropy": {"name": "bonus", "coefficient": 0.1}},
    {"kl": {"name": "k3", "coefficient": 0.5}},
    {"loss": "sft", "advantage": "none"},
]
AGGREGATIONS: list[Any] = ["token_mean", "sequence_mean", {"name": "fixed_length", "length": 5}]


class Batch:
    """Samples of a linear policy: log pi(token) = log_softmax(features W)[token], so that gradients are of W."""

    def __init__(self, seed: int, groups: int = 3, members: int = 2) -> None:
        rng = np.random.default_rng(seed)
        self.samples: list[Sample] = []
        self.features: list[torch.Tensor] = []
        for index in range(groups * members):
            length = int(rng.integers(3, 8))
            mask = [0, *rng.integers(0, 2, length - 2), 1]
            columns = {name: -rng.random(length) - 0.5 for name in ("proximal_logprobs", "reference_logprobs")}
            one = sample(index // members, mask, float(rng.normal()), member=index % members, **columns)
            one.tokens = rng.integers(0, ACTIONS, length).astype(np.int32)
            one.behaviour_logprobs = (-(rng.random(length) + 0.5) * mask).astype(np.float32)
            self.samples.append(one)
            self.features.append(torch.from_numpy(rng.normal(size=(length, FEATURES))))

    def tokens(self, weights: torch.Tensor, chosen: list[int]) -> TokenTensors:
        """The trained tokens of some samples, in that order, as a backend would make them."""
        columns: dict[str, list[torch.Tensor]] = {}
        for place, index in enumerate(chosen):
            one = self.samples[index]
            at = torch.from_numpy(np.flatnonzero(one.loss_mask))
            scores = (self.features[index][at] @ weights).log_softmax(-1)
            found = {
                "logprobs": scores.gather(-1, torch.from_numpy(one.tokens.astype(np.int64))[at][:, None])[:, 0],
                "entropy": -(scores.exp() * scores).sum(-1),
                "sequence": torch.full((len(at),), place),
                "group": torch.full((len(at),), one.meta.group),
            }
            for name in ("behaviour_logprobs", "proximal_logprobs", "reference_logprobs", "advantages"):
                found[name.removesuffix("_logprobs")] = torch.from_numpy(getattr(one, name).astype(np.float64))[at]
            for name, values in found.items():
                columns.setdefault(name, []).append(values)
        joined = {name: torch.cat(values) for name, values in columns.items()}
        return TokenTensors(mask=torch.ones(len(joined["sequence"]), dtype=torch.bool), **joined)

    def gradient(self, objective: Objective, cut: list[list[int]]) -> tuple[torch.Tensor, dict[str, float]]:
        """Gradient of the batch in these micro-batches, divided once by the count, and the merged metrics."""
        weights = torch.linspace(-1, 1, FEATURES * ACTIONS, dtype=torch.float64).reshape(FEATURES, ACTIONS)
        weights.requires_grad_()
        metrics: dict[str, float] = {}
        for chosen in cut:
            loss, found = objective.loss(self.tokens(weights, chosen))
            loss.backward()
            merge(metrics, found)
        assert weights.grad is not None
        return weights.grad / objective.count(self.samples), metrics


@st.composite
def cuts(draw: st.DrawFn, count: int = 6) -> list[list[int]]:
    """Any order of the samples in any micro-batches, none of them empty."""
    order = draw(st.permutations(range(count)))
    ends = sorted(draw(st.sets(st.integers(1, count - 1), max_size=count - 1)))
    return [list(order[a:b]) for a, b in zip([0, *ends], [*ends, count], strict=True)]


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=str)
@pytest.mark.parametrize("table", LOSSES, ids=str)
@given(cut=cuts(), seed=st.integers(0, 3))
@settings(max_examples=4, deadline=None)
def test_any_split_into_micro_batches_gives_the_same_gradient(
    table: dict[str, Any], aggregation: Any, cut: list[list[int]], seed: int
) -> None:
    batch = Batch(seed)
    objective = Objective.of(AlgorithmTable(aggregation=aggregation, **table))
    objective.advantages(batch.samples)
    whole, sums = batch.gradient(objective, [list(range(6))])
    parted, parted_sums = batch.gradient(objective, cut)
    torch.testing.assert_close(parted, whole, rtol=1e-10, atol=1e-12)
    assert parted_sums == pytest.approx(sums, rel=1e-9, abs=1e-9)
    assert whole.abs().max() > 1e-6


@given(cut=cuts(3), seed=st.integers(0, 3))
@settings(max_examples=10, deadline=None)
def test_pairs_split_as_whole_groups(cut: list[list[int]], seed: int) -> None:
    batch = Batch(seed)
    objective = Objective.of(AlgorithmTable(name="dpo"))
    objective.advantages(batch.samples)
    whole, _ = batch.gradient(objective, [list(range(6))])
    parted, _ = batch.gradient(objective, [[m for g in groups for m in (2 * g, 2 * g + 1)] for groups in cut])
    torch.testing.assert_close(parted, whole, rtol=1e-10, atol=1e-12)
    assert objective.count(batch.samples) == 3


def test_counts_add_up_over_parts_of_a_batch() -> None:
    batch = Batch(0)
    for aggregation in (*AGGREGATIONS, "pair_mean"):
        objective = Objective.of(AlgorithmTable(name="dpo", aggregation=aggregation))
        objective.advantages(batch.samples)
        parts_ = [objective.count(batch.samples[a:b]) for a, b in ((0, 2), (2, 6), (6, 6))]
        assert sum(parts_) == objective.count(batch.samples) > 0
    assert Objective.of(AlgorithmTable()).count(batch.samples) == sum(int(s.loss_mask.sum()) for s in batch.samples)


@pytest.mark.parametrize("junk", [float("-inf"), float("nan")])
@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=str)
@pytest.mark.parametrize("table", [*LOSSES, {"name": "dpo"}], ids=str)
def test_what_stands_under_mask_zero_never_matters(table: dict[str, Any], aggregation: Any, junk: float) -> None:
    objective = Objective.of(AlgorithmTable(**{"aggregation": aggregation, **table}))
    clean = tokens([3, 2, 4], groups=[0, 0, 1])
    keep = torch.tensor([1, 0, 1, 1, 1, 0, 1, 1, 0], dtype=torch.bool)
    floating = ("logprobs", "behaviour", "advantages", "proximal", "reference", "entropy")
    plain = {name: getattr(clean, name).detach() for name in floating}
    dirty = {name: values.masked_fill(~keep, junk) for name, values in plain.items()}
    results = []
    for columns, chosen in ((dirty, slice(None)), ({n: v[keep] for n, v in plain.items()}, keep)):
        logprobs = columns.pop("logprobs").clone().requires_grad_()
        assert clean.group is not None
        found = TokenTensors(
            logprobs=logprobs,
            mask=keep[chosen],
            sequence=clean.sequence[chosen],
            group=clean.group[chosen],
            **columns,
        )
        loss, metrics = objective.loss(found)
        loss.backward()
        assert logprobs.grad is not None
        results.append((loss.item(), logprobs.grad[found.mask], metrics))
        assert not logprobs.grad[~found.mask].any()
    (loss_a, gradient_a, metrics_a), (loss_b, gradient_b, metrics_b) = results
    assert loss_a == pytest.approx(loss_b, rel=1e-12)
    torch.testing.assert_close(gradient_a, gradient_b)
    assert metrics_a == pytest.approx(metrics_b)


def test_a_ratio_beyond_all_numbers_leaves_a_finite_gradient() -> None:
    far = torch.tensor([-500.0, -0.1], requires_grad=True)
    given_ = TokenTensors(
        far, torch.tensor([-0.1, -500.0]), torch.tensor([1.0, 1.0]), torch.ones(2), torch.zeros(2, dtype=torch.int64)
    )
    loss, _ = Objective.of(AlgorithmTable()).loss(given_)
    loss.backward()
    assert far.grad is not None and bool(far.grad.isfinite().all())


def test_ppo_clip_is_bit_equal_to_the_clipped_loss_in_one_piece() -> None:
    generator = torch.Generator().manual_seed(1)
    behaviour = -torch.rand(500, generator=generator)
    logprobs = (behaviour + 0.3 * torch.randn(500, generator=generator)).requires_grad_()
    advantages = torch.randn(500, generator=generator)
    ratio = (logprobs - behaviour).exp()
    wanted = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages).sum()
    (wanted_gradient,) = torch.autograd.grad(wanted, logprobs, retain_graph=True)
    given_ = TokenTensors(logprobs, behaviour, advantages, torch.ones(500), torch.zeros(500, dtype=torch.int64))
    loss, found = Objective.of(AlgorithmTable(loss="ppo_clip")).loss(given_)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert torch.equal(loss, wanted)
    assert torch.equal(gradient, wanted_gradient)
    gap = (logprobs - behaviour).detach().double()
    assert found["tokens"] == 500
    assert found["ratio"] == pytest.approx(float(gap.exp().sum()), rel=1e-6)
    assert found["ratio_deviation_max"] == pytest.approx(float((gap.exp() - 1).abs().max()), rel=1e-5)
    assert found["kl"] == pytest.approx(float((gap.exp() - 1 - gap).sum()), rel=1e-4)
    assert found["difference"] == pytest.approx(float(gap.abs().sum()), rel=1e-6)
    assert found["difference_max"] == pytest.approx(float(gap.abs().max()), rel=1e-6)
    assert found["sampled_entropy"] == pytest.approx(-float(behaviour.sum()), rel=1e-6)


def test_the_default_weighs_older_samples_and_stops_no_gradient_in_the_first_update() -> None:
    behaviour = torch.tensor([-1.0, -1.0, -1.0, -9.0])
    logprobs = torch.tensor([-1.0, -0.1, -3.0, -0.1], requires_grad=True)
    advantages = torch.tensor([1.0, 2.0, -1.0, 1.0])
    given_ = TokenTensors(logprobs, behaviour, advantages, torch.ones(4), torch.zeros(4, dtype=torch.int64))
    loss, found = Objective.of(AlgorithmTable()).loss(given_)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    weights = torch.tensor([1.0, math.exp(0.9), math.exp(-2.0), 0.0])  # the last one, e^8.9, is above the cap
    assert torch.allclose(gradient, -weights * advantages)
    assert (found["clipped"], found["capped"], found["rejected"]) == (0, 1, 1)


def test_a_token_that_the_cap_and_a_correction_leave_out_is_rejected_once() -> None:
    behaviour = torch.tensor([-1.0, -9.0, -9.0, -1.0])
    logprobs = torch.tensor([-1.0, -0.1, -9.0, -8.0], requires_grad=True)
    given_ = TokenTensors(logprobs, behaviour, torch.ones(4), torch.ones(4), torch.zeros(4, dtype=torch.int64))
    # Ratios 1, e^8.9, 1, e^-7: the second is above the cap of 5 and outside the bounds, the last outside alone.
    _, found = Objective.of(AlgorithmTable(corrections=["rejection"])).loss(given_)
    assert (found["capped"], found["rejected"], found["weight"]) == (1, 2, 2)
    free = AlgorithmTable(loss={"name": "decoupled_ppo", "weight_cap": math.inf})
    assert Objective.of(free).loss(given_)[1]["rejected"] == 0
    assert "rejected" not in Objective.of(AlgorithmTable(loss="ppo_clip")).loss(given_)[1]


@pytest.mark.parametrize("policy", ["mask", "zero_reward", "soft_penalty", "none"])
@pytest.mark.parametrize("normalise", [True, False])
def test_default_advantages_are_bit_equal_to_those_of_groups(policy: Any, normalise: bool) -> None:
    rng = np.random.default_rng(5)
    samples = [
        sample(g, [0, 0, 1, 1, 0, 1], float(rng.normal()), member=m, truncated=bool(rng.random() < 0.4))
        for m in range(4)
        for g in range(3)
    ]
    before = [s.loss_mask for s in samples]
    Objective.of(AlgorithmTable(truncated=policy, normalise_std=normalise)).advantages(samples)
    for group in range(3):
        mine = [i for i, s in enumerate(samples) if s.meta.group == group]
        rewards = np.array([samples[i].reward for i in mine], np.float64)
        cut = np.array([samples[i].meta.truncated for i in mine])
        rewards, kept = apply_truncation(rewards, cut, policy, 0.5)
        wanted = np.zeros(len(mine))
        wanted[kept] = group_advantages(rewards[kept], normalise_std=normalise)
        for index, advantage, keep in zip(mine, wanted, kept, strict=True):
            found = samples[index].advantages
            assert found is not None and found.dtype == np.float32
            assert np.array_equal(found, (before[index] * advantage).astype(np.float32))
            assert np.array_equal(samples[index].loss_mask, before[index] * keep)


def test_kl_in_the_reward_is_paid_by_token() -> None:
    one = sample(0, [0, 1, 1], 1.0, reference_logprobs=[0, -1.0, -2.0], proximal_logprobs=[0, -0.5, -2.5])
    table = AlgorithmTable(
        name="reinforce_pp",
        advantage={"name": "reinforce_pp", "whiten": False},
        kl={"name": "k1", "coefficient": 0.1, "place": "reward"},
    )
    objective = Objective.of(table)
    objective.advantages([one])
    assert one.advantages is not None
    assert one.advantages.tolist() == pytest.approx([0, 1.0 - 0.1 * (0.5 - 0.5), 1.0 + 0.1 * 0.5])
    loss, metrics = objective.loss(tokens([3]))
    plain, _ = Objective.of(AlgorithmTable(clip_high=0.2)).loss(tokens([3]))
    assert torch.equal(loss, plain) and "kl_reference" not in metrics
    one.reference_logprobs = None
    with pytest.raises(Refused, match="has no reference_logprobs"):
        objective.advantages([one])
    one.reference_logprobs, one.proximal_logprobs = np.zeros(3, np.float32), None
    with pytest.raises(Refused, match="no proximal log-probabilities"):
        objective.advantages([one])


def test_m2po_takes_out_tokens_over_the_whole_batch() -> None:
    batch = [sample(0, [0, 1, 1], r, member=m, proximal_logprobs=[0, 0, 0]) for m, r in enumerate((1.0, 0.0))]
    batch[0].behaviour_logprobs = np.array([0, -1.0, -0.1], np.float32)  # rises by 1 and 0.1, advantage positive
    batch[1].behaviour_logprobs = np.array([0, -0.1, -2.0], np.float32)  # rises, advantage negative: no trust region
    objective = Objective.of(AlgorithmTable(name="m2po"))
    assert objective.advantages(batch) == 1
    assert not objective.streams
    assert [s.advantages.tolist() for s in batch if s.advantages is not None] == [
        [0, 0, pytest.approx(0.7070, abs=1e-3)],
        [0, pytest.approx(-0.7070, abs=1e-3), pytest.approx(-0.7070, abs=1e-3)],
    ]


def test_a_proximal_column_that_nobody_asked_for_is_passed_over() -> None:
    given_ = tokens([3, 2])
    bare = TokenTensors(given_.logprobs, given_.behaviour, given_.advantages, given_.mask, given_.sequence)
    objective = Objective.of(AlgorithmTable(loss="policy_gradient", corrections=["tis"]))
    assert torch.equal(objective.loss(given_)[0], objective.loss(bare)[0])
    asked = AlgorithmTable(loss={"name": "ppo_clip", "ratio_to": "proximal"}, corrections=["tis"])
    assert "proximal" in Objective.of(asked).needs
    assert "proximal" not in Objective.of(AlgorithmTable(name="rloo"), longest=6).needs


def test_what_is_idle_needs_no_pass() -> None:
    same = [sample(0, [0, 1], 1.0, member=m) for m in range(2)]
    plain, held = Objective.of(AlgorithmTable()), Objective.of(AlgorithmTable(kl="k3"))
    plain.advantages(same)
    assert plain.idle(same[0]) and not held.idle(same[0])
    assert held.idle(sample(0, [0, 0], 1.0))
    supervised = Objective.of(AlgorithmTable(name="sft"))
    unscored = [sample(0, [0, 1], None)]
    supervised.advantages(unscored)
    assert not supervised.idle(unscored[0])
    with pytest.raises(Refused, match=r"sample 0.0: it has no reward"):
        plain.advantages(unscored)


FLAT = """
from relax_rt.roles.training.algorithms.registry import part

def undeclared(tokens, options):
    return -tokens.advantages * tokens.logprobs + (tokens.logprobs - tokens.behaviour) ** 2, {}

@part("loss", needs={"reference"})
def held(tokens, options):
    return -tokens.advantages * tokens.logprobs + (tokens.logprobs - tokens.reference) ** 2, {}

@part("loss", traits={"by_advantage"})
def plain(tokens, options):
    return -tokens.advantages * tokens.logprobs, {}
"""


@pytest.mark.parametrize(("name", "idle"), [("undeclared", False), ("held", False), ("plain", True)])
def test_a_loss_of_ones_own_is_computed_of_all_samples_unless_it_says_that_it_goes_by_advantage(
    tmp_path: Any, name: str, idle: bool
) -> None:
    (tmp_path / "flat.py").write_text(FLAT)
    objective = Objective.of(AlgorithmTable(loss=f"flat.py:{name}"), base=tmp_path)
    same = [sample(0, [0, 1], 1.0, member=m) for m in range(2)]
    objective.advantages(same)
    assert not any(one.advantages.any() for one in same if one.advantages is not None)
    assert [objective.idle(one) for one in same] == [idle, idle]


@pytest.mark.parametrize("name", sorted(parts("loss")))
def test_a_loss_goes_by_advantage_if_it_has_no_gradient_without_one(name: str) -> None:
    given_ = dataclasses.replace(tokens([3, 4], groups=[0, 0]), advantages=torch.zeros(7, dtype=torch.float64))
    each, _ = bound("loss", name)(given_)
    (gradient,) = torch.autograd.grad(each.sum(), given_.logprobs)
    assert bool((gradient == 0).all()) == ("by_advantage" in parts("loss")[name].traits)


def test_presets_stand_for_their_parts_and_give_way_to_what_is_set() -> None:
    for name in PRESETS:
        table = AlgorithmTable(name=name)
        assert Objective.of(table, longest=64).parts.advantage.part.name
        assert AlgorithmTable.model_validate_json(table.model_dump_json(), strict=True) == table
    gspo = Objective.of(AlgorithmTable(name="gspo")).parts
    assert (gspo.loss.options.clip_low, gspo.loss.options.ratio_to) == (3e-4, "proximal")
    assert AlgorithmTable(name="gspo").updates_per_step == 4 and AlgorithmTable().updates_per_step == 1
    assert AlgorithmTable(name="gspo", updates_per_step=2).updates_per_step == 2
    assert Objective.of(AlgorithmTable(name="gspo", clip_low=0.1)).parts.loss.options.clip_low == 0.1
    own = AlgorithmTable(name="dr_grpo", loss={"name": "dual_clip", "clip_low": 0.05}, normalise_std=True)
    found = Objective.of(own, longest=7)
    assert found.parts.loss.options.clip_low == 0.05 and found.parts.loss.options.clip_high == 0.2
    assert found.parts.advantage.options.normalise_std
    assert found.parts.aggregation.options.length == 7
    assert Objective.of(AlgorithmTable(name="ppo")).needs == {"values", "rewards", "batch", "proximal"}


def test_everything_known_by_name_is_documented_with_its_source() -> None:
    for kind in ("advantage", "loss", "aggregation", "correction", "kl", "entropy", "filter", "sampler"):
        assert parts(kind)  # type: ignore[arg-type]
        for part in parts(kind).values():  # type: ignore[arg-type]
            assert part.function.__doc__
            assert all(field.description for field in part.options.model_fields.values()), part.name


def test_adaptive_entropy_counts_below_its_target_only() -> None:
    table = AlgorithmTable(entropy={"name": "adaptive", "target": 0.5, "step": 0.1, "most": 0.15})
    objective = Objective.of(table)
    assert objective.needs == {"entropy", "rewards", "proximal"}
    seen = []
    for entropy in (0.4, 0.4, 0.6, 0.4):
        objective.after_step({"tokens": 10.0, "entropy": 10 * entropy})
        seen.append(objective.entropy_coefficient)
    assert seen == pytest.approx([0.1, 0.15, 0.0, 0.15])
    resumed = Objective.of(table)
    resumed.restore(objective.state())
    for one in (objective, resumed):
        one.after_step({"tokens": 1.0, "entropy": 0.45})
    assert resumed.entropy_coefficient == objective.entropy_coefficient == 0.15


def test_the_entropy_bonus_raises_the_entropy() -> None:
    logits = torch.zeros(4, dtype=torch.float64)
    logits[0] = 2.0
    logits.requires_grad_()
    policy = logits.log_softmax(0)
    given_ = TokenTensors(
        policy[:1], policy[:1].detach(), torch.zeros(1), torch.ones(1), torch.zeros(1, dtype=torch.int64),
        entropy=-(policy.exp() * policy).sum()[None],
    )  # fmt: skip
    loss, metrics = Objective.of(AlgorithmTable(entropy={"name": "bonus", "coefficient": 0.5})).loss(given_)
    loss.backward()
    assert loss.item() == pytest.approx(-0.5 * metrics["entropy"])
    assert logits.grad is not None and logits.grad[0] > 0 > logits.grad[1]


OWN = """
import numpy as np
from relax_rt.config.schema import Table
from relax_rt.roles.training.algorithms.registry import part

class Options(Table):
    scale: float = 2.0

@part("loss", options=Options, needs={"reference"})
def my_loss(tokens, options):
    return -options.scale * tokens.advantages * tokens.logprobs, {"mine": 1.0}

def my_advantage(batch, options):
    return [one.spread(one.reward * options.factor) for one in batch.trajectories]

def short(batch, options):
    return [np.zeros(1, np.float32) for one in batch.trajectories]

def halves(tokens, options):
    return tokens.mask * 0.5

@part("aggregation", count=lambda samples, options: len(samples) / 2)
def counted_halves(tokens, options):
    return tokens.mask * 0.5

def distance(tokens, options):
    return (tokens.logprobs - tokens.behaviour) ** 2
"""


def test_a_users_own_parts_by_import_path(tmp_path: Any) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    table = AlgorithmTable(
        loss={"name": "mine.py:my_loss", "scale": 3.0}, advantage={"name": "mine.py:my_advantage", "factor": 10}
    )
    objective = Objective.of(table, base=tmp_path)
    assert objective.needs == {"reference"}
    one = sample(0, [0, 1], 0.5)
    objective.advantages([one])
    assert one.advantages is not None and one.advantages.tolist() == [0, 5]
    given_ = tokens([2])
    loss, metrics = objective.loss(given_)
    torch.testing.assert_close(loss, -3 * (given_.advantages * given_.logprobs).sum())
    assert metrics["mine"] == 1.0
    with pytest.raises(UserPartFailed, match=r"advantage 'mine.py:short' .*it returned shape \(1,\) for a sample of 2"):
        Objective.of(AlgorithmTable(advantage="mine.py:short"), base=tmp_path).advantages([one])
    for table, why in (
        ({"aggregation": "mine.py:halves"}, "aggregation 'mine.py:halves' has no function 'count'"),
        ({"kl": "mine.py:distance"}, "kl 'mine.py:distance' has no coefficient"),
    ):
        with pytest.raises(Refused, match=why):
            Objective.of(AlgorithmTable(**table), base=tmp_path)
    kl = {"name": "mine.py:distance", "coefficient": 2.0}
    mixed = Objective.of(AlgorithmTable(aggregation="mine.py:counted_halves", kl=kl), base=tmp_path)
    assert mixed.count([one, one, one]) == 1.5
    ours, _ = mixed.loss(given_)
    plain, _ = Objective.of(AlgorithmTable()).loss(given_)
    torch.testing.assert_close(ours, plain / 2 + ((given_.logprobs - given_.behaviour) ** 2).sum())
    with pytest.raises(Refused, match="unknown key 'scales'"):
        Objective.of(AlgorithmTable(loss={"name": "mine.py:my_loss", "scales": 3.0}), base=tmp_path)
    # They may read any column of a sample: rank 0 of a gang must have them all.
    assert objective.reads_columns and mixed.reads_columns
    # Proximal log-probabilities bring the columns of advantages along, but an aggregation also gets the samples.
    late = Objective.of(AlgorithmTable(loss={"name": "m2po"}, aggregation="mine.py:counted_halves"), base=tmp_path)
    assert late.proximal_first and late.reads_columns


@pytest.mark.parametrize("table", [{}, {"name": "m2po"}, {"kl": {"name": "k1", "place": "reward"}}])
def test_known_parts_read_no_column_before_the_proximal_log_probabilities(table: dict[str, Any]) -> None:
    objective = Objective.of(AlgorithmTable(**table))
    assert not objective.reads_columns
