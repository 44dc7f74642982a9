"""How the ranks of a group find each other, before a library is asked to connect them. Takes torch's store alone.

Whoever does not come is noticed here, where a wait can be given up at once; libraries wait in native code.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from typing import Any

import torch.distributed

from relax_rt.transport.weights.collective.communicator import DuplicateDevice, PeerLost, Rendezvous

LOOK_EVERY_S = 0.02

dist: Any = torch.distributed
"""Its stubs do not export what has been there since long before them."""


def open_store(rendezvous: Rendezvous, timeout_s: float) -> Any:
    """The keys of this generation."""
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
    """Wait until every rank is at the door; what is left of the time in seconds.

    Raises:
        PeerLost: somebody has not come in time, or `aborted` says so.
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
        time.sleep(LOOK_EVERY_S)
    if device and not shared_devices:
        for other in range(rank):
            if store.get(f"here/{other}").decode() == device:
                raise DuplicateDevice(f"rank {rank} on device {device}", why=f"rank {other} works on it as well")
    return max(deadline - time.monotonic(), 0.1)


def first_line(error: BaseException) -> str:
    """What a library says, without its stack."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
