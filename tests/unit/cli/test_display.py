"""What commands print for people."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from relax_rt.cli import display
from relax_rt.supervision.api import RunStatus, SlotStatus
from relax_rt.supervision.diagnosis import Diagnosis


def shown(monkeypatch: pytest.MonkeyPatch, width: int, status: RunStatus, versions: dict[str, int]) -> list[str]:
    out = io.StringIO()
    monkeypatch.setattr(display, "console_for_output", lambda: Console(file=out, width=width, highlight=False))
    display.show_status(status, versions)
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
    head, titles, *rows = shown(monkeypatch, width, status(), {"rollout/0": 12})
    assert head.split()[:2] == ["two", "running"]
    assert all(len(row) <= width for row in [titles, *rows])
    assert [row.split()[0] for row in rows] == ["trainer/0", "rollout/1", "rollout/0"]
    assert ("epoch" in titles) == ("123,456" in rows[2]) == (width >= 110)
    for row, words in zip(rows, (["31234", "ready"], ["backoff", "3", "oom:"], ["12", "hm"]), strict=True):
        assert set(words) <= set(row.split())
    assert "…" in rows[0]


def test_output_to_a_pipe_is_wide(capsys: pytest.CaptureFixture[str]) -> None:
    display.show_status(status(), {})
    assert "waits: " + "w" * 100 in capsys.readouterr().out


def test_json_has_no_infinite_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    display.show_json({"bound": float("inf")})
    assert capsys.readouterr().out == '{\n  "bound": null\n}\n'
