"""`relax-rt chaos`: inject faults into a living run, then judge it by its records."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from msgspec.structs import replace

from relax_rt.chaos.evidence import gather, job
from relax_rt.chaos.faults import FAULTS, Strike, by_steps, faults_named, once_named, poisson, roles_named, seconds
from relax_rt.chaos.faults import at_once as strikes_at_once
from relax_rt.chaos.injector import Injector, Intensity, Outcome
from relax_rt.chaos.session import StepWatch, play, settled
from relax_rt.chaos.verdict import judge, render
from relax_rt.cli.app import FAILED, OK, STEER, Json, Run, app
from relax_rt.cli.display import say, show_json
from relax_rt.cli.runs import find_run_dir
from relax_rt.config.problems import BadInput
from relax_rt.config.schema import SupervisionTable
from relax_rt.observe.metrics import read_metrics
from relax_rt.supervision import control
from relax_rt.supervision.rundir import RESOLVED_CONFIG, read_json
from relax_rt.transport.rpc.errors import Refused

SETTLE_S = 10.0
"""Time for a living run to have all its slots back before it is judged."""


@app.command(group=STEER)
def chaos(
    run: Run = None,
    *,
    seed: Annotated[int, Parameter(help="The same seed gives the same faults.")] = 1,
    mean: Annotated[str, Parameter(help="Mean time between two faults, as 5s.")] = "5s",
    for_: Annotated[str, Parameter(name="--for", help="Duration of the schedule, as 5m.")] = "1m",
    in_steps: Annotated[float, Parameter(help="Instead of by time: faults in this share of the steps, as 0.1.")] = 0.0,
    faults: Annotated[str, Parameter(help="Names of faults, comma-separated; `--dry-run` lists them.")] = "kill",
    roles: Annotated[str, Parameter(help="Roles or slots, comma-separated; all if left out.")] = "",
    at_once: Annotated[
        list[str] | None,
        Parameter(
            help="Instead of a schedule: this fault now, as kill:trainer/0 or stop:rollout:12s; may be repeated.",
            negative_iterable=(),
        ),
    ] = None,
    dry_run: Annotated[bool, Parameter(help="Print the schedule and do nothing.")] = False,
    check: Annotated[bool, Parameter(help="Inject nothing; check what the run has recorded.")] = False,
    baseline: Annotated[Path | None, Parameter(help="An undisturbed run of the same config, for the ETTR.")] = None,
    wait: Annotated[str, Parameter(help="After the faults, wait this long for the run's end, as 30m.")] = "0",
    beyond_intensity: Annotated[
        bool, Parameter(help="Also kill slots that have no restart left: tests escalation.")
    ] = False,
    json: Json = False,
) -> int:
    """Inject faults into a living run by a schedule, and check whether it kept its guarantees."""
    run_dir = find_run_dir(run)
    if baseline is not None:
        baseline = find_run_dir(baseline)
    wait_s = seconds(wait)
    if check:
        return _judge(run_dir, baseline, as_json=json)
    slots = _may_be_harmed(run_dir)
    schedule = _schedule(run_dir, slots, seed, (mean, for_, in_steps), (faults, roles, at_once or []))
    if dry_run:
        _show_schedule(schedule, seed, as_json=json)
        return OK
    intensity = None if beyond_intensity else _intensity(run_dir)
    with Injector(run_dir, seed, intensity=intensity) as injector:
        session = play(run_dir, injector, schedule, defer=True, on_outcome=_tell)
    if wait_s and not session.interrupted:
        control.wait_ended(run_dir, wait_s)
    # Who interrupted it did not want the rest.
    left = 0 if session.interrupted else session.left
    return _judge(run_dir, baseline, left, as_json=json)


def _may_be_harmed(run_dir: Path) -> list[str]:
    """The slots of a living run that allows faults.

    Raises:
        NoRun: it is not alive.
        Refused: it was started with chaos = false.
    """
    found = control.find_run(run_dir)
    if not found.alive:
        over = control.status(run_dir)
        why = f"run {over.run_id} is over: {over.status}"
        raise control.NoRun(f"no run lives in {run_dir}", why=why, hint="`--check` judges what it has recorded")
    if not _supervision(run_dir).chaos:
        hint = "start it with --set supervision.chaos=true"
        raise Refused(f"faults in {run_dir}", why="the run was started with supervision.chaos = false", hint=hint)
    return [slot.slot for slot in control.status(run_dir).slots]


def _supervision(run_dir: Path) -> SupervisionTable:
    """The [supervision] table of the run; its job's package need not be importable here."""
    return SupervisionTable.model_validate((read_json(run_dir / RESOLVED_CONFIG) or {}).get("supervision", {}))


def _schedule(
    run_dir: Path,
    slots: list[str],
    seed: int,
    times: tuple[str, str, float],
    what: tuple[str, str, list[str]],
) -> list[Strike]:
    mean, for_, share = times
    faults, roles, once = what
    if once:
        return strikes_at_once(seed, [once_named(text, slots) for text in once])
    of_roles = roles_named(roles, slots)
    if not share:
        return poisson(seed, seconds(mean), seconds(for_), faults_named(faults), of_roles)
    watch = StepWatch(run_dir)
    first = watch.look() + 1
    watch.close()
    return by_steps(seed, share, first, _target(run_dir), faults_named(faults), of_roles)


def _target(run_dir: Path) -> int:
    target = job(read_json(run_dir / RESOLVED_CONFIG) or {}).get("target")
    if not target:
        raise BadInput("--in-steps", why="this run's job has no number of steps", hint="give --mean and --for")
    return int(target)


def _intensity(run_dir: Path) -> Intensity:
    table = _supervision(run_dir).restart
    return Intensity(table.max_restarts, table.period_s)


def _tell(outcome: Outcome) -> None:
    """Print one line for each strike to stderr, apart from the result."""
    strike = outcome.strike
    lasts = f" for {strike.seconds:g} s" if strike.seconds else ""
    what = f"{strike.number:>4}  {strike.fault} {strike.slot}{lasts}"
    print(what + (f"  withheld: {outcome.withheld}" if outcome.withheld else ""), file=sys.stderr, flush=True)


def _show_schedule(schedule: list[Strike], seed: int, *, as_json: bool) -> None:
    if as_json:
        show_json({"seed": seed, "strikes": schedule})
        return
    for strike in schedule:
        at = f"step {strike.at_step}" if strike.at_step else f"{strike.at_s:.3f} s"
        lasts = f"for {strike.seconds:g} s" if strike.seconds else ""
        amount = f"{strike.amount:g} {FAULTS[strike.fault].unit}" if strike.amount else ""
        say(f"{strike.number:>4}  {at:>12}  {strike.fault:10} {strike.slot or 'the run':14} {lasts} {amount}".rstrip())
    say("\nfaults there are:")
    for fault in FAULTS.values():
        say(f"  {fault.name:10} {fault.what}" + (f", {fault.seconds:g} s" if fault.seconds else ""))


def _judge(run_dir: Path, baseline: Path | None, left: int = 0, *, as_json: bool) -> int:
    undisturbed = list(read_metrics(baseline, "step")) if baseline is not None else None
    recovered = settled(run_dir, SETTLE_S)
    verdict = judge(replace(gather(run_dir), recovered=recovered), undisturbed, left=left)
    show_json(verdict) if as_json else say(render(verdict))
    return OK if verdict.shown else FAILED
