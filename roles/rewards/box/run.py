"""Boxes for those who want something run: how they are started, what they may take, and what comes of it."""

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

import relax_rt
from relax_rt.roles.rewards.box import bubblewrap, layout
from relax_rt.transport.rpc.errors import RelaxError

Level = Literal["namespaces", "limits"]
Backend = Literal["bubblewrap", "built-in"]
PROBE_S = 20.0
GRACE_S = 10.0
"""For a box to start and to clear up, besides the time of its program."""
REPORT_BYTES = 64 << 20
KILL_S = 15.0
"""For a guard to end all that it has; after that it is killed itself."""
PREFIX = "/tmp/box-of-relax-"
ENDED = {
    "time": "it did not end within {wall_s:g} s",
    "processes": "it had more than {processes} processes",
    "memory": "its processes took more than {memory_mib} MiB",
    "disk": "it wrote more than {disk_mib} MiB",
    "files": f"it made more than {layout.INODES} files",
    "output": "it printed more than {output_kib} KiB",
}


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the code in a box may take.

    Attributes:
        wall_s, cpu_s: seconds from its start to its end; seconds of one process on a core.
        memory_mib: address space of each process, and what all have of their own together.
        disk_mib: what its folder holds, and the longest file.
        output_kib: what it prints.
    """

    wall_s: float = 10.0
    cpu_s: int = 10
    memory_mib: int = 1024
    disk_mib: int = 64
    processes: int = 32
    output_kib: int = 256
    open_files: int = 128


class Mode(msgspec.Struct, frozen=True):
    """How well a box is closed on this machine, by what, and why not better."""

    level: Level
    why: str = ""
    backend: Backend = "built-in"

    def __str__(self) -> str:
        if self.level == "namespaces":
            return (
                f"programs are closed in ({self.backend} sandbox): time, memory, disk, processes and output are "
                "limited; processes, files, users and a network without any connection are their own"
            )
        return (
            "programs are not closed in: time, memory, disk, processes and output are limited, and they see the files, "
            f"the network and the processes that are here (no namespaces: {self.why})"
        )


class Ran(msgspec.Struct, frozen=True):
    """What came of a program.

    Attributes:
        stopped: why it was ended; empty if it ended by itself.
        code: its exit code, or minus the signal that ended it; None if it was stopped.
    """

    stopped: str
    code: int | None
    stdout: bytes
    stderr: bytes
    seconds: float


class BoxFailed(RelaxError):
    """The box itself could not be made, or was lost: nothing is known of the code.

    Attributes:
        closed: the folder or file that the program's user may not enter or read, if that is the cause.
    """

    closed: str = ""


def guard_argv() -> list[str]:
    """A guard's command line: this interpreter with nothing but the standard library and this package."""
    root = str(Path(relax_rt.__file__).parent.parent)
    code = f"import sys; sys.path.insert(0, {root!r}); from relax_rt.roles.rewards.box.guard import main; main()"
    return [sys.executable, "-I", "-S", "-c", code]


@contextlib.asynccontextmanager
async def guard(
    order: Mapping[str, Any], *, fds: Sequence[int] = (), talk: bool = False, argv: Sequence[str] = ()
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A guard with its order. However the block is left, it is gone afterwards, and all that it guarded.

    Args:
        talk: let it write to our standard error; else that is a pipe.
        argv: how it is started; by default `guard_argv()`.
    """
    process = await asyncio.create_subprocess_exec(
        *(argv or guard_argv()),
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


async def read_report(process: asyncio.subprocess.Process) -> dict[str, Any]:
    """The next line of a guard; an empty table if it ended without a word."""
    assert process.stdout is not None
    try:
        line = await process.stdout.readline()
        return dict(json.loads(line)) if line else {}
    except ValueError:
        return {}


class Box:
    """Runs code. Each run has a box of its own, which is gone when its result is there.

    Args:
        mode: as `probe` found it.
    """

    def __init__(self, limits: Limits, mode: Mode) -> None:
        self.limits, self.mode = limits, mode

    async def run(
        self, argv: Sequence[str], files: Mapping[str, str] | None = None, stdin: str = "", *, wall_s: float = 0.0
    ) -> Ran:
        """Run a program in a folder with these files (plain names).

        Args:
            wall_s: less time than the limits give it.

        Raises:
            BoxFailed: it could not be run at all.
        """
        limits = self.limits
        if wall_s:
            limits = msgspec.structs.replace(limits, wall_s=min(limits.wall_s, wall_s))
        shown = layout.shown([argv[0]])
        if self.mode.backend == "bubblewrap":
            shown.folders.extend(package_folders())
        order = {
            "kind": "code",
            "level": self.mode.level,
            "argv": list(argv),
            "files": dict(files or {}),
            "stdin": stdin,
            "env": environment(),
            "backend": self.mode.backend,
            "shown": shown,
            "needed": layout.needed(argv),
            "prefix": PREFIX,
            "limits": {**msgspec.to_builtins(limits), "total_mib": limits.memory_mib},
        }
        outer = guard_argv()
        if self.mode.backend == "bubblewrap":
            outer = bubblewrap.argv(shown, limits.disk_mib, outer)
        async with guard(order, argv=outer) as process:
            try:
                async with asyncio.timeout(limits.wall_s + GRACE_S):
                    said = await read_report(process)
            except TimeoutError:
                raise BoxFailed("running code in a box", why="its guard did not answer") from None
            if "ended" not in said:
                why = str(said.get("refused") or await _last_words(process) or "its guard was killed")
                failed = BoxFailed("running code in a box", why=why)
                failed.closed = str(said.get("closed", ""))
                raise failed
        why = ENDED.get(said["ended"], "").format(**msgspec.to_builtins(limits))
        stdout, stderr = (base64.b64decode(said[name]) for name in ("stdout", "stderr"))
        return Ran(why, None if why else said["code"], stdout, stderr, float(said["seconds"]))


def package_folders() -> list[str]:
    """Where the guard's own code lies: shown in a box in which the guard itself runs."""
    package = Path(relax_rt.__file__).parent
    linked = [str(path.resolve()) for path in package.iterdir() if path.is_symlink()]
    return [str(package), *linked]


def environment() -> dict[str, str]:
    """What code in a box sees of our environment: nothing."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {"PATH": layout.command_path(), "LANG": "C.UTF-8", **threads}


async def probe(command: Sequence[str] = ()) -> Mode:
    """How well boxes are closed here, by trying: bubblewrap, else namespaces that the guard makes, else limits alone.

    Args:
        command: what is to be run in them; empty: this interpreter.

    Raises:
        BoxFailed: the command can be run in none of them; `why` says for each what failed, `hint` what to do.
    """
    if command and shutil.which(command[0], path=layout.command_path()) is None:
        hint = "install it, or name it with its whole path in the option command"
        raise BoxFailed(f"running {command[0]} in a box", why=f"no such program in {layout.command_path()}", hint=hint)
    failed = []
    if lacking := await asyncio.to_thread(bubblewrap.why_not):
        failed.append(lacking)
    else:
        try:
            mode = Mode("namespaces", backend="bubblewrap")
            await _try(mode, command)
        except BoxFailed as error:
            failed.append(f"bubblewrap: {error.why}")
        else:
            return mode
    try:
        await _try(Mode("namespaces"), command)
    except BoxFailed as error:
        failed.append(error.why)
    else:
        return Mode("namespaces")
    why = "; ".join(failed)
    try:
        await _try(Mode("limits"), command)
    except BoxFailed as error:
        raise BoxFailed(error.what, why=f"{error.why} (no namespaces: {why})", hint=_advice(error.closed)) from error
    return Mode("limits", why)


_found: dict[tuple[str, ...], Mode] = {}


async def mode_here(command: Sequence[str] = ()) -> Mode:
    """What `probe` finds for a command, looked for once a process.

    Raises:
        BoxFailed: see `probe`.
    """
    key = tuple(command)
    if key not in _found:
        _found[key] = await probe(command)
    return _found[key]


async def closed_in(least: Level, command: Sequence[str] = ()) -> Mode:
    """Return how boxes isolate a command on this machine, if that is at least `least`.

    Raises:
        BoxFailed: it is less, or it cannot be run at all.
    """
    mode = await mode_here(command)
    if least == "namespaces" and mode.level != least:
        raise BoxFailed('a program in a box of level "namespaces"', why=str(mode), hint=advice())
    return mode


def advice(machine: Path = Path("/")) -> str:
    """What would permit namespaces on this machine, else how to do without.

    Args:
        machine: its root folder; for tests.
    """
    settings = {name: _setting(machine, name) for name in FORBIDDING}
    wanted = [f"sysctl -w {name}={value}" for name, value in FORBIDDING.items() if settings[name] in WRONG[name]]
    if settings["kernel.apparmor_restrict_unprivileged_userns"] == "1" and shutil.which(bubblewrap.PROGRAM) is None:
        wanted.insert(0, "install bubblewrap 0.8 or newer, which AppArmor lets make namespaces")
    ways = " or ".join(wanted) or (
        "permit namespaces of users, processes, mounts and networks (docker run --privileged, or a seccomp profile "
        "with unshare and mount)"
    )
    return f'{ways}; or say box = "limits" if you would run these programs yourself'


FORBIDDING = {
    "kernel.apparmor_restrict_unprivileged_userns": "0",
    "kernel.unprivileged_userns_clone": "1",
    "user.max_user_namespaces": "10000",
}
"""Settings of the kernel that forbid namespaces to ordinary users, and values that permit them."""
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


def _advice(closed: str) -> str:
    """What to do where a command cannot even be run with limits alone.

    Args:
        closed: as in `BoxFailed`.
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


async def _try(mode: Mode, command: Sequence[str]) -> None:
    """Run a command on an empty program; Python on one that prints a word.

    Raises:
        BoxFailed: it did not start, or Python did not print the word.
    """
    argv = list(command) or [sys.executable, "-I", "-S"]
    python = Path(argv[0]).name.startswith("python")
    ran = await Box(Limits(wall_s=PROBE_S), mode).run(
        [*argv, "program"], {"program": "print('here', end='')" if python else ""}
    )
    if python and (ran.stopped or ran.code != 0 or ran.stdout != b"here"):
        said = ran.stderr.decode(errors="replace").strip().splitlines()[-1:]
        what = f"{argv[0]} in a box of level {mode.level}"
        raise BoxFailed(what, why=ran.stopped or f"exit code {ran.code} {''.join(said)}")


async def _last_words(process: asyncio.subprocess.Process) -> str:
    """What a guard that does not report wrote on standard error: bubblewrap's refusal, or why it did not start."""
    assert process.stderr is not None
    try:
        async with asyncio.timeout(GRACE_S):
            said = await process.stderr.read(1 << 16)
    except TimeoutError:
        return ""
    return "".join(said.decode(errors="replace").strip().splitlines()[-1:])[:500]


def orphaned_folders() -> list[str]:
    """Folders of boxes on this machine (those with limits only); for tests."""
    return [str(path) for path in Path(PREFIX).parent.glob(Path(PREFIX).name + "*") if os.access(path, os.F_OK)]
