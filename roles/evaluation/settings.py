"""The tables [evaluation], [[evaluation.sets]] and [roles.evaluator] of roles.toml."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from relax_rt.config.schema import Filled, Table
from relax_rt.roles.data.columns import Form
from relax_rt.roles.rollout.engines.settings import EngineSettings


class SampledTable(Table):
    """Sampling of held-out items, and the steps of evaluation during the run."""

    at_steps: list[Annotated[int, Field(ge=1)]] = Field(default_factory=list)
    """Steps to evaluate at during the run; the first version at or after each."""
    samples: Annotated[int, Field(ge=1, le=1024)] = 1
    """Completions of each item."""
    pass_at: list[Annotated[int, Field(ge=1)]] = Field(default_factory=list)
    """The k of pass@k, the probability that at least one of k completions is right. Empty: 1 and `samples`."""
    greedy: bool = False
    """Also complete each item once at temperature 0."""


class EvaluationSet(SampledTable):
    """A further held-out set. Exactly one of `task` and `path` is given; items that are trained on are excluded."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,40}$")]
    """Its name in records and the summary."""
    task: Filled | None = None
    """A reasoning-gym task."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the reasoning-gym task."""
    size: Annotated[int, Field(ge=1, le=10_000_000)] = 1000
    """Items drawn from the task; equal ones are dropped."""
    path: Filled | None = None
    """Rows as for `data.path`, relative to the config file."""
    columns: dict[str, str] | None = None
    """As `data.columns`; unset: those of [data]."""
    form: Form = "auto"
    """As `data.form`."""
    split: Filled | None = None
    """As `data.split`; it must be named where a folder has several."""
    system: str | None = None
    """System message; unset: data.system."""
    template: str | None = None
    """The user message; unset: data.template."""
    max_prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    """Drop longer prompts; unset: data.max_prompt_tokens."""
    reward: Filled | None = None
    """A function as `reward.function`, called within reward.timeout_s, that judges the completions. Unset: a completion
    is right if it is the answer and nothing else."""
    success: float = 0.5
    """With `reward`: a completion is right if its reward is above this."""
    items: Annotated[int, Field(ge=1)] = 256
    """Items evaluated before and after training."""
    during_items: Annotated[int, Field(ge=1)] | None = None
    """Items evaluated during training; unset: items."""
    every_steps: Annotated[int, Field(ge=0)] | None = None
    """Interval of evaluations in steps; unset: evaluation.every_steps."""
    temperature: Annotated[float, Field(ge=0, le=10)] | None = None
    """Sampling temperature; 0 is greedy. Unset: evaluation.temperature."""
    max_new_tokens: Annotated[int, Field(ge=1, le=131_072)] | None = None
    """Longest completion in tokens; unset: sampling.max_new_tokens."""


class EvaluationTable(SampledTable):
    """Held-out evaluation: before the first step, during, and after the last."""

    items: Annotated[int, Field(ge=1)] = 512
    """Held-out items evaluated before and after training."""
    every_steps: Annotated[int, Field(ge=0)] = 0
    """Interval of evaluations in steps; 0: only before and after."""
    during_items: Annotated[int, Field(ge=1)] = 256
    """Held-out items evaluated during training."""
    temperature: Annotated[float, Field(ge=0, le=10)] = 1.0
    """Sampling temperature; 0 is greedy."""
    sets: list[EvaluationSet] = Field(default_factory=list)
    """Further held-out sets, each an [[evaluation.sets]] of its own."""


class EvaluatorSettings(EngineSettings):
    """The evaluator."""

    count: Annotated[int, Field(ge=0, le=1)] = 1
