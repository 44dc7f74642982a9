"""The text of a config: parsed, overridden by --set, and able to say where each key stands."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from relax_rt.config.positions import Span, scan
from relax_rt.config.problems import OVERRIDE, BadInput, ConfigErrors, KeyPath, Problem, dotted
from relax_rt.config.syntax import Text, keys_of, parse

MAX_BYTES = 1 << 20


class Source:
    """A config's data and the place of each key of it.

    Attributes:
        problems: mistakes of TOML that were read past.
        lost: keys whose value is not known: it could not be read, or is given twice.
    """

    def __init__(self, text: Text) -> None:
        self.text = text
        parsed = parse(text)
        self.data = parsed.data
        self.problems = parsed.problems
        self.lost = parsed.lost
        self._spans: dict[KeyPath, tuple[Text, Span]] = {path: (text, span) for path, span in scan(parsed.read).items()}

    def override(self, assignment: str) -> Problem | None:
        """Apply one ``a.b=value``: the value is read as TOML, else taken as a string."""
        text = Text(OVERRIDE, assignment)
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
            self._spans.setdefault(keys[:depth], (text, Span(key_span, key_span)))
        for path, span in value_spans.items():
            self._spans[(*keys, *path)] = (text, span)
        return None

    def locate(self, problem: Problem) -> Problem:
        """The problem with its place: that of its key, else of the nearest parent, else the end of the file."""
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


def read_source(path: Path, overrides: Sequence[str]) -> tuple[Source, list[Problem]]:
    """Read a config file and apply the overrides; answers also with the overrides' problems.

    Raises:
        BadInput: the file cannot be read.
        ConfigErrors: it is not TOML.
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
        shown = Text(str(path), raw.decode(errors="replace"))
        at = len(raw[: error.start].decode(errors="replace"))
        problem = Problem((), "not UTF-8", hint="save the file as UTF-8", place=shown.place((at, at + 1)))
        raise ConfigErrors(str(path), [problem]) from error
    source = Source(Text(str(path), text.replace("\r\n", "\n")))
    overridden = [found for assignment in overrides if (found := source.override(assignment)) is not None]
    return source, [*source.problems, *overridden]


def _in_folder(folder: Path) -> str:
    """What to give instead of a folder that was given as the config."""
    found = sorted(folder.glob("*.toml"))
    if len(found) > 1:
        found = [one for one in found if one.name == "roles.toml"] or found
    if len(found) == 1:
        return f"its config is {found[0]}: give that, as in `relax-rt validate {found[0]}`"
    if found:
        return f"give one of {', '.join(map(str, found[:8]))}"
    return f"it holds no .toml; a config is called roles.toml, and `relax-rt init {folder}` writes a starter"


def _assignment(text: Text) -> tuple[tuple[str, ...] | None, tuple[int, int], Any, dict[KeyPath, Span]]:
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
            return keys, span, raw.strip(), {(): Span(span, value_span)}
        shift = cut + 1 - len("v=")
        spans = {path[1:]: _shifted(at, shift) for path, at in scan(f"v={raw}").items()}
        spans[()] = Span(span, spans[()].value)
        return keys, span, parsed["v"], spans
    return None, (0, 0), None, {}


def _shifted(span: Span, by: int) -> Span:
    key = (span.key[0] + by, span.key[1] + by) if span.key != (0, 0) else span.key
    return Span(key, (span.value[0] + by, span.value[1] + by))
