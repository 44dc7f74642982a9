"""Resolve `dtype = "auto"` for a CPU or a GPU: bfloat16 where the device computes it fast, else float32.

`roles/models/dtypes.py` asks this for the roles of a run, once, before anything starts; programs without a run ask
`cpu_dtype`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from relax_rt.process.procfs import CPU_MODEL, CPUINFO, cpuinfo_field
from relax_rt.roles.models.cache import cache_dir
from relax_rt.supervision.devices import count_gpus

BFLOAT16 = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
"""Flags of x86 and Arm for products of bfloat16 matrices."""


def computes_bfloat16(cpuinfo: Path = CPUINFO) -> bool | None:
    """Return whether the CPU has instructions for bfloat16 matrix products; None: unknown."""
    flags = cpuinfo_field(("flags", "Features"), cpuinfo)
    return None if flags is None else not BFLOAT16.isdisjoint(flags.split())


def processor_name(cpuinfo: Path = CPUINFO) -> str:
    """Return the CPU model; "this CPU" if it is unknown."""
    return cpuinfo_field(CPU_MODEL, cpuinfo) or "this CPU"


Named = Literal["float32", "bfloat16"]

MAX_BFLOAT16_RATIO = 0.85
"""bfloat16 is chosen if its products take at most this part of float32's time. Measured on one core of an EPYC with
avx512_bf16 (torch 2.13): 0.56; with these instructions hidden from oneDNN: 2.6 (AVX-512) and 12 (AVX2)."""
ABORT_RATIO = 4.0
"""From this ratio on a few rounds are enough: without instructions one may take 100 ms."""
ROUNDS, LEAST_ROUNDS = 5, 3
TOKENS, WIDTH = 128, 256
MIN_BFLOAT16_WIDTH = 256
"""Hidden sizes below this do not benefit from bfloat16 on a CPU: products of 128 x 128 matrices take 1.1 times as long
as in float32 even with bfloat16 instructions, and all values have to be converted."""
GPU_TIMEOUT_S = 20.0
FAST_GPU = 8.0
"""Compute capability from which on tensor cores take bfloat16 (Ampere)."""
ISA_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
"""Environment variables that keep libraries from using a CPU's instructions."""


class DtypeChoice(NamedTuple):
    """A dtype, and the reason for the choice as text for the user."""

    dtype: Named
    why: str


class DtypeTiming(NamedTuple):
    """Processor time (s) of the same matrix products in both dtypes, the best of some rounds."""

    float32_s: float
    bfloat16_s: float

    @property
    def ratio(self) -> float:
        """Time in bfloat16 by time in float32."""
        return self.bfloat16_s / max(self.float32_s, 1e-9)


def choose_for_cpu(
    instructions: bool | None, measure: Callable[[], DtypeTiming | None], *, name: str = "this CPU"
) -> DtypeChoice:
    """Return the dtype that a CPU computes fast.

    Flags alone are not sufficient: a library may be configured not to use the instructions, and a VM may emulate them.

    Args:
        instructions: whether the CPU has instructions for bfloat16 matrix products; None: unknown.
        measure: times both dtypes; None: it cannot.
    """
    if instructions is False:
        return DtypeChoice("float32", f"{name} has no instructions for bfloat16 (amx_bf16, avx512_bf16)")
    timing = measure()
    if timing is None:
        has = "has" if instructions else "is not known to have"
        why = f"{name} {has} instructions for bfloat16; not timed, as torch is not installed here"
        return DtypeChoice("bfloat16" if instructions else "float32", why)
    dtype: Named = "bfloat16" if timing.ratio <= MAX_BFLOAT16_RATIO else "float32"
    return DtypeChoice(
        dtype, f"on {name} matrix products in bfloat16 take {timing.ratio:.2g} times as long as in float32"
    )


def cpu_dtype(*, measured: bool = True) -> DtypeChoice:
    """Return the dtype that this machine's CPU computes fast.

    Args:
        measured: False answers at once, from the flags and what was measured before; it may be another answer.
    """
    known = _read_cached()
    measure = (lambda: known) if known is not None or not measured else measure_cached
    return choose_for_cpu(computes_bfloat16(), measure, name=processor_name())


def time_products(clock: Callable[[], float] = time.thread_time) -> DtypeTiming:
    """Time the products of a linear layer's forward and backward pass in both dtypes, some milliseconds.

    Safe on a busy machine: the clock counts this thread's processor time, rounds of both dtypes alternate, and the best
    of each is taken. A round is shorter than a scheduler's time slice.
    """
    import torch

    threads = torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(rows, WIDTH, generator=generator) for rows in (TOKENS, WIDTH))
    operands = {dtype: (left.to(dtype), right.to(dtype)) for dtype in (torch.float32, torch.bfloat16)}
    best = dict.fromkeys(operands, float("inf"))
    torch.set_num_threads(1)
    try:
        for number in range(1, ROUNDS + 1):
            for dtype, (x, w) in operands.items():
                began = clock()
                # Libraries have a kernel for each of the three layouts, and may have a fast one for the first only.
                torch.nn.functional.linear(x, w), torch.mm(x, w), torch.mm(x.t(), x)
                best[dtype] = min(best[dtype], clock() - began)
            found = DtypeTiming(best[torch.float32], best[torch.bfloat16])
            if number >= LEAST_ROUNDS and found.ratio > ABORT_RATIO:
                break
    finally:
        torch.set_num_threads(threads)
    return found


def measure_cached() -> DtypeTiming | None:
    """`time_products`, kept in the cache folder for later processes, so that all of a machine decide alike."""
    if find_spec("torch") is None:
        return None
    timing = time_products()
    path = _cache_path()
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps(timing._asdict()))
        fresh.replace(path)
    except OSError:
        pass  # It costs the next process the same milliseconds.
    return timing


def _read_cached() -> DtypeTiming | None:
    try:
        kept = json.loads(_cache_path().read_text())
        timing = DtypeTiming(float(kept["float32_s"]), float(kept["bfloat16_s"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return timing if timing.float32_s > 0 and timing.bfloat16_s > 0 else None


def _cache_path() -> Path:
    """Return the cache file, named by all that the result depends on: the CPU, torch, and disabled instructions."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = ""
    hidden = {name: value for name in ISA_VARIABLES if (value := os.environ.get(name))}
    about = json.dumps([processor_name(), computes_bfloat16(), torch, hidden], sort_keys=True)
    return cache_dir() / f"cpu-dtype-{hashlib.sha256(about.encode()).hexdigest()[:16]}.json"


def choose_for_gpu(capabilities: list[float]) -> DtypeChoice:
    """Return the dtype that all of these GPUs compute fast.

    Args:
        capabilities: compute capability of each, as 9.0; empty: not known.
    """
    if not capabilities:
        return DtypeChoice("bfloat16", f"GPUs are taken to have compute capability {FAST_GPU} or higher")
    lowest = min(capabilities)
    if lowest >= FAST_GPU:
        return DtypeChoice("bfloat16", f"GPUs of compute capability {lowest} compute it fast")
    return DtypeChoice(
        "float32", f"a GPU of compute capability {lowest} has no bfloat16 in its tensor cores ({FAST_GPU} has)"
    )


@cache
def gpu_capabilities() -> list[float]:
    """Compute capabilities of this machine's GPUs, by the driver's own tool: no CUDA context is made here."""
    tool = shutil.which("nvidia-smi")
    if not count_gpus() or tool is None:
        return []
    try:
        command = [tool, "--query-gpu=compute_cap", "--format=csv,noheader"]
        out = subprocess.run(command, capture_output=True, text=True, timeout=GPU_TIMEOUT_S, check=True).stdout
        return [float(line) for line in out.split()]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
