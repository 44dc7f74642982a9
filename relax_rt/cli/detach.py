"""`up --detach`: start a run that goes on without the terminal, and stay until it is ready or has ended."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from relax_rt.cli.app import FAILED, OK
from relax_rt.cli.time_left import estimate_of
from relax_rt.interfaces.agent import Diagnosis, RunStatus, SlotStatus
from relax_rt.observe.events import CURRENT
from relax_rt.observe.metrics import Tail
from relax_rt.observe.story import Starts
from relax_rt.observe.text import clip, duration, waits
from relax_rt.supervision import control
from relax_rt.supervision.rundir import read_run
from relax_rt.transport.rpc.errors import RelaxError

POLL_S = 0.1
TELL_EVERY_S = 10.0
POLL_EVERY_S = 1.0
MAX_REASONS = 8
SHOWN_LINES = 12
AT_ONCE_S = 0.5
"""Nothing is printed for a run that ends within this."""
MAX_TOLD = 4
WORK = 80
ENDING = ("stopping", "killing", "hung", "requested", "starting")
REASON = 160
SCREEN = "relax_rt.cli.screen:plain"

Say = Callable[[str], None]


def start_detached(config: Path, overrides: Sequence[str], run_dir: Path, say: Say) -> tuple[int, RunStatus]:
    """Start a run and wait until it is ready; returns 0, or its exit code if it ended before.

    Raises:
        RelaxError: the run must not start.
    """
    events = Tail(run_dir / "events" / CURRENT, last_bytes=0)
    # The first look settles where the log of an earlier start ends.
    events.poll()
    from relax_rt.cluster import launch  # loads ZeroMQ

    _, keeper = launch.start(config, overrides, screen=SCREEN)
    try:
        code = _until_ready(run_dir, keeper, events, say)
    except KeyboardInterrupt:
        say(f"the run goes on starting without you; `relax-rt down {run_dir}` ends it")
        raise
    finally:
        events.close()
    if code is None:
        return OK, control.status(run_dir)
    status = control.status(run_dir)
    _tell_end(run_dir, status, code)
    # It may have finished within the moment that it was ready for.
    return code if code or status.status == "finished" else FAILED, status


def wait_until_ended(run_dir: Path, wait_s: float, say: Say, *, kill: bool = False) -> bool:
    """Wait until a run has ended. False: it has not within wait_s.

    Prints at once what it waits for, for how long at most and how to kill it; then the slots it waits for whenever they
    change, and every 10 s.

    Args:
        kill: its roles are being killed, so their work is not reported.
    """
    began = reported_at = time.monotonic()
    reported: Sequence[str] = ()
    if control.wait_ended(run_dir, min(wait_s, AT_ONCE_S)):
        return True
    if not kill:
        say(f"waiting for the end, {duration(wait_s)} at most; `relax-rt down {run_dir} --now` ends it at once")
    while (left := began + wait_s - time.monotonic()) > 0:
        names, line = who_ends(run_dir)
        if names != reported or time.monotonic() - reported_at >= TELL_EVERY_S:
            reported, reported_at = names, time.monotonic()
            say(f"{duration(reported_at - began)}: {line}")
        if control.wait_ended(run_dir, min(left, POLL_EVERY_S)):
            return True
    return False


def who_ends(run_dir: Path) -> tuple[list[str], str]:
    """The slots that an ending run waits for: what they do, for how long they have been ending, and when each is
    killed at the latest."""
    try:
        status = control.status(run_dir)
    except RelaxError as error:
        return [], str(error)
    live = [slot for slot in status.slots if slot.state != "ended"]
    now = [slot for slot in live if slot.state in ENDING]
    later = len(live) - len(now)
    parts = [_how_it_ends(slot) for slot in now[:MAX_TOLD]]
    parts += [f"{len(now) - MAX_TOLD} more"] if len(now) > MAX_TOLD else []
    parts += [f"then {later} more slots"] if now and later > 0 else []
    estimate = estimate_of(status) if any(slot.kill_latest_s is not None for slot in now) else None
    if estimate is not None and estimate.step_s is not None and estimate.since_s is not None:
        parts.append(
            f"step {estimate.step} was done {duration(estimate.since_s)} ago; a step takes "
            f"{duration(estimate.step_s)} here"
        )
    return [slot.slot for slot in now], f"{status.status}: " + ("; ".join(parts) or "the node agent cleans up")


def _how_it_ends(slot: SlotStatus) -> str:
    does = slot.detail or slot.waiting
    text = f"{slot.slot} {slot.state} for {duration(slot.state_s)}" + (f" ({clip(does, WORK)})" if does else "")
    if slot.kill_s is None or slot.kill_latest_s is None:
        return text
    if slot.kill_latest_s - slot.kill_s < 1.0:
        return f"{text}, killed in {duration(slot.kill_s)} at the latest"
    return (
        f"{text}, killed in {duration(slot.kill_s)} unless it makes progress, in {duration(slot.kill_latest_s)} at the "
        "latest"
    )


def _until_ready(run_dir: Path, keeper: subprocess.Popen[bytes], events: Tail, say: Say) -> int | None:
    """None when the run is ready, else its exit code."""
    starts, reasons = Starts(), Reasons(say)
    looked = 0.0
    began = told = time.monotonic()
    while True:
        # Asked before the files are read, so that the last lines of a run that ends are seen.
        code = keeper.poll()
        for line in [line for event in events.poll() if (line := starts.take(event))]:
            say(line)
            told = time.monotonic()
        if code is not None:
            return code
        if (read_run(run_dir) or {}).get("status") == "running":
            return None
        if time.monotonic() - looked > POLL_EVERY_S:
            looked = time.monotonic()
            with suppress(RelaxError):
                told = looked if reasons.take(control.status(run_dir)) else told
        if time.monotonic() - told > TELL_EVERY_S:
            told = time.monotonic()
            say(f"{duration(told - began)}: {who_is_awaited(run_dir)}")
        time.sleep(POLL_S)


class Reasons:
    """Reports what a slot that cannot start waits for, whenever that changes."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._told: dict[str, str] = {}

    def take(self, status: RunStatus) -> bool:
        """Process one event; True if something was printed."""
        now = {slot.slot: slot.waiting for slot in status.slots if slot.state != "ready" and slot.waiting}
        new = {slot: reason for slot, reason in now.items() if self._told.get(slot) != reason}
        self._told = now
        for slot, reason in list(new.items())[:MAX_REASONS]:
            self._say(clip(f"{slot} {waits(reason)}", 200))
        if len(new) > MAX_REASONS:
            self._say(f"{len(new) - MAX_REASONS} more slots wait")
        return bool(new)


def who_is_awaited(run_dir: Path) -> str:
    """What a starting or ending run waits for, as a line."""
    try:
        status = control.status(run_dir)
    except RelaxError as error:
        return str(error)
    late = [slot for slot in status.slots if slot.state not in ("ready", "ended")]
    told = ", ".join(
        f"{s.slot} {s.state}" + (f" ({s.waiting or s.detail})" if s.waiting or s.detail else "") for s in late[:4]
    )
    return clip(f"{status.status}, waits for {told or 'the node agent'}", 200)


def _tell_end(run_dir: Path, status: RunStatus, code: int) -> None:
    reason = clip(status.reason, REASON)
    lines = [f"relax-rt: {status.name or run_dir} is {status.status}: {reason} (exit code {code})"]
    if status.diagnosis is not None:
        lines += [f"  {status.diagnosis}", *_shown(status.diagnosis)]
    elif code:
        lines += [f"    {line}" for line in _output(run_dir)]
    if status.first is not None:
        lines.append(f"  earlier, the first failure: {status.first}")
    lines.append(f"more: relax-rt why --run {run_dir}")
    sys.stderr.write("\n".join(lines) + "\n")


def _shown(diagnosis: Diagnosis) -> list[str]:
    return [f"    {line}" for line in diagnosis.evidence(SHOWN_LINES, SHOWN_LINES)]


def _output(run_dir: Path) -> list[str]:
    """The end of the run's output: its agent left no diagnosis."""
    try:
        from relax_rt.cluster.launch import OUTPUT

        return (run_dir / "logs" / f"{OUTPUT}.log").read_text(errors="replace").splitlines()[-SHOWN_LINES:]
    except OSError:
        return []
