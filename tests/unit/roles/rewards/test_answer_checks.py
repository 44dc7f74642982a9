"""Right answers scored against themselves, before a run and in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from relax_rt.cli.main import main
from relax_rt.config.job import AnswerReport
from relax_rt.observe.notes import EventNotes
from relax_rt.roles.data.index import RowIndex
from relax_rt.roles.data.settings import DataTable
from relax_rt.roles.rewards import answer_checks
from relax_rt.roles.rewards.answer_checks import MAX_PRINTED, check_answers
from relax_rt.roles.rewards.settings import RewardTable

pytestmark = pytest.mark.skipif(find_spec("math_verify") is None, reason="math-verify is not installed")

CONFIG = """
[run]
name = "r"
[model]
path = "package:tiny"
[data]
path = "d.jsonl"
[reward]
function = "{function}"
"""


def rows(folder: Path, answers: Sequence[Any]) -> RowIndex:
    lines = [json.dumps({"prompt": f"question {number}", "answer": answer}) for number, answer in enumerate(answers)]
    (folder / "d.jsonl").write_text("\n".join(lines) + "\n")
    return RowIndex.open(DataTable(path="d.jsonl"), folder)


def check(folder: Path, answers: Sequence[Any], *, every: bool = True, **reward: Any) -> list[AnswerReport]:
    return check_answers(RewardTable.model_validate(reward), rows(folder, answers), folder, every=every)


def test_answers_that_cannot_be_read_are_named_by_file_and_line(tmp_path: Path) -> None:
    (report,) = check(tmp_path, ["2\\sqrt{2}", "5!!", "42", "x if y", "5!!"], function="math")
    assert (report.reward, report.rows, report.checked, report.wrong) == ("math", 5, 5, 3)
    assert [Path(one.where).name for one in report.examples] == ["d.jsonl:2", "d.jsonl:4", "d.jsonl:5"]
    assert "'!!' is not understood" in report.examples[0].why
    head, *examples = report.lines(2)
    assert head.startswith("3 of 5 right answers") and "'math'" in head
    assert "d.jsonl:2: '5!!'" in examples[0] and "1 more" in examples[-1]
    # More than half: the reward does not fit the data.
    problem = report.problem(MAX_PRINTED)
    assert problem is not None
    assert problem.path == ("reward",) and "d.jsonl:2" in problem.message
    assert [one.problem(MAX_PRINTED) for one in check(tmp_path, ["1", "2", "5!!"], function="math")] == [None]


def test_an_answer_is_shown_whole(tmp_path: Path) -> None:
    (report,) = check(tmp_path, ["none, " * 100, "x" * 5000], function="integer")
    (_, first, second) = report.lines(2)
    assert repr("none, " * 100) in first
    assert len(second) < 2000 and "x…'" in second


def test_each_reward_that_compares_is_asked_and_no_other(tmp_path: Path) -> None:
    answers = ["42", "B"]
    parts = [{"name": "exact"}, {"name": "choice", "label": "letter"}, {"name": "regex", "pattern": "x"}]
    parts += [{"name": "integer"}, {"name": "lenient_integer", "weight": 0.0}, {"function": "mine.py:score"}]
    found = {report.reward: report.wrong for report in check(tmp_path, answers, components=parts)}
    assert found == {"exact": 0, "letter": 1, "integer": 1}
    assert check(tmp_path, answers, function="mine.py:score") == []


@pytest.mark.parametrize("weight", [0.5, -1.0, 2.0, 0.001, -0.25])
def test_weight_of_a_component_does_not_count(tmp_path: Path, weight: float) -> None:
    parts = [{"name": "math", "weight": weight}, {"name": "length", "free": 50, "most": 100}]
    (report,) = check(tmp_path, ["42", "\\frac{1}{2}", "5!!"], components=parts)
    assert (report.checked, report.wrong) == (3, 1) and "'!!' is not understood" in report.examples[0].why


def test_some_rows_are_drawn_and_all_on_demand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_checks, "FIRST", 4)
    monkeypatch.setattr(answer_checks, "DRAWN", 3)
    answers = [str(number) for number in range(19)] + ["none"]
    assert [one.checked for one in check(tmp_path, answers, every=False, function="integer")] == [7]
    assert [(one.checked, one.wrong) for one in check(tmp_path, answers, function="integer")] == [(20, 1)]
    assert [one.checked for one in check(tmp_path, answers[:3], every=False, function="integer")] == [3]


def test_a_whole_solution_gets_1_too(tmp_path: Path) -> None:
    (report,) = check(tmp_path, ["So 48/2 = 24.\n#### 24", "It is $\\boxed{\\frac{1}{2}}$."], function="math")
    assert report.wrong == 0


def test_a_list_of_answers_gets_1_too(tmp_path: Path) -> None:
    (report,) = check(tmp_path, [[1, 2], ["x", "\\frac{1}{2}"]], function="math")
    assert (report.checked, report.wrong) == (2, 0)


def test_validate_all(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "roles.toml").write_text(CONFIG.format(function="integer"))
    rows(tmp_path, ["1", "5!!", "1,234"])
    assert main(["validate", "--quick", "--all"]) == 2
    out = capsys.readouterr().out
    assert "1 of 3 right answers" in out and "d.jsonl:2: '5!!'" in out
    assert main(["validate", "--quick", "--all", "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False and found["answers"][0]["wrong"] == 1
    rows(tmp_path, ["1", "2", "1,234"])
    assert main(["validate", "--quick", "--all"]) == 0
    assert "3 right answers get 1 from 'integer'" in capsys.readouterr().out


def test_validate_all_refuses_a_reward_that_reads_few_answers_as_the_check_of_some_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "roles.toml").write_text(CONFIG.format(function="integer"))
    rows(tmp_path, ["1", *(f"{number}!!" for number in range(30))])
    told = {}
    for words in ([], ["--quick", "--all"]):
        assert main(["validate", *words]) == 2
        told[bool(words)] = capsys.readouterr().err
    for text in told.values():
        assert "roles.toml:8:1: 30 of 31 right answers" in text and "name the column that holds the answer" in text
    assert told[True].count("d.jsonl:") == 20 and "… and 10 more" in told[True]
    assert main(["validate", "--quick", "--all", "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["problems"][0]["path"] == ["reward"] and found["problems"][0]["place"]["line"] == 8
    assert found["ok"] is False and len(found["answers"][0]["examples"]) == 30


@pytest.mark.parametrize("every", [False, True])
def test_validate_scores_right_answers_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, every: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "roles.toml").write_text(CONFIG.format(function="integer"))
    rows(tmp_path, [*map(str, range(400)), "5!!"])
    assert main(["validate", *(["--all"] if every else [])]) == (2 if every else 0)
    said = capsys.readouterr()
    assert (said.out + said.err).count("d.jsonl:401: '5!!'") == 1
    assert ("scoring right answers" in said.err) != every


def test_why_tells_of_the_first_answer_that_a_run_cannot_read() -> None:
    story = EventNotes()
    event = {
        "kind": "answer_unreadable",
        "t": 1.0,
        "slot": "reward/0",
        "item": "ab",
        "reason": "math: the answer '5!!' …",
    }
    note = story.note(event)
    assert note is not None and note.tone == "warning" and "item ab" in note.text and "5!!" in note.text
    assert story.note(event) is None
