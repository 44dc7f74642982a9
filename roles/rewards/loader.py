"""The user's reward function: found, imported, and what it wants to be called with."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType
from typing import Any

import relax_rt
from relax_rt.config.target import TargetError, load_target
from relax_rt.roles.data.items import answer_text
from relax_rt.transport.rpc.errors import RelaxError

SETTING = "reward.function"
OWN_CODE = (str(Path(relax_rt.__file__).parent), str(Path(relax_rt.__file__).parent.resolve().parent / "roles"))
"""Files of the runtime: a traceback is told from the user's side."""


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


class UnreadGold(ValueError):
    """The right answer of an item cannot be read, so that no completion can be compared with it."""

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
            if other := _other_trainer([p.name for p in parameters]):
                why, hint = f"{why}, as {other[0]} has them", other[1]
            raise RelaxError(wrong, why=why, hint=hint)
        self.text_answer = parameters[1].annotation in (str, "str")
        self._taken = frozenset(p.name for p in parameters[:2])
        rest = [p for p in parameters[2:] if p.kind is not kinds.VAR_POSITIONAL]
        named = [p for p in rest if p.kind is not kinds.VAR_KEYWORD]
        needs = frozenset(p.name for p in named if p.default is kinds.empty)
        takes_all = len(named) < len(rest)
        return (None if takes_all else frozenset(p.name for p in named)), needs

    def call(self, completion: str | list[str], answer: Any, info: dict[str, Any]) -> Any:
        """Call it with what it wants of `info`; an async one gives its awaitable. One that scores groups gets a list.

        Raises:
            RelaxError: it wants information that there is not. Whatever the function itself raises passes through.
        """
        if lacking := self.needs - info.keys():
            raise RelaxError(
                f"{self.setting} = {self.target!r}",
                why=f"it wants {', '.join(sorted(lacking))}, and there is {_listed(info)}",
                hint="give the parameter a default, or name another",
            )
        # A column of the data may have the name of one of the first two parameters.
        wanted = info.keys() - self._taken if self.wants is None else self.wants & info.keys()
        given = answer_text(answer) if self.text_answer else answer
        return self.function(completion, given, **{name: info[name] for name in wanted})


def _other_trainer(names: Collection[str]) -> tuple[str, str] | None:
    """The trainer that functions with these parameters are written for, and how to write them here."""
    if not {"prompts", "completions"}.isdisjoint(names):
        return "TRL", TRL_HINT
    if not {"data_source", "solution_str"}.isdisjoint(names):
        return "verl", VERL_HINT
    return None


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def load_reward(target: str, config_dir: Path, setting: str = SETTING) -> RewardFunction:
    """The function that a setting names. The file's folder is appended to sys.path, so it shadows nothing.

    Raises:
        RelaxError: it is not there, cannot be imported (with the user's line), or cannot be called as a reward.
    """
    if ":" not in target and not target.endswith(".py"):
        from relax_rt.roles.rewards.registry import made, names

        if target in names():
            return made(target, {}, setting)
    try:
        return RewardFunction(load_target(target, config_dir), target, setting)
    except TargetError as error:
        where = f" at {user_line(error.__cause__)}" if error.__cause__ is not None else ""
        why = error.what + (f": {error.why}" if error.why else "") + where
        raise RelaxError(f"{setting} = {target!r}", why=why, hint=error.hint) from error


def user_line(error: BaseException) -> str:
    """`file:line` of the innermost frame outside the runtime and the standard library's import machinery."""
    frames = [
        frame for frame in _frames(error.__traceback__) if not frame.filename.startswith(("<frozen", OWN_CODE[0]))
    ]
    frames = [frame for frame in frames if not frame.filename.startswith(OWN_CODE[1])]
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    # The deepest frame in a library says less than the line of the user's own code that went there.
    own = [frame for frame in frames if "site-packages" not in frame.filename and "/lib/python" not in frame.filename]
    chosen = (own or frames)[-1:]
    return f"{chosen[0].filename}:{chosen[0].lineno}" if chosen else "an unknown line"


def _frames(trace: TracebackType | None) -> list[traceback.FrameSummary]:
    return list(traceback.extract_tb(trace))
