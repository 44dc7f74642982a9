"""The parts that an objective is made of: found by name, or by the import path of a user's own function.

A part is a small pure function with a table of options and what it needs to be computed before it. Its own module
registers it; a user's function needs no registration, and may declare options and needs with the same decorator:

    @part("loss", options=MyOptions, needs={"reference"})
    def my_loss(tokens, options): ...

A user's part is a function of its arguments. What it raises or wrongly returns ends the run with the line to mend:
started again, the trainer would come to the same end, and each of its deaths would count against the prompts that it
had leased.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import msgspec
from pydantic import BaseModel, ConfigDict

from relax_rt.config.problems import BadInput, KeyPath, Problem, dotted
from relax_rt.config.schema import Table
from relax_rt.config.target import TargetError, load_target
from relax_rt.config.validation import validate
from relax_rt.roles.base.user_code import user_line
from relax_rt.supervision.diagnosis import classify_exception
from relax_rt.transport.rpc.errors import Refused, RelaxError, did_you_mean

MEND = "mend it there; `relax-rt up` resumes from the last checkpoint"
MEND_CALLED = "mend it there; `relax-rt validate` calls it, and `relax-rt up` resumes from the last checkpoint"
ONLY_LOADED = ("filter", "sampler")
"""Kinds of parts that no dry run calls."""
MAX_CHARS = 600
"""Of what is said of the arguments."""
SHOWN_CHARS = 40


class UserPartFailed(BadInput):
    """A user's own part raised, or returned what it may not (`raised` says which)."""

    def __init__(self, who: str, place: KeyPath, why: str, on: str, *, raised: bool = False) -> None:
        self.who, self.place, self.detail, self.raised = who, place, f"{why}; it was given {on}", raised
        hint = MEND if who.startswith(ONLY_LOADED) else MEND_CALLED
        super().__init__(f"{who} ({dotted(place)})", why=self.detail, hint=hint)


@contextmanager
def user_code(who: str, place: KeyPath, arguments: Sequence[Any]) -> Iterator[None]:
    """Around a call of a user's part.

    Args:
        who: as "loss 'mine.py:my_loss'". place: the key that names it.

    Raises:
        UserPartFailed: it raised, or called sys.exit. What a lack of memory or the device makes it raise passes
            through: smaller micro-batches, or another start, may mend that.
    """
    try:
        yield
    except UserPartFailed:
        raise
    except (Exception, SystemExit) as error:
        # It may raise anything.
        from relax_rt.roles.models.device import out_of_memory

        if classify_exception(error) in ("cuda", "oom") or out_of_memory(error):
            raise
        why = f"{type(error).__name__}: {error} at {user_line(error)}"
        raise UserPartFailed(who, place, why, describe(arguments), raised=True) from error


def describe(arguments: Sequence[Any]) -> str:
    """Names, shapes and dtypes of arguments in a line."""
    text = ", ".join(_one(value) for value in arguments)
    return text if len(text) <= MAX_CHARS else text[: MAX_CHARS - 1] + "…"


def _one(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
    elif isinstance(value, msgspec.Struct):
        names = list(value.__struct_fields__)
    elif isinstance(value, Mapping):
        return f"a table of {len(value)}"
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return f"{len(value)} x {_one(value[0])}" if value else "none"
    elif value is None or isinstance(value, str | bytes | int | float):
        return f"{value!r:.{SHOWN_CHARS}}"
    else:
        return type(value).__name__
    fields = [f"{name} {_one(found)}" for name in names if (found := getattr(value, name)) is not None]
    return f"{type(value).__name__}({', '.join(fields)})"


Kind = Literal["advantage", "loss", "aggregation", "correction", "kl", "entropy", "filter", "sampler"]
Need = Literal["proximal", "reference", "values", "entropy", "batch", "turn_rewards", "turn_states", "pairs", "rewards"]
"""What must be there before a part can be computed.

proximal, reference, values: that column of each sample (a teacher's log-probabilities are the reference's column).
entropy: of the policy at each trained token, with its gradient. batch: all samples of the step at once, so that no
micro-batch can begin before the last sample is there. turn_rewards, turn_states: `info` of the sample, a list with one
entry for each turn of the assistant. pairs: all samples of a group in one micro-batch. rewards: of each sample.
"""
FAMILIES = ("advantages", "losses", "corrections", "regularisers", "filters", "samplers")
NEEDS = frozenset(get_args(Need))

F = TypeVar("F", bound=Callable[..., Any])


class NoOptions(Table):
    """A part that has none."""


class FreeOptions(BaseModel):
    """Options of a user's function that declares none: whatever its table holds, as attributes."""

    model_config = ConfigDict(extra="allow", frozen=True)


@dataclass(frozen=True, slots=True)
class ObjectivePart:
    """A function that can be named in [algorithm].

    Attributes:
        options: type of the table that configures it.
        needs: what must be there, given its options.
        extras: further functions that belong to it: `count` of an aggregation; `prepare` of a loss, and `left_out`, the
            tokens that it gives no weight; `returns` of an advantage, what a critic's values should have been, arrays
            like the advantages.
        traits: facts about it that others ask for, as `ratio`, `weights`; `policy`: it looks at the policy's own
            log-probabilities, `Trajectory.current`, which are then computed first; `by_advantage`, of a loss: it has
            no gradient where the advantage is 0, so that samples without any advantage need not be computed.
    """

    kind: Kind
    name: str
    function: Callable[..., Any]
    options: type[BaseModel]
    needs: Callable[[Any], frozenset[str]]
    extras: Mapping[str, Callable[..., Any]]
    traits: frozenset[str]


@dataclass(frozen=True, slots=True)
class BoundPart:
    """A part with its options.

    Attributes:
        place: the key in roles.toml that named it.
        target: the import path by which a user's own function was named; empty for a part of a known name.
    """

    part: ObjectivePart
    options: Any
    place: KeyPath
    target: str = ""

    @property
    def needs(self) -> frozenset[str]:
        """What must be there before it can be computed."""
        return self.part.needs(self.options)

    def __call__(self, *arguments: Any) -> Any:
        """Call it with the options. Raises: UserPartFailed, if it is a user's own and raises."""
        return self._called("", self.part.function, arguments)

    def extra(self, name: str, *arguments: Any) -> Any:
        """Call one of its further functions with the options. Raises: as the part itself."""
        return self._called(name, self.part.extras[name], arguments)

    def _called(self, extra: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if not self.target:
            return function(*arguments, self.options)
        with user_code(self.who(extra), self.place, arguments):
            return function(*arguments, self.options)

    def who(self, extra: str = "") -> str:
        """It, or its further function of this name, in words."""
        return f"{self.part.kind} '{self.target or self.part.name}'" + (f", its {extra}" if extra else "")

    def wrong(self, why: str, *arguments: Any, extra: str = "") -> RelaxError:
        """What it returned for these arguments may not be: the error to raise.

        Args:
            why: as "it returned …".
        """
        if not self.target:
            return Refused(self.who(extra), why=why)
        function = self.part.extras[extra] if extra else self.part.function
        code = getattr(function, "__code__", None)
        line = f"{code.co_filename}:{code.co_firstlineno}" if code is not None else "an unknown line"
        return UserPartFailed(self.who(extra), self.place, f"{why} ({line})", describe(arguments))


_PARTS: dict[str, dict[str, ObjectivePart]] = {kind: {} for kind in get_args(Kind)}


def part(
    kind: Kind,
    name: str | None = None,
    *,
    options: type[BaseModel] | None = None,
    needs: Collection[str] | Callable[[Any], Collection[str]] = (),
    traits: Iterable[str] = (),
    **extras: Callable[..., Any],
) -> Callable[[F], F]:
    """Declare a function as a part; with a name, it is known by it.

    Args:
        options: its table of options (default: none with a name, any without).
        needs: some of `NEEDS`, or a function from the options to them.

    Raises:
        ValueError: an unknown need, or the name is taken.
    """
    declared = () if callable(needs) else needs
    if unknown := set(declared) - NEEDS:
        raise ValueError(f"unknown needs {sorted(unknown)}; there are {sorted(NEEDS)}")

    def wanted(table: Any) -> frozenset[str]:
        return frozenset(needs(table) if callable(needs) else needs)

    def declare(function: F) -> F:
        table = options or (NoOptions if name else FreeOptions)
        made = ObjectivePart(kind, name or function.__name__, function, table, wanted, extras, frozenset(traits))
        function.__dict__["algorithm_part"] = made
        if name is not None:
            if name in _PARTS[kind]:
                raise ValueError(f"there are two {kind} parts called {name}")
            _PARTS[kind][name] = made
        return function

    return declare


@cache
def _load_families() -> None:
    for family in FAMILIES:
        importlib.import_module(f"relax_rt.roles.training.algorithms.{family}")


def parts(kind: Kind) -> Mapping[str, ObjectivePart]:
    """The parts of a kind that have a name, by it."""
    _load_families()
    return _PARTS[kind]


def bind(
    kind: Kind, given: str | Mapping[str, Any], place: KeyPath, *, base: Path = Path(), defaults: Mapping[str, Any]
) -> BoundPart | list[Problem]:
    """The part that a config names, with its options; or what is wrong with it.

    Args:
        given: a name or an import path (`file.py:function`, `package.module:function`), or a table with `name` and
            options.
        place: the key in roles.toml.
        base: what a relative file is relative to.
        defaults: options of these names that the table does not give; other names are ignored.
    """
    table = {"name": given} if isinstance(given, str) else dict(given)
    name = table.pop("name", None)
    if not isinstance(name, str):
        return [Problem(place, f"it must say which {kind}: name = …", f"known: {', '.join(parts(kind))}")]
    found = _find(kind, name, place, base)
    if isinstance(found, Problem):
        return [found]
    for key, value in defaults.items():
        if key in found.options.model_fields:
            table.setdefault(key, value)
    options = validate(found.options, table, place)
    target = "" if name in parts(kind) else name
    return options if isinstance(options, list) else BoundPart(found, options, place, target)


def _find(kind: Kind, name: str, place: KeyPath, base: Path) -> ObjectivePart | Problem:
    known = parts(kind)
    if name in known:
        return known[name]
    if ":" not in name:
        elsewhere = [other for other in get_args(Kind) if name in _PARTS[other]]
        hint = f"the name is of kind {elsewhere[0]}" if elsewhere else did_you_mean(name, known)
        hint = hint or f'known: {", ".join(known)}; your own is named by "file.py:function"'
        return Problem(place, f"there is no {kind} called '{name}'", hint)
    try:
        function = load_target(name, base)
    except TargetError as error:
        return Problem(place, error.what + (f": {error.why}" if error.why else ""), error.hint)
    made = getattr(function, "algorithm_part", None)
    if isinstance(made, ObjectivePart):
        if made.kind != kind:
            return Problem(place, f"{name} is declared as a {made.kind}, not as a {kind}")
        return made
    if not callable(function):
        return Problem(place, f"{name} is a {type(function).__name__}, not a function")
    return ObjectivePart(kind, name, function, FreeOptions, lambda _: frozenset(), {}, frozenset())
