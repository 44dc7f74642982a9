"""From plain data to typed tables: pydantic's findings as problems, and what can still be checked beside them.

A config with wrong keys is repaired as far as it goes (`repair`), so that the checks across keys run in the same go;
problems that they report about a key that is wrong itself are dropped (`independent_of`).
"""

from __future__ import annotations

import copy
import itertools
import json
import re
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from relax_rt.config.problems import KeyPath, Problem, did_you_mean, dotted
from relax_rt.config.schema import Table

M = TypeVar("M", bound=BaseModel)

MISSING = ("missing table ", "missing key ")
PLACEHOLDER = "missing"
"""Placeholder for a missing key, so that the others can be checked; problems that depend on it are dropped."""
ROUNDS = 3

_KINDS = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "int_parsing": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "list_type": "an array",
    "tuple_type": "an array",
}


def validate(model: type[M], data: Any, at: KeyPath = (), home: type[BaseModel] | None = None) -> M | list[Problem]:
    """Return the data as a model, or everything that is wrong with it.

    JSON is what pydantic's strict mode knows arrays and integers-for-numbers in: 1 is a number, "1" is not, and an
    array becomes a tuple.

    Args:
        model: the table's type.
        data: what tomllib read.
        at: path of the table in the config.
        home: the whole config's type; a key that is unknown here but known there is named with its table.
    """
    try:
        return model.model_validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as error:
        details = error.errors(include_url=False)
    # One value has a finding for each kind that its key allows.
    of_one_value = itertools.groupby(details, lambda detail: _in_data(detail, data)[0])
    return [one for _, found in of_one_value for one in _problems(model, data, at, list(found), home or model)]


def _problems(
    model: type[BaseModel], data: Any, at: KeyPath, details: list[ErrorDetails], home: type[BaseModel]
) -> list[Problem]:
    """Report what is wrong with one value; a value of none of several types is one problem."""
    if len(details) == 1 or any(detail["type"] not in _KINDS for detail in details):
        return [_problem(model, data, at, detail, home) for detail in details]
    path, value = _in_data(details[0], data)
    kinds = list(dict.fromkeys(_KINDS[detail["type"]] for detail in details))
    if "a number" in kinds and "an integer" in kinds:
        kinds.remove("an integer")
    named = " or ".join([", ".join(kinds[:-1]), kinds[-1]]) if len(kinds) > 1 else kinds[0]
    message = f"{dotted((*at, *path))}: must be {named}, not {_show(value)}"
    return [Problem((*at, *path), message, _description(model, path))]


def field_type(model: type[BaseModel], path: KeyPath) -> Any:
    """Return the annotation found by following keys from a model; None if they lead out of it."""
    found: Any = model
    for part in path:
        fields = _table_type(found)
        if fields is not None and isinstance(part, str) and part in fields.model_fields:
            found = fields.model_fields[part].annotation
        elif get_origin(found) in (list, tuple) and isinstance(part, int):
            found = get_args(found)[0]
        elif get_origin(found) is dict:
            found = get_args(found)[1]
        else:
            return None
    return found


def _table_type(annotation: Any) -> type[BaseModel] | None:
    if get_origin(annotation) in (Union, types.UnionType):
        inner = [t for t in map(_table_type, get_args(annotation)) if t is not None]
        return inner[0] if inner else None
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _problem(model: type[BaseModel], data: Any, at: KeyPath, detail: ErrorDetails, home: type[BaseModel]) -> Problem:
    path, value = _in_data(detail, data)
    kind, context = detail["type"], detail.get("ctx", {})
    table = _table_type(field_type(model, path[:-1]))
    if kind == "extra_forbidden":
        return _unknown(path, at, table, home)
    if kind == "missing":
        return _missing(detail, path, at, model)
    hint = _description(model, path)
    shown = _show(value)
    if kind in _KINDS:
        message = f"must be {_KINDS[kind]}, not {shown}"
    elif kind == "literal_error":
        choices = [c for c in get_args(_literal(field_type(model, path))) if c is not None]
        message = f"{shown} is not one of: {', '.join(_show(c) for c in choices)}"
        near = did_you_mean(str(value), [str(c) for c in choices])
        hint = near or hint
    elif kind == "string_pattern_mismatch":
        message = f"{shown} does not have the right form"
    elif kind == "string_too_short" and not value:
        message = "must not be empty"
    elif kind in _BOUNDS:
        word, key = _BOUNDS[kind]
        message = f"must be {word} {context[key]:g}, not {shown}"
    else:
        message = f"{_lower(detail['msg'].removeprefix('Value error, '))}, not {shown}"
    return Problem((*at, *path), f"{dotted((*at, *path))}: {message}", hint)


_BOUNDS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def _in_data(detail: ErrorDetails, data: Any) -> tuple[KeyPath, Any]:
    """Pydantic's location without the parts that are not keys of the data (names of union members), and the value.

    The last part of a missing key's location stays, though it is not there.
    """
    path: list[str | int] = []
    loc, missing = detail["loc"], detail["type"] == "missing"
    for index, part in enumerate(loc):
        inside = part in data if isinstance(data, Mapping) else isinstance(data, list) and part in range(len(data))
        if inside:
            data = data[part]
        elif index < len(loc) - 1 or not missing or not isinstance(data, Mapping):
            continue
        path.append(part)
    return tuple(path), data


def _unknown(path: KeyPath, at: KeyPath, table: type[BaseModel] | None, home: type[BaseModel]) -> Problem:
    name = str(path[-1])
    where = dotted((*at, *path[:-1]))
    known = [key for key in (table.model_fields if table else []) if key != "config_dir"]
    what = "table or key" if not where else "key"
    message = f"unknown {what} '{name}'" + (f" in [{where}]" if where else "")
    meant = table.meant if table is not None and issubclass(table, Table) else {}
    hint = meant.get(name) or did_you_mean(name, known)
    if not hint:
        elsewhere = [f"[{dotted(p)}]" for p in _keys_named(home, name)]
        tables = ", ".join(elsewhere[:-1]) + " or " * (len(elsewhere) > 1) + "".join(elsewhere[-1:])
        hint = f"it belongs in {tables}" if elsewhere else f"known: {', '.join(known)}" if known else ""
    return Problem((*at, *path), message, hint, at="key")


def _keys_named(model: type[BaseModel], name: str, at: KeyPath = (), depth: int = 4) -> list[KeyPath]:
    """Find the tables that have a key of this name."""
    found = [at] if at and name in model.model_fields else []
    for key, field in model.model_fields.items():
        inner = _table_type(field.annotation)
        if inner is not None and depth:
            found += _keys_named(inner, name, (*at, key), depth - 1)
    return found


def _missing(detail: ErrorDetails, path: KeyPath, at: KeyPath, model: type[BaseModel]) -> Problem:
    whole = (*at, *path)
    wanted = _table_type(field_type(model, path))
    if wanted is not None:
        required = [name for name, field in wanted.model_fields.items() if field.is_required()]
        hint = f"it needs {', '.join(required)}" if required else ""
        return Problem(whole, f"missing table [{dotted(whole)}]", hint, at="key")
    table = dotted(whole[:-1])
    message = f"missing key '{path[-1]}'" + (f" in [{table}]" if table else "")
    return Problem(whole, message, _description(model, path), at="key")


def _description(model: type[BaseModel], path: KeyPath) -> str:
    table = _table_type(field_type(model, path[:-1])) if path else None
    field = table.model_fields.get(str(path[-1])) if table else None
    return " ".join((field.description or "").split()) if field else ""


def _literal(annotation: Any) -> Any:
    if get_origin(annotation) is Literal:
        return annotation
    for inner in get_args(annotation):
        if (found := _literal(inner)) is not None:
            return found
    return None


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value if len(value) <= 60 else value[:57] + "...", ensure_ascii=False)
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list):
        return "an array"
    return str(value)


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def repair(model: type[M], data: Any, problems: Sequence[Problem], at: KeyPath = ()) -> M | None:
    """Return the model without the wrong keys and with placeholders for missing ones; None if there is no such model.

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


def unknown_values(problems: Iterable[Problem]) -> set[KeyPath]:
    """Return the keys whose values are unknown because of these problems; an unknown key itself leaves none."""
    return {p.path for p in problems if p.path and (p.at == "value" or p.message.startswith(MISSING))}


def independent_of(problems: Iterable[Problem], unknown: Collection[KeyPath]) -> list[Problem]:
    """Return the findings across keys that depend on no unknown key: they neither stand at it nor name it."""
    return [problem for problem in problems if not any(_depends_on(problem, path) for path in unknown)]


def _depends_on(problem: Problem, path: KeyPath) -> bool:
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
    """Put a placeholder for a missing key."""
    for name in path[:-1]:
        data = data.get(name) if isinstance(data, dict) else None
    if isinstance(data, dict):
        data[path[-1]] = {} if problem.message.startswith(MISSING[0]) else PLACEHOLDER


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
