"""``python guard.py``: continues stopped process groups when the process that stopped them has ended, in any way.

Reads lines ``+PGID`` and ``-PGID``; at the end of its input every group that is still listed is continued. Standard
library only, and started by path, so that it starts at once and does not depend on the runtime.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Track stopped groups until the input ends, then continue them."""
    os.setsid()
    stopped: set[int] = set()
    for text in sys.stdin:
        word = text.strip()
        (stopped.add if word.startswith("+") else stopped.discard)(int(word[1:]))
    for group in stopped:
        try:
            os.killpg(group, signal.SIGCONT)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    main()
