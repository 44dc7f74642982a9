"""Checks of the runtime's own tables across keys: settings that cannot work are refused before anything starts."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
from pathlib import Path

from relax_rt.config.problems import KeyPath, Problem
from relax_rt.config.schema import RestartTable, RoleSettings, RunConfig
from relax_rt.transport.rpc.address import parse_address
from relax_rt.transport.rpc.errors import Refused, RelaxError

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
RESERVED_ENV = "RELAX_"
"""Prefix of the variables by which the agent speaks to a role's process."""
LISTEN: KeyPath = ("supervision", "nodes", "listen")
LOCK = "lock"
"""In the run directory, locked as long as its run lives."""


def check_runtime(config: RunConfig, *, here: bool = True) -> list[Problem]:
    """Everything that is wrong with the runtime's tables and the settings that all roles share.

    Args:
        here: the run is to be started on this machine, so that folders and interpreters must be there.
    """
    problems = [*_check_restart(config.supervision.restart), *_check_queue(config)]
    problems += [*_check_run_dir(config), *_check_listener(config)] if here else []
    for kind, settings in config.roles.items():
        problems += _check_role(kind, settings, here=here)
    return problems


def longest_backoff_s(table: RestartTable) -> float:
    """Upper limit of all waits together until the restarts of a window are used up."""
    return sum(min(table.backoff_first_s * 2.0**n, table.backoff_max_s) for n in range(table.max_restarts))


def _check_restart(table: RestartTable) -> list[Problem]:
    path = ("supervision", "restart")
    if table.backoff_first_s > table.backoff_max_s:
        message = f"backoff_first_s = {table.backoff_first_s:g} is above backoff_max_s = {table.backoff_max_s:g}"
        return [Problem((*path, "backoff_first_s"), message, "the first wait is the shortest one")]
    waits_s = longest_backoff_s(table)
    if waits_s >= table.period_s:
        message = (
            f"a limit of {table.max_restarts} restarts in {table.period_s:g} s can never fire: "
            f"the waits before them alone may take {waits_s:g} s"
        )
        return [Problem((*path, "max_restarts"), message, "raise period_s, or lower max_restarts or backoff_max_s")]
    # Before a role is restarted as a whole, one of its slots has used up its own restarts; and once more at the end.
    waits_s = waits_s * (table.role_restarts + 1) + table.backoff_max_s * table.role_restarts
    if table.role_restarts and waits_s >= table.role_period_s:
        message = (
            f"a limit of {table.role_restarts} restarts of a role in {table.role_period_s:g} s can never fire: "
            f"the waits of its slots alone may take {waits_s:g} s"
        )
        return [Problem((*path, "role_restarts"), message, "raise role_period_s, or lower role_restarts")]
    return []


def _check_queue(config: RunConfig) -> list[Problem]:
    queue = config.queue
    if queue.slab_mib > queue.capacity_mib:
        message = f"a slab of {queue.slab_mib} MiB is larger than the queue's capacity of {queue.capacity_mib} MiB"
        return [Problem(("queue", "slab_mib"), message, "lower slab_mib or raise capacity_mib")]
    return []


def _check_run_dir(config: RunConfig) -> list[Problem]:
    path = Path(config.run.dir)
    found = next((p for p in (path, *path.parents) if p.exists()), Path("/"))
    if not found.is_dir():
        return [Problem(("run", "dir"), f"{found} is a file, not a folder")]
    if not os.access(found, os.W_OK):
        return [Problem(("run", "dir"), f"no permission to write in {found}")]
    return []


def _check_role(kind: str, settings: RoleSettings, *, here: bool = True) -> list[Problem]:
    problems = []
    path = ("roles", kind)
    if kind in ("registry", "queue") and settings.count != 1:
        problems.append(Problem((*path, "count"), f"a run has exactly one {kind}"))
    if settings.min_ready is not None and settings.min_ready > settings.count:
        message = f"min_ready = {settings.min_ready} of {settings.count} slots can never be ready"
        problems.append(Problem((*path, "min_ready"), message, f"raise roles.{kind}.count, or lower min_ready"))
    if here and settings.python is not None and shutil.which(settings.python) is None:
        message = f"there is no executable {settings.python}"
        problems.append(Problem((*path, "python"), message, "give the path of a Python interpreter"))
    for name in settings.env:
        if not _ENV_NAME.fullmatch(name):
            problems.append(Problem((*path, "env", name), f"'{name}' is no name of an environment variable", at="key"))
        elif name.startswith(RESERVED_ENV):
            message = f"variables that begin with {RESERVED_ENV} belong to the runtime"
            problems.append(Problem((*path, "env", name), message, at="key"))
    return problems


def check_listen(listen: str) -> str:
    """HOST:PORT as an address.

    Raises:
        AddressError: it is none.
        Refused: it is every address of this machine: roles tell others where they listen, so it must be one of them.
    """
    address = parse_address(listen if "://" in listen else f"tcp://{listen}")
    if address.scheme != "tcp":
        raise Refused(f"listening on {listen}", why="other nodes come by tcp", hint="use HOST:PORT")
    if address.host in ("*", "0.0.0.0", "::"):
        why = "roles tell other nodes where they listen, so it must be one address that these reach"
        raise Refused(f"listening on {listen}", why=why, hint="use the address of the network between the nodes")
    return str(address)


def _check_listener(config: RunConfig) -> list[Problem]:
    """What keeps the head from listening on this machine: it is tried, unless the run that may listen there lives."""
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
