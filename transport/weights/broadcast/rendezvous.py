"""How the ranks of a group find each other before a library is asked to connect them, through torch's TCPStore.

A rank that does not come is noticed here, where the wait can be ended at once; libraries wait in native code.
"""

from __future__ import annotations

import datetime
import socket
import time
from collections.abc import Callable
from typing import Any

import torch.distributed

from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.weights.broadcast.communicator import DuplicateDevice, PeerLost
from relax_rt.transport.weights.broadcast.messages import Rendezvous

POLL_EVERY_S = 0.02

dist: Any = torch.distributed
"""Typed as Any because its stubs do not export ProcessGroupGloo and the stores."""


def open_store(rendezvous: Rendezvous, timeout_s: float) -> Any:
    """Connect to the store and open the keys of this generation."""
    timeout = datetime.timedelta(seconds=timeout_s)
    store = dist.TCPStore(rendezvous.host, rendezvous.port, None, False, timeout)
    return dist.PrefixStore(rendezvous.prefix, store)


def meet(
    store: Any,
    rank: int,
    world: int,
    timeout_s: float,
    aborted: Callable[[], bool],
    device: str = "",
    *,
    shared_devices: bool = False,
) -> float:
    """Wait until every rank has registered; return the seconds left.

    Raises:
        PeerLost: a rank has not come in time, or `aborted` returns True.
        DuplicateDevice: an earlier rank works on this rank's device.
    """
    deadline = time.monotonic() + timeout_s
    store.set(f"here/{rank}", device)
    missing = [f"here/{other}" for other in range(world) if other != rank]
    while missing := [key for key in missing if not store.check([key])]:
        if aborted():
            raise PeerLost(f"rank {rank} of {world} meets the others", why="aborted")
        if time.monotonic() >= deadline:
            ranks = ", ".join(key.removeprefix("here/") for key in missing)
            raise PeerLost(f"rank {rank} of {world} meets the others", why=f"not there: rank {ranks}")
        time.sleep(POLL_EVERY_S)
    if device and not shared_devices:
        for other in range(rank):
            if store.get(f"here/{other}").decode() == device:
                raise DuplicateDevice(f"rank {rank} on device {device}", why=f"rank {other} works on it as well")
    return max(deadline - time.monotonic(), 0.1)


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error, without its stack."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def serve_store(address: str) -> Any:
    """Serve the store in which ranks find each other, in this process: it outlives every rank.

    torch would listen on every address of this host, without authentication, so it gets a socket that is bound to one.

    Raises:
        Refused: the address is none of this host's.
    """
    try:
        family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((address, 0), family=family)
    except OSError as error:
        what, hint = f"a store for ranks at {address}", "give an address of this host that all ranks reach"
        raise Refused(what, why=str(error), hint=hint) from None
    port = listening.getsockname()[1]
    return dist.TCPStore(address, port, None, True, wait_for_workers=False, master_listen_fd=listening.detach())
