"""The table [data] of roles.toml: the prompts of a run."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from relax_rt.config.problems import KeyPath, Problem
from relax_rt.config.schema import Filled, Table
from relax_rt.roles.data.columns import TARGETS, Form


class DataSource(Table):
    """One of several sources of prompts."""

    path: Filled
    """A file, a folder of files, or a pattern with `*`, as for `data.path`. Relative to the config file."""
    name: Filled | None = None
    """Goes to the reward as `source` of the metadata, where a row has none."""
    weight: Annotated[float, Field(gt=0)] | None = None
    """Share of the prompts, relative to the weights of all sources; small sources are repeated. Unset in all sources:
    each row comes once per epoch."""
    columns: dict[str, str] | None = None
    """As `data.columns`; unset: those of [data]."""
    form: Form = "auto"
    """As `data.form`."""
    split: Filled | None = None
    """As `data.split`."""


class DataTable(Table):
    """Prompts. Exactly one of `task` (reasoning-gym), `path` and `sources` is given (docs/guides/data.md)."""

    task: Filled | None = None
    """A reasoning-gym task, as `chain_sum`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the reasoning-gym task."""
    size: Annotated[int, Field(ge=1, le=10_000_000)] = 20_000
    """Items drawn from the task; equal ones are dropped."""
    path: Filled | None = None
    """Rows of prompts: .jsonl (also .gz or .zst), .parquet or .arrow; a folder of such files, a folder that `datasets`
    saved, or a pattern with `*`. Relative to the config file."""
    sources: list[DataSource] = Field(default_factory=list)
    """Several sources, each a [[data.sources]] table, instead of `path`."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Map from prompt, messages, answer, metadata, tools or system to the column that holds it; a dot selects a nested
    field: { prompt = "question", answer = "reward_model.ground_truth" }. Other names become metadata. answer = "": rows
    have no answer."""
    form: Form = "auto"
    """The form of each row: prompt, openai, verl, trl, sharegpt; auto finds it out row by row."""
    split: Filled | None = None
    """Which split of a folder that has several; unset: train."""
    ignore: list[str] = Field(default_factory=list)
    """Columns that are neither used nor passed to the reward."""
    duplicates: Literal["drop", "keep"] = "drop"
    """Whether to drop or keep a row whose text, answer and metadata equal those of an earlier row."""
    system: str | None = None
    """System message put before each prompt that has none."""
    template: str = "{question}"
    """The user message; {question} is the item's question."""
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of the questions held out for evaluation, chosen by hash of the canonical question, never by seed."""
    shuffle: bool = True
    """Shuffle the training prompts in each epoch, by the run's seed."""
    epochs: Annotated[int, Field(ge=1)] | None = None
    """End the run after so many passes over the training prompts (default: as many as the steps need)."""
    max_prompt_tokens: Annotated[int, Field(ge=1)] = 512
    """Maximum tokens of a rendered prompt; `overlong` says how longer ones are handled."""
    overlong: Literal["drop", "truncate_left", "error"] = "drop"
    """How to handle a longer prompt. truncate_left removes its oldest exchanges, then the beginning of the last
    question; the system message and turn markers stay, and a prompt that is still too long is dropped."""

    def problems(self, path: KeyPath) -> Iterator[Problem]:
        """Refuse columns, sources and options that cannot be meant."""
        yield from self._column_problems(path)
        if len({one.weight is None for one in self.sources}) > 1:
            message = "some sources have a weight and others have none"
            yield Problem((*path, "sources"), message, "give each its weight, or none")
        names = [one.name for one in self.sources if one.name is not None]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield Problem((*path, "sources"), f"two sources have the name {name!r}", "give each its own")
        given = [name for name in ("path", "sources") if getattr(self, name)]
        for key in ("options", "size"):
            if self.task is None and given and key in self.model_fields_set:
                message = f"{key} belongs to a reasoning-gym task; with {given[0]} it has no effect"
                yield Problem((*path, key), message, at="key")
        for key in ("columns", "form", "split", "ignore"):
            if self.task is not None and key in self.model_fields_set:
                yield Problem((*path, key), f"{key} is about rows of files; with task it has no effect", at="key")
        if "{" not in self.template.replace("{{", ""):
            message = "the template names no field of the item, so that all prompts would be the same"
            yield Problem((*path, "template"), message, 'put in {question}, as "Q: {question}"')

    def _column_problems(self, path: KeyPath) -> Iterator[Problem]:
        """Report misspelt targets, and columns without a name."""
        tables: list[tuple[KeyPath, dict[str, str]]] = [((*path, "columns"), self.columns)]
        tables += [((*path, "sources", at, "columns"), one.columns or {}) for at, one in enumerate(self.sources)]
        for place, columns in tables:
            if "prompt" in columns and "messages" in columns:
                yield Problem(place, "prompt and messages are both mapped: a row has one of them", "leave one out")
            for target, column in columns.items():
                if target not in TARGETS and (meant := difflib.get_close_matches(target, TARGETS, n=1, cutoff=0.75)):
                    yield Problem(place, f"{target!r} is no column of a prompt", f"did you mean {meant[0]!r}?")
                if not column and target != "answer":
                    hint = 'give its name; only answer = "" means none'
                    yield Problem(place, f"{target!r} is mapped to no column", hint)
