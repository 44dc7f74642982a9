"""Where the head listens for nodes: as it is written in the config and on the command line, and whether it can be."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from relax_rt.config.problems import KeyPath, Problem
from relax_rt.config.schema import RunConfig
from relax_rt.transport.rpc.address import parse_address
from relax_rt.transport.rpc.errors import Refused, RelaxError

KEY: KeyPath = ("supervision", "nodes", "listen")
LOCK = "lock"
"""In the run directory, locked as long as its run lives."""


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


def check_door(config: RunConfig) -> list[Problem]:
    """What keeps the head from listening on this machine: it is tried, unless the run that may listen there lives."""
    listen = config.supervision.nodes.listen
    if not listen:
        return []
    try:
        address = parse_address(check_listen(listen))
    except RelaxError as error:
        return [Problem(KEY, error.what + (f": {error.why}" if error.why else ""), error.hint)]
    if _lives(Path(config.run.dir)):
        return []
    try:
        # Numeric or a name, of either family; the door itself takes the first as well.
        family, kind, _, _, place = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as door:
            door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            door.bind(place)
            door.listen()
    except OSError as error:
        hint = "use HOST:PORT with an address of this machine and a free port (0: any)"
        return [Problem(KEY, f"nothing can listen on {listen}: {error.strerror or error}", hint)]
    return []


def _lives(run_dir: Path) -> bool:
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
