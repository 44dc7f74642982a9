"""The text of a config: parsed as TOML, overridden by --set, with the place of each key.

tomllib tells what a document says but not where, so the text is scanned once more for positions. It has passed tomllib
by then: the scanner only has to find ends, never to refuse.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from relax_rt.config.problems import OVERRIDE, BadInput, ConfigErrors, KeyPath, Problem, SourcePlace, dotted

MAX_BYTES = 1 << 20
_ERROR_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")
_TWICE = ("Cannot overwrite", "Cannot declare", "Cannot mutate", "Cannot redefine")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_BLANK = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_SCALAR = re.compile(r"[^,\]}#\n]*")
_BASIC = re.compile(r'"(?:[^"\\]|\\.)*"')
_LITERAL = re.compile(r"'[^']*'")
_MULTI_BASIC = re.compile(r'"""(?:[^"\\]|\\.|"{1,2}(?!"))*"{3,5}', re.DOTALL)
_MULTI_LITERAL = re.compile(r"'''(?:[^']|'{1,2}(?!'))*'{3,5}", re.DOTALL)
_STRINGS = (_MULTI_BASIC, _MULTI_LITERAL, _BASIC, _LITERAL)


class SourceText(msgspec.Struct, frozen=True):
    """A file's or an override's text, named as in messages."""

    name: str
    text: str

    def place(self, span: tuple[int, int]) -> SourcePlace:
        """Where characters [start, end) stand; a span over several lines is cut at the end of its first."""
        start, end = span
        head = self.text.rfind("\n", 0, start) + 1
        tail = self.text.find("\n", start)
        line = self.text[head : tail if tail >= 0 else len(self.text)]
        return SourcePlace(
            file=self.name,
            line=self.text.count("\n", 0, start) + 1,
            column=start - head + 1,
            text=line,
            width=max(1, min(end, head + len(line)) - start),
        )

    def end(self) -> SourcePlace:
        """Just after the last line that is not blank."""
        at = len(self.text.rstrip())
        return self.place((at, at + 1))


class ConfigSource:
    """A config's data, and where each of its keys stands.

    Raises:
        ConfigErrors: the text is not TOML.
    """

    def __init__(self, text: SourceText) -> None:
        self.text = text
        self.data = parse(text)
        self._spans: dict[KeyPath, tuple[SourceText, KeySpan]] = {
            path: (text, span) for path, span in scan(text.text).items()
        }

    def override(self, assignment: str) -> Problem | None:
        """Apply one ``a.b=value``: the value is read as TOML, else taken as a string."""
        text = SourceText(OVERRIDE, assignment)
        keys, key_span, value, value_spans = _assignment(text)
        if keys is None:
            return Problem(
                (), "an override is written --set a.b=value", at="key", place=text.place((0, len(assignment)))
            )
        table = self.data
        for depth, key in enumerate(keys[:-1], start=1):
            inner = table.setdefault(key, {})
            if not isinstance(inner, dict):
                message = f"'{dotted(keys[:depth])}' is not a table, so it has no '{keys[depth]}'"
                return Problem(keys, message, place=text.place(key_span))
            table = inner
        table[keys[-1]] = value
        self._spans = {path: at for path, at in self._spans.items() if path[: len(keys)] != keys}
        for depth in range(1, len(keys)):
            self._spans.setdefault(keys[:depth], (text, KeySpan(key_span, key_span)))
        for path, span in value_spans.items():
            self._spans[(*keys, *path)] = (text, span)
        return None

    def locate(self, problem: Problem) -> Problem:
        """Return the problem with its place: its key's, else the nearest parent's, else the end of the file."""
        if problem.place is not None:
            return problem
        for length in range(len(problem.path), 0, -1):
            found = self._spans.get(problem.path[:length])
            if found is None:
                continue
            text, span = found
            exact = length == len(problem.path)
            chosen = span.value if exact and problem.at == "value" else span.key
            return msgspec.structs.replace(problem, place=text.place(chosen if chosen != (0, 0) else span.value))
        return msgspec.structs.replace(problem, place=self.text.end())

    def has(self, path: KeyPath) -> bool:
        """Whether the source names this key."""
        return path in self._spans


def read_source(path: Path, overrides: Sequence[str]) -> tuple[ConfigSource, list[Problem]]:
    """Read a config file and apply the overrides; also return the overrides' problems.

    Raises:
        BadInput: the file cannot be read.
        ConfigErrors: it is not UTF-8 or not TOML.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        near = sorted(str(p) for p in path.parent.glob("*.toml")) if path.parent.is_dir() else []
        hint = f"there is {', '.join(near[:5])}" if near else "`relax-rt init` writes a starter"
        raise BadInput(f"there is no config {path}", hint=hint) from error
    except IsADirectoryError as error:
        raise BadInput(f"{path} is a folder", why="a config is a file", hint=_in_folder(path)) from error
    except OSError as error:
        raise BadInput(f"config {path} cannot be read", why=error.strerror or str(error)) from error
    if len(raw) > MAX_BYTES:
        raise BadInput(f"config {path} has {len(raw)} bytes", why=f"at most {MAX_BYTES} are read")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        shown = SourceText(str(path), raw.decode(errors="replace"))
        at = len(raw[: error.start].decode(errors="replace"))
        problem = Problem((), "not UTF-8", hint="save the file as UTF-8", place=shown.place((at, at + 1)))
        raise ConfigErrors(str(path), [problem]) from error
    source = ConfigSource(SourceText(str(path), text.replace("\r\n", "\n")))
    overridden = [found for assignment in overrides if (found := source.override(assignment)) is not None]
    return source, overridden


def _in_folder(folder: Path) -> str:
    """Return a hint for a folder that was given as the config."""
    found = sorted(folder.glob("*.toml"))
    if len(found) > 1:
        found = [one for one in found if one.name == "roles.toml"] or found
    if len(found) == 1:
        return f"its config is {found[0]}: give that, as in `relax-rt validate {found[0]}`"
    if found:
        return f"give one of {', '.join(map(str, found[:8]))}"
    return f"it holds no .toml; a config is called roles.toml, and `relax-rt init {folder}` writes a starter"


def _assignment(text: SourceText) -> tuple[tuple[str, ...] | None, tuple[int, int], Any, dict[KeyPath, KeySpan]]:
    """Keys, their span, the value, and the spans of the value and its parts (paths below the value)."""
    whole = text.text
    for cut in (i for i, c in enumerate(whole) if c == "="):
        # A quoted key may hold a '='; the first cut that leaves a valid key is the one.
        keys = keys_of(whole[:cut])
        if keys is None:
            continue
        span = (0, len(whole[:cut].rstrip()))
        raw = whole[cut + 1 :]
        value_span = (cut + 1, max(cut + 2, len(whole)))
        try:
            parsed = tomllib.loads(f"v={raw}")
        except (tomllib.TOMLDecodeError, RecursionError):
            parsed = {}
        if parsed.keys() != {"v"}:
            return keys, span, raw.strip(), {(): KeySpan(span, value_span)}
        shift = cut + 1 - len("v=")
        spans = {path[1:]: _shifted(at, shift) for path, at in scan(f"v={raw}").items()}
        spans[()] = KeySpan(span, spans[()].value)
        return keys, span, parsed["v"], spans
    return None, (0, 0), None, {}


def _shifted(span: KeySpan, by: int) -> KeySpan:
    key = (span.key[0] + by, span.key[1] + by) if span.key != (0, 0) else span.key
    return KeySpan(key, (span.value[0] + by, span.value[1] + by))


def parse(text: SourceText) -> dict[str, Any]:
    """Parse a text as TOML.

    Raises:
        ConfigErrors: the first syntax error, as tomllib says it, with its place and a hint.
    """
    try:
        return tomllib.loads(text.text)
    except RecursionError as error:
        problem = Problem((), "not TOML: arrays or tables are nested too deeply", place=text.end())
        raise ConfigErrors(text.name, [problem]) from error
    except tomllib.TOMLDecodeError as error:
        message = str(error)
    place = text.end()
    if (found := _ERROR_PLACE.search(message)) and found[1]:
        line, column = int(found[1]), int(found[2])
        start = sum(len(one) + 1 for one in text.text.split("\n")[: line - 1])
        span = (start + column - 1, start + column)
        if message.startswith(_TWICE):
            # tomllib says where the statement ends; what is given twice is its key.
            name = text.place(span).text.split("=")[0].rstrip()
            span = (start + len(name) - len(name.lstrip()), start + len(name))
        place = text.place(span)
    problem = Problem((), f"not TOML: {_ERROR_PLACE.sub('', message)}", _syntax_hint(message, place), place=place)
    raise ConfigErrors(text.name, [problem])


def _syntax_hint(message: str, place: SourcePlace) -> str:
    if message.startswith(_TWICE):
        return "the same name is given twice"
    rest = place.text[place.column - 1 :].split("#")[0].strip()
    if "Invalid value" not in message or not rest:
        return ""
    if rest in ("True", "False"):
        return f"TOML writes {rest.lower()}"
    return "TOML has no null: leave the key out" if rest == "None" else f'text stands in quotes: "{rest}"'


def keys_of(text: str) -> tuple[str, ...] | None:
    """Split a dotted key; None if it is not a key."""
    try:
        level: Any = tomllib.loads(f"{text}=0")
    except (tomllib.TOMLDecodeError, RecursionError):
        return None
    keys = []
    while isinstance(level, dict):
        if len(level) != 1:
            return None
        (key,) = level
        keys.append(key)
        level = level[key]
    return tuple(keys)


class KeySpan(msgspec.Struct, frozen=True):
    """Character offsets of a key and of its value, [start, end) each; (0, 0) for the key of an array's element."""

    key: tuple[int, int]
    value: tuple[int, int]


def scan(text: str) -> dict[KeyPath, KeySpan]:
    """Return the position of every key path of a TOML document that tomllib accepts (line ends as \\n)."""
    scanner = _Scanner(text)
    scanner.document()
    return scanner.spans


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.spans: dict[KeyPath, KeySpan] = {}
        self.tables_in: dict[KeyPath, int] = {}
        """Arrays of tables and how many tables each has so far."""

    def document(self) -> None:
        table: KeyPath = ()
        self._skip(_BLANK)
        while self.at < len(self.text):
            if self.text.startswith("[[", self.at):
                table = self._header(2)
            elif self.text[self.at] == "[":
                table = self._header(1)
            else:
                self._pair(table)
            self._skip(_BLANK)

    def _skip(self, pattern: re.Pattern[str]) -> tuple[int, int]:
        start = self.at
        match = pattern.match(self.text, start)
        self.at = match.end() if match else start
        return start, self.at

    def _header(self, brackets: int) -> KeyPath:
        start = self.at
        self.at += brackets
        keys = self._keys()
        self._skip(_SPACE)
        self.at += brackets
        whole = (start, self.at)
        path = self._enter((), keys[:-1], whole)
        name, key = keys[-1]
        path = (*path, name)
        if brackets == 2:
            index = self.tables_in.get(path, 0)
            self.tables_in[path] = index + 1
            self.spans.setdefault(path, KeySpan(key, whole))
            path = (*path, index)
        elif path in self.tables_in:
            path = (*path, self.tables_in[path] - 1)
        self.spans[path] = KeySpan(key, whole)
        return path

    def _enter(self, table: KeyPath, keys: list[tuple[str, tuple[int, int]]], whole: tuple[int, int]) -> KeyPath:
        """Follow keys from a table, into the newest element of arrays of tables; parents seen first are recorded."""
        for name, key in keys:
            table = (*table, name)
            self.spans.setdefault(table, KeySpan(key, whole))
            if table in self.tables_in:
                table = (*table, self.tables_in[table] - 1)
        return table

    def _pair(self, table: KeyPath) -> None:
        start = self.at
        keys = self._keys()
        self._skip(_SPACE)
        self.at += 1
        self._skip(_SPACE)
        path = self._enter(table, keys[:-1], (start, keys[-1][1][1]))
        name, key = keys[-1]
        self._value((*path, name), key)

    def _keys(self) -> list[tuple[str, tuple[int, int]]]:
        keys = []
        while True:
            self._skip(_SPACE)
            quoted = self.text[self.at] in "\"'"
            pattern = (_BASIC if self.text[self.at] == '"' else _LITERAL) if quoted else _BARE
            start, end = self._skip(pattern)
            raw = self.text[start:end]
            keys.append((next(iter(tomllib.loads(f"{raw} = 0"))) if quoted else raw, (start, end)))
            self._skip(_SPACE)
            if not self.text.startswith(".", self.at):
                return keys
            self.at += 1

    def _value(self, path: KeyPath, key: tuple[int, int]) -> None:
        start = self.at
        first = self.text[start : start + 1]
        # Recorded before its parts, so that a parent comes before its children.
        self.spans[path] = KeySpan(key, (start, start))
        if first == "[":
            self.at += 1
            index = 0
            self._skip(_BLANK)
            while self.text[self.at] != "]":
                self._value((*path, index), (0, 0))
                index += 1
                self._separator()
            self.at += 1
        elif first == "{":
            self.at += 1
            self._skip(_BLANK)
            while self.text[self.at] != "}":
                self._pair(path)
                self._separator()
            self.at += 1
        elif first in ('"', "'"):
            self.at = next(match.end() for p in _STRINGS if (match := p.match(self.text, start)))
        else:
            self._skip(_SCALAR)
            self.at = start + len(self.text[start : self.at].rstrip())
        self.spans[path] = KeySpan(key, (start, self.at))

    def _separator(self) -> None:
        self._skip(_BLANK)
        if self.text[self.at] == ",":
            self.at += 1
            self._skip(_BLANK)
