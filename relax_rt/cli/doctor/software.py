"""Checks of Python, the packages, and the GPUs with their driver. Nothing heavy is imported."""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from relax_rt.cli.doctor.finding import MIB, Finding, judged, ok, size

SMI_TIMEOUT_S = 20.0
SMI_FIELDS = ("index", "name", "memory.total", "memory.used", "driver_version", "compute_cap")
NEEDED = ("msgspec", "pydantic", "pyzmq", "uvloop", "psutil")
EXTRAS = {
    "torch": "the built-in trainer and engine; pip install relax-rt[cpu] or [gpu]",
    "transformers": "the built-in trainer and engine; pip install relax-rt[cpu] or [gpu]",
    "safetensors": "checkpoints; pip install relax-rt[cpu] or [gpu]",
    "sglang": "SGLang rollouts; pip install relax-rt[sglang]",
    "megatron-core": "Megatron-Core trainers; pip install relax-rt[megatron]",
    "cupy": "broadcast of weights between GPUs; pip install relax-rt[gpu]",
}
SANDBOX = "relax_rt.process.sandbox"
REWARDS = "relax_rt.roles.agentic.rewards"
DISTRIBUTIONS = {"cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy")}


class Gpu(msgspec.Struct, frozen=True):
    """One GPU, as reported by nvidia-smi."""

    index: int
    name: str
    total_mib: int
    used_mib: int
    driver: str
    capability: str


def check_software(gpus: list[Gpu], version: Callable[[str], str | None] | None = None) -> list[Finding]:
    """Python and packages; `version` returns the version of a distribution, None when it is not installed."""
    version = version or installed
    found = [ok("software", "python", f"{platform.python_version()} ({sys.executable})")]
    found += [ok("software", name, version(name) or "missing") for name in ("relax-rt",) if version(name)]
    for name in NEEDED:
        have = version(name)
        fail = "" if have else "the installation is broken: pip install --force-reinstall relax-rt"
        found.append(judged("software", name, have or "missing", fail=fail))
    for name, purpose in EXTRAS.items():
        have = next((v for one in DISTRIBUTIONS.get(name, (name,)) if (v := version(one))), None)
        value = have or f"not installed; for {purpose}"
        cpu_only = bool(gpus) and name == "torch" and have is not None and "+cpu" in have
        warn = "this build does not see the GPUs: install one for their CUDA version" if cpu_only else ""
        found.append(judged("software", name, value, warn=warn))
    ray = version("ray")
    found.append(ok("software", "ray", f"{ray}; not used" if ray else "not installed; not needed"))
    return found


def check_sandboxes(config: object = None) -> list[Finding]:
    """Check how rewards can isolate the programs they run, by trying their commands.

    Args:
        config: of a run whose rewards run programs: their commands are tried. None: this interpreter is tried.
    """
    # Imported by name: the command line does not depend on roles.
    sandbox = importlib.import_module(SANDBOX)
    named = importlib.import_module(REWARDS).reward_commands(config) if hasattr(config, "reward") else []
    return [asyncio.run(_check_sandbox(sandbox, command)) for command in named or [[]]]


async def _check_sandbox(sandbox: Any, command: list[str]) -> Finding:
    name = f"sandbox of {command[0]}" if command else "sandbox"
    try:
        mode = await sandbox.probe(command)
    except sandbox.SandboxFailed as error:
        return judged("software", name, f"no program can be run: {error.why}", warn=error.hint)
    return judged("software", name, str(mode), warn="" if mode.level == "namespaces" else sandbox.advice())


def check_gpus() -> tuple[list[Finding], list[Gpu]]:
    """GPUs and driver by nvidia-smi, and the GPUs themselves."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        devices = sorted(Path("/dev").glob("nvidia[0-9]*"))
        if devices:
            advice = "install the driver's tools, or pass them into the container (NVIDIA Container Toolkit)"
            return [Finding("gpu", "nvidia-smi", "warn", f"missing, but there is {devices[0]}", advice)], []
        return [ok("gpu", "gpus", "none; everything runs on the CPU")], []
    command = [tool, f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False)
        why = (done.stderr or done.stdout).strip().splitlines()[-1:] if done.returncode else []
        text = done.stdout if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired) as error:
        text, why = None, [str(error)]
    if text is None:
        said = why[0] if why else "no answer"
        advice = "the driver does not answer: look at dmesg, or reload it"
        return [Finding("gpu", "nvidia-smi", "fail", said, advice)], []
    gpus = parse_gpus(text)
    return judge_gpus(gpus), gpus


def parse_gpus(text: str) -> list[Gpu]:
    """Parse nvidia-smi's CSV; a field unknown to a card is 0 or empty."""
    found = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == len(SMI_FIELDS):
            index, name, total, used, driver, capability = fields
            found.append(Gpu(_int(index), name, _int(total), _int(used), driver, capability))
    return found


def judge_gpus(gpus: list[Gpu]) -> list[Finding]:
    """A line for each GPU, and one for the driver."""
    if not gpus:
        return [ok("gpu", "gpus", "none; everything runs on the CPU")]
    found = [ok("gpu", "driver", gpus[0].driver)]
    for gpu in gpus:
        value = f"{gpu.name}, {size(gpu.total_mib * MIB)}, compute {gpu.capability}"
        busy = gpu.total_mib > 0 and gpu.used_mib > 0.1 * gpu.total_mib
        warn = f"{size(gpu.used_mib * MIB)} are in use: nvidia-smi shows by whom" if busy else ""
        found.append(judged("gpu", f"gpu {gpu.index}", value, warn=warn))
    return found


def installed(name: str) -> str | None:
    """Version of a distribution; None when it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _int(text: str) -> int:
    return int(text) if text.isdigit() else 0
