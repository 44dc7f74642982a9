"""Cheap checks of an RL config across its tables: what cannot work, and what this version plans but cannot start."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from relax_rt.config.problems import KeyPath, Problem
from relax_rt.config.schema import MIB, RoleSettings
from relax_rt.roles.agentic.checks import check_environment
from relax_rt.roles.agentic.settings import env_settings
from relax_rt.roles.config.algorithm_checks import check_algorithm
from relax_rt.roles.config.cold_start_checks import check_cold_start
from relax_rt.roles.config.engine_checks import check_engines, check_mode
from relax_rt.roles.config.evaluation_checks import check_evaluation
from relax_rt.roles.config.progress import slowest_s
from relax_rt.roles.config.publication_checks import check_publication
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.evaluation.settings import EvaluatorSettings
from relax_rt.roles.models.settings import ShardedSettings, TrainedSettings
from relax_rt.roles.rewards.checks import check_judge, check_reward
from relax_rt.roles.rewards.settings import RewardSettings
from relax_rt.roles.rollout.engines.settings import EngineSettings, RolloutSettings, longest_tokens
from relax_rt.roles.training.algorithms.objective import read_parts
from relax_rt.roles.training.algorithms.settings import check_rates
from relax_rt.roles.training.backend.settings import ReferenceSettings, TrainerSettings, unsupported

BYTES_A_TOKEN = 9
"""int32 token, uint8 mask, float32 log-probability."""
REFERENCE_BYTES_A_TOKEN = 4
"""float32 log-probability of the reference."""
BYTES_A_SAMPLE = 2048
"""Meta (sampling, digests, answer, metadata) and the alignment of the columns."""

HINT = "`relax-rt plan --inventory nodes.toml` plans it"
FREE = frozenset(
    {"backend", "engine", "device", "dtype", "tokens_per_micro_batch", "max_sequences", "kv_on_update", "sglang"}
)
"""Keys of the planned tables that this version reads; `sglang` is judged by engines.checks."""
SGLANG_FREE = FREE | {"memory_fraction", "prefill_tokens"}
"""And those that it reads with engine = "sglang"."""
NEEDS = {"reference": "reference", "critic": "values"}
"""What a part of [algorithm] says that needs the work of these roles."""
USES = {
    "reference": ("the log-probabilities of a reference", 'algorithm.kl, or name = "dpo" or "distillation"'),
    "critic": ("the values of a critic", 'name = "ppo"'),
}
"""And in words: what they make, and what to set for it."""


def check(config: RLConfig) -> list[Problem]:
    """Run every check across tables that needs no model, data or user code."""
    cheap = (
        _data,
        _algorithm,
        check_mode,
        check_engines,
        _roles,
        check_environment,
        _check_reward,
        check_judge,
        check_evaluation,
        check_cold_start,
        check_publication,
        _stall,
        _capacity,
    )
    return [problem for check in cheap for problem in check(config)]


def _check_reward(config: RLConfig) -> Iterator[Problem]:
    # Episodes have rewards of their own: see check_environment.
    return iter(()) if env_settings(config) else check_reward(config.reward, config.algorithm.group_size)


def _data(config: RLConfig) -> Iterator[Problem]:
    data, env = config.data, env_settings(config)
    if env is not None and not data.model_fields_set:
        return  # episodes may be about something else
    given = [name for name in ("task", "path", "sources") if getattr(data, name)]
    if len(given) != 1:
        both = len(given) > 1
        message = f"{' and '.join(given)} are both set" if both else "none of task, path and sources is set"
        yield Problem(
            ("data", given[1]) if both else ("data",),
            message,
            'give one: task = "chain_sum" (reasoning-gym), path = "prompts.jsonl" or [[data.sources]]',
            at="key",
        )


def _algorithm(config: RLConfig) -> Iterator[Problem]:
    yield from check_rates(config.algorithm, ("algorithm",), config.algorithm.steps)
    yield from check_algorithm(config)


def _stall(config: RLConfig) -> Iterator[Problem]:
    limit_s, slowest = config.progress.stall_after_s, slowest_s(config)
    if limit_s is not None and limit_s < slowest:
        message = f"stall_after_s = {limit_s:g}: a role may take {slowest:g} s by its own deadlines"
        yield Problem(("progress", "stall_after_s"), message, "raise it, or leave it out")


def _roles(config: RLConfig) -> Iterator[Problem]:
    for kind, type_ in (("rollout", RolloutSettings), ("reward", RewardSettings), ("trainer", TrainerSettings)):
        table = config.roles.get(kind)
        if kind == "reward" and env_settings(config) is not None:
            continue
        if (table.count if isinstance(table, RoleSettings) else type_().count) < 1:
            yield Problem(("roles", kind, "count"), f"a run needs at least one {kind}")
    if "reference" in config.roles and config.role("reference", ReferenceSettings).count < 1:
        yield Problem(("roles", "reference", "count"), "training would wait for a reference for ever", "at least 1")
    reward = config.role("reward", RewardSettings)
    if reward.count and config.reward.timeout_s >= reward.hang_after_s:
        message = (
            f"reward.timeout_s = {config.reward.timeout_s:g} is not below roles.reward.hang_after_s = "
            f"{reward.hang_after_s:g}: a slow call would be killed as a hang"
        )
        yield Problem(("reward", "timeout_s"), message, "raise roles.reward.hang_after_s")
    rollout, evaluator = config.role("rollout", RolloutSettings), config.role("evaluator", EvaluatorSettings)
    if evaluator.count and rollout.dtype != evaluator.dtype:
        message = f"roles.evaluator.dtype = {evaluator.dtype} and roles.rollout.dtype = {rollout.dtype} differ"
        yield Problem(("roles", "evaluator"), f"{message}: weights are published in one dtype", "use one for both")


def sample_bytes(config: RLConfig) -> int:
    """Return the payload bytes of the longest sample that the config allows."""
    longest = longest_tokens(config)
    each = BYTES_A_TOKEN + (REFERENCE_BYTES_A_TOKEN if "reference" in config.roles else 0)
    return longest * each + BYTES_A_SAMPLE


def batch_samples(config: RLConfig) -> int:
    """Samples of one publication, b."""
    return config.algorithm.group_size * config.algorithm.prompts_per_step


def retained_batches(config: RLConfig) -> float:
    """Return how many batches the queue may have to hold at once: those not yet covered by a checkpoint, those that the
    staleness bound admits, and the one in training. Without a bound, admission stops when the capacity is full."""
    staleness = config.algorithm.max_staleness
    over = config.algorithm.over_provision / config.algorithm.prompts_per_step
    return over + config.checkpoint.every_steps + (staleness if math.isfinite(staleness) else 0) + 1


def needed_bytes(config: RLConfig) -> int:
    """Return the queue capacity in bytes below which retention could deadlock."""
    return int(retained_batches(config) * batch_samples(config) * sample_bytes(config))


def _capacity(config: RLConfig) -> Iterator[Problem]:
    need, have = needed_bytes(config), (config.queue.capacity_mib + config.queue.spill_mib) * MIB
    if need > have:
        mib = -(-need // MIB)
        message = (
            f"capacity_mib + spill_mib = {have // MIB} does not hold {_terms(config)} = {retained_batches(config):g} "
            f"batches of {batch_samples(config)} samples, each up to {sample_bytes(config)} bytes: {mib} MiB"
        )
        over = config.algorithm.over_provision / config.algorithm.prompts_per_step
        smaller = "algorithm.over_provision" if over > config.checkpoint.every_steps else "checkpoint.every_steps"
        hint = f"capacity_mib = {mib}, or a smaller {smaller}, data.max_prompt_tokens or group_size"
        yield Problem(("queue", "capacity_mib"), message, hint)


def _terms(config: RLConfig) -> str:
    """Name the keys that retained_batches adds up."""
    table = config.algorithm
    bounded = ["max_staleness"] if math.isfinite(table.max_staleness) else []
    over = ["over_provision / prompts_per_step"] if table.over_provision else []
    return " + ".join(["checkpoint.every_steps", *bounded, *over, "1"])


def not_startable(config: RLConfig) -> list[Problem]:
    """Report everything that this version can plan but not start."""
    problems = [*_without_use(config)]
    for kind, table in config.roles.items():
        if isinstance(table, ShardedSettings | EngineSettings):
            problems += _role(kind, table)
    return problems


def _without_use(config: RLConfig) -> Iterator[Problem]:
    """Report roles whose results nothing in [algorithm] uses."""
    here = [kind for kind in NEEDS if kind in config.roles and not getattr(config.roles[kind], "target", None)]
    if not here:
        return
    parts = read_parts(config.algorithm, base=Path(config.config_dir), longest=config.sampling.max_new_tokens)
    for kind in here:
        if not isinstance(parts, list) and not any(NEEDS[kind] in part.needs for part in parts.all()):
            what, how = USES[kind]
            message = f"nothing in [algorithm] needs {what}"
            yield Problem(("roles", kind), message, f"leave the role out, or set {how}", at="key")


def _role(kind: str, table: ShardedSettings | EngineSettings) -> Iterator[Problem]:
    path = ("roles", kind)
    if isinstance(table, TrainerSettings) and table.backend == "megatron":
        yield from _megatron(path, table)
        return
    if isinstance(table, ShardedSettings):
        own, here = "backend", "torch"
        if isinstance(table, TrainerSettings) and table.lora is not None and find_spec("peft") is None:
            message = "adapters need peft, and it is not installed"
            yield Problem((*path, "lora"), message, "pip install relax-rt[lora]", at="key")
        if isinstance(table, TrainedSettings) and not isinstance(table, TrainerSettings) and table.count != 1:
            message = f"{kind}.count = {table.count}: this version trains in one process"
            yield Problem((*path, "count"), message, f"set count = 1; {HINT}")
    else:
        own, here = "engine", table.engine
    if (chosen := getattr(table, own)) != here:
        message = f'{own} = "{chosen}" cannot be started by this version, only planned'
        yield Problem((*path, own), message, f'set {own} = "{here}"; {HINT}')
        return
    free = SGLANG_FREE if isinstance(table, EngineSettings) and table.engine == "sglang" else FREE
    for key in sorted(planned_keys(table, free)):
        if getattr(table, key) != type(table).model_fields[key].default:
            message = f'{key} has no effect with {own} = "{here}" of this version'
            yield Problem((*path, key), message, f"leave it out; {HINT}", at="key")


def _megatron(path: KeyPath, table: ShardedSettings) -> Iterator[Problem]:
    """Report what a Megatron-Core gang lacks here. Another interpreter's packages are not checked."""
    if table.python is None and find_spec("megatron") is None:
        message = 'backend = "megatron", and megatron-core is not installed'
        yield Problem((*path, "backend"), message, "pip install relax-rt[megatron]")
    if isinstance(table, TrainerSettings) and table.lora is not None:
        message = "adapters are trained by the torch backend alone"
        yield Problem((*path, "lora"), message, 'leave it out, or set backend = "torch"', at="key")
    for key, why in unsupported(table):
        yield Problem((*path, key), f"{key} = {getattr(table, key)}: {why} in this version", f"leave it out; {HINT}")


def planned_keys(table: RoleSettings, free: frozenset[str] = FREE) -> frozenset[str]:
    """The keys of a role's table that say how it is divided over devices, which this version only plans."""
    bases = (TrainedSettings, ShardedSettings, EngineSettings)
    base = next((base for base in bases if isinstance(table, base)), RoleSettings)
    return frozenset(base.model_fields) - frozenset(RoleSettings.model_fields) - free
