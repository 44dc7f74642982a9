"""Checks of [algorithm]: parts that do not go together, and settings without effect; refused before anything starts."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from relax_rt.config.problems import Problem
from relax_rt.config.schema import RunConfig
from relax_rt.roles.data.settings import DataTable
from relax_rt.roles.models.cache import say
from relax_rt.roles.models.settings import ShardedSettings
from relax_rt.roles.rollout.engines.settings import SamplingTable
from relax_rt.roles.training.algorithms.objective import COMMON_OPTIONS, ObjectiveParts, read_parts
from relax_rt.roles.training.algorithms.registry import BoundPart, Kind, bind, parts
from relax_rt.roles.training.algorithms.settings import AlgorithmTable
from relax_rt.roles.training.backend.settings import CriticSettings

NEEDED_DATA = {"reference": "log-probabilities of a reference policy or teacher", "values": "the values of a critic"}
CALLS_S = 30.0
"""Time of all calls of a dry run of the user's own parts, together."""
ROLE_OF_NEED = {"reference": "reference", "values": "critic"}


def check_algorithm(config: RunConfig) -> Iterator[Problem]:
    """Report unknown parts and options, and parts that do not go together."""
    table, base = config.table(AlgorithmTable), Path(config.config_dir)
    yield from _filters(config, base)
    if table.sampler is not None:
        found = bind("sampler", table.sampler, ("algorithm", "sampler"), base=base, defaults={})
        yield from found if isinstance(found, list) else ()
    parts = read_parts(table, base=base, longest=config.table(SamplingTable).max_new_tokens)
    if isinstance(parts, list):
        yield from parts
        return
    yield from _streaming(config, parts)
    yield from _updates(config, parts)
    if table.group_size < 2 and "groups" in parts.advantage.part.traits:
        message = f"group_size = 1, and advantage '{parts.advantage.part.name}' compares the samples of a group"
        hint = "at least 2; gae, reinforce_pp and distillation do with one"
        yield Problem(("algorithm", "group_size"), message, hint)
    yield from _columns(config, parts)
    yield from _returns(parts)
    yield from _weights(parts)
    yield from _kl(parts)
    yield from _pairs(parts)
    yield from _judgement(parts)
    yield from check_idle(config, parts)


def _filters(config: RunConfig, base: Path) -> Iterator[Problem]:
    table = config.table(AlgorithmTable)
    for index, given in enumerate(table.filters):
        place = ("algorithm", "filters", index)
        found = bind("filter", given, place, base=base, defaults={})
        if isinstance(found, list):
            yield from found
        elif table.group_size < 2 and "groups" in found.part.traits:
            message = f"group_size = 1, and filter '{found.part.name}' compares the samples of a group"
            yield Problem(place, message, "leave the filter out, or set group_size to 2 or more")
    if table.filters and config.table(DataTable).epochs is not None:
        message = "filters leave prompts out, so that data.epochs would end before algorithm.steps are full"
        yield Problem(("data", "epochs"), message, "leave data.epochs out", at="key")
    if not table.filters and "refill" in table.model_fields_set:
        yield Problem(("algorithm", "refill"), "refill has no effect without filters", "leave it out", at="key")


def _streaming(config: RunConfig, parts: ObjectiveParts) -> Iterator[Problem]:
    """Refuse streaming where gradients cannot be computed before the batch is complete."""
    if not config.table(AlgorithmTable).streaming:
        return
    whole = next((part for part in parts.all() if part.needs & {"batch", "values"}), None)
    if whole is not None:
        what = "needs the whole step's samples at once" if "batch" in whole.needs else "needs a critic's values"
        message = f"streaming = true, and {whole.part.kind} '{whole.part.name}' {what}"
        message += ": no gradient can be computed before the last group is there"
        yield Problem(("algorithm", "streaming"), message, "leave it out")


def _updates(config: RunConfig, parts: ObjectiveParts) -> Iterator[Problem]:
    """Refuse more updates per step than the step has groups for."""
    table, place = config.table(AlgorithmTable), ("algorithm", "updates_per_step")
    if table.updates_per_step == 1:
        return
    asked = f"updates_per_step = {table.updates_per_step}"
    if "updates_per_step" not in table.model_fields_set:
        asked += f" (preset '{table.name}')"
    if table.updates_per_step > table.prompts_per_step:
        message = f"{asked} is more than prompts_per_step = {table.prompts_per_step}: a mini-batch is of whole groups"
        yield Problem(place, message, f"at most {table.prompts_per_step}")
    if table.streaming:
        message = f"streaming = true, and {asked}: the groups of a step are dealt out when all of them are there"
        yield Problem(("algorithm", "streaming"), message, "leave it out, or set updates_per_step = 1")
    loss = parts.loss
    if "prepare" in loss.part.extras and "proximal" in loss.needs:
        message = (
            f"{asked}, and loss '{loss.part.name}' decides by the weights before the first update what it leaves out: "
            "later updates would be without its bound"
        )
        yield Problem(place, message, "set updates_per_step = 1")


def _columns(config: RunConfig, parts: ObjectiveParts) -> Iterator[Problem]:
    """Report columns that need a role which is not there."""
    for part in parts.all():
        for need in sorted(part.needs & ROLE_OF_NEED.keys()):
            if (role := ROLE_OF_NEED[need]) not in config.roles:
                message = (
                    f"{part.part.kind} '{part.part.name}' needs {NEEDED_DATA[need]}, and the run has no {role} role"
                )
                yield Problem(part.place, message, f"add [roles.{role}], or use another {part.part.kind}")


def _returns(parts: ObjectiveParts) -> Iterator[Problem]:
    """Refuse a critic without returns to learn."""
    asks = next((part for part in parts.all() if "values" in part.needs), None)
    advantage = parts.advantage
    if asks is not None and "returns" not in advantage.part.extras:
        message = (
            f"{asks.part.kind} '{asks.part.name}' needs a critic, and advantage '{advantage.part.name}' does not say "
            "which returns it is to learn"
        )
        hint = 'declare them: @part("advantage", options=GaeOptions, needs={"values"}, returns=gae_returns)'
        yield Problem(advantage.place, message, hint)


def _weights(parts: ObjectiveParts) -> Iterator[Problem]:
    """Refuse importance weights that would count twice."""
    weighting = [c for c in parts.corrections if "weights" in c.part.traits]
    for second in weighting[1:]:
        message = f"corrections '{weighting[0].part.name}' and '{second.part.name}' both weight by the same ratio"
        yield Problem(second.place, f"{message}: it would count twice", "keep one; rejection may stand beside it")
    loss = parts.loss
    for correction in weighting[:1]:
        name = f"loss '{loss.part.name}'"
        if "weights" in loss.part.traits:
            message = f"{name} weights by pi / pi_behaviour itself, and correction '{correction.part.name}' does again"
            yield Problem(correction.place, message, "leave it out; rejection may stand beside it")
        elif "ratio" in loss.part.traits and getattr(loss.options, "ratio_to", "") == "behaviour":
            message = (
                f"{name} takes its ratio to the behaviour policy, which corrects for it already; correction "
                f"'{correction.part.name}' would count it twice"
            )
            hint = f'loss = {{ name = "{loss.part.name}", ratio_to = "proximal" }}, or use rejection'
            yield Problem(correction.place, message, hint)


def _kl(parts: ObjectiveParts) -> Iterator[Problem]:
    kl = parts.kl
    if kl is None:
        return
    place = getattr(kl.options, "place", "loss")
    if place == "loss" and "no_gradient" in kl.part.traits:
        message = f"'{kl.part.name}' as a term of the loss has a gradient of zero in expectation: it holds nothing back"
        yield Problem(kl.place, message, 'set place = "reward", or use "k2", "k3" or "unbiased"')
    if place == "reward" and "cost" not in kl.part.extras:
        message = f"'{kl.part.name}' has no function 'cost', and it is to be placed in the reward"
        yield Problem(kl.place, message, 'declare it with @part("kl", cost=…), or set place = "loss"')
    if place == "reward" and "no_cost" in parts.advantage.part.traits:
        message = f"advantage '{parts.advantage.part.name}' does not look at the reward that the KL is placed in"
        yield Problem(kl.place, message, 'set place = "loss"')


def _pairs(parts: ObjectiveParts) -> Iterator[Problem]:
    paired, counted = "pairs" in parts.loss.needs, "pairs" in parts.aggregation.part.traits
    if paired and not counted:
        message = f"loss '{parts.loss.part.name}' is of pairs, and '{parts.aggregation.part.name}' counts none"
        yield Problem(parts.aggregation.place, message, 'set aggregation = "pair_mean"')
    if counted and not paired:
        message = (
            f"aggregation '{parts.aggregation.part.name}' counts pairs, and loss '{parts.loss.part.name}' has none"
        )
        yield Problem(parts.aggregation.place, message, 'use "token_mean", "sequence_mean" or "fixed_length"')


def _judgement(parts: ObjectiveParts) -> Iterator[Problem]:
    """Refuse a loss without advantages beside parts that compute them, and the reverse."""
    blind, unjudged = "unjudged" in parts.loss.part.traits, "unjudged" in parts.advantage.part.traits
    if blind and not unjudged:
        message = f"loss '{parts.loss.part.name}' looks at no advantage, and advantage is '{parts.advantage.part.name}'"
        yield Problem(parts.advantage.place, message, 'set advantage = "none"')
    if unjudged and not blind:
        message = f"advantage '{parts.advantage.part.name}' judges no token, and loss '{parts.loss.part.name}' needs it"
        yield Problem(parts.advantage.place, message, 'as "grpo", "rloo" or "gae"')


OPTION_OF: dict[str, Kind] = {"clip_low": "loss", "clip_high": "loss", "normalise_std": "advantage"}
"""Kind of the part whose option a key of [algorithm] is first."""
BOUNDS = ("clip_low", "clip_high", "dual_clip", "tau_positive", "tau_negative")
"""Options of losses that act where the ratio is not 1."""
SEVERAL = "set updates_per_step to 2 or more"


def check_idle(config: RunConfig, found: ObjectiveParts) -> Iterator[Problem]:
    """Report settings that would have no effect."""
    table = config.table(AlgorithmTable)
    yield from _dropped(table, found)
    yield from _std(found.advantage)
    yield from _truncation(table, found.advantage)
    yield from _idle_corrections(found)
    if table.updates_per_step == 1:
        yield from _bounds(table, found.loss)
        yield from _value_clip(config)


def _dropped(table: AlgorithmTable, found: ObjectiveParts) -> Iterator[Problem]:
    """Report common options that no part has, or that every part overrides."""
    for key in COMMON_OPTIONS:
        if key not in table.model_fields_set:
            continue
        having = [one for one in found.all() if key in one.part.options.model_fields]
        if not having:
            one = found.loss if OPTION_OF[key] == "loss" else found.advantage
            message = f"{key} has no effect: {one.part.kind} '{one.part.name}' has no such option"
            others = [name for name, part in parts(OPTION_OF[key]).items() if key in part.options.model_fields]
            yield _idle(key, message, f"use {OPTION_OF[key]} {', '.join(others)}")
        elif all(key in _keys_of(table, one) for one in having):
            one = having[0]
            message = f"{key} has no effect: {one.part.kind} '{one.part.name}' has its own in its table"
            yield _idle(key, message, "take it out there")


def _std(advantage: BoundPart) -> Iterator[Problem]:
    options = advantage.options
    if "std_of" in options.model_fields_set and getattr(options, "normalise_std", True) is False:
        message = "std_of has no effect with normalise_std = false: nothing is divided by a standard deviation"
        place = (*advantage.place, "std_of")
        yield Problem(place, message, "leave it out, or set normalise_std = true", at="key")


def _truncation(table: AlgorithmTable, advantage: BoundPart) -> Iterator[Problem]:
    """Report reward changes where no part reads rewards."""
    known = advantage.part in parts("advantage").values()
    changes = table.truncated in ("zero_reward", "soft_penalty") and "truncated" in table.model_fields_set
    if changes and known and "rewards" not in advantage.needs:
        message = (
            f'truncated = "{table.truncated}" has no effect: it changes the reward, and advantage '
            f"'{advantage.part.name}' does not look at it"
        )
        yield _idle("truncated", message, 'set "mask"')


def _idle_corrections(found: ObjectiveParts) -> Iterator[Problem]:
    loss = found.loss
    if not found.corrections or not ("pairs" in loss.needs or "unjudged" in loss.part.traits):
        return
    what = "a pair as a whole" if "pairs" in loss.needs else "completions as they are given"
    message = f"corrections weigh tokens that the policy sampled one by one; loss '{loss.part.name}' is of {what}"
    yield Problem(found.corrections[0].place, message, "leave them out")


def _bounds(table: AlgorithmTable, loss: BoundPart) -> Iterator[Problem]:
    """Report bounds of a ratio that is always 1: the proximal policy of a step with a single update."""
    if "ratio" not in loss.part.traits or getattr(loss.options, "ratio_to", "proximal") != "proximal":
        return
    why = (
        f"has no effect with updates_per_step = 1: loss '{loss.part.name}' takes its ratio to the policy before the "
        "step's first update, so that in its only one it is 1"
    )
    own = _keys_of(table, loss)
    for key in BOUNDS:
        if key not in loss.part.options.model_fields:
            continue
        if key in own:
            yield Problem((*loss.place, key), f"{key} {why}", f"leave it out, or {SEVERAL}", at="key")
        elif key in table.model_fields_set:
            yield _idle(key, f"{key} {why}", SEVERAL)


def _value_clip(config: RunConfig) -> Iterator[Problem]:
    critic = config.roles.get("critic")
    if isinstance(critic, CriticSettings) and "value_clip" in critic.model_fields_set and critic.value_clip:
        message = (
            "value_clip has no effect with algorithm.updates_per_step = 1: no value has moved before the step's only "
            "update"
        )
        yield Problem(("roles", "critic", "value_clip"), message, f"leave it out, or {SEVERAL}", at="key")


def _keys_of(table: AlgorithmTable, one: BoundPart) -> Collection[str]:
    """Return the keys of the table that names the part; none if it is a plain name."""
    given: Any = table
    for step in one.place[1:]:
        given = given[step] if isinstance(step, int) else getattr(given, step)
    return given if isinstance(given, dict) else ()


def _idle(key: str, message: str, remedy: str) -> Problem:
    return Problem(("algorithm", key), message, f"leave it out, or {remedy}", at="key")


def check_own_parts(config: RunConfig, *, calls_s: float = CALLS_S) -> list[Problem]:
    """Call the user's own parts of [algorithm] and report the first error of each.

    They are called in a process of their own, on the CPU. What they raise there is said on standard error only, where
    the trainer has a GPU: they may be written for it.

    Args:
        calls_s: for all the calls together.
    """
    table, base, longest = (
        config.table(AlgorithmTable),
        Path(config.config_dir),
        config.table(SamplingTable).max_new_tokens,
    )
    parts = read_parts(table, base=base, longest=longest)
    if isinstance(parts, list) or not any(part.target for part in parts.all()):
        # Wrong names are reported by check_algorithm.
        return []
    needs = frozenset[str]().union(*(part.needs for part in parts.all()))
    turns = "env" in config.roles or bool(needs & {"turn_rewards", "turn_states"})
    from relax_rt.roles.training.algorithms.dry_run import DryRunRequest, call_in_process  # loads numpy

    found = call_in_process(DryRunRequest(table, base, longest, turns, calls_s))
    if found is None:
        return []
    if not found.returned and _trains_on_gpu(config):
        say(
            "warning: your parts of [algorithm] were not checked, as the trainer has a GPU. On the CPU: "
            f"{found.message}"
        )
        return []
    return [Problem(found.place, found.message, "fix it there")]


def _trains_on_gpu(config: RunConfig) -> bool:
    trainer = config.roles.get("trainer")
    if not isinstance(trainer, ShardedSettings) or trainer.device == "cpu":
        return False
    return bool(trainer.gpus) or trainer.backend == "megatron"
