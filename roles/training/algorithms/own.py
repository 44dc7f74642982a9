"""Parts that are a user's own code: what they raise or wrongly return ends the run, with what to mend.

Such a part is a function of its arguments: begun again, the trainer would come to the same end, and each of its deaths
would count against the prompts in its hands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from relax_rt.config.problems import BadInput, KeyPath, dotted
from relax_rt.supervision.diagnosis import classify_exception

MEND = "mend it there; `relax-rt up` goes on from the last checkpoint"
MEND_CALLED = "mend it there; `relax-rt validate` calls it, and `relax-rt up` goes on from the last checkpoint"
ONLY_LOADED = ("filter", "sampler")
"""Kinds of parts that no dry run calls."""
MOST_CHARS = 600
"""Of what is said of the arguments."""
SHOWN_CHARS = 40


class OwnPartFailed(BadInput):
    """A user's own part raised, or returned what it may not (`raised` says which)."""

    def __init__(self, who: str, place: KeyPath, why: str, on: str, *, raised: bool = False) -> None:
        self.who, self.place, self.told, self.raised = who, place, f"{why}; it was given {on}", raised
        hint = MEND if who.startswith(ONLY_LOADED) else MEND_CALLED
        super().__init__(f"{who} ({dotted(place)})", why=self.told, hint=hint)


@contextmanager
def own_code(who: str, place: KeyPath, arguments: Sequence[Any]) -> Iterator[None]:
    """Around a call of a user's part.

    Args:
        who: as "loss 'mine.py:my_loss'". place: the key that names it.

    Raises:
        OwnPartFailed: it raised, or called sys.exit. What a lack of memory or the device makes it raise passes
            through: smaller micro-batches, or another start, may mend that.
    """
    from relax_rt.roles.base.user_code import user_line

    try:
        yield
    except OwnPartFailed:
        raise
    except (Exception, SystemExit) as error:
        # It may raise anything.
        if _of_the_machine(error):
            raise
        why = f"{type(error).__name__}: {error} at {user_line(error)}"
        raise OwnPartFailed(who, place, why, described(arguments), raised=True) from error


def _of_the_machine(error: BaseException) -> bool:
    from relax_rt.roles.training.budget import out_of_memory

    return classify_exception(error) in ("cuda", "oom") or out_of_memory(error)


def line_of(function: Callable[..., Any]) -> str:
    """`file:line` where it is defined."""
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else "an unknown line"


def described(arguments: Sequence[Any]) -> str:
    """Names, shapes and dtypes of arguments in a line."""
    text = ", ".join(_one(value) for value in arguments)
    return text if len(text) <= MOST_CHARS else text[: MOST_CHARS - 1] + "…"


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
    told = [f"{name} {_one(found)}" for name in names if (found := getattr(value, name)) is not None]
    return f"{type(value).__name__}({', '.join(told)})"
