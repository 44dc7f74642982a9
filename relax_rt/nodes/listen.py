"""Where the head listens for nodes, as it is written in the config and on the command line."""

from __future__ import annotations

from relax_rt.transport.address import parse_address
from relax_rt.transport.errors import Refused


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
