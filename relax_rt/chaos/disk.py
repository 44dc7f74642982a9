"""A full file system, by a file without a name: it is gone with the descriptor, also when this process is killed."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import BinaryIO

from relax_rt.transport.rpc.errors import Refused

MIB = 1 << 20
RESERVE_BYTES = 1 * MIB
MOST_BYTES = 4096 * MIB
STEP_BYTES = 64 * MIB


class Filling:
    """Holds the file system of a folder full, down to a small reserve, until it is closed.

    Raises:
        Refused: more than `most_bytes` would be needed: others live on that file system too.
        OSError: no file can be made there.
    """

    def __init__(self, folder: Path, *, most_bytes: int = MOST_BYTES, reserve_bytes: int = RESERVE_BYTES) -> None:
        free = shutil.disk_usage(folder).free
        if free - reserve_bytes > most_bytes:
            raise Refused(
                f"filling the file system of {folder}",
                why=f"{free // MIB} MiB are free, and at most {most_bytes // MIB} MiB are taken",
                hint="put the run directory on a small file system of its own",
            )
        self.nbytes = 0
        # Without a name from the start: nothing has to remember to remove it.
        self._file: BinaryIO = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 held open: it is the fault
        try:
            self._fill(folder, reserve_bytes)
        except BaseException:
            self._file.close()
            raise

    def _fill(self, folder: Path, reserve_bytes: int) -> None:
        step = STEP_BYTES
        while step >= 4096:
            room = shutil.disk_usage(folder).free - reserve_bytes
            if room < 4096:
                return
            step = min(step, room)
            try:
                os.posix_fallocate(self._file.fileno(), self.nbytes, step)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
                step //= 2
                continue
            self.nbytes += step

    def close(self) -> None:
        """Give the space back."""
        self._file.close()
