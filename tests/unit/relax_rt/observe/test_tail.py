from __future__ import annotations

import json
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from relax_rt.observe.metrics import Tail

records = st.lists(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=20), max_size=3), max_size=12)
junk = st.sampled_from([b"", b"not json", b"[1, 2]", b'{"torn": ', b"\xff\xfe", b"17"])


def lines_of(content: list[dict[str, object]]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in content)


def drain(tail: Tail) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    while batch := tail.poll():
        found += batch
    return found


@given(content=records, noise=st.lists(junk, max_size=5), data=st.data())
def test_any_cut_of_the_writes_gives_the_same_records(
    content: list[dict[str, object]], noise: list[bytes], data: st.DataObject
) -> None:
    lines = [json.dumps(record).encode() for record in content]
    for line in noise:
        lines.insert(data.draw(st.integers(0, len(lines))), line)
    whole = b"".join(line + b"\n" for line in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    read_bytes = data.draw(st.integers(1, 64))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.jsonl"
        tail = Tail(path, read_bytes=read_bytes)
        found = tail.poll()
        for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
            with path.open("ab") as file:
                file.write(whole[start:end])
            found += tail.poll()
        for _ in range(len(whole) // read_bytes + 2):
            found += tail.poll()
        tail.close()
    assert found == content


@given(content=records, last_bytes=st.integers(0, 200))
def test_a_look_back_begins_at_a_whole_line(content: list[dict[str, object]], last_bytes: int) -> None:
    whole = lines_of(content)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.jsonl"
        path.write_bytes(whole)
        tail = Tail(path, last_bytes=last_bytes)
        found = drain(tail)
        tail.close()
    expected = [r for i, r in enumerate(content) if len(whole) - len(lines_of(content[:i])) <= last_bytes]
    assert found == expected


def test_a_poll_reads_no_more_than_allowed(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(lines_of([{"n": n} for n in range(1000)]))
    tail = Tail(path, read_bytes=100)
    assert 0 < len(tail.poll()) <= 15
    assert len(drain(tail)) > 900


def test_a_file_cut_short_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(lines_of([{"n": 1}, {"n": 2}]) + b'{"half')
    tail = Tail(path)
    assert tail.poll() == [{"n": 1}, {"n": 2}]
    path.write_bytes(lines_of([{"n": 3}]))
    assert tail.poll() == [{"n": 3}]


def test_a_renamed_file_is_read_to_its_end_before_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "current.jsonl"
    path.write_bytes(lines_of([{"n": 1}]))
    tail = Tail(path)
    assert tail.poll() == [{"n": 1}]
    with path.open("ab") as file:
        file.write(lines_of([{"n": 2}]))
    path.rename(tmp_path / "events-000001.jsonl")
    path.write_bytes(lines_of([{"n": 3}]))
    assert drain(tail) == [{"n": 2}, {"n": 3}]


def test_an_overlong_line_is_passed_over_whole(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(lines_of([{"n": 1}, {"long": "x" * 5000}, {"n": 2}]))
    tail = Tail(path, read_bytes=256, line_bytes=1000)
    found = []
    for _ in range(40):
        found += tail.poll()
    assert found == [{"n": 1}, {"n": 2}]
    assert tail.skipped == 1
