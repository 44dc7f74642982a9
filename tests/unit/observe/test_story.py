"""Events as sentences."""

from __future__ import annotations

import string

import pytest

from relax_rt.observe.story import TOLD, Starts, Story


@pytest.mark.parametrize("kind", sorted(TOLD))
def test_every_sentence_has_its_fields_and_stands_without_them(kind: str) -> None:
    names = [name for _, name, _, _ in string.Formatter().parse(TOLD[kind][1]) if name]
    note = Story().note({"t": 5.0, "kind": kind, **{name: f"<{name}>" for name in names}})
    assert note is not None and note.t == 5.0 and note.tone == TOLD[kind][0]
    assert all(f"<{name}>" in note.text for name in names)
    bare = Story().note({"t": "torn", "kind": kind})
    assert bare is not None and bare.t == 0.0


def test_what_an_event_carries_is_no_template() -> None:
    note = Story().note({"t": 1.0, "kind": "slot_hung", "slot": "{slot}", "reason": "{0.__class__} {x"})
    assert note is not None and note.text == "{slot} hangs: {0.__class__} {x"


def test_empty_steps_are_a_warning_with_what_helps() -> None:
    why = "rewards are equal within each group, mean reward 0; what helps: easier or harder prompts, a reward with"
    note = Story().note({"t": 1.0, "kind": "steps_empty", "steps": 3, "why": f"{why} more than one value"})
    assert note is not None and note.tone == "warning"
    assert note.text.startswith(f"3 consecutive steps trained nothing: {why[:100]}")


def test_others_are_not_told() -> None:
    story = Story()
    assert story.note({"t": 1.0, "kind": "epoch_issued"}) is None
    assert story.note({"t": 1.0}) is None
    assert story.note({"t": 1.0, "kind": ["no", "word"]}) is None


def test_a_start_is_told_once_and_only_if_it_was_seen() -> None:
    starts = Starts()
    assert starts.take({"t": 1.0, "kind": "slot_ready", "slot": "a/0"}) == ""
    assert starts.take({"t": 2.0, "kind": "slot_spawned", "slot": "b/0"}) == ""
    assert starts.take({"t": 4.5, "kind": "slot_ready", "slot": "b/0"}) == "b/0 ready in 2.5 s"
    starts.take({"t": 6.0, "kind": "slot_spawned", "slot": "b/0"})
    assert starts.take({"t": 7.0, "kind": "slot_ready", "slot": "b/0"}) == ""


def test_what_may_come_at_each_step_is_told_once() -> None:
    story = Story()
    notes = [story.note({"t": float(n), "kind": "weights_not_filed", "version": n, "why": "full"}) for n in (1, 2, 3)]
    assert [note is not None for note in notes] == [True, False, False]
    assert notes[0] is not None and notes[0].text == "version 1 is not in publication.directory: full"
