"""Sandboxes for untrusted programs: start one, bound what it may use, and return its result.

Rewards run model-written programs in them (roles/rewards/library/code.py); worker_pool.py uses the same guard process
for workers that run user code.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from relax_rt.process import sandbox_setup
from relax_rt.transport.rpc.errors import RelaxError

PACKAGE = Path(__file__).parents[1]
"""Folder of this package, which the guard imports."""
Level = Literal["namespaces", "limits"]
Backend = Literal["bubblewrap", "built-in"]
PROBE_S = 20.0
GRACE_S = 10.0
"""Time for a sandbox to start and to clean up, on top of its program's time."""
REPORT_BYTES = 64 << 20
KILL_S = 15.0
"""Time for a guard to kill everything below it; after that it is killed itself."""
DIR_PREFIX = "/tmp/relax-sandbox-"
BUBBLEWRAP = "bwrap"
BUBBLEWRAP_OPTIONS = ("--disable-userns", "--size", "--as-pid-1")
"""bubblewrap has all of these from 0.8 on."""
BUBBLEWRAP_HELP_S = 10.0
LIMIT_MESSAGES = {
    "time": "it did not end within {wall_s:g} s",
    "processes": "it had more than {processes} processes",
    "memory": "its processes took more than {memory_mib} MiB",
    "disk": "it wrote more than {disk_mib} MiB",
    "files": f"it made more than {sandbox_setup.INODES} files",
    "output": "it printed more than {output_kib} KiB",
}


class SandboxLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on the program in a sandbox.

    Attributes:
        wall_s: seconds from start to end. cpu_s: CPU seconds of each process.
        memory_mib: address space of each process, and private memory of all of them together.
        disk_mib: size of its folder, and of the longest file.
        output_kib: what it prints.
    """

    wall_s: float = 10.0
    cpu_s: int = 10
    memory_mib: int = 1024
    disk_mib: int = 64
    processes: int = 32
    output_kib: int = 256
    open_files: int = 128


class SandboxMode(msgspec.Struct, frozen=True):
    """How programs are isolated on this machine, by what, and why not better."""

    level: Level
    why: str = ""
    backend: Backend = "built-in"

    def __str__(self) -> str:
        if self.level == "namespaces":
            return (
                f"programs are isolated ({self.backend} sandbox): time, memory, disk, processes and output are "
                "limited; processes, files, users and a network without any connection are their own"
            )
        return (
            "programs are not isolated: time, memory, disk, processes and output are limited, and they see the files, "
            f"the network and the processes that are here (no namespaces: {self.why})"
        )


class SandboxResult(msgspec.Struct, frozen=True):
    """The result of a program.

    Attributes:
        stopped: the limit it exceeded; empty if it exited by itself.
        code: exit code, or minus the signal that killed it; None if it was stopped.
    """

    stopped: str
    code: int | None
    stdout: bytes
    stderr: bytes
    seconds: float


class SandboxFailed(RelaxError):
    """The sandbox could not be created, or its guard died: the program has no result.

    Attributes:
        closed: the folder or file that the program's user may not access, if that is the cause.
    """

    closed: str = ""


def guard_command() -> list[str]:
    """Return a guard's command line: this interpreter with only the standard library and this package."""
    root = str(PACKAGE.parent)
    code = f"import sys; sys.path.insert(0, {root!r}); from relax_rt.process.sandbox_guard import main; main()"
    return [sys.executable, "-I", "-S", "-c", code]


@contextlib.asynccontextmanager
async def start_guard(
    order: Mapping[str, Any], *, fds: Sequence[int] = (), talk: bool = False, argv: Sequence[str] = ()
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a guard with an order. When the block is left, the guard and everything below it are dead.

    Args:
        talk: let it write to our standard error instead of a pipe.
        argv: the guard's command line; by default `guard_command()`.
    """
    process = await asyncio.create_subprocess_exec(
        *(argv or guard_command()),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if talk else subprocess.PIPE,
        pass_fds=fds,
        limit=REPORT_BYTES,
        start_new_session=True,
    )
    try:
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):
            process.stdin.write(json.dumps(dict(order)).encode() + b"\n")
            await process.stdin.drain()
        yield process
    finally:
        await asyncio.shield(_end(process))


async def _end(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(KILL_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def read_guard_report(process: asyncio.subprocess.Process) -> dict[str, Any]:
    """Return a guard's next report; empty if it died without one."""
    assert process.stdout is not None
    try:
        line = await process.stdout.readline()
        return dict(json.loads(line)) if line else {}
    except ValueError:
        return {}


class Sandbox:
    """Runs programs. Each run has a sandbox of its own, which is removed before its result is returned.

    Args:
        mode: as `probe` returned it.
    """

    def __init__(self, limits: SandboxLimits, mode: SandboxMode) -> None:
        self.limits, self.mode = limits, mode

    async def run(
        self, argv: Sequence[str], files: Mapping[str, str] | None = None, stdin: str = "", *, wall_s: float = 0.0
    ) -> SandboxResult:
        """Run a program in a new folder with these files (plain names).

        Args:
            wall_s: a shorter time limit than that of `limits`.

        Raises:
            SandboxFailed: it could not be run at all.
        """
        limits = self.limits
        if wall_s:
            limits = msgspec.structs.replace(limits, wall_s=min(limits.wall_s, wall_s))
        shown = sandbox_setup.shown([argv[0]])
        if self.mode.backend == "bubblewrap":
            shown.folders.extend(package_dirs())
        order = {
            "kind": "code",
            "level": self.mode.level,
            "argv": list(argv),
            "files": dict(files or {}),
            "stdin": stdin,
            "env": environment(),
            "backend": self.mode.backend,
            "shown": shown,
            "needed": sandbox_setup.needed(argv),
            "prefix": DIR_PREFIX,
            "limits": {**msgspec.to_builtins(limits), "total_mib": limits.memory_mib},
        }
        outer = guard_command()
        if self.mode.backend == "bubblewrap":
            outer = bubblewrap_argv(shown, limits.disk_mib, outer)
        async with start_guard(order, argv=outer) as process:
            try:
                async with asyncio.timeout(limits.wall_s + GRACE_S):
                    report = await read_guard_report(process)
            except TimeoutError:
                raise SandboxFailed("running code in a sandbox", why="its guard did not answer") from None
            if "ended" not in report:
                why = str(report.get("refused") or await _guard_stderr(process) or "its guard was killed")
                failed = SandboxFailed("running code in a sandbox", why=why)
                failed.closed = str(report.get("closed", ""))
                raise failed
        why = LIMIT_MESSAGES.get(report["ended"], "").format(**msgspec.to_builtins(limits))
        stdout, stderr = (base64.b64decode(report[name]) for name in ("stdout", "stderr"))
        return SandboxResult(why, None if why else report["code"], stdout, stderr, float(report["seconds"]))


def package_dirs() -> list[str]:
    """Return the folders of the guard's own code: visible in a sandbox whose guard runs inside it."""
    linked = [str(path.resolve()) for path in PACKAGE.iterdir() if path.is_symlink()]
    return [str(PACKAGE), *linked]


def environment() -> dict[str, str]:
    """Return the environment of sandboxed programs: nothing of ours."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {"PATH": sandbox_setup.command_path(), "LANG": "C.UTF-8", **threads}


async def probe(command: Sequence[str] = ()) -> SandboxMode:
    """Find the strongest isolation that works here, by trying: bubblewrap, the guard's own namespaces, limits alone.

    Args:
        command: the command to be run; empty: this interpreter.

    Raises:
        SandboxFailed: none works; `why` says for each what failed, `hint` what to do.
    """
    if command and shutil.which(command[0], path=sandbox_setup.command_path()) is None:
        hint = "install it, or name it with its whole path in the option command"
        raise SandboxFailed(
            f"running {command[0]} in a sandbox", why=f"no such program in {sandbox_setup.command_path()}", hint=hint
        )
    failed = []
    if lacking := await asyncio.to_thread(bubblewrap_missing):
        failed.append(lacking)
    else:
        try:
            mode = SandboxMode("namespaces", backend="bubblewrap")
            await try_mode(mode, command)
        except SandboxFailed as error:
            failed.append(f"bubblewrap: {error.why}")
        else:
            return mode
    try:
        await try_mode(SandboxMode("namespaces"), command)
    except SandboxFailed as error:
        failed.append(error.why)
    else:
        return SandboxMode("namespaces")
    why = "; ".join(failed)
    try:
        await try_mode(SandboxMode("limits"), command)
    except SandboxFailed as error:
        raise SandboxFailed(
            error.what, why=f"{error.why} (no namespaces: {why})", hint=_advice_without_sandbox(error.closed)
        ) from error
    return SandboxMode("limits", why)


_modes: dict[tuple[str, ...], SandboxMode] = {}


async def cached_mode(command: Sequence[str] = ()) -> SandboxMode:
    """Return what `probe` finds for a command, cached for this process. Raises SandboxFailed: see `probe`."""
    key = tuple(command)
    if key not in _modes:
        _modes[key] = await probe(command)
    return _modes[key]


async def require_level(least: Level, command: Sequence[str] = ()) -> SandboxMode:
    """Return the isolation of a command on this machine if it is at least `least`. Raises SandboxFailed: it is weaker,
    or the command cannot be run at all."""
    mode = await cached_mode(command)
    if least == "namespaces" and mode.level != least:
        raise SandboxFailed('a program in a sandbox of level "namespaces"', why=str(mode), hint=advice())
    return mode


def advice(machine: Path = Path("/")) -> str:
    """Return how to permit namespaces on this machine, or how to do without.

    Args:
        machine: root folder; for tests.
    """
    settings = {name: _setting(machine, name) for name in PERMITTING_VALUES}
    wanted = [f"sysctl -w {name}={value}" for name, value in PERMITTING_VALUES.items() if settings[name] in WRONG[name]]
    if settings["kernel.apparmor_restrict_unprivileged_userns"] == "1" and shutil.which(BUBBLEWRAP) is None:
        wanted.insert(0, "install bubblewrap 0.8 or newer, which AppArmor lets make namespaces")
    ways = " or ".join(wanted) or (
        "permit namespaces of users, processes, mounts and networks (docker run --privileged, or a seccomp profile "
        "with unshare and mount)"
    )
    return f'{ways}; or say box = "limits" if you would run these programs yourself'


PERMITTING_VALUES = {
    "kernel.apparmor_restrict_unprivileged_userns": "0",
    "kernel.unprivileged_userns_clone": "1",
    "user.max_user_namespaces": "10000",
}
"""Kernel settings that forbid namespaces to ordinary users, with values that permit them."""

WRONG = {
    "kernel.apparmor_restrict_unprivileged_userns": ("1",),
    "kernel.unprivileged_userns_clone": ("0",),
    "user.max_user_namespaces": ("0",),
}


def _setting(machine: Path, name: str) -> str:
    try:
        return (machine / "proc/sys" / name.replace(".", "/")).read_text().strip()
    except OSError:
        return ""


def _advice_without_sandbox(closed: str) -> str:
    """Return what to do if a command cannot even be run with limits alone.

    Args:
        closed: as in `SandboxFailed`.
    """
    if not closed:
        return advice()
    # A folder on the way need only be entered.
    opened = "o+x" if Path(closed).is_dir() and closed != sysconfig.get_path("stdlib") else "o+rx"
    python = next((str(path) for path in SYSTEM_PYTHONS if path.exists()), "/usr/bin/python3")
    return (
        f"open that path to everybody (chmod {opened} {shlex.quote(closed)}), or install the interpreter with all its "
        "folders below one that is open, as /opt, or run programs with another in the options of the reward: command = "
        f'["{python}", "-I", "-B"], or start relax-rt as the user that it belongs to, or permit namespaces, where '
        "closed parent folders do not matter"
    )


SYSTEM_PYTHONS = (Path("/usr/bin/python3"), Path("/usr/local/bin/python3"))


async def try_mode(mode: SandboxMode, command: Sequence[str]) -> None:
    """Try a mode: run a command on an empty program, Python on one that prints a word. Raises SandboxFailed: it did not
    start, or Python did not print the word."""
    argv = list(command) or [sys.executable, "-I", "-S"]
    python = Path(argv[0]).name.startswith("python")
    ran = await Sandbox(SandboxLimits(wall_s=PROBE_S), mode).run(
        [*argv, "program"], {"program": "print('here', end='')" if python else ""}
    )
    if python and (ran.stopped or ran.code != 0 or ran.stdout != b"here"):
        last_line = ran.stderr.decode(errors="replace").strip().splitlines()[-1:]
        what = f"{argv[0]} in a sandbox of level {mode.level}"
        raise SandboxFailed(what, why=ran.stopped or f"exit code {ran.code} {''.join(last_line)}")


async def _guard_stderr(process: asyncio.subprocess.Process) -> str:
    """Return the last line a guard without a report wrote to standard error, such as bubblewrap's refusal."""
    assert process.stderr is not None
    try:
        async with asyncio.timeout(GRACE_S):
            error = await process.stderr.read(1 << 16)
    except TimeoutError:
        return ""
    return "".join(error.decode(errors="replace").strip().splitlines()[-1:])[:500]


def bubblewrap_missing() -> str:
    """Return why bubblewrap cannot be used here; empty if it is to be tried."""
    path = shutil.which(BUBBLEWRAP)
    if path is None:
        return "bubblewrap is not installed"
    try:
        done = subprocess.run([path, "--help"], capture_output=True, text=True, timeout=BUBBLEWRAP_HELP_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path}: {error}"
    lacking = [option for option in BUBBLEWRAP_OPTIONS if option not in done.stdout + done.stderr]
    return f"{path} is older than 0.8: it has no {lacking[0]}" if lacking else ""


def bubblewrap_argv(shown: sandbox_setup.ExposedPaths, disk_mib: int, inside: Sequence[str]) -> list[str]:
    """Return the command line that runs `inside` as process 1 of the same root as `sandbox_setup.own_root` makes.

    bubblewrap makes namespaces where this process may not: installed with its AppArmor profile or set-uid. The guard
    runs inside and keeps the limits, so both kinds of sandbox are limited by the same code. Root gets no user
    namespace: the guard runs the program as user nobody and mounts /proc itself, because the /proc of bubblewrap has a
    read-only /proc/sys, where the guard forbids further user namespaces.
    """
    words = [BUBBLEWRAP, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    words += ["--die-with-parent", "--as-pid-1"]
    words += [word for path in ("/proc/_", "/etc/_", "/dev/shm") for word in _make_parents(path)]
    if os.geteuid() != 0:
        words += ["--unshare-user", "--disable-userns", "--proc", "/proc"]
    for path in (*sandbox_setup.SYSTEM, *(one for one in shown.folders if not sandbox_setup.is_late(one))):
        if path in sandbox_setup.SYSTEM and Path(path).is_symlink():
            words += ["--symlink", str(Path(path).readlink()), path]
        else:
            words += [*_make_parents(path), "--ro-bind-try", path, path]
    for name in sandbox_setup.ETC:
        words += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for name in sandbox_setup.DEVICES:
        words += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for name, target in sandbox_setup.LINKS.items():
        words += ["--symlink", target, f"/dev/{name}"]
    for path in sandbox_setup.WRITABLE:
        words += ["--perms", "1777", "--size", str(disk_mib << 20), "--tmpfs", path]
    for path in filter(sandbox_setup.is_late, shown.folders):
        words += [*_make_parents(path), "--ro-bind-try", path, path]
    for path, target in shown.links:
        words += [*_make_parents(path), "--symlink", target, path]
    return [*words, "--remount-ro", "/", "--chdir", "/", "--", *inside]


def _make_parents(path: str) -> list[str]:
    """Options that make the folders above a path; bubblewrap would close them to all but root."""
    above = [str(part) for part in reversed(Path(path).parents)][1:]
    return [word for part in above for word in ("--perms", "0755", "--dir", part)]
