"""Prompts and verifiers of reasoning-gym."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib.util
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from relax_rt.roles.data.items import RawItem
from relax_rt.transport.rpc.errors import RelaxError

DEFAULT_SEED = 0
"""Items do not depend on the run's seed, so that runs with different seeds train and evaluate on the same questions."""
REGISTERED = re.compile(r"register_dataset\(\s*(?:\"(\w+)\"|DATASET_NAME),\s*\w+,\s*(\w+)")
DATASET_NAME = re.compile(r"^DATASET_NAME = \"(\w+)\"", re.MULTILINE)


class TaskFault(NamedTuple):
    """What is wrong with a task of a config: `key` below the table that names it is `task`, or `options` and a name."""

    key: tuple[str, ...]
    why: str
    hint: str


def find_fault(task: str, options: Mapping[str, Any], table: str) -> TaskFault | None:
    """Find a task or option that the installed reasoning-gym does not have; None: nothing is wrong, or it cannot be
    told.

    Importing reasoning-gym takes seconds, searching its source 20 ms. A fault found in the source is not certain,
    because a regular expression reads it: reasoning-gym is imported then and decides.

    Args:
        table: dotted key of the table that names the task.
    """
    declared = _registered_tasks()
    if not declared or _fault(task, options, table, declared, lambda: _declared_fields(*declared[task])) is None:
        return None
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError:
        return None
    return _fault(task, options, table, DATASETS, lambda: _fields(DATASETS[task][1]))


@cache
def _registered_tasks() -> dict[str, tuple[str, str]]:
    """Map each task that the source of reasoning-gym registers to its module's text and the name of its config."""
    spec = importlib.util.find_spec("reasoning_gym")
    declared = {}
    for folder in (spec and spec.submodule_search_locations) or ():
        for file in Path(folder).rglob("*.py"):
            try:
                source = file.read_text("utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            for found in REGISTERED.finditer(source):
                if named := found if found[1] else DATASET_NAME.search(source):
                    declared[named[1]] = source, found[2]
    return declared


def _fields(config: type[Any]) -> list[str]:
    return [one.name for one in dataclasses.fields(config)]


def _declared_fields(source: str, name: str) -> list[str] | None:
    """Return the fields of a dataclass; None if it inherits some, or the source cannot be parsed."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name and not node.bases:
            return [
                one.target.id
                for one in node.body
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
            ]
    return None


def _fault(
    task: str, options: Mapping[str, Any], table: str, tasks: Collection[str], fields: Callable[[], list[str] | None]
) -> TaskFault | None:
    if task not in tasks:
        close = difflib.get_close_matches(task, list(tasks), n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {len(tasks)}, as chain_sum"
        return TaskFault(("task",), "reasoning-gym has no such task", hint)
    if "size" in options:
        return TaskFault(("options", "size"), f"the number of items is {table}.size", f"set {table}.size")
    known = [name for name in fields() or options if name != "size"]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "options are " + ", ".join(known)
            return TaskFault(("options", name), f"task {task!r} has no such option", hint)
    return None


class GymTask:
    """A reasoning-gym task with its options.

    Raises:
        RelaxError: reasoning-gym is not installed, there is no such task or option, or the task refuses a value.
    """

    def __init__(self, task: str, options: dict[str, Any], size: int) -> None:
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise RelaxError(
                f"data.task = {task!r}", why=str(error), hint="pip install reasoning-gym==0.1.25"
            ) from error
        self.task = task
        if fault := _fault(task, options, "data", DATASETS, lambda: _fields(DATASETS[task][1])):
            what = f"data.task = {task!r}" if fault.key == ("task",) else f"data.{'.'.join(fault.key)}"
            raise RelaxError(what, why=fault.why, hint=fault.hint)
        try:
            self.dataset = reasoning_gym.create_dataset(task, **({"seed": DEFAULT_SEED} | options | {"size": size}))
        except (AssertionError, TypeError, ValueError) as error:
            raise RelaxError(f"data.options of task {task!r}", why=f"{error}") from error

    def items(self) -> Iterator[RawItem]:
        """Yield the task's items in order, duplicates included."""
        for index in range(len(self.dataset)):
            entry = self.dataset[index]
            metadata = to_plain_values(entry["metadata"]) | {"source_index": index}
            yield RawItem(
                question=str(entry["question"]),
                answer="" if entry["answer"] is None else str(entry["answer"]),
                metadata=metadata,
                where=f"{self.task}[{index}]",
            )

    def score(self, answer: str, metadata: dict[str, Any]) -> float:
        """Return the task's own verdict on an answer, 0 to 1. The entry is made again from its index: metadata that has
        crossed the wire may have lost types that the verifier needs."""
        return float(self.dataset.score_answer(answer, entry=self.dataset[metadata["source_index"]]))


def to_plain_values(value: Any) -> Any:
    """Return the value as JSON-like data (str for what has no such form), so that it comes out of the wire as it went
    in."""
    return _with_lists(msgspec.to_builtins(value, str_keys=True, enc_hook=str))


def _with_lists(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_with_lists(one) for one in value]
    return {key: _with_lists(one) for key, one in value.items()} if isinstance(value, dict) else value
