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


def mend(model: type[M], data: Any, problems: Sequence[Problem], at: KeyPath = ()) -> M | None:
    """The model from the data without the keys that have problems; None when what is left does not make one.

    Args:
        problems: what `validate` found, with paths from the config's root.
        at: path of the table in the config.
    """
    sound = copy.deepcopy(data)
    for problem in problems:
        _drop(sound, problem.path[len(at) :])
    found = validate(model, sound, at)
    return None if isinstance(found, list) else found


def in_doubt(problems: Iterable[Problem]) -> set[KeyPath]:
    """The keys whose values are not known because of these problems; an unknown key leaves nothing in doubt."""
    return {problem.path for problem in problems if problem.path and problem.at == "value"}


def certain(problems: Iterable[Problem], doubtful: Collection[KeyPath]) -> list[Problem]:
    """The findings across keys that do not rest on a key in doubt: those that neither stand at it nor name it."""
    return [problem for problem in problems if not any(_rests_on(problem, path) for path in doubtful)]


def _rests_on(problem: Problem, path: KeyPath) -> bool:
    shorter = min(len(problem.path), len(path))
    if shorter and problem.path[:shorter] == path[:shorter]:
        return True
    name = next((part for part in reversed(path) if isinstance(part, str)), "")
    return bool(name) and re.search(rf"\b{re.escape(name)}\b", f"{problem.message} {problem.hint}") is not None


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
