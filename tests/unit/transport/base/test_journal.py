from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_rt.transport.base.journal import MAGIC, SNAPSHOT_RECORDS, SNAPSHOT_SHARE, Journal
from relax_rt.transport.rpc.errors import Corrupt, OutOfSpace


def fill(journal: Journal, payloads: list[bytes]) -> None:
    for payload in payloads:
        journal.append(journal.n + 1, payload)


def test_what_was_appended_is_found_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "queue")
    assert journal.recover().records == []
    fill(journal, [b"one", b"two"])
    journal.sync()
    journal.close()
    again = Journal(tmp_path / "queue")
    assert again.recover().records == [(1, b"one"), (2, b"two")]
    fill(again, [b"three"])
    again.close()
    last = Journal(tmp_path / "queue")
    assert [n for n, _ in last.recover().records] == [1, 2, 3]
    last.close()
    assert (tmp_path / "queue").stat().st_mode & 0o777 == 0o700


def test_records_are_numbered_without_gaps(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.recover()
    for n in (0, 2):
        with pytest.raises(Corrupt):
            journal.append(n, b"x")
    journal.close()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=8), st.data())
def test_a_kill_at_any_byte_loses_no_whole_record(
    tmp_path_factory: pytest.TempPathFactory, payloads: list[bytes], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    journal = Journal(folder)
    journal.recover()
    sizes = [journal.nbytes]
    for payload in payloads:
        fill(journal, [payload])
        sizes.append(journal.nbytes)
    journal.close()
    cut = data.draw(st.integers(0, sizes[-1]))
    os.truncate(folder / "segment-1.log", cut)
    whole = max((i for i, size in enumerate(sizes) if size <= cut), default=0)
    again = Journal(folder)
    found = again.recover()
    assert [payload for _, payload in found.records] == payloads[:whole]
    assert found.torn_bytes == (cut - sizes[whole] if cut >= len(MAGIC) else cut)
    fill(again, [b"next"])
    again.close()
    last = Journal(folder)
    assert [payload for _, payload in last.recover().records] == [*payloads[:whole], b"next"]
    last.close()


def test_zeros_at_the_end_are_torn(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.recover()
    fill(journal, [b"one"])
    journal.close()
    with (tmp_path / "segment-1.log").open("ab") as file:
        file.write(bytes(100))
    again = Journal(tmp_path)
    found = again.recover()
    assert (found.records, found.torn_bytes) == ([(1, b"one")], 100)
    again.close()


def test_damage_in_the_middle_is_not_passed_over(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.recover()
    fill(journal, [b"first record", b"second record", b"third record"])
    journal.close()
    path = tmp_path / "segment-1.log"
    data = bytearray(path.read_bytes())
    data[len(MAGIC) + 10] ^= 1
    path.write_bytes(data)
    with pytest.raises(Corrupt, match="others follow"):
        Journal(tmp_path).recover()


@pytest.mark.parametrize("stage", ["before_snapshot", "temporary", "renamed", "removed"])
def test_rotation_can_be_interrupted_anywhere(tmp_path: Path, stage: str) -> None:
    journal = Journal(tmp_path, segment_bytes=64)
    journal.recover()
    fill(journal, [b"x" * 30, b"y" * 30])
    assert journal.wants_snapshot
    old = (tmp_path / "segment-1.log").read_bytes()
    finish = journal.rotate(b"state after 2")
    assert not journal.wants_snapshot
    fill(journal, [b"three"])
    if stage == "temporary":
        (tmp_path / "snapshot-2.tmp").write_bytes(b"half")
    if stage in ("renamed", "removed"):
        finish()
    if stage == "renamed":
        (tmp_path / "segment-1.log").write_bytes(old)
    journal.close()
    again = Journal(tmp_path)
    found = again.recover()
    if stage in ("renamed", "removed"):
        assert (found.snapshot, found.n, found.records) == (b"state after 2", 2, [(3, b"three")])
        assert sorted(path.name for path in tmp_path.iterdir()) == ["segment-3.log", "snapshot-2.bin"]
    else:
        assert found.snapshot == b"" and [n for n, _ in found.records] == [1, 2, 3]
    fill(again, [b"four"])
    again.rotate(b"state after 4")()
    again.close()
    last = Journal(tmp_path)
    assert (last.recover().snapshot, last.n) == (b"state after 4", 4)
    last.close()


def test_a_snapshot_is_wanted_after_so_many_records_but_not_too_often_of_a_large_state(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.recover()
    for _ in range(SNAPSHOT_RECORDS - 1):
        fill(journal, [b"x"])
    assert not journal.wants_snapshot
    fill(journal, [b"x"])
    assert journal.wants_snapshot
    journal.rotate(b"s" * 10_000)()
    for _ in range(SNAPSHOT_RECORDS):
        fill(journal, [b"x"])
    assert not journal.wants_snapshot
    journal.close()
    again = Journal(tmp_path)
    again.recover()
    assert not again.wants_snapshot
    while again.nbytes < SNAPSHOT_SHARE * 10_000:
        fill(again, [b"x"])
    assert again.wants_snapshot
    again.close()


def test_missing_records_are_an_error(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.recover()
    fill(journal, [b"one", b"two"])
    journal.rotate(b"state")
    fill(journal, [b"three"])
    journal.close()
    (tmp_path / "segment-1.log").unlink()
    with pytest.raises(Corrupt, match="records 1 to 2 are missing"):
        Journal(tmp_path).recover()


def test_a_damaged_snapshot_is_an_error(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.recover()
    fill(journal, [b"one"])
    journal.rotate(b"state")()
    journal.close()
    (tmp_path / "snapshot-1.bin").write_bytes(b"\x05\0\0\0\0\0\0\0state")
    with pytest.raises(Corrupt, match="checksum"):
        Journal(tmp_path).recover()


def test_a_full_disk_is_reported_and_stops_the_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.recover()
    fill(journal, [b"one"])
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, journal._fd)
    os.close(full)
    with pytest.raises(OutOfSpace, match="No space left"):
        journal.append(2, b"two")
    with pytest.raises(Corrupt):
        journal.append(2, b"two")
    again = Journal(tmp_path)
    assert again.recover().records == [(1, b"one")]
    again.close()


WRITER = """
import sys
from pathlib import Path
from relax_rt.transport.base.journal import Journal
journal = Journal(Path(sys.argv[1]), segment_bytes=4096)
journal.recover()
while True:
    n = journal.n + 1
    journal.append(n, b"%d:" % n + bytes(n % 97))
    print(n, flush=True)
    if journal.wants_snapshot:
        journal.rotate(b"%d" % n)()
"""


def test_a_killed_process_loses_nothing_it_acknowledged(tmp_path: Path) -> None:
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        acknowledged = [int(process.stdout.readline()) for _ in range(400)][-1]
        process.send_signal(signal.SIGKILL)
        acknowledged = max([acknowledged, *(int(line) for line in process.stdout if line.endswith("\n"))])
        process.stdout.close()
        process.wait()
        copy = tmp_path.with_name("copy")
        shutil.copytree(tmp_path, copy)
        journal = Journal(copy)
        found = journal.recover()
        journal.close()
        shutil.rmtree(copy)
        assert journal.n >= acknowledged
        assert all(payload.startswith(b"%d:" % n) for n, payload in found.records)
        assert found.n == 0 or found.snapshot == b"%d" % found.n
