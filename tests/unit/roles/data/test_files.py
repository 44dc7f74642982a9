"""Files of rows: which are read, in which forms, and what is said of damaged ones."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from relax_rt.roles.data.files import find_shards, parse_line, read_rows
from relax_rt.roles.data.index import RowIndex
from relax_rt.roles.data.items import RawItem
from relax_rt.roles.data.settings import DataTable
from relax_rt.roles.training.sft.data import read_sft_rows as read_cold
from relax_rt.transport.rpc.errors import RelaxError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def rows(start: int, end: int) -> list[dict[str, Any]]:
    return [{"prompt": f"what is {i}?", "answer": i, "metadata": {"level": i % 3}} for i in range(start, end)]


def jsonl(items: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(item).encode() + b"\n" for item in items)


def zstd(data: bytes) -> bytes:
    return bytes(pyarrow.compress(data, codec="zstd", asbytes=True))


def items(path: Path | str, **more: Any) -> list[RawItem]:
    index = RowIndex.open(DataTable(path=str(path), **more), Path())
    return [index.raw(number) for number in range(len(index))]


def write_jsonl(path: Path, found: list[dict[str, Any]]) -> None:
    path.write_bytes(jsonl(found))


def write_gz(path: Path, found: list[dict[str, Any]]) -> None:
    path.write_bytes(gzip.compress(jsonl(found[:7])) + gzip.compress(jsonl(found[7:])))


def write_zst(path: Path, found: list[dict[str, Any]]) -> None:
    path.write_bytes(zstd(jsonl(found[:7])) + zstd(jsonl(found[7:])))


def write_parquet(path: Path, found: list[dict[str, Any]]) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(found), path, row_group_size=3)


def write_stream(path: Path, found: list[dict[str, Any]]) -> None:
    table = pyarrow.Table.from_pylist(found)
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


def write_feather(path: Path, found: list[dict[str, Any]]) -> None:
    table = pyarrow.Table.from_pylist(found)
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


Writer = Callable[[Path, list[dict[str, Any]]], None]
WRITERS: list[tuple[str, Writer]] = [
    ("a.jsonl", write_jsonl),
    ("a.jsonl.gz", write_gz),
    ("a.jsonl.zst", write_zst),
    ("a.parquet", write_parquet),
    ("a.arrow", write_stream),
    ("b.arrow", write_feather),
]


@pytest.mark.parametrize(("name", "write"), WRITERS)
def test_every_kind_of_file_reads_alike(tmp_path: Path, name: str, write: Writer) -> None:
    write(tmp_path / name, rows(0, 20))
    found = items(tmp_path / name)
    assert [(one.question, one.answer, one.metadata) for one in found] == [
        (one["prompt"], one["answer"], one["metadata"]) for one in rows(0, 20)
    ]
    table = name.endswith((".parquet", ".arrow"))
    assert found[8].where == f"{tmp_path / name}:{'row ' if table else ''}9"


def test_a_folder_of_shards_of_several_kinds(tmp_path: Path) -> None:
    for number, (name, write) in enumerate(WRITERS):
        write(tmp_path / f"{number}-{name}", rows(10 * number, 10 * number + 10))
    (tmp_path / "README.md").write_text("no rows")
    (tmp_path / ".hidden.jsonl").write_text("no rows")
    assert [one.answer for one in items(tmp_path)] == list(range(60))
    assert [one.answer for one in items(tmp_path / "*.jsonl*")] == list(range(30))


def test_a_folder_that_datasets_saved(tmp_path: Path) -> None:
    """As `Dataset.save_to_disk` and `DatasetDict.save_to_disk` lay it out."""
    for split, start in (("train", 0), ("test", 100)):
        folder = tmp_path / split
        folder.mkdir()
        names = [f"data-0000{number}-of-00002.arrow" for number in range(2)]
        for number, name in enumerate(names):
            write_stream(folder / name, rows(start + 10 * number, start + 10 * number + 10))
        write_stream(folder / "cache-1.arrow", rows(500, 510))
        (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
        (folder / "dataset_info.json").write_text("{}")
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    assert [one.answer for one in items(tmp_path / "test")] == list(range(100, 120))
    assert [one.answer for one in items(tmp_path)] == list(range(20))
    assert [one.answer for one in items(tmp_path, split="test")] == list(range(100, 120))
    index = RowIndex.open(DataTable(path=str(tmp_path)), Path())
    assert any("split 'train' is read, not test" in note for note in index.contents.notes)
    with pytest.raises(RelaxError, match="there is no split 'dev', but test, train"):
        items(tmp_path, split="dev")


def test_a_snapshot_of_the_hub_is_read_by_split(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for split, start in (("train", 0), ("test", 100), ("validation", 200)):
        for number in range(2):
            name = f"{split}-0000{number}-of-00002.parquet"
            write_parquet(tmp_path / "data" / name, rows(start + 5 * number, start + 5 * number + 5))
    assert [one.answer for one in items(tmp_path)] == list(range(10))
    assert [one.answer for one in items(tmp_path, split="test")] == list(range(100, 110))
    # An evaluation set must say which.
    with pytest.raises(RelaxError, match="several splits: test, train, validation"):
        find_shards(tmp_path, "d", "data.path", "")


def test_a_column_of_parquet_keeps_its_types(tmp_path: Path) -> None:
    table = pyarrow.table(
        {
            "prompt": ["a", "b", "c"],
            "answer": pyarrow.array([1.0, 42.0, 2.5], pyarrow.float64()),
            "day": [date(2024, 1, 2)] * 3,
            "raw": [b"\x00\xff"] * 3,
            "tags": pyarrow.array([[("k", 1)], None, []], pyarrow.map_(pyarrow.string(), pyarrow.int64())),
        }
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    found = items(tmp_path / "a.parquet")
    assert [(one.answer, type(one.answer)) for one in found] == [(1.0, float), (42.0, float), (2.5, float)]
    assert found[0].metadata == {"day": "2024-01-02", "raw": "AP8=", "tags": [["k", 1]]}
    parquet.write_table(pyarrow.table({"prompt": ["a"], "answer": [42]}), tmp_path / "b.parquet")
    assert type(items(tmp_path / "b.parquet")[0].answer) is int


ANSWERLESS: list[tuple[list[dict[str, Any]], dict[str, str]]] = [
    ([{"prompt": "q", "answer": None}, {"prompt": "r", "answer": "a"}], {}),
    ([{"prompt": "q", "answer": None}], {}),
    ([{"prompt": "q", "answer": None, "level": 3}], {}),
    ([{"prompt": [{"role": "user", "content": "q"}], "answer": None}], {}),
    ([{"prompt": "q", "label": None}, {"prompt": "r", "label": 2}], {"answer": "label"}),
    ([{"prompt": "q", "answer": 1, "extra": None}, {"prompt": "r", "answer": 2, "extra": 5}], {"level": "extra"}),
    ([{"prompt": "q", "answer": 1, "rules": None}, {"prompt": "r", "answer": 2, "rules": "s"}], {"system": "rules"}),
    ([{"prompt": "q", "answer": None, "solution": "s"}, {"prompt": "r", "answer": "a", "solution": "t"}], {}),
    (
        [
            {
                "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
                "answer": None,
            }
        ],
        {},
    ),
]


@pytest.mark.parametrize(("found", "columns"), ANSWERLESS)
@pytest.mark.parametrize(("name", "write"), WRITERS[3:])
def test_null_is_read_in_tables_as_in_lines(
    tmp_path: Path, name: str, write: Writer, found: list[dict[str, Any]], columns: dict[str, str]
) -> None:
    write_jsonl(tmp_path / "a.jsonl", found)
    write(tmp_path / name, found)
    lines, table = (items(tmp_path / one, columns=columns) for one in ("a.jsonl", name))
    contents = RowIndex.open(DataTable(path=str(tmp_path / name), columns=columns), Path()).contents
    nulls = [one.where for one in table if one.answer is None]
    told = f"{len(nulls)} rows have a null answer, the first {nulls[0]}" if nulls else ""
    assert [note for note in contents.notes if "null answer" in note] == ([told] if told else [])
    for one, other in zip(lines, table, strict=True):
        assert (one.question, one.answer, one.system) == (other.question, other.answer, other.system)
        assert other.metadata == {key: one.metadata[key] for key in other.metadata}


GOOD = b'{"prompt": "x", "answer": 1}\n'


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (GOOD + b'{"prompt": "caf\xe9", "answer": 1}\n', r":2: byte 16: 0xe9 is not UTF-8 .*caf\\xe9.*Latin-1.*'é'"),
        (GOOD + b'{"prompt": "\xff\xfe", "answer": 1}\n', ":2: byte 13: 0xff is not UTF-8"),
        (b'{"prompt": "\xc3", "answer": 1}\n', ":1: byte 13: 0xc3 is not UTF-8"),
        (b'{"prompt": "\xed\xa0\x80", "answer": 1}\n', ":1: byte 13: 0xed is not UTF-8"),
        (b'{"prompt": "\xc0\xaf", "answer": 1}\n', ":1: byte 13: 0xc0 is not UTF-8"),
        (GOOD + b'{"prompt": "\\ud800", "answer": 1}\n', r":2: byte 13: the lone surrogate \\ud800"),
        (b'{"prompt": "\\udc00", "answer": 1}\n', r":1: byte 13: the lone surrogate \\udc00"),
        (b'{"prompt": "\\ud83d\\ude00 \\uD83D!", "answer": 1}\n', r":1: byte 26: the lone surrogate \\uD83D"),
        (b'{"prompt": "\\\\ud800 \\ud8ff\\u0041", "answer": 1}\n', r":1: byte 21: the lone surrogate \\ud8ff"),
        (b'{"prompt": "a", "answer": "\\udfff"}\n', r":1: byte 28: the lone surrogate \\udfff"),
        (GOOD + b"\0" * 40 + b"\n", ":2: byte 1: 40 NUL bytes.*cut off while it was written"),
        (b'{"prompt": "a\0b", "answer": 1}\n', ":1: byte 14: 1 NUL bytes"),
        (b'{"prompt": "a"\0\0\n', ":1: byte 15: 2 NUL bytes"),
        (GOOD + b'{"prompt": "x", "ans', ":2: not a JSON object: the line ends within it"),
        (b"{'prompt': 'x'}\n", r":1: not a JSON object: byte 2: .*prompt"),
        (b'[{"prompt": "x", "answer": 1}]\n', ":1: a row is an object of columns"),
        (b'{"prompt": "x", "answer": 1},\n', ":1: not a JSON object: byte 29:"),
        (GOOD + b'{"prompt": "x", "answer": NaN}\n', ":2: `answer` is NaN, which JSON does not have"),
        (b'{"prompt":"x","answer":1,"metadata":{"a":[0,{"b":-Infinity}]}}\n', r"`metadata.a\[1\].b` is -Infinity"),
        (b'{"prompt": "x", "answer": 1, "metadata": {".a": NaN}}\n', r"`metadata\.\.a` is NaN"),
        (b'{"prompt": "x", "answer": 1, "..b": NaN}\n', r":1: `\.\.b` is NaN"),
        (b'{"prompt": "x", "answer": 1e999}\n', ":1: `answer` is Infinity"),
        (GOOD + b'{"prompt": "a\\u0000b", "answer": 1}\n', ":2: `prompt` has a NUL character.*'a.x00b'"),
        (
            b'{"messages": [{"role": "user", "content": "a\\u0000"}], "answer": 1}\n',
            ":1: `messages` has a NUL character",
        ),
        (b'{"prompt": "a", "system": "\\u0000", "answer": 1}\n', ":1: `system` has a NUL character"),
        (b"prompt,answer\nx,1\n", ":1: not a JSON object"),
        (b'{"prompt": "x", "answer": 1, "answer": 2}\n', ":1: the key 'answer' stands twice in one object .byte 30"),
        (b'{"prompt": "x", "prompt": "x", "answer": 1}\n', "the key 'prompt' stands twice"),
        (b'{"prompt": "x", "answer": 1, "metadata": {"k": 1, "k": 1}}\n', "the key 'k' stands twice"),
        (b'{"prompt":"x","answer":{"a":{"b":1,"b":2}}}\n', "the key 'b' stands twice"),
        (b'{"answer":1,"messages":[{"role":"user","content":"q","content":"r"}]}\n', "the key 'content' .*byte 54"),
        (b'{"answer":1,"messages":[{"role":"user","role":"user","content":"q"}]}\n', "the key 'role' stands twice"),
        (
            b'{"answer":1,"messages":[{"role":"user","content":"q"},{"role":"user","content":"q","role":"tool"}]}\n',
            "the key 'role' .*byte 84",
        ),
        (b'{"prompt":"x","answer":[[{"a":1,"b":2,"a":1}]]}\n', "the key 'a' .*byte 39"),
        (b'{"prompt":"x","answer":1,"tools":[{"name":"f","parameters":{},"name":"g"}]}\n', "the key 'name' .*byte 63"),
        (b'{"prompt":"x","answer":1,"tools":[{"name":"f","parameters":{"p":[{"k":1,"k":2}]}}]}\n', "the key 'k'"),
        (b'{"prompt":"a \\"b\\": [","answer":[{"c":"{","c":"]"}]}\n', "the key 'c'"),
        (b'{"prompt":"x","metadata":{"k":1},"answer":3,"metadata":{}}\n', "the key 'metadata' stands twice"),
        (b'{"prompt": "x", "answer": 123456789012345678901234567890}\n', ":1: .*64 bits"),
        ("\ufeff{}".encode("utf-16-le"), ":1: the file is UTF-16.*iconv -f UTF-16"),
        ('\ufeff{"prompt": "x", "answer": 1}\n'.encode("utf-16-be"), "UTF-16"),
        (b"", "there are no rows in it.*the file is empty"),
        (b"\n  \n\n", "there are no rows in it"),
        (b"\xef\xbb\xbf", "there are no rows in it"),
    ],
)
def test_a_damaged_line_is_named_with_its_bytes(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "d.jsonl").write_bytes(data)
    with pytest.raises(RelaxError, match=words):
        items(tmp_path / "d.jsonl")


@pytest.mark.parametrize(
    "line",
    [
        b'{"prompt": "the key \\"answer\\": twice, \\"answer\\": 3", "answer": 1}',
        b'{"prompt": "answer", "answer": "prompt"}',
        b'{"prompt" : "x", "answer" : 1}',
        b'{"prompt": "x", "answer": [{"a": 1}, {"a": 2}]}',
        b'{"prompt" : "x", "answer" : [{"a" : 1}, {"a" : 2, "b" : {"a" : "\\"a\\": 1"}}]}',
        b'{"prompt": "say \\"role\\": x", "answer": [{"role": "role", "x": ["role"]}, {"role": "}"}]}',
        b'{"prompt": "x", "answer": {"answer": 1, "prompt": {"answer": 2}}}',
        b'{"prompt": "\\u0000 \\ud83d\\ude00 \\\\ud800", "answer": 1}',
    ],
)
def test_lines_that_only_look_damaged_are_read(line: bytes) -> None:
    assert parse_line("f:1", line) == json.loads(line)


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path, mark: bytes) -> None:
    (tmp_path / "d.jsonl").write_bytes(mark + jsonl(rows(0, 3)))
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(mark + jsonl(rows(0, 3))))
    for name in ("d.jsonl", "d.jsonl.gz"):
        assert [one.answer for one in items(tmp_path / name)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("a.jsonl.gz", lambda data: data[:-9], "the gzip data cannot be unpacked behind this line"),
        ("a.jsonl.gz", lambda data: data[: len(data) // 2], r"a.jsonl.gz:\d+: the gzip data"),
        ("a.jsonl.gz", lambda data: b"{}\n", "a.jsonl.gz:1: the gzip data.*Not a gzipped file"),
        ("a.jsonl.gz", lambda data: data[:30] + b"\xff\xff\xff" + data[33:], "the gzip data"),
        ("a.jsonl.gz", lambda data: data + b"trailing", "the gzip data"),
        ("a.jsonl.gz", lambda data: b"", "there are no rows in it"),
        ("a.jsonl.zst", lambda data: data[:-9], "the zstd data cannot be unpacked"),
        ("a.jsonl.zst", lambda data: data[: len(data) // 3], "the zstd data cannot be unpacked"),
        ("a.jsonl.zst", lambda data: b"{}\n{}\n{}\n", "a.jsonl.zst:1: the zstd data"),
        ("a.parquet", lambda data: data[:-9], "not a readable parquet file"),
        ("a.parquet", lambda data: b"", "not a readable parquet file"),
        ("a.parquet", lambda data: b"{}\n", "not a readable parquet file"),
        ("a.arrow", lambda data: data[:50], "not a readable arrow file"),
        ("a.arrow", lambda data: b"{}\n", "not a readable arrow file"),
        ("b.arrow", lambda data: data[:-9], "not a readable arrow file"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: Callable[[bytes], bytes], words: str) -> None:
    path = tmp_path / name
    dict(WRITERS)[name](path, rows(0, 400))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(RelaxError, match=words):
        items(path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a.json", "one object a line: rename it to .jsonl"),
        ("a.csv", "do not end in '.csv'.*use .jsonl, .jsonl.gz"),
        ("a.txt.gz", "do not end in '.gz'"),
        ("rows", "'no suffix'"),
        ("missing.jsonl", "there is no file .*did you mean .*misssing.jsonl"),
        ("empty", "no file of rows is in the folder"),
        ("outer", "it has the folders inner: name one of them"),
        ("*/a.jsonl", "there is no file .*only the name of the file may have a wildcard"),
        ("a.jso?", "there is no file .*and only `[*]`"),
        ("*.parquet", r"no file of .* matches '\*.parquet'"),
    ],
)
def test_what_is_no_file_of_rows(tmp_path: Path, name: str, words: str) -> None:
    for file in ("a.json", "a.csv", "a.txt.gz", "rows", "misssing.jsonl"):
        (tmp_path / file).write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    with pytest.raises(RelaxError, match=words):
        items(tmp_path / name)


def test_empty_shards_of_a_folder_are_named(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "0.jsonl", rows(0, 3))
    (tmp_path / "1.jsonl").write_bytes(b"")
    (tmp_path / "2.jsonl").write_bytes(b"\n")
    index = RowIndex.open(DataTable(path=str(tmp_path)), Path())
    assert len(index) == 3
    (note,) = index.contents.notes
    assert "2 of 3 files have no rows" in note and "1.jsonl" in note and "2.jsonl" in note
    (tmp_path / "0.jsonl").write_bytes(b"")
    with pytest.raises(RelaxError, match="all 3 files are empty"):
        items(tmp_path)


def test_a_cold_start_reads_the_same_files(tmp_path: Path) -> None:
    lines = [{"prompt": "q", "completion": "c"}, {"messages": [{"role": "user", "content": "q"}]}]
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(jsonl(lines) + b"{\n"))
    good, faults = read_cold(tmp_path / "c.jsonl.gz", "c.jsonl.gz", "sft")
    assert [row.completion for row in good] == ["c"]
    assert [fault.what.rpartition(":")[2] for fault in faults] == ["2", "3"]
    first, _ = next(read_rows(tmp_path / "c.jsonl.gz", "c", "data.path"))
    assert first == f"{tmp_path / 'c.jsonl.gz'}:1"
