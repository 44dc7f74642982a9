"""The account of a run from its event log."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from relax_rt.cli.display import show_why
from relax_rt.cli.why import MAX_NOTES, account
from relax_rt.supervision.api import RunStatus, SlotStatus
from relax_rt.supervision.diagnosis import Diagnosis


def event(t: float, kind: str, slot: str = "", **fields: Any) -> dict[str, Any]:
    return {"t": t, "m": t, "by": "agent", "kind": kind, **({"slot": slot, "epoch": 1} if slot else {}), **fields}


def exited(t: float, slot: str, cause: str, kind: str = "exception", at: float | None = None) -> dict[str, Any]:
    diagnosis = Diagnosis(slot=slot, epoch=1, kind=kind, cause=cause, at=t if at is None else at, trace="Tr\nBoom: x")  # type: ignore[arg-type]
    return event(t, "slot_exited", slot, diagnosis=msgspec.to_builtins(diagnosis))


RUNNING = RunStatus(
    run_id="ab",
    name="two",
    run_dir="/runs/two",
    status="running",
    slots=[
        SlotStatus(slot="trainer/0", kind="trainer", tier=1, state="ready", waiting="samples", state_s=3.0),
        SlotStatus(slot="rollout/0", kind="rollout", tier=1, state="ready", detail="busy"),
        SlotStatus(
            slot="rollout/1",
            kind="rollout",
            tier=1,
            state="backoff",
            last=Diagnosis(slot="rollout/1", epoch=4, kind="oom", cause="too big"),
        ),
        SlotStatus(slot="evaluator/0", kind="evaluator", tier=2, state="pending"),
    ],
)

EVENTS = [
    event(0.0, "run_started"),
    exited(1.0, "rollout/0", "of an earlier start"),
    event(10.0, "run_started"),
    event(11.0, "slot_ready", "rollout/0"),
    exited(20.0, "reward/0", "seen first", at=19.9),
    exited(20.1, "rollout/0", "happened first", at=19.8),
    event(22.1, "slot_ready", "rollout/0"),
    exited(30.0, "rollout/0", "again"),
    event(30.5, "slot_exited", "rollout/0", diagnosis={"kind": "no such kind"}),
    exited(31.0, "rollout/0", "while starting"),
    event(33.0, "slot_ready", "rollout/0"),
    exited(34.0, "queue/0", "done", kind="clean"),
]


def test_first_failure_is_the_first_in_time_of_this_start() -> None:
    found = account(EVENTS, RUNNING)
    assert found.first is not None
    assert found.first.cause == "happened first"
    assert [(d.slot, d.failures, d.back) for d in found.deaths] == [("rollout/0", 3, True), ("reward/0", 1, False)]
    assert found.deaths[0].away_s == pytest.approx(2.0 + 3.0)
    assert found.deaths[0].last.cause == "while starting"
    assert not any("earlier start" in note.text for note in found.notes)


def test_who_waits_for_what() -> None:
    found = account(EVENTS, RUNNING)
    assert [(w.slot, w.reason) for w in found.waiting] == [
        ("trainer/0", "samples"),
        ("rollout/1", "after oom: too big"),
        ("evaluator/0", "the tiers below it"),
    ]
    ended = msgspec.structs.replace(RUNNING, exit_code=1)
    assert account(EVENTS, ended).waiting == []


def test_one_slot_or_one_kind() -> None:
    found = account(EVENTS, RUNNING, "reward/0")
    assert found.first is not None
    assert found.first.slot == "reward/0"
    assert found.waiting == []
    assert [w.slot for w in account(EVENTS, RUNNING, "rollout").waiting] == ["rollout/1"]
    assert account(EVENTS, RUNNING, "roll").deaths == []


def test_what_happened_is_bounded_to_the_newest() -> None:
    many = [exited(float(n), "rollout/0", f"number {n}") for n in range(100)]
    found = account(many, RUNNING)
    assert (len(found.notes), found.notes_left_out) == (MAX_NOTES, 60)
    assert "number 99" in found.notes[-1].text


def test_paragraphs_name_failure_trace_and_waits(capsys: pytest.CaptureFixture[str]) -> None:
    show_why(account(EVENTS, RUNNING))
    out = capsys.readouterr().out
    for words in ("happened first", "Boom: x", "3 times, back, away for 5.0 s", "not back", "rollout/1  backoff"):
        assert words in out
    show_why(account([], msgspec.structs.replace(RUNNING, slots=[])))
    assert "No role has failed" in capsys.readouterr().out
