"""Read a roles.toml as a whole: typed, checked, every problem reported at once with its place."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, ValidationError

from relax_rt.config import RESOLVED_CONFIG
from relax_rt.config.checks import check_runtime
from relax_rt.config.inventory import Inventory
from relax_rt.config.job import Job, Planner, job_names, load_job
from relax_rt.config.problems import ConfigErrors, KeyPath, Problem, did_you_mean
from relax_rt.config.schema import RoleSettings, RunConfig, SupervisionTable
from relax_rt.config.source import ConfigSource, read_source
from relax_rt.config.target import TargetError, absolute_target, load_target
from relax_rt.config.validation import independent_of, repair, unknown_values, validate
from relax_rt.transport.rpc.errors import RelaxError

S = TypeVar("S", bound=RoleSettings)

ROLE_GROUP = "relax_rt.roles"
FILLED_IN = ("config_dir", "chosen")
"""Keys of the resolved config that the loader sets."""
SYSTEM_ROLES = ("registry", "queue")
"""Roles of every run; they need no table."""


class _AnyJob(RunConfig):
    """What can be checked when the job itself is not known."""

    model_config = ConfigDict(extra="ignore")


def load_config(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    inputs: bool = False,
    preflight: bool = False,
    answers: bool = True,
    measured: bool = True,
    inventory: Inventory | None = None,
) -> RunConfig:
    """Read a config, apply `--set` overrides, check everything.

    There are two stages. The quick one needs neither model nor data: keys, values, settings that contradict each other,
    and with `inputs` files that are not there. All of its problems are reported at once. The slow one runs only if the
    quick one found nothing.

    Args:
        path: a roles.toml.
        overrides: ``a.b=value`` each; the value is read as TOML, else as a string.
        inputs: also check that the models, data and user code that it names exist.
        preflight: with `inputs`, and then the slow stage, see `preflight_config`.
        answers: whether the slow stage scores some right answers of the data; False: the caller scores all of them.
        measured: the job may time this machine for the settings that it chooses, which imports torch; otherwise it
            answers from what is known, perhaps with other settings than a run would have.
        inventory: the run is planned for these machines, not started here: it must fit on them, and what this
            machine and this version lack is not reported.

    Returns:
        The job's config type, with `roles` holding one settings object for each role of the run and paths to the
        user's own code, the run directory and interpreters made absolute.

    Raises:
        ConfigErrors: what is wrong, all of it.
        RelaxError: the file cannot be read.
    """
    source, problems = read_source(path, overrides)
    config = _quick(path, source, problems, inventory, inputs=inputs or preflight, measured=measured)
    if preflight:
        _slow(path, source, config, answers=answers)
    return config


def preflight_config(config: RunConfig, path: Path, overrides: Sequence[str] = ()) -> None:
    """Run the job's slow checks: model, data, a dry run of the user's reward function. Each check prints what it does.

    Args:
        config: what `load_config` made of this file and these overrides.

    Raises:
        ConfigErrors: what is wrong, all of it.
    """
    _slow(path, read_source(path, overrides)[0], config)


def _slow(path: Path, source: ConfigSource, config: RunConfig, *, answers: bool = True) -> None:
    job = load_job(config.run.job)
    if problems := job.preflight(config, Path(config.config_dir), answers=answers):
        raise ConfigErrors(str(path), _placed(source, problems))


def _quick(
    path: Path,
    source: ConfigSource,
    problems: list[Problem],
    inventory: Inventory | None,
    *,
    inputs: bool,
    measured: bool,
) -> RunConfig:
    """Return the config if the quick checks find nothing wrong with it.

    Args:
        problems: those found while the source was read.
        inventory, inputs, measured: see load_config.
    """
    config_dir = path.absolute().parent
    for key in FILLED_IN:
        if key in source.data:
            problems.append(Problem((key,), f"{key} is filled in by the loader", at="key"))
            del source.data[key]
    job = _find_job(source.data, problems)
    if job is not None:
        source.data.update({key: table for key, table in job.assumed(source.data).items() if key not in source.data})
    model: type[RunConfig] = job.Config if job else _AnyJob
    runtime = _tables(model, source, problems)
    roles = _roles(source.data.get("roles", {}), job, config_dir, model, problems)
    if job is not None:
        roles = job.settled(roles, runtime.supervision if runtime is not None else SupervisionTable())
    directory = _run_dir(runtime, problems) if runtime is not None else None
    if runtime is not None and directory is not None:
        run = runtime.run.model_copy(update={"dir": directory})
        runtime = runtime.model_copy(update={"run": run, "roles": roles, "config_dir": str(config_dir)})
        # Also when single keys are wrong: checks that do not depend on them are reported too.
        across = check_runtime(runtime, here=inventory is None)
        if job is not None and isinstance(runtime, model):
            guessed, found = _chosen(job, runtime, config_dir, inventory, measured=False)
            across += found
            if inputs:
                reported = {problem.path for problem in [*problems, *across]}
                across += [one for one in job.missing_inputs(runtime, config_dir) if one.path not in reported]
            if problems or across or not measured:
                # Nothing is measured for a config that is refused anyway: it takes the time of importing torch.
                runtime = guessed
            else:
                runtime, across = _chosen(job, runtime, config_dir, inventory, measured=True)
        problems += independent_of(across, unknown_values(problems))
    if problems or runtime is None:
        raise ConfigErrors(str(path), _placed(source, problems))
    return runtime


def role_settings(config: RunConfig, kind: str, settings: type[S]) -> S:
    """Return a role's own table as its type; defaults if there is none.

    Raises:
        ConfigErrors: the table does not fit the type.
    """
    table = config.roles.get(kind, {})
    if isinstance(table, settings):
        return table
    plain = table.model_dump(exclude_unset=True) if isinstance(table, RoleSettings) else table
    found = validate(settings, plain, ("roles", kind))
    if isinstance(found, list):
        raise ConfigErrors(f"roles.{kind}", found)
    return found


def write_resolved(config: RunConfig, path: Path) -> None:
    """Write a loaded config as JSON, defaults and overrides included; the file is complete or absent."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps(config.model_dump(mode="json"), indent=1) + "\n")
    fresh.replace(path)


def read_resolved(path: Path) -> RunConfig:
    """Read what write_resolved wrote. Tables of roles other than the job's stay plain: `role_settings` types them.

    Raises:
        RelaxError: the file does not exist or was not written by this version.
        TargetError: the user's role that stands for one of the job's cannot be imported.
    """
    try:
        data = json.loads(path.read_text())
        job = load_job(data["run"]["job"])
        config = job.Config.model_validate_json(json.dumps(data), strict=True)
        roles = {
            kind: _resolved_table(kind, table, job) if kind in job.Roles or kind in SYSTEM_ROLES else table
            for kind, table in config.roles.items()
        }
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        hint = "start the run again with `relax-rt up`"
        raise RelaxError(f"resolved config {path} cannot be read", why=str(error), hint=hint) from error
    return config.model_copy(update={"roles": roles})


def _resolved_table(kind: str, table: dict[str, Any], job: Job) -> RoleSettings:
    text = json.dumps(table)
    try:
        return _settings_type(kind, job).model_validate_json(text, strict=True)
    except ValidationError:
        if not isinstance(target := table.get("target"), str):
            raise
        # A role of the user's own in the place of one of the job's has further settings. Only then is it imported, for
        # this is read in every process.
        settings: type[RoleSettings] = load_target(target).Settings
        return settings.model_validate_json(text, strict=True)


def config_digest(config: RunConfig) -> str:
    """Return 16 hex digits that change with every setting but the folders and the listening address."""
    data = config.model_dump(mode="json")
    del data["config_dir"], data["chosen"], data["run"]["dir"], data["supervision"]["nodes"]["listen"]
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def known_roles() -> list[str]:
    """The kinds of role that installed packages offer."""
    return sorted({entry.name for entry in entry_points(group=ROLE_GROUP)})


def _hardware(job: Job, config: RunConfig, inventory: Inventory | None) -> list[Problem]:
    """Report why this version cannot start the run, or why it does not fit on the machines it is planned for."""
    if not isinstance(job, Planner) or any(kind not in config.roles for kind in job.Roles):
        return []
    if inventory is None:
        return job.startable(config)
    found = job.plan_on(config, inventory)
    return found if isinstance(found, list) else []


def _chosen(
    job: Job, config: RunConfig, config_dir: Path, inventory: Inventory | None, *, measured: bool
) -> tuple[RunConfig, list[Problem]]:
    """Return the config with the job's choices filled in, and what is wrong with it then."""
    recorded = {} if inventory is not None else _recorded(Path(config.run.dir))
    config = job.choose(config, recorded, measured=measured, here=inventory is None)
    return config, [*job.check(config, config_dir), *_hardware(job, config, inventory)]


def _recorded(run_dir: Path) -> dict[str, Any]:
    """The resolved config of the run that `up` would resume; empty if there is none, or it cannot be read."""
    try:
        found = json.loads((run_dir / RESOLVED_CONFIG).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _find_job(data: dict[str, Any], problems: list[Problem]) -> Job | None:
    run = data.get("run")
    name = run.get("job", "rl") if isinstance(run, dict) else "rl"
    if not isinstance(name, str):
        return None
    try:
        return load_job(name)
    except RelaxError as error:
        known = job_names()
        why = f": {error.why}" if error.why else ""
        problems.append(Problem(("run", "job"), error.what + why, did_you_mean(name, known) or error.hint))
        return None


def _tables(model: type[RunConfig], source: ConfigSource, problems: list[Problem]) -> RunConfig | None:
    """Return the config, repaired if it has problems; None if it cannot be."""
    found = validate(model, source.data)
    if not isinstance(found, list):
        return found
    problems += found
    # The runtime's tables are checked also when the job's are wrong beyond repair.
    rest = validate(_AnyJob, source.data)
    return repair(model, source.data, found) or repair(_AnyJob, source.data, rest if isinstance(rest, list) else [])


def _run_dir(config: RunConfig, problems: list[Problem]) -> str | None:
    try:
        directory = config.run.dir.format(name=config.run.name)
    except (KeyError, IndexError, ValueError, AttributeError):
        problems.append(Problem(("run", "dir"), f'"{config.run.dir}" has a placeholder other than {{name}}'))
        return None
    return str(Path(directory).expanduser().absolute())


def _roles(
    tables: Any, job: Job | None, config_dir: Path, home: type[RunConfig], problems: list[Problem]
) -> dict[str, RoleSettings]:
    """The settings of every role of the run: those with a table, the job's, and the system's."""
    if not isinstance(tables, dict):
        return {}
    roles: dict[str, RoleSettings] = {}
    for kind in dict.fromkeys([*SYSTEM_ROLES, *(job.Roles if job else ()), *tables]):
        table = tables.get(kind, {})
        if not isinstance(table, dict):
            problems.append(Problem(("roles", kind), f"roles.{kind} must be a table"))
            continue
        table = _absolute(table, config_dir)
        settings = _role_type(kind, table, job, config_dir, problems)
        if settings is None:
            continue
        found = validate(settings, table, ("roles", kind), home)
        if isinstance(found, list):
            problems += found
            sound = repair(settings, table, found, ("roles", kind))
            if sound is not None:
                roles[kind] = sound
        else:
            roles[kind] = found
    return roles


def _absolute(table: Mapping[str, Any], config_dir: Path) -> dict[str, Any]:
    """The table with its paths made absolute."""
    changed = dict(table)
    if isinstance(target := table.get("target"), str):
        changed["target"] = absolute_target(target, config_dir)
    if isinstance(python := table.get("python"), str) and "/" in python:
        # Not resolved: an environment's interpreter is a link, and where the link lies makes the environment.
        changed["python"] = str(config_dir / Path(python).expanduser())
    return changed


def _role_type(
    kind: str, table: dict[str, Any], job: Job | None, config_dir: Path, problems: list[Problem]
) -> type[RoleSettings] | None:
    path: KeyPath = ("roles", kind)
    if isinstance(target := table.get("target"), str):
        return _target_type(target, config_dir, (*path, "target"), problems)
    if isinstance(job, Planner) and kind in job.Planned:
        return job.Planned[kind]
    known = known_roles()
    if kind not in known and not (job and kind in job.Roles):
        hint = did_you_mean(kind, known) or f'known: {", ".join(known)}; your own is named by target = "file.py:Class"'
        problems.append(Problem(path, f"unknown role '{kind}'", hint, at="key"))
        return None
    if job is None and kind not in SYSTEM_ROLES:
        return None
    try:
        return _settings_type(kind, job)
    except TargetError as error:
        problems.append(Problem(path, f"role '{kind}': {error.what}: {error.why}", error.hint, at="key"))
        return None


def _target_type(target: str, config_dir: Path, path: KeyPath, problems: list[Problem]) -> type[RoleSettings] | None:
    try:
        role = load_target(target, config_dir)
    except TargetError as error:
        why = f": {error.why}" if error.why else ""
        problems.append(Problem(path, error.what + why, error.hint))
        return None
    settings = getattr(role, "Settings", None)
    if not (isinstance(role, type) and isinstance(settings, type) and issubclass(settings, RoleSettings)):
        problems.append(Problem(path, f"{target} is not a subclass of relax_rt.interfaces.role.Role"))
        return None
    return settings


def _settings_type(kind: str, job: Job | None) -> type[RoleSettings]:
    """The settings type of an installed role; the job's are known without importing the role."""
    if job is not None and kind in job.Roles:
        return job.Roles[kind]
    if kind in SYSTEM_ROLES:
        return RoleSettings
    (entry, *_) = entry_points(group=ROLE_GROUP, name=kind)
    settings = getattr(load_target(entry.value), "Settings", None)
    if not (isinstance(settings, type) and issubclass(settings, RoleSettings)):
        raise TargetError(f"{entry.value}.Settings is no RoleSettings")
    return settings


def _placed(source: ConfigSource, problems: list[Problem]) -> list[Problem]:
    """Locate the problems in the source; report the same finding once."""
    located = [source.locate(problem) for problem in problems]
    return [problem for index, problem in enumerate(located) if problem not in located[:index]]
