"""Who may write in a folder of weights: the newest incarnation that has, and no older one."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from relax_rt.transport.rpc.errors import StaleEpoch


def fence(folder: Path, epoch: int, what: str) -> None:
    """Note that incarnation `epoch` writes in the folder.

    Raises:
        StaleEpoch: a newer one does.
    """
    descriptor = os.open(folder / "epoch", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        newest = int(os.read(descriptor, 32) or b"0")
        if newest > epoch:
            raise StaleEpoch(f"{what} {folder}", why=f"epoch {newest} writes here, this is {epoch}")
        if newest < epoch:
            os.pwrite(descriptor, str(epoch).encode(), 0)
    finally:
        os.close(descriptor)
