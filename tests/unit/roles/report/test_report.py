from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import START, Writer, evaluation, make, step_record

from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.report.summary import finish, render_summary, report

PLOTS = ["learning_by_step.png", "learning_by_time.png", "staleness.png", "timeline.png"]


def drawn(summary: dict[str, Any]) -> list[str]:
    files = [Path(name) for name in summary["plots"]["files"]]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
    return [file.name for file in files]


def config(**algorithm: Any) -> RLConfig:
    return RLConfig.model_validate(
        {
            "run": {"name": "synthetic"},
            "model": {"path": "package:tiny"},
            "data": {"task": "chain_sum"},
            "reward": {"function": "reward.py:score"},
            "algorithm": algorithm,
        }
    )


def test_a_whole_run_with_a_restart_in_the_middle(tmp_path: Path) -> None:
    make(tmp_path, steps=60, crash_at=47, checkpoint=40)
    summary = finish(tmp_path, config(steps=60, max_staleness=1))
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    assert drawn(summary) == PLOTS
    assert summary["steps"] == {
        "done": 60,
        "target": 60,
        "redone": 7,
        "redone_s": pytest.approx(190, rel=0.1),
        "skipped": 0,
        "empty": 0,
    }
    assert summary["samples"] == {"trained": 60 * 96, "trained_twice": 0}
    assert summary["staleness"]["max"] == 1 and summary["staleness"]["held"]
    assert sum(summary["staleness"]["samples"].values()) == 60 * 96
    assert summary["held_out"]["gain"] == pytest.approx(0.249) and summary["held_out"]["gain_clear"]
    text = "\n".join(render_summary(summary))
    for part in (
        "0.312 -> 0.561 [0.518, 0.604] on 512 items",
        "above zero",
        "format 97.0%",
        'best constant answer ("12") 0.031',
        "60 of 60, 5,760 samples, 7 more done again",
        "at least 1.00 M generated",
        "max 1, bound 1",
        "trainer 1 (killed): away 14 s, 7 steps done again",
        "trained twice: 0",
        str(tmp_path),
    ):
        assert part in text


def test_a_run_that_died_before_the_first_step(tmp_path: Path) -> None:
    out = Writer(tmp_path)
    out.event("run_started", START)
    out.event("slot_spawned", START + 1, slot="trainer/0", epoch=3, pid=7)
    out.event("slot_exited", START + 5, slot="trainer/0", diagnosis={"kind": "exception", "cause": "no such model"})
    out.close()
    summary = report(tmp_path, target=100, bound=math.inf)
    assert drawn(summary) == ["timeline.png"]
    assert summary["steps"]["done"] == 0 and summary["time"]["wall_s"] == 5.0
    text = "\n".join(render_summary(summary))
    assert "not evaluated" in text and "0 of 100" in text


def test_an_empty_directory(tmp_path: Path) -> None:
    summary = report(tmp_path)
    assert summary["plots"]["skipped"]
    assert len(render_summary(summary)) >= 8


def test_a_stopped_run_has_no_gain(tmp_path: Path) -> None:
    out = Writer(tmp_path)
    out.metric("evaluation", START, "evaluator/0#1", **evaluation("before", 0, 0.3))
    out.close()
    assert "before the first step; not evaluated since" in render_summary(report(tmp_path))[0]
    out = Writer(tmp_path)
    out.metric("evaluation", START + 9, "evaluator/0#1", **evaluation("during", 20, 0.4, 256, before=0.3))
    out.close()
    summary = report(tmp_path)
    assert summary["held_out"]["gain"] is None
    assert "at step 20 (the run ended before its last evaluation)" in render_summary(summary)[0]


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.01, 0.2, "above zero"), (-0.05, 0.1, "not shown"), (-0.2, -0.01, "it got worse")],
)
def test_a_gain_is_judged_by_its_interval(tmp_path: Path, low: float, high: float, verdict: str) -> None:
    out = Writer(tmp_path)
    out.metric("evaluation", START, "evaluator/0#1", **evaluation("before", 0, 0.3))
    last = {**evaluation("after", 20, 0.4), "gain_low": low, "gain_high": high}
    out.metric("evaluation", START + 9, "evaluator/0#1", **last)
    out.close()
    assert verdict in render_summary(report(tmp_path))[1]


def test_the_newest_evaluation_of_fewer_items_says_of_how_many_the_first_one_was(tmp_path: Path) -> None:
    out = Writer(tmp_path)
    out.metric("evaluation", START, "evaluator/0#1", **evaluation("before", 0, 0.5, 16))
    out.metric("evaluation", START + 9, "evaluator/0#1", **evaluation("during", 3, 0.375, 8, before=0.5))
    out.close()
    line = render_summary(report(tmp_path))[0]
    assert "0.500 on 16 items -> 0.375 [" in line and "on 8 items at step 3" in line


def test_the_parts_of_a_step_are_no_more_than_the_step(tmp_path: Path) -> None:
    out, rng = Writer(tmp_path), random.Random(0)
    out.event("run_started", START)
    t = START
    for n in range(1, 8):
        # Steps that wait and steps that find all samples there, by turns.
        parts = {"wait_s": 6.0 if n % 2 else 0.1, "train_s": 0.25, "publish_s": 0.25}
        t += sum(parts.values())
        out.metric("step", t, "trainer/0#4", **step_record(n, 4, n * 12, rng) | parts)
    out.close()
    time = report(tmp_path)["time"]
    assert time["wait_s"] + time["train_s"] + time["publish_s"] == pytest.approx(time["step_s"])


@pytest.mark.parametrize(
    ("steps", "line"),
    [
        (1, "reward 0.100"),
        (2, "reward 0.100 -> 0.200 (mean of first, last step)"),
        (5, "reward 0.150 -> 0.450 (mean of first, last 2 steps)"),
        (10, "reward 0.300 -> 0.800 (mean of first, last 5 steps)"),
        (30, "reward 0.550 -> 2.550 (mean of first, last 10 steps)"),
    ],
)
def test_the_first_and_the_last_rewards_are_of_different_steps(tmp_path: Path, steps: int, line: str) -> None:
    out, rng = Writer(tmp_path), random.Random(0)
    for n in range(1, steps + 1):
        out.metric("step", START + 30 * n, "trainer/0#4", **step_record(n, 4, n * 12, rng) | {"reward_mean": n / 10})
    out.close()
    assert line in [one.strip() for one in render_summary(report(tmp_path))]


def test_a_cold_start_is_reported_by_its_losses(tmp_path: Path) -> None:
    out = Writer(tmp_path)
    # Step 2 is made again after a restart.
    for t, (step, loss) in enumerate([(0, None), (1, 3.0), (2, 9.0), (2, 2.5), (3, 2.0)]):
        told = {"validation_loss": 3.5 - step} if step in (0, 3) else {}
        told |= {"loss": loss} if loss is not None else {}
        out.metric("cold_start", START + t, "trainer/0#4", phase="sft", step=step, of=3, **told)
    out.close()
    summary = report(tmp_path)
    assert summary["cold_start"]["loss"] == [3.0, 2.0]
    lines = [line for line in render_summary(summary) if line.startswith("cold start")]
    assert [line.split(maxsplit=2)[2] for line in lines] == [
        "sft, 3 of 3 steps, loss 3.0000 -> 2.0000, validation loss 3.5000 -> 0.5000"
    ]
    (tmp_path / "none").mkdir()
    assert report(tmp_path / "none")["cold_start"] is None


def test_lost_samples_are_reported_as_sampled_again(tmp_path: Path) -> None:
    out = Writer(tmp_path)
    out.event("queue_account", START + 99, "queue/0#2", samples_issued=104, freed=96, lost=8, trained_twice=0)
    out.close()
    text = "\n".join(render_summary(report(tmp_path)))
    assert "104 samples: 96 freed, 8 lost with their memory, their prompts sampled again\n" in text


def test_only_states_of_samples_are_counted_as_samples(tmp_path: Path) -> None:
    out = Writer(tmp_path)
    states = {"freed": 90, "failed": 4, "quarantined": 1, "skipped": 3, "dropped(surplus)": 1, "refused(stale)": 1}
    others = ("bytes_spilled", "groups_recycled", "groups_failed", "stragglers", "refused_tokens", "prompts_issued")
    counts = {**states, **dict.fromkeys(others, 7), "samples_issued": 100}
    out.event("queue_account", START + 99, "queue/0#2", **counts, trained_twice=0)
    out.close()
    text = "\n".join(render_summary(report(tmp_path)))
    expected = ", ".join(f"{n} {name}" for name, n in states.items())
    assert f"queue              100 samples: {expected}\n" in text


def test_defects_are_not_hidden(tmp_path: Path) -> None:
    out, rng = Writer(tmp_path), random.Random(0)
    out.event("run_started", START)
    for n in (1, 2):
        # The second step consumes the samples of the first once more, over-stale.
        record = step_record(n, 4, 1, rng) | {"staleness": [3] * 96}
        out.metric("step", START + 30 * n, "trainer/0#4", **record)
    out.event("queue_account", START + 99, "queue/0#2", samples_issued=96, freed=96, trained_twice=96)
    out.close()
    summary = report(tmp_path, bound=2)
    assert summary["samples"]["trained_twice"] == 96 and summary["staleness"]["held"] is False
    text = "\n".join(render_summary(summary))
    assert "bound 2: VIOLATED" in text and "trained twice: 96  <- DEFECT" in text


def test_what_filters_dropped_is_said_once_and_by_rule(tmp_path: Path) -> None:
    out, rng = Writer(tmp_path), random.Random(0)
    out.metric("step", START + 30, "trainer/0#4", **step_record(1, 4, 1, rng))
    counts = {"dropped(filter)": 1300, "filtered(truncated)": 300, "filtered(zero_variance)": 1000}
    out.event("queue_account", START + 99, "queue/0#2", samples_issued=1396, freed=96, trained_twice=0, **counts)
    out.close()
    text = "\n".join(render_summary(report(tmp_path)))
    assert "1,396 samples: 96 freed, 1,300 dropped(filter: 1,000 zero_variance, 300 truncated)\n" in text


def test_a_disagreement_between_queue_and_trainer_is_reported(tmp_path: Path) -> None:
    out, rng = Writer(tmp_path), random.Random(0)
    for n in (1, 2):
        out.metric("step", START + 30 * n, "trainer/0#4", **step_record(n, 4, 1, rng))
    out.event("queue_account", START + 99, "queue/0#2", freed=96, trained_twice=0)
    out.close()
    assert "by the trainer's own record 96" in "\n".join(render_summary(report(tmp_path)))


def test_a_skipped_step_trains_nothing(tmp_path: Path) -> None:
    out, rng = Writer(tmp_path), random.Random(0)
    for n in (1, 2):
        record = step_record(n, 4, 1, rng) | {"skipped": "loss is nan" if n == 1 else "", "reward_mean": None}
        out.metric("step", START + 30 * n, "trainer/0#4", **record)
    out.close()
    summary = report(tmp_path)
    assert summary["samples"] == {"trained": 96, "trained_twice": 0}
    assert summary["reward"]["first"] is None
    assert "1 skipped (not finite)" in "\n".join(render_summary(summary))


def test_without_matplotlib_the_summary_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    make(tmp_path, steps=3)
    summary = report(tmp_path)
    assert "install matplotlib" in summary["plots"]["skipped"]
    assert any("plots skipped" in line for line in render_summary(summary))
    assert (tmp_path / "summary.json").exists()


def test_a_run_of_one_step_and_unbounded_staleness_is_drawn(tmp_path: Path) -> None:
    make(tmp_path, steps=1)
    summary = report(tmp_path, name="one", target=1, bound=math.inf)
    assert drawn(summary) == PLOTS
    assert "no bound" in "\n".join(render_summary(summary))


def test_lines_fit_the_terminal(tmp_path: Path) -> None:
    make(tmp_path, steps=60)
    lines = render_summary(report(tmp_path, target=60, bound=1))
    assert max(len(line) for line in lines if str(tmp_path) not in line) <= 100


def test_the_tool_redraws_a_run_without_its_config(tmp_path: Path) -> None:
    make(tmp_path, steps=2)
    tool = Path(__file__).parents[4] / "tools" / "plots.py"
    done = subprocess.run([sys.executable, tool, tmp_path], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "held-out accuracy" in done.stdout and sorted(p.name for p in (tmp_path / "plots").iterdir()) == PLOTS


def lost(members: int, **fields: Any) -> dict[str, Any]:
    known = {
        "task": "reward",
        "gist": "mine.py:3",
        "cause": "score raised KeyError: 'a'",
        "where": "/home/me/mine.py:3",
    }
    known |= {"example": "score raised KeyError: 'a' at /home/me/mine.py:3", "item": "q7", "hint": "mend mine.py:3"}
    return {**known, "groups": members // 4, "prompts": 3, **fields, "members": members}


def test_losses_of_all_starts_are_named_with_their_line(tmp_path: Path) -> None:
    out = Writer(tmp_path)
    out.event("run_started", START)
    out.event("members_lost", START + 1, "queue/0#2", **lost(8))
    out.event("members_lost", START + 2, "queue/0#2", **lost(12))
    out.event("run_started", START + 9)
    out.event("members_lost", START + 10, "queue/0#4", **lost(4, cause="score raised KeyError: 'b'"))
    made = {"task": "", "where": "", "cause": "no room", "groups": 1, "prompts": 1}
    out.event("members_lost", START + 10, "queue/0#4", **lost(1, gist="no room", **made))
    out.close()
    summary = report(tmp_path)
    first, second = summary["losses"]
    assert (first["samples"], first["groups"], first["where"]) == (16, 4, "/home/me/mine.py:3")
    assert first["example"].startswith("score raised KeyError") and first["hint"] == "mend mine.py:3"
    assert (second["samples"], second["task"]) == (1, "")
    text = "\n".join(render_summary(summary))
    line = "16 samples of 4 groups (3 prompts) failed at task reward: score raised KeyError: 'b' at /home/me/mine.py:3"
    assert f"lost               {line}\n" in text
    assert "1 sample of 1 group (1 prompt) failed while they were made: no room\n" in text


def test_steps_that_trained_nothing_are_counted(tmp_path: Path) -> None:
    out, rng = Writer(tmp_path), random.Random(1)
    for step, empty in enumerate((0, 1, 2, 2, 0, 1), 1):
        record = {**step_record(step, 6, 1 + 12 * step, rng), "empty_steps": empty}
        record |= {"skipped": "loss is nan"} if step == 4 else {}
        out.metric("step", START + 30 * step, "trainer/0#6", **record)
    out.close()
    summary = report(tmp_path)
    assert summary["steps"]["empty"] == 3
    assert "6, 480 samples, 1 skipped (not finite), 3 trained nothing" in "\n".join(render_summary(summary))


def test_a_run_that_lost_nothing_says_nothing_of_losses(tmp_path: Path) -> None:
    make(tmp_path, steps=2)
    summary = report(tmp_path)
    assert summary["losses"] == [] and not any(line.startswith("lost") for line in render_summary(summary))


def test_only_the_most_frequent_losses_are_printed(tmp_path: Path) -> None:
    out = Writer(tmp_path)
    out.event("run_started", START)
    for n in range(9):
        out.event("members_lost", START + n, "queue/0#2", **lost(10 + n, gist=f"mine.py:{n}", cause=f"cause {n}"))
    out.close()
    text = "\n".join(render_summary(report(tmp_path)))
    assert "cause 8" in text and "cause 4" in text and "cause 3" not in text and "and 4 more causes" in text
