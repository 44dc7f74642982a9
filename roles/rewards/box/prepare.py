"""What a process of a box gives up before its program begins. Standard library only."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from relax_rt.roles.rewards.box import kernel, layout
from relax_rt.roles.rewards.box.layout import HOME

NOBODY = 65534
OLD = "/old"


def enter_namespaces(kind: str) -> None:
    """A view of its own for all children of this process: of processes, and for code of everything else.

    An ordinary user gets a user namespace first, in which that is allowed.
    """
    flags = kernel.CLONE_NEWPID | kernel.CLONE_NEWNS
    if kind == "code":
        flags |= kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        kernel.unshare(flags)
        return
    kernel.unshare(flags | kernel.CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def own_processes() -> None:
    """Show this namespace's processes in /proc, and no others."""
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_SLAVE)
    mount_proc()


def mount_proc() -> None:
    """Mount /proc of this process's namespace."""
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV)


def own_root(shown: layout.Shown, disk_mib: int) -> None:
    """A root of system folders and those that a program needs, read-only, with a small /tmp and nothing else."""
    os.umask(0o022)
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", HOME, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=0755,size=1m")
    Path(HOME + OLD).mkdir()
    kernel.pivot_root(HOME, HOME + OLD)
    os.chdir("/")
    for name in ("/proc", "/tmp", "/dev", "/dev/shm", "/etc"):
        Path(name).mkdir()
    late = [path for path in shown.folders if layout.is_late(path)]
    for path in (*layout.SYSTEM, *(one for one in shown.folders if one not in late)):
        _show(path)
    for path in (*(f"/etc/{name}" for name in layout.ETC), *(f"/dev/{name}" for name in layout.DEVICES)):
        _show(path)
    for name, target in layout.LINKS.items():
        Path("/dev", name).symlink_to(target)
    _link(one for one in shown.links if not layout.is_late(one[0]))
    kernel.make_read_only("/")
    # While the old one is there to be seen: an unprivileged proc is only granted beside it.
    mount_proc()
    for path in layout.WRITABLE:
        size = f"size={disk_mib}m,nr_inodes={layout.INODES}"
        kernel.mount("tmpfs", path, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, f"mode=1777,{size}")
    for path in late:
        _show(path)
        if Path(path).exists():
            kernel.make_read_only(path)
    _link(one for one in shown.links if layout.is_late(one[0]))
    kernel.detach(OLD)


def _show(path: str) -> None:
    """Bind what lies at a path of the old root to the same place in the new one."""
    source, target = Path(OLD + path), Path(path)
    if source.is_symlink() and path in layout.SYSTEM:
        target.symlink_to(source.readlink())
        return
    if not source.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        target.mkdir(exist_ok=True)
    else:
        target.touch()
    kernel.mount(str(source), path, None, kernel.MS_BIND | kernel.MS_REC)


def _link(links: Iterable[tuple[str, str]]) -> None:
    for path, target in links:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).symlink_to(target)


def close_the_door() -> None:
    """No further user namespaces from here, which would have capabilities and mounts of their own. Only ever called in
    a user namespace that is ours: the number is of the whole namespace."""
    try:
        Path("/proc/sys/user/max_user_namespaces").write_text("0")
    except OSError:
        return  # without it memory is bounded less well, and nothing else


def step_down(as_nobody: bool, *, alone: bool) -> None:
    """Become somebody without rights: no capabilities, no set-uid programs, and for root another user.

    Args:
        alone: in namespaces of its own. Then processes can be counted for this box alone.
    """
    if as_nobody:
        os.setgroups([])
        if alone:
            for number in range(kernel.CAPABILITIES):
                try:
                    kernel.prctl(kernel.PR_CAPBSET_DROP, number)
                except OSError:
                    break
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        if alone:
            try:
                kernel.unshare(kernel.CLONE_NEWUSER)
            except OSError:
                pass  # the guard counts processes as well
            else:
                close_the_door()
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.drop_capabilities()


def limit(limits: Mapping[str, Any]) -> None:
    """Resource limits by name, as they stand in the order (see Limits of run.py). What is not there is not limited."""
    mib = 1 << 20
    wanted = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: limits.get("cpu_s"),
        resource.RLIMIT_AS: _times(limits.get("memory_mib"), mib),
        resource.RLIMIT_DATA: _times(limits.get("data_mib"), mib),
        resource.RLIMIT_FSIZE: _times(limits.get("disk_mib", limits.get("file_mib")), mib),
        resource.RLIMIT_NOFILE: limits.get("open_files"),
        resource.RLIMIT_NPROC: limits.get("nproc"),
        resource.RLIMIT_MEMLOCK: 0 if "disk_mib" in limits else None,
        resource.RLIMIT_MSGQUEUE: 0 if "disk_mib" in limits else None,
    }
    for what, value in wanted.items():
        if value is None:
            continue
        _, hard = resource.getrlimit(what)
        value = int(value) if hard == resource.RLIM_INFINITY else min(int(value), hard)
        # A second for the program to be told of the first limit.
        above = value + 1 if what == resource.RLIMIT_CPU and hard in (resource.RLIM_INFINITY,) else value
        resource.setrlimit(what, (value, above))


def _times(value: int | None, unit: int) -> int | None:
    return None if value is None else value * unit
