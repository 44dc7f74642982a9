"""Reward functions: what users' functions look like, and the registry of named rewards with their options.

A user's function is found by its target and imported here. A named reward is declared by a module of this folder, which
says how its function is made of a table of options, and where that function runs.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from relax_rt.config.problems import KeyPath, Problem, dotted
from relax_rt.config.schema import Table
from relax_rt.config.target import TargetError, load_target
from relax_rt.config.validation import validate
from relax_rt.roles.base.user_code import user_line
from relax_rt.roles.data.items import answer_text
from relax_rt.transport.rpc.errors import RelaxError, did_you_mean

SETTING = "reward.function"
COMPLETIONS = ("completions", "solution_str")
"""Names of the completion in other trainers. A second parameter of such a name is not the answer."""
TRL_HINT = """it is called for one completion at a time: def score(completion: str, answer: str, **info) -> float
  completions, a list  ->  completion, one text
  prompts              ->  question, a parameter of this name or info["question"]
  other columns        ->  parameters of their names, or info["column"]: the value of this prompt, no list
to compare the completions of a prompt: group = true, def score(completions, answer, **info) -> list[float]"""
VERL_HINT = """write def score(completion: str, answer: str, **info) -> float
  solution_str             ->  completion
  ground_truth             ->  answer
  data_source, extra_info  ->  parameters of these names, or info["data_source"], info["extra_info"]"""


class UnreadableAnswer(ValueError):
    """The right answer of an item cannot be read, so no completion can be compared with it."""

    def __init__(self, answer: Any, why: str) -> None:
        super().__init__(f"the answer {answer!r:.80} cannot be read: {why}")


class RewardFunction:
    """A reward function and its signature.

    Attributes:
        target: as written in `reward.function`, or where `setting` says.
        is_async: whether calling it gives an awaitable.
        wants: names of information it takes besides completion and answer; None: everything (`**info`).
        needs: those of `wants` without a default.
        text_answer: whether the answer is annotated as `str`: one of another JSON type is given as text then.
    """

    def __init__(self, function: Callable[..., Any], target: str, setting: str = SETTING) -> None:
        self.function, self.target, self.setting = function, target, setting
        if not callable(function):
            raise RelaxError(f"{setting} = {target!r}", why=f"it is a {type(function).__name__}, not a function")
        call = function if inspect.isroutine(function) or inspect.isclass(function) else type(function).__call__
        self.is_async = inspect.iscoroutinefunction(call)
        self.text_answer = False
        self._taken: frozenset[str] = frozenset()
        self.wants, self.needs = self._read_signature()

    def _read_signature(self) -> tuple[frozenset[str] | None, frozenset[str]]:
        wrong = f"{self.setting} = {self.target!r}"
        try:
            parameters = list(inspect.signature(self.function).parameters.values())
        except (TypeError, ValueError) as error:
            raise RelaxError(wrong, why=f"its signature cannot be read: {error}") from error
        kinds = inspect.Parameter
        if any(p.kind is kinds.VAR_POSITIONAL for p in parameters[:2]):
            return frozenset(), frozenset()
        positional = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        bad = len(parameters) < 2 or any(p.kind not in positional for p in parameters[:2])
        if bad or parameters[1].name in COMPLETIONS:
            why = f"its parameters are {inspect.Signature(parameters)}"
            hint = "it is called as f(completion, answer, **info)"
            names = {p.name for p in parameters}
            if names & {"prompts", "completions"}:
                why, hint = f"{why}, as TRL has them", TRL_HINT
            elif names & {"data_source", "solution_str"}:
                why, hint = f"{why}, as verl has them", VERL_HINT
            raise RelaxError(wrong, why=why, hint=hint)
        self.text_answer = parameters[1].annotation in (str, "str")
        self._taken = frozenset(p.name for p in parameters[:2])
        rest = [p for p in parameters[2:] if p.kind is not kinds.VAR_POSITIONAL]
        named = [p for p in rest if p.kind is not kinds.VAR_KEYWORD]
        needs = frozenset(p.name for p in named if p.default is kinds.empty)
        takes_all = len(named) < len(rest)
        return (None if takes_all else frozenset(p.name for p in named)), needs

    def call(self, completion: str | list[str], answer: Any, info: dict[str, Any]) -> Any:
        """Call it with the information it asks for; an async one returns its awaitable, one for groups gets lists.

        Raises:
            RelaxError: it asks for information that there is not. Whatever the function itself raises passes through.
        """
        if lacking := self.needs - info.keys():
            raise RelaxError(
                f"{self.setting} = {self.target!r}",
                why=f"it wants {', '.join(sorted(lacking))}, and there is {', '.join(sorted(info)) or 'nothing'}",
                hint="give the parameter a default, or name another",
            )
        # A column of the data may have the name of one of the first two parameters.
        wanted = info.keys() - self._taken if self.wants is None else self.wants & info.keys()
        given = answer_text(answer) if self.text_answer else answer
        return self.function(completion, given, **{name: info[name] for name in wanted})


def load_reward(target: str, config_dir: Path, setting: str = SETTING) -> RewardFunction:
    """Load the function that a setting names. The file's folder is appended to sys.path, so it shadows nothing.

    Raises:
        RelaxError: it is not there, cannot be imported (with the user's line), or cannot be called as a reward.
    """
    if ":" not in target and not target.endswith(".py") and target in rewards():
        return make_function(target, {}, setting)
    try:
        return RewardFunction(load_target(target, config_dir), target, setting)
    except TargetError as error:
        where = f" at {user_line(error.__cause__)}" if error.__cause__ is not None else ""
        why = error.what + (f": {error.why}" if error.why else "") + where
        raise RelaxError(f"{setting} = {target!r}", why=why, hint=error.hint) from error


RunsIn = Literal["inline", "worker"]
"""inline: in the process that scores, for what takes no time or awaits. worker: in one that can be killed, for what may
take forever."""
FAMILIES = ("answers", "choices", "forms", "maths", "code", "remote")


class NoRewardOptions(Table):
    """A reward without options."""


@dataclass(frozen=True, slots=True)
class Reward:
    """A named reward.

    Attributes:
        make: from the options to the function, f(completion, answer, **info).
        check: from the options to what is wrong with them, as (key, message, hint).
        gold: from the right answer to a completion that must get 1; None: the reward does not compare with the answer.
    """

    name: str
    options: type[Table]
    runs_in: RunsIn
    make: Callable[[Any], Callable[..., Any]]
    check: Callable[[Any], list[tuple[str, str, str]]]
    gold: Callable[[Any], str] | None = None


_REWARDS: dict[str, Reward] = {}
M = TypeVar("M", bound=Callable[[Any], Callable[..., Any]])


def reward(
    name: str,
    *,
    options: type[Table] = NoRewardOptions,
    runs_in: RunsIn = "inline",
    check: Callable[[Any], list[tuple[str, str, str]]] = lambda options: [],
    gold: Callable[[Any], str] | None = None,
) -> Callable[[M], M]:
    """Register what makes a reward's function of its options."""

    def register(make: M) -> M:
        if name in _REWARDS:
            raise ValueError(f"there are two rewards called {name}")
        _REWARDS[name] = Reward(name, options, runs_in, make, check, gold)
        return make

    return register


def rewards() -> Mapping[str, Reward]:
    """Return all named rewards."""
    for family in FAMILIES:
        importlib.import_module(f"relax_rt.roles.rewards.library.{family}")
    return _REWARDS


def read_options(name: str, given: Mapping[str, Any], path: KeyPath, key: str = "name") -> Table | list[Problem]:
    """Return the options of a named reward, or everything that is wrong with them.

    Args:
        path: the table that gives them. key: of the name in that table.
    """
    found = rewards().get(name)
    if found is None:
        hint = did_you_mean(name, rewards())
        hint = hint or f'known: {", ".join(rewards())}; your own is function = "file.py:function"'
        return [Problem((*path, key), f"there is no reward called '{name}'", hint)]
    options = validate(found.options, dict(given), path)
    if isinstance(options, list):
        return options
    wrong = found.check(options)
    return [Problem((*path, at), f"{dotted((*path, at))}: {message}", hint) for at, message, hint in wrong] or options


def make_function(name: str, given: Mapping[str, Any], setting: str = SETTING) -> RewardFunction:
    """Return the function of a named reward.

    Raises:
        RelaxError: there is none of that name, or its options are wrong.
    """
    options = read_options(name, given, ("reward",))
    if isinstance(options, list):
        raise RelaxError(f"{setting} = {name!r}", why="; ".join(p.message for p in options), hint=options[0].hint)
    return RewardFunction(rewards()[name].make(options), name, setting)
