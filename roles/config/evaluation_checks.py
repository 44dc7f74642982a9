"""Checks of [evaluation]: across its keys, and with model and data loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from relax_rt.config.problems import KeyPath, Problem
from relax_rt.config.schema import RunConfig
from relax_rt.roles.agentic.settings import env_settings
from relax_rt.roles.evaluation.sets import MAIN, load_set, set_specs
from relax_rt.roles.evaluation.settings import EvaluationSet, EvaluationTable, EvaluatorSettings
from relax_rt.roles.models.cache import say
from relax_rt.roles.rewards.dry_run import dry_run, task_of
from relax_rt.roles.rewards.settings import RewardTable
from relax_rt.roles.training.algorithms.settings import AlgorithmTable
from relax_rt.transport.rpc.errors import RelaxError

if TYPE_CHECKING:
    from relax_rt.roles.data.items import PromptItem
    from relax_rt.roles.data.source import PromptSource
    from relax_rt.roles.models.tokenizer import ChatTokenizer

PLACE: KeyPath = ("evaluation",)


def check_evaluation(config: RunConfig) -> Iterator[Problem]:
    """Check [evaluation] without model or data."""
    table = config.table(EvaluationTable)
    evaluator = config.roles.get("evaluator")
    if isinstance(evaluator, EvaluatorSettings) and evaluator.count == 0 and env_settings(config) is None:
        for key in ("every_steps", "at_steps", "sets"):
            if getattr(table, key):
                message = f"evaluation.{key} is set, and roles.evaluator.count is 0"
                yield Problem((*PLACE, key), message, f"let one evaluator run, or leave {key} out")
    yield from _sampled(config, table, PLACE, table.temperature)
    counts = Counter(one.name for one in table.sets)
    for index, one in enumerate(table.sets):
        place = (*PLACE, "sets", index)
        if one.name == MAIN or counts[one.name] > 1:
            message = f'name = "{one.name}" stands for ' + (
                "the items that [data] holds out" if one.name == MAIN else "several sets"
            )
            yield Problem((*place, "name"), message, "give each set a name of its own")
        temperature = table.temperature if one.temperature is None else one.temperature
        yield from _sampled(config, one, place, temperature)
        yield from _source(one, place)


def _sampled(
    config: RunConfig, table: EvaluationTable | EvaluationSet, place: KeyPath, temperature: float
) -> Iterator[Problem]:
    algorithm = config.table(AlgorithmTable)
    if (most := max(table.pass_at, default=1)) > table.samples:
        message = f"pass@{most} needs at least {most} samples of each item, and samples = {table.samples}"
        yield Problem((*place, "pass_at"), message, f"set samples = {most}, or more for a sharper estimate")
    if temperature == 0 and table.samples > 1:
        message = f"samples = {table.samples} at temperature 0 are all alike"
        yield Problem((*place, "samples"), message, "set samples = 1, or a temperature above 0")
    if temperature == 0 and table.greedy:
        message = "greedy asks for what temperature = 0 does already"
        yield Problem((*place, "greedy"), message, "leave one of them out", at="key")
    if table.at_steps and (last := max(table.at_steps)) > algorithm.steps:
        message = f"at_steps names step {last}, and the run has algorithm.steps = {algorithm.steps}"
        yield Problem((*place, "at_steps"), message, "the last step is evaluated in any case")


def _source(one: EvaluationSet, place: KeyPath) -> Iterator[Problem]:
    if (one.task is None) == (one.path is None):
        message = f"set '{one.name}': " + ("task and path are both set" if one.task else "neither task nor path is set")
        yield Problem(place, message, 'give one: task = "chain_sum" (reasoning-gym) or path = "prompts.jsonl"')
    elif one.path is not None and one.options:
        yield Problem((*place, "options"), "options belong to a reasoning-gym task; with path they have no effect")
    if one.template is not None and "{" not in one.template.replace("{{", ""):
        message = "the template names no field of the item, so that all prompts would be the same"
        yield Problem((*place, "template"), message, 'put in {question}, as "Q: {question}"')


def preflight_evaluation(
    config: RunConfig, config_dir: Path, source: PromptSource, tokenizer: ChatTokenizer, context: int | None
) -> Iterator[Problem]:
    """Read the sets, call their reward functions, and check that their prompts fit the model.

    Args:
        context: positions that the model has, if it says so.
    """
    named = {spec.name: spec for spec in set_specs(config)}
    for index, one in enumerate(config.table(EvaluationTable).sets):
        place = (*PLACE, "sets", index)
        try:
            items, left_out = load_set(one, config, source, tokenizer, config_dir)
        except RelaxError as error:
            yield Problem(
                place, f"set '{one.name}': {error.what}" + (f": {error.why}" if error.why else ""), error.hint
            )
            continue
        trained = f"; {left_out} more are left out, because the run trains on them" if left_out else ""
        say(f"evaluation set '{one.name}': {len(items)} prompts{trained}")
        if len(items) < one.items:
            say(f"warning: set '{one.name}' has items = {one.items}, but {len(items)} prompts")
        spec, longest = named[one.name], max((len(item.tokens) for item in items[: one.items]), default=0)
        if context is not None and longest + spec.max_new_tokens > context:
            message = (
                f"set '{one.name}': its longest prompt has {longest} tokens; with max_new_tokens = "
                f"{spec.max_new_tokens} that is more than the model's context of {context}"
            )
            yield Problem((*place, "max_new_tokens"), message, "lower it, or max_prompt_tokens")
        if one.reward is not None:
            yield from _dry_run(config, config_dir, one, place, items)


def _dry_run(
    config: RunConfig, config_dir: Path, one: EvaluationSet, place: KeyPath, items: Sequence[PromptItem]
) -> Iterator[Problem]:
    table = RewardTable(function=str(one.reward), timeout_s=config.table(RewardTable).timeout_s)
    for problem in dry_run(table, config_dir, items, task_of(one)):
        yield Problem((*place, "reward"), f"set '{one.name}': {problem.message}", problem.hint)
