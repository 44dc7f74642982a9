"""Every loss, correction, KL form and aggregation against its definition, written token by token in plain floats or as
another float64 form whose gradient autograd takes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from algorithm_samples import bound, tokens
from hypothesis import given
from hypothesis import strategies as st

from relax_rt.roles.training.algorithms.advantages import value_loss
from relax_rt.roles.training.algorithms.inputs import TokenTensors
from relax_rt.roles.training.algorithms.losses import outliers

LENGTHS = [3, 1, 4, 2]
MANY = [6, 1, 9, 5, 8, 7]


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def ppo(r: float, a: float, low: float = 0.2, high: float = 0.28) -> float:
    return -min(r * a, clip(r, 1 - low, 1 + high) * a)


def dual(r: float, a: float) -> float:
    return ppo(r, a) if a >= 0 else -max(-ppo(r, a), 3.0 * a)


def sapo(r: float, a: float) -> float:
    tau = 1.0 if a > 0 else 1.05
    return -a * 4 / tau / (1 + math.exp(-tau * (r - 1)))


BY_RATIO: list[tuple[Any, str, Callable[[float, float], float]]] = [
    ("ppo_clip", "behaviour", ppo),
    ({"name": "ppo_clip", "ratio_to": "proximal"}, "proximal", ppo),
    ({"name": "ppo_clip", "clip_high": 0.1}, "behaviour", lambda r, a: ppo(r, a, 0.2, 0.1)),
    ("dual_clip", "behaviour", dual),
    ("sapo", "behaviour", sapo),
    ("m2po", "behaviour", lambda r, a: -r * a),
]


@pytest.mark.parametrize(("name", "old", "definition"), BY_RATIO)
def test_losses_of_a_tokens_ratio(name: Any, old: str, definition: Callable[[float, float], float]) -> None:
    batch = tokens(MANY, seed=3, spread=1.5)
    loss, _ = bound("loss", name)(batch)
    ratios = (batch.logprobs - getattr(batch, old)).exp().tolist()
    wanted = [definition(r, a) for r, a in zip(ratios, batch.advantages.tolist(), strict=True)]
    assert loss.tolist() == pytest.approx(wanted, rel=1e-12)
    # The gradient by log pi is r times the slope of the definition by r.
    (gradient,) = torch.autograd.grad(loss.sum(), batch.logprobs)
    step = 1e-6
    slopes = [
        r * (definition(r + step, a) - definition(r - step, a)) / (2 * step)
        for r, a in zip(ratios, batch.advantages.tolist(), strict=True)
    ]
    assert gradient.tolist() == pytest.approx(slopes, rel=1e-5, abs=1e-8)


def test_ratios_of_this_test_meet_every_case_of_the_clips() -> None:
    batch = tokens(MANY, seed=3, spread=1.5)
    ratio = (batch.logprobs - batch.behaviour).exp()
    for sign in (1, -1):
        mine = ratio[batch.advantages.sign() == sign]
        assert (mine < 0.8).any() and (mine > 1.28).any()
    assert (ratio[batch.advantages < 0] > 3).any()


def test_clipped_tokens_are_those_without_gradient() -> None:
    batch = tokens(MANY, seed=3, spread=1.5)
    for name in ("ppo_clip", "dual_clip", "gspo"):
        loss, metrics = bound("loss", name)(batch)
        (gradient,) = torch.autograd.grad(loss.sum(), batch.logprobs)
        assert metrics["clipped"] == float((gradient == 0).sum()) > 0


def test_decoupled_ppo_weights_by_proximal_over_behaviour() -> None:
    batch = tokens(LENGTHS, seed=1, spread=1.0)
    assert batch.proximal is not None
    weights = (batch.proximal - batch.behaviour).exp().tolist()
    ratios = (batch.logprobs - batch.proximal).exp().tolist()
    loss, _ = bound("loss", {"name": "decoupled_ppo", "weight_cap": math.inf})(batch)
    wanted = [w * ppo(r, a) for w, r, a in zip(weights, ratios, batch.advantages.tolist(), strict=True)]
    assert loss.tolist() == pytest.approx(wanted, rel=1e-12)
    capped, metrics = bound("loss", {"name": "decoupled_ppo", "weight_cap": 1.1})(batch)
    assert capped.tolist() == pytest.approx([v * (w <= 1.1) for v, w in zip(wanted, weights, strict=True)], rel=1e-12)
    assert metrics["capped"] == sum(w > 1.1 for w in weights) > 0


def test_decoupled_ppo_leaves_out_what_weighs_more_than_five() -> None:
    one = tokens([3])
    gaps = torch.tensor([4.9, 5.1, 1.0], dtype=torch.float64).log()
    held = dataclasses.replace(one, behaviour=one.logprobs.detach() - gaps, proximal=one.logprobs.detach())
    loss, metrics = bound("loss", "decoupled_ppo")(held)
    a = one.advantages
    assert loss.tolist() == pytest.approx([-4.9 * float(a[0]), 0.0, -float(a[2])]) and metrics["capped"] == 1.0


def test_decoupled_ppo_is_ppo_where_all_three_policies_are_one() -> None:
    batch = tokens(LENGTHS)
    same = TokenTensors(
        batch.logprobs, batch.behaviour, batch.advantages, batch.mask, batch.sequence, proximal=batch.behaviour
    )
    assert torch.equal(bound("loss", "decoupled_ppo")(same)[0], bound("loss", "ppo_clip")(same)[0])


def test_gspo_under_the_sequence_mean_is_the_papers_sequence_objective() -> None:
    options = {"clip_low": 0.1, "clip_high": 0.15}
    batch = tokens(LENGTHS, seed=5, spread=0.6)
    loss, _ = bound("loss", {"name": "gspo", **options})(batch)
    mine = (bound("aggregation", "sequence_mean")(batch) * loss).sum()
    total = torch.zeros((), dtype=torch.float64)
    for i in range(len(LENGTHS)):
        own = batch.sequence == i
        s = (batch.logprobs[own].sum() - batch.behaviour[own].sum()).div(own.sum()).exp()
        a = batch.advantages[own][0]
        total = total - torch.minimum(s * a, s.clamp(0.9, 1.15) * a)
    assert mine.item() == pytest.approx(total.item(), rel=1e-12)
    (by_mine,), (by_total,) = (torch.autograd.grad(x, batch.logprobs) for x in (mine, total))
    torch.testing.assert_close(by_mine, by_total, rtol=1e-12, atol=1e-14)
    assert (by_mine == 0).any() and (by_mine != 0).any()


def test_cispo_keeps_every_gradient_under_a_bounded_weight() -> None:
    batch = tokens(MANY, seed=3, spread=1.5)
    loss, metrics = bound("loss", {"name": "cispo", "clip_low": 0.5, "clip_high": 0.5})(batch)
    (gradient,) = torch.autograd.grad(loss.sum(), batch.logprobs)
    ratios = (batch.logprobs - batch.behaviour).exp().tolist()
    wanted = [-clip(r, 0.5, 1.5) * a for r, a in zip(ratios, batch.advantages.tolist(), strict=True)]
    assert gradient.tolist() == pytest.approx(wanted, rel=1e-12)
    assert metrics["clipped"] == sum(not 0.5 <= r <= 1.5 for r in ratios) > 0


def test_policy_gradient_and_sft_have_the_gradients_of_their_definitions() -> None:
    batch = tokens(LENGTHS)
    (gradient,) = torch.autograd.grad(bound("loss", "policy_gradient")(batch)[0].sum(), batch.logprobs)
    assert torch.equal(gradient, -batch.advantages)
    assert torch.equal(bound("loss", "sft")(batch)[0], -batch.logprobs)


def test_every_loss_with_a_ratio_has_the_policy_gradient_on_policy() -> None:
    batch = tokens(LENGTHS)
    policy = batch.logprobs.detach()
    same = TokenTensors(
        policy.clone().requires_grad_(), policy, batch.advantages, batch.mask, batch.sequence, proximal=policy
    )
    for name in ("ppo_clip", "dual_clip", "decoupled_ppo", "gspo", "cispo", "sapo", "m2po"):
        loss, _ = bound("loss", name)(same)
        (gradient,) = torch.autograd.grad(loss.sum(), same.logprobs)
        torch.testing.assert_close(gradient, -batch.advantages, rtol=1e-12, atol=1e-12, msg=name)


def test_dpo_of_two_pairs_and_a_bystander() -> None:
    batch = tokens([2, 3, 1, 2, 2], groups=[0, 0, 0, 1, 1])
    signs = torch.tensor([1.0, -1.0, 0.0, -1.0, 1.0], dtype=torch.float64)
    given_ = TokenTensors(
        batch.logprobs,
        batch.behaviour,
        signs[batch.sequence],
        batch.mask,
        batch.sequence,
        reference=batch.reference,
        group=batch.group,
    )
    loss, metrics = bound("loss", {"name": "dpo", "beta": 0.5, "label_smoothing": 0.1})(given_)
    assert batch.reference is not None
    h = [float((batch.logprobs - batch.reference)[batch.sequence == i].sum().detach()) for i in range(5)]
    margins = [0.5 * (h[0] - h[1]), 0.5 * (h[4] - h[3])]

    def log_sigmoid(x: float) -> float:
        return -math.log1p(math.exp(-x))

    wanted = sum(-0.9 * log_sigmoid(x) - 0.1 * log_sigmoid(-x) for x in margins)
    assert loss.sum().item() == pytest.approx(wanted, rel=1e-12)
    assert not loss[batch.sequence == 2].any()
    assert metrics == {
        "pairs": 2.0,
        "preferred": float(sum(x > 0 for x in margins)),
        "margin": pytest.approx(sum(margins)),
    }


def one_by_one(moments: list[float], threshold: float) -> set[int]:
    """Algorithm 1 of M2PO, a token at a time."""
    inside = dict(enumerate(moments))
    out: set[int] = set()
    while inside and sum(inside.values()) / len(inside) > threshold:
        worst = max(inside, key=lambda i: inside[i])
        out.add(worst)
        del inside[worst]
    return out


@given(
    st.lists(st.tuples(st.floats(-1, 1), st.sampled_from([-1.0, 0.0, 1.0])), max_size=20),
    st.sampled_from([0.01, 0.04, 0.3]),
)
def test_m2po_leaves_out_what_its_algorithm_does(given_: list[tuple[float, float]], threshold: float) -> None:
    gaps, signs = np.array([g for g, _ in given_]), np.array([a for _, a in given_])
    found = outliers(gaps, signs, threshold)
    region = [i for i, (gap, sign) in enumerate(given_) if gap * sign > 0]
    wanted = {region[i] for i in one_by_one([float(gaps[i] ** 2) for i in region], threshold)}
    # Of equal ones any may go: their number and size are what counts.
    dropped = np.flatnonzero(found)
    assert sorted(gaps[dropped] ** 2) == sorted(gaps[list(wanted)] ** 2)
    assert set(dropped.tolist()) <= set(region)


def rhos(batch: TokenTensors, level: str) -> list[float]:
    assert batch.proximal is not None
    gaps, ids = (batch.proximal - batch.behaviour).tolist(), batch.sequence.tolist()
    if level == "token":
        return [math.exp(g) for g in gaps]
    sums = {i: [g for g, s in zip(gaps, ids, strict=True) if s == i] for i in set(ids)}
    return [math.exp(sum(sums[i]) / (len(sums[i]) if level == "geometric" else 1)) for i in ids]


CORRECTIONS: list[tuple[dict[str, Any], str, Callable[[float], float]]] = [
    ({"name": "tis", "cap": 1.2}, "token", lambda r: min(r, 1.2)),
    ({"name": "tis", "cap": 1.2, "level": "sequence"}, "sequence", lambda r: min(r, 1.2)),
    ({"name": "mis", "cap": 1.1}, "sequence", lambda r: r if r <= 1.1 else 0.0),
    ({"name": "mis", "cap": 1.1, "level": "token"}, "token", lambda r: r if r <= 1.1 else 0.0),
    ({"name": "icepop", "low": 0.9, "high": 1.3}, "token", lambda r: r if 0.9 <= r <= 1.3 else 0.0),
    ({"name": "rejection", "low": 0.9, "high": 1.3}, "token", lambda r: float(0.9 <= r <= 1.3)),
    ({"name": "rejection", "low": 0.9, "high": 1.3, "level": "sequence"}, "sequence", lambda r: float(0.9 <= r <= 1.3)),
    (
        {"name": "rejection", "low": 0.95, "high": 1.1, "level": "geometric"},
        "geometric",
        lambda r: float(0.95 <= r <= 1.1),
    ),
]


@pytest.mark.parametrize(("table", "level", "definition"), CORRECTIONS)
def test_corrections(table: dict[str, Any], level: str, definition: Callable[[float], float]) -> None:
    batch = tokens(LENGTHS, seed=2, spread=0.8)
    weight, metrics = bound("correction", table)(batch)
    wanted = [definition(r) for r in rhos(batch, level)]
    assert weight.tolist() == pytest.approx(wanted, rel=1e-12)
    assert len(set(wanted)) > 1 and wanted != rhos(batch, level)
    assert metrics["rejected"] == sum(w == 0 for w in wanted)
    assert not weight.requires_grad


def test_without_a_proximal_policy_corrections_compare_the_trained_one() -> None:
    batch = tokens(LENGTHS)
    bare = TokenTensors(batch.logprobs, batch.behaviour, batch.advantages, batch.mask, batch.sequence)
    weight, _ = bound("correction", {"name": "tis", "cap": 100.0})(bare)
    assert not weight.requires_grad
    torch.testing.assert_close(weight, (batch.logprobs - batch.behaviour).exp().detach())


def test_stale_sequences_are_masked_where_their_advantage_is_negative() -> None:
    batch = tokens([2, 2, 2])
    gaps = torch.tensor([0.3, 0.3, 0.0], dtype=torch.float64)[batch.sequence]
    signs = torch.tensor([-1.0, 1.0, -1.0], dtype=torch.float64)[batch.sequence]
    given_ = TokenTensors(
        batch.logprobs, batch.behaviour, signs, batch.mask, batch.sequence, proximal=batch.behaviour - gaps
    )
    weight, metrics = bound("correction", {"name": "stale_sequences", "limit": 0.2})(given_)
    assert weight.tolist() == [0, 0, 1, 1, 1, 1]
    assert metrics["rejected"] == 2


def categorical(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of a policy, and log-probabilities of a reference and of an older policy, over five actions."""
    generator = torch.Generator().manual_seed(seed)
    logits, reference, old = (torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(3))
    return logits.requires_grad_(), reference.log_softmax(0), old.log_softmax(0)


def expected_gradient(form: str, sampled: torch.Tensor, logits: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Gradient of the form's expectation under fixed sampling log-probabilities: every action once, by its weight."""
    policy = logits.log_softmax(0)
    each = bound("kl", form)(
        TokenTensors(
            policy, sampled, torch.zeros(5), torch.ones(5), torch.arange(5), reference=reference, proximal=sampled
        )
    )
    return torch.autograd.grad((sampled.exp() * each).sum(), logits)[0]


def test_gradients_of_the_kl_forms_are_those_said() -> None:
    logits, reference, old = categorical(0)
    policy = logits.log_softmax(0)
    (reverse,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    (forward,) = torch.autograd.grad((reference.exp() * (reference - policy)).sum(), logits, retain_graph=True)
    now = policy.detach()
    torch.testing.assert_close(expected_gradient("k1", now, logits, reference), torch.zeros(5, dtype=torch.float64))
    torch.testing.assert_close(expected_gradient("k2", now, logits, reference), reverse)
    torch.testing.assert_close(expected_gradient("k3", now, logits, reference), forward)
    torch.testing.assert_close(expected_gradient("unbiased", now, logits, reference), reverse)
    torch.testing.assert_close(expected_gradient("unbiased", old, logits, reference), reverse)
    for form in ("k2", "k3"):
        assert not torch.allclose(expected_gradient(form, old, logits, reference), reverse, atol=1e-3)


@pytest.mark.parametrize(
    ("form", "definition"),
    [("k1", lambda d: d), ("k2", lambda d: d * d / 2), ("k3", lambda d: math.exp(-d) - 1 + d)],
)
def test_values_of_the_kl_forms_in_loss_and_reward(form: str, definition: Callable[[float], float]) -> None:
    batch = tokens(LENGTHS)
    assert batch.reference is not None
    gaps = (batch.logprobs - batch.reference).tolist()
    wanted = [definition(d) for d in gaps]
    part = bound("kl", form)
    assert part(batch).tolist() == pytest.approx(wanted, rel=1e-12)
    assert part.extra("cost", np.array(gaps)).tolist() == pytest.approx(wanted, rel=1e-12)
    # Beyond the bound of log-ratios both are held there: e^500 would leave no other token a say.
    far = torch.tensor([500.0, -500.0], dtype=torch.float64)
    nothing, two = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    held = part(TokenTensors(far, far, nothing, torch.ones(2), two, reference=nothing)).tolist()
    assert held == part.extra("cost", far.numpy()).tolist() == pytest.approx([definition(20.0), definition(-20.0)])


def test_weights_of_the_aggregations() -> None:
    batch = tokens([3, 1])
    mask = torch.tensor([True, False, True, True])
    given_ = TokenTensors(batch.logprobs, batch.behaviour, batch.advantages, mask, batch.sequence)
    assert bound("aggregation", "token_mean")(given_).tolist() == [1, 0, 1, 1]
    assert bound("aggregation", "sequence_mean")(given_).tolist() == [0.5, 0, 0.5, 1]
    assert bound("aggregation", {"name": "fixed_length", "length": 4})(given_).tolist() == [0.25, 0, 0.25, 0.25]


@given(
    st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2), st.floats(-2, 2)), min_size=1, max_size=12),
    st.sampled_from([None, 0.2]),
)
def test_value_loss(rows: list[tuple[float, float, float]], bound_: float | None) -> None:
    values, old, returns = (torch.tensor(c, dtype=torch.float64) for c in zip(*rows, strict=True))
    junk = torch.tensor([math.nan], dtype=torch.float64)
    mask = torch.tensor([1.0] * len(rows) + [0.0])
    loss, metrics = value_loss(*(torch.cat([x, junk]) for x in (values, old, returns)), mask, clip=bound_)

    def definition(v: float, o: float, r: float) -> float:
        held = v if bound_ is None else o + clip(v - o, -bound_, bound_)
        return max((v - r) ** 2, (held - r) ** 2) / 2

    assert loss.tolist() == pytest.approx([*(definition(*row) for row in rows), 0.0], abs=1e-12)
    assert metrics["tokens"] == len(rows)
