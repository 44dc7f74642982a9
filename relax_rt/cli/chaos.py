"""`relax-rt chaos`: inject faults into a live run, then judge it by its records."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from msgspec.structs import replace

from relax_rt.chaos.evidence import job_settings, read_evidence
from relax_rt.chaos.faults import (
    FAULTS,
    ScheduledFault,
    by_steps,
    immediate_faults,
    parse_fault,
    parse_faults,
    parse_roles,
    poisson,
)
from relax_rt.chaos.injector import FaultOutcome, Injector, RestartBudget, StepFollower, run_schedule, wait_recovered
from relax_rt.chaos.verdict import judge, render
from relax_rt.cli.app import FAILED, OK, Json, Run
from relax_rt.cli.display import say, show_json
from relax_rt.cli.runs import find_run_dir
from relax_rt.config.problems import BadInput
from relax_rt.config.schema import SupervisionTable
from relax_rt.observe.metrics import read_metrics
from relax_rt.observe.text import parse_duration
from relax_rt.supervision import control
from relax_rt.supervision.rundir import RESOLVED_CONFIG, read_json
from relax_rt.transport.rpc.errors import Refused

RECOVERY_S = 10.0
"""Time for a live run to have all its slots ready again before it is judged."""


def chaos(
    run: Run = None,
    *,
    seed: Annotated[int, Parameter(help="The same seed gives the same faults.")] = 1,
    mean: Annotated[str, Parameter(help="Mean time between two faults, as 5s.")] = "5s",
    for_: Annotated[str, Parameter(name="--for", help="Duration of the schedule, as 5m.")] = "1m",
    in_steps: Annotated[float, Parameter(help="Instead of by time: faults in this share of the steps, as 0.1.")] = 0.0,
    faults: Annotated[str, Parameter(help="Names of faults, comma-separated. `--dry-run` lists them.")] = "kill",
    roles: Annotated[str, Parameter(help="Roles or slots, comma-separated. Default: all.")] = "",
    at_once: Annotated[
        list[str] | None,
        Parameter(
            help="Instead of a schedule: this fault now, as kill:trainer/0 or stop:rollout:12s. Repeatable.",
            negative_iterable=(),
        ),
    ] = None,
    dry_run: Annotated[bool, Parameter(help="Print the schedule and inject nothing.")] = False,
    check: Annotated[bool, Parameter(help="Inject nothing; check what the run has recorded.")] = False,
    baseline: Annotated[Path | None, Parameter(help="An undisturbed run of the same config, for the ETTR.")] = None,
    wait: Annotated[str, Parameter(help="After the faults, wait this long for the run's end, as 30m.")] = "0",
    beyond_intensity: Annotated[
        bool, Parameter(help="Also inject into slots that have no restart left, to test escalation.")
    ] = False,
    json: Json = False,
) -> int:
    """Inject faults into a live run, and judge it."""
    run_dir = find_run_dir(run)
    if baseline is not None:
        baseline = find_run_dir(baseline)
    wait_s = parse_duration(wait)
    if check:
        return _judge(run_dir, baseline, as_json=json)
    slots = _slots_for_faults(run_dir)
    if at_once:
        schedule = immediate_faults(seed, [parse_fault(text, slots) for text in at_once])
    elif in_steps:
        steps = StepFollower(run_dir)
        first = steps.newest() + 1
        steps.close()
        target = job_settings(read_json(run_dir / RESOLVED_CONFIG) or {}).get("target")
        if not target:
            raise BadInput("--in-steps", why="this run's job has no number of steps", hint="give --mean and --for")
        schedule = by_steps(seed, in_steps, first, int(target), parse_faults(faults), parse_roles(roles, slots))
    else:
        mean_s, for_s = parse_duration(mean), parse_duration(for_)
        schedule = poisson(seed, mean_s, for_s, parse_faults(faults), parse_roles(roles, slots))
    if dry_run:
        _show_schedule(schedule, seed, as_json=json)
        return OK
    restart = _supervision(run_dir).restart
    budget = None if beyond_intensity else RestartBudget(restart.max_restarts, restart.period_s)
    with Injector(run_dir, seed, budget=budget) as injector:
        result = run_schedule(run_dir, injector, schedule, defer=True, on_outcome=_print_outcome)
    if wait_s and not result.interrupted:
        control.wait_ended(run_dir, wait_s)
    # After Ctrl-C the rest of the schedule was not wanted, so it is not counted as missing.
    return _judge(run_dir, baseline, 0 if result.interrupted else result.not_injected, as_json=json)


def _slots_for_faults(run_dir: Path) -> list[str]:
    """The slots of a live run that allows faults.

    Raises:
        NoRun: it is not live.
        Refused: it was started with chaos = false.
    """
    found = control.find_run(run_dir)
    if not found.alive:
        ended = control.status(run_dir)
        why = f"run {ended.run_id} is over: {ended.status}"
        raise control.NoRun(f"no live run in {run_dir}", why=why, hint="`--check` judges what it has recorded")
    if not _supervision(run_dir).chaos:
        hint = "start it with --set supervision.chaos=true"
        raise Refused(f"faults in {run_dir}", why="the run was started with supervision.chaos = false", hint=hint)
    return [slot.slot for slot in control.status(run_dir).slots]


def _supervision(run_dir: Path) -> SupervisionTable:
    """The [supervision] table of the run; its job's package need not be importable here."""
    return SupervisionTable.model_validate((read_json(run_dir / RESOLVED_CONFIG) or {}).get("supervision", {}))


def _print_outcome(outcome: FaultOutcome) -> None:
    """Print one line for each fault to stderr, apart from the result."""
    fault = outcome.fault
    lasts = f" for {fault.seconds:g} s" if fault.seconds else ""
    line = f"{fault.number:>4}  {fault.fault} {fault.slot}{lasts}"
    print(line + (f"  skipped: {outcome.skipped}" if outcome.skipped else ""), file=sys.stderr, flush=True)


def _show_schedule(schedule: list[ScheduledFault], seed: int, *, as_json: bool) -> None:
    if as_json:
        show_json({"seed": seed, "faults": schedule})
        return
    for fault in schedule:
        at = f"step {fault.at_step}" if fault.at_step else f"{fault.at_s:.3f} s"
        lasts = f"for {fault.seconds:g} s" if fault.seconds else ""
        amount = f"{fault.amount:g} {FAULTS[fault.fault].unit}" if fault.amount else ""
        say(f"{fault.number:>4}  {at:>12}  {fault.fault:10} {fault.slot or 'the run':14} {lasts} {amount}".rstrip())
    say("\nkinds of faults:")
    for kind in FAULTS.values():
        say(f"  {kind.name:10} {kind.what}" + (f", {kind.seconds:g} s" if kind.seconds else ""))


def _judge(run_dir: Path, baseline: Path | None, not_injected: int = 0, *, as_json: bool) -> int:
    undisturbed = list(read_metrics(baseline, "step")) if baseline is not None else None
    recovered = wait_recovered(run_dir, RECOVERY_S)
    verdict = judge(replace(read_evidence(run_dir), recovered=recovered), undisturbed, not_injected=not_injected)
    show_json(verdict) if as_json else say(render(verdict))
    return OK if verdict.passed else FAILED
