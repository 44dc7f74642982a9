"""From a config to the slots of a run: which role classes, how many processes of each, under which rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from relax_rt.config.loader import role_settings
from relax_rt.config.schema import RoleSettings, RunConfig, SupervisionTable
from relax_rt.loading import load_role, role_target
from relax_rt.supervision.spec import RestartClass, SlotSpec
from relax_rt.transport.errors import RelaxError

SYSTEM_ROLES = ("registry", "queue")


class RolePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of role in a run: its class and its settings."""

    kind: str
    target: str
    settings: RoleSettings
    tier: int
    restart: RestartClass
    significant: bool
    preload: tuple[str, ...] = ()

    def specs(self, rules: SupervisionTable) -> list[SlotSpec]:
        """Its slots."""
        return [
            SlotSpec(
                slot=f"{self.kind}/{n}",
                kind=self.kind,
                tier=self.tier,
                restart=self.restart,
                significant=self.significant,
                system=self.kind in SYSTEM_ROLES,
                start_timeout_s=rules.start_timeout_s,
                stop_timeout_s=rules.stop_timeout_s,
                hang_after_s=self.settings.hang_after_s,
                max_restarts=rules.restart.max_restarts,
                period_s=rules.restart.period_s,
                backoff_first_s=rules.restart.backoff_first_s,
                backoff_max_s=rules.restart.backoff_max_s,
            )
            for n in range(self.settings.count)
        ]


def plan_roles(config: RunConfig, system: Sequence[str] = SYSTEM_ROLES) -> list[RolePlan]:
    """The roles of a run: one for each table in config.roles, and the system roles.

    Args:
        config: the loaded config.
        system: the system roles to run; empty for a supervised tree on its own.

    Raises:
        RelaxError: a role is unknown, cannot be imported, or its class is not as it must be.
    """
    kinds = [*system, *(kind for kind in config.roles if kind not in SYSTEM_ROLES)]
    return [_plan(config, kind) for kind in kinds]


def _plan(config: RunConfig, kind: str) -> RolePlan:
    table = config.roles.get(kind)
    target = role_target(kind, table_target(table))
    role = load_role(target)
    if role.restart not in ("permanent", "transient", "temporary"):
        raise RelaxError(
            f"roles.{kind}: {target}.restart is {role.restart!r}", hint="use permanent, transient or temporary"
        )
    return RolePlan(
        kind=kind,
        target=target,
        settings=role_settings(config, kind, role.Settings),
        tier=role.tier,
        restart=cast(RestartClass, role.restart),
        significant=role.significant,
        preload=role.preload,
    )


def table_target(table: Any) -> str | None:
    """The `target` of a role's table, whether it is still a mapping or already its settings."""
    found = table.get("target") if isinstance(table, dict) else getattr(table, "target", None)
    return found if isinstance(found, str) else None
