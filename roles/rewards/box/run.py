"""Boxes for those who want something run: how they are started, what they may take, and what comes of it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

import relax_rt
from relax_rt.transport.errors import RelaxError

Level = Literal["namespaces", "limits"]
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
    """How well a box is closed on this machine, and why not better."""

    level: Level
    why: str = ""

    def __str__(self) -> str:
        if self.level == "namespaces":
            return (
                "programs are closed in: time, memory, disk, processes and output are limited; processes, files, users "
                "and a network without any connection are their own"
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
    """The box itself could not be made, or was lost: nothing is known of the code."""


def guard_argv() -> list[str]:
    """A guard's command line: this interpreter with nothing but the standard library and this package."""
    root = str(Path(relax_rt.__file__).parent.parent)
    code = f"import sys; sys.path.insert(0, {root!r}); from relax_rt.roles.rewards.box.guard import main; main()"
    return [sys.executable, "-I", "-S", "-c", code]


def kept_paths() -> list[str]:
    """What this interpreter needs of the file system."""
    paths = {sys.prefix, sys.base_prefix, sys.exec_prefix, str(Path(sys.executable).resolve().parent.parent)}
    return sorted(str(path) for path in paths)


@contextlib.asynccontextmanager
async def guard(
    order: Mapping[str, Any], *, fds: Sequence[int] = (), env: Mapping[str, str] | None = None, talk: bool = False
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A guard with its order. However the block is left, it is gone afterwards, and all that it guarded.

    Args:
        talk: let it write to our standard error.
    """
    process = await asyncio.create_subprocess_exec(
        *guard_argv(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if talk else subprocess.DEVNULL,
        pass_fds=fds,
        env=None if env is None else dict(env),
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
        order = {
            "kind": "code",
            "level": self.mode.level,
            "argv": list(argv),
            "files": dict(files or {}),
            "stdin": stdin,
            "env": environment(),
            "keep": kept_paths(),
            "prefix": PREFIX,
            "limits": {**msgspec.to_builtins(limits), "total_mib": limits.memory_mib},
        }
        async with guard(order) as process:
            try:
                async with asyncio.timeout(limits.wall_s + GRACE_S):
                    said = await read_report(process)
            except TimeoutError:
                raise BoxFailed("running code in a box", why="its guard did not answer") from None
        if "ended" not in said:
            raise BoxFailed("running code in a box", why=str(said.get("refused") or "its guard was killed"))
        why = ENDED.get(said["ended"], "").format(**msgspec.to_builtins(limits))
        stdout, stderr = (base64.b64decode(said[name]) for name in ("stdout", "stderr"))
        return Ran(why, None if why else said["code"], stdout, stderr, float(said["seconds"]))


def environment() -> dict[str, str]:
    """What code in a box sees of our environment: nothing."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {"PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", **threads}


async def probe() -> Mode:
    """How well boxes are closed here, by trying.

    Raises:
        BoxFailed: nothing can be run in any way.
    """
    try:
        await _try("namespaces")
    except BoxFailed as error:
        await _try("limits")
        return Mode("limits", error.why)
    return Mode("namespaces")


_found: list[Mode] = []
OPT_IN = (
    "permit namespaces of users, processes, mounts and networks (docker run --privileged, or a seccomp profile with "
    'unshare and mount); or say box = "limits" if you would run these programs yourself'
)


async def mode_here() -> Mode:
    """What `probe` finds, looked for once a process.

    Raises:
        BoxFailed: see `probe`.
    """
    if not _found:
        _found.append(await probe())
    return _found[0]


async def closed_in(least: Level) -> Mode:
    """How well boxes are closed here, where that is no less than asked for.

    Raises:
        BoxFailed: it is less, or nothing can be run at all.
    """
    mode = await mode_here()
    if least == "namespaces" and mode.level != least:
        raise BoxFailed('a program in a box of level "namespaces"', why=str(mode), hint=OPT_IN)
    return mode


async def _try(level: Level) -> None:
    limits = Limits(wall_s=PROBE_S)
    ran = await Box(limits, Mode(level)).run([sys.executable, "-I", "-S", "-c", "print('here', end='')"])
    if ran.stopped or ran.code != 0 or ran.stdout != b"here":
        said = ran.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise BoxFailed(f"a box of level {level}", why=ran.stopped or f"exit code {ran.code} {''.join(said)}")


def orphaned_folders() -> list[str]:
    """Folders of boxes on this machine (those with limits only); for tests."""
    return [str(path) for path in Path(PREFIX).parent.glob(Path(PREFIX).name + "*") if os.access(path, os.F_OK)]
