"""Whether the engines can do with the run's model what they are asked for; nothing of it is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from relax_rt.config.problems import Problem
from relax_rt.config.schema import MIB
from relax_rt.roles.checks import batch_samples, needed_bytes, retained_batches, settings
from relax_rt.roles.engines.routing import RoutingShape, sparse_layers
from relax_rt.roles.planning.shape import read_shape
from relax_rt.roles.sections import RLConfig, RolloutSettings
from relax_rt.transport.errors import Refused, RelaxError
from relax_rt.transport.ledger.policy import QueueLimits

ROUTING = ("roles", "rollout", "routing")
TOKEN_BYTES = 8
"""Of a token and its log-probability in the journal."""


def check_engine_model(config: RLConfig, folder: Path) -> Iterator[Problem]:
    """What of roles.rollout does not go with the model in this folder."""
    table = settings(config, "rollout", RolloutSettings)
    if table.engine == "sglang" and (why := _unlike_sglang(folder)):
        hint = 'set engine = "embedded", or train another model'
        yield Problem(("roles", "rollout", "engine"), f"SGLang's Qwen3-MoE {why}", hint)
    if table.routing:
        try:
            shape, _ = sparse_layers(folder)
        except Refused as error:
            yield Problem(ROUTING, f"{error.what}: {error.why}", error.hint)
        else:
            yield from _capacity(config, shape)


def _unlike_sglang(folder: Path) -> str:
    """What SGLang computes otherwise than the model says, without a word; empty if nothing is known."""
    try:
        shape = read_shape(folder)
    except RelaxError:
        return ""
    if not any(shape.sparse):
        return ""
    if shape.tied:
        return "overlooks tie_word_embeddings = true: it has no head then, and all its logits are zero"
    if not all(shape.sparse):
        return f"has experts in every layer, and this model has none in layer {shape.sparse.index(False)}"
    return ""


def _capacity(config: RLConfig, shape: RoutingShape) -> Iterator[Problem]:
    """Rows are the larger part of a sample: the queue must hold them, too."""
    rows = (config.data.max_prompt_tokens + config.sampling.max_new_tokens) * shape.row_bytes
    need = needed_bytes(config) + int(retained_batches(config) * batch_samples(config) * rows)
    have = (config.queue.capacity_mib + config.queue.spill_mib) * MIB
    if need > have:
        mib = -(-need // MIB)
        message = (
            f"routing rows take {shape.row_bytes} bytes a token, up to {rows} a sample: with them "
            f"{retained_batches(config):g} batches of {batch_samples(config)} samples need {mib} MiB, and "
            f"queue.capacity_mib + spill_mib = {have // MIB}"
        )
        yield Problem(ROUTING, message, f"queue.capacity_mib = {mib}, or a smaller checkpoint.every_steps or group")


def engine_warnings(config: RLConfig, folder: Path) -> Iterator[str]:
    """What may work but is probably not meant."""
    table = settings(config, "rollout", RolloutSettings)
    if not table.routing or not table.journal_every_tokens:
        return
    try:
        shape, _ = sparse_layers(folder)
    except Refused:
        return
    kept = QueueLimits().mark_bytes // (TOKEN_BYTES + shape.row_bytes)
    if kept < config.sampling.max_new_tokens:
        yield (
            f"with routing rows of {shape.row_bytes} bytes a token the journal keeps the first {kept} tokens of an "
            f"unfinished sequence; what an engine that dies has sampled behind them is made again"
        )
