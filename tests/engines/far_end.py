"""A rank of a gang that tests drive: ``python far_end.py ADDRESS RANK WORLD FOLDER WORK``.

It serves one call after the other; each names a function of the file WORK that every rank of the gang runs at the same
time.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from multiprocessing.connection import Client
from pathlib import Path


def main() -> None:
    address, rank, world, folder, file = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(sys.argv[5])
    sys.path.insert(0, str(file.parent))
    work = importlib.import_module(file.stem)
    with Client(address, "AF_UNIX") as connection:
        connection.send(rank)
        here = work.Here(rank, world, Path(folder))
        while True:
            try:
                name, options = connection.recv()
            except EOFError:
                return
            try:
                connection.send((True, getattr(work, name)(here, **options)))
            except Exception:  # noqa: BLE001 - told to the test, whatever it is
                connection.send((False, traceback.format_exc()))


if __name__ == "__main__":
    main()
