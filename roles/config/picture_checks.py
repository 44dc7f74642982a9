"""What a run of a model that sees cannot have; nothing is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from relax_rt.config.problems import Problem
from relax_rt.config.schema import MIB, RoleSettings
from relax_rt.roles.agentic.settings import env_settings, is_program
from relax_rt.roles.config.checks import batch_samples, needed_bytes, retained_batches
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.data.media.sight import sees
from relax_rt.roles.gateway.settings import GatewaySettings
from relax_rt.roles.rollout.engines.settings import EngineSettings
from relax_rt.roles.training.backend.settings import TrainerSettings

BLIND = {
    "reference": "the reference would compute log-probabilities without the pictures",
    "critic": "the critic would value what it does not see",
}
"""Roles that compute with samples' tokens alone."""


def check_pictures(config: RLConfig, folder: Path) -> Iterator[Problem]:
    """What of the config does not go with the model in this folder, if it is one that sees."""
    if not sees(folder):
        return
    if find_spec("PIL") is None:
        yield Problem(("model", "path"), "the model sees, and Pillow is not installed", "pip install pillow")
    for kind in ("rollout", "evaluator"):
        engine = config.roles.get(kind)
        if isinstance(engine, EngineSettings) and engine.engine == "sglang":
            message = "the model sees, and pictures are not handed on to SGLang"
            yield Problem(("roles", kind, "engine"), message, 'set engine = "embedded"')
    trainer = config.role("trainer", TrainerSettings)
    if trainer.backend != "torch":
        message = "the model sees, and gangs of Megatron-Core compute texts alone"
        yield Problem(("roles", "trainer", "backend"), message, 'set backend = "torch"')
    elif trainer.count > 1:
        message = f"count = {trainer.count}: a model that sees is trained in one process"
        yield Problem(("roles", "trainer", "count"), message, "set it to 1")
    if trainer.lora is not None:
        message = "the model sees, and adapters to such a model are not merged"
        hint = "leave it out: all layers of its text are trained"
        yield Problem(("roles", "trainer", "lora"), message, hint, at="key")
    for kind, why in BLIND.items():
        table = config.roles.get(kind)
        if isinstance(table, RoleSettings) and table.target is None and table.count:
            yield Problem(("roles", kind), f"the model sees: {why}", "leave the table out", at="key")
    yield from _capacity(config)


def _capacity(config: RLConfig) -> Iterator[Problem]:
    """The queue must hold the pictures of episodes, too."""
    if (env := env_settings(config)) is None:
        return
    program = is_program(env)
    kib = config.role("gateway", GatewaySettings).session_media_kib if program else env.media_kib
    need = needed_bytes(config) + int(retained_batches(config) * batch_samples(config) * kib * 1024)
    have = (config.queue.capacity_mib + config.queue.spill_mib) * MIB
    if need > have:
        mib = -(-need // MIB)
        message = (
            f"an episode may have {kib} KiB of pictures: with them {retained_batches(config):g} batches of "
            f"{batch_samples(config)} samples need {mib} MiB, and queue.capacity_mib + spill_mib = {have // MIB}"
        )
        place = ("roles", "gateway", "session_media_kib") if program else ("roles", "env", "media_kib")
        hint = f"queue.capacity_mib = {mib}, or a smaller {place[-1]}, checkpoint.every_steps or group"
        yield Problem(place, message, hint)
