"""Whether a living run can have another number of slots: by the rules of its config, and by the room there is."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from relax_rt.config.checks import check_runtime
from relax_rt.config.job import Planner, load_job
from relax_rt.config.problems import Problem
from relax_rt.config.schema import MIB, RoleSettings, RunConfig
from relax_rt.config.validation import validate
from relax_rt.interfaces.loading import load_role
from relax_rt.supervision.plan import RolePlan
from relax_rt.supervision.rundir import SHM_ROOT
from relax_rt.transport.rpc.errors import Refused

MOST_THREADS_A_CORE = 16
"""Threads that are ready to compute on one core: `doctor` warns at a quarter of it; above it a run only waits for
itself, and its agent may not be reached."""


def check_count(
    config: RunConfig, plans: Iterable[RolePlan], counts: Mapping[str, int], kind: str, count: int, cores: int
) -> None:
    """Refuse a count that the config may not have, or that the machines cannot carry. It may import the job's modules.

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
        _refuse_new_gang(after, plans, kind, what)
    if count > counts.get(kind, 0) and isinstance(after, RunConfig) and isinstance(before, RunConfig):
        _check_room(after, before, what, cores)


def _refuse_new_gang(after: RunConfig, plans: Iterable[RolePlan], kind: str, what: str) -> None:
    plan = next((plan for plan in plans if plan.kind == kind and kind in after.roles), None)
    if plan is not None and not plan.gang and load_role(plan.target).is_gang(after.roles[kind]):
        hint = f"change roles.{kind}.count and start the run again: it resumes"
        raise Refused(what, why="so many are a gang, whose ranks start together", hint=hint)


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
    if threads > (most := MOST_THREADS_A_CORE * max(1, cores)):
        why = f"the run would have {threads} compute threads on {cores} cores, and {most} are the most"
        raise Refused(what, why=why, hint="`relax-rt doctor` warns at a quarter of that; other nodes may join")
    need = sum(role.count * (role.memory_mib or 0) for role in roles)
    have = _memory_mib()
    if not config.supervision.nodes.listen and need > have:
        why = f"memory_mib of all roles together would be {need} MiB, and the machine has {have} MiB"
        raise Refused(what, why=why, hint="lower memory_mib of the roles, or ask for fewer slots")
    job = load_job(config.run.job)
    more, free = job.shm_bytes(config) - job.shm_bytes(before), shutil.disk_usage(SHM_ROOT).free
    if more > free:
        why = f"it would need {more // MIB} MiB more of {SHM_ROOT}, and {free // MIB} MiB are free"
        raise Refused(what, why=why, hint="make /dev/shm larger (in a container: --shm-size), or ask for fewer slots")


def _memory_mib() -> int:
    import psutil  # type: ignore[import-untyped]

    return int(psutil.virtual_memory().total) // MIB
