"""Problems of a config and their places in its source. All are found before any is reported."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from relax_rt.transport.rpc.errors import RelaxError
from relax_rt.transport.rpc.errors import did_you_mean as did_you_mean

OVERRIDE = "--set"
"""Stands as the file of what an override says."""
KeyPath = tuple[str | int, ...]
"""A place in roles.toml: keys and array indices, ("roles", "rollout", "count")."""


class SourcePlace(msgspec.Struct, frozen=True):
    """Where a problem lies in a text.

    Attributes:
        file: file name, or ``--set`` for an override.
        line, column: counted from 1; the column counts characters.
        text: the whole source line.
        width: characters to underline, at least 1.
    """

    file: str
    line: int
    column: int
    text: str
    width: int = 1

    @property
    def override(self) -> bool:
        """Whether it is in an override of one line, which is named by itself."""
        return self.file == OVERRIDE and self.line == 1


class Problem(msgspec.Struct, frozen=True):
    """One thing that is wrong with a config.

    Checks (a job's too) fill in `path`; the loader finds the place in the source.

    Attributes:
        path: the key it is about; the nearest existing parent is shown when the key is not there.
        message: what is wrong.
        hint: what to do.
        at: underline the key or its value.
    """

    path: KeyPath
    message: str
    hint: str = ""
    at: Literal["key", "value"] = "value"
    place: SourcePlace | None = None

    def render(self) -> str:
        """Render the problem: place, message, source line, caret, hint."""
        key = dotted(self.path)
        if self.place is None:
            lines = [f"{key}: {self.message}" if key else self.message]
            margin = ""
        elif self.place.override:
            lead = f"{OVERRIDE} "
            margin = " " * len(lead)
            caret = "^" * max(1, self.place.width)
            lines = [
                f"{lead}{self.place.text.expandtabs(1)}: {self.message}",
                f"{margin}{' ' * (self.place.column - 1)}{caret}",
            ]
        else:
            place = self.place
            number = str(place.line)
            margin = " " * (len(number) + 1)
            source = place.text.expandtabs(1)
            lines = [
                f"{place.file}:{place.line}:{place.column}: {self.message}",
                f"{number} | {source}",
                f"{margin}| {' ' * (place.column - 1)}{'^' * max(1, place.width)}",
            ]
        if self.hint:
            first, *more = self.hint.split("\n")
            lines += [f"{margin}= {first}", *(f"{margin}  {line}" for line in more)]
        return "\n".join(lines)


class BadInput(RelaxError):
    """The request cannot be carried out; nothing was started or changed."""


class ConfigErrors(BadInput):
    """Everything that is wrong with a config, in the order of the source."""

    def __init__(self, source: str, problems: Iterable[Problem]) -> None:
        self.source = source
        self.problems = sorted(problems, key=_source_order)
        count = len(self.problems)
        self.title = f"{source}: {count} problem{'' if count == 1 else 's'}"
        super().__init__(self.title, why="; ".join(_one_line(p) for p in self.problems))

    def render(self) -> str:
        """Render all problems, each with its source line and caret."""
        return "\n\n".join([*(p.render() for p in self.problems), self.title])


def dotted(path: KeyPath) -> str:
    """Write a path as in TOML: ``roles.rollout.count``, ``items[0].name``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            bare = part and all(c.isascii() and (c.isalnum() or c in "-_") for c in part)
            text += ("." if text else "") + (part if bare else '"' + part.replace('"', '\\"') + '"')
    return text


def _source_order(problem: Problem) -> tuple[str, int, int, str]:
    if problem.place is None:
        return ("", 0, 0, dotted(problem.path))
    return (problem.place.file, problem.place.line, problem.place.column, dotted(problem.path))


def _one_line(problem: Problem) -> str:
    place = problem.place
    if place is None:
        return problem.message
    where = f"{OVERRIDE} {place.text}" if place.override else f"{place.line}:{place.column}"
    return f"{where}: {problem.message}"
