"""Commands that start and stop a run: up (in the foreground, detached, or as a further node), attach, down."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from relax_rt.cli.app import (
    DEFAULT_CONFIG,
    FAILED,
    OK,
    Config,
    Json,
    Overrides,
    Run,
    duration_of,
    errors_are_bad_input,
)
from relax_rt.cli.display import as_dict, choices, say, show_json
from relax_rt.cli.runs import find_run_dir, resolved_config
from relax_rt.cli.screen import attach_screen
from relax_rt.cli.time_left import estimate_of, expected
from relax_rt.config.job import load_job
from relax_rt.config.loader import load_config, preflight_config
from relax_rt.config.problems import BadInput
from relax_rt.config.schema import MIB, RunConfig
from relax_rt.interfaces.agent import RunStatus, SlotStatus
from relax_rt.observe.events import CURRENT
from relax_rt.observe.metrics import Tail
from relax_rt.observe.notes import StartTimes
from relax_rt.observe.text import clip, duration, waits
from relax_rt.supervision import control
from relax_rt.supervision.rundir import SHM_ROOT, read_run
from relax_rt.transport.rpc.errors import RelaxError

END_S = 60.0
"""Time for a run to end after its roles have finished their work."""
POLL_S, STATUS_EVERY_S = 0.1, 1.0
REPORT_EVERY_S = 10.0
QUICK_END_S = 0.5
"""Nothing is printed for a run that ends within this."""
MAX_WAITING, MAX_ENDING = 8, 4
"""Slots that are named while a run starts, and while it ends."""
EVIDENCE_LINES = 12
ENDING = ("stopping", "killing", "hung", "requested", "starting")
LIVE_SCREEN, PLAIN_SCREEN = "relax_rt.cli.screen:live", "relax_rt.cli.screen:plain"

Say = Callable[[str], None]


def _silent(_: str) -> None:
    """Print nothing: with --json only the result is printed."""


@Parameter(name="*", group=Group("As a further node of a run", sort_key=2))
@dataclass(frozen=True)
class JoinOptions:
    """The options of --join."""

    join: Annotated[str | None, Parameter(help="HOST:PORT where the head of a run listens: join that run.")] = None
    key: Annotated[
        Path | None, Parameter(help="The join.key of the head's run directory. Or set RELAX_JOIN_KEY to its text.")
    ] = None
    name: Annotated[str, Parameter(help="Name of this node. Default: the host name.")] = ""
    dir: Annotated[Path | None, Parameter(help="Directory for its logs and events. Default: RUN/nodes/NAME.")] = None
    host: Annotated[
        str, Parameter(help="Address of this machine for other nodes. Default: that of its route to the head.")
    ] = ""
    wait: Annotated[
        float, Parameter(converter=duration_of, help="How long to retry, as 5m, each time the head does not answer.")
    ] = 120.0


NOT_JOINING = JoinOptions()


def up(
    config: Config = DEFAULT_CONFIG,
    *,
    overrides: Overrides = None,
    plain: Annotated[bool, Parameter(help="Print lines instead of the live screen.")] = False,
    detach: Annotated[
        bool, Parameter(help="Return when the run is ready or has failed. It continues without the terminal.")
    ] = False,
    json: Annotated[bool, Parameter(name="--json", help="With --detach: print JSON.")] = False,
    joining: JoinOptions = NOT_JOINING,
) -> int:
    """Start or resume a run; returns its exit code."""
    from relax_rt.cluster import join, launch  # both load ZeroMQ, which `--help` does not need

    if joining.join is not None:
        with errors_are_bad_input():
            request = join.join_request(
                joining.join,
                key=joining.key,
                name=joining.name,
                run_dir=joining.dir,
                host=joining.host,
                wait_s=joining.wait,
            )
        return join.join(request, say=say)
    if joining != NOT_JOINING:
        raise BadInput("--key, --name, --dir, --host or --wait without --join", hint="name the head: --join HOST:PORT")
    if json and not detach:
        raise BadInput("--json without --detach", why="a run in the foreground prints lines, not one result")
    loaded = load_config(config, overrides or (), inputs=True)
    with errors_are_bad_input():
        launch.check_start(loaded)
        preflight_config(loaded, config, overrides or ())
        if not json:
            say("\n".join(brief(loaded)))
        if detach:
            return _detached(config, overrides or (), Path(loaded.run.dir), as_json=json)
        # The agent makes the quick checks again: the file may have changed meanwhile.
        return launch.up(config, overrides or (), screen=PLAIN_SCREEN if plain else LIVE_SCREEN)


def brief(config: RunConfig) -> list[str]:
    """The short plan that `up` prints; `relax-rt plan` has the long one."""
    run_dir = Path(config.run.dir)
    job = load_job(config.run.job)
    before = read_run(run_dir)
    resumed = f"resumes the run there, last {before.get('status', 'unknown')}" if before else "new"
    if before and (step := job.resumes_at(run_dir)) is not None:
        resumed += f", from the checkpoint of step {step}" if step else ", from the beginning: it has no checkpoint"
    roles = {kind: settings for kind, settings in config.roles.items() if settings.count}
    processes = sum(settings.count for settings in roles.values())
    threads = sum(settings.count * settings.threads for settings in roles.values())
    gpus = sum(settings.count * settings.gpus for settings in roles.values())
    need_mib = config.queue.capacity_mib + job.shm_bytes(config) // MIB
    free_mib = shutil.disk_usage(SHM_ROOT).free // MIB
    return [
        f"{config.run.name}  {run_dir} ({resumed})",
        "  roles   " + ", ".join(f"{kind} x{s.count}" if s.count != 1 else kind for kind, s in roles.items()),
        f"  takes   {processes} processes, {threads} compute threads on {len(os.sched_getaffinity(0))} cores"
        + (f", {gpus:g} GPUs" if gpus else "")
        + f", {need_mib:,} MiB of shared memory ({free_mib:,} MiB are free)",
        *choices(config.chosen),
        *([f"  time    {time_left}"] if (time_left := expected(config)) else []),
    ]


def _detached(config: Path, overrides: Sequence[str], run_dir: Path, *, as_json: bool) -> int:
    """Start a run in the background and wait until it is ready; returns 0, or its exit code if it ended before."""
    from relax_rt.cluster import launch

    report = _silent if as_json else say
    was_finished = (read_run(run_dir) or {}).get("status") == "finished"
    events = Tail(run_dir / "events" / CURRENT, last_bytes=0)
    # The first poll fixes where the log of an earlier start ends.
    events.poll()
    _, keeper = launch.start(config, overrides, screen=PLAIN_SCREEN)
    try:
        code = _until_ready(run_dir, keeper, events, report)
    except KeyboardInterrupt:
        report(f"the run keeps starting; `relax-rt down {run_dir}` stops it")
        raise
    finally:
        events.close()
    status = control.status(run_dir)
    if code is not None:
        _print_end(run_dir, status, code)
        # It may have finished at the moment when it became ready.
        code = code if code or status.status == "finished" else FAILED
    if as_json:
        show_json({"ready": status.status == "running", "exit_code": status.exit_code, **as_dict(status)})
    elif status.status == "running":
        say(f"{status.name} is running in {run_dir}\n  relax-rt attach, ps, logs -f; relax-rt down ends it")
    elif status.status == "finished" and was_finished:
        say(f"{status.name} had reached its target already, and nothing was left to do: {status.reason}")
    return OK if code is None else code


def _until_ready(run_dir: Path, keeper: subprocess.Popen[bytes], events: Tail, report: Say) -> int | None:
    """Wait until a run is ready; None when it is, else its exit code."""
    starts, reasons = StartTimes(), WaitingReasons(report)
    asked_at = 0.0
    began = reported_at = time.monotonic()
    while True:
        # Polled before the files are read, so that the last lines of a run that ends are seen.
        code = keeper.poll()
        for line in [line for event in events.poll() if (line := starts.update(event))]:
            report(line)
            reported_at = time.monotonic()
        if code is not None:
            return code
        if (read_run(run_dir) or {}).get("status") == "running":
            return None
        if time.monotonic() - asked_at > STATUS_EVERY_S:
            asked_at = time.monotonic()
            with suppress(RelaxError):
                reported_at = asked_at if reasons.update(control.status(run_dir)) else reported_at
        if time.monotonic() - reported_at > REPORT_EVERY_S:
            reported_at = time.monotonic()
            report(f"{duration(reported_at - began)}: {_starting_slots(run_dir)}")
        time.sleep(POLL_S)


class WaitingReasons:
    """Reports what each slot that cannot start waits for, whenever that changes."""

    def __init__(self, report: Say) -> None:
        self._report = report
        self._reported: dict[str, str] = {}

    def update(self, status: RunStatus) -> bool:
        """Compare with the last status; True if something was printed."""
        now = {slot.slot: slot.waiting for slot in status.slots if slot.state != "ready" and slot.waiting}
        new = {slot: reason for slot, reason in now.items() if self._reported.get(slot) != reason}
        self._reported = now
        for slot, reason in list(new.items())[:MAX_WAITING]:
            self._report(clip(f"{slot} {waits(reason)}", 200))
        if len(new) > MAX_WAITING:
            self._report(f"{len(new) - MAX_WAITING} more slots wait")
        return bool(new)


def _starting_slots(run_dir: Path) -> str:
    """What a starting run waits for, as a line."""
    try:
        status = control.status(run_dir)
    except RelaxError as error:
        return str(error)
    slots = [slot for slot in status.slots if slot.state not in ("ready", "ended")][:MAX_ENDING]
    names = [f"{s.slot} {s.state}" + (f" ({s.waiting or s.detail})" if s.waiting or s.detail else "") for s in slots]
    return clip(f"{status.status}, waits for {', '.join(names) or 'the node agent'}", 200)


def _print_end(run_dir: Path, status: RunStatus, code: int) -> None:
    """Print to stderr why a run ended before it was ready."""
    lines = [f"relax-rt: {status.name or run_dir} is {status.status}: {clip(status.reason, 160)} (exit code {code})"]
    if status.diagnosis is not None:
        evidence = status.diagnosis.evidence(EVIDENCE_LINES, EVIDENCE_LINES)
        lines += [f"  {status.diagnosis}", *(f"    {line}" for line in evidence)]
    elif code:
        # Its agent left no diagnosis: the end of its output is all there is.
        from relax_rt.cluster.launch import OUTPUT

        with suppress(OSError):
            output = (run_dir / "logs" / f"{OUTPUT}.log").read_text(errors="replace").splitlines()
            lines += [f"    {line}" for line in output[-EVIDENCE_LINES:]]
    if status.first is not None:
        lines.append(f"  earlier, the first failure: {status.first}")
    lines.append(f"more: relax-rt why --run {run_dir}")
    sys.stderr.write("\n".join(lines) + "\n")


def attach(
    run: Run = None,
    *,
    plain: Annotated[bool, Parameter(help="Print lines instead of the live screen.")] = False,
) -> int:
    """Show the live screen of a run."""
    return attach_screen(find_run_dir(run), plain=plain)


def down(
    run: Run = None,
    *,
    kill: Annotated[
        bool,
        Parameter(
            name=["--now", "--kill"],
            help="Kill every role at once instead of letting it finish its work, also if the run is ending"
            " already. `up` then resumes it from its last checkpoint.",
        ),
    ] = False,
    wait: Annotated[
        float | None,
        Parameter(
            converter=duration_of,
            help="How long to wait for the end, as 60 or 5m; 0 returns at once. Default: the run's drain_timeout_s"
            " and 60 s; with --now 60 s.",
        ),
    ] = None,
    json: Json = False,
) -> int:
    """Stop a run in order, or kill it."""
    run_dir = find_run_dir(run)
    found = control.find_run(run_dir)
    if not found.alive:
        text = f"is over already: {control.status(run_dir).status}"
        show_json({"run_dir": str(run_dir.absolute()), "did": "over"}) if json else say(f"{run_dir}: {text}")
        return OK
    wait_s = END_S + (0.0 if kill else resolved_config(run_dir).supervision.drain_timeout_s) if wait is None else wait
    (control.kill if kill else control.stop)(run_dir)
    try:
        if wait_s > 0 and not wait_until_ended(run_dir, wait_s, _silent if json else say, kill=kill):
            hint = f"it keeps ending; `relax-rt down {run_dir} --now` ends it at once"
            why = ending_slots(run_dir)[1]
            raise RelaxError(f"the run in {run_dir} has not ended within {wait_s:g} s", why=why, hint=hint)
    except KeyboardInterrupt:
        sys.stderr.write(f"the run keeps ending; `relax-rt down {run_dir} --now` ends it at once\n")
        raise
    did = "ended" if wait_s > 0 else "ending"
    show_json({"run_dir": str(run_dir.absolute()), "did": did}) if json else say(f"{run_dir}: {did}")
    return OK


def wait_until_ended(run_dir: Path, wait_s: float, report: Say, *, kill: bool = False) -> bool:
    """Wait until a run has ended; False if it has not within wait_s.

    Prints at once what it waits for, for how long at most and how to kill it; then the slots it waits for whenever they
    change, and every 10 s.

    Args:
        kill: its roles are being killed, so their work is not reported.
    """
    began = reported_at = time.monotonic()
    reported: Sequence[str] = ()
    if control.wait_ended(run_dir, min(wait_s, QUICK_END_S)):
        return True
    if not kill:
        report(f"waiting for the end, {duration(wait_s)} at most; `relax-rt down {run_dir} --now` ends it at once")
    while (remaining_s := began + wait_s - time.monotonic()) > 0:
        names, line = ending_slots(run_dir)
        if names != reported or time.monotonic() - reported_at >= REPORT_EVERY_S:
            reported, reported_at = names, time.monotonic()
            report(f"{duration(reported_at - began)}: {line}")
        if control.wait_ended(run_dir, min(remaining_s, STATUS_EVERY_S)):
            return True
    return False


def ending_slots(run_dir: Path) -> tuple[list[str], str]:
    """The slots that an ending run waits for, and a line: what each does, since when, and when it is killed."""
    try:
        status = control.status(run_dir)
    except RelaxError as error:
        return [], str(error)
    live = [slot for slot in status.slots if slot.state != "ended"]
    now = [slot for slot in live if slot.state in ENDING]
    later = len(live) - len(now)
    parts = [_ending_slot(slot) for slot in now[:MAX_ENDING]]
    parts += [f"{len(now) - MAX_ENDING} more"] if len(now) > MAX_ENDING else []
    parts += [f"then {later} more slots"] if now and later > 0 else []
    estimate = estimate_of(status) if any(slot.kill_latest_s is not None for slot in now) else None
    if estimate is not None and estimate.step_s is not None and estimate.since_s is not None:
        parts.append(
            f"step {estimate.step} was done {duration(estimate.since_s)} ago; a step takes "
            f"{duration(estimate.step_s)} here"
        )
    return [slot.slot for slot in now], f"{status.status}: " + ("; ".join(parts) or "the node agent cleans up")


def _ending_slot(slot: SlotStatus) -> str:
    work = slot.detail or slot.waiting
    text = f"{slot.slot} {slot.state} for {duration(slot.state_s)}" + (f" ({clip(work, 80)})" if work else "")
    if slot.kill_s is None or slot.kill_latest_s is None:
        return text
    if slot.kill_latest_s - slot.kill_s < 1.0:
        return f"{text}, killed in {duration(slot.kill_s)} at the latest"
    soon, latest = duration(slot.kill_s), duration(slot.kill_latest_s)
    return f"{text}, killed in {soon} unless it makes progress, in {latest} at the latest"
