"""Plans the slots of a run from its config: role classes, counts, rules; and checks another count of a living run."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import cast, get_args

import msgspec
import psutil  # type: ignore[import-untyped]

from relax_rt.config.checks import check_runtime
from relax_rt.config.job import Planner, load_job
from relax_rt.config.loader import SYSTEM_ROLES, role_settings
from relax_rt.config.problems import Problem
from relax_rt.config.schema import MIB, RoleSettings, RunConfig, SupervisionTable
from relax_rt.config.validation import validate
from relax_rt.interfaces.role import load_role, role_target
from relax_rt.supervision.rundir import SHM_ROOT
from relax_rt.supervision.tree import RestartClass, RoleSpec, SlotSpec, Strategy
from relax_rt.transport.rpc.errors import Refused, RelaxError

NOT_COUNTED_FOR_STALL = (*SYSTEM_ROLES, "writer", "dashboard")
"""Roles whose progress only reflects that of others, or housekeeping: it does not reset the stall timer."""


MAX_THREADS_A_CORE = 16
"""Compute threads for each core: `doctor` warns at a quarter of it; above it the threads mostly wait for each other,
and the agent may be unreachable."""


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
        """Return its slots."""
        return [self._spec(n, rules) for n in range(self.settings.count)]

    def rules(self, rules: SupervisionTable) -> RoleSpec:
        """Return how its slots depend on each other."""
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
    """Return the roles of a run: one for each table in config.roles, and the system roles.

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
    # Still a mapping, or its settings already.
    named = table.get("target") if isinstance(table, dict) else getattr(table, "target", None)
    target = role_target(kind, named if isinstance(named, str) else None)
    role = load_role(target)
    for what, value, choices in (
        ("restart", role.restart, get_args(RestartClass)),
        ("strategy", role.strategy, get_args(Strategy)),
    ):
        if value not in choices:
            raise RelaxError(f"roles.{kind}: {target}.{what} is {value!r}", hint=f"use {', '.join(choices)}")
    settings = role_settings(config, kind, role.Settings)
    gang = role.is_gang(settings)
    if gang:
        why = "the role is a gang: its slots start, fail and restart together"
        if settings.strategy not in (None, "one_for_all"):
            raise RelaxError(f"roles.{kind}.strategy = {settings.strategy!r}", why=why, hint="leave it out")
        if settings.min_ready not in (None, settings.count):
            raise RelaxError(f"roles.{kind}.min_ready = {settings.min_ready}", why=why, hint="leave it out")
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


def check_count(
    config: RunConfig, plans: Iterable[RolePlan], counts: Mapping[str, int], kind: str, count: int, cores: int
) -> None:
    """Refuse a count that the config may not have, or that the machines cannot run. May import the job's modules.

    Args:
        config: the run's.
        counts: the slots of each role now.
        cores: of all nodes together.

    Raises:
        Refused: with the message of `relax-rt validate`, or with what there is not enough of.
    """
    what = f"cannot scale {kind} to {count}"
    plans = list(plans)
    settings = {plan.kind: plan.settings for plan in plans}
    before = _with_counts(config, settings, counts)
    after = _with_counts(config, settings, {**counts, kind: count})
    known = [] if isinstance(before, list) else _problems(before)
    found = after if isinstance(after, list) else _problems(after)
    for problem in found:
        # What is wrong already is not the new count's doing.
        if problem not in known:
            raise Refused(what, why=problem.message, hint=problem.hint)
    if isinstance(after, RunConfig):
        plan = next((plan for plan in plans if plan.kind == kind and kind in after.roles), None)
        if plan is not None and not plan.gang and load_role(plan.target).is_gang(after.roles[kind]):
            hint = f"change roles.{kind}.count and start the run again: it resumes"
            raise Refused(what, why="so many are a gang, whose ranks start together", hint=hint)
    if count > counts.get(kind, 0) and isinstance(after, RunConfig) and isinstance(before, RunConfig):
        _check_room(after, before, what, cores)


def _with_counts(
    config: RunConfig, settings: Mapping[str, RoleSettings], counts: Mapping[str, int]
) -> RunConfig | list[Problem]:
    roles: dict[str, RoleSettings] = {}
    problems: list[Problem] = []
    for kind, table in settings.items():
        plain = {**table.model_dump(mode="json", exclude_unset=True), "count": counts.get(kind, table.count)}
        found = validate(type(table), plain, ("roles", kind), type(config))
        if isinstance(found, list):
            problems += found
        else:
            roles[kind] = found
    return problems or config.model_copy(update={"roles": {**config.roles, **roles}})


def _problems(config: RunConfig) -> Sequence[Problem]:
    job = load_job(config.run.job)
    found = [*check_runtime(config, here=False), *job.check(config, Path(config.config_dir))]
    if isinstance(job, Planner) and all(kind in config.roles for kind in job.Roles):
        found += job.startable(config)
    return found


def _check_room(config: RunConfig, before: RunConfig, what: str, cores: int) -> None:
    roles = config.roles.values()
    threads = sum(role.count * role.threads for role in roles)
    if threads > (most := MAX_THREADS_A_CORE * max(1, cores)):
        why = f"the run would have {threads} compute threads on {cores} cores, and {most} are the most"
        raise Refused(what, why=why, hint="`relax-rt doctor` warns at a quarter of that; other nodes may join")
    need = sum(role.count * (role.memory_mib or 0) for role in roles)
    have = int(psutil.virtual_memory().total) // MIB
    if not config.supervision.nodes.listen and need > have:
        why = f"memory_mib of all roles together would be {need} MiB, and the machine has {have} MiB"
        raise Refused(what, why=why, hint="lower memory_mib of the roles, or ask for fewer slots")
    job = load_job(config.run.job)
    more, free = job.shm_bytes(config) - job.shm_bytes(before), shutil.disk_usage(SHM_ROOT).free
    if more > free:
        why = f"it would need {more // MIB} MiB more of {SHM_ROOT}, and {free // MIB} MiB are free"
        raise Refused(what, why=why, hint="make /dev/shm larger (in a container: --shm-size), or ask for fewer slots")
