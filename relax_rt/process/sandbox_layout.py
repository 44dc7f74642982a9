"""File system of a sandbox: system folders and what the program's interpreter needs, read-only.

Used by both ways of making a sandbox's root (`sandbox_setup.own_root` and `sandbox.bubblewrap_argv`). Standard library
only: the guard imports it.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
ETC = ("ld.so.cache", "passwd", "group", "localtime", "alternatives")
DEVICES = ("null", "zero", "full", "random", "urandom")
LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}
HOME = "/tmp"
WRITABLE = (HOME, "/dev/shm")
"""File systems of the sandbox's own, in memory."""
INODES = 4096
"""Maximum number of files in each of them."""
MAX_LINKS = 40


class ExposedPaths(NamedTuple):
    """Paths that a program needs in addition to the system folders; JSON turns them into plain lists.

    Attributes:
        folders: folders and files that are bound read-only to the same place.
        links: symbolic links and their targets, recreated in the sandbox; files next to them stay hidden.
    """

    folders: list[str]
    links: list[tuple[str, str]]


def command_path() -> str:
    """PATH of programs in a sandbox."""
    return f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"


def shown(programs: Iterable[str]) -> ExposedPaths:
    """What these executables need, and this interpreter, which the guard runs with.

    The python of a virtual environment is a symbolic link to the base interpreter, often through further links: the
    sandbox needs each of them.
    """
    folders = {sys.prefix, sys.base_prefix, sys.exec_prefix, sysconfig.get_path("stdlib")}
    links: dict[str, str] = {}
    hops = [step for program in (sys.executable, *programs) for step in chain(program)]
    # Folders on the way may be links as well, and be below one that is shown.
    for hop in dict.fromkeys(path for step in hops for path in (step, _in_real_folder(step))):
        prefix = Path(hop).parent.parent
        if (prefix / "pyvenv.cfg").exists() or (not os.path.islink(hop) and _own_prefix(hop)):  # noqa: PTH114
            folders.add(str(prefix))
        elif os.path.islink(hop):  # noqa: PTH114
            links[hop] = os.readlink(hop)  # noqa: PTH115
        elif os.path.exists(hop):  # noqa: PTH110
            folders.add(hop)
    kept = sorted(path for path in folders if path != "/" and not _below(path, SYSTEM))
    outer = [path for path in kept if not _below(path, [one for one in kept if one != path])]
    return ExposedPaths(outer, sorted(one for one in links.items() if not _below(one[0], (*SYSTEM, *outer))))


def chain(program: str) -> list[str]:
    """An executable as it is called, and what each symbolic link on the way to the file points to."""
    found = shutil.which(program, path=command_path())
    hops: list[str] = []
    path = os.path.abspath(found or program)  # noqa: PTH100 - links are not to be resolved
    while path not in hops and len(hops) < MAX_LINKS:
        hops.append(path)
        if os.path.islink(path):  # noqa: PTH114
            path = os.path.normpath(Path(_in_real_folder(path)).parent / os.readlink(path))  # noqa: PTH115
    return hops


def _in_real_folder(path: str) -> str:
    """A path with the links among its folders resolved, and the last part as it is."""
    return str(Path(path).parent.resolve() / Path(path).name)


def _own_prefix(program: str) -> bool:
    """Whether `<prefix>/bin/<program>` is alone in its prefix, as a separately installed interpreter: the prefix may be
    shown whole. A home, or a prefix that all programs of a user share, may not."""
    folder, prefix = Path(program).parent, Path(program).parent.parent
    homes = {Path(os.path.expanduser("~")), Path("/root"), *Path("/home").glob("*")}  # noqa: PTH111 - never raises
    shared = {Path("/"), Path("/tmp"), Path("/opt"), Path("/home"), *homes, *(home / ".local" for home in homes)}
    return folder.name == "bin" and prefix not in shared


def _below(path: str, folders: Iterable[str]) -> bool:
    return any(path == one or path.startswith(one.rstrip("/") + "/") for one in folders)


def is_late(path: str) -> bool:
    """Whether a path lies in a writable file system of the sandbox, and so is bound after that is mounted."""
    return _below(path, WRITABLE)


def needed(argv: Sequence[str]) -> list[str]:
    """Paths that a program's user must be able to open, for `first_closed`."""
    if shutil.which(argv[0], path=command_path()) is None:
        return []
    hops = chain(argv[0])
    return [hops[0], sysconfig.get_path("stdlib")] if sys.executable in hops else hops[:1]


def first_closed(paths: Iterable[str], links: int = 0) -> str:
    """The first folder or file on these paths that this process may not enter or read; empty if there is none."""
    for path in paths:
        for part in (*reversed(Path(path).parents), Path(path)):
            try:
                mode = part.lstat().st_mode
                target = part.readlink() if stat.S_ISLNK(mode) else None
            except OSError:
                break  # missing: the start of the program reports it
            if target is not None:
                further = os.path.normpath(part.parent / target)
                if links < MAX_LINKS and (closed := first_closed([further], links + 1)):
                    return closed
                continue
            wanted = os.R_OK | os.X_OK if str(part) == path and stat.S_ISDIR(mode) else os.X_OK
            if not os.access(part, wanted):
                return str(part)
    return ""
