"""The text of a config as TOML: every mistake that can be read past is reported, not only the first."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import msgspec

from relax_rt.config.positions import scan
from relax_rt.config.problems import ConfigErrors, KeyPath, Place, Problem, dotted

MAX_MISTAKES = 50
_AT = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")
_HEADER = re.compile(r"^[ \t]*\[.*$", re.MULTILINE)
_PAIR = re.compile(r"^[ \t]*[^\s=#\[][^=#]*=")
_TWICE = ("Cannot overwrite", "Cannot declare", "Cannot mutate", "Cannot redefine")


class Text(msgspec.Struct, frozen=True):
    """A file's or an override's text, named as in messages."""

    name: str
    text: str

    def place(self, span: tuple[int, int]) -> Place:
        """Where characters [start, end) stand; a span over several lines is cut at the end of its first."""
        start, end = span
        head = self.text.rfind("\n", 0, start) + 1
        tail = self.text.find("\n", start)
        line = self.text[head : tail if tail >= 0 else len(self.text)]
        return Place(
            file=self.name,
            line=self.text.count("\n", 0, start) + 1,
            column=start - head + 1,
            text=line,
            width=max(1, min(end, head + len(line)) - start),
        )

    def end(self) -> Place:
        """Just after the last line that is not blank."""
        at = len(self.text.rstrip())
        return self.place((at, at + 1))


class Parsed(msgspec.Struct, frozen=True):
    """What TOML made of a text.

    Attributes:
        data: what could be read.
        read: the text it was read from: what could not be read is blank there, so that places stay the same.
        problems: what could not be read.
        lost: keys whose value is not known: it could not be read, or is given twice.
    """

    data: dict[str, Any]
    read: str
    problems: list[Problem]
    lost: set[KeyPath]


def parse(text: Text) -> Parsed:
    """Read a text; a statement on one line that is wrong is passed over, as is a key or table given twice.

    Raises:
        ConfigErrors: a mistake after which nothing can be read for certain, with those before it.
    """
    read = text.text
    problems: list[Problem] = []
    lost: set[KeyPath] = set()
    while True:
        try:
            return Parsed(tomllib.loads(read), read, problems, lost)
        except RecursionError as error:
            deep = Problem((), "nested too deeply", place=text.end())
            raise ConfigErrors(text.name, [*problems, deep]) from error
        except tomllib.TOMLDecodeError as error:
            message = str(error)
            at = _offset(message, read)
            past = _read_past(text, read, message, at) if len(problems) < MAX_MISTAKES else None
            if past is None:
                raise ConfigErrors(text.name, [*problems, _mistake(text, message, at)]) from error
            problem, start, end = past
            problems.append(problem)
            lost |= {problem.path, *_keys_within(read[start:end])} - {()}
            read = read[:start] + re.sub(r"[^\n]", " ", read[start:end]) + read[end:]


def _read_past(text: Text, read: str, message: str, at: int | None) -> tuple[Problem, int, int] | None:
    """The problem, and from where to where it makes the text unreadable; None when that cannot be told."""
    if at is None:
        return None
    start = read.rfind("\n", 0, at) + 1
    end = read.find("\n", start)
    end = len(read) if end < 0 else end
    line = read[start:end]
    if _is_twice(message) and _HEADER.match(line):
        following = _HEADER.search(read, end)
        until = following.start() if following else len(read)
        return _given_twice(text, read, "table", _header_keys(line), (start, end)), start, until
    key = _PAIR.match(line)
    if key is None:
        return None
    path = (*_table_at(read, start), *(keys_of(key[0][:-1]) or ()))
    alone = _parses(line)
    if _is_twice(message) and alone:
        span = (start + len(key[0]) - len(key[0].lstrip()), start + len(key[0][:-1].rstrip()))
        return _given_twice(text, read, "key", path, span), start, end
    if not alone and not _is_twice(message):
        wrong = _mistake(text, message, at)
        return msgspec.structs.replace(wrong, path=path), start, end
    return None


def _given_twice(text: Text, read: str, what: str, path: KeyPath, span: tuple[int, int]) -> Problem:
    first = _scan_before(read, span[0]).get(path)
    line = read.count("\n", 0, first) + 1 if first is not None else 0
    hint = f"it is given first in line {line}: keep one of them" if line else f"the {what} is given twice"
    return Problem(path, f"{what} '{dotted(path)}' is given twice", hint, at="key", place=text.place(span))


def _scan_before(read: str, end: int) -> dict[KeyPath, int]:
    """Where each key stands in the first `end` characters, which are sound."""
    return {path: span.key[0] or span.value[0] for path, span in scan(read[:end]).items()}


def _mistake(text: Text, message: str, at: int | None) -> Problem:
    place = text.end() if at is None else text.place((at, at + 1))
    return Problem((), f"not TOML: {_AT.sub('', message)}", hint=_syntax_hint(message, place), place=place)


def _offset(message: str, read: str) -> int | None:
    found = _AT.search(message)
    if not found or not found[1]:
        return None
    line, column = int(found[1]), int(found[2])
    return sum(len(one) + 1 for one in read.split("\n")[: line - 1]) + column - 1


def _table_at(read: str, start: int) -> KeyPath:
    """The table that a line belongs to; of an array of tables with its index, as in the paths of what is read."""
    indices: dict[KeyPath, int] = {}
    path: KeyPath = ()
    for header in _HEADER.finditer(read, 0, start):
        keys = _header_keys(header[0])
        if header[0].lstrip().startswith("[["):
            indices[keys] = indices.get(keys, -1) + 1
        path = ()
        for n, key in enumerate(keys, 1):
            index = indices.get(keys[:n])
            path += (key,) if index is None else (key, index)
    return path


def _header_keys(line: str) -> KeyPath:
    inner = line.split("#")[0].strip().strip("[]")
    return keys_of(inner) or ()


def keys_of(text: str) -> tuple[str, ...] | None:
    """The parts of a dotted key; None when it is none."""
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


def _parses(line: str) -> bool:
    try:
        tomllib.loads(line)
    except (tomllib.TOMLDecodeError, RecursionError):
        return False
    return True


def _keys_within(block: str) -> set[KeyPath]:
    """The keys of a table that is passed over."""
    try:
        tomllib.loads(block)
    except (tomllib.TOMLDecodeError, RecursionError):
        return set()
    return {path for path, span in scan(block).items() if len(path) > 1 and span.key != span.value}


def _is_twice(message: str) -> bool:
    return message.startswith(_TWICE)


def _syntax_hint(message: str, place: Place) -> str:
    rest = place.text[place.column - 1 :].split("#")[0].strip()
    if "Invalid value" in message and rest:
        if rest in ("True", "False"):
            return f"TOML writes {rest.lower()}"
        if rest == "None":
            return "TOML has no null: leave the key out"
        return f'text stands in quotes: "{rest}"'
    return "the same name is given twice" if _is_twice(message) else ""
