"""Whether the engines can do with the run's model what they are asked for; nothing of it is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from relax_rt.config.problems import Problem
from relax_rt.config.schema import MIB
from relax_rt.roles.agentic.settings import longest_tokens
from relax_rt.roles.checks import batch_samples, needed_bytes, retained_batches, settings
from relax_rt.roles.engines.routing import RoutingShape, sparse_layers
from relax_rt.roles.engines.sglang.options import unlike_the_model
from relax_rt.roles.sections import EngineSettings, RLConfig, RolloutSettings
from relax_rt.transport.errors import Refused
from relax_rt.transport.ledger.policy import QueueLimits

ROUTING = ("roles", "rollout", "routing")
TOKEN_BYTES = 8
"""Of a token and its log-probability in the journal."""


def check_engine_model(config: RLConfig, folder: Path) -> Iterator[Problem]:
    """What of the engines of roles.rollout and roles.evaluator does not go with the model in this folder."""
    for kind in ("rollout", "evaluator"):
        engine = config.roles.get(kind)
        if isinstance(engine, EngineSettings) and engine.engine == "sglang" and (why := unlike_the_model(folder)):
            hint = 'set engine = "embedded", or train another model'
            yield Problem(("roles", kind, "engine"), f"SGLang's Qwen3-MoE {why}", hint)
    if settings(config, "rollout", RolloutSettings).routing:
        try:
            shape, _ = sparse_layers(folder)
        except Refused as error:
            yield Problem(ROUTING, f"{error.what}: {error.why}", error.hint)
        else:
            yield from _capacity(config, shape)


def _capacity(config: RLConfig, shape: RoutingShape) -> Iterator[Problem]:
    """Rows are the larger part of a sample: the queue must hold them, too."""
    rows = longest_tokens(config) * shape.row_bytes
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
    token_bytes = TOKEN_BYTES + shape.row_bytes
    kept = QueueLimits().mark_bytes // token_bytes
    members = table.count * table.groups_in_flight * config.algorithm.group_size
    need = members * min(kept, config.sampling.max_new_tokens) * token_bytes
    if need > config.queue.marks_mib * MIB:
        yield (
            f"with routing rows of {shape.row_bytes} bytes a token the {members} sequences in flight may have "
            f"{-(-need // MIB)} MiB to journal, and queue.marks_mib = {config.queue.marks_mib}: what an engine that "
            "dies has sampled beyond that is made again"
        )
    if kept < config.sampling.max_new_tokens:
        yield (
            f"with routing rows of {shape.row_bytes} bytes a token the journal keeps the first {kept} tokens of an "
            f"unfinished sequence; what an engine that dies has sampled behind them is made again"
        )
