"""What `why` and `ps` say of losses and retired items, from the event log."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from test_why import RUNNING, event

from relax_rt.cli import losses as losses_module
from relax_rt.cli.losses import print_losses, progress_report, reinstate_items
from relax_rt.cli.main import main
from relax_rt.cli.why import explain, show_why
from relax_rt.config.problems import BadInput
from relax_rt.observe.losses import MAX_CAUSES, OTHERS, Losses
from relax_rt.supervision import control
from relax_rt.transport.queue.ledger.messages import Loss, ProgressReport, Retired


def lost(t: float, members: int, **fields: Any) -> dict[str, Any]:
    known = {
        "task": "reward",
        "gist": "reward.py:12",
        "cause": "score raised KeyError: 'a' at reward.py:12",
        "where": "reward.py:12",
        "late": False,
        "groups": members // 4,
        "prompts": 3,
        "example": "score raised KeyError: 'a' at reward.py:12",
        "prompt": 7,
        "partial": True,
        "failed_groups": members // 8,
        "most": 64,
        "hint": "mend reward.py:12",
    }
    return event(t, "members_lost", **{**known, **fields, "members": members})


RETIRED = event(5.0, "item_retired", item="q7", about="12 + 1", task="reward", reason="it did not return", timeouts=2)
EVENTS = [
    event(0.0, "run_started"),
    lost(1.0, 900),
    RETIRED,
    event(10.0, "run_started"),
    lost(11.0, 8),
    lost(12.0, 64, cause="score raised KeyError: 'b' at reward.py:12"),
    lost(13.0, 3, task="", gist="no room", where="", cause="no room", example="no room for the board", failed_groups=8),
    *(event(14.0, "reward_worker_lost", reason="killed: out of memory") for _ in range(28)),
]


def test_the_newest_count_of_each_cause_of_this_start_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    found = explain(EVENTS, RUNNING)
    assert [(loss.task, loss.members) for loss in found.losses] == [("reward", 64), ("", 3)]
    show_why(found)
    out = capsys.readouterr().out
    assert "No role has failed since the run was started, but samples are lost." in out
    assert (
        "64 samples of 16 groups (3 prompts) failed at task reward: score raised KeyError: 'b' at reward.py:12" in out
    )
    assert "hint: mend reward.py:12" in out and "e.g. prompt 7: no room for the board" in out
    assert "28 reward workers were killed; the last: killed: out of memory" in out
    assert "q7 (12 + 1)  2 whole groups: it did not return" in out and "relax-rt reinstate" in out


def test_a_run_that_loses_nothing_is_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    show_why(explain([event(0.0, "run_started")], RUNNING))
    out = capsys.readouterr().out
    assert "No role has failed since the run was started." in out and "lost" not in out and "Retired" not in out


def test_items_stay_retired_through_starts_until_they_are_reinstated() -> None:
    losses = Losses()
    for one in EVENTS:
        losses.update(one)
    assert [one.item for one in losses.retired] == ["q7"]
    losses.update(event(20.0, "item_reinstated", item="q7"))
    assert losses.retired == []


def test_damaged_event_is_tolerated() -> None:
    found = explain([event(0.0, "run_started"), event(1.0, "members_lost"), event(2.0, "item_retired")], RUNNING)
    assert [loss.members for loss in found.losses] == [0] and [one.item for one in found.retired] == [""]


def taken(*events: dict[str, Any]) -> Losses:
    losses = Losses()
    for one in events:
        losses.update(one)
    return losses


def test_a_record_that_cannot_be_read_is_skipped() -> None:
    odd = [lost(2.0, 1, groups="many"), event(3.0, "item_retired", item="q1", timeouts=[])]
    losses = taken(lost(1.0, 8), *odd, lost(4.0, 9), RETIRED)
    assert [loss.members for loss in losses.losses] == [9] and [one.item for one in losses.retired] == ["q7"]


def test_a_count_that_falls_is_added_to_the_one_before() -> None:
    """The queue dropped the cause to make room for another one, and counts it anew."""
    losses = taken(lost(1.0, 40), lost(2.0, 3), lost(3.0, 5), event(4.0, "run_started"), lost(5.0, 2))
    assert [loss.members for loss in losses.losses] == [2]
    assert [(loss.members, loss.groups) for loss in losses.total] == [(47, 11)]


@pytest.mark.parametrize("starts", [1, 5])
def test_rare_causes_are_summed_under_one_name(starts: int, capsys: pytest.CaptureFixture[str]) -> None:
    events = [lost(n, 4, gist=f"g{n}", cause=f"c{n}") for n in range(10 * MAX_CAUSES)]
    events.insert(1, lost(0.5, 900, gist="often", cause="often"))
    for n in range(1, starts):
        events.insert(n * len(events) // starts, event(0.0, "run_started"))
    losses = taken(*events)
    assert sum(loss.members for loss in losses.total) == 900 + 4 * 10 * MAX_CAUSES
    assert sum(loss.groups for loss in losses.total) == 225 + 10 * MAX_CAUSES
    names = [loss.cause for loss in losses.total]
    assert len(names) <= 3 * MAX_CAUSES and "often" in names[:2] and names.count(OTHERS) == 1
    print_losses(Console(), [loss for loss in losses.total if loss.cause == OTHERS], [], "")
    out = capsys.readouterr().out
    assert "failed at task reward: other causes" in out and "e.g." not in out


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "current.jsonl").write_text("".join(json.dumps(one) + "\n" for one in EVENTS))
    status = msgspec.structs.replace(RUNNING, run_dir=str(tmp_path), status="failed", exit_code=1, slots=[])
    monkeypatch.setattr(control, "status", lambda _: status)
    return tmp_path


def ps(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> str:
    (run_dir / "run.json").write_text("{}")
    assert main(["ps", str(run_dir)]) == 0
    return capsys.readouterr().out


def test_ps_of_a_run_that_has_ended_reads_its_log(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ps(run_dir, capsys)
    assert "lost: 64 samples of 16 groups (3 prompts) failed at task reward" in out and "in a row" not in out
    assert "retired items: 1 (q7); see `relax-rt retired`" in out


def test_ps_of_a_run_that_has_ended_reads_the_rotated_files_too(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = run_dir / "events"
    (events / "current.jsonl").rename(events / "events-000001.jsonl")
    (events / "current.jsonl").write_text(json.dumps(event(15.0, "slot_ready", slot="trainer/0")) + "\n")
    out = ps(run_dir, capsys)
    assert "lost: 64 samples" in out and "retired items: 1 (q7)" in out


@pytest.mark.parametrize("row", [0, 8])
def test_ps_of_a_run_that_is_live_asks_its_queue(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], row: int
) -> None:
    """The log says 8 groups in a row; whether that goes on is known to the queue."""
    loss = Loss(task="reward", cause="score raised KeyError", members=64, groups=16, prompts=3)
    report = ProgressReport(row, 1, 64, False, [loss], [Retired("q9")], 1)
    monkeypatch.setattr(losses_module, "_call_queue", lambda *_: report)
    out = ps(run_dir, capsys)
    assert ("lost: 8 groups failed in a row (the run ends at 64); 64 samples" in out) == (row > 0)
    assert "64 samples of 16 groups (3 prompts) failed at task reward: score raised KeyError" in out
    assert "in a row" in out or not row
    assert "retired items: 1 (q9)" in out


WHY = "rewards are equal within each group, mean reward 0.25; what helps: easier or harder prompts"


@pytest.mark.parametrize("newest", ["", WHY])
def test_steps_that_train_nothing_are_shown_until_one_trains(
    run_dir: Path, capsys: pytest.CaptureFixture[str], newest: str
) -> None:
    steps = [(7, WHY), (8, newest)]
    records = [
        {"kind": "step", "step": n, "t": float(n), "empty_steps": n - 4, "empty_reason": why} for n, why in steps
    ]
    records.append({"kind": "queue", "t": 9.0})
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    told = f"the last 4 steps, up to step 8, trained nothing: {WHY}"
    assert (told in ps(run_dir, capsys)) == bool(newest)
    assert main(["ps", str(run_dir), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["empty_steps"]
    assert found == ({"count": 4, "step": 8, "why": WHY} if newest else None)
    assert main(["why", "--run", str(run_dir)]) == 0
    assert (told in capsys.readouterr().out) == bool(newest)


def test_reinstate_names_the_items_asked_for(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A call whose first answer was lost is made again, and finds them taken back already."""
    asked: list[str] = []

    class Queue:
        async def progress(self) -> ProgressReport:
            return ProgressReport(0, 0, 64, False, [], [Retired("q7", "", "reward", "late", 2)], 1)

        async def reinstate(self, items: list[str]) -> list[str]:
            asked.extend(items)
            return []

    (run_dir / "run.json").write_text("{}")
    monkeypatch.setattr(losses_module, "_call_queue", lambda _, question: asyncio.run(question(Queue())))
    assert main(["reinstate", "q7", "--run", str(run_dir)]) == 0
    assert asked == ["q7"] and capsys.readouterr().out == "reinstated: q7\n"


def test_the_beginning_of_an_id_is_enough_if_no_other_retired_item_begins_so(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = ("3fa91c", "3fa97d", "b07e44", "b07")
    asked: list[str] = []

    class Queue:
        async def progress(self) -> ProgressReport:
            return ProgressReport(0, 0, 64, False, [], [Retired(one, "", "reward", "late", 2) for one in ids], 1)

        async def reinstate(self, items: list[str]) -> None:
            asked.extend(items)

    (run_dir / "run.json").write_text("{}")
    monkeypatch.setattr(losses_module, "_call_queue", lambda _, question: asyncio.run(question(Queue())))
    assert main(["reinstate", "3fa91", "b07", "3fa91c", "--run", str(run_dir)]) == 0
    assert asked == ["3fa91c", "b07"] and capsys.readouterr().out == "reinstated: 3fa91c, b07\n"
    with pytest.raises(BadInput, match=r"'3fa9' is ambiguous: 2 retired items have this prefix: 3fa91c, 3fa97d"):
        reinstate_items(run_dir, ["b07e", "3fa9"])
    with pytest.raises(BadInput, match="'' is not retired"):
        reinstate_items(run_dir, [""])
    assert asked == ["3fa91c", "b07"], "nothing is taken back unless all are clear"


def test_an_ended_run_lists_its_items_and_says_how_they_are_reinstated(run_dir: Path) -> None:
    assert [one.item for one in progress_report(run_dir).retired] == ["q7"]
    with pytest.raises(BadInput, match="cannot be reached") as caught:
        reinstate_items(run_dir, ["q7"])
    assert "progress.kept_items" in caught.value.hint
    with pytest.raises(BadInput, match=r"'q8' is not retired.*retired are q7"):
        reinstate_items(run_dir, ["q8"])
