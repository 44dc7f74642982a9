"""Where each key and value of a TOML document stands: tomllib tells what a document says, not where.

The document has passed tomllib before it is scanned, so the scanner only has to find ends, never to refuse.
"""

from __future__ import annotations

import re
import tomllib

import msgspec

from relax_rt.config.problems import KeyPath

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_BLANK = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_SCALAR = re.compile(r"[^,\]}#\n]*")
_BASIC = re.compile(r'"(?:[^"\\]|\\.)*"')
_LITERAL = re.compile(r"'[^']*'")
_MULTI_BASIC = re.compile(r'"""(?:[^"\\]|\\.|"{1,2}(?!"))*"{3,5}', re.DOTALL)
_MULTI_LITERAL = re.compile(r"'''(?:[^']|'{1,2}(?!'))*'{3,5}", re.DOTALL)
_STRINGS = (_MULTI_BASIC, _MULTI_LITERAL, _BASIC, _LITERAL)


class Span(msgspec.Struct, frozen=True):
    """Character offsets of a key and of its value, [start, end) each; (0, 0) for the key of an array's element."""

    key: tuple[int, int]
    value: tuple[int, int]


def scan(text: str) -> dict[KeyPath, Span]:
    """Positions of every key path of a TOML document that tomllib accepts (line ends as \\n)."""
    scanner = _Scanner(text)
    scanner.document()
    return scanner.spans


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.spans: dict[KeyPath, Span] = {}
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
            self.spans.setdefault(path, Span(key, whole))
            path = (*path, index)
        elif path in self.tables_in:
            path = (*path, self.tables_in[path] - 1)
        self.spans[path] = Span(key, whole)
        return path

    def _enter(self, table: KeyPath, keys: list[tuple[str, tuple[int, int]]], whole: tuple[int, int]) -> KeyPath:
        """Follow keys from a table, into the newest element of arrays of tables; parents seen first are recorded."""
        for name, key in keys:
            table = (*table, name)
            self.spans.setdefault(table, Span(key, whole))
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
        self.spans[path] = Span(key, (start, start))
        if first == "[":
            self._array(path)
        elif first == "{":
            self._inline_table(path)
        elif first in ('"', "'"):
            self.at = next(match.end() for p in _STRINGS if (match := p.match(self.text, start)))
        else:
            self._skip(_SCALAR)
            self.at = start + len(self.text[start : self.at].rstrip())
        self.spans[path] = Span(key, (start, self.at))

    def _array(self, path: KeyPath) -> None:
        self.at += 1
        index = 0
        self._skip(_BLANK)
        while self.text[self.at] != "]":
            self._value((*path, index), (0, 0))
            index += 1
            self._separator()
        self.at += 1

    def _inline_table(self, path: KeyPath) -> None:
        self.at += 1
        self._skip(_BLANK)
        while self.text[self.at] != "}":
            self._pair(path)
            self._separator()
        self.at += 1

    def _separator(self) -> None:
        self._skip(_BLANK)
        if self.text[self.at] == ",":
            self.at += 1
            self._skip(_BLANK)
