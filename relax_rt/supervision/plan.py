"""From a config to the slots of a run: which role classes, how many processes of each, under which rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, get_args

import msgspec

from relax_rt.config.loader import role_settings
from relax_rt.config.schema import RoleSettings, RunConfig, SupervisionTable
from relax_rt.interfaces.loading import load_role, role_target
from relax_rt.supervision.tree import RestartClass, RoleSpec, SlotSpec, Strategy
from relax_rt.transport.rpc.errors import RelaxError

SYSTEM_ROLES = ("registry", "queue")
NOT_COUNTED_FOR_STALL = (*SYSTEM_ROLES, "writer", "dashboard")
"""Roles whose progress is that of others, or of their own housekeeping: it does not reset the stall timer."""


class RolePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of role in a run: its class and its settings."""

    kind: str
    target: str
    settings: RoleSettings
    tier: int
    restart: RestartClass
    significant: bool
    drains: bool = False
    preload: tuple[str, ...] = ()
    gang: bool = False
    strategy: Strategy = "one_for_one"

    def specs(self, rules: SupervisionTable) -> list[SlotSpec]:
        """Its slots."""
        return [self._spec(n, rules) for n in range(self.settings.count)]

    def rules(self, rules: SupervisionTable) -> RoleSpec:
        """What its slots have to do with each other."""
        return RoleSpec(
            kind=self.kind,
            strategy=self.strategy,
            gang=self.gang,
            min_ready=self.settings.min_ready,
            role_restarts=rules.restart.role_restarts,
            role_period_s=rules.restart.role_period_s,
            slot=self._spec(0, rules),
        )

    def _spec(self, n: int, rules: SupervisionTable) -> SlotSpec:
        table = self.settings
        return SlotSpec(
            slot=f"{self.kind}/{n}",
            kind=self.kind,
            tier=self.tier,
            restart=self.restart,
            significant=self.significant,
            system=self.kind in SYSTEM_ROLES,
            counts_for_stall=self.kind not in NOT_COUNTED_FOR_STALL,
            start_timeout_s=table.start_timeout_s or rules.start_timeout_s,
            stop_timeout_s=rules.stop_timeout_s,
            drains=self.drains,
            drain_timeout_s=rules.drain_timeout_s,
            hang_after_s=table.hang_after_s,
            max_restarts=rules.restart.max_restarts,
            period_s=rules.restart.period_s,
            backoff_first_s=rules.restart.backoff_first_s,
            backoff_max_s=rules.restart.backoff_max_s,
            threads=table.threads,
            gpus=table.gpus,
            memory_mib=table.memory_mib or 0,
            node=table.node or "",
        )


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
    _refuse_unknown(kind, target, "restart", role.restart, get_args(RestartClass))
    _refuse_unknown(kind, target, "strategy", role.strategy, get_args(Strategy))
    settings = role_settings(config, kind, role.Settings)
    gang = role.is_gang(settings)
    if gang:
        _refuse_in_gang(kind, settings)
    return RolePlan(
        kind=kind,
        target=target,
        settings=settings,
        tier=role.tier,
        restart=cast(RestartClass, role.restart),
        significant=role.significant,
        drains=role.drains,
        preload=role.preload,
        gang=gang,
        strategy=settings.strategy or cast(Strategy, role.strategy),
    )


def _refuse_unknown(kind: str, target: str, what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise RelaxError(f"roles.{kind}: {target}.{what} is {value!r}", hint=f"use {', '.join(known)}")


def _refuse_in_gang(kind: str, settings: RoleSettings) -> None:
    """A gang's ranks start, fail and come back together: settings that say otherwise cannot be kept."""
    why = "the role is a gang: its slots start, fail and come back together"
    if settings.strategy not in (None, "one_for_all"):
        raise RelaxError(f"roles.{kind}.strategy = {settings.strategy!r}", why=why, hint="leave it out")
    if settings.min_ready not in (None, settings.count):
        raise RelaxError(f"roles.{kind}.min_ready = {settings.min_ready}", why=why, hint="leave it out")


def table_target(table: Any) -> str | None:
    """The `target` of a role's table, whether it is still a mapping or already its settings."""
    found = table.get("target") if isinstance(table, dict) else getattr(table, "target", None)
    return found if isinstance(found, str) else None
