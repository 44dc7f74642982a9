"""The tables of engines: [sampling], [colocation], and what every role with an engine has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from relax_rt.config.problems import KeyPath, Problem
from relax_rt.config.schema import Filled, RoleSettings, RunConfig, Seconds, Table
from relax_rt.roles.base.episodes import episode_tokens
from relax_rt.roles.data.settings import DataTable
from relax_rt.roles.models.settings import ChosenDtype, Parallel
from relax_rt.roles.training.backend.settings import TrainerSettings
from relax_rt.roles.training.publication.settings import Communicator, PublicationTable


class SamplingTable(Table):
    """How completions are sampled. Truncating samplers are refused: their tokens have no behaviour log-probability."""

    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Divides the logits; greedy sampling has no behaviour log-probabilities to compare. Evaluations have their own."""
    max_new_tokens: Annotated[int, Field(ge=1, le=131_072)] = 256
    """Maximum tokens of a completion; algorithm.truncated says how a completion cut there is trained."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Only 1.0, all tokens, can be trained on."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Only 0, all tokens, can be trained on."""

    def problems(self, path: KeyPath) -> Iterator[Problem]:
        """Refuse truncating samplers."""
        reason = "truncating samplers are refused for training: behaviour log-probabilities are of the full softmax"
        if self.top_p < 1:
            yield Problem((*path, "top_p"), f"top_p = {self.top_p:g}: {reason}", "set top_p = 1.0")
        if self.top_k > 0:
            yield Problem((*path, "top_k"), f"top_k = {self.top_k}: {reason}", "set top_k = 0")


class ColocationTable(Table):
    """Deadlines of time slicing between engines and trainer, with mode = "colocate" or "hybrid"."""

    give_way_s: Seconds = 150.0
    """Deadline for an engine to interrupt its sequences, with tokens kept, and to release its memory. An engine that
    takes longer is restarted."""
    take_back_s: Seconds = 180.0
    """Deadline for an engine to take memory again and to load the newest weights. An engine that takes longer is
    restarted."""


class SglangTable(Table):
    """The SGLang server of a slot, where its role has engine = "sglang"."""

    python: Filled | None = None
    """Interpreter that has sglang; relative to the config file. Unset: what RELAX_SGLANG_PYTHON names, else that of the
    nearest `.venv-sglang` in the config's folder or above, else the role's own."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device of the server; cpu: for tests and for trying a config, no faster than embedded; auto: cuda if the machine
    has a GPU."""
    arguments: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Further options of `sglang.launch_server`, without the dashes: { "attention-backend" = "fa3" }. They override
    the engine's, except those that it depends on, which are refused."""
    deterministic: bool = False
    """Sample each sequence by its own seed, independent of other sequences: runs can be repeated, at some cost in
    speed. Otherwise seeds have no effect."""
    weights: Literal["file", "tensor", "handles"] = "file"
    """How new weights reach the server: by a safetensors file in shared memory; in the requests themselves; or by
    handles that the server opens, on a GPU of a copy beside the server's own weights (CUDA IPC)."""
    boot_timeout_s: Seconds = 500.0
    """Deadline from the server's start to its first token. The role's start_timeout_s, unless it is set, is a minute
    more, or that of [supervision] if that is longer."""
    update_timeout_s: Seconds = 120.0
    """Deadline of each step of a weight update; a server that takes longer is restarted."""
    stall_timeout_s: Seconds = 90.0
    """A server that has sequences and yields no token for this long is restarted."""


class EngineSettings(RoleSettings):
    """Settings of roles with an inference engine. `gpus` of a slot, unless given: tensor_parallel x data_parallel
    for sglang, none for embedded."""

    engine: Literal["embedded", "sglang"] = "embedded"
    """embedded: in the role's own process; sglang: a server under the role's supervision."""
    dtype: ChosenDtype = "auto"
    """Dtype of weights and KV cache, and of published weights. auto: bfloat16 where the rollouts' device
    computes it fast, else float32 (docs/guides/dtype.md)."""
    max_sequences: Annotated[int, Field(ge=1, le=4096)] = 64
    """Sequences decoded at the same time."""
    tensor_parallel: Parallel = 1
    """GPUs over which each layer of one replica is sharded (sglang)."""
    data_parallel: Parallel = 1
    """Replicas within one engine (sglang)."""
    expert_parallel: Parallel = 1
    """GPUs of a replica over which experts are distributed; divides tensor_parallel (sglang)."""
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.85
    """Share of a GPU's memory for weights and KV cache together (sglang)."""
    prefill_tokens: Annotated[int, Field(ge=64, le=1 << 20)] = 8192
    """Maximum prompt tokens of one forward pass (sglang)."""
    sglang: SglangTable = SglangTable()
    """The server, with engine = "sglang"."""


class RolloutSettings(EngineSettings):
    """A rollout worker and its engine."""

    count: Annotated[int, Field(ge=1, le=4096)] = 1
    groups_in_flight: Annotated[int, Field(ge=1, le=4096)] = 8
    """Groups that one engine works on at the same time. Sequences that have ended make room for others before their
    group is complete, so that no group waits for the longest sequences of others."""
    journal_every_tokens: Annotated[int, Field(ge=0, le=1 << 20)] = 256
    """Journal the partial completion of a sequence after this many new tokens; when the rollout dies, another one
    resumes from there. 0: only when a rollout stops in order."""
    routing: bool = False
    """Record the experts that each token was routed to (Qwen3-MoE) in the `routing` column of samples, episodes' too:
    2 bytes for each token, layer and chosen expert, in the queue and, of unfinished sequences, in its journal."""
    kv_on_update: Literal["keep", "recompute"] = "keep"
    """The KV cache of sequences in flight at a weight update: keep it (later tokens are marked with the older version
    of the cache), or compute it again under the new weights."""


def longest_tokens(config: RunConfig) -> int:
    """Return the tokens of the longest sample that the config allows."""
    prompted = config.table(DataTable).max_prompt_tokens + config.table(SamplingTable).max_new_tokens
    return episode_tokens(config) or prompted


def communicator_of(config: RunConfig) -> Communicator:
    """Return what broadcasts of weights use: as the config says, or NCCL if trainer and rollouts have GPUs."""
    named = config.table(PublicationTable).communicator
    if named != "auto":
        return named
    return "gloo" if without_gpu(config) else "nccl"


def without_gpu(config: RunConfig) -> list[str]:
    """Return which of trainer and rollouts have no GPU."""
    tables = {
        kind: table for kind, table in config.roles.items() if isinstance(table, TrainerSettings | RolloutSettings)
    }
    return [kind for kind, table in tables.items() if not table.gpus] if tables else ["trainer"]
