"""Choices of the prompts that come next, made again until they are given out."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from algorithm_samples import bound

from relax_rt.roles.training.algorithms.prompt_history import PromptHistory
from relax_rt.roles.training.algorithms.samplers import PromptSampler
from relax_rt.transport.rpc.errors import Refused

ITEMS = [f"q{i}" for i in range(50)]
CURRICULUM = {"name": "curriculum", "candidates": 200, "width": 0.1}


def ahead_of(rule: Any, history: PromptHistory, **options: Any) -> PromptSampler:
    usual = {"usual": lambda i: i % len(ITEMS), "seed": 0, "history": history, "ahead": 30}
    return PromptSampler(bound("sampler", rule), ITEMS, **usual, **options)


def test_what_comes_next_is_chosen_again_until_it_is_given_out() -> None:
    history = PromptHistory()
    ahead = ahead_of(CURRICULUM, history)
    first = ahead.choose_next(0, 0)
    assert list(first) == list(range(30)) and ahead.choose_next(0, 0) == first
    for item in ITEMS:
        history.record(item, [1.0, 0.0] if item == "q7" else [0.0, 0.0], 1)
    second = ahead.choose_next(1, 10)
    assert list(second) == list(range(10, 40))
    assert Counter(second.values())[7] > Counter(first.values())[7] + 3


def test_a_resumed_trainer_chooses_as_the_one_before_would_have() -> None:
    history, other = PromptHistory(), PromptHistory()
    ahead, resumed = ahead_of(CURRICULUM, history), ahead_of(CURRICULUM, other)
    for n, item in enumerate(ITEMS):
        history.record(item, [1.0] * (n % 4) + [0.0] * (4 - n % 4), n)
    ahead.choose_next(50, 12)
    resumed.restore({})
    assert resumed.choose_next(51, 20) != ahead.choose_next(51, 20)
    resumed.restore(ahead.state())
    assert resumed.choose_next(51, 20) == ahead.choose_next(51, 20)
    for damaged in ({"history": 3}, {"choices": {}}):
        with pytest.raises(Refused, match="prompt history of a checkpoint"):
            resumed.restore(damaged)
    assert len(other) == len(ITEMS)
    resumed.restore({})
    assert len(other) == 0


def test_nothing_is_chosen_past_the_end_of_the_order() -> None:
    ahead = ahead_of("replay", PromptHistory(), end=35)
    assert list(ahead.choose_next(0, 20)) == list(range(20, 35))
    assert ahead.choose_next(0, 35) == {}
