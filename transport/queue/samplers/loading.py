"""A sampler from what a config says of it: a name and options."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from relax_rt.transport.base.targets import NoTarget, did_you_mean, load_target
from relax_rt.transport.queue.ledger.selection import BatchSampler
from relax_rt.transport.queue.samplers.builtin import SAMPLERS
from relax_rt.transport.rpc.errors import Refused


def load_sampler(path: str, options: Mapping[str, Any], base: Path = Path()) -> BatchSampler:
    """The sampler that `path` names, made with the options.

    Args:
        path: fifo, whole_group, sequence_balanced, token_budget, freshest_first, priority; or `package.module:Class`,
            or `file.py:Class`.
        base: what a relative file is relative to.

    Raises:
        Refused: there is no such sampler, it cannot be imported, is none, or does not take these options.
    """
    if path in SAMPLERS:
        named: BatchSampler = _struct(path, SAMPLERS[path], options)
        return named
    if ":" not in path:
        there_are = f"there are {', '.join(SAMPLERS)}; one of your own is written package.module:Class or file.py:Class"
        near = did_you_mean(path, SAMPLERS)
        raise Refused(f"sampler '{path}'", why="there is none of that name", hint=f"{near} {there_are}".strip())
    try:
        found = load_target(path, base)
    except NoTarget as error:
        why = error.what + (f": {error.why}" if error.why else "")
        raise Refused(f"sampler '{path}'", why=why, hint=error.hint) from error
    if not isinstance(found, type):
        raise Refused(f"sampler '{path}'", why=f"it is a {type(found).__name__}, not a class")
    make = _struct if issubclass(found, msgspec.Struct) else _called
    made: BatchSampler = make(path, found, options)
    if not callable(getattr(made, "choose", None)) or not isinstance(getattr(made, "whole_groups", None), bool):
        raise Refused(
            f"sampler '{path}'",
            why="it has no method `choose(units, request)`, or no attribute `whole_groups` that is true or false",
            hint="see relax_rt.transport.queue.ledger.selection.BatchSampler",
        )
    return made


def _struct(path: str, kind: type[Any], options: Mapping[str, Any]) -> Any:
    """Options checked against the types of a struct's fields."""
    _check_names(path, options, known=kind.__struct_fields__)
    for field in msgspec.structs.fields(kind):
        if field.name not in options:
            continue
        try:
            msgspec.convert(options[field.name], field.type)
        except msgspec.ValidationError as error:
            what = f"option '{field.name}' of sampler '{path}'"
            raise Refused(what, why=f"{options[field.name]!r} will not do: {error}") from error
    try:
        return msgspec.convert(dict(options), kind)
    except msgspec.ValidationError as error:
        raise Refused(f"sampler '{path}'", why=str(error)) from error


def _called(path: str, kind: type[Any], options: Mapping[str, Any]) -> Any:
    parameters = inspect.signature(kind).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        _check_names(path, options, known=[parameter.name for parameter in parameters])
    try:
        return kind(**options)
    except Exception as error:
        raise Refused(f"sampler '{path}'", why=f"it raised {type(error).__name__}: {error}") from error


def _check_names(path: str, options: Mapping[str, Any], *, known: Iterable[str]) -> None:
    known = list(known)
    for name in options:
        if name not in known:
            there_are = f"its options are {', '.join(known)}" if known else "it has no options"
            near = did_you_mean(name, known)
            what = f"option '{name}' of sampler '{path}'"
            raise Refused(what, why="there is none of that name", hint=f"{near} {there_are}".strip())
