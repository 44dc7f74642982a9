"""GPUs of a process: how it is told of them, and that the memory of whoever had them before is gone.

Which slot gets which devices is decided by the placement. A process that was killed is seen dead before the driver has
given its memory back; who starts on the device at once then fails for want of memory, and its restart is counted. So a
device on which a process has died is looked at before it is given again.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple

from relax_rt.process import procfs
from relax_rt.transport.rpc.errors import RelaxError

FREE_WITHIN_S = 30.0
ASK_WITHIN_S = 10.0
ASK_AGAIN_S = 0.1
INITIAL_PID_NAMESPACE = "pid:[4026531836]"


class DeviceBusy(RelaxError):
    """A device still holds memory of a process that is dead."""


class CannotAsk(Exception):
    """The devices cannot be asked; the text says why."""


class App(NamedTuple):
    """A process that holds memory of a device, in MiB; 0 where the driver does not say how much."""

    pid: int
    used_mib: int


AskDevice = Callable[[str], Awaitable[list[App]]]
"""Who holds memory of the device of this name (as in CUDA_VISIBLE_DEVICES); raises CannotAsk."""


def device_names(numbers: Sequence[int], visible: str | None) -> list[str]:
    """Names of devices, by their place among those that CUDA_VISIBLE_DEVICES lets this process see (None: all)."""
    if visible is None:
        return [str(number) for number in numbers]
    names = [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]
    return [names[number] for number in numbers if number < len(names)]


def device_environment(numbers: Sequence[int], visible: str | None) -> dict[str, str]:
    """Variables by which a process sees these devices and no other; none for a process that was given none, which
    then sees what the agent sees."""
    if not numbers:
        return {}
    # By place on the bus, as nvidia-smi counts them, not fastest first.
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(device_names(numbers, visible))}


def parse_apps(text: str) -> list[App]:
    """Lines ``pid, MiB`` as nvidia-smi prints them; the amount may be ``[N/A]``."""
    apps = []
    for line in text.splitlines():
        pid, _, used = (part.strip() for part in line.partition(","))
        if pid.isdigit():
            apps.append(App(int(pid), int(used) if used.isdigit() else 0))
    return apps


async def ask_nvidia_smi(device: str) -> list[App]:
    """Ask nvidia-smi who computes on a device.

    Raises:
        CannotAsk: it is not there, fails or takes too long.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        raise CannotAsk("nvidia-smi is not installed")
    command = [program, f"--id={device}", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    # In a thread: the agent reaps every dead child that it does not know, which the loop's own way cannot bear.
    return await asyncio.to_thread(_run, command)


def _run(command: list[str]) -> list[App]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_WITHIN_S, check=False)
    except subprocess.TimeoutExpired:
        raise CannotAsk(f"nvidia-smi did not answer within {ASK_WITHIN_S:g} s") from None
    except OSError as error:
        raise CannotAsk(f"nvidia-smi cannot be run: {error}") from error
    if done.returncode != 0:
        raise CannotAsk(f"nvidia-smi: {(done.stdout + done.stderr).strip()[:300]}")
    return parse_apps(done.stdout)


def left_behind(apps: Iterable[App], lives: Callable[[int], object]) -> list[App]:
    """Those whose process is dead. Pure, given who lives."""
    return [app for app in apps if not lives(app.pid)]


def in_initial_pid_namespace() -> bool:
    """Whether our pids are those of the host, which the driver tells."""
    return procfs.pid_namespace() == INITIAL_PID_NAMESPACE


class DeviceGate:
    """Holds the start of a process back until the memory of the dead on its devices is gone.

    Args:
        ask: asks one device.
        visible: CUDA_VISIBLE_DEVICES of the agent.
        lives: whether there is a process of this pid.
        knows_pids: whether the pids that `ask` tells mean anything to `lives`.
        say: takes `devices_not_checked` (once) and `devices_awaited`.
    """

    def __init__(
        self,
        say: Callable[..., None],
        ask: AskDevice = ask_nvidia_smi,
        visible: str | None = None,
        lives: Callable[[int], object] = procfs.start_time,
        free_within_s: float = FREE_WITHIN_S,
        knows_pids: Callable[[], bool] = in_initial_pid_namespace,
    ) -> None:
        self._say, self._ask, self._visible, self._lives = say, ask, visible, lives
        self._free_within_s, self._knows_pids = free_within_s, knows_pids
        self._used: set[str] = set()
        self._blind = ""

    async def free(self, slot: str, numbers: Sequence[int]) -> None:
        """Return once the devices hold no memory of the dead. At once where nobody of this run had them before.

        Raises:
            DeviceBusy: they still do when the time is over.
        """
        names = device_names(numbers, self._visible)
        again = [name for name in names if name in self._used]
        self._used.update(names)
        if again and not self._blind:
            try:
                await self._await_all(slot, again)
            except CannotAsk as error:
                self._blind = str(error)
                self._say("devices_not_checked", slot=slot, reason=self._blind)

    async def _await_all(self, slot: str, names: Sequence[str]) -> None:
        end = time.monotonic() + self._free_within_s
        told = False
        while held := [(name, app) for name in names for app in left_behind(await self._ask(name), self._lives)]:
            if not self._knows_pids():
                raise CannotAsk("the driver's pids are those of another pid namespace")
            name, app = held[0]
            reason = f"device {name} still holds {app.used_mib or 'some'} MiB of the dead process {app.pid}"
            if not told:
                self._say("devices_awaited", slot=slot, reason=reason)
                told = True
            if time.monotonic() > end:
                raise DeviceBusy(
                    f"{slot} cannot be started: {reason}",
                    why=f"it was not given back within {self._free_within_s:g} s",
                    hint="see nvidia-smi; a reset of the device, or of the driver, may be needed",
                )
            await asyncio.sleep(ASK_AGAIN_S)


def outer_devices() -> str | None:
    """CUDA_VISIBLE_DEVICES of this process."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")
