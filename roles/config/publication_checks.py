"""Checks of [publication] against the run's roles and machine."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from relax_rt.cluster.nodes.api import HEAD
from relax_rt.config.problems import Problem
from relax_rt.config.schema import RunConfig
from relax_rt.roles.config.dtypes import EXPLICIT, setting
from relax_rt.roles.evaluation.settings import EvaluatorSettings
from relax_rt.roles.rollout.engines.settings import RolloutSettings, communicator_of, without_gpu
from relax_rt.roles.training.algorithms.settings import SHARING, AlgorithmTable
from relax_rt.roles.training.backend.settings import TrainerSettings
from relax_rt.roles.training.publication.settings import PublicationTable, wire_of
from relax_rt.supervision.devices import count_gpus

CARRIER = ("publication", "carrier")
UNCONVERTED = ("shared_memory", "directory")
"""Carriers that move versions as they are, whatever they are rounded to."""


def _rollout_node(config: RunConfig) -> str | None:
    table = config.roles.get("rollout")
    return table.node if isinstance(table, RolloutSettings) else None


def check_publication(config: RunConfig) -> Iterator[Problem]:
    """Check [publication] without looking at the machine."""
    table, several = config.table(PublicationTable), bool(config.supervision.nodes.listen)
    if table.carrier == "directory" and table.directory is None:
        message = 'carrier = "directory", and publication.directory is not set'
        yield Problem(CARRIER, message, "name a folder that all nodes see")
    if table.carrier == "stream" and not several:
        message = 'carrier = "stream" goes between nodes, and this run has one'
        yield Problem(CARRIER, message, "leave it out, or set supervision.nodes.listen")
    if table.carrier == "shared_memory" and several and _rollout_node(config) != HEAD:
        message = 'carrier = "shared_memory" stays on one node, and rollouts may be started on others'
        yield Problem(CARRIER, message, f'leave it out, or set roles.rollout.node = "{HEAD}"')
    if table.carrier not in ("auto", "directory") and table.directory is not None:
        message = f'carrier = "{table.carrier}": publication.directory has no effect'
        yield Problem(("publication", "directory"), message, 'use carrier = "auto" to fall back to it')
    if "directory_timeout_s" in table.model_fields_set and table.directory is None:
        message = "directory_timeout_s has no effect without publication.directory"
        yield Problem(("publication", "directory_timeout_s"), message, "leave it out, or set directory", at="key")
    yield from _wire(config)
    yield from _adapters(config)
    yield from _delta(config)
    yield from _broadcasts(config)
    yield from _cuda_ipc(config)


def _wire(config: RunConfig) -> Iterator[Problem]:
    """Refuse a wire_dtype that saves nothing."""
    publication = config.table(PublicationTable)
    wire, carrier, path = (
        publication.wire_dtype,
        publication.carrier,
        ("publication", "wire_dtype"),
    )
    table = config.roles.get("rollout")
    if wire is None:
        return
    if isinstance(table, RolloutSettings) and wire_of(wire, table.dtype) is None:
        if setting("rollout") in config.chosen and config.chosen[setting("rollout")].why != EXPLICIT:
            return  # It has an effect on machines where another dtype is chosen.
        than = f'what is published (roles.rollout.dtype = "{table.dtype}")'
        if wire == table.dtype:
            message = f'wire_dtype = "{wire}" has no effect: it is {than}'
        else:
            message = f'wire_dtype = "{wire}" is wider than {than}'
        narrower = '"bfloat16" or "float8"' if table.dtype == "float32" else '"float8"'
        yield Problem(path, message, f"leave it out, or set {narrower}")
    elif carrier in UNCONVERTED:
        message = f'carrier = "{carrier}" sends versions as they are: wire_dtype would round them and save nothing'
        yield Problem(path, message, 'leave it out, or set carrier = "auto"', at="key")


def wire_note(config: RunConfig) -> str:
    """Note a wire_dtype in a run that sends nothing; it may be meant, for the numerics of a run on several nodes."""
    table = config.table(PublicationTable)
    if table.wire_dtype is None or config.supervision.nodes.listen or table.carrier == "collective":
        return ""
    return (
        f'publication.wire_dtype = "{table.wire_dtype}" on one node: versions are rounded as on several nodes, and '
        "nothing is saved"
    )


def _adapters(config: RunConfig) -> Iterator[Problem]:
    """Refuse adapters without a trainer that has them or a node to send them to."""
    algorithm = config.table(AlgorithmTable)
    table, path = config.table(PublicationTable), ("publication", "adapters")
    if not table.adapters:
        return
    trainer = config.roles.get("trainer")
    if isinstance(trainer, TrainerSettings) and (trainer.lora is None or trainer.backend != "torch"):
        message = "adapters = true, and the trainer has none: roles.trainer.lora is not set"
        yield Problem(path, message, 'set roles.trainer.lora, with backend = "torch"; or leave it out')
    if table.carrier in ("directory", "collective", "cuda_ipc"):
        message = f'adapters = true has no effect with carrier = "{table.carrier}", which moves each version in full'
        yield Problem(path, message, 'leave it out, or set carrier = "auto"')
    if table.delta:
        message = "adapters = true and delta = true: all elements of an adapted weight change with each version"
        yield Problem(path, message, "leave delta out: it would save nothing")
    if table.wire_dtype is not None:
        message = "adapters = true and wire_dtype: what receivers make of adapters is not rounded"
        yield Problem(path, message, "leave wire_dtype out: adapters are fewer bytes")
    if algorithm.mode in SHARING:
        message = f'adapters = true has no effect with algorithm.mode = "{algorithm.mode}"'
        hint = "leave it out: engines let go of their weights for each step, and take the next ones in full"
        yield Problem(path, message, hint)


def _delta(config: RunConfig) -> Iterator[Problem]:
    """What changed lies beside a version on the trainer's node: engines there read it, a stream brings it elsewhere."""
    table, mode, path = config.table(PublicationTable), config.table(AlgorithmTable).mode, ("publication", "delta")
    if table.delta and table.carrier in ("directory", "collective", "cuda_ipc"):
        message = f'delta = true has no effect with carrier = "{table.carrier}", which moves each version in full'
        yield Problem(path, message, 'leave it out, or set carrier = "auto"')
    elif table.delta and mode in SHARING and not _evaluates_elsewhere(config):
        message = f'delta = true saves nothing with algorithm.mode = "{mode}"'
        hint = "leave it out: rollouts let go of their weights for each step, and take the next ones in full"
        yield Problem(path, message, hint)


def _evaluates_elsewhere(config: RunConfig) -> bool:
    """Whether an evaluator may be on another node. It keeps its weights while the trainer has its turn."""
    table = config.roles.get("evaluator")
    several = bool(config.supervision.nodes.listen)
    return several and isinstance(table, EvaluatorSettings) and table.count > 0 and table.node != HEAD


def _broadcasts(config: RunConfig) -> Iterator[Problem]:
    """A broadcast needs engines on the trainer's node, time to fall back, and GPUs for NCCL."""
    table = config.table(PublicationTable)
    if table.carrier != "collective":
        for key in ("communicator", "broadcast_timeout_s"):
            if key in table.model_fields_set:
                message = f'{key} has no effect with carrier = "{table.carrier}"'
                yield Problem(("publication", key), message, 'leave it out, or set carrier = "collective"', at="key")
        return
    if (node := _rollout_node(config)) not in (None, HEAD):
        message = f'carrier = "collective" reaches engines on the trainer\'s node, and roles.rollout.node = "{node}"'
        yield Problem(CARRIER, message, 'use "auto": a stream goes there')
    if table.broadcast_timeout_s >= table.ack_timeout_s:
        message = (
            f"broadcast_timeout_s = {table.broadcast_timeout_s:g} leaves an engine that it does not reach no time to "
            f"take the version from the stage within ack_timeout_s = {table.ack_timeout_s:g}"
        )
        yield Problem(("publication", "broadcast_timeout_s"), message, "make it smaller")
    if table.communicator == "nccl" and (lacking := without_gpu(config)):
        kinds, have = " and ".join(f"roles.{kind}" for kind in lacking), "has" if len(lacking) == 1 else "have"
        message = f'communicator = "nccl" goes between GPUs, and {kinds} {have} none (gpus = 0)'
        yield Problem(("publication", "communicator"), message, 'give each a GPU, or set communicator = "gloo"')


def _cuda_ipc(config: RunConfig) -> Iterator[Problem]:
    """CUDA IPC shares memory within one device: trainer and rollouts must fit on it together."""
    if config.table(PublicationTable).carrier != "cuda_ipc":
        return
    tables = [table for table in config.roles.values() if isinstance(table, TrainerSettings | RolloutSettings)]
    shares = [(table.gpus, table.count) for table in tables]
    if without_gpu(config) or any(gpus >= 1 for gpus, _ in shares) or sum(gpus * count for gpus, count in shares) > 1:
        message = 'carrier = "cuda_ipc" goes within one GPU, and trainer and rollouts do not share one'
        hint = "give each a share, roles.trainer.gpus = 0.5 and roles.rollout.gpus = 0.5, of one in sum"
        yield Problem(CARRIER, message, hint)


def _not_writable(folder: Path) -> str:
    """Return why a folder, which need not exist yet, is not writable; empty if it is."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with TemporaryDirectory(prefix=".relax-", dir=there):
            return ""
    except OSError as error:
        return f"{there}: {error.strerror or error}"


def preflight_publication(config: RunConfig, config_dir: Path) -> Iterator[Problem]:
    """Check that this machine has what the carrier needs."""
    table = config.table(PublicationTable)
    if table.directory is not None and (why := _not_writable(config_dir / Path(table.directory).expanduser())):
        message = f"publication.directory cannot be written: {why}"
        yield Problem(("publication", "directory"), message, "name a folder that this user may write in")
    nccl = table.carrier == "collective" and communicator_of(config) == "nccl"
    if not nccl and table.carrier != "cuda_ipc":
        return
    path = ("publication", "communicator") if nccl else CARRIER
    what = "broadcasts between GPUs go over NCCL" if nccl else 'carrier = "cuda_ipc" shows device memory'
    other = 'set communicator = "gloo"' if nccl else 'set carrier = "auto"'
    if find_spec("cupy") is None:
        hint = f"pip install cupy-cuda13x, or the build of your CUDA; or {other}"
        yield Problem(path, f"{what} through CuPy, which is not installed", hint)
    if not count_gpus():
        yield Problem(path, f"{what}, and this machine has no GPU", other)
