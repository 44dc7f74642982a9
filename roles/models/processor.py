"""What the processors of this machine compute with instructions of their own."""

from __future__ import annotations

from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
BFLOAT16 = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
"""Flags of x86 and Arm for products of bfloat16 matrices."""


def computes_bfloat16(cpuinfo: Path = CPUINFO) -> bool | None:
    """Whether there are instructions for products of bfloat16 matrices; None: the system does not say."""
    flags = _first(cpuinfo, ("flags", "Features"))
    return None if flags is None else not BFLOAT16.isdisjoint(flags.split())


def processor_name(cpuinfo: Path = CPUINFO) -> str:
    """What the processor calls itself; empty names become "this CPU"."""
    return (_first(cpuinfo, ("model name", "Processor")) or "").strip() or "this CPU"


def _first(cpuinfo: Path, keys: tuple[str, ...]) -> str | None:
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in keys:
            return value
    return None
