"""Checkpoint folders are complete or absent."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import save_file

from relax_rt.config.problems import BadInput
from relax_rt.roles.training.checkpoints import store as checkpoint
from relax_rt.roles.training.checkpoints.digests import ModelIdentity, identity_of
from relax_rt.roles.training.checkpoints.resume import resume_newest, wait_for_save
from relax_rt.roles.training.checkpoints.store import (
    FORMAT,
    KEEP_DAMAGED,
    REPLACED,
    CheckpointState,
    CheckpointStore,
    find_checkpoints,
    newest_step,
    read_state,
)
from relax_rt.transport.rpc.errors import Refused, StaleEpoch


def state(step: int, epoch: int = 1) -> CheckpointState:
    return CheckpointState(step, step + 1, "d", epoch, step)


def said(of: CheckpointState) -> CheckpointState:
    """Without the digests."""
    return replace(of, files={}, own="")


def fill(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"weights")


def test_the_newest_complete_one_is_found(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 1, keep=3)
    assert store.newest() is None
    store.save(state(5), fill)
    store.save(state(10), fill)
    found = store.newest()
    assert found is not None
    assert said(found[1]) == replace(state(10), format=FORMAT)
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
        store.quarantine(store.save(state(10 * number), fill))
        assert store.newest() is None and store.found() == []
    assert len(store.quarantined()) == KEEP_DAMAGED
    assert store.quarantined()[-1].name == f"damaged-step-{10 * (KEEP_DAMAGED + 2):06d}"
    # The same step again, damaged again: the newer one takes the place of the older.
    store.quarantine(store.save(state(10 * (KEEP_DAMAGED + 2)), fill))
    assert len(store.quarantined()) == KEEP_DAMAGED
    # A good one of an earlier step stays, though keep = 1.
    assert store.save(state(5), fill).exists()
    found = store.newest()
    assert found is not None and found[0] == tmp_path / "step-000005"
    assert said(found[1]) == replace(state(5), format=FORMAT)
    CheckpointStore(tmp_path, 2, keep=1)
    with pytest.raises(StaleEpoch):
        store.quarantine(tmp_path / "step-000005")


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
    newest = store.newest()
    assert newest is not None and newest[0] == tmp_path / "step-000005"
    assert newest_step(tmp_path) == 5


@pytest.mark.parametrize(("number", "writer"), [(FORMAT + 1, "a newer version"), (1, "relax-rt 0.1")])
def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path, number: int, writer: str) -> None:
    store = CheckpointStore(tmp_path, 1, keep=3)
    store.save(state(5), fill)
    (store.save(state(12), fill) / "relax_rt.json").write_text(json.dumps({"format": number}))
    for find in (store.newest, lambda: newest_step(tmp_path)):
        with pytest.raises(BadInput, match=f"step-000012: it is of format {number}, which {writer} wrote"):
            find()
    assert newest_step(tmp_path / "nowhere") == 0


# The same step again.


def test_one_of_both_is_there_at_any_instant_while_a_step_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CheckpointStore(tmp_path, 1, keep=1).save(state(5), fill)
    renames: list[Path] = []
    rename = Path.rename

    class Killed(Exception):
        pass

    def struck(self: Path, target: Path) -> Path:
        if len(renames) == dies_at:
            raise Killed
        renames.append(self)
        return rename(self, target)

    for epoch, dies_at in ((2, 0), (3, 1), (4, 2)):
        again = CheckpointStore(tmp_path, epoch, keep=1)
        renames.clear()
        with monkeypatch.context() as patched:
            patched.setattr(Path, "rename", struck)
            with pytest.raises(Killed):
                again.save(state(5, epoch), fill)
        # Whoever comes next finds a whole one, at its own place.
        found = CheckpointStore(tmp_path, epoch, keep=1).newest()
        assert found is not None and found[0].name == "step-000005"
        assert (found[0] / "model.safetensors").read_bytes() == b"weights"
        assert found[1].epoch == (1 if dies_at < 2 else epoch)
        assert not list(tmp_path.glob(f"*{REPLACED}"))


def test_a_checkpoint_that_will_be_renamed_back_counts_before_it_is(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 1, keep=2)
    store.save(state(5), fill)
    folder = store.save(state(12), fill)
    replaced = folder.rename(folder.with_name(folder.name + REPLACED))
    assert newest_step(tmp_path) == 12 and replaced.is_dir()
    assert newest_step(tmp_path) == CheckpointStore(tmp_path, 2, keep=2).found()[0].state.step  # type: ignore[union-attr]
    # The new one came: the old one counts no more.
    shutil.copytree(folder, replaced)
    assert [one.folder.name for one in find_checkpoints(tmp_path)] == ["step-000012", "step-000005"]


# What a checkpoint is of.


def model_in(folder: Path, *, seed: int = 0, files: int = 1, **config: Any) -> Path:
    """A model folder of eight tensors, in so many files."""
    folder.mkdir()
    values = np.random.default_rng(seed)
    tensors = {f"layer.{n}": values.standard_normal((40, 60), np.float32) for n in range(8)}
    for n in range(files):
        part = dict(list(tensors.items())[n::files])
        save_file(part, folder / f"model-{n + 1:05d}-of-{files:05d}.safetensors")
    (folder / "config.json").write_text(json.dumps({"hidden_size": 60, **config}))
    (folder / "tokenizer.json").write_text('{"vocab": []}')
    return folder


def test_a_model_is_known_again_however_it_is_written_and_another_is_not(tmp_path: Path) -> None:
    here = identity_of(model_in(tmp_path / "here"))
    same = model_in(tmp_path / "same", files=3, transformers_version="9", dtype="float32")
    assert here.other(identity_of(same)) == []
    # Shapes are the same, values are not.
    assert here.other(identity_of(model_in(tmp_path / "tuned", seed=1))) == ["set of weights"]
    assert here.other(identity_of(model_in(tmp_path / "theta", rope_theta=5))) == ["config.json"]
    (same / "tokenizer.json").write_text('{"vocab": [1]}')
    assert here.other(identity_of(same)) == ["tokenizer"]


def test_weights_in_other_files_than_safetensors_are_told_apart_too(tmp_path: Path) -> None:
    assert identity_of(tmp_path) == ModelIdentity("", "", "")
    found = set()
    for content in (b"a" * 9000, b"a" * 8999 + b"b", b"a" * 9001):
        (tmp_path / "pytorch_model.bin").write_bytes(content)
        found.add(identity_of(tmp_path).weights)
    assert len(found) == 3 and "" not in found


class Context:
    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.log = SimpleNamespace(warning=lambda *_, **__: None)
        self.progress = SimpleNamespace(advance=lambda *_: None, extend=lambda *_: None)

    def event(self, kind: str, /, **fields: Any) -> None:
        self.events.append((kind, fields))


def taken(store: CheckpointStore) -> tuple[list[str], list[tuple[str, dict[str, Any]]]]:
    """Names of the checkpoints that a trainer goes on from, and what it tells of them."""
    names: list[str] = []

    async def take(folder: Path, of: CheckpointState) -> None:
        names.append(folder.name)

    ctx: Any = Context()
    asyncio.run(resume_newest(ctx, store, take))
    return names, ctx.events


def test_a_checkpoint_of_another_model_is_refused_and_stays(tmp_path: Path) -> None:
    here, other = identity_of(model_in(tmp_path / "here")), identity_of(model_in(tmp_path / "other", seed=1))
    store = CheckpointStore(tmp_path / "c", 1, 3, here)
    folder = store.save(state(5), fill)
    assert taken(store) == (["step-000005"], [])
    with pytest.raises(BadInput, match=r"step-000005.*of another model.*another set of weights than it") as caught:
        taken(CheckpointStore(tmp_path / "c", 2, 3, other))
    assert "model.path" in caught.value.hint and "run.name" in caught.value.hint
    assert [path.name for path in (tmp_path / "c").glob("*step-*")] == ["step-000005"]
    # As the error says: without a name it is taken for what it is said to be.
    kept = json.loads((folder / "relax_rt.json").read_text())
    del kept["model"], kept["own"]
    (folder / "relax_rt.json").write_text(json.dumps(kept))
    assert taken(CheckpointStore(tmp_path / "c", 3, 3, other))[0] == ["step-000005"]


def test_a_checkpoint_without_digests_is_reported_and_resumed(tmp_path: Path) -> None:
    here = identity_of(model_in(tmp_path / "here"))
    store = CheckpointStore(tmp_path / "c", 1, 3, here)
    path = store.save(state(5), fill) / "relax_rt.json"
    written = json.loads(path.read_text())
    for lacking, words in (
        (("files", "own"), "has no digests of its files: it is taken unverified"),
        (("files", "own", "model"), "names no model and has no digests of its files: it is"),
    ):
        path.write_text(json.dumps({name: value for name, value in written.items() if name not in lacking}))
        names, ((kind, fields),) = taken(store)
        assert names == ["step-000005"] and kind == "checkpoint_unverified"
        assert fields["checkpoint"] == "step-000005" and words in fields["why"]


@pytest.mark.parametrize(
    ("published", "words"),
    [
        ({5: "x", 6: "y"}, "its policy version 6 of digest d has the digest y in this run"),
        ({5: "d"}, "its policy version 6 of digest d was never published by this run"),
    ],
    ids=["other", "unknown"],
)
def test_a_checkpoint_of_another_run_is_refused_and_stays(
    tmp_path: Path, published: dict[int, str], words: str
) -> None:
    store = CheckpointStore(tmp_path, 1, 3)
    store.save(state(5), fill)
    store.published = published
    with pytest.raises(BadInput, match=f"step-000005.*it is of another run: {words}") as caught:
        taken(store)
    assert str(tmp_path) in caught.value.hint and "model.path" in caught.value.hint
    assert [path.name for path in tmp_path.glob("*step-*")] == ["step-000005"]
    store.published = {**published, 6: "d"}
    assert taken(store) == (["step-000005"], [])


def test_where_the_registry_knows_of_no_version_it_is_that_which_is_said(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 1, 3)
    store.save(state(5), fill)
    store.published = {}
    with pytest.raises(BadInput, match=r"registry knows of no published policy version.*6 of digest d") as caught:
        taken(store)
    assert "is of another run" not in str(caught.value) and "goes on from the one before" not in caught.value.hint
    assert "registry.sqlite" in caught.value.hint and "model.path" in caught.value.hint
    assert [path.name for path in tmp_path.glob("*step-*")] == ["step-000005"]


def test_a_checkpoint_of_a_newer_version_is_refused_and_stays(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 1, 3)
    store.save(state(4), fill)
    folder = store.save(state(5), fill)
    # What else it holds is of that version's making.
    (folder / "relax_rt.json").write_text(json.dumps({"format": FORMAT + 1, "step": "five"}))
    with pytest.raises(BadInput, match=f"of format {FORMAT + 1}, which a newer version wrote"):
        taken(store)
    assert sorted(path.name for path in tmp_path.glob("*step-*")) == ["step-000004", "step-000005"]


# How a write gets on.


async def told_of(
    store: CheckpointStore, write: Callable[[Path], None], beside: Path | None = None, said: list[str] | None = None
) -> list[str]:
    """What is told while a checkpoint is written by `write`."""
    told: list[str] = said if said is not None else []

    async def work() -> None:
        await asyncio.to_thread(store.save, state(5), write)

    def tell(n: int, line: str) -> None:
        assert n >= 1
        told.append(line)

    await wait_for_save(asyncio.create_task(work()), store, tell, beside, look_s=0.02)
    return told


MIB = 1 << 20


def until_said(words: str, said: list[str]) -> None:
    """Have the thread that writes wait until it was seen how far it is."""
    end = time.monotonic() + 120
    while not any(words in line for line in said) and time.monotonic() < end:
        time.sleep(0.005)


async def test_what_is_written_and_what_comes_to_disk_is_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "FORCE_BYTES", MIB)
    force, said = checkpoint._sync_range, list[str]()

    def slow(*what: Any) -> bool:
        until_said(f", {what[1] // MIB} of them on disk", said)
        return force(*what)

    def write(folder: Path) -> None:
        with (folder / "model.safetensors").open("wb") as file:
            for n in range(4):
                file.write(bytes(MIB))
                file.flush()
                until_said(f": {n + 1} MiB so far", said)

    monkeypatch.setattr(checkpoint, "_sync_range", slow)
    store = CheckpointStore(tmp_path, 1, keep=3)
    await told_of(store, write, said=said)
    written = [int(line.split(": ")[1].split()[0]) for line in said]
    forced = [int(line.split(", ")[1].split()[0]) for line in said]
    assert written == sorted(written) and written[-1] == 4 and len(set(written)) >= 3
    # Nothing is written any more, and there is progress all the same.
    assert forced == sorted(forced) and len({n for n, all_of in zip(forced, written, strict=True) if all_of == 4}) >= 3
    assert store.forced == 0 and (tmp_path / "step-000005").is_dir()


async def test_files_of_the_critic_are_progress_too(tmp_path: Path) -> None:
    beside = tmp_path / "critic"
    (beside / "step-000005-1").mkdir(parents=True)

    said = list[str]()

    def write(folder: Path) -> None:
        for n in range(3):
            (beside / "step-000005-1" / f"{n}").write_bytes(bytes(MIB))
            until_said(f": {n + 1} MiB so far", said)

    await told_of(CheckpointStore(tmp_path / "c", 1, keep=3), write, beside, said)
    assert len(said) >= 3


async def test_a_write_that_stands_still_shows_no_progress_and_one_that_fails_is_raised(tmp_path: Path) -> None:
    store, said, so_far = CheckpointStore(tmp_path, 1, keep=3), list[str](), list[list[str]]()

    def stuck(folder: Path) -> None:
        time.sleep(0.3)
        so_far.append([*said])

    await told_of(store, stuck, said=said)
    assert so_far == [[]]

    def broken(folder: Path) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        await told_of(store, broken)


def test_where_the_kernel_forces_no_parts_all_of_a_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_LIBC", SimpleNamespace())
    path, done = tmp_path / "file", list[int]()
    path.write_bytes(bytes(1000))
    checkpoint._sync(path, done.append)
    checkpoint._sync(tmp_path, done.append)
    assert done == [1000, 0]
