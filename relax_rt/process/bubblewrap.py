"""The command line of bubblewrap, for the same root as `sandbox_setup.own_root` makes.

bubblewrap makes namespaces where this process may not: installed with its AppArmor profile or set-uid. The guard runs
inside as process 1 and keeps the limits, so both kinds of sandbox are limited by the same code.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from relax_rt.process import sandbox_layout

PROGRAM = "bwrap"
WANTED = ("--disable-userns", "--size", "--as-pid-1")
"""bubblewrap has all of these from 0.8 on."""
HELP_S = 10.0


def why_not() -> str:
    """Why bubblewrap cannot be used here; empty if it is to be tried."""
    path = shutil.which(PROGRAM)
    if path is None:
        return "bubblewrap is not installed"
    try:
        done = subprocess.run([path, "--help"], capture_output=True, text=True, timeout=HELP_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path}: {error}"
    lacking = [option for option in WANTED if option not in done.stdout + done.stderr]
    return f"{path} is older than 0.8: it has no {lacking[0]}" if lacking else ""


def argv(shown: sandbox_layout.ExposedPaths, disk_mib: int, inside: Sequence[str]) -> list[str]:
    """The command line that runs `inside` as process 1 of a sandbox.

    Root gets no user namespace: the guard runs the program as user nobody and mounts /proc itself, because the /proc of
    bubblewrap has a read-only /proc/sys, where the guard forbids further user namespaces.
    """
    words = [PROGRAM, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    words += ["--die-with-parent", "--as-pid-1"]
    words += [word for path in ("/proc/_", "/etc/_", "/dev/shm") for word in _parents(path)]
    if os.geteuid() != 0:
        words += ["--unshare-user", "--disable-userns", "--proc", "/proc"]
    for path in (*sandbox_layout.SYSTEM, *(one for one in shown.folders if not sandbox_layout.is_late(one))):
        if path in sandbox_layout.SYSTEM and Path(path).is_symlink():
            words += ["--symlink", str(Path(path).readlink()), path]
        else:
            words += [*_parents(path), "--ro-bind-try", path, path]
    for name in sandbox_layout.ETC:
        words += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for name in sandbox_layout.DEVICES:
        words += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for name, target in sandbox_layout.LINKS.items():
        words += ["--symlink", target, f"/dev/{name}"]
    for path in sandbox_layout.WRITABLE:
        words += ["--perms", "1777", "--size", str(disk_mib << 20), "--tmpfs", path]
    for path in filter(sandbox_layout.is_late, shown.folders):
        words += [*_parents(path), "--ro-bind-try", path, path]
    for path, target in shown.links:
        words += [*_parents(path), "--symlink", target, path]
    return [*words, "--remount-ro", "/", "--chdir", "/", "--", *inside]


def _parents(path: str) -> list[str]:
    """Options that make the folders above a path; bubblewrap would close them to all but root."""
    above = [str(part) for part in reversed(Path(path).parents)][1:]
    return [word for part in above for word in ("--perms", "0755", "--dir", part)]
