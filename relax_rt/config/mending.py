"""A config with mistakes as far as it is sound: so that checks across keys are made in the same go."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel

from relax_rt.config.problems import KeyPath, Problem
from relax_rt.config.validation import validate

M = TypeVar("M", bound=BaseModel)

MISSING = ("missing table ", "missing key ")
STAND_IN = "missing"
"""Value of a key that is missing, so that the others can be checked: nothing is said that rests on it."""
ROUNDS = 3


def mend(model: type[M], data: Any, problems: Sequence[Problem], at: KeyPath = ()) -> M | None:
    """The model from the data without the keys that have problems, those that are missing filled with a stand-in; None
    when what is left does not make one.

    Args:
        problems: what `validate` found, with paths from the config's root.
        at: path of the table in the config.
    """
    sound = copy.deepcopy(data)
    for _ in range(ROUNDS):
        for problem in problems:
            path = problem.path[len(at) :]
            _fill(sound, path, problem) if problem.message.startswith(MISSING) else _drop(sound, path)
        found = validate(model, sound, at)
        if not isinstance(found, list):
            return found
        problems = found
    return None


def in_doubt(problems: Iterable[Problem]) -> set[KeyPath]:
    """The keys whose values are not known because of these problems; an unknown key leaves nothing in doubt."""
    return {p.path for p in problems if p.path and (p.at == "value" or p.message.startswith(MISSING))}


def certain(problems: Iterable[Problem], doubtful: Collection[KeyPath]) -> list[Problem]:
    """The findings across keys that do not rest on a key in doubt: those that neither stand at it nor name it."""
    return [problem for problem in problems if not any(_rests_on(problem, path) for path in doubtful)]


def _rests_on(problem: Problem, path: KeyPath) -> bool:
    shorter = min(len(problem.path), len(path))
    if shorter and problem.path[:shorter] == path[:shorter]:
        return True
    names = [part for part in path if isinstance(part, str)]
    if not names:
        return False
    # Where it stands at a key of the same name in another table, it is that key's name that it says.
    own = problem.path[-1:] == tuple(names[-1:])
    name = ".".join(names[-2:] if own else names[-1:])
    return re.search(rf"\b{re.escape(name)}\b", f"{problem.message} {problem.hint}") is not None


def _fill(data: Any, path: KeyPath, problem: Problem) -> None:
    """Put a stand-in for what is missing."""
    for name in path[:-1]:
        data = data.get(name) if isinstance(data, dict) else None
    if isinstance(data, dict):
        data[path[-1]] = {} if problem.message.startswith(MISSING[0]) else STAND_IN


def _drop(data: Any, path: KeyPath) -> None:
    """Remove the key; of an array with a wrong element the whole array."""
    names = list(path)
    while names and not isinstance(names[-1], str):
        names.pop()
    for index, name in enumerate(names):
        if not isinstance(data, dict) or name not in data:
            return
        if index == len(names) - 1 or not isinstance(data[name], dict):
            del data[name]
            return
        data = data[name]
