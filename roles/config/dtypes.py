"""Resolve the dtype of each role whose table has `dtype = "auto"`.

The loader calls `choose_dtypes` once per config, so that all roles on all nodes read the same result, with its reason,
from the run's resolved config. A resumed run keeps its dtypes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from relax_rt.config.schema import Chosen, RunConfig
from relax_rt.roles.models.precision import MIN_BFLOAT16_WIDTH, DtypeChoice, choose_for_gpu, cpu_dtype, gpu_capabilities
from relax_rt.roles.models.settings import ModelTable, ShardedSettings
from relax_rt.roles.rewards.genrm.settings import GenrmSettings
from relax_rt.roles.rollout.engines.settings import EngineSettings
from relax_rt.supervision.devices import count_gpus

AUTO = "auto"
EXPLICIT = "as roles.toml says"
Computing = EngineSettings | ShardedSettings
TINY_WIDTH = 128


def setting(kind: str) -> str:
    """Return the key of a role's dtype in roles.toml."""
    return f"roles.{kind}.dtype"


def choose_dtypes(
    config: RunConfig,
    recorded: Mapping[str, Any],
    *,
    measured: bool = True,
    here: bool = True,
    cpu: Callable[..., DtypeChoice] = cpu_dtype,
    gpus: Callable[[], list[float]] = gpu_capabilities,
) -> RunConfig:
    """Return the config with a dtype in place of every `auto`, and the reason in `config.chosen`.

    Roles that take published weights (rollout, evaluator, a judge that follows) share one dtype: the one that a
    table names, else what the rollouts' device computes fast. The others each use what their own device computes fast.

    Args:
        recorded: the resolved config that the run was started with; empty for a new run.
        measured: whether the CPU may be timed; False: return at once.
        here: whether the run starts on this machine; False: it is planned for other machines.
        cpu, gpus: what this machine computes fast: see `roles.models.precision`.
    """
    device = _Device(config, measured=measured, here=here, cpu=cpu, gpus=gpus)
    chosen: dict[str, Chosen] = {}
    published: Chosen | None = None
    for kind, table in _published_first(config):
        follows = _takes_published(kind, table)
        if table.dtype != AUTO:
            found = Chosen(value=table.dtype, why=EXPLICIT)
        elif follows and published is not None:
            found = Chosen(value=published.value, why="that of the published weights")
        elif (before := _recorded(recorded, kind)) is not None:
            found = Chosen(value=before, why="the run began with it")
        else:
            choice = device.choose(table)
            found = Chosen(value=choice.dtype, why=choice.why)
        published = found if follows and published is None else published
        chosen[setting(kind)] = found
    roles = {
        kind: table.model_copy(update={"dtype": chosen[setting(kind)].value}) if isinstance(table, Computing) else table
        for kind, table in config.roles.items()
    }
    return config.model_copy(update={"roles": roles, "chosen": chosen})


class _Device:
    """Chooses the dtype that a role's device computes fast."""

    def __init__(
        self,
        config: RunConfig,
        *,
        measured: bool,
        here: bool,
        cpu: Callable[..., DtypeChoice],
        gpus: Callable[[], list[float]],
    ) -> None:
        self._config, self._measured, self._here, self._cpu, self._gpus = config, measured, here, cpu, gpus

    def choose(self, table: Computing) -> DtypeChoice:
        if not self._here:
            return DtypeChoice("bfloat16", "the machines of the inventory are taken to compute it fast")
        if self._on_gpu(table):
            return choose_for_gpu(self._gpus())
        width = model_width(
            getattr(table, "model", None) or self._config.table(ModelTable).path, Path(self._config.config_dir)
        )
        if width is not None and width < MIN_BFLOAT16_WIDTH:
            why = f"on a CPU a model of width {width} gains nothing from bfloat16: {MIN_BFLOAT16_WIDTH} is needed"
            return DtypeChoice("float32", why)
        return self._cpu(measured=self._measured)

    def _on_gpu(self, table: Computing) -> bool:
        """Whether the role's slots compute on a GPU, which may be on another node."""
        if getattr(table, "device", "auto") == "cpu" or (
            not table.gpus
            and not (isinstance(table, EngineSettings) and table.engine == "sglang" and table.sglang.device != "cpu")
        ):
            return False
        return bool(count_gpus() or self._config.supervision.nodes.listen)


def _published_first(config: RunConfig) -> Iterator[tuple[str, Computing]]:
    """Yield the tables with a dtype. Of roles that take published weights, those that name a dtype come first, then
    the rollouts, whose device decides."""

    def order(entry: tuple[str, Computing]) -> tuple[bool, bool, bool]:
        kind, table = entry
        return not _takes_published(kind, table), table.dtype == AUTO, kind != "rollout"

    tables = [(kind, table) for kind, table in config.roles.items() if isinstance(table, Computing)]
    return iter(sorted(tables, key=order))


def _takes_published(kind: str, table: Computing) -> bool:
    if isinstance(table, GenrmSettings):
        return table.follow
    return isinstance(table, EngineSettings) and (kind != "evaluator" or table.count > 0)


def _recorded(recorded: Mapping[str, Any], kind: str) -> str | None:
    table = recorded.get("roles", {}).get(kind)
    dtype = table.get("dtype") if isinstance(table, dict) else None
    return dtype if dtype in ("float32", "bfloat16") else None


def model_width(path: str, config_dir: Path) -> int | None:
    """Size of a model's hidden states, from its config.json; None if it cannot be read."""
    if path == "package:tiny":
        return TINY_WIDTH
    folder = Path(path).expanduser()
    try:
        values = json.loads(((folder if folder.is_absolute() else config_dir / folder) / "config.json").read_text())
        return int((values.get("text_config") or values)["hidden_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
