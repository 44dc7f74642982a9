"""What commands print for people."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from relax_rt.cli import display, ps, sample
from relax_rt.cli.ps import SlotFigures
from relax_rt.config.job import TriedSample
from relax_rt.interfaces.agent import Diagnosis, RunStatus, SlotStatus


def shown(monkeypatch: pytest.MonkeyPatch, width: int, status: RunStatus, figures: dict[str, SlotFigures]) -> list[str]:
    out = io.StringIO()
    monkeypatch.setattr(ps, "console_for_output", lambda: Console(file=out, width=width, highlight=False))
    ps.show_status(status, figures)
    return out.getvalue().splitlines()


def status(**fields: object) -> RunStatus:
    died = Diagnosis(slot="rollout/1", epoch=4, kind="oom", cause="killed for memory")
    slots = [
        SlotStatus(slot="trainer/0", kind="trainer", tier=1, state="ready", pid=31234, epoch=9, waiting="w" * 200),
        SlotStatus(slot="rollout/1", kind="rollout", tier=1, state="backoff", epoch=4, restarts=3, last=died),
        SlotStatus(
            slot="rollout/0", kind="rollout", tier=1, state="ready", pid=5, epoch=8, progress=123456, detail="hm"
        ),
    ]
    return RunStatus(run_id="ab", name="two", run_dir="/runs/two", status="running", slots=slots)


@pytest.mark.parametrize("width", [60, 80, 109, 110, 200])
def test_nothing_but_the_last_column_is_cut(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    head, titles, *rows = shown(monkeypatch, width, status(), {"rollout/0": SlotFigures(12, 4, 1, 3, 8)})
    assert head.split()[:2] == ["two", "running"]
    assert all(len(row) <= width for row in [titles, *rows])
    assert [row.split()[0] for row in rows] == ["trainer/0", "rollout/1", "rollout/0"]
    assert ("epoch" in titles) == ("123,456" in rows[2]) == (width >= 110)
    assert ("stale" in titles) == ("3/8" in rows[2]) == (width >= 110)
    for row, words in zip(rows, (["31234", "ready"], ["backoff", "3", "oom:"], ["12", "hm"]), strict=True):
        assert all(any(part.startswith(word) for part in row.split()) for word in words)
    assert "…" in rows[0]
    last = rows[2].split()
    assert ("lag" in titles) == (last[last.index("12") + 1] == "4") == (width >= 70)


def test_output_to_a_pipe_is_wide(capsys: pytest.CaptureFixture[str]) -> None:
    ps.show_status(status(), {})
    assert "waits: " + "w" * 100 in capsys.readouterr().out


def test_json_has_no_infinite_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    display.show_json({"bound": float("inf")})
    assert capsys.readouterr().out == '{\n  "bound": null\n}\n'


def a_sample(**fields: Any) -> TriedSample:
    known: dict[str, Any] = {
        "model": "/models/m",
        "step": 20,
        "split": "train",
        "index": 3,
        "item": "ab12",
        "prompt": "[user]one\ntwo[end]",
        "completion": "4\x1b[2J",
        "tokens": [11, 12, 13, 21, 22],
        "loss_mask": [0, 0, 0, 1, 1],
        "behaviour_logprobs": [0.0, 0.0, 0.0, -1.0, -2.0],
        "finish_reason": "stop",
        "stop_token": "[end]",
        "temperature": 1.0,
        "mean_logprob": -1.5,
        "answer": "4",
        "reward": 1.25,
        "rewards": {"right": 1.0, "form": 0.25},
    }
    return TriedSample(**{**known, **fields})


def samples_shown(monkeypatch: pytest.MonkeyPatch, *samples: TriedSample) -> str:
    out = io.StringIO()
    monkeypatch.setattr(sample, "console_for_output", lambda: Console(file=out, width=40, highlight=False))
    sample.show_samples(samples)
    return out.getvalue()


def test_a_sample_is_shown_whole_and_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    long = "x" * 500
    said = samples_shown(monkeypatch, a_sample(), a_sample(index=4, prompt=long, reward=None, unscored="it raised"))
    assert "/models/m  step 20" in said
    assert "prompt      [user]one\n            two[end]\n" in said
    assert "tokens      11 12 13 | 21 22\n" in said
    assert "loss mask   0x3 1x2 " in said
    assert "stop at [end]\n" in said
    assert "-1.5000" in said
    assert "reward      1.25  right 1  form 0.25\n" in said
    assert f"prompt      {long}\n" in said
    assert "none: it raised" in said
    # What the model wrote must not reach the terminal as a command.
    assert "\x1b" not in said and "4\\x1b[2J" in said


def test_masks_are_reported_by_their_runs() -> None:
    assert sample.run_lengths([0, 0, 1, 0, 1, 1, 1]) == "0x2 1x1 0x1 1x3"
    assert sample.run_lengths([]) == ""


def of_slots(*slots: SlotStatus) -> RunStatus:
    return RunStatus(run_id="ab", name="two", run_dir="/runs/two", status="running", slots=list(slots))


@pytest.mark.parametrize(
    ("depth", "bound", "told"), [(96, 128, " 96/128 "), (128, 128, " 128/128 "), (144, 128, " 128/128 +16 ")]
)
def test_what_is_beyond_the_bound_is_shown_as_such(
    monkeypatch: pytest.MonkeyPatch, depth: int, bound: int, told: str
) -> None:
    queue = SlotStatus(slot="queue/0", kind="queue", tier=1, state="ready", detail="step 3")
    (line,) = shown(monkeypatch, 200, of_slots(queue), {"queue/0": SlotFigures(depth=depth, depth_bound=bound)})[2:]
    assert told in line


def test_slots_without_a_process_say_what_they_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Diagnosis(slot="rollout/2", epoch=4, kind="oom", cause="too big")
    slots = of_slots(
        SlotStatus(slot="rollout/0", kind="rollout", tier=1, state="requested"),
        SlotStatus(slot="rollout/1", kind="rollout", tier=1, state="starting", detail="its server, 12 s of 150 s"),
        SlotStatus(slot="rollout/2", kind="rollout", tier=1, state="backoff", last=failed),
        SlotStatus(slot="evaluator/0", kind="evaluator", tier=2, state="pending"),
    )
    lines = {line.split()[0]: line for line in shown(monkeypatch, 200, slots, {})}
    assert lines["rollout/0"].endswith("waits: its process")
    assert lines["rollout/1"].endswith("its server, 12 s of 150 s")
    assert lines["rollout/2"].endswith("oom: too big")
    assert lines["evaluator/0"].endswith("waits: the tiers below it")
