"""GPUs of a process: the variables that select them, and the wait for memory that dead processes still hold.

The placement decides which slot gets which devices. A killed process is seen dead before the driver has freed its
memory; a process that starts on the device at once fails for want of memory, and its restart is counted. So a device
on which a process has died is checked before it is used again.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from relax_rt.process import procfs
from relax_rt.transport.rpc.errors import RelaxError

FREE_TIMEOUT_S = 30.0
NVIDIA_SMI_TIMEOUT_S = 10.0
ASK_EVERY_S = 0.1
INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""Here our pids are those of the host, which the driver reports."""


class DeviceBusy(RelaxError):
    """A device still holds memory of a process that is dead."""


class DeviceQueryFailed(Exception):
    """The devices cannot be queried; the message says why."""


class DeviceProcess(NamedTuple):
    """A process that holds memory of a device, in MiB; 0 where the driver does not say how much."""

    pid: int
    used_mib: int


AskDevice = Callable[[str], Awaitable[list[DeviceProcess]]]
"""Who holds memory of the device of this name (as in CUDA_VISIBLE_DEVICES); raises DeviceQueryFailed."""


def count_gpus() -> int:
    """Return the number of NVIDIA devices, or as many of them as CUDA_VISIBLE_DEVICES lets through. Loads no driver."""
    present = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(present)
    return min(len(present), len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))


def device_names(numbers: Sequence[int], visible: str | None) -> list[str]:
    """Return the names of devices, by their index in CUDA_VISIBLE_DEVICES of this process (None: all)."""
    if visible is None:
        return [str(number) for number in numbers]
    names = [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]
    return [names[number] for number in numbers if number < len(names)]


def device_environment(numbers: Sequence[int], visible: str | None) -> dict[str, str]:
    """Return the variables by which a process sees these devices and no other; empty for a process without devices,
    which sees what the agent sees."""
    if not numbers:
        return {}
    # Ordered by bus id, as nvidia-smi does, not fastest first.
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(device_names(numbers, visible))}


def parse_apps(text: str) -> list[DeviceProcess]:
    """Parse lines ``pid, MiB`` of nvidia-smi; the amount may be ``[N/A]``."""
    apps = []
    for line in text.splitlines():
        pid, _, used = (part.strip() for part in line.partition(","))
        if pid.isdigit():
            apps.append(DeviceProcess(int(pid), int(used) if used.isdigit() else 0))
    return apps


async def ask_nvidia_smi(device: str) -> list[DeviceProcess]:
    """Ask nvidia-smi which processes use a device. Raises DeviceQueryFailed: it is not there, fails or takes too
    long."""
    program = shutil.which("nvidia-smi")
    if program is None:
        raise DeviceQueryFailed("nvidia-smi is not installed")
    command = [program, f"--id={device}", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    # In a thread: the agent reaps every dead child that it does not know, which breaks asyncio's own subprocesses.
    return await asyncio.to_thread(_run, command)


def _run(command: list[str]) -> list[DeviceProcess]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise DeviceQueryFailed(f"nvidia-smi did not answer within {NVIDIA_SMI_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise DeviceQueryFailed(f"nvidia-smi cannot be run: {error}") from error
    if done.returncode != 0:
        raise DeviceQueryFailed(f"nvidia-smi: {(done.stdout + done.stderr).strip()[:300]}")
    return parse_apps(done.stdout)


class DeviceGate:
    """Delays the start of a process until dead processes hold no memory of its devices.

    Args:
        emit: takes `devices_not_checked` (once) and `devices_awaited`.
        ask: returns the processes of one device.
        visible: CUDA_VISIBLE_DEVICES of the agent.
        lives: whether there is a process of this pid.
        knows_pids: whether the pids of `ask` are those of `lives`.
    """

    def __init__(
        self,
        emit: Callable[..., None],
        ask: AskDevice = ask_nvidia_smi,
        visible: str | None = None,
        lives: Callable[[int], object] = procfs.start_time,
        free_timeout_s: float = FREE_TIMEOUT_S,
        knows_pids: Callable[[], bool] = lambda: procfs.pid_namespace() == INITIAL_PID_NAMESPACE,
    ) -> None:
        self._emit, self._ask, self._visible, self._lives = emit, ask, visible, lives
        self._free_timeout_s, self._knows_pids = free_timeout_s, knows_pids
        self._used: set[str] = set()
        self._not_checked = ""

    async def free(self, slot: str, numbers: Sequence[int]) -> None:
        """Return once dead processes hold no memory of the devices; at once for devices that the run has not used.
        Raises DeviceBusy: they still do when the time is over."""
        names = device_names(numbers, self._visible)
        again = [name for name in names if name in self._used]
        self._used.update(names)
        if again and not self._not_checked:
            try:
                await self._wait_until_free(slot, again)
            except DeviceQueryFailed as error:
                self._not_checked = str(error)
                self._emit("devices_not_checked", slot=slot, reason=self._not_checked)

    async def _wait_until_free(self, slot: str, names: Sequence[str]) -> None:
        end = time.monotonic() + self._free_timeout_s
        reported = False
        while held := [(name, app) for name in names for app in await self._ask(name) if not self._lives(app.pid)]:
            if not self._knows_pids():
                raise DeviceQueryFailed("the driver's pids are those of another pid namespace")
            name, app = held[0]
            reason = f"device {name} still holds {app.used_mib or 'some'} MiB of the dead process {app.pid}"
            if not reported:
                self._emit("devices_awaited", slot=slot, reason=reason)
                reported = True
            if time.monotonic() > end:
                raise DeviceBusy(
                    f"{slot} cannot be started: {reason}",
                    why=f"it was not given back within {self._free_timeout_s:g} s",
                    hint="see nvidia-smi; a reset of the device, or of the driver, may be needed",
                )
            await asyncio.sleep(ASK_EVERY_S)
