"""Real processes: the toys of the supervision tests are importable."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "supervision_toys"))
