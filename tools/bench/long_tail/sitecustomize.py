"""For processes of tools/bench/partial_rollout.py: engines whose sequences have lengths drawn beforehand."""

import os

if os.environ.get("RELAX_LONG_TAIL"):
    from long_tail_engine import install

    install()
