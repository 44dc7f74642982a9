"""Further held-out sets: what a config may say, which items they have, when they are due, who judges them."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fresh_model import save_fresh
from hypothesis import given
from hypothesis import strategies as st

from relax_rt.config.loader import load_config
from relax_rt.config.problems import ConfigErrors, Problem
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.data.source import PromptSource
from relax_rt.roles.evaluation import sets as evaluation_sets
from relax_rt.roles.evaluation.judge import MAX_HUNG_BATCHES, JudgedCompletion, SetJudge
from relax_rt.roles.evaluation.sets import MAIN, EvaluationSchedule, VersionLineage, load_set, schedules, set_specs
from relax_rt.roles.evaluation.settings import EvaluationSet
from relax_rt.roles.models.tokenizer import load_tokenizer
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import RelaxError, Unreachable

TOML = """
[run]
name = "r"
dir = "{dir}/run"
[model]
path = "model"
[data]
path = "train.jsonl"
held_out = 0.5
template = "{{question}} ="
[reward]
function = "relax_rt.roles.rewards.builtin:integer"
[sampling]
max_new_tokens = 8
[algorithm]
steps = 20
[evaluation]
items = 4
every_steps = 5
[[evaluation.sets]]
name = "hard"
path = "hard.jsonl"
samples = 4
pass_at = [4, 1]
greedy = true
[[evaluation.sets]]
name = "judged"
path = "hard.jsonl"
template = "{{question}}?"
reward = "judge.py:even"
success = 0.9
every_steps = 0
at_steps = [3, 20]
temperature = 0.0
"""
JUDGE = """
import time
def even(completion, answer, **info):
    if completion == "sleep":
        time.sleep(30)
    if completion == "fail":
        raise ValueError("no number")
    return float(completion in ("2", "4", "6", "8"))
def broken(completion, answer):
    return 1 / 0
async def split(completion, answer, split, tokens, finish_reason):
    return {"split": split == "held_out", "tokens": tokens, "stop": finish_reason == "stop"}
"""


def rows(path: Path, questions: range) -> None:
    path.write_text("".join(json.dumps({"prompt": f"{i} + 1", "answer": str(i + 1)}) + "\n" for i in questions))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config with two further sets, of which a part of the items is trained on."""
    folder = tmp_path_factory.mktemp("sets")
    save_fresh(folder / "model")
    rows(folder / "train.jsonl", range(100))
    rows(folder / "hard.jsonl", range(90, 130))
    (folder / "judge.py").write_text(JUDGE)
    (folder / "roles.toml").write_text(TOML.format(dir=folder))
    return folder


def problems(folder: Path, *overrides: str, change: tuple[str, str] = ("", ""), **how: bool) -> dict[str, Problem]:
    """What is wrong once `change` was made to the file, by dotted key."""
    path = folder / "changed.toml"
    text = (folder / "roles.toml").read_text()
    assert change[0] in text
    path.write_text(text.replace(*change, 1) if change[0] else text)
    try:
        load_config(path, overrides, **how)
    except ConfigErrors as error:
        return {".".join(map(str, p.path)): p for p in error.problems}
    return {}


def loaded(folder: Path) -> RLConfig:
    config = load_config(folder / "roles.toml")
    assert isinstance(config, RLConfig)
    return config


def test_the_config_of_these_tests_is_right(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert problems(folder, preflight=True) == {}
    said = capsys.readouterr().err
    assert "evaluation set 'hard'" in said and "are left out, because the run trains on them" in said


@pytest.mark.parametrize(
    ("change", "key", "words"),
    [
        (('name = "judged"', 'name = "hard"'), "evaluation.sets.0.name", "several sets"),
        (('name = "judged"', 'name = "held_out"'), "evaluation.sets.1.name", "[data] holds out"),
        (("pass_at = [4, 1]", "pass_at = [8]"), "evaluation.sets.0.pass_at", "needs at least 8 samples"),
        (("at_steps = [3, 20]", "at_steps = [21]"), "evaluation.sets.1.at_steps", "algorithm.steps = 20"),
        (("success = 0.9", "samples = 2"), "evaluation.sets.1.samples", "all alike"),
        (("success = 0.9", "greedy = true"), "evaluation.sets.1.greedy", "does already"),
        (("success = 0.9", 'task = "chain_sum"'), "evaluation.sets.1", "both set"),
        (("success = 0.9", "options = { a = 1 }"), "evaluation.sets.1.options", "no effect"),
        (('"{question}?"', '"why?"'), "evaluation.sets.1.template", "would be the same"),
        (("every_steps = 5", "pass_at = [2]"), "evaluation.pass_at", "samples = 1"),
    ],
)
def test_what_cannot_work_is_refused_at_its_key(folder: Path, change: tuple[str, str], key: str, words: str) -> None:
    found = problems(folder, change=change)
    assert key in found and words in found[key].message


@pytest.mark.parametrize(
    ("change", "key", "words"),
    [
        (('path = "hard.jsonl"', 'path = "herd.jsonl"'), "evaluation.sets.0.path", "there is no file"),
        (('path = "hard.jsonl"', 'path = "hard.jsonl"\nmax_prompt_tokens = 1'), "evaluation.sets.0", "none of its 0"),
        (("success = 0.9", "max_new_tokens = 100000"), "evaluation.sets.1.max_new_tokens", "model's context"),
        (('"judge.py:even"', '"judge.py:odd"'), "evaluation.sets.1.reward", "odd"),
        (('"judge.py:even"', '"judge.py:broken"'), "evaluation.sets.1.reward", "dry run"),
    ],
)
def test_data_and_functions_of_sets_are_tried_before(
    folder: Path, change: tuple[str, str], key: str, words: str
) -> None:
    found = problems(folder, change=change, preflight=True)
    assert list(found) == [key] and words in found[key].message


def test_without_an_evaluator_there_are_no_sets(folder: Path) -> None:
    found = problems(folder, "roles.evaluator.count=0")
    assert {"evaluation.every_steps", "evaluation.sets"} == set(found)


def test_what_a_set_leaves_out_is_the_runs_own(folder: Path) -> None:
    main, hard, judged = set_specs(loaded(folder))
    assert (main.name, main.ks, main.items, main.every_steps) == (MAIN, (1,), 4, 5)
    assert (hard.ks, hard.temperature, hard.every_steps, hard.max_new_tokens) == ((1, 4), 1.0, 5, 8)
    assert (judged.ks, judged.temperature, judged.every_steps, judged.at_steps) == ((1,), 0.0, 0, (3, 20))
    assert (judged.count("during"), main.count("during"), main.count("after")) == (256, 256, 4)


def test_items_that_are_trained_on_are_dropped(folder: Path) -> None:
    config = loaded(folder)
    tokenizer = load_tokenizer(folder / "model")
    source = PromptSource.load(config.data, tokenizer, seed=0, config_dir=folder)
    items, left_out = load_set(config.evaluation.sets[0], config, source, tokenizer, folder)
    trained = {item.question for item in source.train}
    assert left_out > 0 and len(items) + left_out == 40
    assert not trained & {item.question for item in items}
    assert {item.split for item in items} == {MAIN} and list(items) == sorted(items, key=lambda item: item.item)
    only = EvaluationSet(name="same", path="train.jsonl")
    kept, _ = load_set(only, config, source, tokenizer, folder)
    assert {item.item for item in kept} == {item.item for item in source.held_out}
    rows(folder / "trained.jsonl", range(0))
    (folder / "trained.jsonl").write_text(
        "".join(json.dumps({"prompt": i.question, "answer": i.answer}) + "\n" for i in source.train)
    )
    with pytest.raises(RelaxError, match="are trained on"):
        load_set(EvaluationSet(name="all", path="trained.jsonl"), config, source, tokenizer, folder)


# --- when


def schedule(every: int = 0, at: tuple[int, ...] = (), last: int = 100) -> EvaluationSchedule:
    table: Any = RLConfig.model_validate(
        {
            "run": {"name": "a"},
            "model": {"path": "m"},
            "data": {"task": "t"},
            "reward": {"function": "f:g"},
            "algorithm": {"steps": last},
            "evaluation": {"every_steps": every, "at_steps": list(at)},
        }
    )
    return EvaluationSchedule(set_specs(table)[0], last)


def walk(one: EvaluationSchedule, steps: list[int]) -> list[tuple[int, str]]:
    """The evaluations made as these steps' weights come, the initial ones first."""
    made = []
    for step in [0, *steps]:
        if when := one.when(step):
            one.record({"when": when, "step": step})
            made.append((step, when))
    return made


def test_a_set_is_due_before_during_and_after() -> None:
    assert walk(schedule(every=10), list(range(31))) == [(0, "before"), (10, "during"), (20, "during"), (30, "during")]
    assert walk(schedule(at=(3, 7), last=9), list(range(1, 10)))[1:] == [(3, "during"), (7, "during"), (9, "after")]
    assert walk(schedule(last=4), list(range(1, 5))) == [(0, "before"), (4, "after")]


def test_steps_that_were_missed_are_made_up_for_once() -> None:
    assert walk(schedule(every=10, at=(12,)), [9, 35, 36, 40])[1:] == [(35, "during"), (40, "during")]
    assert walk(schedule(at=(3, 7)), [8, 9])[1:] == [(8, "during")]


def asked(one: EvaluationSchedule, steps: list[int]) -> list[tuple[str, int, list[int]]]:
    """The evaluations made as these steps' weights come: when, whose weights, and for which chosen steps."""
    made = []
    for step in [0, *steps]:
        if when := one.when(step):
            made.append((when, step, one.due_steps(step)))
            one.record({"when": when, "step": step})
    return made


def test_an_evaluation_says_which_steps_it_is_for() -> None:
    assert asked(schedule(at=(2, 5)), [1, 2, 5, 6]) == [("before", 0, []), ("during", 2, [2]), ("during", 5, [5])]
    # Those that it was too busy for, in one evaluation; a step that is chosen twice stands there once.
    assert asked(schedule(every=4, at=(8, 7, 12)), [3, 13, 14])[1:] == [("during", 13, [4, 7, 8, 12])]
    assert schedule(every=4).due_steps(3) == schedule().due_steps(50) == []


def test_the_last_step_is_one_evaluation_however_it_was_chosen() -> None:
    assert asked(schedule(at=(9,), last=9), [8, 9]) == [("before", 0, []), ("after", 9, [9])]
    assert asked(schedule(every=3, at=(9,), last=9), [6, 9])[1:] == [("during", 6, [3, 6]), ("after", 9, [9])]
    # The run ended while it was busy with its first evaluation.
    assert asked(schedule(at=(2, 4), last=9), [9, 9])[1:] == [("after", 9, [2, 4])]
    assert asked(schedule(last=9), [5, 9])[1:] == [("after", 9, [])]


def test_after_a_roll_back_it_is_due_again() -> None:
    one = schedule(every=10, last=30)
    for when, step, version in (("before", 0, 0), ("during", 10, 11), ("during", 20, 21), ("after", 30, 31)):
        one.record({"when": when, "step": step, "version": version})
    # The trainer went back to step 15, of version 16, and version 32 has its weights.
    path = {*range(17), 32, 33}
    one.keep_path(path)
    assert [one.when(step) for step in (15, 16, 20, 30)] == ["", "", "during", "after"]
    assert one.due_steps(22) == [20] and one.due_steps(30) == [20, 30]
    # An evaluation that was in hand is of the branch that was left.
    one.record({"when": "during", "step": 20, "version": 22})
    assert one.when(20) == "during"
    one.record({"when": "during", "step": 20, "version": 33})
    assert one.when(20) == "" and one.done == 20


class Away:
    """A registry of these versions that is away at first."""

    def __init__(self, records: list[VersionRecord], times: int) -> None:
        self.records, self.times, self.asked = records, times, 0

    async def versions(self) -> list[VersionRecord]:
        self.asked += 1
        if self.asked <= self.times:
            raise Unreachable("registry/0")
        return self.records


async def test_a_fall_back_that_was_overtaken_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation_sets, "RETRY_S", 0.0)
    records = [VersionRecord(n, n - 1, n - 1) for n in (1, 2, 3, 4)]
    # Back to step 1, whose weights are published again as version 6; versions 5 and 8 were never committed.
    records += [VersionRecord(6, 2, 1, changed=False), VersionRecord(7, 6, 2), VersionRecord(9, 7, 3)]
    waits: list[str] = []
    registry = Away(records[:4], times=2)
    ctx = SimpleNamespace(registry=registry, stopping=asyncio.Event(), progress=SimpleNamespace(waiting=waits.append))
    lineage = VersionLineage(ctx)  # type: ignore[arg-type]
    assert await lineage.path_to(records[0]) == {0, 1} and await lineage.path_to(records[1]) == {0, 1, 2}
    assert registry.asked == 0, "whoever misses none needs not ask"
    assert await lineage.path_to(records[3]) == {0, 1, 2, 3, 4} and len(waits) == 2 and "registry/0" in waits[0]
    # While an evaluation went on, the trainer fell back and came as far as version 9.
    registry.records = records
    assert await lineage.path_to(records[-1]) == {0, 1, 2, 6, 7, 9}
    assert registry.asked == 4


@given(st.integers(0, 7), st.lists(st.integers(1, 30)), st.sets(st.integers(1, 30)))
def test_whatever_versions_come_the_ends_are_evaluated_once(every: int, at: list[int], seen: set[int]) -> None:
    made = walk(schedule(every, tuple(at), last=30), sorted(seen | {30}))
    assert made[0] == (0, "before") and made[-1] == (30, "after")
    assert len({step for step, _ in made}) == len(made)
    wanted = {step for step in at if step < 30}
    for want in wanted:
        first = min(step for step in seen | {30} if step >= want)
        assert first in {step for step, _ in made}
    chosen = [step for _, _, steps in asked(schedule(every, tuple(at), last=30), sorted(seen | {30})) for step in steps]
    assert chosen == sorted({*at, *(range(every, 31, every) if every else ())}), "each is evaluated for, once"


def test_an_earlier_incarnations_evaluations_count(folder: Path) -> None:
    records = [
        {"kind": "evaluation", "when": "before", "step": 0, "exact": 0.1},
        {"kind": "evaluation_set", "set": "hard", "when": "before", "step": 0, "exact": 0.2},
        {"kind": "evaluation", "set": MAIN, "when": "during", "step": 5},
        {"kind": "evaluation_set", "set": "a set of another config", "when": "during", "step": 5},
    ]
    found = schedules(loaded(folder), records)
    assert {name: one.done for name, one in found.items()} == {MAIN: 5, "hard": 0, "judged": -1}
    assert found["hard"].before == records[1] and found["judged"].when(0) == "before"


# --- who judges


def judge(folder: Path, function: str, timeout_s: float = 5.0) -> SetJudge:
    table = EvaluationSet(name="s", path="hard.jsonl", reward=function, success=0.9)
    return SetJudge(table, folder, timeout_s, None)


@pytest.fixture(scope="module")
def items(folder: Path) -> list[Any]:
    config = loaded(folder)
    tokenizer = load_tokenizer(folder / "model")
    source = PromptSource.load(config.data, tokenizer, seed=0, config_dir=folder)
    return source.held_out


async def test_a_judge_says_what_is_right_and_what_it_could_not_judge(folder: Path, items: list[Any]) -> None:
    one, calls = judge(folder, "judge.py:even"), []
    texts = [JudgedCompletion(text, 1, "stop") for text in ("2", "3", "fail", "4")]
    verdict = await one.judge(items[:2], texts, lambda: calls.append(1))
    await one.close()
    assert (verdict.right, verdict.failed, len(calls)) == ([True, False, False, True], 1, 4)
    assert verdict.reward == pytest.approx(2 / 3) and "ValueError" in verdict.reason


async def test_a_judge_gets_the_completion(folder: Path, items: list[Any]) -> None:
    one = judge(folder, "judge.py:split")
    verdict = await one.judge(
        items[:1], [JudgedCompletion("a", 3, "length"), JudgedCompletion("b", 4, "stop")], lambda: None
    )
    await one.close()
    # split + tokens + stop
    assert verdict.reward == pytest.approx((1 + 3 + 0 + 1 + 4 + 1) / 2) and verdict.right == [True, True]


async def test_a_judge_that_hangs_is_not_called_for_ever(folder: Path, items: list[Any]) -> None:
    one = judge(folder, "judge.py:even", timeout_s=0.05)
    texts = [JudgedCompletion("sleep", 1, "stop")] * 200
    async with asyncio.timeout(120):
        began = time.monotonic()
        verdict = await one.judge(items[:1], texts, lambda: None)
    await one.close()
    assert verdict.failed == 200 and verdict.reward is None and not any(verdict.right)
    assert one._hung_batches == MAX_HUNG_BATCHES, time.monotonic() - began
