"""Drawing tokens: the distribution, the log-probability, and draws by position."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from relax_rt.roles.rollout.engines.decoder import Sampler, member_uniforms  # noqa: E402


@pytest.mark.parametrize("shift", [0, 300])
def test_draws_follow_the_distribution(shift: int) -> None:
    logits = torch.full((10_000, 400), -torch.inf)
    logits[:, shift : shift + 4] = torch.log(torch.tensor([0.1, 0.2, 0.0, 0.7]))
    uniforms = (torch.arange(10_000) + 0.5) / 10_000
    tokens, logprobs = Sampler(400)(logits, torch.ones(10_000), uniforms)
    counts = torch.bincount(tokens, minlength=400)
    assert counts[shift : shift + 4].tolist() == pytest.approx([1000, 2000, 0, 7000], abs=2)
    assert counts.sum() == 10_000
    expected = torch.tensor([0.1, 0.2, 0.0, 0.7])[tokens - shift]
    torch.testing.assert_close(logprobs.exp(), expected)


@pytest.mark.parametrize("vocabulary", [97, 256, 49_152])
def test_logprobs_are_of_the_whole_vocabulary_at_the_temperature(vocabulary: int) -> None:
    torch.manual_seed(vocabulary)
    logits = torch.randn(6, vocabulary) * 5
    temperatures = torch.tensor([1.0, 0.5, 2.0, 0.0, 1.0, 1.3])
    tokens, logprobs = Sampler(vocabulary)(logits, temperatures, torch.rand(6))
    divisors = torch.where(temperatures == 0, 1.0, temperatures)
    expected = torch.log_softmax(logits.double() / divisors[:, None], -1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=1e-5)
    assert tokens[3] == logits[3].argmax()


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-24])
def test_what_has_no_probability_is_never_drawn(uniform: float) -> None:
    torch.manual_seed(0)
    for _ in range(50):
        logits = torch.randn(8, 1000) * 3
        allowed = torch.rand(8, 1000) < 0.02
        allowed[:, 500] = True
        logits[~allowed] = -torch.inf
        tokens, logprobs = Sampler(1000)(logits, torch.ones(8), torch.full((8,), uniform))
        assert bool(allowed.gather(-1, tokens[:, None]).all())
        assert bool(logprobs.isfinite().all())


def test_the_draw_at_a_position_does_not_depend_on_how_many_follow() -> None:
    short, long = member_uniforms(7, 33), member_uniforms(7, 1000)
    assert short.tolist() == long[:33].tolist()
    assert member_uniforms(8, 33).tolist() != short.tolist()
