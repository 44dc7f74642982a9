"""Checks of [cold_start]: across its keys, and with model and data loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from relax_rt.cluster.nodes.api import HEAD
from relax_rt.config.problems import KeyPath, Problem
from relax_rt.config.schema import RunConfig
from relax_rt.roles.models.cache import say
from relax_rt.roles.training.algorithms.settings import ColdStartTable, check_rates
from relax_rt.roles.training.backend.settings import ReferenceSettings, TrainerSettings
from relax_rt.roles.training.sft.data import UnusableRows, load_sft_data
from relax_rt.transport.rpc.errors import RelaxError

if TYPE_CHECKING:
    from relax_rt.roles.data.source import PromptSource
    from relax_rt.roles.models.tokenizer import ChatTokenizer

PLACE: KeyPath = ("cold_start",)


def check_cold_start(config: RunConfig) -> Iterator[Problem]:
    """Check [cold_start] without model or data."""
    table = config.table(ColdStartTable)
    if not table.wanted:
        if table != ColdStartTable():
            message = "neither path nor answers is set, so that there is nothing to learn from"
            yield Problem(PLACE, message, 'path = "conversations.jsonl", or answers = true', at="key")
        return
    yield from _source(table)
    yield from _length(table)
    if table.kind == "sft":
        for key in ("beta", "label_smoothing"):
            if getattr(table, key) != ColdStartTable.model_fields[key].default:
                message = f'{key} belongs to kind = "dpo"; with "sft" it has no effect'
                yield Problem((*PLACE, key), message, "leave it out", at="key")
    trainer = config.roles.get("trainer")
    if trainer is not None and not isinstance(trainer, TrainerSettings):
        message = "the cold start is done by the trainer, and this run has another one"
        yield Problem(PLACE, message, "leave it out, or roles.trainer.target", at="key")
    reference = config.roles.get("reference")
    several = bool(config.supervision.nodes.listen)
    if several and isinstance(reference, ReferenceSettings) and reference.model is None and reference.node != HEAD:
        message = "the reference of this run is the policy after the cold start, whose files lie on the head's node"
        yield Problem(("roles", "reference"), message, f'set roles.reference.node = "{HEAD}"', at="key")


def _source(table: ColdStartTable) -> Iterator[Problem]:
    if table.answers and table.path is not None:
        yield Problem((*PLACE, "answers"), "path and answers are both set", "leave one of them out")
    if table.answers and table.kind == "dpo":
        message = "an answer is one completion, and dpo compares two"
        yield Problem((*PLACE, "answers"), message, 'give a path with chosen and rejected, or kind = "sft"')
    if not table.answers and table.completion != ColdStartTable.model_fields["completion"].default:
        message = "completion is for answers = true; a file has its own completions"
        yield Problem((*PLACE, "completion"), message, "leave it out", at="key")
    if "{" not in table.completion.replace("{{", ""):
        message = "the completion names no field of the item, so that all would be the same"
        yield Problem((*PLACE, "completion"), message, 'put in {answer}, as "The answer is {answer}."')


def _length(table: ColdStartTable) -> Iterator[Problem]:
    if table.steps is not None and table.epochs is not None:
        yield Problem((*PLACE, "epochs"), "steps and epochs are both set", "leave one of them out")
    if table.batch_tokens is not None:
        if "batch" in table.model_fields_set:
            yield Problem((*PLACE, "batch_tokens"), "batch and batch_tokens are both set", "leave one of them out")
        if table.batch_tokens < table.max_tokens:
            message = f"batch_tokens = {table.batch_tokens} is less than max_tokens = {table.max_tokens} of a sequence"
            yield Problem((*PLACE, "batch_tokens"), message, "raise it, or lower max_tokens")
    yield from check_rates(table, PLACE, table.steps)


def preflight_cold_start(
    config: RunConfig, config_dir: Path, source: PromptSource, tokenizer: ChatTokenizer, context: int | None
) -> Iterator[Problem]:
    """Read and render the data, report how much is used, and check that it fits the model.

    Args:
        context: positions that the model has, if it says so.
    """
    table = config.table(ColdStartTable)
    if not table.wanted:
        return
    try:
        data = load_sft_data(config, config_dir, source, tokenizer)
    except UnusableRows as error:
        for fault in error.each:
            yield Problem((*PLACE, "path"), f"{fault.what}: {fault.why}", fault.hint)
        return
    except RelaxError as error:
        key = next((k for k in ("path", "completion") if error.what.startswith(f"cold_start.{k}")), "")
        place = (*PLACE, key) if key else PLACE
        yield Problem(place, error.what + (f": {error.why}" if error.why else ""), error.hint)
        return
    say(f"cold start ({table.kind}): {data.report}")
    if table.held_out and not data.validation:
        say("warning: no row of the cold start is left to validate with")
    if context is not None and data.report.longest > context:
        message = f"a sequence has {data.report.longest} tokens, and the model's context is {context}"
        yield Problem((*PLACE, "max_tokens"), message, f"max_tokens = {context}, or less")
