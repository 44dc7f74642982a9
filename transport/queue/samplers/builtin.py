"""The samplers that come with the queue, and a sampler from what a config says of it: a name and options.

The fields of the built-in ones are the options that a config may set.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from relax_rt.transport.base.targets import NoTarget, load_target
from relax_rt.transport.queue.ledger.messages import LeaseRequest
from relax_rt.transport.queue.ledger.selection import WINDOW, BatchSampler, Selection, Unit, fill, limit_of, within
from relax_rt.transport.queue.samplers.packing import balanced_partition
from relax_rt.transport.rpc.errors import Refused, did_you_mean

Window = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
Positive = Annotated[int, msgspec.Meta(ge=1)]


class _Windowed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """window: how many of the ready units are looked at, oldest first; more if more are wanted."""

    window: Window = WINDOW
    whole_groups: ClassVar[bool] = False


class Fifo(_Windowed, frozen=True):
    """The oldest ready samples, up to the first that is over the token budget."""

    def choose(self, units: Iterable[Unit], request: LeaseRequest) -> Selection:
        return fill(within(units, self.window, request), request)


class WholeGroup(_Windowed, frozen=True):
    """Whole groups, oldest first, also where samples are asked for: then as many as fit into that number."""

    whole_groups: ClassVar[bool] = True

    def choose(self, units: Iterable[Unit], request: LeaseRequest) -> Selection:
        return fill(within(units, self.window, request), request)


class TokenBudget(_Windowed, frozen=True):
    """First fit: the oldest, and after it each that fits into what is left of the request's tokens.

    What is left at last is little, and seldom worth a long search: the window is smaller than others'.
    """

    window: Window = 512

    def choose(self, units: Iterable[Unit], request: LeaseRequest) -> Selection:
        return fill(within(units, self.window, request), request, skip=True)


class FreshestFirst(_Windowed, frozen=True):
    """The least stale first, and of those the newest. What it leaves gets old: bound the staleness."""

    newest_first: ClassVar[bool] = True

    def choose(self, units: Iterable[Unit], request: LeaseRequest) -> Selection:
        return fill(
            sorted(within(units, self.window, request), key=lambda unit: (unit.staleness, -unit.order)), request
        )


class Priority(_Windowed, frozen=True):
    """The highest priority first; equal ones as they became ready."""

    def choose(self, units: Iterable[Unit], request: LeaseRequest) -> Selection:
        return fill(sorted(within(units, self.window, request), key=_by_priority), request)


def _by_priority(unit: Unit) -> tuple[float, int]:
    # Not-a-number has no place in an order: it goes last.
    return (math.inf if math.isnan(unit.priority) else -unit.priority, unit.order)


class SequenceBalanced(_Windowed, frozen=True):
    """Balance the tokens of batches, or the lengths of samples in a batch. The oldest unit is in every batch.

    goal `total`: the next `batches` batches that could be made of the window are dealt out together, so that their
    tokens are alike (see balanced_partition: totals differ by at most the longest unit), and the one with the oldest
    unit is taken. Ranks that read batches of their own then take about the same time for each, and the mixture of
    lengths in a batch stays that of the window.

    goal `padding`: the batch with the fewest padding tokens, if every sample is padded to the longest. The lengths of
    a batch are then correlated, which changes the gradient's noise; it pays only where rows are really padded.
    """

    goal: Literal["total", "padding"] = "total"
    batches: Positive = 8

    def choose(self, units: Iterable[Unit], request: LeaseRequest) -> Selection:
        limit = limit_of(request)
        if math.isinf(limit):
            pool = list(_up_to(within(units, self.window, request), self.batches * request.tokens))
        else:
            pool = list(within(units, min(self.window, self.batches * int(limit)), request))
        if len(pool) > limit:
            pool = _least_padding(pool, int(limit)) if self.goal == "padding" else _alike(pool, int(limit))
        elif request.tokens and len(pool) >= request.groups and sum(unit.tokens for unit in pool) > request.tokens:
            pool = _nearest(pool) if self.goal == "padding" else _alike_by_tokens(pool, request.tokens)
        return fill(pool, request, skip=True)


def _up_to(units: Iterable[Unit], tokens: int) -> Iterator[Unit]:
    for unit in units:
        yield unit
        tokens -= unit.tokens
        if tokens <= 0:
            return


def _alike(pool: list[Unit], size: int) -> list[Unit]:
    """The batch with the first unit, among batches of `size` units with totals alike."""
    parts = len(pool) // size
    dealt = balanced_partition([unit.tokens for unit in pool[: parts * size]], parts, equal_counts=True)
    return [pool[index] for index in dealt[0]]


def _alike_by_tokens(pool: list[Unit], tokens: int) -> list[Unit]:
    """The same with as many batches as the pool's tokens make; the other units come after, to fill the budget up."""
    costs = [unit.tokens for unit in pool]
    dealt = balanced_partition(costs, -(-sum(costs) // tokens))
    return [pool[index] for part in dealt for index in part]


def _nearest(pool: list[Unit]) -> list[Unit]:
    """The first unit, and the others by how far their length is from its own."""
    near = _longest(pool[0])
    return [pool[0], *sorted(pool[1:], key=lambda unit: (abs(_longest(unit) - near), unit.order))]


def _least_padding(pool: list[Unit], size: int) -> list[Unit]:
    """The first unit and size - 1 others, so that padding to the longest costs least.

    For a given longest length the best others are the longest up to it: a run in the order of length.
    """
    first, others = pool[0], sorted(pool[1:], key=lambda unit: (_longest(unit), -unit.order))
    if size == 1:
        return [first]
    rows, total = len(first.keys), first.tokens
    best: tuple[int, int] | None = None
    for end, unit in enumerate(others, start=1):
        rows, total = rows + len(unit.keys), total + unit.tokens
        if end >= size:
            gone = others[end - size]
            rows, total = rows - len(gone.keys), total - gone.tokens
        if end >= size - 1:
            padding = max(_longest(unit), _longest(first)) * rows - total
            best = min(best or (padding, end), (padding, end))
    assert best is not None
    return sorted([first, *others[best[1] - size + 1 : best[1]]], key=lambda unit: unit.order)


def _longest(unit: Unit) -> int:
    # `tokens` refuses a length that is not known.
    return max(unit.lengths) if unit.tokens else 0


SAMPLERS: dict[str, type[_Windowed]] = {
    "fifo": Fifo,
    "whole_group": WholeGroup,
    "sequence_balanced": SequenceBalanced,
    "token_budget": TokenBudget,
    "freshest_first": FreshestFirst,
    "priority": Priority,
}
"""By the short name that a config uses."""


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
