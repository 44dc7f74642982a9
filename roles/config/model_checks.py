"""Checks of a config against its model. The model's folder is read, no weights are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError

from relax_rt.config.problems import Problem
from relax_rt.config.schema import MIB, RoleSettings, RunConfig
from relax_rt.roles.agentic.settings import env_settings, is_program
from relax_rt.roles.config.checks import batch_samples, needed_bytes, retained_batches
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.data.media.image_processor import has_vision
from relax_rt.roles.gateway.settings import GatewaySettings
from relax_rt.roles.rollout.engines.routing import RoutingShape, sparse_layers
from relax_rt.roles.rollout.engines.settings import EngineSettings, RolloutSettings, longest_tokens
from relax_rt.roles.rollout.engines.sglang.options import sglang_mismatch
from relax_rt.roles.rollout.router.interface import MAX_ROW_BYTES
from relax_rt.roles.training.backend.settings import TrainerSettings
from relax_rt.transport.queue.ledger.policy import QueueLimits
from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.rpc.wire import DEFAULT_MAX_MESSAGE_BYTES

ROUTING = ("roles", "rollout", "routing")
TOKEN_BYTES = 8
"""Bytes of a token and its log-probability in the journal."""
EPISODE_TOKEN_BYTES = 64
"""Most bytes of a token in the message of an episode from a gateway, besides its routing row."""
WARN_MEMORY = 2 << 30
"""Warn above this many bytes of routing rows in one process."""
TEXT_ONLY_ROLES = {
    "reference": "the reference would compute log-probabilities without the images",
    "critic": "the critic would compute values without the images",
}
"""Roles that compute with the tokens of samples only."""


def check_engine_model(config: RLConfig, folder: Path) -> Iterator[Problem]:
    """Check the engines of roles.rollout and roles.evaluator against the model in this folder."""
    for kind in ("rollout", "evaluator"):
        engine = config.roles.get(kind)
        if isinstance(engine, EngineSettings) and engine.engine == "sglang" and (why := sglang_mismatch(folder)):
            hint = 'set engine = "embedded", or train another model'
            yield Problem(("roles", kind, "engine"), f"SGLang's Qwen3-MoE {why}", hint)
    if config.role("rollout", RolloutSettings).routing:
        try:
            shape, _ = sparse_layers(folder)
        except Refused as error:
            yield Problem(ROUTING, f"{error.what}: {error.why}", error.hint)
        else:
            yield from _routing_capacity(config, shape)
            yield from _messages(config, shape)


def _routing_capacity(config: RLConfig, shape: RoutingShape) -> Iterator[Problem]:
    """Check that the queue holds routing rows too: they are the larger part of a sample."""
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


def _messages(config: RLConfig, shape: RoutingShape) -> Iterator[Problem]:
    """Check that the routing rows of replies and episodes fit into one message."""
    env = env_settings(config)
    if env is None:
        return
    if config.sampling.max_new_tokens * shape.row_bytes > MAX_ROW_BYTES:
        most = MAX_ROW_BYTES // shape.row_bytes
        message = (
            f"routing rows take {shape.row_bytes} bytes a token, and a reply that another engine continues brings "
            f"{MAX_ROW_BYTES >> 20} MiB at most: sampling.max_new_tokens = {config.sampling.max_new_tokens} is above "
            f"{most}"
        )
        yield Problem(ROUTING, message, f"set sampling.max_new_tokens to {most} at most, or leave it out")
    most = DEFAULT_MAX_MESSAGE_BYTES // (shape.row_bytes + EPISODE_TOKEN_BYTES)
    if env.max_tokens > most:
        message = (
            f"routing rows take {shape.row_bytes} bytes a token, and an episode comes in one message of "
            f"{DEFAULT_MAX_MESSAGE_BYTES >> 20} MiB: roles.env.max_tokens = {env.max_tokens} is above {most}"
        )
        yield Problem(ROUTING, message, f"set roles.env.max_tokens to {most} at most, or leave it out")


def _memory_of_episodes(config: RLConfig, shape: RoutingShape) -> Iterator[str]:
    env = env_settings(config)
    assert env is not None
    need = env.episodes_in_flight * env.max_tokens * shape.row_bytes
    if need > WARN_MEMORY:
        yield (
            f"with routing rows of {shape.row_bytes} bytes a token the {env.episodes_in_flight} episodes that a slot "
            f"of roles.env plays at a time may have {-(-need // MIB)} MiB of them in memory, and as much in episodes/ "
            "of the run directory"
        )


def engine_warnings(config: RLConfig, folder: Path) -> Iterator[str]:
    """Return warnings about settings that work but are probably not meant."""
    table = config.role("rollout", RolloutSettings)
    if not table.routing:
        return
    try:
        shape, _ = sparse_layers(folder)
    except Refused:
        return
    if env_settings(config) is not None:
        # Unfinished replies are kept by the router, not in the journal.
        yield from _memory_of_episodes(config, shape)
    elif table.journal_every_tokens:
        yield from _journal(config, table, shape)


def _journal(config: RLConfig, table: RolloutSettings, shape: RoutingShape) -> Iterator[str]:
    token_bytes = TOKEN_BYTES + shape.row_bytes
    kept = QueueLimits().partial_bytes // token_bytes
    members = table.count * table.groups_in_flight * config.algorithm.group_size
    need = members * min(kept, config.sampling.max_new_tokens) * token_bytes
    if need > config.queue.marks_mib * MIB:
        yield (
            f"with routing rows of {shape.row_bytes} bytes a token the {members} sequences in flight may have "
            f"{-(-need // MIB)} MiB to journal, and queue.marks_mib = {config.queue.marks_mib}: what an engine that "
            "dies has sampled beyond that is generated again"
        )
    if kept < config.sampling.max_new_tokens:
        yield (
            f"with routing rows of {shape.row_bytes} bytes a token the journal keeps the first {kept} tokens of an "
            f"unfinished sequence; what an engine that dies has sampled after them is generated again"
        )


def check_images(config: RLConfig, folder: Path) -> Iterator[Problem]:
    """Check the config against the model in this folder if it takes images."""
    if not has_vision(folder):
        return
    if find_spec("PIL") is None:
        yield Problem(("model", "path"), "the model takes images, and Pillow is not installed", "pip install pillow")
    for kind in ("rollout", "evaluator"):
        engine = config.roles.get(kind)
        if isinstance(engine, EngineSettings) and engine.engine == "sglang":
            message = "the model takes images, and images are not handed on to SGLang"
            yield Problem(("roles", kind, "engine"), message, 'set engine = "embedded"')
    trainer = config.role("trainer", TrainerSettings)
    if trainer.backend != "torch":
        message = "the model takes images, and gangs of Megatron-Core compute texts alone"
        yield Problem(("roles", "trainer", "backend"), message, 'set backend = "torch"')
    elif trainer.count > 1:
        message = f"count = {trainer.count}: a model that takes images is trained in one process"
        yield Problem(("roles", "trainer", "count"), message, "set it to 1")
    if trainer.lora is not None:
        message = "the model takes images, and adapters to such a model are not merged"
        hint = "leave it out: all layers of its text are trained"
        yield Problem(("roles", "trainer", "lora"), message, hint, at="key")
    for kind, why in TEXT_ONLY_ROLES.items():
        table = config.roles.get(kind)
        if isinstance(table, RoleSettings) and table.target is None and table.count:
            yield Problem(("roles", kind), f"the model takes images: {why}", "leave the table out", at="key")
    yield from _image_capacity(config)


def _image_capacity(config: RLConfig) -> Iterator[Problem]:
    """Check that the queue holds the images of episodes too."""
    if (env := env_settings(config)) is None:
        return
    program = is_program(env)
    kib = config.role("gateway", GatewaySettings).session_media_kib if program else env.media_kib
    need = needed_bytes(config) + int(retained_batches(config) * batch_samples(config) * kib * 1024)
    have = (config.queue.capacity_mib + config.queue.spill_mib) * MIB
    if need > have:
        mib = -(-need // MIB)
        message = (
            f"an episode may have {kib} KiB of images: with them {retained_batches(config):g} batches of "
            f"{batch_samples(config)} samples need {mib} MiB, and queue.capacity_mib + spill_mib = {have // MIB}"
        )
        place = ("roles", "gateway", "session_media_kib") if program else ("roles", "env", "media_kib")
        hint = f"queue.capacity_mib = {mib}, or a smaller {place[-1]}, checkpoint.every_steps or group"
        yield Problem(place, message, hint)


def check_computed(config: RunConfig, folder: Path) -> Iterator[Problem]:
    """Report what the torch backend and the embedded engine cannot compute of this model."""
    engines = [table for table in config.roles.values() if isinstance(table, EngineSettings)]
    trainer = config.roles.get("trainer")
    own = any(table.engine == "embedded" for table in engines)
    own |= isinstance(trainer, TrainerSettings) and trainer.backend == "torch"
    if not own:
        return
    from transformers import AutoConfig

    from relax_rt.roles.models.forward import FORWARD_ERRORS, OTHER_MODELS, unsupported_reason

    try:
        text = AutoConfig.from_pretrained(folder).get_text_config()
    except (*FORWARD_ERRORS, OSError, StrictDataclassError):
        # A config that cannot be read is refused, with its reason, by what loads the model.
        return
    if why := unsupported_reason(text):
        yield Problem(("model", "path"), f"the model in {folder} cannot be computed: {why}", OTHER_MODELS)
