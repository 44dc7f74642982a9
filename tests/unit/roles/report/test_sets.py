"""Held-out sets in the summary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from synthetic_run import START, Writer, evaluation, make

from relax_rt.roles.report.summary import render_summary, report


def scored(when: str, step: int, one: float, eight: float, **more: Any) -> dict[str, Any]:
    """One evaluator line of a further set."""
    return {
        "set": "hard",
        "when": when,
        "step": step,
        "items": 256,
        "samples": 8,
        "exact": one,
        "pass_at": {"1": one, "8": eight},
        "pass_at_low": {"1": one - 0.1, "8": eight - 0.1},
        "pass_at_high": {"1": one + 0.1, "8": eight + 0.1},
        **more,
    }


def test_a_set_is_reported_before_and_after(tmp_path: Path) -> None:
    out = Writer(tmp_path)
    last = {"reward": 1.0, "greedy": {"exact": 0.5, "success": 0.75}}
    out.metric("evaluation_set", START, "evaluator/0#1", **scored("before", 0, 0.25, 0.5, reward=0.125))
    out.metric("evaluation_set", START + 1, "evaluator/0#1", **scored("during", 5, 0.3, 0.6))
    out.metric("evaluation_set", START + 2, "evaluator/0#1", **scored("after", 9, 0.5, 0.875, **last))
    out.close()
    summary = report(tmp_path)
    hard = summary["sets"]["hard"]
    assert (hard["before"]["step"], hard["after"]["step"], hard["newest"]) == (0, 9, hard["after"])
    assert hard["after"]["pass_at"]["8"] == (0.875, 0.775, 0.975) and hard["after"]["greedy"] == 0.75
    text = "\n".join(render_summary(summary))
    assert "hard: pass@1 0.250 -> 0.500 [0.400, 0.600], pass@8 0.500 -> 0.875 [0.775, 0.975]" in text
    assert "greedy 0.750, reward 0.125 -> 1.000 on 256 items x 8" in text


def test_a_set_of_a_run_that_did_not_end(tmp_path: Path) -> None:
    out = Writer(tmp_path)
    out.metric("evaluation_set", START, "evaluator/0#1", **scored("before", 0, 0.25, 0.5))
    out.close()
    text = "\n".join(render_summary(report(tmp_path)))
    assert "hard: pass@1 0.250 [0.150, 0.350], pass@8 0.500 [0.400, 0.600] on 256 items x 8 at step 0" in text


def test_several_completions_of_the_runs_own_items_are_reported_too(tmp_path: Path) -> None:
    out = Writer(tmp_path)
    line = evaluation("before", 0, 0.3) | {"samples": 4, "pass_at": {"4": 0.5}}
    out.metric("evaluation", START, "evaluator/0#1", **line)
    out.metric("evaluation_set", START, "evaluator/0#1", set="odd", pass_at={"1": None, "2": "x"}, items=None)
    out.close()
    summary = report(tmp_path)
    assert summary["sets"]["held_out"]["before"]["pass_at"] == {"4": (0.5, 0.0, 1.0)}
    assert "odd: nothing measured" in "\n".join(render_summary(summary))


def test_without_sets_nothing_is_said_of_them(tmp_path: Path) -> None:
    make(tmp_path, steps=3)
    summary = report(tmp_path)
    assert summary["sets"] == {} and "held-out sets" not in "\n".join(render_summary(summary))
