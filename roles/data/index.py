"""Index of all prompts of the data, 48 bytes each: built in one pass over the data, kept in the cache folder.

An entry holds the file and byte offset of its row, and the hashes that decide duplicates, the held-out split and the
order. The row itself is read and parsed on use. Rows that cannot be read again by offset (compressed, parquet,
generated) are copied to a file next to the index.

All roles of a node, and the check before a run, use the same folder of the cache: the first one builds it, the others
wait and map it into memory.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from relax_rt.roles.data.columns import ColumnReader, Form, unknown_notes
from relax_rt.roles.data.files import TABLES, TASK, Shard, find_shards, parse_line, read_lines, row_location, table_rows
from relax_rt.roles.data.gym import GymTask
from relax_rt.roles.data.items import RawItem
from relax_rt.roles.data.settings import DataTable
from relax_rt.roles.data.split.canonical import question_hash
from relax_rt.roles.models.cache import CacheUnavailable, build_once, cache_dir, say
from relax_rt.transport.rpc.errors import RelaxError

VERSION = 2
"""Format of an index, and of how rows are read; an index of another version is rebuilt."""
ROW = np.dtype(
    [
        ("offset", "<u8"),
        ("size", "<u4"),
        ("number", "<u4"),
        ("shard", "<u4"),
        ("source", "<u4"),
        ("question", "<u8"),
        ("digest", "<u8"),
        ("item", "<u8"),
    ]
)
"""offset, size: of the row's bytes, in its file or in the copies. number: its line, from 1. question: hash of the
canonical question. digest: of text, answer and metadata. item: id of the prompt."""
CHUNK = 65_536
MAX_ROWS = 1_000_000_000
OPEN_FILES = 64
NAMED = 5
"""Maximum number of duplicates reported with file and line."""
KEPT_INDICES = 12
"""Maximum number of indices in the cache folder; the least recently used is removed first."""
TELL_ROWS = 1_000_000
PREFIX = "data-"


class SourceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One source of the config: a path and how its rows are read, or a reasoning-gym task.

    Attributes:
        key: setting of the path or task. columns_key: setting of `columns`.
    """

    key: str
    columns_key: str = "data.columns"
    path: str = ""
    setting: str = ""
    name: str | None = None
    weight: float | None = None
    columns: dict[str, str] = {}
    form: Form = "auto"
    split: str | None = None
    ignore: list[str] = []
    task: str = ""
    options: dict[str, Any] = {}
    size: int = 0

    def reader(self) -> ColumnReader:
        """Create the reader of its rows."""
        return ColumnReader(self.columns, self.form, self.ignore, self.name, self.columns_key)

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Prefix errors with the key of this source of [[data.sources]], unless they name another setting."""
        try:
            yield
        except RelaxError as error:
            if not self.key.startswith("data.sources") or error.what.startswith("data."):
                raise
            what = f"{self.key} = {self.setting!r}: {error.what}"
            raise RelaxError(what, why=error.why, hint=error.hint) from error


class IndexContents(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of an index other than its rows.

    Attributes:
        shards: the files, by number; a task counts as one.
        read: rows read, duplicates included. forms: rows of each form.
        notes: remarks for the user. digest: hash of all rows in order.
    """

    sources: list[SourceSpec]
    shards: list[Shard]
    read: int
    duplicates: int
    forms: dict[str, int]
    notes: list[str]
    digest: str


def sources_of(data: DataTable, config_dir: Path) -> list[SourceSpec]:
    """Return the sources of a table of [data].

    Raises:
        RelaxError: it names none.
    """

    def absolute(text: str) -> str:
        path = Path(text).expanduser()
        return str(path if path.is_absolute() else config_dir / path)

    if data.task is not None:
        return [SourceSpec(key="data.task", task=data.task, options=data.options, size=data.size)]
    ignore, shared = sorted(data.ignore), bool(data.columns)
    if data.sources:
        return [
            SourceSpec(
                key=f"data.sources[{number}].path",
                # [data.columns] holds for a source without columns of its own.
                columns_key="data.columns" if shared and one.columns is None else f"data.sources[{number}].columns",
                path=absolute(one.path),
                setting=one.path,
                name=one.name,
                weight=one.weight,
                columns=data.columns if one.columns is None else one.columns,
                form=data.form if one.form == "auto" else one.form,
                split=data.split if one.split is None else one.split,
                ignore=ignore,
            )
            for number, one in enumerate(data.sources)
        ]
    if data.path is None:
        raise RelaxError("data", why="none of data.task, data.path and data.sources is set")
    return [
        SourceSpec(
            key="data.path",
            path=absolute(data.path),
            setting=data.path,
            columns=data.columns,
            form=data.form,
            split=data.split,
            ignore=ignore,
        )
    ]


class RowIndex:
    """Random access to the prompts of the data, in the order of the data.

    Attributes:
        rows: ROW array, memory-mapped.
        contents: everything else that the index stores.
        folder: cache folder for further results about these rows; None: the index was built in a temporary folder.
    """

    def __init__(self, rows: NDArray[Any], contents: IndexContents, copies: int, folder: Path | None) -> None:
        self.rows, self.contents, self.folder = rows, contents, folder
        self._copies = copies
        self._readers = [source.reader() for source in contents.sources]
        self._files: OrderedDict[int, int] = OrderedDict()

    @classmethod
    def open(cls, data: DataTable, config_dir: Path) -> RowIndex:
        """Return the index of a table of [data]: from the cache folder, else built there.

        Raises:
            RelaxError: bad data; with the setting or the file and line.
        """
        sources = sources_of(data, config_dir)
        found = [find_shards(Path(s.path), s.setting, s.key, s.split) if not s.task else ([], []) for s in sources]
        shards, notes = [one for one, _ in found], [note for _, more in found for note in more]

        def build(folder: Path) -> None:
            IndexBuilder(folder, keep=data.duplicates == "keep").build(sources, shards, notes)

        try:
            folder = build_once(PREFIX + _cache_key(sources, shards, data.duplicates), build)
        except CacheUnavailable:
            return cls._build_temporary(build)
        except OSError as error:
            say(f"the index of the data cannot be kept in {cache_dir()}: {error}")
            return cls._build_temporary(build)
        with suppress(OSError):
            os.utime(folder)
            # Remove the least recently used indices. A process that has one open can still read it.
            others = [path for path in folder.parent.glob(f"{PREFIX}*") if path.is_dir() and path != folder]
            for path in sorted(others, key=lambda one: one.stat().st_mtime, reverse=True)[KEPT_INDICES - 1 :]:
                shutil.rmtree(path, ignore_errors=True)
                path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
        return cls._read(folder)

    @classmethod
    def _build_temporary(cls, build: Any) -> RowIndex:
        """Build in a temporary folder, which is removed once its files are open."""
        folder = Path(tempfile.mkdtemp(prefix="relax-data-"))
        try:
            build(folder)
            index = cls._read(folder)
            index.folder = None
            return index
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @classmethod
    def _read(cls, folder: Path) -> RowIndex:
        try:
            rows = np.load(folder / "rows.npy", mmap_mode="r")
            contents = msgspec.msgpack.decode((folder / "contents.msgpack").read_bytes(), type=IndexContents)
            copies = os.open(folder / "copies", os.O_RDONLY)
        except (OSError, ValueError, msgspec.DecodeError) as error:
            hint = f"remove the folder {folder}"
            raise RelaxError("the index of the data", why=f"it is damaged: {error}", hint=hint) from error
        return cls(rows, contents, copies, folder)

    def __del__(self) -> None:
        for file in (self._copies, *self._files.values()):
            os.close(file)

    def __len__(self) -> int:
        return len(self.rows)

    def raw(self, number: int) -> RawItem:
        """Return the prompt of a row.

        Raises:
            RelaxError: its file changed since it was indexed.
        """
        row = self.rows[number]
        shard = self.contents.shards[row["shard"]]
        data = os.pread(self._file(int(row["shard"])), int(row["size"]), int(row["offset"]))
        if not shard.plain:
            copied: RawItem = msgspec.msgpack.decode(data, type=RawItem)
            return copied
        at = row_location(shard, int(row["number"]))
        try:
            raw: RawItem = self._readers[row["source"]].read(at, parse_line(at, data))
        except RelaxError as error:
            raise self._changed(at) from error
        if int.from_bytes(content_digest(raw)[8:], "big") != row["digest"]:
            raise self._changed(at)
        return raw

    def source(self, number: int) -> SourceSpec:
        """Return the source of a row."""
        return self.contents.sources[int(self.rows[number]["source"])]

    def _changed(self, at: str) -> RelaxError:
        return RelaxError(at, why="the file changed since it was indexed", hint="put it back, or start the run again")

    def _file(self, shard: int) -> int:
        if not self.contents.shards[shard].plain:
            return self._copies
        if shard in self._files:
            self._files.move_to_end(shard)
            return self._files[shard]
        path = self.contents.shards[shard].path
        try:
            self._files[shard] = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise RelaxError(path, why=f"{error.strerror or error}", hint="put the file back") from error
        if len(self._files) > OPEN_FILES:
            os.close(self._files.popitem(last=False)[1])
        return self._files[shard]


def content_digest(raw: RawItem) -> bytes:
    """xxh3-128 of text, answer, metadata, tools and system message, with their types."""
    asked = raw.question if raw.messages is None else raw.messages
    parts = (asked, raw.answer, raw.metadata, raw.tools, raw.system)
    return xxhash.xxh3_128_digest(msgspec.msgpack.encode(parts, order="sorted"))


def _hashes(raw: RawItem) -> tuple[bytes, bytes]:
    """Hash of the question and digest of the content.

    Raises:
        RelaxError: a number in it is too large for the wire.
    """
    try:
        return question_hash(raw.question), content_digest(raw)
    except OverflowError:
        raise RelaxError(raw.where, why="an integer in it has more than 64 bits", hint="write it as text") from None


def first_row(data: DataTable, config_dir: Path) -> RawItem:
    """Return the first prompt of the data, found without reading the rest.

    Raises:
        RelaxError: bad data; with the setting or the file and line.
    """
    for source in sources_of(data, config_dir):
        shards = [] if source.task else find_shards(Path(source.path), source.setting, source.key, source.split)[0]
        for *_, raw in _raw_items(source, shards, source.reader()):
            return raw
    raise RelaxError("data", why="there are no rows in it")


def _raw_items(
    source: SourceSpec, shards: Sequence[Shard], reader: ColumnReader
) -> Iterator[tuple[int, int, int, int, RawItem]]:
    """Yield the rows of a source: number of the shard, number of the row, offset and size in the file, and the
    prompt."""
    if source.task:
        for number, raw in enumerate(GymTask(source.task, source.options, source.size).items(), 1):
            yield 0, number, 0, 0, raw
        return
    with source.named_in_errors():
        for at, shard in enumerate(shards):
            if shard.kind in TABLES:
                for number, row in table_rows(shard, reader.nullable):
                    yield at, number, 0, 0, reader.read(row_location(shard, number), row)
            else:
                for number, offset, line in read_lines(shard):
                    named = row_location(shard, number)
                    yield at, number, offset, len(line), reader.read(named, parse_line(named, line))


class IndexBuilder:
    """Builds an index in a folder.

    Args:
        keep: also what is equal to an earlier row.
    """

    def __init__(self, folder: Path, *, keep: bool) -> None:
        self._folder, self._keep = folder, keep
        self._chunks: list[NDArray[Any]] = []
        self._hashes: list[NDArray[Any]] = []
        self._columns: list[list[int]] = [[] for _ in range(5)]
        self._questions: list[bytes] = []
        self._digests: list[bytes] = []

    def build(self, sources: list[SourceSpec], found: Sequence[Sequence[Shard]], notes: list[str]) -> None:
        """Read all rows once.

        Raises:
            RelaxError: bad data; with the setting or the file and line. OSError: the folder cannot be written.
        """
        found = [[Shard(one.task, TASK)] if one.task else own for one, own in zip(sources, found, strict=True)]
        shards = [shard for some in found for shard in some]
        forms: dict[str, int] = {}
        notes, read, base = list(notes), 0, 0
        nulls, first_null = 0, ""
        with (self._folder / "copies").open("wb") as copies:
            for number, (source, own) in enumerate(zip(sources, found, strict=True)):
                reader, before = source.reader(), read
                empty = set(range(len(own)))
                for at, line, offset, size, raw in _raw_items(source, own, reader):
                    empty.discard(at)
                    if raw.answer is None and own[at].kind in TABLES:
                        # Tables cannot tell a row without an answer from one whose answer is null.
                        nulls, first_null = nulls + 1, first_null or raw.where
                    # Metadata of a task records how the item was drawn and differs between equal items.
                    with source.named_in_errors():
                        own_hashes = _hashes(msgspec.structs.replace(raw, metadata={}) if source.task else raw)
                    if not own[at].plain:
                        encoded = msgspec.msgpack.encode(raw)
                        offset, size = copies.tell(), len(encoded)
                        copies.write(encoded)
                    for column, value in zip(self._columns, (offset, size, line, base + at, number), strict=True):
                        column.append(value)
                    self._questions.append(own_hashes[0])
                    self._digests.append(own_hashes[1])
                    if len(self._digests) == CHUNK:
                        self._flush()
                    read += 1
                    if read > MAX_ROWS:
                        raise RelaxError("data", why=f"there are more than {MAX_ROWS} rows", hint="use fewer files")
                    if read % TELL_ROWS == 0:
                        say(f"data: {read // 1_000_000} million rows are indexed")
                if read == before:
                    what = source.task or f"{source.key} = {source.setting!r}"
                    hint = "the file is empty" if len(own) == 1 else f"all {len(own)} files are empty"
                    raise RelaxError(what, why="there are no rows in it", hint=hint)
                if empty:
                    named = ", ".join(own[at].path for at in sorted(empty)[:NAMED])
                    notes.append(f"{len(empty)} of {len(own)} files have no rows: {named}")
                base += len(own)
                for form, count in reader.forms.items():
                    forms[form] = forms.get(form, 0) + count
                notes += unknown_notes(reader.unknown, source.columns_key)
        if nulls:
            notes.append(f"{nulls} rows have a null answer, the first {first_null}")
        self._flush()
        rows, hashes = np.concatenate(self._chunks), np.concatenate(self._hashes)
        duplicates = 0
        if not self._keep:
            rows, hashes, more, duplicates = self._distinct(rows, hashes, shards)
            notes += more
        rows["item"] = item_ids(rows["question"], hashes["high"])
        digest = xxhash.xxh3_128(np.ascontiguousarray(hashes).tobytes())
        digest.update(np.ascontiguousarray(rows["source"]).tobytes())
        contents = IndexContents(
            sources=sources,
            shards=shards,
            read=read,
            duplicates=duplicates,
            forms=forms,
            notes=notes,
            digest=digest.hexdigest(),
        )
        np.save(self._folder / "rows.npy", rows)
        (self._folder / "contents.msgpack").write_bytes(msgspec.msgpack.encode(contents))

    def _flush(self) -> None:
        rows = np.zeros(len(self._digests), ROW)
        for name, column in zip(("offset", "size", "number", "shard", "source"), self._columns, strict=True):
            rows[name] = column
            column.clear()
        rows["question"] = np.frombuffer(b"".join(self._questions), ">u8")
        hashes = np.frombuffer(b"".join(self._digests), np.dtype([("high", ">u8"), ("low", ">u8")]))
        rows["digest"] = hashes["low"]
        self._chunks.append(rows)
        self._hashes.append(hashes.astype([("high", "<u8"), ("low", "<u8")]))
        self._questions.clear()
        self._digests.clear()

    def _distinct(
        self, rows: NDArray[Any], hashes: NDArray[Any], shards: Sequence[Shard]
    ) -> tuple[NDArray[Any], NDArray[Any], list[str], int]:
        """Return the rows without those that are equal to an earlier one, remarks on these, and how many they are."""
        order = np.lexsort((hashes["low"], hashes["high"]))
        same = (hashes["low"][order][1:] == hashes["low"][order][:-1]) & (
            hashes["high"][order][1:] == hashes["high"][order][:-1]
        )
        if not same.any():
            return rows, hashes, [], 0
        # The sort is stable: the first of equal rows is the earliest.
        starts = np.flatnonzero(np.concatenate(([True], ~same)))
        first = np.empty(len(rows), np.int64)
        first[order] = order[np.repeat(starts, np.diff(np.append(starts, len(rows))))]
        later = np.flatnonzero(first != np.arange(len(rows)))

        def named(row: int) -> str:
            return row_location(shards[rows["shard"][row]], int(rows["number"][row]))

        shown = ", ".join(f"{named(int(row))} (as {named(int(first[row]))})" for row in later[:NAMED])
        more = f" and {len(later) - NAMED} more" if len(later) > NAMED else ""
        note = f"{len(later)} rows have the text, answer and metadata of an earlier one and are left out: {shown}{more}"
        note += '; data.duplicates = "keep" keeps them'
        kept = np.ones(len(rows), bool)
        kept[later] = False
        return rows[kept], hashes[kept], [note], len(later)


def item_ids(questions: NDArray[np.uint64], contents: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return ids of prompts: the hash of the question where it is unique, else of the whole row.

    They depend neither on the order of the rows nor on other questions.
    """
    order = np.argsort(questions, kind="stable")
    ordered = questions[order]
    equal = ordered[1:] == ordered[:-1]
    shared = np.zeros(len(questions), bool)
    shared[order[1:][equal]] = True
    shared[order[:-1][equal]] = True
    return np.where(shared, contents, questions)


def _cache_key(sources: Sequence[SourceSpec], shards: Sequence[Sequence[Shard]], duplicates: str) -> str:
    """Cache key of an index: versions, sources, and sizes and times of the files instead of their contents."""
    parts: list[Any] = [VERSION, [msgspec.structs.replace(one, weight=None) for one in sources], duplicates]
    for shard in (one for some in shards for one in some):
        found = Path(shard.path).stat()
        parts.append([shard.path, found.st_size, found.st_mtime_ns, found.st_ino])
    packages = ("relax-rt", "reasoning-gym") if any(one.task for one in sources) else ("relax-rt",)
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            parts.append(metadata.version(package))
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(parts))
