"""A rank of a gang that tests drive: ``python far_end.py ADDRESS RANK WORLD FOLDER``.

It serves one call after the other; each names a function of `work` that every rank of the gang runs at the same time.
"""

from __future__ import annotations

import sys
import traceback
from multiprocessing.connection import Client
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import work


def main() -> None:
    address, rank, world, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    with Client(address, "AF_UNIX") as connection:
        connection.send(rank)
        here = work.Here(rank, world, folder)
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
