"""Injects faults into a live run by a schedule, and undoes them: signals, a full disk, messages to the role."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from bisect import insort
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from msgspec.structs import replace

from relax_rt.chaos import guard
from relax_rt.chaos.faults import FAULTS, FaultKind, ScheduledFault
from relax_rt.chaos.timeline import REGISTRY
from relax_rt.interfaces.agent import RunStatus, SlotStatus
from relax_rt.interfaces.registry import RegistryApi
from relax_rt.observe.events import EventFollower, EventLog
from relax_rt.observe.metrics import METRICS, Tail
from relax_rt.process import procfs
from relax_rt.supervision import control
from relax_rt.supervision.rundir import RESOLVED_CONFIG, read_json
from relax_rt.transport.queue.api import QueueApi
from relax_rt.transport.rpc.errors import DeadlineExceeded, Refused, RelaxError, Unreachable
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.rpc import RpcClient, make_hello

MIB = 1 << 20
RESERVE_BYTES = 1 * MIB
MAX_BYTES = 4096 * MIB
STEP_BYTES = 64 * MIB


class FilledDisk:
    """Fills the file system of a folder up to a small reserve, until it is closed.

    Raises:
        Refused: it would take more than `most_bytes`: others use that file system too.
        OSError: no file can be created there.
    """

    def __init__(self, folder: Path, *, most_bytes: int = MAX_BYTES, reserve_bytes: int = RESERVE_BYTES) -> None:
        free = shutil.disk_usage(folder).free
        if free - reserve_bytes > most_bytes:
            raise Refused(
                f"filling the file system of {folder}",
                why=f"{free // MIB} MiB are free, and at most {most_bytes // MIB} MiB are taken",
                hint="put the run directory on a small file system of its own",
            )
        self.nbytes = 0
        # A file without a name: the kernel frees it when this process ends, however it ends.
        self._file: BinaryIO = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 held open: it is the fault
        try:
            self._fill(folder, reserve_bytes)
        except BaseException:
            self._file.close()
            raise

    def _fill(self, folder: Path, reserve_bytes: int) -> None:
        step = STEP_BYTES
        while step >= 4096:
            room = shutil.disk_usage(folder).free - reserve_bytes
            if room < 4096:
                return
            step = min(step, room)
            try:
                os.posix_fallocate(self._file.fileno(), self.nbytes, step)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
                step //= 2
                continue
            self.nbytes += step

    def close(self) -> None:
        """Free the space."""
        self._file.close()


class _SlotFailures:
    def __init__(self) -> None:
        self.ready_s = 0.0
        self.ready_at: float | None = None
        self.failures: list[float] = []


class RestartBudget:
    """Counts the restarts that each slot has left, as the supervisor does: failures within a period of ready time.

    Args:
        max_restarts, period_s: of ``[supervision.restart]``.
    """

    def __init__(self, max_restarts: int, period_s: float) -> None:
        self._max, self._period_s = max_restarts, period_s
        self._slots: dict[str, _SlotFailures] = {}

    def update(self, event: dict[str, Any]) -> None:
        """Process one event of the log."""
        kind, name, at = event.get("kind"), event.get("slot"), event.get("m")
        if kind == "run_started":
            self._slots.clear()
        if not isinstance(name, str) or not isinstance(at, int | float):
            return
        slot = self._slots.setdefault(name, _SlotFailures())
        if kind == "slot_ready":
            slot.ready_at = float(at)
        elif kind == "slot_exited":
            if slot.ready_at is not None:
                slot.ready_s += max(0.0, float(at) - slot.ready_at)
                slot.ready_at = None
            diagnosis = event.get("diagnosis")
            if isinstance(diagnosis, dict) and diagnosis.get("kind") != "clean" and not event.get("finished"):
                slot.failures = [f for f in slot.failures if slot.ready_s - f < self._period_s]
                slot.failures.append(slot.ready_s)

    def remaining(self, name: str, now: float) -> int:
        """Restarts that the slot has left if it fails at `now` (monotonic seconds)."""
        slot = self._slots.get(name)
        if slot is None:
            return self._max
        ready_s = slot.ready_s + (max(0.0, now - slot.ready_at) if slot.ready_at is not None else 0.0)
        return self._max - sum(ready_s - failure < self._period_s for failure in slot.failures)


CHAOS_SLOT = "chaos/0"
QUEUE = "queue/0"
CALL_TIMEOUT_S = 5.0
BEYOND_MIB = 64.0
TEMPORARY_ERRORS = (ProcessLookupError, Unreachable, DeadlineExceeded)


class FaultOutcome(msgspec.Struct, frozen=True):
    """Result of a scheduled fault: injected, or skipped for a reason.

    Attributes:
        temporary: the reason is temporary; a retry may succeed.
    """

    fault: ScheduledFault
    skipped: str = ""
    pid: int = 0
    temporary: bool = False


class FaultSkipped(Exception):
    """A fault that is not injected, with the reason; temporary: as in FaultOutcome."""

    def __init__(self, why: str, *, temporary: bool = False) -> None:
        super().__init__(why)
        self.temporary = temporary


class _Undo(msgspec.Struct):
    due: float
    fault: ScheduledFault
    slot: SlotStatus | None
    work: Callable[[], None]


class Injector:
    """Injects faults into one run. As a context manager it undoes at its exit the faults that still last.

    Args:
        run_dir: of a live run.
        seed: written into the events, so that a fault can be reproduced.
        budget: skips faults on slots that have no restart left; None: never.
        most_disk_bytes: a `disk` fault that needs more is skipped.
    """

    def __init__(
        self, run_dir: Path, seed: int, *, budget: RestartBudget | None = None, most_disk_bytes: int = MAX_BYTES
    ) -> None:
        self.run_dir, self.seed = run_dir, seed
        self._budget, self._most_disk_bytes = budget, most_disk_bytes
        self._events = EventLog(run_dir, "chaos")
        self._follower = EventFollower(run_dir)
        self._undo: list[_Undo] = []
        self._announced = False
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Injector:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self.undo(float("inf"))
        finally:
            if self._guard is not None and self._guard.stdin is not None:
                self._guard.stdin.close()
                self._guard.wait()
            self._follower.close()
            self._events.close()

    @property
    def next_undo(self) -> float | None:
        """When the next fault must be undone (monotonic seconds); None: there is none."""
        return min((one.due for one in self._undo), default=None)

    def inject(self, fault: ScheduledFault, *, may_retry: bool = False) -> FaultOutcome:
        """Inject a fault, unless the slot has no process or no restart left.

        Args:
            may_retry: the caller retries after a temporary obstacle: write no event for that.
        """
        kind = FAULTS[fault.fault]
        self._announced = False
        try:
            pid = self._fill_disk(fault) if kind.means == "disk" else self._inject_into_slot(fault, kind)
        except (FaultSkipped, RelaxError, OSError) as error:
            # An announced fault that then failed is cancelled by its number.
            event = "fault_failed" if self._announced else "fault_skipped"
            temporary = not self._announced and _is_temporary(error)
            if not (temporary and may_retry):
                self._events.emit(event, **self._fields(fault, None), why=str(error))
            return FaultOutcome(fault, str(error) or type(error).__name__, temporary=temporary)
        return FaultOutcome(fault, pid=pid)

    def undo(self, now: float) -> None:
        """End the faults whose time is over."""
        for one in [one for one in self._undo if one.due <= now]:
            self._undo.remove(one)
            fields = self._fields(one.fault, one.slot)
            try:
                one.work()
            except ProcessLookupError:
                fields["reason"] = "the process has ended"
            except Exception as error:  # noqa: BLE001 the other faults must still be undone
                fields["reason"] = f"it could not be undone: {error!r}"
            self._events.emit("fault_ended", **fields)

    def _inject_into_slot(self, fault: ScheduledFault, kind: FaultKind) -> int:
        status = control.status(self.run_dir)
        slot = next((one for one in status.slots if one.slot == fault.slot), None)
        if slot is None:
            raise FaultSkipped("the run has no such slot now")
        if not slot.pid:
            raise FaultSkipped(
                f"it has no process now ({slot.state})", temporary=slot.state != "ended" and not slot.given_up
            )
        if any(one.slot is not None and one.slot.slot == slot.slot for one in self._undo):
            raise FaultSkipped("another fault still lasts there", temporary=True)
        self._check_budget(slot.slot)
        if kind.means == "inside":
            self._inject_inside(fault, kind, slot)
            return slot.pid
        here = status.nodes[0].node if status.nodes else ""
        if slot.node not in ("", here):
            raise FaultSkipped(f"it runs on node {slot.node}: signals reach processes of this node only")
        if fault.fault == "kill":
            pidfd = os.pidfd_open(slot.pid)
            try:
                # The pidfd keeps referring to this process: after the check the signal cannot reach another one.
                _check_belongs_to_run(status, slot)
                self._announce(fault, slot)
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            finally:
                os.close(pidfd)
        else:
            self._stop(fault, slot, status, overtake=kind.means == "epoch")
        return slot.pid

    def _check_budget(self, slot: str) -> None:
        if self._budget is None:
            return
        for event in self._follower.poll():
            self._budget.update(event)
        if self._budget.remaining(slot, time.monotonic()) < 1:
            raise FaultSkipped("it has used up its restarts: one more failure would escalate (--beyond-intensity)")

    def _inject_inside(self, fault: ScheduledFault, kind: FaultKind, slot: SlotStatus) -> None:
        fault = self._above_memory_limit(fault)
        self._announce(fault, slot)
        control.inject(self.run_dir, fault.slot, kind.order, fault.seconds, fault.amount)
        # The role ends the fault itself; what remains to be done here is the event.
        self._undo_later(fault, slot, lambda: os.kill(slot.pid, 0))

    def _above_memory_limit(self, fault: ScheduledFault) -> ScheduledFault:
        """Raise the amount of a memory fault above the role's limit, if it has one: less would not test the limit."""
        if fault.fault != "memory":
            return fault
        roles = (read_json(self.run_dir / RESOLVED_CONFIG) or {}).get("roles", {})
        limit = (roles.get(fault.slot.partition("/")[0]) or {}).get("memory_mib")
        return replace(fault, amount=max(fault.amount, limit + BEYOND_MIB)) if limit else fault

    def _fill_disk(self, fault: ScheduledFault) -> int:
        disk = FilledDisk(self.run_dir, most_bytes=self._most_disk_bytes)
        self._events.emit("fault_injected", **self._fields(fault, None), nbytes=disk.nbytes)
        self._undo_later(fault, None, disk.close)
        return 0

    def _stop(self, fault: ScheduledFault, slot: SlotStatus, status: RunStatus, *, overtake: bool) -> None:
        if overtake and slot.slot == REGISTRY:
            raise FaultSkipped("the registry issues the epochs: it cannot be overtaken")
        _check_belongs_to_run(status, slot)
        group = os.getpgid(slot.pid)
        if group == os.getpgid(0):
            raise FaultSkipped("it shares a process group with this command")
        self._tell_guard(f"+{group}")
        self._announce(fault, slot)
        os.killpg(group, signal.SIGSTOP)

        def resume() -> None:
            try:
                os.killpg(group, signal.SIGCONT)
            finally:
                self._tell_guard(f"-{group}")

        self._undo_later(fault, slot, resume)
        if overtake:
            epoch = asyncio.run(_overtake(status, slot))
            self._events.emit("slot_overtaken", slot=slot.slot, epoch=slot.epoch, by_epoch=epoch, number=fault.number)

    def _undo_later(self, fault: ScheduledFault, slot: SlotStatus | None, work: Callable[[], None]) -> None:
        self._undo.append(_Undo(time.monotonic() + fault.seconds, fault, slot, work))

    def _announce(self, fault: ScheduledFault, slot: SlotStatus) -> None:
        self._announced = True
        self._events.emit("fault_injected", **self._fields(fault, slot))

    def _fields(self, fault: ScheduledFault, slot: SlotStatus | None) -> dict[str, Any]:
        fields: dict[str, Any] = {"name": fault.fault, "number": fault.number, "seed": self.seed}
        if fault.slot:
            fields |= {"slot": fault.slot, "role": fault.slot.partition("/")[0]}
        if slot is not None:
            fields |= {"epoch": slot.epoch, "pid": slot.pid}
        return fields | {"seconds": fault.seconds, "amount": fault.amount}

    def _tell_guard(self, word: str) -> None:
        """Tell the guard which groups are stopped; it continues them if this process is killed."""
        if self._guard is None:
            # Started by path, without site packages: it must be running before the first stop.
            self._guard = subprocess.Popen([sys.executable, "-I", "-S", str(guard.__file__)], stdin=subprocess.PIPE)
        assert self._guard.stdin is not None
        self._guard.stdin.write(word.encode() + b"\n")
        self._guard.stdin.flush()


def _is_temporary(error: Exception) -> bool:
    """Whether the obstacle to a fault is temporary, as a slot between two processes."""
    return error.temporary if isinstance(error, FaultSkipped) else isinstance(error, TEMPORARY_ERRORS)


def _check_belongs_to_run(status: RunStatus, slot: SlotStatus) -> None:
    """Check that the pid still belongs to the run: it was reported a moment ago and may have been reused."""
    if not procfs.has_environment(slot.pid, f"RELAX_RUN_ID={status.run_id}"):
        raise FaultSkipped(f"process {slot.pid} does not belong to this run", temporary=True)


async def _overtake(status: RunStatus, slot: SlotStatus) -> int:
    """Replace a process as the head does when it cannot reach it: issue an epoch, and report the exit to the queue."""
    addresses = {one.slot: one.address for one in status.slots}
    registry = RpcClient(addresses[REGISTRY], make_hello(status.run_id, Incarnation(CHAOS_SLOT, 0)))
    clients = [registry]
    try:
        epochs = registry.bind(RegistryApi, timeout_s=CALL_TIMEOUT_S)
        epoch = await epochs.issue_epoch(slot.slot)
        if addresses.get(QUEUE) and slot.slot != QUEUE:
            me = Incarnation(CHAOS_SLOT, await epochs.issue_epoch(CHAOS_SLOT))
            clients.append(RpcClient(addresses[QUEUE], make_hello(status.run_id, me)))
            queue = clients[-1].bind(QueueApi, timeout_s=CALL_TIMEOUT_S)
            await queue.process_exited(1, Incarnation(slot.slot, slot.epoch), "overtaken on purpose")
            await epochs.process_exited(me, "done")
        return epoch
    finally:
        for client in clients:
            await client.close()


# --- running a schedule

POLL_S = 0.02
STATUS_EVERY_S = 0.25
STABLE_S = 0.5
RETRY_S, MAX_DEFER_S = 0.2, 30.0
"""How often, and for how long, a fault by time is retried while its slot has no process."""


class ScheduleResult(msgspec.Struct, kw_only=True):
    """The result of a schedule.

    Attributes:
        outcomes: of each fault that was due. not_injected: number of faults that were never due.
        deferred: number of faults that were deferred; by step: number of deferrals.
        run_ended: the run ended in the meantime. recovered: at the end every slot was ready or had ended.
        interrupted: by Ctrl-C.
    """

    outcomes: list[FaultOutcome] = []
    not_injected: int = 0
    deferred: int = 0
    run_ended: bool = False
    recovered: bool = False
    interrupted: bool = False
    seconds: float = 0.0


class StepFollower:
    """The newest training step, from the metrics as they grow."""

    def __init__(self, run_dir: Path) -> None:
        self._tail = Tail(run_dir / METRICS)
        self.step = 0

    def newest(self) -> int:
        """The newest recorded step; after a roll-back it is lower than before."""
        for record in self._tail.poll():
            if record.get("kind") == "step":
                self.step = int(record["step"])
        return self.step

    def close(self) -> None:
        """Release the file."""
        self._tail.close()


def run_schedule(
    run_dir: Path,
    injector: Injector,
    faults: Sequence[ScheduledFault],
    *,
    recovery_s: float = 60.0,
    defer: bool = False,
    on_outcome: Callable[[FaultOutcome], None] = lambda outcome: None,
) -> ScheduleResult:
    """Carry out a schedule on a live run, until the schedule or the run ends.

    Args:
        recovery_s: time for the run to recover after the last fault.
        defer: a fault whose slot has no process waits for one, up to MAX_DEFER_S; by step, until the next step. Slot
            and fault stay as drawn.
    """
    began = time.monotonic()
    result = ScheduleResult()
    by_time = sorted((s for s in faults if not s.at_step), key=lambda s: s.at_s)
    by_step = sorted((s for s in faults if s.at_step), key=lambda s: s.at_step)
    steps = StepFollower(run_dir)
    first_due: dict[int, float] = {}
    checked_at = 0.0
    try:
        while (by_time or by_step or injector.next_undo is not None) and not result.run_ended:
            now = time.monotonic()
            injector.undo(now)
            while by_time and by_time[0].at_s <= now - began:
                fault = by_time.pop(0)
                due_s = first_due.setdefault(fault.number, fault.at_s)
                may_retry = defer and now - began - due_s < MAX_DEFER_S
                if _inject(injector, fault, result, on_outcome, may_retry=may_retry).temporary and may_retry:
                    result.deferred += fault.at_s == due_s
                    insort(by_time, replace(fault, at_s=now - began + RETRY_S), key=lambda s: s.at_s)
            if by_step and by_step[0].at_step <= steps.newest():
                fault = by_step.pop(0)
                if _inject(injector, fault, result, on_outcome, may_retry=defer).temporary and defer:
                    result.deferred += 1
                    # After the faults drawn for that step.
                    insort(by_step, replace(fault, at_step=steps.step + 1), key=lambda s: s.at_step)
            if now - checked_at >= STATUS_EVERY_S:
                checked_at, result.run_ended = now, not control.find_run(run_dir).alive
            time.sleep(_pause(injector, by_time, began, fine=bool(by_step)))
        result.recovered = wait_recovered(run_dir, recovery_s)
    except KeyboardInterrupt:
        result.interrupted = True
    finally:
        injector.undo(float("inf"))
        steps.close()
    result.not_injected = len(by_time) + len(by_step)
    result.run_ended = result.run_ended or not control.find_run(run_dir).alive
    result.seconds = time.monotonic() - began
    return result


def _inject(
    injector: Injector,
    fault: ScheduledFault,
    result: ScheduleResult,
    on_outcome: Callable[[FaultOutcome], None],
    *,
    may_retry: bool = False,
) -> FaultOutcome:
    outcome = injector.inject(fault, may_retry=may_retry)
    if not (outcome.temporary and may_retry):
        result.outcomes.append(outcome)
        on_outcome(outcome)
    return outcome


def _pause(injector: Injector, by_time: Sequence[ScheduledFault], began: float, *, fine: bool) -> float:
    now = time.monotonic()
    due = [began + by_time[0].at_s] if by_time else []
    if injector.next_undo is not None:
        due.append(injector.next_undo)
    wait_s = min(due, default=now + STATUS_EVERY_S) - now
    return max(0.0, min(wait_s, POLL_S if fine else STATUS_EVERY_S))


def wait_recovered(run_dir: Path, recovery_s: float) -> bool:
    """Wait until every slot is ready or has ended, and stays so for a moment. An ended run has recovered."""
    end = time.monotonic() + recovery_s
    since: float | None = None
    while time.monotonic() < end:
        try:
            slots = control.status(run_dir).slots
        except RelaxError:
            slots = []
        if not control.find_run(run_dir).alive:
            return True
        if not slots or any(slot.state not in ("ready", "ended") for slot in slots):
            since = None
        else:
            since = since or time.monotonic()
            if time.monotonic() - since >= STABLE_S:
                return True
        time.sleep(STATUS_EVERY_S / 5)
    return False
