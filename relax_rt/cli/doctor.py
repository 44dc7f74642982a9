"""`relax-rt doctor`: checks whether this machine, and a run on it, will work. Starts nothing.

Kernel limits are read from /proc and /sys, GPUs from nvidia-smi; torch and other heavy packages are not imported.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import psutil  # type: ignore[import-untyped]
from cyclopts import Parameter
from pydantic import BaseModel
from rich.text import Text

from relax_rt.cli.app import DEFAULT_CONFIG, FAILED, OK, Json, Overrides
from relax_rt.cli.display import console_for_output, show_json
from relax_rt.config.job import load_job
from relax_rt.config.loader import load_config
from relax_rt.config.schema import RoleSettings, RunConfig
from relax_rt.observe.text import GIB, MIB, byte_size
from relax_rt.supervision.rundir import SHM_ROOT, SOCKET_ROOT, stale_runs

LEVEL_STYLE = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(
    config: Annotated[
        Path | None, Parameter(help="A roles.toml: also check that its run fits. Default: ./roles.toml if it exists.")
    ] = None,
    *,
    overrides: Overrides = None,
    json: Json = False,
) -> int:
    """Check this machine, and whether a run fits on it."""
    if config is None and DEFAULT_CONFIG.is_file():
        config = DEFAULT_CONFIG
    loaded = load_config(config, overrides or (), inputs=True) if config is not None else None
    gpu_findings, gpus = check_gpus()
    findings = [*check_machine(), *check_limits(), *gpu_findings, *check_software(gpus), *check_sandboxes(loaded)]
    if loaded is not None:
        findings += check_fit(loaded, gpus)
    show_json(findings) if json else show_findings(findings)
    return FAILED if any(finding.level == "fail" for finding in findings) else OK


def show_findings(findings: Sequence[Finding]) -> None:
    """Print a line for each finding, with its advice below."""
    console = console_for_output()
    for section, members in groupby(findings, key=lambda finding: finding.section):
        console.print(Text(section, "bold"))
        for one in members:
            style = LEVEL_STYLE[one.level]
            line = Text.assemble("  ", (f"{one.level:<5}", style), f"{one.name:<16}  {one.value}")
            console.print(line, soft_wrap=True)
            if one.advice:
                console.print(Text(f"       {'':<16}  {one.advice}", style), soft_wrap=True)
    counts = {level: sum(one.level == level for one in findings) for level in ("warn", "fail")}
    bad = ", ".join(f"{n} {level}" for level, n in counts.items() if n)
    console.print(Text(f"{len(findings)} checks, {bad or 'all ok'}", "bold"))


class Finding(msgspec.Struct, frozen=True):
    """One line of the doctor.

    Attributes:
        section: ``machine``, ``limits``, ``gpu``, ``software``, ``run``.
        level: fail: a run cannot work; warn: it may be slow, or break later.
        value: the observed value.
        advice: what to do about it; empty when there is nothing to do.
    """

    section: str
    name: str
    level: Literal["ok", "warn", "fail"]
    value: str
    advice: str = ""


def ok(section: str, name: str, value: str) -> Finding:
    """A finding with nothing to do."""
    return Finding(section, name, "ok", value)


def judged(section: str, name: str, value: str, *, fail: str = "", warn: str = "") -> Finding:
    """The finding whose advice is given first; ok when there is none."""
    if fail:
        return Finding(section, name, "fail", value, fail)
    return Finding(section, name, "warn" if warn else "ok", value, warn)


# --- the machine and the limits of a process

LEAST_FILES, GOOD_FILES = 256, 4096
LEAST_SHM, GOOD_SHM = 64 * MIB, 300 * MIB
GOOD_MEMORY = 4 * GIB
GOOD_PROCESSES = 512
SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "refined-jiffies", "pit")
CGROUP_UNLIMITED = 1 << 60


def check_machine(root: Path = Path("/")) -> list[Finding]:
    """Everything about the machine itself.

    Args:
        root: where proc/ and sys/ are; another one in tests.
    """
    limits = cgroup_limits(root)
    return [
        check_kernel(),
        check_cores(limits),
        check_memory(limits),
        check_shared_memory(),
        check_scratch(),
        check_clock(root),
        check_huge_pages(root),
        check_container(root, limits),
        *check_leftovers(),
    ]


def check_limits(root: Path = Path("/")) -> list[Finding]:
    """Limits of a process: files, locked memory, processes, ports."""
    return [check_files(), check_locked(), check_processes(root), check_ports(root), check_stacks(root)]


def check_kernel() -> Finding:
    """Exits are observed by pidfd, which Linux has from 5.3 on."""
    try:
        os.close(os.pidfd_open(os.getpid()))
        fail = ""
    except (OSError, AttributeError) as error:
        fail = f"pidfd_open does not work ({error}): Linux 5.3 or newer is needed, and a container that allows it"
    return judged("machine", "kernel", f"{platform.system()} {platform.release()} {platform.machine()}", fail=fail)


def check_cores(limits: dict[str, float]) -> Finding:
    """Cores that this process may use, as the container bounds them."""
    usable = len(os.sched_getaffinity(0))
    quota = limits.get("cores", float("inf"))
    value = f"{usable} of {os.cpu_count()} usable"
    if quota < usable:
        value += f", {quota:g} by the cgroup's quota"
    few = min(usable, quota) < 2
    return judged("machine", "cores", value, warn="roles share one core: expect low speed" if few else "")


def check_memory(limits: dict[str, float]) -> Finding:
    """Memory available without swapping."""
    memory = psutil.virtual_memory()
    most = limits.get("memory", float("inf"))
    free = min(memory.available, max(0.0, most - limits.get("memory_used", 0.0)))
    value = f"{byte_size(free)} free of {byte_size(min(memory.total, most))}"
    low = free < GOOD_MEMORY
    return judged("machine", "memory", value, warn="the quickstart needs 12 GB; end other programs" if low else "")


def check_shared_memory(path: Path = SHM_ROOT) -> Finding:
    """It holds the queue's payloads and the staged weights."""
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        return Finding("machine", str(path), "fail", str(error), "mount a tmpfs there; the queue's payloads need it")
    value = f"{byte_size(usage.free)} free of {byte_size(usage.total)}"
    larger = "make it larger: mount -o remount,size=8G /dev/shm; in a container --shm-size"
    fail = larger if usage.free < LEAST_SHM else "" if os.access(path, os.W_OK) else "no permission to write there"
    warn = f"queue.capacity_mib is 256 by default: {larger}" if usage.free < GOOD_SHM else ""
    return judged("machine", str(path), value, fail=fail, warn=warn)


def check_scratch() -> Finding:
    """It holds the unix sockets: it must be writable and support them."""
    path = SOCKET_ROOT / f"relax-doctor-{os.getpid()}.sock"
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(path))
        fail = ""
    except OSError as error:
        fail = f"no unix socket can be made there: {error}"
    finally:
        path.unlink(missing_ok=True)
    return judged("machine", str(SOCKET_ROOT), f"{byte_size(shutil.disk_usage(SOCKET_ROOT).free)} free", fail=fail)


def check_clock(root: Path) -> Finding:
    """A slow clock source turns every time query into a system call."""
    source = read(root / "sys/devices/system/clocksource/clocksource0/current_clocksource") or "unknown"
    slow = source in SLOW_CLOCKS
    return judged("machine", "clock", source, warn="slow to read; boot with clocksource=tsc" if slow else "")


def check_huge_pages(root: Path) -> Finding:
    """Larger pages make first use of shared memory faster; a run works without."""
    directory = root / "sys/kernel/mm/transparent_hugepage"
    chosen = {name: _chosen(read(directory / name)) for name in ("enabled", "shmem_enabled")}
    if not any(chosen.values()):
        return ok("machine", "huge pages", "not offered by this kernel")
    return ok("machine", "huge pages", f"memory: {chosen['enabled'] or '?'}, shared: {chosen['shmem_enabled'] or '?'}")


def check_container(root: Path, limits: dict[str, float]) -> Finding:
    """Limits of the container beside those of the machine."""
    marks = [name for name in (".dockerenv", "run/.containerenv") if (root / name).exists()]
    known = [f"{limits['cores']:g} cores"] if "cores" in limits else []
    known += [byte_size(limits["memory"])] if "memory" in limits else []
    known += [f"{limits['pids']:g} processes"] if "pids" in limits else []
    where = "in a container" if marks else "no container seen"
    version = "v2" if (root / "sys/fs/cgroup/cgroup.controllers").exists() else "v1 or none"
    return ok("machine", "cgroup", f"{version}, {where}, limits: {', '.join(known) or 'none'}")


def check_leftovers() -> list[Finding]:
    """Shared memory left by dead runs of this user."""
    stale = [paths.run_id for paths in stale_runs()]
    if not stale:
        return []
    return [Finding("machine", "leftovers", "warn", f"of dead runs: {', '.join(stale)}", "the next `up` removes them")]


def check_files() -> Finding:
    """Open files: sockets between roles, memory maps, pidfds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    advice = f"ulimit -n {GOOD_FILES}" + (f" (the hard limit is {hard})" if 0 <= hard < GOOD_FILES else "")
    few, least = 0 <= soft < GOOD_FILES, 0 <= soft < LEAST_FILES
    return judged("limits", "open files", _limit(soft), fail=advice if least else "", warn=advice if few else "")


def check_locked() -> Finding:
    """Pinned host memory, which transfers to GPUs and between nodes use."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    low = 0 <= soft < 64 * MIB and Path("/dev/nvidia0").exists()
    value = "unlimited" if soft < 0 else byte_size(soft)
    return judged("limits", "locked memory", value, warn="ulimit -l unlimited, for transfers to GPUs" if low else "")


def check_processes(root: Path) -> Finding:
    """Processes and threads of this user and container."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    most = cgroup_limits(root).get("pids", float("inf"))
    least = min(soft if soft >= 0 else float("inf"), most)
    value = "unlimited" if least == float("inf") else f"{least:,.0f}"
    few = least < GOOD_PROCESSES
    return judged("limits", "processes", value, warn="raise ulimit -u, or the container's --pids-limit" if few else "")


def check_ports(root: Path) -> Finding:
    """Rendezvous of gangs and other nodes listen on TCP ports."""
    span = (read(root / "proc/sys/net/ipv4/ip_local_port_range") or "").split()
    value = f"ephemeral {span[0]}-{span[1]}" if len(span) == 2 else "ephemeral range unknown"
    try:
        with socket.create_server(("127.0.0.1", 0)):
            fail = ""
    except OSError as error:
        fail = f"no port of 127.0.0.1 can be listened on: {error}"
    return judged("limits", "ports", value, fail=fail)


def check_stacks(root: Path) -> Finding:
    """Stacks of a process that hangs in native code can be read from outside only if ptrace is allowed."""
    scope = read(root / "proc/sys/kernel/yama/ptrace_scope")
    closed = scope in ("2", "3") and os.geteuid() != 0
    warn = "stacks of hanging native code cannot be read: sysctl kernel.yama.ptrace_scope=1" if closed else ""
    return judged(
        "limits", "ptrace", {None: "no restriction", "0": "no restriction"}.get(scope, f"scope {scope}"), warn=warn
    )


def cgroup_limits(root: Path = Path("/")) -> dict[str, float]:
    """Limits of our cgroup (v2, else v1) that are set: cores, memory and memory_used in bytes, pids."""
    base = root / "sys/fs/cgroup"
    own = next((line[3:] for line in (read(root / "proc/self/cgroup") or "").splitlines() if line[:3] == "0::"), "")
    here = base / own.strip("/")
    here = here if (here / "cgroup.controllers").exists() else base
    found: dict[str, float] = {}
    quota = (read(here / "cpu.max") or "").split()
    if len(quota) == 2 and quota[0].isdigit():
        found["cores"] = int(quota[0]) / int(quota[1])
    names = {"memory": "memory.max", "memory_used": "memory.current", "pids": "pids.max"}
    if not (here / "memory.max").exists():
        v1 = {"memory": "memory/memory.limit_in_bytes", "memory_used": "memory/memory.usage_in_bytes"}
        names = {**v1, "pids": "pids/pids.max"}
        found |= _v1_cores(base)
    for key, name in names.items():
        value = read(here / name) or ""
        if value.isdigit() and int(value) < CGROUP_UNLIMITED:
            found[key] = float(value)
    if "memory" not in found:
        found.pop("memory_used", None)
    return found


def read(path: Path) -> str | None:
    """A small file of the kernel; None when it is missing or not readable."""
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _v1_cores(base: Path) -> dict[str, float]:
    quota, period = read(base / "cpu/cpu.cfs_quota_us") or "", read(base / "cpu/cpu.cfs_period_us") or ""
    return {"cores": int(quota) / int(period)} if quota.isdigit() and period.isdigit() and int(period) else {}


def _chosen(text: str | None) -> str:
    """The chosen one of a kernel's options, which stands in brackets: ``always [madvise] never``."""
    return (text or "").partition("[")[2].partition("]")[0]


def _limit(value: int) -> str:
    return "unlimited" if value < 0 else f"{value:,}"


# --- software and GPUs

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
        value = f"{gpu.name}, {byte_size(gpu.total_mib * MIB)}, compute {gpu.capability}"
        busy = gpu.total_mib > 0 and gpu.used_mib > 0.1 * gpu.total_mib
        warn = f"{byte_size(gpu.used_mib * MIB)} are in use: nvidia-smi shows by whom" if busy else ""
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


# --- one run on this machine

FILES_OF_A_ROLE = 16
FILES_OF_THE_AGENT = 64
GOOD_DISK = 2 * GIB
IMPORT_TIMEOUT_S = 60.0

Roles = dict[str, RoleSettings]


def check_fit(config: RunConfig, gpus: Sequence[Gpu]) -> list[Finding]:
    """Check whether a run fits on this machine."""
    roles = {kind: settings for kind, settings in config.roles.items() if settings.count}
    return list(_check_fit(config, roles, gpus))


def _check_fit(config: RunConfig, roles: Roles, gpus: Sequence[Gpu]) -> Iterator[Finding]:
    processes = sum(settings.count for settings in roles.values())
    threads = sum(settings.count * settings.threads for settings in roles.values())
    cores = min(float(len(os.sched_getaffinity(0))), cgroup_limits().get("cores", float("inf")))
    warn = "more than four threads a core: lower count or threads of roles" if threads > 4 * cores else ""
    yield judged("run", "cores", f"{processes} processes with {threads} threads on {cores:g} cores", warn=warn)

    wanted = {kind: settings.count * settings.gpus for kind, settings in roles.items() if settings.gpus}
    total, parts = sum(wanted.values()), ", ".join(f"{kind} {n:g}" for kind, n in wanted.items())
    value = f"{total:g} wanted, {len(gpus)} here" + (f" ({parts})" if wanted else "")
    missing = total > len(gpus)
    other_nodes = any(settings.node for settings in roles.values())
    advice = "let other nodes join (`up --join`), or lower count or gpus of roles" if missing else ""
    yield judged("run", "gpus", value, fail="" if other_nodes else advice, warn=advice)

    need = config.queue.capacity_mib * MIB + load_job(config.run.job).shm_bytes(config)
    free = shutil.disk_usage(SHM_ROOT).free
    fail = "lower queue.capacity_mib, or make /dev/shm larger (in a container: --shm-size)" if need > free else ""
    yield judged("run", "shared memory", f"{byte_size(need)} of {byte_size(free)} free", fail=fail)

    allowed = sum(settings.count * (settings.memory_mib or 0) for settings in roles.values()) * MIB
    memory = check_memory(cgroup_limits()).value
    if allowed:
        over = allowed > psutil.virtual_memory().total
        warn = "the limits of all roles together are more than the machine has" if over else ""
        yield judged("run", "memory", f"{byte_size(allowed)} allowed to the roles together; {memory}", warn=warn)
    else:
        yield ok("run", "memory", f"{memory}; no role has memory_mib: `relax-rt plan` estimates the need")

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = FILES_OF_THE_AGENT + FILES_OF_A_ROLE * processes
    value = f"about {files} in the agent, {'no limit' if soft < 0 else f'{soft} allowed'}"
    yield judged("run", "open files", value, fail=f"ulimit -n {2 * files}" if 0 <= soft < files else "")

    run_dir = Path(config.run.dir)
    there = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    free = shutil.disk_usage(there).free
    warn = "checkpoints may fill the disk: choose another run.dir" if free < GOOD_DISK else ""
    fail = "" if os.access(there, os.W_OK) else "no permission to write there: choose another run.dir"
    yield judged("run", "run.dir", f"{run_dir}, {byte_size(free)} free", fail=fail, warn=warn)

    usable = os.sched_getaffinity(0)
    for kind, settings in roles.items():
        if unusable := sorted(set(settings.cpus or ()) - usable):
            advice = f"cores {unusable} may not be used by this process"
            yield Finding("run", f"roles.{kind}", "fail", f"cpus = {settings.cpus}", advice)

    for python in sorted({settings.python for settings in roles.values() if settings.python}):
        kinds = ", ".join(kind for kind, settings in roles.items() if settings.python == python)
        why = _cannot_import(python)
        fail = f"relax_rt cannot be imported there ({why}): pip install relax-rt into it" if why else ""
        yield judged("run", f"python of {kinds}", python, fail=fail)

    for name, port in sorted(_named_ports(config.model_dump())):
        try:
            with socket.create_server(("127.0.0.1", port)):
                fail = ""
        except OSError as error:
            fail = f"{error.strerror}: end the process that listens there, or choose another port"
        yield judged("run", name, str(port), fail=fail)


def _cannot_import(python: str) -> str:
    try:
        command = [python, "-c", "import relax_rt.hosting.host"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stderr.strip().splitlines() or ["it printed nothing"])[-1] if done.returncode else ""


def _named_ports(table: Any, at: str = "") -> Iterator[tuple[str, int]]:
    for key, value in table.items() if isinstance(table, dict) else ():
        name = f"{at}.{key}" if at else str(key)
        if isinstance(value, BaseModel):
            value = value.model_dump()
        if isinstance(value, dict):
            yield from _named_ports(value, name)
        elif isinstance(value, int) and (key == "port" or str(key).endswith("_port")) and value > 0:
            yield name, value
