"""Checkpoint folders are complete or absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_rt.roles.trainers.checkpoint import CheckpointState, CheckpointStore, read_state
from relax_rt.transport.errors import Refused, StaleEpoch


def state(step: int, epoch: int = 1) -> CheckpointState:
    return CheckpointState(step, step + 1, "d", epoch, step)


def fill(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"weights")


def test_the_newest_complete_one_is_found(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 1, keep=3)
    assert store.newest() is None
    store.save(state(5), fill)
    store.save(state(10), fill)
    found = store.newest()
    assert found is not None
    assert found[1] == state(10)
    assert (found[0] / "model.safetensors").read_bytes() == b"weights"


def test_a_write_that_fails_leaves_no_checkpoint_and_its_rest_is_cleaned(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 1, keep=3)
    store.save(state(5), fill)

    def broken(folder: Path) -> None:
        fill(folder)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        store.save(state(10), broken)
    again = CheckpointStore(tmp_path, 2, keep=3)
    found = again.newest()
    assert found is not None
    assert found[1].step == 5
    assert not list(tmp_path.glob(".partial*"))


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 1, keep=2)
    for step in (5, 10, 15, 20):
        store.save(state(step), fill)
    assert [p.name for p in sorted(tmp_path.glob("step-*"))] == ["step-000015", "step-000020"]


def test_an_older_incarnation_cannot_rename_its_folder_into_place(tmp_path: Path) -> None:
    old = CheckpointStore(tmp_path, 1, keep=2)

    def overtaken(folder: Path) -> None:
        fill(folder)
        CheckpointStore(tmp_path, 2, keep=2)  # a new incarnation starts while the old one writes

    with pytest.raises(StaleEpoch, match="epoch 2 writes here, this is 1"):
        old.save(state(5), overtaken)
    assert not list(tmp_path.glob("step-*"))


def test_a_step_done_again_replaces_its_folder(tmp_path: Path) -> None:
    CheckpointStore(tmp_path, 1, keep=2).save(state(5), fill)
    CheckpointStore(tmp_path, 2, keep=2).save(state(5, epoch=2), fill)
    assert read_state(tmp_path / "step-000005").epoch == 2


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"no relax_rt\.json"):
        read_state(tmp_path)
