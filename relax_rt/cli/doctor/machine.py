"""Checks of the machine: cores, memory, shared memory, limits, clock, container. Read from /proc and /sys."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from relax_rt.cli.doctor.finding import GIB, MIB, Finding, judged, ok, size
from relax_rt.supervision.rundir import SHM_ROOT, SOCKET_ROOT, stale_runs

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
    value = f"{size(free)} free of {size(min(memory.total, most))}"
    low = free < GOOD_MEMORY
    return judged("machine", "memory", value, warn="the quickstart needs 12 GB; end other programs" if low else "")


def check_shared_memory(path: Path = SHM_ROOT) -> Finding:
    """It holds the queue's payloads and the staged weights."""
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        return Finding("machine", str(path), "fail", str(error), "mount a tmpfs there; the queue's payloads need it")
    value = f"{size(usage.free)} free of {size(usage.total)}"
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
    return judged("machine", str(SOCKET_ROOT), f"{size(shutil.disk_usage(SOCKET_ROOT).free)} free", fail=fail)


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
    told = [f"{limits['cores']:g} cores"] if "cores" in limits else []
    told += [size(limits["memory"])] if "memory" in limits else []
    told += [f"{limits['pids']:g} processes"] if "pids" in limits else []
    where = "in a container" if marks else "no container seen"
    version = "v2" if (root / "sys/fs/cgroup/cgroup.controllers").exists() else "v1 or none"
    return ok("machine", "cgroup", f"{version}, {where}, limits: {', '.join(told) or 'none'}")


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
    low = 0 <= soft < 64 * MIB and _has_gpu_device()
    value = "unlimited" if soft < 0 else size(soft)
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
    """The kernel marks the choice: ``always [madvise] never``."""
    return (text or "").partition("[")[2].partition("]")[0]


def _limit(value: int) -> str:
    return "unlimited" if value < 0 else f"{value:,}"


def _has_gpu_device() -> bool:
    return Path("/dev/nvidia0").exists()
