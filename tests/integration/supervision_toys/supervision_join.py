"""``python -m supervision_join HOST:PORT KEY NAME WAIT_S [RUN_DIR]``: what `relax-rt up --join` does."""

from __future__ import annotations

import sys
from pathlib import Path

from relax_rt.cluster.join import join, join_request
from relax_rt.transport.rpc.errors import RelaxError


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    head, key, name, wait_s, *rest = sys.argv[1:]
    try:
        run_dir = Path(rest[0]) if rest else None
        wish = join_request(head, key=Path(key), name=name, wait_s=float(wait_s), run_dir=run_dir)
        sys.exit(join(wish, say=say))
    except RelaxError as error:
        say(str(error))
        sys.exit(1)
