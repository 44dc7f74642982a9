"""Prompts and verifiers of reasoning-gym."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator
from typing import Any

import msgspec

from relax_rt.roles.data.items import RawItem
from relax_rt.transport.errors import RelaxError

DEFAULT_SEED = 0
"""Items do not depend on the run's seed, so that runs with different seeds train and evaluate on the same questions."""


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
        if task not in DATASETS:
            close = difflib.get_close_matches(task, list(DATASETS), n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {len(DATASETS)}, as chain_sum"
            raise RelaxError(f"data.task = {task!r}", why="reasoning-gym has no such task", hint=hint)
        self._check_options(options, DATASETS[task][1])
        try:
            self.dataset = reasoning_gym.create_dataset(task, **({"seed": DEFAULT_SEED} | options | {"size": size}))
        except (AssertionError, TypeError, ValueError) as error:
            raise RelaxError(f"data.options of task {task!r}", why=f"{error}") from error

    def _check_options(self, options: dict[str, Any], config: Any) -> None:
        known = [field.name for field in dataclasses.fields(config) if field.name != "size"]
        for name in options:
            if name == "size":
                raise RelaxError("data.options.size", why="the number of items is data.size", hint="set data.size")
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else "options are " + ", ".join(known)
                raise RelaxError(f"data.options.{name}", why=f"task {self.task!r} has no such option", hint=hint)

    def items(self) -> Iterator[RawItem]:
        """The task's items in order, duplicates included."""
        for index in range(len(self.dataset)):
            entry = self.dataset[index]
            metadata = plain(entry["metadata"]) | {"source_index": index}
            yield RawItem(
                question=str(entry["question"]),
                answer="" if entry["answer"] is None else str(entry["answer"]),
                metadata=metadata,
                where=f"{self.task}[{index}]",
            )

    def score(self, answer: str, metadata: dict[str, Any]) -> float:
        """The task's own verdict on an answer, 0 to 1. The entry is made again from its index: metadata that has
        crossed the wire may have lost types that the verifier wants."""
        return float(self.dataset.score_answer(answer, entry=self.dataset[metadata["source_index"]]))


def plain(value: Any) -> Any:
    """The value as JSON-like data (str for what has no such form), so that it comes out of the wire as it went in."""
    return _with_lists(msgspec.to_builtins(value, str_keys=True, enc_hook=str))


def _with_lists(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_with_lists(one) for one in value]
    return {key: _with_lists(one) for key, one in value.items()} if isinstance(value, dict) else value
