"""Namespaces, root, rights and limits of a sandbox, set up before its program starts.

Standard library only: the guard imports it and must start fast.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from relax_rt.process import procfs, sandbox_layout
from relax_rt.process.sandbox_layout import HOME

NOBODY = 65534
OLD = "/old"
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x0002_0000, 0x0400_0000, 0x0800_0000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x1000_0000, 0x2000_0000, 0x4000_0000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE, MS_SLAVE = 2, 4, 4096, 16384, 1 << 18, 1 << 19
MNT_DETACH = 2
PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 4, 24, 38
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 1, 2
MOUNT_SETATTR = 442
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
CAPABILITY_VERSION = 0x2008_0522
CAPABILITIES = 64
"""More than there are: those that do not exist are refused, and that is the end of them."""


def enter_namespaces(kind: str) -> None:
    """Give the children of this process namespaces of their own: of processes, and for untrusted code of everything.

    An ordinary user gets a user namespace first, in which that is allowed.
    """
    flags = CLONE_NEWPID | CLONE_NEWNS
    if kind == "code":
        flags |= CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        unshare(flags)
        return
    unshare(flags | CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def mount_own_proc() -> None:
    """Show this namespace's processes in /proc, and no others."""
    mount("none", "/", None, MS_REC | MS_SLAVE)
    mount_proc()


def mount_proc() -> None:
    """Mount /proc of this process's namespace."""
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV)


def own_root(shown: sandbox_layout.ExposedPaths, disk_mib: int) -> None:
    """Create a root of system folders and those that the program needs, read-only, with a small writable /tmp."""
    os.umask(0o022)
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", HOME, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=1m")
    Path(HOME + OLD).mkdir()
    pivot_root(HOME, HOME + OLD)
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
    make_read_only("/")
    # While the old one is there to be seen: an unprivileged proc is only granted beside it.
    mount_proc()
    for path in sandbox_layout.WRITABLE:
        size = f"size={disk_mib}m,nr_inodes={sandbox_layout.INODES}"
        mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV, f"mode=1777,{size}")
    for path in late:
        _show(path)
        if Path(path).exists():
            make_read_only(path)
    _link(one for one in shown.links if sandbox_layout.is_late(one[0]))
    detach(OLD)


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
    mount(str(source), path, None, MS_BIND | MS_REC)


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
            for number in range(CAPABILITIES):
                try:
                    procfs.prctl(PR_CAPBSET_DROP, number)
                except OSError:
                    break
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        if alone:
            try:
                unshare(CLONE_NEWUSER)
            except OSError:
                pass  # the guard counts processes as well
            else:
                forbid_user_namespaces()
    procfs.prctl(PR_SET_NO_NEW_PRIVS, 1)
    drop_capabilities()


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
        # The program gets SIGXCPU at the first limit, and SIGKILL a second later.
        above = value + 1 if what == resource.RLIMIT_CPU and hard in (resource.RLIM_INFINITY,) else value
        resource.setrlimit(what, (value, above))


def _times(value: int | None, unit: int) -> int | None:
    return None if value is None else value * unit


# System calls. Each raises OSError with the call's name in its text.

_libc = ctypes.CDLL(None, use_errno=True)


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """unshare(2)."""
    _check(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """mount(2)."""
    kind_ = None if kind is None else kind.encode()
    result = _libc.mount(source.encode(), target.encode(), kind_, ctypes.c_ulong(flags), data.encode() or None)
    _check(result, f"mount {target}")


def detach(target: str) -> None:
    """Take a mount and all below it away."""
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    """Make a mount the root; the old root is at `old` then."""
    number = PIVOT_ROOT.get(platform.machine())
    if number is None:
        raise OSError(f"pivot_root: not known on {platform.machine()}")
    _check(_libc.syscall(number, new.encode(), old.encode()), "pivot_root")


def make_read_only(path: str) -> None:
    """The mount at a path and all below it: read-only, and set-uid bits without effect."""
    wanted = _MountAttr(attr_set=MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID)
    size = ctypes.c_size_t(ctypes.sizeof(wanted))
    _check(
        _libc.syscall(MOUNT_SETATTR, AT_FDCWD, path.encode(), AT_RECURSIVE, ctypes.byref(wanted), size), "mount_setattr"
    )


def drop_capabilities() -> None:
    """Drop all capabilities, also those that programs run later could gain."""
    for number in range(CAPABILITIES):
        try:
            procfs.prctl(PR_CAPBSET_DROP, number)
        except OSError:
            break
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    _check(_libc.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())), "capset")
