"""Which run a command is about."""

from __future__ import annotations

from pathlib import Path

from relax_rt.config.loader import read_resolved
from relax_rt.config.problems import did_you_mean
from relax_rt.config.schema import RunConfig
from relax_rt.supervision.control import NoRun, find_run
from relax_rt.supervision.rundir import RESOLVED_CONFIG, RUN_JSON

RUNS = Path("runs")


def find_run_dir(given: Path | None) -> Path:
    """The run directory meant: the one given (a path, or a name under ./runs), else the living or newest one.

    Raises:
        NoRun: there is none, or several live and none is given.
    """
    known = _runs()
    if given is not None:
        for candidate in (given, RUNS / given):
            if (candidate / RUN_JSON).is_file():
                return candidate
        names = [path.name for path in known]
        hint = did_you_mean(str(given), names) or (f"there is {', '.join(names[:8])}" if names else "")
        raise NoRun(f"no run in {given}", why="there is no run.json", hint=hint)
    if Path(RUN_JSON).is_file():
        return Path()
    if not known:
        raise NoRun(f"no run under {RUNS.absolute()}", hint="give the run directory, or start one with `relax-rt up`")
    living = [path for path in known if _lives(path)]
    if len(living) > 1:
        raise NoRun(
            f"{len(living)} runs live under {RUNS}",
            why=", ".join(path.name for path in living),
            hint="name the one that is meant",
        )
    return living[0] if living else known[0]


def resolved_config(run_dir: Path) -> RunConfig:
    """The config of a run, as it was started."""
    return read_resolved(run_dir / RESOLVED_CONFIG)


def _runs() -> list[Path]:
    """Run directories under ./runs, newest first."""
    found = [path.parent for path in RUNS.glob(f"*/{RUN_JSON}")]
    return sorted(found, key=lambda path: (path / RUN_JSON).stat().st_mtime, reverse=True)


def _lives(run_dir: Path) -> bool:
    try:
        return find_run(run_dir).alive
    except NoRun:
        return False
