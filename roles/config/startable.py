"""What a config may ask for that this version plans and does not start: refused in words, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from relax_rt.config.problems import KeyPath, Problem
from relax_rt.config.schema import RoleSettings
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.models.settings import ShardedSettings, TrainedSettings
from relax_rt.roles.rollout.engines.settings import EngineSettings
from relax_rt.roles.training.algorithms.objective import read_parts
from relax_rt.roles.training.backend.settings import TrainerSettings
from relax_rt.roles.training.megatron.limits import unsupported

HINT = "`relax-rt plan --inventory nodes.toml` plans it"
FREE = frozenset(
    {"backend", "engine", "device", "dtype", "tokens_per_micro_batch", "max_sequences", "kv_on_update", "sglang"}
)
"""Keys of the planned tables that this version reads; `sglang` is judged by engine_checks."""
SGLANG_FREE = FREE | {"memory_fraction", "prefill_tokens"}
"""And those that it reads with engine = "sglang"."""
NEEDS = {"reference": "reference", "critic": "values"}
"""What a part of [algorithm] says that needs the work of these roles."""
USES = {
    "reference": ("the log-probabilities of a reference", 'algorithm.kl, or name = "dpo" or "distillation"'),
    "critic": ("the values of a critic", 'name = "ppo"'),
}
"""And in words: what they make, and what to set for it."""


def not_startable(config: RLConfig) -> list[Problem]:
    """Everything in a config that comes with a later version."""
    problems = [*_without_use(config)]
    for kind, table in config.roles.items():
        if isinstance(table, ShardedSettings | EngineSettings):
            problems += _role(kind, table)
    return problems


def _without_use(config: RLConfig) -> Iterator[Problem]:
    """Roles whose work nothing of [algorithm] asks for."""
    here = [kind for kind in NEEDS if kind in config.roles and not getattr(config.roles[kind], "target", None)]
    if not here:
        return
    parts = read_parts(config.algorithm, base=Path(config.config_dir), longest=config.sampling.max_new_tokens)
    for kind in here:
        if not isinstance(parts, list) and not any(NEEDS[kind] in part.needs for part in parts.all()):
            what, how = USES[kind]
            message = f"nothing in [algorithm] needs {what}"
            yield Problem(("roles", kind), message, f"leave the role out, or set {how}", at="key")


def _role(kind: str, table: ShardedSettings | EngineSettings) -> Iterator[Problem]:
    path = ("roles", kind)
    if isinstance(table, TrainerSettings) and table.backend == "megatron":
        yield from _megatron(path, table)
        return
    if isinstance(table, ShardedSettings):
        own, here = "backend", "torch"
        if isinstance(table, TrainerSettings) and table.lora is not None and find_spec("peft") is None:
            message = "adapters need peft, and it is not installed"
            yield Problem((*path, "lora"), message, "pip install relax-rt[lora]", at="key")
        if isinstance(table, TrainedSettings) and not isinstance(table, TrainerSettings) and table.count != 1:
            message = f"{kind}.count = {table.count}: this version trains in one process"
            yield Problem((*path, "count"), message, f"set count = 1; {HINT}")
    else:
        own, here = "engine", table.engine
    if (chosen := getattr(table, own)) != here:
        message = f'{own} = "{chosen}" cannot be started by this version, only planned'
        yield Problem((*path, own), message, f'set {own} = "{here}"; {HINT}')
        return
    free = SGLANG_FREE if isinstance(table, EngineSettings) and table.engine == "sglang" else FREE
    for key in sorted(planned_keys(table, free)):
        if getattr(table, key) != type(table).model_fields[key].default:
            message = f'{key} has no effect with {own} = "{here}" of this version'
            yield Problem((*path, key), message, f"leave it out; {HINT}", at="key")


def _megatron(path: KeyPath, table: ShardedSettings) -> Iterator[Problem]:
    """What a gang of Megatron-Core's ranks lacks here. Another interpreter's packages are its own affair."""
    if table.python is None and find_spec("megatron") is None:
        message = 'backend = "megatron", and megatron-core is not installed'
        yield Problem((*path, "backend"), message, "pip install relax-rt[megatron]")
    if isinstance(table, TrainerSettings) and table.lora is not None:
        message = "adapters are trained by the torch backend alone"
        yield Problem((*path, "lora"), message, 'leave it out, or set backend = "torch"', at="key")
    for key, why in unsupported(table):
        yield Problem((*path, key), f"{key} = {getattr(table, key)}: {why} in this version", f"leave it out; {HINT}")


def planned_keys(table: RoleSettings, free: frozenset[str] = FREE) -> frozenset[str]:
    """The keys of a role's table that say how it is divided over devices, which this version only plans."""
    bases = (TrainedSettings, ShardedSettings, EngineSettings)
    base = next((base for base in bases if isinstance(table, base)), RoleSettings)
    return frozenset(base.model_fields) - frozenset(RoleSettings.model_fields) - free
