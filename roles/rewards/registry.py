"""Rewards that have a name: a table of options, from which their function is made, and where that runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeVar

from relax_rt.config.problems import KeyPath, Problem, dotted
from relax_rt.config.schema import Table
from relax_rt.config.validation import validate
from relax_rt.roles.rewards.loader import SETTING, RewardFunction
from relax_rt.transport.base.targets import did_you_mean
from relax_rt.transport.rpc.errors import RelaxError

Place = Literal["inline", "worker"]
"""inline: in the process that scores, for what takes no time or awaits. worker: in one that can be killed, for what may
take for ever."""
FAMILIES = ("answers", "choices", "forms", "maths", "code", "remote")


class NoOptions(Table):
    """A reward without options."""


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward that can be named.

    Attributes:
        make: from the options to the function, f(completion, answer, **info).
        check: from the options to what is wrong with them, as (key, message, hint).
        gold: from the right answer to a completion that must get 1; None: the reward does not compare with the answer.
    """

    name: str
    options: type[Table]
    place: Place
    make: Callable[[Any], Callable[..., Any]]
    check: Callable[[Any], list[tuple[str, str, str]]]
    gold: Callable[[Any], str] | None = None


_REWARDS: dict[str, Reward] = {}
M = TypeVar("M", bound=Callable[[Any], Callable[..., Any]])


def reward(
    name: str,
    *,
    options: type[Table] = NoOptions,
    place: Place = "inline",
    check: Callable[[Any], list[tuple[str, str, str]]] = lambda options: [],
    gold: Callable[[Any], str] | None = None,
) -> Callable[[M], M]:
    """Declare what makes a reward's function of its options."""

    def declare(make: M) -> M:
        if name in _REWARDS:
            raise ValueError(f"there are two rewards called {name}")
        _REWARDS[name] = Reward(name, options, place, make, check, gold)
        return make

    return declare


@cache
def _load_families() -> None:
    for family in FAMILIES:
        importlib.import_module(f"relax_rt.roles.rewards.library.{family}")


def rewards() -> Mapping[str, Reward]:
    """All, by name."""
    _load_families()
    return _REWARDS


def names() -> list[str]:
    """Of all rewards."""
    return list(rewards())


def find(name: str, place: KeyPath) -> Reward | Problem:
    """The reward of a name, or that there is none."""
    if (found := rewards().get(name)) is not None:
        return found
    hint = did_you_mean(name, rewards()) or f'known: {", ".join(rewards())}; your own is function = "file.py:function"'
    return Problem(place, f"there is no reward called '{name}'", hint)


def bind(name: str, given: Mapping[str, Any], place: KeyPath, key: str = "name") -> Table | list[Problem]:
    """The options of a named reward, or all that is wrong with them.

    Args:
        place: the table that gives them. key: where in it the name stands.
    """
    found = find(name, (*place, key))
    if isinstance(found, Problem):
        return [found]
    options = validate(found.options, dict(given), place)
    if isinstance(options, list):
        return options
    wrong = found.check(options)
    return [Problem((*place, at), f"{dotted((*place, at))}: {message}", hint) for at, message, hint in wrong] or options


def made(name: str, given: Mapping[str, Any], setting: str = SETTING) -> RewardFunction:
    """The function of a named reward.

    Raises:
        RelaxError: there is none of that name, or its options are wrong.
    """
    options = bind(name, given, ("reward",))
    if isinstance(options, list):
        raise RelaxError(f"{setting} = {name!r}", why="; ".join(p.message for p in options), hint=options[0].hint)
    return RewardFunction(rewards()[name].make(options), name, setting)
