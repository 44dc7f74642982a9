"""Cheap checks of an RL config across its keys. What cannot work is refused with the reason."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator

from relax_rt.config.problems import KeyPath, Problem
from relax_rt.config.schema import MIB, RoleSettings
from relax_rt.roles.agentic.checks import check_environment
from relax_rt.roles.agentic.settings import env_settings, longest_tokens
from relax_rt.roles.base.progress import slowest_s
from relax_rt.roles.config.algorithm_checks import check_algorithm
from relax_rt.roles.config.bound_checks import check_bound
from relax_rt.roles.config.cold_start_checks import check_cold_start
from relax_rt.roles.config.publication_checks import check_publication
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.data.columns import TARGETS
from relax_rt.roles.data.order import check_weights
from relax_rt.roles.data.settings import DataTable
from relax_rt.roles.evaluation.checks import check_evaluation
from relax_rt.roles.evaluation.settings import EvaluatorSettings
from relax_rt.roles.rewards.checks import check_judge, check_reward
from relax_rt.roles.rewards.settings import RewardSettings
from relax_rt.roles.rollout.engines.checks import check_engines, check_mode
from relax_rt.roles.rollout.engines.settings import RolloutSettings
from relax_rt.roles.training.algorithms.learning_rate import check_rates
from relax_rt.roles.training.backend.settings import TrainerSettings
from relax_rt.roles.training.reference.settings import ReferenceSettings

BYTES_A_TOKEN = 9
"""int32 token, uint8 mask, float32 log-probability."""
REFERENCE_BYTES_A_TOKEN = 4
"""float32 log-probability of the reference."""
BYTES_A_SAMPLE = 2048
"""Meta (sampling, digests, answer, metadata) and the alignment of the columns."""


def check(config: RLConfig) -> list[Problem]:
    """Everything that is wrong with an RL config, as far as it shows without model, data or user code."""
    cheap = (
        _data,
        _sampling,
        _algorithm,
        check_bound,
        check_mode,
        check_engines,
        _roles,
        check_environment,
        _check_reward,
        check_judge,
        check_evaluation,
        check_cold_start,
        check_publication,
        _progress,
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
    yield from _columns(data)
    if wrong := check_weights([one.weight for one in data.sources]):
        yield Problem(("data", "sources"), wrong, "give each its weight, or none")
    names = [one.name for one in data.sources if one.name is not None]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Problem(("data", "sources"), f"two sources have the name {name!r}", "give each its own")
    for key in ("options", "size"):
        if data.task is None and given and key in data.model_fields_set:
            message = f"{key} belongs to a reasoning-gym task; with {given[0]} it has no effect"
            yield Problem(("data", key), message, at="key")
    for key in ("columns", "form", "split", "ignore"):
        if data.task is not None and key in data.model_fields_set:
            yield Problem(("data", key), f"{key} is about rows of files; with task it has no effect", at="key")
    if "{" not in data.template.replace("{{", ""):
        message = "the template names no field of the item, so that all prompts would be the same"
        yield Problem(("data", "template"), message, 'put in {question}, as "Q: {question}"')


def _columns(data: DataTable) -> Iterator[Problem]:
    """Report misspelt targets, and columns without a name."""
    tables: list[tuple[KeyPath, dict[str, str]]] = [(("data", "columns"), data.columns)]
    tables += [(("data", "sources", at, "columns"), one.columns or {}) for at, one in enumerate(data.sources)]
    for place, columns in tables:
        if "prompt" in columns and "messages" in columns:
            yield Problem(place, "prompt and messages are both mapped: a row has one of them", "leave one out")
        for target, column in columns.items():
            if target not in TARGETS and (meant := difflib.get_close_matches(target, TARGETS, n=1, cutoff=0.75)):
                yield Problem(place, f"{target!r} is no column of a prompt", f"did you mean {meant[0]!r}?")
            if not column and target != "answer":
                yield Problem(place, f"{target!r} is mapped to no column", 'give its name; only answer = "" means none')


def _sampling(config: RLConfig) -> Iterator[Problem]:
    reason = "truncating samplers are refused for training: behaviour log-probabilities are of the full softmax"
    if config.sampling.top_p < 1:
        yield Problem(("sampling", "top_p"), f"top_p = {config.sampling.top_p:g}: {reason}", "set top_p = 1.0")
    if config.sampling.top_k > 0:
        yield Problem(("sampling", "top_k"), f"top_k = {config.sampling.top_k}: {reason}", "set top_k = 0")


def _algorithm(config: RLConfig) -> Iterator[Problem]:
    table = config.algorithm
    if math.isnan(table.max_staleness) or (
        math.isfinite(table.max_staleness) and table.max_staleness != int(table.max_staleness)
    ):
        message = f"max_staleness = {table.max_staleness:g} counts publications: a whole number, or inf"
        yield Problem(("algorithm", "max_staleness"), message)
    if not all(0 <= beta < 1 for beta in table.adam_betas):
        yield Problem(("algorithm", "adam_betas"), f"adam_betas = {list(table.adam_betas)} must lie in [0, 1)")
    yield from check_rates(table, ("algorithm",), table.steps)
    for name in ("learning_rate", "max_grad_norm", "clip_high", "soft_penalty"):
        value = getattr(table, name)
        if value is not None and not math.isfinite(value):
            yield Problem(("algorithm", name), f"{name} must be finite")
    yield from check_algorithm(config)


def _progress(config: RLConfig) -> Iterator[Problem]:
    table = config.progress
    if table.failed_prompts > table.failed_groups:
        message = f"failed_prompts = {table.failed_prompts}: {table.failed_groups} failed groups are of fewer prompts"
        yield Problem(("progress", "failed_prompts"), message, "lower it, or raise progress.failed_groups")
    slowest = slowest_s(config)
    if table.stall_after_s is not None and table.stall_after_s < slowest:
        message = f"stall_after_s = {table.stall_after_s:g}: a role may take {slowest:g} s by its own deadlines"
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
    """Payload of the longest sample that the config allows, in bytes."""
    longest = longest_tokens(config)
    each = BYTES_A_TOKEN + (REFERENCE_BYTES_A_TOKEN if "reference" in config.roles else 0)
    return longest * each + BYTES_A_SAMPLE


def batch_samples(config: RLConfig) -> int:
    """Samples of one publication, b."""
    return config.algorithm.group_size * config.algorithm.prompts_per_step


def retained_batches(config: RLConfig) -> float:
    """Batches that the queue may have to hold at once: those not yet covered by a checkpoint, those that the
    staleness bound admits, and the one in training. Without a bound, admission stops when the capacity is full."""
    staleness = config.algorithm.max_staleness
    over = config.algorithm.over_provision / config.algorithm.prompts_per_step
    return over + config.checkpoint.every_steps + (staleness if math.isfinite(staleness) else 0) + 1


def needed_bytes(config: RLConfig) -> int:
    """Queue capacity below which retention could deadlock, in bytes."""
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
    """What retained_batches adds up, by the names of its keys."""
    table = config.algorithm
    bounded = ["max_staleness"] if math.isfinite(table.max_staleness) else []
    over = ["over_provision / prompts_per_step"] if table.over_provision else []
    return " + ".join(["checkpoint.every_steps", *bounded, *over, "1"])
