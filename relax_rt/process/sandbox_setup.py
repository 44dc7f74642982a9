"""Give up rights and set limits before a sandboxed program starts. Standard library only."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from relax_rt.process import sandbox_layout, syscalls
from relax_rt.process.sandbox_layout import HOME

NOBODY = 65534
OLD = "/old"


def enter_namespaces(kind: str) -> None:
    """Give the children of this process namespaces of their own: of processes, and for untrusted code of everything.

    An ordinary user gets a user namespace first, in which that is allowed.
    """
    flags = syscalls.CLONE_NEWPID | syscalls.CLONE_NEWNS
    if kind == "code":
        flags |= syscalls.CLONE_NEWNET | syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWUTS
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        syscalls.unshare(flags)
        return
    syscalls.unshare(flags | syscalls.CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def mount_own_proc() -> None:
    """Show this namespace's processes in /proc, and no others."""
    syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_SLAVE)
    mount_proc()


def mount_proc() -> None:
    """Mount /proc of this process's namespace."""
    syscalls.mount("proc", "/proc", "proc", syscalls.MS_NOSUID | syscalls.MS_NODEV)


def own_root(shown: sandbox_layout.ExposedPaths, disk_mib: int) -> None:
    """Create a root of system folders and those that the program needs, read-only, with a small writable /tmp."""
    os.umask(0o022)
    syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    syscalls.mount("tmpfs", HOME, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "mode=0755,size=1m")
    Path(HOME + OLD).mkdir()
    syscalls.pivot_root(HOME, HOME + OLD)
    os.chdir("/")
    for name in ("/proc", "/tmp", "/dev", "/dev/shm", "/etc"):
        Path(name).mkdir()
    late = [path for path in shown.folders if sandbox_layout.is_late(path)]
    for path in (*sandbox_layout.SYSTEM, *(one for one in shown.folders if one not in late)):
        _show(path)
    for path in (
        *(f"/etc/{name}" for name in sandbox_layout.ETC),
        *(f"/dev/{name}" for name in sandbox_layout.DEVICES),
    ):
        _show(path)
    for name, target in sandbox_layout.LINKS.items():
        Path("/dev", name).symlink_to(target)
    _link(one for one in shown.links if not sandbox_layout.is_late(one[0]))
    syscalls.make_read_only("/")
    # While the old one is there to be seen: an unprivileged proc is only granted beside it.
    mount_proc()
    for path in sandbox_layout.WRITABLE:
        size = f"size={disk_mib}m,nr_inodes={sandbox_layout.INODES}"
        syscalls.mount("tmpfs", path, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, f"mode=1777,{size}")
    for path in late:
        _show(path)
        if Path(path).exists():
            syscalls.make_read_only(path)
    _link(one for one in shown.links if sandbox_layout.is_late(one[0]))
    syscalls.detach(OLD)


def _show(path: str) -> None:
    """Bind a path of the old root to the same path of the new one."""
    source, target = Path(OLD + path), Path(path)
    if source.is_symlink() and path in sandbox_layout.SYSTEM:
        target.symlink_to(source.readlink())
        return
    if not source.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        target.mkdir(exist_ok=True)
    else:
        target.touch()
    syscalls.mount(str(source), path, None, syscalls.MS_BIND | syscalls.MS_REC)


def _link(links: Iterable[tuple[str, str]]) -> None:
    for path, target in links:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).symlink_to(target)


def forbid_user_namespaces() -> None:
    """Forbid further user namespaces, which would have capabilities and mounts of their own.

    Only ever called in a user namespace of our own: the setting is that of the whole namespace.
    """
    try:
        Path("/proc/sys/user/max_user_namespaces").write_text("0")
    except OSError:
        return  # without it memory is bounded less well, and nothing else


def drop_rights(as_nobody: bool, *, alone: bool) -> None:
    """Drop capabilities and set-uid programs; root becomes user nobody.

    Args:
        alone: in namespaces of its own; then the kernel counts processes for this sandbox alone.
    """
    if as_nobody:
        os.setgroups([])
        if alone:
            for number in range(syscalls.CAPABILITIES):
                try:
                    syscalls.prctl(syscalls.PR_CAPBSET_DROP, number)
                except OSError:
                    break
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        if alone:
            try:
                syscalls.unshare(syscalls.CLONE_NEWUSER)
            except OSError:
                pass  # the guard counts processes as well
            else:
                forbid_user_namespaces()
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    syscalls.drop_capabilities()


def set_rlimits(limits: Mapping[str, Any]) -> None:
    """Set resource limits by name, as in the guard's order; what is not there is not limited."""

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
