"""What a rank of a gang does around its orders, without other ranks."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from relax_rt.roles.trainers.gang import Follower


def test_a_rank_says_that_it_waits_for_its_copy_of_the_weights() -> None:
    said: list[str] = []
    waits = threading.Event()

    def waiting(what: str) -> None:
        said.append(what)
        waits.set()

    backend: Any = SimpleNamespace(ranks=SimpleNamespace(rank=1))
    follower = Follower(backend, waiting=waiting)
    follower._weights_may_change()
    assert not said, "nothing is being copied"
    follower._copied.clear()
    thread = threading.Thread(target=follower._weights_may_change, daemon=True)
    thread.start()
    assert waits.wait(10) and thread.is_alive()
    follower._copied.set()
    thread.join(10)
    assert not thread.is_alive() and said == ["this rank's copy of its weights for a publication", ""]
