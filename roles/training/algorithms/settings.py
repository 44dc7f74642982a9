"""The tables [algorithm], with its presets, and [cold_start].

A preset is a set of defaults of the other keys of [algorithm], each of which can be overridden. `grpo` is the table's
own defaults: group advantages by mean and standard deviation, decoupled clipping (samples may be older than the weights
that are trained), every token of the step counting alike. Bounds of a ratio to the proximal policy, which most of these
have, act where a step has several updates. A preset that sets one bound sets both: with another loss written beside it,
one would be the preset's and one that loss's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import Field, model_validator

from relax_rt.config.problems import KeyPath, Problem
from relax_rt.config.schema import Filled, Seconds, Table

Name = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "sapo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "ppo",
    "decoupled_ppo",
    "m2po",
    "turn_grpo",
    "process_grpo",
    "gigpo",
    "distillation",
    "dpo",
    "sft",
]

PRESETS: Mapping[Name, Mapping[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"normalise_std": False, "aggregation": "fixed_length", "clip_low": 0.2, "clip_high": 0.2},
    "dapo": {"loss": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28, "aggregation": "token_mean"},
    # Bounds so narrow are for what the trainer's own updates do: an engine's rounding alone is beyond them. The paper's
    # experiments take four mini-batches from a batch (arXiv 2507.18071, section 5.1; from memory).
    "gspo": {
        "loss": {"name": "gspo", "ratio_to": "proximal"},
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "aggregation": "sequence_mean",
        "corrections": ["tis"],
        "updates_per_step": 4,
    },
    "cispo": {"loss": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    "sapo": {"loss": "sapo", "aggregation": "sequence_mean"},
    "rloo": {
        "advantage": "rloo",
        "loss": "policy_gradient",
        "aggregation": "fixed_length",
        "corrections": ["tis"],
    },
    "reinforce_pp": {"advantage": "reinforce_pp", "clip_low": 0.2, "clip_high": 0.2},
    "reinforce_pp_baseline": {"advantage": "reinforce_pp_baseline", "clip_low": 0.2, "clip_high": 0.2},
    "ppo": {"advantage": "gae", "clip_low": 0.2, "clip_high": 0.2},
    "decoupled_ppo": {"loss": "decoupled_ppo", "clip_low": 0.2, "clip_high": 0.2},
    "m2po": {"loss": "m2po"},
    "turn_grpo": {"advantage": "turn_grpo"},
    "process_grpo": {"advantage": "process_grpo"},
    "gigpo": {"advantage": "gigpo", "normalise_std": False},
    "distillation": {"advantage": "distillation", "loss": "policy_gradient", "corrections": ["tis"]},
    "dpo": {"advantage": "preference", "loss": "dpo", "aggregation": "pair_mean"},
    "sft": {"advantage": "none", "loss": "sft"},
}


class RefillOptions(Table):
    """How many groups a step may cost, with `filters`."""

    over_sample: Annotated[float, Field(ge=1, le=16)] = 1.0
    """Groups under way at once, by those still lacking; beside what the share of groups left out so far calls for."""
    most: Annotated[float, Field(ge=1, le=64)] = 10.0
    """A step is taken with what there is after this many times its groups were scored."""
    memory: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Weight of the past in the running share of groups that are kept."""


Mode = Literal["asynchronous", "colocate", "hybrid"]
SHARING: frozenset[Mode] = frozenset({"colocate", "hybrid"})
"""Modes in which engines and trainer have their device in turns."""
Schedule = Literal["constant", "linear", "cosine"]
"""Learning-rate schedules after the warm-up."""
Part = str | dict[str, Any]
"""A part of the objective: its name, `file.py:function` or `package.module:function`; or a table of `name` and options.
"""


class AlgorithmTable(Table):
    """The objective: a preset, each part of which can be replaced (docs/guides/algorithms.md)."""

    meant: ClassVar[Mapping[str, str]] = {
        "lr": "did you mean 'learning_rate'?",
        "kl_coef": 'write kl = { name = "k3", coefficient = 0.001 }',
        "beta": 'loss = { name = "dpo", beta = 0.1 }, or kl = { name = "k3", coefficient = 0.001 }',
    }
    name: Name = "grpo"
    """Decides the defaults of advantage, loss, aggregation, corrections, clip_low, clip_high, normalise_std and
    updates_per_step."""
    advantage: Part = "grpo"
    """Advantage estimator."""
    loss: Part = "decoupled_ppo"
    """Loss of each token. The default weighs samples of older weights or other numerics by their likelihood under the
    trainer's own."""
    aggregation: Part = "token_mean"
    """How tokens add up: token_mean, sequence_mean, fixed_length, pair_mean."""
    corrections: list[Part] = Field(default_factory=list)
    """Weights and masks for samples that another numerics or older weights made: tis, mis, icepop, rejection."""
    kl: Part | None = None
    """Distance to the reference policy, in the loss or the reward: k1, k2, k3, unbiased."""
    entropy: Part | None = None
    """A term for the policy's entropy: bonus, adaptive."""
    filters: list[Part] = Field(default_factory=list)
    """Scored groups that are filtered out and replaced by others (dynamic sampling): zero_variance, pass_rate,
    truncated."""
    refill: RefillOptions = RefillOptions()
    """How many groups a step may cost with `filters`."""
    sampler: Part | None = None
    """Prompt sampling by the prompts' history: curriculum, replay. Unset: the run's order."""
    group_size: Annotated[int, Field(ge=1, le=1024)] = 8
    """Samples of one prompt; 1 where advantages compare no group (gae, reinforce_pp, distillation, sft)."""
    prompts_per_step: Annotated[int, Field(ge=1, le=65_536)] = 12
    """Groups of one step; each step is published."""
    updates_per_step: Annotated[int, Field(ge=1, le=1024)] = 1
    """Optimizer updates of one step (the field's term: mini-batches): its groups are dealt out into so many parts, each
    an update of its own, and the step is published after the last. 1: all groups in one update."""
    streaming: bool = False
    """Compute the gradients of groups while the rest of the step is still being generated, where the algorithm needs no
    whole batch and the trainer has devices of its own."""
    steps: Annotated[int, Field(ge=1)] = 100
    """The run ends after this many steps."""
    mode: Mode = "asynchronous"
    """How engines and trainer use devices. asynchronous: each has its own. colocate: time slicing of shared devices; a
    batch is finished first (max_staleness = 0). hybrid: the same, but sequences in flight when a batch is complete
    wait for the trainer and continue afterwards (max_staleness of 1 or more)."""
    max_staleness: Annotated[float, Field(ge=0)] = 1
    """0 on-policy, 1 near-on-policy, n asynchronous, inf unbounded. Holds at consumption, checked by the queue."""
    on_straggler: Literal["wait", "requeue", "mask"] = "wait"
    """Unfinished samples that the next update would make over-stale: wait for them (straggler_wait_s), make them again
    at once, or let them finish and train only on their tokens within the bound."""
    straggler_wait_s: Seconds = 120.0
    """How long an update waits for unfinished samples that it would make over-stale; then they are made again."""
    over_provision: Annotated[int, Field(ge=0, le=65_536)] = 0
    """Groups that may be under way beyond the bound, so that a step need not wait for its longest sequences. It costs a
    bias: short answers are trained on more often than they are generated (docs/guides/modes.md)."""
    on_surplus: Literal["drop", "recycle"] = "drop"
    """Surplus groups that an update makes too stale: drop starts their prompts again; recycle continues their
    unfinished sequences, whose tokens over the bound become context only."""
    on_failed_member: Literal["regenerate", "shrink", "drop"] = "regenerate"
    """A sample that cannot be scored: make it again, train its group without it (min_group), or drop the group."""
    min_group: Annotated[int, Field(ge=2, le=1024)] = 2
    """With on_failed_member = "shrink": smaller groups are dropped."""
    learning_rate: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    """AdamW learning rate after the warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the rate rises from 0."""
    learning_rate_schedule: Schedule = "constant"
    """After the warm-up: stay constant, or decay to learning_rate_floor by the end of `steps`."""
    learning_rate_floor: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Learning rate at the end of a linear or cosine schedule."""
    weight_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """AdamW weight decay."""
    adam_betas: tuple[float, float] = (0.9, 0.999)
    """AdamW decay of the first and of the second moment."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Maximum gradient norm (clipping)."""
    clip_low: Annotated[float, Field(gt=0, le=1)] | None = None
    """Ratios count down to 1 - clip_low; unset: the loss's own (0.2 of the default loss). Of a ratio to the proximal
    policy, as the default loss has it, this bounds the updates of a step after the first (updates_per_step)."""
    clip_high: Annotated[float, Field(gt=0)] | None = None
    """Ratios count up to 1 + clip_high, as clip_low; unset: the loss's own (0.28 of the default loss)."""
    truncated: Literal["mask", "zero_reward", "soft_penalty", "none"] = "none"
    """A completion cut at max_new_tokens: mask its tokens, give it reward 0, subtract soft_penalty, or train on it."""
    soft_penalty: Annotated[float, Field(ge=0)] = 0.5
    """With truncated = "soft_penalty": what is subtracted from the reward."""
    normalise_std: bool | None = None
    """Divide a group's advantages by their standard deviation (GRPO); False: only the mean is subtracted. Unset: the
    advantage's own (true of the default advantage)."""

    @model_validator(mode="after")
    def _preset(self) -> AlgorithmTable:
        for key, value in PRESETS[self.name].items():
            if key not in self.model_fields_set:
                # The table is frozen for everyone else.
                object.__setattr__(self, key, value)
        return self

    def problems(self, path: KeyPath) -> Iterator[Problem]:
        """Refuse numbers that cannot be, and keys that have no effect beside the others."""
        if math.isnan(self.max_staleness) or (
            math.isfinite(self.max_staleness) and self.max_staleness != int(self.max_staleness)
        ):
            message = f"max_staleness = {self.max_staleness:g} counts publications: a whole number, or inf"
            yield Problem((*path, "max_staleness"), message)
        if not all(0 <= beta < 1 for beta in self.adam_betas):
            yield Problem((*path, "adam_betas"), f"adam_betas = {list(self.adam_betas)} must lie in [0, 1)")
        for name in ("learning_rate", "max_grad_norm", "clip_high", "soft_penalty"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                yield Problem((*path, name), f"{name} must be finite")
        for key, message, remedy in self._without_effect():
            yield Problem((*path, key), message, f"leave it out, or {remedy}", at="key")

    def _without_effect(self) -> Iterator[tuple[str, str, str]]:
        """Yield keys that were set and have no effect: the key, why, and the remedy."""
        given = self.model_fields_set
        if math.isinf(self.max_staleness):
            asked = {
                "over_provision": self.over_provision > 0,
                "on_surplus": self.on_surplus == "recycle",
                "on_straggler": self.on_straggler != "wait",
                "straggler_wait_s": True,
            }
            for key in (key for key, wanted in asked.items() if wanted and key in given):
                message = f"{key} has no effect with max_staleness = inf: nothing becomes over-stale"
                yield key, message, "set a max_staleness"
        else:
            if "straggler_wait_s" in given and self.on_straggler != "wait":
                message = f'straggler_wait_s has no effect with on_straggler = "{self.on_straggler}": no update waits'
                yield "straggler_wait_s", message, 'set on_straggler = "wait"'
            # Groups that refill a step for filters are begun beyond the bound too.
            if self.on_surplus == "recycle" and not self.over_provision and not self.filters:
                message = 'on_surplus = "recycle" has no effect without over_provision'
                yield "on_surplus", f"{message}: no group is begun beyond the bound", "set over_provision"
        if "min_group" in given and self.on_failed_member != "shrink":
            message = f'min_group has no effect with on_failed_member = "{self.on_failed_member}"'
            yield "min_group", message, 'set on_failed_member = "shrink"'
        if "soft_penalty" in given and self.truncated != "soft_penalty":
            message = f'soft_penalty has no effect with truncated = "{self.truncated}"'
            yield "soft_penalty", message, 'set truncated = "soft_penalty"'


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
    """Learning rate at the end of a linear or cosine schedule."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    max_tokens: Annotated[int, Field(ge=2)] = 2048
    """Longest sequence, prompt included."""
    overlong: Literal["drop", "error"] = "drop"
    """How to handle a longer sequence."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of the data, by hash of the question, that is not trained on but validated with; 0: none."""
    validate_every: Annotated[int, Field(ge=0)] = 0
    """Validate every so many steps, besides before the first and after the last one."""
    validation_items: Annotated[int, Field(ge=1, le=100_000)] = 256
    """Sequences (pairs) used for that, at most."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 50
    """Save the state after this many steps; steps since then are lost when the trainer dies."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """How strongly dpo holds the policy to the weights that it begins with."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Probability that a preference of dpo is the wrong way round."""

    @property
    def wanted(self) -> bool:
        """Whether the run has a cold start."""
        return self.answers or self.path is not None


class Rates(Protocol):
    """The keys of a table that define its learning-rate schedule."""

    @property
    def learning_rate(self) -> float: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def learning_rate_schedule(self) -> Schedule: ...
    @property
    def learning_rate_floor(self) -> float: ...


def learning_rate(table: Rates, number: int, steps: int) -> float:
    """Return the learning rate of a step: a linear warm-up, then the schedule down to the floor.

    It depends on the step's number alone, so that a resumed training continues as it would have. The floor is the rate
    of the step that would follow the last one: with a floor of 0 no step is without effect. Cosine: SGDR (arXiv
    1608.03983, equation 5), without restarts.

    Args:
        number: from 1. steps: of the whole training, more than those of the warm-up.
    """
    full, floor, warmup = table.learning_rate, table.learning_rate_floor, table.warmup_steps
    if number < warmup:
        return full * (number / warmup)
    if table.learning_rate_schedule == "constant":
        return full
    done = min(1.0, max(0, number - 1 - warmup) / max(1, steps - warmup))
    left = 1.0 - done if table.learning_rate_schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2
    return floor + (full - floor) * left


def check_rates(table: Rates, place: KeyPath, steps: int | None) -> Iterator[Problem]:
    """Yield what cannot be meant of these keys.

    Args:
        steps: of the training, where they are known.
    """
    if steps is not None and table.warmup_steps >= steps:
        message = f"warmup_steps = {table.warmup_steps} is not below steps = {steps}: the rate is never reached"
        yield Problem((*place, "warmup_steps"), message)
    if not table.learning_rate_floor:
        return
    key = (*place, "learning_rate_floor")
    if table.learning_rate_schedule == "constant":
        message = 'learning_rate_floor has no effect with learning_rate_schedule = "constant"'
        yield Problem(key, message, 'leave it out, or set learning_rate_schedule = "cosine"', at="key")
    elif table.learning_rate_floor >= table.learning_rate:
        message = f"learning_rate_floor = {table.learning_rate_floor:g} is not below learning_rate"
        yield Problem(key, f"{message} = {table.learning_rate:g}: the rate would not go down", "lower it")
