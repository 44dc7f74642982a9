"""Checks of every run's config: each table's own (`Table.problems`), and those that look at this machine."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from relax_rt.config.problems import KeyPath, Problem
from relax_rt.config.schema import RoleSettings, RunConfig, Table
from relax_rt.transport.rpc.channel import parse_address
from relax_rt.transport.rpc.errors import Refused, RelaxError

LISTEN: KeyPath = ("supervision", "nodes", "listen")
LOCK = "lock"
"""In the run directory, locked as long as its run is live."""


def check_runtime(config: RunConfig, *, here: bool = True) -> list[Problem]:
    """Return what is wrong with each table by itself, and with the settings that all roles share.

    Args:
        here: the run is to be started on this machine, so that folders and interpreters must be there.
    """
    problems = [*_check_run_dir(config), *_check_listener(config)] if here else []
    for name, table in vars(config).items():
        if isinstance(table, Table):
            problems += table.problems((name,))
    for kind, settings in config.roles.items():
        problems += settings.problems(("roles", kind))
        problems += _check_role(kind, settings, here=here)
    return problems


def _check_run_dir(config: RunConfig) -> list[Problem]:
    path = Path(config.run.dir)
    found = next((p for p in (path, *path.parents) if p.exists()), Path("/"))
    if not found.is_dir():
        return [Problem(("run", "dir"), f"{found} is a file, not a folder")]
    if not os.access(found, os.W_OK):
        return [Problem(("run", "dir"), f"no permission to write in {found}")]
    return []


def _check_role(kind: str, settings: RoleSettings, *, here: bool) -> Iterator[Problem]:
    path = ("roles", kind)
    if kind in ("registry", "queue") and settings.count != 1:
        yield Problem((*path, "count"), f"a run has exactly one {kind}")
    if here and settings.python is not None and shutil.which(settings.python) is None:
        message = f"there is no executable {settings.python}"
        yield Problem((*path, "python"), message, "give the path of a Python interpreter")


def check_listen(listen: str) -> str:
    """Return HOST:PORT as an address.

    Raises:
        AddressError: it is none.
        Refused: it is a wildcard address: roles advertise their address to other nodes, so it must be a specific one.
    """
    address = parse_address(listen if "://" in listen else f"tcp://{listen}")
    if address.scheme != "tcp":
        raise Refused(f"listening on {listen}", why="other nodes come by tcp", hint="use HOST:PORT")
    if address.host in ("*", "0.0.0.0", "::"):
        why = "roles advertise their address to other nodes, so it must be one that these reach"
        raise Refused(f"listening on {listen}", why=why, hint="use the address of the network between the nodes")
    return str(address)


def _check_listener(config: RunConfig) -> list[Problem]:
    """Report why the head cannot listen on this machine; tried for real, unless a live run may listen there."""
    listen = config.supervision.nodes.listen
    if not listen:
        return []
    try:
        address = parse_address(check_listen(listen))
    except RelaxError as error:
        return [Problem(LISTEN, error.what + (f": {error.why}" if error.why else ""), error.hint)]
    if _is_running(Path(config.run.dir)):
        return []
    try:
        # Numeric or a name, of either family; the listener itself takes the first as well.
        family, kind, _, _, place = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
            listener.listen()
    except OSError as error:
        hint = "use HOST:PORT with an address of this machine and a free port (0: any)"
        return [Problem(LISTEN, f"nothing can listen on {listen}: {error.strerror or error}", hint)]
    return []


def _is_running(run_dir: Path) -> bool:
    try:
        fd = os.open(run_dir / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
