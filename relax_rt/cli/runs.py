"""Finds the run that a command is about."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from relax_rt.config.loader import read_resolved
from relax_rt.config.problems import BadInput, did_you_mean
from relax_rt.config.schema import RunConfig
from relax_rt.supervision.control import NoRun, find_run
from relax_rt.supervision.rundir import RESOLVED_CONFIG, RUN_JSON
from relax_rt.transport.rpc.errors import RelaxError

RUNS = Path("runs")


def find_run_dir(given: Path | None) -> Path:
    """Find the run directory: the given path or name under ./runs, else the live or newest run.

    Raises:
        NoRun: there is none, or several are live and none is given.
    """
    known = _runs()
    if given is not None:
        if (found := named_run(given)) is not None:
            return found
        names = [path.name for path in known]
        hint = did_you_mean(str(given), names) or (f"there is {', '.join(names[:8])}" if names else "")
        raise NoRun(f"no run in {given}", why="there is no run.json", hint=hint)
    if Path(RUN_JSON).is_file():
        return Path()
    if not known:
        raise NoRun(f"no run under {RUNS.absolute()}", hint="give the run directory, or start one with `relax-rt up`")
    live = [path for path in known if _is_live(path)]
    if len(live) > 1:
        raise NoRun(
            f"{len(live)} live runs under {RUNS}",
            why=", ".join(path.name for path in live),
            hint="name one of them",
        )
    return live[0] if live else known[0]


def named_run(given: Path | str) -> Path | None:
    """The run directory of that path or name; None: there is none."""
    return next((path for path in (Path(given), RUNS / given) if (path / RUN_JSON).is_file()), None)


def split_run(word: str, run: Path | None, slots: Callable[[Path], Collection[str]]) -> tuple[Path, str]:
    """Resolve a word that may name a run, a slot or a role: returns the run directory, and the slot or role (or "").

    Args:
        run: the run if it is named separately: then the word is not a run.
        slots: the slots and roles of a run.

    Raises:
        NoRun: see find_run_dir.
        BadInput: it may be both.
    """
    named = named_run(word) if run is None and word else None
    if named is None:
        return find_run_dir(run), word
    try:
        default = find_run_dir(None)
        known = slots(default)
    except RelaxError:
        return named, ""
    if word in known:
        raise BadInput(
            f"{word!r} may be the run in {named} or {word} of the run in {default}",
            hint=f"--run {word} names the run; {word} --run {default} names the slot or role",
        )
    return named, ""


def resolved_config(run_dir: Path) -> RunConfig:
    """The config of a run, as it was started."""
    return read_resolved(run_dir / RESOLVED_CONFIG)


def _runs() -> list[Path]:
    """Run directories under ./runs, newest first."""
    found = [path.parent for path in RUNS.glob(f"*/{RUN_JSON}")]
    return sorted(found, key=lambda path: (path / RUN_JSON).stat().st_mtime, reverse=True)


def _is_live(run_dir: Path) -> bool:
    try:
        return find_run(run_dir).alive
    except NoRun:
        return False
