"""The table [data] of roles.toml: the prompts of a run."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from relax_rt.config.schema import Filled, Table
from relax_rt.roles.data.columns import Form


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
    """Prompts. Exactly one of `task` (reasoning-gym), `path` and `sources` is given (docs/data.md)."""

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
    """Of a rendered prompt; `overlong` says what becomes of longer ones."""
    overlong: Literal["drop", "truncate_left", "error"] = "drop"
    """What becomes of a prompt with more tokens. truncate_left leaves out its oldest exchanges, then the beginning of
    the last question; system message and marks of turns stay, and a prompt that is too long even so is dropped."""
