"""Memory of a CUDA device, through CuPy: allocated outside the pools, exported to other processes, copied, digested.

CuPy is imported on demand: nothing here needs it before a device is used.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from relax_rt.transport.rpc.errors import DeadlineExceeded, Refused, RelaxError
from relax_rt.transport.weights.memory import DeviceMemory, Memory

COPY_HOST_TO_DEVICE, COPY_DEVICE_TO_HOST, COPY_DEVICE_TO_DEVICE = 1, 2, 3
POLL_EVERY_S = 0.0002
DIGEST_WORDS = 1 << 22
"""Words of four bytes that are digested at a time."""


class DeviceFailed(RelaxError):
    """The device, or this process's context on it, reports an error; the context cannot be used any more."""


def cupy() -> Any:
    """Import CuPy.

    Raises:
        Refused: it is not installed, or sees no device.
    """
    try:
        found: Any = importlib.import_module("cupy")
        count = found.cuda.runtime.getDeviceCount()
    except ImportError as error:
        raise Refused(
            "CUDA through CuPy", why=str(error), hint="pip install cupy-cuda13x, or the build of your CUDA"
        ) from error
    except Exception as error:
        raise Refused("CUDA through CuPy", why=str(error), hint="`nvidia-smi` shows what the driver sees") from error
    if count == 0:
        raise Refused("CUDA through CuPy", why="no device is visible", hint="look at CUDA_VISIBLE_DEVICES")
    return found


def device_uuid(index: int = 0) -> str:
    """Name a visible device: the same in every process of the machine, different on every other machine.

    CuPy cuts a UUID off at a zero byte, so the name includes the position on the PCI bus.
    """
    cp = cupy()
    raw = bytes(cp.cuda.runtime.getDeviceProperties(index).get("uuid") or b"")
    return f"GPU-{raw.hex()}@{cp.cuda.Device(index).pci_bus_id}/{_boot_id()[:8]}"


@cache
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@contextmanager
def diagnosed(what: str, hint: str = "") -> Iterator[None]:
    """Turn errors of CUDA in the block into DeviceFailed."""
    errors = cupy().cuda.runtime.CUDARuntimeError
    try:
        yield
    except errors as error:
        raise DeviceFailed(what, why=str(error), hint=hint or "restart this process: its context is lost") from error


class DeviceView:
    """`nbytes` of device memory from `pointer` on; `owner` keeps the memory allocated. Implements View."""

    def __init__(self, pointer: int, nbytes: int, owner: object) -> None:
        self.pointer, self.nbytes, self.owner = pointer, nbytes, owner

    def part(self, start: int, stop: int) -> DeviceView:
        return DeviceView(self.pointer + start, stop - start, self)

    def array(self) -> Any:
        """Return the bytes as a CuPy array of uint8, not copied."""
        cp = cupy()
        memory = cp.cuda.UnownedMemory(self.pointer, self.nbytes, self)
        return cp.ndarray((self.nbytes,), cp.uint8, cp.cuda.MemoryPointer(memory, 0))

    def digest(self) -> str:
        """Digest bytes and their positions to 64 bits on the device: detects torn and misplaced bytes."""
        cp = cupy()
        raw, total = self.array(), 0
        for number, at in enumerate(range(0, self.nbytes, 4 * DIGEST_WORDS)):
            piece = raw[at : at + 4 * DIGEST_WORDS]
            if len(piece) % 4:
                piece = cp.concatenate([piece, cp.zeros(-len(piece) % 4, cp.uint8)])
            words = piece.view(cp.uint32).astype(cp.uint64)
            weighed = int((words * _weights()[: len(words)]).sum(dtype=cp.uint64))
            total = (total * 0x9E3779B97F4A7C15 + weighed + number) % (1 << 64)
        return f"{total:016x}"


@cache
def _weights() -> Any:
    """Odd pseudo-random factors (splitmix64), the same on every machine."""
    return cupy().asarray(digest_weights(DIGEST_WORDS))


def digest_weights(count: int) -> np.ndarray:
    """Return the factors of a digest's words: uint64 [count]."""
    with np.errstate(over="ignore"):
        z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (z ^ (z >> np.uint64(31))) | np.uint64(1)


class DeviceBuffer:
    """An allocation of its own: a pool's block could not be exported without its neighbours.

    Raises:
        DeviceFailed: no room.
    """

    def __init__(self, nbytes: int) -> None:
        with diagnosed(f"{nbytes >> 20} MiB of device memory", hint="the device is full, see `nvidia-smi`"):
            self._pointer = int(cupy().cuda.runtime.malloc(nbytes))
        self.nbytes = nbytes

    @property
    def view(self) -> DeviceView:
        return DeviceView(self._pointer, self.nbytes, self)

    def export(self) -> DeviceMemory:
        """What another process opens it by."""
        with diagnosed("an IPC handle of device memory", hint="not every virtualised device allows them"):
            handle = bytes(cupy().cuda.runtime.ipcGetMemHandle(self._pointer))
        return DeviceMemory(handle, device_uuid(cupy().cuda.Device().id), 0, self.nbytes)

    def free(self) -> None:
        """Free it; no other process may have it open."""
        if self._pointer:
            pointer, self._pointer = self._pointer, 0
            cupy().cuda.runtime.free(pointer)


@contextmanager
def open_device_memory(memory: Memory) -> Iterator[DeviceView]:
    """Device memory of another process.

    Raises:
        Refused: it is no device memory, or lies on a device that this process does not use.
        DeviceFailed: it cannot be opened; its owner may be gone.
    """
    if not isinstance(memory, DeviceMemory):
        raise Refused(f"shared memory {memory.path}", why="device memory is wanted")
    runtime = cupy().cuda.runtime
    mine = device_uuid(cupy().cuda.Device().id)
    if mine != memory.device:
        raise Refused(f"memory of device {memory.device}", why=f"this process works on {mine}")
    with diagnosed("an IPC handle of device memory", hint="is the process alive that it comes from?"):
        base = int(runtime.ipcOpenMemHandle(memory.handle))
    try:
        yield DeviceView(base + memory.offset, memory.nbytes, base)
    finally:
        with diagnosed("closing memory of another process"):
            runtime.ipcCloseMemHandle(base)


def copy(into: DeviceView, source: DeviceView, timeout_s: float, aborted: Callable[[], bool] = lambda: False) -> None:
    """Copy on the device; returns when it is done.

    Raises:
        DeadlineExceeded: the device did not get it done in time. DeviceFailed: see there.
    """
    what = f"a copy of {source.nbytes >> 20} MiB on the device"
    stream = cupy().cuda.Stream(non_blocking=True)
    with diagnosed(what):
        cupy().cuda.runtime.memcpyAsync(into.pointer, source.pointer, source.nbytes, COPY_DEVICE_TO_DEVICE, stream.ptr)
        wait(stream, what, timeout_s, aborted)


def copy_to_host(into: memoryview, source: DeviceView) -> None:
    """Copy to memory of the CPU; returns when it is done."""
    with diagnosed(f"a copy of {source.nbytes >> 20} MiB from the device"):
        target = np.frombuffer(into, np.uint8)
        cupy().cuda.runtime.memcpy(target.ctypes.data, source.pointer, source.nbytes, COPY_DEVICE_TO_HOST)


def copy_from_host(into: DeviceView, source: memoryview) -> None:
    """Copy from memory of the CPU; returns when it is done."""
    with diagnosed(f"a copy of {into.nbytes >> 20} MiB to the device"):
        fro = np.frombuffer(source, np.uint8)
        cupy().cuda.runtime.memcpy(into.pointer, fro.ctypes.data, into.nbytes, COPY_HOST_TO_DEVICE)


def wait(stream: Any, what: str, timeout_s: float, aborted: Callable[[], bool]) -> None:
    """Wait for a stream without blocking inside the driver.

    Raises:
        DeadlineExceeded: it took longer, or `aborted` says so.
    """
    event = cupy().cuda.Event(disable_timing=True)
    event.record(stream)
    deadline = time.monotonic() + timeout_s
    while not event.done:
        if aborted() or time.monotonic() > deadline:
            raise DeadlineExceeded(what, why="aborted" if aborted() else f"not done within {timeout_s:g} s")
        time.sleep(POLL_EVERY_S)
