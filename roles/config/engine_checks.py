"""Checks of engine settings without effect, and of algorithm.mode: engines and trainer that share a device."""

from __future__ import annotations

from collections.abc import Iterator

from relax_rt.cluster.nodes.api import HEAD
from relax_rt.config.problems import Problem
from relax_rt.config.schema import RunConfig
from relax_rt.roles.models.settings import ShardedSettings
from relax_rt.roles.rollout.engines.settings import ColocationTable, EngineSettings, RolloutSettings
from relax_rt.roles.rollout.engines.sglang.options import option_key
from relax_rt.roles.training.algorithms.settings import SHARING, AlgorithmTable
from relax_rt.roles.training.publication.settings import PublicationTable

OTHER_TENSORS = {
    "quantization": "a quantised server", "quantization-param-path": "a quantised server",
    "torchao-config": "a quantised server", "modelopt-quant": "a quantised server",
    "enable-lora": "a server with adapters", "lora-paths": "a server with adapters",
    "pp-size": "a server of several ranks", "pipeline-parallel-size": "a server of several ranks",
    "nnodes": "a server of several ranks", "ep-size": "a server of several ranks", "ep": "a server of several ranks",
    "expert-parallel-size": "a server of several ranks",
}  # fmt: skip
"""Options of a server that then holds other tensors than are published: no swap of it could be verified."""


def check_engines(config: RunConfig) -> Iterator[Problem]:
    """Settings of engines that would have no effect, or that no published weights would fit."""
    for kind, table in config.roles.items():
        if not isinstance(table, EngineSettings):
            continue
        path = ("roles", kind, "sglang")
        if table.engine != "sglang":
            for key in sorted(table.sglang.model_fields_set):
                message = f'sglang.{key} has no effect with engine = "{table.engine}"'
                yield Problem((*path, key), message, 'leave it out, or set engine = "sglang"', at="key")
            continue
        for name, value in table.sglang.arguments.items():
            what = OTHER_TENSORS.get(option_key(name))
            if what is not None and (value is True or value not in (False, 1)):
                message = f"{option_key(name)} = {value}: what {what} holds cannot be verified by what is published"
                yield Problem((*path, "arguments", name), message, "leave it out", at="key")
            elif name != option_key(name):
                message = f"'{name}': options are written without dashes before them, and with dashes within"
                yield Problem((*path, "arguments", name), message, f"did you mean '{option_key(name)}'?", at="key")


def check_mode(config: RunConfig) -> Iterator[Problem]:
    """Everything that does not go with algorithm.mode."""
    table = config.table(AlgorithmTable)
    if table.mode not in SHARING:
        if "colocation" in config.model_fields_set:
            message = f'[colocation] is for engines that share the trainer\'s device, and mode = "{table.mode}"'
            yield Problem(("colocation",), message, 'leave it out, or set algorithm.mode = "colocate"', at="key")
        return
    place, named = ("algorithm", "max_staleness"), f"max_staleness = {table.max_staleness:g}"
    if table.mode == "colocate" and table.max_staleness > 0:
        message = f'mode = "colocate" with {named}: a batch is finished before the trainer has the device'
        yield Problem(place, message, 'set max_staleness = 0, or mode = "hybrid"')
    if table.mode == "hybrid" and table.max_staleness < 1:
        message = f'mode = "hybrid" with {named}: nothing may be in flight when the trainer has the device'
        yield Problem(place, message, 'set max_staleness = 1 or more, or mode = "colocate"')
    yield from _mode_conflicts(config)
    yield from _shared_device(config)


def _mode_conflicts(config: RunConfig) -> Iterator[Problem]:
    algorithm = config.table(AlgorithmTable)
    mode = algorithm.mode
    if config.table(PublicationTable).carrier == "collective":
        message = f'carrier = "collective" with mode = "{mode}": engines have no memory when versions are published'
        yield Problem(("publication", "carrier"), message, 'use carrier = "auto"')
    if algorithm.streaming:
        message = f'streaming with mode = "{mode}": the trainer has the device only when the batch is there'
        yield Problem(("algorithm", "streaming"), message, "leave it out")
    if algorithm.over_provision and mode == "colocate":
        message = 'over_provision with mode = "colocate": there is nothing else to do while the longest sequences end'
        yield Problem(("algorithm", "over_provision"), message, 'leave it out, or set mode = "hybrid"')
    rollout, limit_s = config.roles.get("rollout"), config.table(ColocationTable).give_way_s
    if isinstance(rollout, RolloutSettings) and rollout.engine == "sglang" and limit_s < _slowest(rollout):
        message = (
            f"give_way_s = {limit_s:g} is below roles.rollout.sglang.update_timeout_s = {_slowest(rollout):g}: "
            "a server that is only slow would be given up"
        )
        yield Problem(("colocation", "give_way_s"), message, "raise it")


def _slowest(rollout: RolloutSettings) -> float:
    return rollout.sglang.update_timeout_s


def _shared_device(config: RunConfig) -> Iterator[Problem]:
    """Whether the placement puts rollouts and trainer on one device: whole GPUs are given to one slot alone."""
    trainer, rollout = config.roles.get("trainer"), config.roles.get("rollout")
    if not isinstance(trainer, ShardedSettings) or not isinstance(rollout, EngineSettings):
        return
    mode = f'mode = "{config.table(AlgorithmTable).mode}"'
    if config.supervision.nodes.listen and rollout.node != HEAD:
        message = f"{mode} needs the rollouts on the trainer's node, and they may be started on others"
        yield Problem(("roles", "rollout", "node"), message, f'set roles.rollout.node = "{HEAD}"')
    if not trainer.gpus and not rollout.gpus:
        return
    shares = trainer.gpus * trainer.count + rollout.gpus * rollout.count
    example = f"as roles.trainer.gpus = 0.5 and roles.rollout.gpus = {0.5 / max(1, rollout.count):g}"
    if not trainer.gpus or not rollout.gpus:
        one, other = ("trainer", "rollouts") if trainer.gpus else ("rollouts", "trainer")
        message = f"{mode}: the {one} would have a GPU, and the {other} none"
        yield Problem(("roles", "rollout", "gpus"), message, f"give both shares of one, {example}")
    elif trainer.gpus >= 1 or rollout.gpus >= 1:
        kind = "trainer" if trainer.gpus >= 1 else "rollout"
        message = f"{mode}: whole GPUs are not shared, so that engines and trainer would be on different ones"
        yield Problem(("roles", kind, "gpus"), message, f"give shares of one GPU, {example}")
    elif shares > 1:
        message = (
            f"{mode}: the shares of trainer and rollouts add up to {shares:g}, more than the one GPU they are to share"
        )
        yield Problem(("roles", "rollout", "gpus"), message, f"lower them, {example}")
