"""Publication through shared memory: whole or refused, never half."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from relax_rt.transport.rpc.errors import Gone, OutOfSpace, StaleEpoch
from relax_rt.transport.weights.manifest import Layout, Manifest, layout_of
from relax_rt.transport.weights.stage import (
    MAX_BUFFERS,
    WeightStage,
    copy_verified,
    delta_file,
    keep_file,
    pinned,
    read_manifest,
    wire_file,
)

LAYOUT = layout_of([("a", "float32", (3,), 12), ("b", "bfloat16", (5, 2), 20)])


def publish(stage: WeightStage, version: int, fill: int, keep: int = 0, layout: Layout = LAYOUT) -> Manifest:
    with stage.writing(layout, keep) as (file, view):
        view[:] = bytes([fill]) * layout.nbytes
        return stage.seal(version, layout, file, view)


def fetch(folder: Path, manifest: Manifest, into: memoryview) -> None:
    with pinned(folder, manifest) as view:
        copy_verified(manifest, view, into)


def test_a_fetched_copy_is_what_was_staged(tmp_path: Path) -> None:
    manifest = publish(WeightStage(tmp_path, 1), 7, 42)
    copy = bytearray(LAYOUT.nbytes)
    fetch(tmp_path, read_manifest(tmp_path, 7), memoryview(copy))
    assert copy == bytes([42]) * LAYOUT.nbytes
    assert manifest == read_manifest(tmp_path, 7)


def test_tensors_are_aligned_and_do_not_overlap() -> None:
    ends = [(e.offset, e.offset + e.nbytes) for e in LAYOUT.entries]
    assert all(start % 64 == 0 for start, _ in ends)
    assert ends[0][1] <= ends[1][0] <= LAYOUT.nbytes


def test_the_committed_version_survives_later_stages(tmp_path: Path) -> None:
    stage = WeightStage(tmp_path, 1)
    publish(stage, 1, 11)
    for version in range(2, 12):
        publish(stage, version, version, keep=1)  # each reuses the other buffer: 1 stays committed
    copy = bytearray(LAYOUT.nbytes)
    fetch(tmp_path, read_manifest(tmp_path, 1), memoryview(copy))
    assert copy[0] == 11
    assert len(list(tmp_path.glob("w*.buf"))) == 2
    with pytest.raises(Gone, match="policy version 2"):
        read_manifest(tmp_path, 2)


def test_an_older_incarnation_is_fenced(tmp_path: Path) -> None:
    old = WeightStage(tmp_path, 3)
    publish(old, 1, 1)
    new = WeightStage(tmp_path, 4)
    with pytest.raises(StaleEpoch, match="epoch 4 writes here, this is 3"):
        publish(old, 2, 2)
    publish(new, 2, 9, keep=1)
    assert read_manifest(tmp_path, 2).epoch == 4
    with pytest.raises(StaleEpoch):
        WeightStage(tmp_path, 3)


def test_a_pinned_buffer_is_not_reused_and_a_killed_reader_lets_go(tmp_path: Path) -> None:
    stage = WeightStage(tmp_path, 1)
    files = {publish(stage, 1, 1).file}
    code = (
        "import fcntl,os,sys,time\n"
        "fd=os.open(sys.argv[1],os.O_RDONLY); fcntl.flock(fd,fcntl.LOCK_SH); print('pinned',flush=True)\n"
        "time.sleep(600)"
    )
    readers = []
    try:
        for version in range(2, MAX_BUFFERS + 2):
            name = read_manifest(tmp_path, version - 1).file
            reader = subprocess.Popen(
                [sys.executable, "-c", code, str(tmp_path / name)], stdout=subprocess.PIPE, text=True
            )
            readers.append(reader)
            assert reader.stdout is not None
            assert reader.stdout.readline() == "pinned\n"
            if version <= MAX_BUFFERS:
                files.add(publish(stage, version, version, keep=version - 1).file)
        assert len(files) == MAX_BUFFERS
        with pytest.raises(OutOfSpace, match="pinned by readers"):
            publish(stage, 9, 9, keep=MAX_BUFFERS)
        os.kill(readers[0].pid, signal.SIGKILL)
        readers[0].wait()
        assert publish(stage, 9, 9, keep=MAX_BUFFERS).file == "w0.buf"
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()
            assert reader.stdout is not None
            reader.stdout.close()


def test_retiring_removes_older_manifests_only(tmp_path: Path) -> None:
    stage = WeightStage(tmp_path, 1)
    publish(stage, 1, 1)
    publish(stage, 2, 2, keep=1)
    stage.retire(2)
    assert read_manifest(tmp_path, 2).version == 2
    with pytest.raises(Gone, match="policy version 1"):
        read_manifest(tmp_path, 1)


def test_who_comes_to_keep_a_file_while_it_is_retired_finds_it_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not a file that has no name any more when it is opened by it."""
    stage, path, found = WeightStage(tmp_path, 1), tmp_path / wire_file(1), list[bool | str]()
    for version in (1, 2):
        with stage.writing(LAYOUT, version - 1) as (file, view):
            stage.seal(version, LAYOUT, file, view, b"narrow")
    entered, unlinked, unlink = threading.Event(), threading.Event(), Path.unlink

    def keep() -> None:
        try:
            with keep_file(path):
                entered.set()
                assert unlinked.wait(120)
                found.append(path.exists())
        except Gone as error:
            found.append(str(error))

    reader = threading.Thread(target=keep)

    def slow(self: Path, missing_ok: bool = False) -> None:
        if self == path:
            reader.start()
            entered.wait(0.2)  # it is not to get in
        unlink(self, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", slow)
    stage.retire(2)
    unlinked.set()
    reader.join(120)
    assert found == [f"{path.name}: retired from the stage {tmp_path}"]
    with keep_file(tmp_path / wire_file(2)):
        stage.retire(3)
        assert (tmp_path / wire_file(2)).exists(), "who has come before is not disturbed"


FULL = """
import pathlib, subprocess, sys
from relax_rt.transport.rpc.errors import OutOfSpace
from relax_rt.transport.weights.manifest import layout_of
from relax_rt.transport.weights.stage import WeightStage
root, layout = pathlib.Path(sys.argv[1]), layout_of([("w", "bfloat16", (1 << 19,), 1 << 20)])
for pages in range(514, 518):
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={pages * 4096}", "tmpfs", str(root)], check=True)
    stage = WeightStage(root, 1)
    for version in (1, 2):
        with stage.writing(layout, version - 1) as (file, view):
            view[:9] = bytes([version]) * 9
            try:
                manifest = stage.seal(version, layout, file, view)
            except OutOfSpace as error:
                print(error)
                break
            manifest = stage.seal_delta(manifest, view, 1) if version == 2 else manifest
    print(bool(manifest.deltas), *sorted(p.name.partition("-")[0] for p in root.iterdir()))
    stage.close()
    subprocess.run(["umount", str(root)], check=True)
"""


def test_a_full_shared_memory_is_told_and_costs_first_the_delta(tmp_path: Path) -> None:
    """A page more each time: for the manifest of the second version, for its delta, for the manifest that names it."""
    command = ["unshare", "--mount"]
    if os.geteuid() != 0 or subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no file system of its own can be made here")
    done = subprocess.run(
        [*command, sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    told, *left = done.stdout.splitlines()
    assert told.startswith(f"the manifest of policy version 2 in {tmp_path}: [Errno {errno.ENOSPC}]"), done.stderr
    assert "enlarge /dev/shm" in told
    one, two = "epoch v00000001.json w0.buf w1.buf", "epoch v00000001.json v00000002.json w0.buf w1.buf"
    assert left == [
        f"False {one}",
        f"False {two}",
        f"False {two}",
        f"True d00000002 {two}",
    ], done.stderr


def test_deltas_of_incarnations_that_died_before_their_commit_do_not_pile_up(tmp_path: Path) -> None:
    stage = WeightStage(tmp_path, 1)
    publish(stage, 1, 1)
    for version in range(2, 6):
        successor = WeightStage(tmp_path, version)
        with successor.writing(LAYOUT, 1) as (file, view):
            view[:] = bytes([1]) * LAYOUT.nbytes
            manifest = successor.seal(version, LAYOUT, file, view)
            assert successor.seal_delta(manifest, view, 1).deltas
    assert [path.name for path in tmp_path.glob("d*")] == [delta_file(5, manifest.digest)]


def test_a_free_buffer_is_found_behind_one_for_which_there_is_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = WeightStage(tmp_path, 1)
    for version in (1, 2):
        publish(stage, version, version, keep=version - 1)
    (tmp_path / "w0.buf").unlink()
    fallocate = os.posix_fallocate

    def full(descriptor: int, at: int, nbytes: int) -> None:
        if os.fstat(descriptor).st_size < at + nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fallocate(descriptor, at, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert publish(stage, 3, 3).file == "w1.buf"
    with pytest.raises(OutOfSpace, match="enlarge /dev/shm"):
        publish(stage, 4, 4, keep=3)


def test_a_stage_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "epoch").mkdir()
    (tmp_path / "file").touch()
    for folder in (tmp_path, tmp_path / "file"):
        with pytest.raises(OutOfSpace, match="weight stage"):
            WeightStage(folder, 1)


def test_nobody_else_may_read_what_lies_there(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        stage = WeightStage(tmp_path / "stage", 1)
        publish(stage, 1, 1)
        with stage.writing(LAYOUT, 1) as (file, view):
            view[:] = bytes([1]) * LAYOUT.nbytes
            sealed = stage.seal_delta(stage.seal(2, LAYOUT, file, view), view, 1)
            assert sealed.deltas
    finally:
        os.umask(before)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "stage").iterdir()}
    assert modes.keys() >= {delta_file(2, sealed.digest), "v00000001.json", "w0.buf", "epoch"}
    assert set(modes.values()) == {"0o600"}
