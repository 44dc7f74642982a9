"""``python -m supervision_up roles.toml [role …]``: what `relax-rt up` does, with these system roles or none."""

from __future__ import annotations

import sys
from pathlib import Path

from relax_rt.cluster.launch import up
from relax_rt.transport.rpc.errors import RelaxError

if __name__ == "__main__":
    try:
        sys.exit(up(Path(sys.argv[1]), system=sys.argv[2:]))
    except RelaxError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)
