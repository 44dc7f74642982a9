"""Injects faults into a living run and undoes them: signals, full disks, orders to the role itself."""

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
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from msgspec.structs import replace

from relax_rt.chaos import guard
from relax_rt.chaos.faults import FAULTS, Fault, Strike
from relax_rt.chaos.timeline import REGISTRY
from relax_rt.interfaces.agent import RunStatus, SlotStatus
from relax_rt.interfaces.registry import RegistryApi
from relax_rt.observe.events import EventFollower, EventLog
from relax_rt.process import procfs
from relax_rt.supervision import control
from relax_rt.supervision.rundir import RESOLVED_CONFIG, read_json
from relax_rt.transport.queue.api import QueueApi
from relax_rt.transport.rpc.errors import DeadlineExceeded, Refused, RelaxError, Unreachable
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.rpc import Client, make_hello

MIB = 1 << 20
RESERVE_BYTES = 1 * MIB
MAX_BYTES = 4096 * MIB
STEP_BYTES = 64 * MIB


class Filling:
    """Fills the file system of a folder, down to a small reserve, until it is closed.

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
        # Without a name from the start: nothing has to remember to remove it.
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


class _Slot:
    def __init__(self) -> None:
        self.good_s = 0.0
        self.ready_at: float | None = None
        self.failures: list[float] = []


class Intensity:
    """Counts failures of each slot within its restart period.

    Args:
        max_restarts, period_s: of ``[supervision.restart]``.
    """

    def __init__(self, max_restarts: int, period_s: float) -> None:
        self._max, self._period_s = max_restarts, period_s
        self._slots: dict[str, _Slot] = {}

    def take(self, event: dict[str, Any]) -> None:
        """Process one event of the log."""
        kind, name, at = event.get("kind"), event.get("slot"), event.get("m")
        if kind == "run_started":
            self._slots.clear()
        if not isinstance(name, str) or not isinstance(at, int | float):
            return
        slot = self._slots.setdefault(name, _Slot())
        if kind == "slot_ready":
            slot.ready_at = float(at)
        elif kind == "slot_exited":
            if slot.ready_at is not None:
                slot.good_s += max(0.0, float(at) - slot.ready_at)
                slot.ready_at = None
            diagnosis = event.get("diagnosis")
            if isinstance(diagnosis, dict) and diagnosis.get("kind") != "clean" and not event.get("finished"):
                slot.failures = [f for f in slot.failures if slot.good_s - f < self._period_s]
                slot.failures.append(slot.good_s)

    def left(self, name: str, now: float) -> int:
        """Restarts that the slot has left if it fails at `now` (monotonic seconds)."""
        slot = self._slots.get(name)
        if slot is None:
            return self._max
        good_s = slot.good_s + (max(0.0, now - slot.ready_at) if slot.ready_at is not None else 0.0)
        return self._max - sum(good_s - failure < self._period_s for failure in slot.failures)


CHAOS_SLOT = "chaos/0"
QUEUE = "queue/0"
CALL_TIMEOUT_S = 5.0
BEYOND_MIB = 64.0
PASSING = (ProcessLookupError, Unreachable, DeadlineExceeded)


class Outcome(msgspec.Struct, frozen=True):
    """Result of a strike: carried out, or withheld for a reason.

    Attributes:
        passing: the reason is temporary: the strike may be tried again a little later.
    """

    strike: Strike
    withheld: str = ""
    pid: int = 0
    passing: bool = False


class Withheld(Exception):
    """A strike that is not carried out; its text is the reason. passing: as in Outcome."""

    def __init__(self, why: str, *, passing: bool = False) -> None:
        super().__init__(why)
        self.passing = passing


class _Undo(msgspec.Struct):
    due: float
    strike: Strike
    slot: SlotStatus | None
    work: Callable[[], None]


class Injector:
    """Injects faults into one run. As a context manager it undoes lasting faults at its exit.

    Args:
        run_dir: of a living run.
        seed: written into the events, so that a strike can be reproduced.
        intensity: withholds strikes on slots that have no restart left; None: never.
        most_disk_bytes: a fault `disk` that needs more is withheld.
    """

    def __init__(
        self, run_dir: Path, seed: int, *, intensity: Intensity | None = None, most_disk_bytes: int = MAX_BYTES
    ) -> None:
        self.run_dir, self.seed = run_dir, seed
        self._intensity, self._most_disk_bytes = intensity, most_disk_bytes
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
        """When the next lasting fault ends (monotonic seconds); None: none lasts."""
        return min((one.due for one in self._undo), default=None)

    def strike(self, strike: Strike, *, put_off: bool = False) -> Outcome:
        """Carry a strike out, unless the slot has no process or no restart left.

        Args:
            put_off: the caller retries after a temporary obstacle: do not report it now.
        """
        fault = FAULTS[strike.fault]
        self._announced = False
        try:
            pid = self._disk(strike) if fault.means == "disk" else self._on_slot(strike, fault)
        except (Withheld, RelaxError, OSError) as error:
            # What was told of as injected and then failed is taken back by its number.
            kind = "fault_failed" if self._announced else "fault_withheld"
            passing = not self._announced and _passes(error)
            if not (passing and put_off):
                self._events.emit(kind, **self._told(strike, None), why=str(error))
            return Outcome(strike, str(error) or type(error).__name__, passing=passing)
        return Outcome(strike, pid=pid)

    def undo(self, now: float) -> None:
        """End the faults whose time is over."""
        for one in [one for one in self._undo if one.due <= now]:
            self._undo.remove(one)
            told = self._told(one.strike, one.slot)
            try:
                one.work()
            except ProcessLookupError:
                told["reason"] = "the process is gone"
            except Exception as error:  # noqa: BLE001 what else lasts has to be undone all the same
                told["reason"] = f"it could not be undone: {error!r}"
            self._events.emit("fault_ended", **told)

    def _on_slot(self, strike: Strike, fault: Fault) -> int:
        status = control.status(self.run_dir)
        slot = next((one for one in status.slots if one.slot == strike.slot), None)
        if slot is None:
            raise Withheld("the run has no such slot now")
        if not slot.pid:
            raise Withheld(
                f"no process lives in it now ({slot.state})", passing=slot.state != "ended" and not slot.given_up
            )
        if any(one.slot is not None and one.slot.slot == slot.slot for one in self._undo):
            raise Withheld("another fault still lasts there", passing=True)
        self._check_intensity(slot.slot)
        if fault.means == "inside":
            self._inside(strike, fault, slot)
            return slot.pid
        self._check_local(status, slot)
        if strike.fault == "kill":
            pidfd = os.pidfd_open(slot.pid)
            try:
                # The descriptor holds on to this process: if it is the run's now, no other one can be meant.
                _check_ours(status, slot)
                self._tell(strike, slot)
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            finally:
                os.close(pidfd)
        else:
            self._stop(strike, slot, status, overtake=fault.means == "epoch")
        return slot.pid

    def _check_intensity(self, slot: str) -> None:
        if self._intensity is None:
            return
        for event in self._follower.poll():
            self._intensity.take(event)
        if self._intensity.left(slot, time.monotonic()) < 1:
            raise Withheld("it has used up its restarts: one failure more would be escalated (--beyond-intensity)")

    def _check_local(self, status: RunStatus, slot: SlotStatus) -> None:
        here = status.nodes[0].node if status.nodes else ""
        if slot.node not in ("", here):
            raise Withheld(f"it runs on node {slot.node}: signals reach processes of this node only")

    def _inside(self, strike: Strike, fault: Fault, slot: SlotStatus) -> None:
        strike = self._enough(strike)
        self._tell(strike, slot)
        control.inject(self.run_dir, strike.slot, fault.order, strike.seconds, strike.amount)
        # The role ends it by itself; only the word of it is ours.
        self._later(strike, slot, lambda: os.kill(slot.pid, 0))

    def _enough(self, strike: Strike) -> Strike:
        """Memory above the role's own limit, if it has one: less would show nothing of the limit."""
        if strike.fault != "memory":
            return strike
        roles = (read_json(self.run_dir / RESOLVED_CONFIG) or {}).get("roles", {})
        limit = (roles.get(strike.slot.partition("/")[0]) or {}).get("memory_mib")
        return replace(strike, amount=max(strike.amount, limit + BEYOND_MIB)) if limit else strike

    def _disk(self, strike: Strike) -> int:
        filling = Filling(self.run_dir, most_bytes=self._most_disk_bytes)
        self._events.emit("fault_injected", **self._told(strike, None), nbytes=filling.nbytes)
        self._later(strike, None, filling.close)
        return 0

    def _stop(self, strike: Strike, slot: SlotStatus, status: RunStatus, *, overtake: bool) -> None:
        if overtake and slot.slot == REGISTRY:
            raise Withheld("the registry issues the epochs: nobody else can overtake it")
        _check_ours(status, slot)
        group = os.getpgid(slot.pid)
        if group == os.getpgid(0):
            raise Withheld("it shares a process group with this command")
        self._note(f"+{group}")
        self._tell(strike, slot)
        os.killpg(group, signal.SIGSTOP)

        def go_on() -> None:
            try:
                os.killpg(group, signal.SIGCONT)
            finally:
                self._note(f"-{group}")

        self._later(strike, slot, go_on)
        if overtake:
            epoch = asyncio.run(_overtake(status, slot))
            self._events.emit("slot_overtaken", slot=slot.slot, epoch=slot.epoch, by_epoch=epoch, number=strike.number)

    def _later(self, strike: Strike, slot: SlotStatus | None, work: Callable[[], None]) -> None:
        self._undo.append(_Undo(time.monotonic() + strike.seconds, strike, slot, work))

    def _tell(self, strike: Strike, slot: SlotStatus) -> None:
        self._announced = True
        self._events.emit("fault_injected", **self._told(strike, slot))

    def _told(self, strike: Strike, slot: SlotStatus | None) -> dict[str, Any]:
        fields: dict[str, Any] = {"name": strike.fault, "number": strike.number, "seed": self.seed}
        if strike.slot:
            fields |= {"slot": strike.slot, "role": strike.slot.partition("/")[0]}
        if slot is not None:
            fields |= {"epoch": slot.epoch, "pid": slot.pid}
        return fields | {"seconds": strike.seconds, "amount": strike.amount}

    def _note(self, word: str) -> None:
        """Tell the guard which groups are stopped: it continues them if this process is killed."""
        if self._guard is None:
            # By path, without the site packages: it must be there before the first stop.
            self._guard = subprocess.Popen([sys.executable, "-I", "-S", str(guard.__file__)], stdin=subprocess.PIPE)
        assert self._guard.stdin is not None
        self._guard.stdin.write(word.encode() + b"\n")
        self._guard.stdin.flush()


def _passes(error: Exception) -> bool:
    """Whether the obstacle to a strike is temporary, as a slot between two processes."""
    return error.passing if isinstance(error, Withheld) else isinstance(error, PASSING)


def _check_ours(status: RunStatus, slot: SlotStatus) -> None:
    """Check that the pid still belongs to the run: it was reported a moment ago and may have been reused."""
    if not procfs.has_environment(slot.pid, f"RELAX_RUN_ID={status.run_id}"):
        raise Withheld(f"process {slot.pid} is none of this run (any more)", passing=True)


async def _overtake(status: RunStatus, slot: SlotStatus) -> int:
    """Replace a process as the head does when it cannot reach it: issue an epoch, and tell the queue."""
    addresses = {one.slot: one.address for one in status.slots}
    registry = Client(addresses[REGISTRY], make_hello(status.run_id, Incarnation(CHAOS_SLOT, 0)))
    clients = [registry]
    try:
        epochs = registry.bind(RegistryApi, timeout_s=CALL_TIMEOUT_S)
        epoch = await epochs.issue_epoch(slot.slot)
        if addresses.get(QUEUE) and slot.slot != QUEUE:
            me = Incarnation(CHAOS_SLOT, await epochs.issue_epoch(CHAOS_SLOT))
            clients.append(Client(addresses[QUEUE], make_hello(status.run_id, me)))
            queue = clients[-1].bind(QueueApi, timeout_s=CALL_TIMEOUT_S)
            await queue.process_exited(1, Incarnation(slot.slot, slot.epoch), "overtaken on purpose")
            await epochs.process_exited(me, "done")
        return epoch
    finally:
        for client in clients:
            await client.close()
