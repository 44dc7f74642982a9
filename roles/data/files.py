"""Files of rows: which ones a setting names, and their rows one after the other.

Text (.jsonl, plain or in gzip or zstd) comes as lines with their byte offsets, so that the index can read a row again
without keeping it; parquet and Arrow come as rows.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from relax_rt.transport.errors import RelaxError
from relax_rt.transport.targets import did_you_mean

PLAIN, PACKED, TABLES = (".jsonl",), (".jsonl.gz", ".jsonl.zst"), (".parquet", ".arrow")
KINDS = ".jsonl, .jsonl.gz, .jsonl.zst, .parquet, .arrow or a folder of them"
MAX_LINE = 64 << 20
"""Bytes of one row."""
BATCH = 1024
"""Rows of a table that are read at once."""
SPLIT = re.compile(r"(train|test|validation|valid|val|dev|eval)(?![a-z])")
INSTALL_PYARROW = "pip install relax-rt[data]"
decode_json = msgspec.json.Decoder().decode


class Shard(msgspec.Struct, frozen=True):
    """One file of rows; `kind` is its suffix."""

    path: str
    kind: str

    @property
    def plain(self) -> bool:
        """Whether its rows can be read again in place, by byte offset."""
        return self.kind in PLAIN


def find_shards(path: Path, setting: str, key: str, split: str | None = None) -> tuple[list[Shard], list[str]]:
    """The files that a setting names, in the order of their names, and remarks on what was left out.

    Args:
        path: a file, a folder or a pattern with `*`. setting: what the user wrote. key: the setting it was written for.
        split: which files or subfolder to take where a folder has several splits; None: train; empty: none is meant.

    Raises:
        RelaxError: there is no such file, or none of a known kind.
    """
    what = f"{key} = {setting!r}"
    if is_pattern(path):
        found = sorted(p for p in path.parent.glob(path.name) if p.is_file() and not p.name.startswith("."))
        shards = _shards(found)
        if not shards:
            raise RelaxError(what, why=f"no file of {path.parent} matches {path.name!r}", hint=f"rows are {KINDS}")
        return shards, []
    if path.is_dir():
        return _of_folder(path, what, split)
    if not path.is_file():
        raise RelaxError(what, why=f"there is no file {path}", hint=missing_hint(path, setting))
    if not (shards := _shards([path])):
        hint = f"use {KINDS}"
        if path.suffix == ".json":
            hint = "one object a line: rename it to .jsonl; an array: jq -c '.[]' FILE.json > FILE.jsonl"
        raise RelaxError(what, why=f"files of rows do not end in {path.suffix or 'no suffix'!r}", hint=hint)
    return shards, []


def is_pattern(path: Path) -> bool:
    """Whether a path names several files of a folder by `*`; the quick check and `find_shards` both go by it."""
    return "*" in path.name and path.parent.is_dir()


def missing_hint(path: Path, setting: str) -> str:
    """What to do about a path of rows that is not there, as the user wrote it."""
    if set("*?[") & set(setting):
        return "only the name of the file may have a wildcard, and only `*`: shards/*.jsonl; or name a folder"
    near = [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else []
    return did_you_mean(path.name, near) or "paths are relative to the config file"


def _of_folder(folder: Path, what: str, split: str | None) -> tuple[list[Shard], list[str]]:
    """The shards of a folder: files beside each other, what `datasets` saves to disk, or a snapshot of the hub."""
    if (folder / "dataset_dict.json").is_file():
        names = _json(folder / "dataset_dict.json").get("splits", [])
        return _of_splits({str(name): folder / str(name) for name in names}, what, split)
    if (folder / "state.json").is_file():
        files = [folder / str(one["filename"]) for one in _json(folder / "state.json").get("_data_files", [])]
        return [Shard(str(file), ".arrow") for file in files], []
    found = _shards(sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith((".", "_"))))
    if not found and (folder / "data").is_dir():
        return _of_folder(folder / "data", what, split)
    if not found:
        inner = sorted(p.name for p in folder.iterdir() if p.is_dir())
        hint = f"it has the folders {', '.join(inner[:8])}: name one of them" if inner else f"rows are {KINDS}"
        raise RelaxError(what, why=f"no file of rows is in the folder {folder}", hint=hint)
    groups: dict[str, list[Shard]] = {}
    for shard in found:
        match = SPLIT.match(Path(shard.path).name)
        groups.setdefault(match.group(1) if match else "", []).append(shard)
    if len(groups) < 2 and not split:
        return found, []
    wanted = _wanted(list(groups), what, split)
    left = sorted(name or "others" for name in groups if name != wanted)
    return groups[wanted], [f"{what}: the files of split {wanted!r} are read, not those of {', '.join(left)}"]


def _of_splits(folders: dict[str, Path], what: str, split: str | None) -> tuple[list[Shard], list[str]]:
    wanted = _wanted(list(folders), what, split)
    shards, _ = _of_folder(folders[wanted], what, None)
    left = [name for name in folders if name != wanted]
    return shards, [f"{what}: split {wanted!r} is read, not {', '.join(left)}"] if left else []


def _wanted(names: list[str], what: str, split: str | None) -> str:
    if not split and len(names) == 1:
        return names[0]
    wanted = "train" if split is None else split
    if wanted in names:
        return wanted
    known = ", ".join(sorted(name or "files without one" for name in names))
    why = f"there is no split {wanted!r}, but {known}" if wanted else f"it has several splits: {known}"
    raise RelaxError(what, why=why, hint="name one as `split`, beside the path")


def _shards(files: list[Path]) -> list[Shard]:
    kinds = (*PACKED, *PLAIN, *TABLES)
    return [
        Shard(str(file), next(kind for kind in kinds if file.name.endswith(kind)))
        for file in files
        if file.name.endswith(kinds)
    ]


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise RelaxError(str(path), why=f"not readable: {error}") from error


def read_rows(path: Path, setting: str, key: str) -> Iterator[tuple[str, Any]]:
    """The rows that a setting names as they are, each with its file and line; a line that is not JSON is the error that
    says so.

    Args:
        setting: what the user wrote. key: the setting that it was written for.

    Raises:
        RelaxError: there is no such file, it is of another kind, or it cannot be read as such.
    """
    for shard in find_shards(path, setting, key)[0]:
        if shard.kind in TABLES:
            for number, row in table_rows(shard):
                yield where(shard, number), row
        else:
            for number, _, line in lines(shard):
                try:
                    yield where(shard, number), parse_line(where(shard, number), line)
                except RelaxError as error:
                    yield where(shard, number), error


def where(shard: Shard, number: int) -> str:
    """File and line of a row, as errors name it."""
    if shard.kind == "task":
        return f"{shard.path}[{number - 1}]"
    return f"{shard.path}:{'row ' if shard.kind in TABLES else ''}{number}"


def lines(shard: Shard) -> Iterator[tuple[int, int, bytes]]:
    """The lines of a text shard that are not empty: number, byte offset in the (unpacked) text, and the line.

    Raises:
        RelaxError: the file cannot be read or unpacked, is UTF-16, or has a line of more than MAX_LINE bytes.
    """
    number = offset = 0
    try:
        with _open_text(shard) as file:
            while line := file.readline(MAX_LINE + 1):
                number += 1
                start = offset
                offset += len(line)
                if len(line) > MAX_LINE:
                    why = f"the line has more than {MAX_LINE >> 20} MiB"
                    raise RelaxError(where(shard, number), why=why, hint="one JSON object a line")
                if number == 1:
                    if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                        hint = "convert it: iconv -f UTF-16 -t UTF-8"
                        raise RelaxError(where(shard, 1), why="the file is UTF-16 (it begins with its mark)", hint=hint)
                    if line.startswith(codecs.BOM_UTF8):
                        start, line = start + 3, line[3:]
                if line.strip():
                    yield number, start, line
    except (EOFError, gzip.BadGzipFile, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise RelaxError(shard.path, why=error.strerror or str(error)) from error
        kind = "gzip" if shard.kind.endswith(".gz") else "zstd"
        hint = "it was cut off, or is no such file: copy it again"
        raise RelaxError(
            where(shard, number + 1), why=f"the {kind} data cannot be unpacked behind this line: {error}", hint=hint
        ) from error


def _open_text(shard: Shard) -> IO[bytes] | gzip.GzipFile | io.BufferedReader:
    if shard.kind.endswith(".gz"):
        return gzip.open(shard.path, "rb")
    if shard.kind.endswith(".zst"):
        pyarrow = _pyarrow(shard.path)
        return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(shard.path), "zstd"), 1 << 16)
    return Path(shard.path).open("rb", buffering=1 << 20)


def _pyarrow(path: str) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise RelaxError(path, why=f"reading it needs pyarrow: {error}", hint=INSTALL_PYARROW) from error
    return pyarrow


def table_rows(shard: Shard, nullable: Collection[str] = ()) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a parquet or Arrow file with their numbers from 1, as JSON-like values without null columns.

    Args:
        nullable: columns in which null is a value, and stays.

    Raises:
        RelaxError: it cannot be read as such.
    """
    pyarrow = _pyarrow(shard.path)
    number = 0
    try:
        for batch in _batches(pyarrow, shard):
            for start in range(0, batch.num_rows, BATCH):
                for row in batch.slice(start, BATCH).to_pylist():
                    number += 1
                    # A column absent from a row reads as null; to the checks it is absent.
                    kept = {key: value for key, value in row.items() if value is not None or key in nullable}
                    yield number, msgspec.to_builtins(kept, str_keys=True, enc_hook=str)
    except (pyarrow.ArrowException, OSError) as error:
        kind = shard.kind.removeprefix(".")
        why = f"not a readable {kind} file{f' behind row {number}' if number else ''}: {error}"
        raise RelaxError(shard.path, why=why, hint="it was cut off, or is no such file") from error


def _batches(pyarrow: Any, shard: Shard) -> Iterator[Any]:
    if shard.kind == ".parquet":
        with pyarrow.parquet.ParquetFile(shard.path) as file:
            yield from file.iter_batches(batch_size=BATCH)
        return
    with pyarrow.memory_map(shard.path) as source:
        # `datasets` writes Arrow's stream format, others the file format under the same suffix.
        if source.read(6) == b"ARROW1":
            reader = pyarrow.ipc.open_file(source)
            yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            source.seek(0)
            yield from pyarrow.ipc.open_stream(source)


def parse_line(where: str, line: bytes) -> Any:
    """One line as JSON.

    Raises:
        RelaxError: it is not JSON in UTF-8, or an object has a key twice; with `where`, the byte in the line (from 1)
            and the bytes there.
    """
    try:
        row = decode_json(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _wrong_line(where, line, error) from None
    # A key that stands twice in an object is lost by decoding. Looking for it costs more than decoding: it is done only
    # where the line has another number of colons behind quotation marks than the row has keys.
    if isinstance(row, dict) and line.count(b'":') != _keys(row) and _may_repeat(line, row):
        _check_keys(where, line)
    return row


def _wrong_line(where: str, line: bytes, error: Exception) -> RelaxError:
    if (nul := line.find(b"\0")) >= 0:
        count = len(line) - len(line.lstrip(b"\0")) if nul == 0 else line.count(b"\0")
        hint = "the file was cut off while it was written (a crash, a full disk): write it again"
        return RelaxError(where, why=f"byte {nul + 1}: {count} NUL bytes", hint=hint)
    try:
        line.decode()
    except UnicodeDecodeError as wrong:
        found = line[wrong.start : wrong.end]
        hint = "convert the file to UTF-8"
        if len(found) == 1 and found[0] >= 0xA0:
            hint += f"; in Latin-1 the byte is {found.decode('latin-1')!r}: iconv -f LATIN1 -t UTF-8"
        why = f"byte {wrong.start + 1}: 0x{found.hex()} is not UTF-8 ({_around(line, wrong.start)})"
        return RelaxError(where, why=why, hint=hint)
    if (surrogate := _lone_surrogate(line)) is not None:
        at, code = surrogate
        hint = "half of a character: write it whole, as the tool that made the file did not"
        return RelaxError(where, why=f"byte {at + 1}: the lone surrogate {code} ({_around(line, at)})", hint=hint)
    why, at = str(error), len(line.rstrip())
    if "truncated" in why:
        why = "the line ends within it"
    else:
        try:
            # It says where the fault is. (It takes NaN, which JSON does not have.)
            json.loads(line)
        except json.JSONDecodeError as found_at:
            at = len(found_at.doc[: found_at.pos].encode())
            why = f"byte {at + 1}: {found_at.msg}"
    return RelaxError(where, why=f"not a JSON object: {why} ({_around(line, at)})", hint="one JSON object a line")


def _around(line: bytes, at: int) -> str:
    """The bytes about a place, for people."""
    start = max(0, at - 12)
    return f"{'…' if start else ''}{line[start : at + 12]!r}"


def _lone_surrogate(line: bytes) -> tuple[int, str] | None:
    """Offset and text of the first escape of half a character."""
    escapes = list(re.finditer(rb"(?<!\\)(?:\\\\)*(\\u([0-9a-fA-F]{4}))", line))
    number = 0
    while number < len(escapes):
        code = int(escapes[number].group(2), 16)
        if 0xD800 <= code < 0xDC00 and number + 1 < len(escapes):
            second = escapes[number + 1]
            if second.start(1) == escapes[number].end(1) and 0xDC00 <= int(second.group(2), 16) < 0xE000:
                number += 2
                continue
        if 0xD800 <= code < 0xE000:
            return escapes[number].start(1), escapes[number].group(1).decode()
        number += 1
    return None


def _keys(value: Any) -> int:
    """Keys of all objects in a value."""
    if isinstance(value, dict):
        return len(value) + sum(_keys(one) for one in value.values() if isinstance(one, dict | list))
    return sum(_keys(one) for one in value if isinstance(one, dict | list))


def _may_repeat(line: bytes, row: dict[str, Any]) -> bool:
    """Whether a key stands in the line, as a key would, more or fewer times than in the row and all objects in it."""
    counts: Counter[str] = Counter()
    _count_keys(row, counts)
    return any(line.count(b'"%b"' % key.encode()) != count for key, count in counts.items())


def _count_keys(value: Any, counts: Counter[str]) -> None:
    if isinstance(value, dict):
        counts.update(value.keys())
        value = value.values()
    for one in value:
        if isinstance(one, dict | list):
            _count_keys(one, counts)


_TOKEN = re.compile(rb'("[^"\\]*(?:\\.[^"\\]*)*")(\s*:)?|[{}\[\]]')
"""A string with the colon that makes it a key, or a bracket."""


def _check_keys(where: str, line: bytes) -> None:
    """Refuse an object, however deep, that has a key twice. The line is valid JSON."""
    keys: list[set[str]] = []
    for token in _TOKEN.finditer(line):
        if token[0] in b"{[":
            keys.append(set())
        elif token[0] in b"}]":
            keys.pop()
        elif token[2]:
            key = decode_json(token[1])
            if key in keys[-1]:
                why = f"the key {key!r} stands twice in one object (byte {token.start() + 1})"
                raise RelaxError(where, why=why, hint="JSON readers differ in which one they take: keep one")
            keys[-1].add(key)
