"""Faults that a role's host carries out on its own process when `relax-rt chaos` asks for them."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import threading
import time
from collections.abc import Callable

import structlog

from relax_rt.supervision.channel import FaultMsg
from relax_rt.transport.rpc.impair import impair

MIB = 1 << 20


class Faults:
    """Injects faults into this process. `carry_out` is called on the thread that listens to the agent.

    Args:
        emit: takes ``fault_started`` or ``fault_failed`` with its fields, so that the injector learns what happened.
    """

    def __init__(self, emit: Callable[[str, dict[str, str]], None] = lambda kind, fields: None) -> None:
        self._emit = emit
        self._loop: asyncio.AbstractEventLoop | None = None
        self._log = structlog.get_logger()

    def follow(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the role's event loop, once there is one."""
        self._loop = loop

    def carry_out(self, order: FaultMsg) -> None:
        """Inject the fault for `order.seconds`."""
        self._log.warning("fault injected", fault=order.kind, seconds=order.seconds, amount=order.amount)
        try:
            self._do(order)
        except Exception as error:  # noqa: BLE001 the thread that listens to the agent must survive a failing fault
            self._failed(order.kind, str(error) or type(error).__name__)

    def _started(self, kind: str) -> None:
        self._emit("fault_started", {"order": kind})

    def _failed(self, kind: str, why: str) -> None:
        self._log.warning("fault not carried out", fault=kind, why=why)
        self._emit("fault_failed", {"order": kind, "why": why})

    def _do(self, order: FaultMsg) -> None:
        match order.kind:
            case "hang_loop":
                if self._loop is None:
                    self._failed(order.kind, "the role has no event loop yet")
                    return

                def hang() -> None:
                    self._started(order.kind)
                    time.sleep(order.seconds)

                self._loop.call_soon_threadsafe(hang)
            case "hold_gil":
                self._started(order.kind)
                # Sleep in native code while holding the GIL, as a faulty extension does. In one call: between two,
                # another thread could take the GIL. usleep takes 32 bits.
                libc = ctypes.PyDLL(None)
                end = time.monotonic() + order.seconds
                while (left := end - time.monotonic()) > 0:
                    libc.usleep(ctypes.c_uint(min(int(left * 1e6) + 1, 4_000_000_000)))
            case "eat_memory":
                size = int(order.amount * MIB)
                threading.Thread(target=self._eat, args=(size, order.seconds), name="relax-fault", daemon=True).start()
            case "clock_jump":
                _shift_wall_clock(order.amount)
                timer = threading.Timer(order.seconds, lambda: _shift_wall_clock(-order.amount))
                timer.daemon = True
                timer.start()
                self._started(order.kind)
            case "delay":
                impair(delay_s=order.amount, for_s=order.seconds)
                self._started(order.kind)
            case "partition":
                impair(drop=1.0, for_s=order.seconds)
                self._started(order.kind)

    def _eat(self, size: int, seconds: float) -> None:
        """Allocate memory page by page, hold it for `seconds`, and free it."""
        try:
            with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
                # Before the first page: the process may be killed for the memory that it takes.
                self._started("eat_memory")
                for start in range(0, size, mmap.PAGESIZE):
                    memory[start] = 1
                time.sleep(seconds)
        except (OSError, ValueError, OverflowError) as error:
            self._failed("eat_memory", str(error))


_wall_clock = (time.time, time.time_ns)
_shifted = 0.0


def _shift_wall_clock(seconds: float) -> None:
    """Shift the wall clock that Python code of this process sees, as a step of the host's clock does.

    The monotonic clock cannot jump on a running machine; the fault `stop` makes a process miss time.
    """
    global _shifted
    _shifted += seconds
    shift = _shifted
    time.time = lambda: _wall_clock[0]() + shift
    time.time_ns = lambda: _wall_clock[1]() + int(shift * 1e9)
    if abs(shift) < 1e-9:
        time.time, time.time_ns = _wall_clock
