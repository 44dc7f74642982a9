"""The table [cold_start] of roles.toml."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from relax_rt.config.schema import Filled, Table
from relax_rt.roles.training.algorithms.settings import Schedule


class ColdStartTable(Table):
    """Supervised or preference training of the policy before its first RL step; there is none without `path` or
    `answers`. The optimizer's other settings are those of [algorithm]."""

    kind: Literal["sft", "dpo"] = "sft"
    """sft: the likelihood of given completions. dpo: preferences between two completions of a prompt."""
    path: Filled | None = None
    """A .jsonl or .parquet file, relative to the config file. sft: rows of `messages` that end with the assistant's, or
    of `prompt` and `completion`; dpo: rows of `prompt` or `messages`, `chosen` and `rejected`."""
    answers: bool = False
    """In place of `path`: the run's own training prompts, completed with their answers (sft)."""
    completion: str = "{answer}"
    """With `answers`: the completion; {answer}, {question} and keys of the metadata are filled in."""
    steps: Annotated[int, Field(ge=1, le=999_999)] | None = None
    """Optimizer steps."""
    epochs: Annotated[int, Field(ge=1, le=1000)] | None = None
    """In place of `steps`: passes over the data; with neither it is one."""
    batch: Annotated[int, Field(ge=1, le=65_536)] = 32
    """Sequences of one step, of dpo pairs."""
    batch_tokens: Annotated[int, Field(ge=1)] | None = None
    """In place of `batch`: as many sequences as have at most so many tokens together, prompts included."""
    learning_rate: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the rate rises from 0."""
    learning_rate_schedule: Schedule = "constant"
    """As in [algorithm], over the steps of this phase: constant, linear, cosine."""
    learning_rate_floor: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of linear and cosine: the rate that they go down to."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    max_tokens: Annotated[int, Field(ge=2)] = 2048
    """Longest sequence, prompt included."""
    overlong: Literal["drop", "error"] = "drop"
    """What becomes of a longer one."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of the data, by hash of the question, that is not trained on but validated with; 0: none."""
    validate_every: Annotated[int, Field(ge=0)] = 0
    """Validate every so many steps, besides before the first and after the last one."""
    validation_items: Annotated[int, Field(ge=1, le=100_000)] = 256
    """Sequences (pairs) used for that, at most."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 50
    """Steps after which its state is saved: what is lost when the trainer dies within it."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """How strongly dpo holds the policy to the weights that it begins with."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Probability that a preference of dpo is the wrong way round."""

    @property
    def wanted(self) -> bool:
        """Whether the run has a cold start."""
        return self.answers or self.path is not None
