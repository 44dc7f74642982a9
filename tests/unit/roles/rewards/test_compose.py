"""Rewards made of components: what a config may say, and what comes of it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from relax_rt.config.problems import Problem
from relax_rt.roles.data.items import PromptItem
from relax_rt.roles.rewards.checks import check_reward
from relax_rt.roles.rewards.compose import Component, Rewards, combine, read_components, requested_info
from relax_rt.roles.rewards.dry_run import dry_run
from relax_rt.roles.rewards.scoring import RewardFailed, RewardRequest, Score
from relax_rt.roles.rewards.settings import RewardTable
from relax_rt.roles.rewards.worker import FunctionSpec


def table(*components: dict[str, Any], **keys: Any) -> RewardTable:
    given = {"components": list(components), **keys} if components else keys
    return RewardTable.model_validate(given)


def problems(*components: dict[str, Any], **keys: Any) -> list[Problem]:
    return [one for one in read_components(table(*components, **keys)) if isinstance(one, Problem)]


# --- what a config may say


def test_components_of_every_kind_are_read() -> None:
    read = read_components(
        table(
            {"name": "exact", "weight": 0.5},
            {"name": "regex", "pattern": "a", "label": "has_a"},
            {"name": "regex", "pattern": "b", "on_failure": "fail"},
            {"function": "mine.py:score", "group": True},
            on_failure="zero",
        )
    )
    assert [(one.label, one.weight, one.runs_in, one.zero_failures) for one in read if isinstance(one, Component)] == [
        ("exact", 0.5, "inline", True),
        ("has_a", 1.0, "worker", True),
        ("regex", 1.0, "worker", False),
        ("score", 1.0, "worker", True),
    ]


@pytest.mark.parametrize(
    ("components", "keys", "path", "words"),
    [
        ([], {}, ("reward",), "neither function nor components is set"),
        ([{"name": "exact"}], {"function": "a.py:b"}, ("reward", "components"), "both set"),
        ([{"name": "maths"}], {}, (0, "name"), "no reward called 'maths'.*did you mean 'math'"),
        ([], {"function": "maths"}, ("reward", "function"), "no reward called 'maths'.*did you mean 'math'"),
        ([{"name": "regex"}], {}, (0, "pattern"), "missing key 'pattern'"),
        ([], {"function": "regex"}, ("reward", "pattern"), "missing key 'pattern'"),
        (
            [{"name": "regex", "pattern": "a", "patern": "a"}],
            {},
            (0, "patern"),
            "unknown key 'patern'.*did you mean 'pattern'",
        ),
        ([{"name": "regex", "pattern": "("}], {}, (0, "pattern"), "no regular expression"),
        ([{"name": "regex", "pattern": "a*"}], {}, (0, "pattern"), "and so everywhere"),
        ([{"name": "regex", "pattern": "a", "equals_answer": True}], {}, (0, "pattern"), "has no group"),
        ([{"name": "length", "free": 9, "most": 8}], {}, (0, "most"), "not above free"),
        ([{"name": "exact", "ignore_case": "yes"}], {}, (0, "ignore_case"), "must be true or false"),
        ([{"name": "http", "url": "ftp://x"}], {}, (0, "url"), "right form"),
        ([{"name": "http", "url": "http://me:word@x/"}], {}, (0, "url"), "name or password.*token_env"),
        ([{"weight": 1.0}], {}, ("components", 0), "neither name nor function"),
        ([{"name": "exact", "function": "a.py:b"}], {}, (0, "function"), "both set"),
        ([{"function": "a.py:b", "wieght": 1.0}], {}, (0, "wieght"), "unknown key 'wieght'.*did you mean 'weight'"),
        ([{"name": "exact", "weight": 0}, {"name": "math", "weight": 0}], {}, ("reward", "components"), "all weights"),
        ([{"name": "exact", "weight": float("inf")}], {}, (0, "weight"), "must be finite"),
        (
            [{"name": "exact"}, {"name": "exact"}],
            {},
            ("reward", "components"),
            "2 components are called 'exact'.*label",
        ),
        ([{"name": "exact", "group": True}], {}, (0, "group"), "by itself"),
        ([{"name": "exact"}], {"group": True}, ("reward", "group"), "say it for themselves"),
    ],
)
def test_what_cannot_be_is_refused_at_its_key(
    components: list[dict[str, Any]], keys: dict[str, Any], path: tuple[Any, ...], words: str
) -> None:
    (problem,) = problems(*components, **keys)
    assert problem.path[-len(path) :] == path
    assert re.search(words, f"{problem.message} {problem.hint}"), problem


def test_a_negative_time_is_no_table() -> None:
    with pytest.raises(ValidationError):
        table(function="a.py:b", timeout_s=-1)


def test_components_and_group_size_are_checked_together() -> None:
    found = list(check_reward(table({"name": "exatc"}, {"function": "a.py:b", "group": True}), group_size=1))
    assert [one.path for one in found] == [("reward", "components", 0, "name"), ("reward",)]
    assert "did you mean 'exact'" in found[0].hint and "group_size is 1" in found[1].message
    assert list(check_reward(table({"name": "exact"}), group_size=1)) == []


# --- the sum


def component(label: str, weight: float = 1.0, *, forgive: bool = False, excess: bool = False) -> Component:
    return Component(label, weight, FunctionSpec(label), "worker", forgive, excess)


def test_the_reward_is_the_weighted_sum_and_components_are_as_they_were() -> None:
    parts = [component("math"), component("form", 0.2), component("mine", -1.0)]
    scores = [Score(1.0, {"reward": 1.0}), Score(0.5, {"reward": 0.5}), Score(0.3, {"a": 0.1, "b": 0.2}, (0.1, 0.2))]
    found = combine(parts, scores)
    assert isinstance(found, Score) and found.total == pytest.approx(0.8)
    assert found.components == {"math": 1.0, "form": 0.5, "mine": 0.3, "mine.a": 0.1, "mine.b": 0.2}
    assert found.turns == (-0.1, -0.2)
    # One function alone is what it says.
    assert combine([component("mine")], [scores[2]]) == scores[2]


def test_a_failure_fails_the_sample_or_counts_nothing() -> None:
    right, wrong = Score(1.0, {"reward": 1.0}), RewardFailed("no")
    assert combine([component("a"), component("b")], [right, wrong]) == RewardFailed("b: no")
    found = combine([component("a"), component("b", forgive=True)], [right, wrong])
    assert found == Score(1.0, {"a": 1.0, "b": 0.0}, forgiven=("b: no",))
    # What takes too long in a reward that is known is the completion's doing.
    late = RewardFailed("late", excess=True)
    unreadable = combine(
        [component("a"), component("b")], [RewardFailed("no gold", unreadable=True), Score(1.0, {"reward": 1.0})]
    )
    assert unreadable == Score(1.0, {"a": 0.0, "b": 1.0}, forgiven=("a: no gold",), unreadable="a: no gold")
    assert combine([component("a", excess=True)], [late]) == Score(0.0, {"a": 0.0}, forgiven=("late",))
    assert combine([component("a", excess=True)], [wrong]) == wrong
    assert combine([component("a")], [late]) == late


def test_turns_of_different_numbers_fail() -> None:
    scores = [Score(1.0, {}, (0.5, 0.5)), Score(1.0, {}, (1.0,))]
    assert "b has 1 turn_rewards, and others have 2" in str(combine([component("a"), component("b")], scores))


# --- all together


MINE = """
import time

def score(completion, answer, verdict=0.5):
    if completion == "raise":
        raise ValueError("no")
    return {"good": float(completion == answer), "verdict": verdict}

def ranks(completions, answer, tokens, **info):
    best = min(tokens)
    return [float(n == best) for n in tokens]

def hangs(completion, answer):
    time.sleep(600)
"""


async def scored(folder: Path, requests: list[RewardRequest], *components: dict[str, Any], **keys: Any) -> list[Any]:
    (folder / "mine.py").write_text(MINE)
    rewards = Rewards(table(*components, **keys), folder)
    try:
        await rewards.start()
        return list(await rewards.score(requests))
    finally:
        await rewards.close()


async def test_components_run_where_they_belong_and_are_added_up(tmp_path: Path) -> None:
    requests = [RewardRequest(text, "42", {"tokens": 3}) for text in ("42", "raise", "x 42")]
    parts = ({"name": "exact", "weight": 0.5}, {"name": "regex", "pattern": "x"}, {"function": "mine.py:score"})
    first, failed, last = await scored(tmp_path, requests, *parts)
    assert first == Score(2.0, {"exact": 1.0, "regex": 0.0, "score": 1.5, "score.good": 1.0, "score.verdict": 0.5})
    assert "score: mine.py:score raised ValueError: no" in failed.reason and "mine.py:6" in failed.reason
    assert last.total == 1.5
    forgiven = (await scored(tmp_path, requests, *parts, on_failure="zero"))[1]
    assert forgiven.total == 0.0 and "ValueError" in forgiven.forgiven[0]


async def test_groups_are_put_together_and_fail_as_one(tmp_path: Path) -> None:
    # As two reward workers' batches might mix them.
    requests = [RewardRequest("42", "42", {"tokens": 5 + n}, group=n % 2) for n in range(4)]
    parts = ({"function": "mine.py:ranks", "group": True}, {"function": "mine.py:score", "weight": 0.0})
    assert [one.total for one in await scored(tmp_path, requests, *parts)] == [1, 1, 0, 0]
    requests[3] = RewardRequest("raise", "42", {"tokens": 8}, group=1)
    results = await scored(tmp_path, requests, *parts)
    assert [isinstance(one, RewardFailed) for one in results] == [False, True, False, True]
    assert "another completion of its group failed: score: mine.py:score raised" in results[1].reason


async def test_a_function_of_ones_own_process_can_be_debugged(tmp_path: Path) -> None:
    request = RewardRequest("42", "42", {"verdict": 0.25})
    (found,) = await scored(tmp_path, [request], function="mine.py:score", workers=0)
    assert found == Score(1.25, {"good": 1.0, "verdict": 0.25})


@pytest.mark.parametrize("target", ["pack/sub.py:score", "pack.sub:score"])
@pytest.mark.parametrize("workers", [0, 1])
async def test_a_function_in_a_package_beside_the_config(tmp_path: Path, target: str, workers: int) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "near.py").write_text("RIGHT = 0.75")
    (tmp_path / "roles").mkdir()
    (tmp_path / "roles" / "mine.py").write_text("OWN = 1")
    text = "from .near import RIGHT\ndef score(said, right):\n    from roles.mine import OWN\n    return RIGHT * OWN\n"
    (tmp_path / "pack" / "sub.py").write_text(text)
    (found,) = await scored(tmp_path, [RewardRequest("42", "42", {})], function=target, workers=workers)
    assert isinstance(found, Score) and found.total == 0.75


def test_what_functions_want_is_known_before(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    assert requested_info(table({"name": "exact"}, {"function": "mine.py:score"}), tmp_path) == {"verdict"}
    assert requested_info(table({"function": "mine.py:ranks", "group": True}), tmp_path) is None


ITEM = PromptItem(item="i", split="train", question="q", answer="42", metadata={}, messages=[], tokens=[])


def test_a_dry_run_names_the_component(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    parts = ({"name": "exact"}, {"function": "mine.py:hangs"})
    (problem,) = dry_run(table(*parts, timeout_s=1.0), tmp_path, [ITEM], None)
    assert problem.path == ("reward", "components", 1) and "its process was killed" in problem.message
    (problem,) = dry_run(table({"name": "exact"}, {"function": "mine.py:nothing"}), tmp_path, [ITEM], None)
    assert problem.path == ("reward", "components", 1, "function") and "has no 'nothing'" in problem.message
    groups = ({"function": "mine.py:ranks", "group": True},)
    assert dry_run(table(*groups), tmp_path, [ITEM], None) == []


def test_closing_before_starting_is_allowed() -> None:
    asyncio.run(Rewards(table(function="exact"), Path()).close())
