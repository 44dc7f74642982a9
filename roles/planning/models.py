"""Which model each role of a plan has: the policy's, or one that it names itself."""

from __future__ import annotations

from pathlib import Path

import msgspec

from relax_rt.config.schema import RoleSettings
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.models.settings import ShardedSettings
from relax_rt.roles.models.shape import ModelShape, read_shape
from relax_rt.roles.rewards.genrm.settings import GenrmSettings
from relax_rt.roles.training.reference.settings import ReferenceSettings
from relax_rt.transport.rpc.errors import RelaxError


def own_model(table: RoleSettings | None) -> str | None:
    """A teacher's or judge's model, as its table names it; None: the policy's."""
    return table.model if isinstance(table, ReferenceSettings | GenrmSettings) else None


def is_pool(table: ShardedSettings) -> bool:
    """Whether each slot has the whole model and no rank knows of another: references of the torch backend."""
    return isinstance(table, ReferenceSettings) and table.backend == "torch"


class Shapes:
    """The shape of each role's model.

    Args:
        policy: of model.path.

    Attributes:
        unknown: by role, why its shape is not known: its memory is not planned then.
    """

    def __init__(self, config: RLConfig, policy: ModelShape) -> None:
        self._policy = policy
        self._own: dict[str, ModelShape] = {}
        self.unknown: dict[str, str] = {}
        for kind, table in config.roles.items():
            if (path := own_model(table)) is None:
                continue
            folder = Path(path).expanduser()
            try:
                self._own[kind] = read_shape(folder if folder.is_absolute() else Path(config.config_dir) / folder)
            except RelaxError as error:
                self.unknown[kind] = f"{error.what}: {error.why}" if error.why else error.what
        if "critic" in config.roles:
            self._own["critic"] = msgspec.structs.replace(policy, value_head=True, tied=False)

    def of(self, kind: str) -> ModelShape | None:
        """Of a role's model; None if it is not known."""
        return None if kind in self.unknown else self._own.get(kind, self._policy)
