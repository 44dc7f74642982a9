"""Filters, dynamic sampling and samplers, with the history that they decide by; and their state."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from algorithm_samples import bound
from hypothesis import given
from hypothesis import strategies as st

from relax_rt.roles.training.algorithms.filters import FilteredGroup, RefillPolicy, ScoredGroup
from relax_rt.roles.training.algorithms.prompt_history import PromptHistory
from relax_rt.roles.training.algorithms.registry import BoundPart, bind, part
from relax_rt.roles.training.algorithms.samplers import PromptSampler, uniform
from relax_rt.roles.training.algorithms.settings import RefillOptions
from relax_rt.transport.rpc.errors import Refused

ITEMS = [f"q{i}" for i in range(50)]


def test_history_follows_recent_groups_and_comes_back_from_a_checkpoint() -> None:
    history = PromptHistory(decay=0.5)
    history.record("a", [1.0, 0.0, 0.0, 0.0], step=1)
    assert history.rate("a") == 0.25
    history.record("a", [1.0, 1.0, 1.0, 1.0], step=4)
    history.record("b", [0.4, 0.2], step=4)
    assert history.rate("a") == 0.625
    assert (history.rate("b"), history.rate("c")) == (0.0, None)
    assert history.outcomes("a").successes == 5
    resumed = PromptHistory()
    resumed.restore(json.loads(json.dumps(history.state())))
    assert resumed.state() == history.state()
    with pytest.raises(Refused, match="prompt history of a checkpoint"):
        resumed.restore({"items": {"a": "many"}})
    assert resumed.state() == history.state()


def test_rare_successes_are_those_that_succeeded_seldom_and_not_lately() -> None:
    history = PromptHistory()
    history.record("never", [0.0] * 4, step=1)
    history.record("seldom", [1.0, 0.0, 0.0, 0.0], step=1)
    history.record("lately", [1.0, 0.0, 0.0, 0.0], step=8)
    history.record("often", [1.0] * 4, step=1)
    assert list(history.rare(0.25, before=5)) == ["seldom"]


@pytest.mark.parametrize(
    ("rule", "rewards", "cut", "why"),
    [
        ("zero_variance", [1.0, 1.0], [], "all rewards are 1"),
        ("zero_variance", [1.0, 0.9], [], ""),
        ({"name": "zero_variance", "spread": 0.2}, [1.0, 0.9], [], "all rewards are 1"),
        ({"name": "pass_rate", "low": 0.3, "high": 0.8}, [1.0, 0.0, 0.0, 0.0], [], "0.25 of it succeeded"),
        ({"name": "pass_rate", "low": 0.3, "high": 0.8}, [1.0, 1.0, 0.0, 0.0], [], ""),
        ("truncated", [1.0, 0.0, 0.0], [True, True, False], "0.67 of it was cut at max_new_tokens"),
        ("truncated", [1.0, 0.0], [True, False], ""),
        ("zero_variance", [], [True, True], "all its samples are masked"),
        ("pass_rate", [], [True, True], "all its samples are masked"),
        ("truncated", [], [True, True], "1.00 of it was cut at max_new_tokens"),
    ],
)
def test_filters(rule: Any, rewards: list[float], cut: list[bool], why: str) -> None:
    assert bound("filter", rule)(ScoredGroup(0, "q", rewards, cut), PromptHistory()) == why


def refill(wanted: int = 2, **options: float) -> RefillPolicy:
    return RefillPolicy(wanted, [bound("filter", "zero_variance")], PromptHistory(), RefillOptions(**options))


def test_a_filter_of_ones_own_may_answer_with_numpys_truth(tmp_path: Path) -> None:
    text = "import numpy as np\ndef dull(group, history, options):\n    return np.std(group.rewards) < 0.1\n"
    (tmp_path / "mine.py").write_text(text)
    rule = bind("filter", "mine.py:dull", ("algorithm", "filters"), base=tmp_path, defaults={})
    assert isinstance(rule, BoundPart)
    own = RefillPolicy(2, [rule], PromptHistory(), RefillOptions())
    assert [own.scored(group, 1) is None for group in (good(0), dull(1))] == [True, False]


def good(key: int) -> ScoredGroup:
    return ScoredGroup(key, f"q{key}", [1.0, 0.0])


def dull(key: int) -> ScoredGroup:
    return ScoredGroup(key, f"q{key}", [1.0, 1.0])


def test_a_dull_group_is_dropped_and_more_are_made_for_it() -> None:
    machine = refill(memory=0.5)
    machine.begin()
    assert (machine.state, machine.spare) == ("lacking", 0)
    assert machine.scored(good(0), 1) is None
    assert machine.scored(dull(1), 1) == FilteredGroup(1, "zero_variance", "zero_variance: all rewards are 1")
    # One lacks, and half of what was scored of late was kept.
    assert (machine.state, machine.spare) == ("lacking", 1)
    assert machine.scored(good(2), 1) is None
    assert (machine.state, machine.spare) == ("full", 0)
    assert machine.dropped == {"zero_variance": 1}
    machine.begin()
    assert machine.state == "lacking"


def test_over_sampling_has_more_made_at_once() -> None:
    machine = refill(wanted=4, over_sample=1.5)
    assert machine.spare == 2
    machine.scored(good(0), 1)
    assert machine.spare == 2
    for key in range(1, 4):
        machine.scored(good(key), 1)
    assert machine.spare == 0


def test_a_step_is_not_waited_for_for_ever() -> None:
    machine, barren = refill(wanted=2, most=3), refill(wanted=2, most=3)
    machine.scored(good(0), 1)
    barren.scored(dull(0), 1)
    for key in range(1, 6):
        assert (machine.state, barren.state) == ("lacking", "lacking")
        machine.scored(dull(key), 1)
        barren.scored(dull(key), 1)
    assert (machine.state, barren.state) == ("short", "none_passed")
    # Nor are all prompts asked for at once.
    assert barren.spare <= 4


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 4), st.floats(1, 3), st.integers(1, 5))
def test_every_group_is_judged_once_and_what_is_under_way_suffices(
    kept: list[bool], wanted: int, over: float, most: int
) -> None:
    machine = refill(wanted=wanted, over_sample=over, most=most)
    machine.begin()
    step: list[bool] = []
    for key, fine in enumerate(kept):
        assert (machine.scored(good(key) if fine else dull(key), 1) is None) == fine
        step.append(fine)
        there, lacking = sum(step), max(0, wanted - sum(step))
        assert 0 <= machine.spare <= lacking * over * most + 1
        assert (lacking > 0) or machine.spare == 0
        ended = "short" if there else "none_passed"
        wants = "full" if not lacking else "lacking" if len(step) < most * wanted else ended
        assert machine.state == wants
        if machine.state != "lacking":
            machine.begin()
            step = []
    assert machine.dropped.get("zero_variance", 0) == kept.count(False)


def test_dynamic_sampling_goes_on_from_a_checkpoint() -> None:
    machine = refill(memory=0.5)
    machine.begin()
    machine.scored(dull(0), 1)
    resumed = refill(memory=0.5)
    resumed.restore(json.loads(json.dumps(machine.save())))
    assert resumed.spare == 2
    assert resumed.dropped == {"zero_variance": 1}
    with pytest.raises(Refused, match="dynamic sampling of a checkpoint"):
        resumed.restore({"share": "half", "dropped": {}})


def sampler(rule: Any, history: PromptHistory, seed: int = 0) -> PromptSampler:
    return PromptSampler(bound("sampler", rule), ITEMS, lambda i: i % len(ITEMS), seed=seed, history=history)


def test_draws_are_even_and_their_own_by_seed_index_and_number() -> None:
    drawn = [uniform(0, index, i) for index in range(200) for i in range(10)]
    assert len(set(drawn)) == 2000
    counts = Counter(int(10 * d) for d in drawn)
    assert set(counts) == set(range(10)) and min(counts.values()) > 140
    assert uniform(0, 1, 2) != uniform(1, 1, 2)


def test_the_curriculum_prefers_middling_prompts_and_gives_none_up() -> None:
    history = PromptHistory()
    for i, item in enumerate(ITEMS):
        history.record(item, [1.0] * (i % 5) + [0.0] * (4 - i % 5), step=0)
    one = sampler("curriculum", history)
    chosen = Counter(one.choose(i, 1) % 5 for i in range(1000))
    assert chosen[2] > 2.5 * max(chosen[0], chosen[4])
    assert chosen[2] > chosen[1] > chosen[0] > 0
    assert chosen[2] > chosen[3] > chosen[4] > 0


def test_replay_gives_rare_successes_a_share() -> None:
    history = PromptHistory()
    history.record("q7", [1.0, 0.0, 0.0, 0.0], step=1)
    rule = {"name": "replay", "share": 0.3, "after": 5}
    early = sampler(rule, history)
    assert [early.choose(i, 5) for i in range(200)] == [i % 50 for i in range(200)]
    late = sampler(rule, history)
    replayed = sum(late.choose(i, 6) == 7 for i in range(1000) if i % 50 != 7)
    assert 230 < replayed < 360


def test_a_users_sampler_that_chooses_no_prompt_is_refused() -> None:
    @part("sampler")
    def lost(choice: Any, history: Any, options: Any) -> int:
        return 50

    made = bound("sampler", "replay")
    broken = type(made)(lost.__dict__["algorithm_part"], made.options, made.place)
    one = PromptSampler(broken, ITEMS, lambda i: i, seed=0, history=PromptHistory())
    with pytest.raises(Refused, match="sampler 'lost': it chose 50"):
        one.choose(0, 0)
