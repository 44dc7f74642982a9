"""Two hosts made of network namespaces, for tests that need a cable to pull."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools" / "bench"))
from two_nodes import Nodes, NotPermitted, alone, cut, mend, two_nodes

__all__ = ["Nodes", "NotPermitted", "alone", "cut", "mend", "nodes", "two_nodes"]


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    """Two namespaces with a cable between them, gone after the test; skips where they cannot be made."""
    with contextlib.ExitStack() as stack:
        try:
            pair = stack.enter_context(two_nodes())
        except NotPermitted as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield pair
    assert not Path("/run/netns", pair.first[-1]).exists()
