"""Load the environment that `roles.env.environment` names, and check its methods and options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from relax_rt.config.target import TargetError, load_target
from relax_rt.roles.agentic.interface import OPTIONS, refuse_unknown_option
from relax_rt.roles.agentic.program import Program, load_program
from relax_rt.roles.agentic.settings import PROGRAM
from relax_rt.roles.base.user_code import user_line
from relax_rt.transport.rpc.errors import RelaxError, did_you_mean

SETTING = "roles.env.environment"
ADAPTERS = ("textarena", "gymnasium", "reasoning_gym")
"""Packages whose environments are named as `package:name`; each has a module in `adapters`."""
PROGRAMS = ("verifiers",)
"""Packages whose environments run a loop of their own against an endpoint."""
METHODS = ("reset", "step")


@dataclass(frozen=True)
class EnvironmentFactory:
    """Creates environments.

    Attributes:
        target: as written in the config.
        make: returns a new environment; or, if `plays`, the function with its options.
        blocking: its methods are not async: they run in worker processes.
        plays: it is a function that plays the episode.
        seats: of the policy in one game, each an episode of its own.
        program: a program that plays the episode; then nothing is created.
    """

    target: str
    make: Callable[[], Any]
    blocking: bool
    plays: bool = False
    seats: int = 1
    program: Program | None = None


def load_factory(target: str, options: Mapping[str, Any], config_dir: Path) -> EnvironmentFactory:
    """Load the environment that the config names.

    Raises:
        RelaxError: it is not there, cannot be imported (with the user's line), has no reset or step, or does not take
            an option.
    """
    package, _, name = target.partition(":")
    if package == PROGRAM:
        program = load_program(name, options, config_dir)
        return EnvironmentFactory(target, lambda: None, blocking=False, plays=True, program=program)
    if package in ADAPTERS:
        return _adapted(package, name, options)
    if package in PROGRAMS:
        why = f"{package} has no adapter: its environments drive an OpenAI endpoint themselves, with an older client"
        hint = 'have a script of yours play it, with that endpoint\'s base URL: environment = "program:python mine.py"'
        raise RelaxError(f"{SETTING} = {target!r}", why=why, hint=f"{hint} (docs/guides/programs.md)")
    try:
        found = load_target(target, config_dir)
    except TargetError as error:
        raise _not_loaded(target, error) from error
    if inspect.isclass(found):
        return _of_class(target, found, options)
    if inspect.iscoroutinefunction(found):
        check_options(target, found, options, skip=2)
        return EnvironmentFactory(target, lambda: partial(found, **options), blocking=False, plays=True)
    why = f"it is a {type(found).__name__}"
    hint = "name a class with reset and step, or a function `async def play(task, chat)`"
    raise RelaxError(f"{SETTING} = {target!r}", why=why, hint=hint)


def _of_class(target: str, found: type, options: Mapping[str, Any]) -> EnvironmentFactory:
    lacking = [name for name in METHODS if not callable(getattr(found, name, None))]
    if lacking:
        known = [name for name in vars(found) if not name.startswith("_")]
        hint = did_you_mean(lacking[0], known) or "see relax_rt.roles.agentic.Environment"
        raise RelaxError(f"{SETTING} = {target!r}", why=f"the class has no {' and no '.join(lacking)}", hint=hint)
    kinds = {name: inspect.iscoroutinefunction(getattr(found, name)) for name in METHODS}
    if len(set(kinds.values())) > 1:
        one, other = sorted(METHODS, key=lambda name: not kinds[name])
        raise RelaxError(
            f"{SETTING} = {target!r}", why=f"{one} is async and {other} is not", hint="make both async, or neither"
        )
    check_options(target, found, options)
    seats = getattr(found, "seats", 1)
    if not isinstance(seats, int) or seats < 1:
        raise RelaxError(f"{SETTING} = {target!r}", why=f"its seats are {seats!r:.40}", hint="a number from 1 on")
    return EnvironmentFactory(target, lambda: found(**options), blocking=not kinds["step"], seats=seats)


def _adapted(package: str, name: str, options: Mapping[str, Any]) -> EnvironmentFactory:
    try:
        adapter = import_module(f"relax_rt.roles.agentic.adapters.{package}")
    except ImportError as error:
        hint = "pip install relax-rt[agentic]"
        raise RelaxError(f"{SETTING} = '{package}:{name}'", why=str(error), hint=hint) from error
    make: Callable[[], Any] = adapter.factory(name, dict(options))
    seats = adapter.seats(options) if hasattr(adapter, "seats") else 1
    return EnvironmentFactory(f"{package}:{name}", make, blocking=True, seats=seats)


def check_options(target: str, call: Callable[..., Any], options: Mapping[str, Any], *, skip: int = 0) -> None:
    """Check options against the parameters of a class or function.

    Args:
        skip: number of leading parameters that are not options.

    Raises:
        RelaxError: one is unknown, or one that has no default is missing.
    """
    try:
        parameters = list(inspect.signature(call).parameters.values())
    except (TypeError, ValueError):
        return
    kinds = inspect.Parameter
    if len(parameters) < skip:
        why, hint = f"it takes {len(parameters)} parameters", "it is called as play(task, chat, **options)"
        raise RelaxError(f"{SETTING} = {target!r}", why=why, hint=hint)
    named = {p.name: p for p in parameters[skip:] if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)}
    if not any(p.kind is kinds.VAR_KEYWORD for p in parameters):
        for name in options:
            refuse_unknown_option(target, name, list(named))
    for name, parameter in named.items():
        if parameter.default is kinds.empty and name not in options:
            raise RelaxError(OPTIONS, why=f"{target} needs '{name}'", hint="give it there")


def _not_loaded(target: str, error: TargetError) -> RelaxError:
    package, _, name = target.partition(":")
    where = f" at {user_line(error.__cause__)}" if error.__cause__ is not None else ""
    why = error.what + (f": {error.why}" if error.why else "") + where
    near = did_you_mean(package, (*ADAPTERS, PROGRAM, *PROGRAMS)) if name and not package.endswith(".py") else ""
    return RelaxError(f"{SETTING} = {target!r}", why=why, hint=near or error.hint)
