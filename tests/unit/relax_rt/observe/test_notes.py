"""Events as sentences."""

from __future__ import annotations

import string

import pytest

from relax_rt.observe.notes import NOTES, EventNotes, StartTimes


@pytest.mark.parametrize("kind", sorted(NOTES))
def test_every_sentence_has_its_fields_and_stands_without_them(kind: str) -> None:
    names = [name for _, name, _, _ in string.Formatter().parse(NOTES[kind][1]) if name]
    note = EventNotes().note({"t": 5.0, "kind": kind, **{name: f"<{name}>" for name in names}})
    assert note is not None and note.t == 5.0 and note.tone == NOTES[kind][0]
    assert all(f"<{name}>" in note.text for name in names)
    bare = EventNotes().note({"t": "torn", "kind": kind})
    assert bare is not None and bare.t == 0.0


def test_what_an_event_carries_is_no_template() -> None:
    note = EventNotes().note({"t": 1.0, "kind": "slot_hung", "slot": "{slot}", "reason": "{0.__class__} {x"})
    assert note is not None and note.text == "{slot} hangs: {0.__class__} {x"


def test_empty_steps_are_a_warning_with_what_helps() -> None:
    why = "rewards are equal within each group, mean reward 0; what helps: easier or harder prompts, a reward with"
    note = EventNotes().note({"t": 1.0, "kind": "steps_empty", "steps": 3, "why": f"{why} more than one value"})
    assert note is not None and note.tone == "warning"
    assert note.text == f"3 consecutive steps trained nothing: {why} more than one value"


def test_others_are_not_reported() -> None:
    story = EventNotes()
    assert story.note({"t": 1.0, "kind": "epoch_issued"}) is None
    assert story.note({"t": 1.0}) is None
    assert story.note({"t": 1.0, "kind": ["no", "word"]}) is None


def test_a_start_is_reported_once_and_only_if_it_was_seen() -> None:
    starts = StartTimes()
    assert starts.update({"t": 1.0, "kind": "slot_ready", "slot": "a/0"}) == ""
    assert starts.update({"t": 2.0, "kind": "slot_spawned", "slot": "b/0"}) == ""
    assert starts.update({"t": 4.5, "kind": "slot_ready", "slot": "b/0"}) == "b/0 ready in 2.5 s"
    starts.update({"t": 6.0, "kind": "slot_spawned", "slot": "b/0"})
    assert starts.update({"t": 7.0, "kind": "slot_ready", "slot": "b/0"}) == ""


def test_what_may_come_at_each_step_is_reported_once() -> None:
    story = EventNotes()
    notes = [story.note({"t": float(n), "kind": "weights_save_failed", "version": n, "why": "full"}) for n in (1, 2, 3)]
    assert [note is not None for note in notes] == [True, False, False]
    assert notes[0] is not None and notes[0].text == "version 1 is not in publication.directory: full"


def ended(slot: str, kind: str, cause: str) -> dict[str, object]:
    return {"t": 2.0, "kind": "slot_exited", "slot": slot, "diagnosis": {"kind": kind, "cause": cause}}


def test_slots_that_end_with_the_run_by_request_are_no_failures() -> None:
    story, now = EventNotes(), "relax-rt down --now"
    begun = story.note({"t": 1.0, "kind": "run_draining", "reason": now, "exit_code": 137})
    assert begun is not None and (begun.tone, begun.text) == ("plain", f"the run ends: {now}")
    assert story.note({"t": 2.0, "kind": "slot_killed", "slot": "trainer/0", "reason": now}) is None
    assert story.note(ended("trainer/0", "killed", now)) is None
    # A failure that comes meanwhile is still reported.
    crashed = story.note(ended("queue/0", "exception", "disk full"))
    assert crashed is not None and crashed.tone == "error"
    late = story.note({"t": 3.0, "kind": "slot_killed", "slot": "rollout/0", "reason": "still running 10 s after it"})
    assert late is not None and late.tone == "warning"


def test_a_second_request_is_reported_once_and_its_kills_are_not() -> None:
    story = EventNotes()
    story.note({"t": 1.0, "kind": "run_draining", "reason": "Ctrl-C", "exit_code": 130})
    again = story.note({"t": 2.0, "kind": "run_ending_already", "reason": "Ctrl-C again"})
    assert again is not None and (again.tone, "Ctrl-C again" in again.text) == ("plain", True)
    assert story.note(ended("trainer/0", "killed", "Ctrl-C again")) is None
    story.note({"t": 5.0, "kind": "run_started"})
    failed = story.note({"t": 6.0, "kind": "run_draining", "reason": "trainer/0 cannot go on", "exit_code": 1})
    assert failed is not None and failed.tone == "error"
