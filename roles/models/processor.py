"""Read from /proc/cpuinfo the CPU model, and whether it has bfloat16 instructions."""

from __future__ import annotations

from pathlib import Path

from relax_rt.process.procfs import CPU_MODEL, CPUINFO, cpuinfo_field

BFLOAT16 = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
"""Flags of x86 and Arm for products of bfloat16 matrices."""


def computes_bfloat16(cpuinfo: Path = CPUINFO) -> bool | None:
    """Whether the CPU has instructions for bfloat16 matrix products; None: unknown."""
    flags = cpuinfo_field(("flags", "Features"), cpuinfo)
    return None if flags is None else not BFLOAT16.isdisjoint(flags.split())


def processor_name(cpuinfo: Path = CPUINFO) -> str:
    """The CPU model; "this CPU" if it is unknown."""
    return cpuinfo_field(CPU_MODEL, cpuinfo) or "this CPU"
