"""What a run left is read as it lies; damage is told, and not taken for silence."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from relax_rt.chaos import evidence as reading
from relax_rt.transport.base.journal import Journal
from relax_rt.transport.rpc.errors import Corrupt


def journal(folder: Path) -> Path:
    written = Journal(folder)
    written.recover()
    written.close()
    return folder


def test_a_journal_that_is_not_there_is_not_an_empty_one(tmp_path: Path) -> None:
    assert reading.read_queue_writes(tmp_path / "none", retry=False) == (False, [], "")
    has, writes, why = reading.read_queue_writes(journal(tmp_path / "journal"), retry=False)
    assert (has, writes, why) == (True, [], "")


def test_damage_of_an_ended_run_is_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def corrupt(self: Journal) -> None:
        looks.append(1)
        raise Corrupt("journal", why="record 3 is damaged")

    monkeypatch.setattr(Journal, "recover", corrupt)
    monkeypatch.setattr(reading, "JOURNAL_PAUSE_S", 0.001)
    folder = tmp_path / "journal"
    folder.mkdir()
    (folder / "segment-1.log").write_bytes(b"x")
    assert "record 3 is damaged" in reading.read_queue_writes(folder, retry=False)[2]
    assert len(looks) == 1
    assert "record 3 is damaged" in reading.read_queue_writes(folder, retry=True)[2]
    assert len(looks) == 1 + reading.JOURNAL_TRIES


def test_a_segment_replaced_while_it_was_copied_is_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, copy, failed = journal(tmp_path / "journal"), shutil.copy, list[int]()

    def fails_first(*args: object, **kwargs: object) -> object:
        if not failed:
            failed.append(1)
            raise FileNotFoundError("segment-1.log")
        return copy(*args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(shutil, "copy", fails_first)
    monkeypatch.setattr(reading, "JOURNAL_PAUSE_S", 0.001)
    assert reading.read_queue_writes(folder, retry=True) == (True, [], "")
