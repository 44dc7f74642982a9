"""What a checkpoint's files were when they were written is held against what they are."""

from __future__ import annotations

import asyncio
import errno
import json
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash
from msgspec.structs import replace

from relax_rt.config.problems import BadInput
from relax_rt.roles.training.checkpoints import digests
from relax_rt.roles.training.checkpoints import resume as keeping
from relax_rt.roles.training.checkpoints.digests import (
    CHUNK_BYTES,
    DIGEST_SUFFIX,
    FileDigest,
    ModelIdentity,
    collect_digests,
    digest_of,
    verify_digests,
)
from relax_rt.roles.training.checkpoints.digests import write_digest as leave
from relax_rt.roles.training.checkpoints.resume import COMPARE_ALLOWANCE_S, resume_newest
from relax_rt.roles.training.checkpoints.store import CheckpointState, CheckpointStore, read_state
from relax_rt.transport.rpc.errors import Corrupt, RelaxError

MIB = 1 << 20


def test_a_digest_is_of_all_bytes_and_the_file_is_never_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, content = tmp_path / "file", bytes(range(251)) * (24 * MIB // 251)
    path.write_bytes(content)
    monkeypatch.setattr(digests, "PROGRESS_BYTES", 10 * MIB)
    done: list[int] = []
    tracemalloc.start()
    found = digest_of(path, done.append)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == FileDigest(len(content), xxhash.xxh3_128_hexdigest(content))
    assert sum(done) == len(content) and len(done) == 3 and most < 2 * CHUNK_BYTES


def test_digests_that_writers_left_are_taken_up_and_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adapter").mkdir()
    for name in ("one.safetensors", "one.json", "adapter/two.safetensors"):
        (tmp_path / name).write_bytes(name.encode())
    left = FileDigest(3, "as its writer said")
    leave(tmp_path / "one.safetensors", left)
    here: list[str] = []

    def made(path: Path, *_: Any) -> FileDigest:
        here.append(path.name)
        return digest_of(path)

    monkeypatch.setattr(digests, "digest_of", made)
    found = collect_digests(tmp_path)
    assert here == ["two.safetensors", "one.json"] and not list(tmp_path.rglob(f"*{DIGEST_SUFFIX}"))
    assert list(found) == ["adapter/two.safetensors", "one.json", "one.safetensors"]
    assert found["one.safetensors"] == left


def flip(path: Path, at: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


def fill(folder: Path) -> None:
    (folder / "adapter").mkdir()
    for n, name in enumerate(("model.safetensors", "optimizer-00001-of-00001.safetensors", "adapter/a.json")):
        (folder / name).write_bytes(bytes([n]) * 5000)


MODEL = ModelIdentity("1f" * 16, "2e" * 16, "3d" * 16)


def saved(folder: Path, *steps: int, model: ModelIdentity | None = None) -> CheckpointStore:
    store = CheckpointStore(folder, 1, keep=9, model=model)
    for step in steps:
        store.save(CheckpointState(step, step + 1, "d", 1, step, 1.5, {"beta": 3}), fill)
    return store


class Context:
    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.log = SimpleNamespace(warning=lambda *_, **__: None)
        self.progress = SimpleNamespace(advance=lambda n, detail: self.told.append(detail), extend=self._extend)
        self.told: list[str] = []
        self.extended: list[tuple[float, str]] = []

    def _extend(self, seconds: float, reason: str) -> None:
        self.extended.append((seconds, reason))

    def event(self, kind: str, /, **fields: Any) -> None:
        self.events.append((kind, fields))


def resumed(store: CheckpointStore) -> tuple[list[str], Context]:
    """The names of the checkpoints of which anything was taken, and what was told."""
    names: list[str] = []
    ctx: Any = Context()

    async def take(folder: Path, of: CheckpointState) -> None:
        names.append(folder.name)

    asyncio.run(resume_newest(ctx, store, take))
    return names, ctx


def halfway(path: Path) -> None:
    flip(path, path.stat().st_size // 2)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def grown(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"1")


def no_file(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[Callable[[Path], None], str] = {
    halfway: " is not what was written: its xxh3-128 is {}, it was {}",
    cut: " has 4999 bytes, 5000 were written",
    grown: " has 5001 bytes, 5000 were written",
    Path.unlink: " is missing: 5000 bytes were written",
    no_file: " is no file: 5000 bytes were written",
}


@pytest.mark.parametrize("harm", DAMAGES, ids=lambda harm: harm.__name__)
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer-00001-of-00001.safetensors", "adapter/a.json"])
def test_a_file_that_is_not_what_was_written_is_named_and_nothing_is_taken(
    tmp_path: Path, name: str, harm: Callable[[Path], None]
) -> None:
    store = saved(tmp_path, 5, 10)
    path = tmp_path / "step-000010" / name
    was = digest_of(path).xxh3_128
    harm(path)
    found = digest_of(path).xxh3_128 if path.is_file() else ""
    names, ctx = resumed(store)
    assert names == ["step-000005"]
    (_, said), (kind, _) = ctx.events
    assert kind == "checkpoint_quarantined" and (tmp_path / "damaged-step-000010").is_dir()
    assert f": {name} " in said["why"] and DAMAGES[harm].format(found, was) in said["why"]
    assert "comparing step-000005 with its digests" in ctx.told


def test_files_that_changed_places_are_found(tmp_path: Path) -> None:
    store = saved(tmp_path, 5, 10)
    folder = tmp_path / "step-000010"
    (folder / "model.safetensors").write_bytes((folder / "optimizer-00001-of-00001.safetensors").read_bytes())
    assert resumed(store)[0] == ["step-000005"]


def test_where_none_is_what_was_written_the_run_ends(tmp_path: Path) -> None:
    store = saved(tmp_path, 5, 10)
    for step in ("step-000005", "step-000010"):
        flip(tmp_path / step / "model.safetensors", 7)
    with pytest.raises(BadInput, match="none of the checkpoints") as caught:
        resumed(store)
    assert caught.value.why.count("model.safetensors is not what was written") == 2
    assert sorted(path.name for path in tmp_path.glob("*step-*")) == ["step-000005", "step-000010"]


def test_no_flipped_bit_of_the_state_file_is_taken(tmp_path: Path) -> None:
    store = saved(tmp_path, 5, model=MODEL)
    path = tmp_path / "step-000005" / "relax_rt.json"
    whole, good = path.read_bytes(), read_state(path.parent)
    assert good.files.keys() == {"model.safetensors", "optimizer-00001-of-00001.safetensors", "adapter/a.json"}
    assert good.model == MODEL
    for at in range(len(whole)):
        flip(path, at, at % 8)
        with suppress(Corrupt):
            # What is read all the same is what was written: with other white space, or "own" was not read.
            assert replace(read_state(path.parent), own=good.own) == good, (at, path.read_bytes())
        path.write_bytes(whole)
    # However it is laid out.
    path.write_text(json.dumps(json.loads(whole)))
    assert resumed(store)[0] == ["step-000005"]
    # A field that only other versions know is part of it.
    path.write_text(json.dumps({**json.loads(whole), "later": 1}))
    with pytest.raises(Corrupt, match=r"relax_rt\.json is not what was written"):
        read_state(path.parent)


@pytest.mark.parametrize(("before", "bit"), [(b'"weights": "', 0), (b'"format": ', 1)])
def test_a_flipped_bit_is_neither_another_model_nor_a_newer_format(tmp_path: Path, before: bytes, bit: int) -> None:
    store = saved(tmp_path, 5, 10, model=MODEL)
    path = tmp_path / "step-000010" / "relax_rt.json"
    flip(path, path.read_bytes().index(before) + len(before), bit)
    names, ctx = resumed(store)
    assert names == ["step-000005"]
    (kind, said), *_ = ctx.events
    assert kind == "checkpoint_damaged" and "relax_rt.json is not what was written" in said["why"]


def test_a_model_is_taken_out_by_any_tool(tmp_path: Path) -> None:
    """As the hint for one of another model says. Some write whole floats without a point, and in another order."""
    store = CheckpointStore(tmp_path, 1, keep=9, model=MODEL)
    path = store.save(CheckpointState(5, 6, "d", 1, 5, 100.0, {"beta": 2.0, "gamma": 0.1}), fill) / "relax_rt.json"
    written = json.loads(path.read_bytes())
    path.write_text(json.dumps(dict(reversed(written.items()))))
    assert resumed(store)[0] == ["step-000005"]
    changed = {**written, "elapsed_s": 100, "objective": {"gamma": 0.1, "beta": 2}}
    path.write_text(json.dumps({name: value for name, value in changed.items() if name not in ("model", "own")}))
    assert resumed(store)[0] == ["step-000005"]
    path.write_text(json.dumps({**written, "elapsed_s": 101.0}))
    with pytest.raises(Corrupt, match=r"relax_rt\.json is not what was written"):
        read_state(path.parent)


def test_a_folder_in_the_place_of_a_file_is_damage_whatever_its_size(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    wanted = {"file": FileDigest((tmp_path / "file").stat().st_size, "")}
    with pytest.raises(Corrupt, match="file is no file"):
        verify_digests(tmp_path, wanted)


def test_a_start_has_more_time_by_what_comparing_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And as much again for whoever takes the checkpoint, but none for a read that does not get on."""
    store, now = saved(tmp_path, 5), 1000.0

    def slow(path: Path, done: Callable[[int], object]) -> FileDigest:
        nonlocal now
        for _ in range(4):
            now += 300
            done(1)
        return digest_of(path)

    monkeypatch.setattr(digests, "DIGEST_THREADS", 1)
    monkeypatch.setattr(digests, "digest_of", slow)
    monkeypatch.setattr(keeping, "time", SimpleNamespace(monotonic=lambda: now))
    names, ctx = resumed(store)
    assert names == ["step-000005"]
    what = "comparing step-000005 with its digests"
    assert ctx.extended == [(COMPARE_ALLOWANCE_S, what), *[(300.0, what)] * 12, (3600.0, "taking step-000005")]


def test_a_file_system_that_fails_costs_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = saved(tmp_path, 5, 10)

    def refused(*_: Any) -> FileDigest:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(digests, "digest_of", refused)
        with pytest.raises(RelaxError, match=r"step-000010.*Input/output error"):
            resumed(store)
    assert resumed(store)[0] == ["step-000010"]


def test_what_lies_beside_the_files_is_not_looked_at(tmp_path: Path) -> None:
    saved(tmp_path, 5)
    folder = tmp_path / "step-000005"
    (folder / "notes.txt").write_text("mine")
    verify_digests(folder, read_state(folder).files)
