"""Checkpoint folders are complete or absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_rt.roles.trainers.checkpoint import KEEP_DAMAGED, CheckpointState, CheckpointStore, read_state
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


def test_what_is_set_aside_counts_as_none_and_is_bounded(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 1, keep=1)
    for number in range(1, KEEP_DAMAGED + 3):
        store.set_aside(store.save(state(10 * number), fill))
        assert store.newest() is None and store.found() == []
    assert len(store.damaged()) == KEEP_DAMAGED
    assert store.damaged()[-1].name == f"damaged-step-{10 * (KEEP_DAMAGED + 2):06d}"
    # The same step again, damaged again: the newer one takes the place of the older.
    store.set_aside(store.save(state(10 * (KEEP_DAMAGED + 2)), fill))
    assert len(store.damaged()) == KEEP_DAMAGED
    # A good one of an earlier step stays, though keep = 1.
    assert store.save(state(5), fill).exists() and store.newest() == (tmp_path / "step-000005", state(5))
    CheckpointStore(tmp_path, 2, keep=1)
    with pytest.raises(StaleEpoch):
        store.set_aside(tmp_path / "step-000005")


def test_a_folder_whose_state_is_torn_is_found_with_the_reason(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 1, keep=3)
    store.save(state(5), fill)
    (store.save(state(12), fill) / "relax_rt.json").write_text("{")
    (store.save(state(9), fill) / "relax_rt.json").unlink()
    found = store.found()
    assert [(one.folder.name, one.state is None) for one in found] == [
        ("step-000012", True),
        ("step-000009", True),
        ("step-000005", False),
    ]
    assert "relax_rt.json" in found[1].why and found[0].why and not found[2].why
    assert store.newest() == (tmp_path / "step-000005", state(5))
