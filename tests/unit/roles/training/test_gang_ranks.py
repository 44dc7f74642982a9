"""What a rank of a gang does around its orders, without other ranks."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("torch")

from relax_rt.config.problems import BadInput
from relax_rt.roles.base.sample import bare_meta
from relax_rt.roles.training.backend import gang
from relax_rt.roles.training.backend.gang import Follower, Leader


def test_an_episode_with_branches_is_refused_before_any_rank_is_ordered_to_compute_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[str] = []
    done: list[str] = []

    def give(order: Any, _: Any) -> None:
        given.append(order.name)

    monkeypatch.setattr(gang, "send_command", give)
    monkeypatch.setattr(gang, "encode_samples", list)
    monkeypatch.setattr(Leader, "_accumulate", lambda *_: done.append("gradients"))
    monkeypatch.setattr(Leader, "_log_probabilities", lambda *_: done.append("log-probabilities") or [])
    objective = SimpleNamespace(state=dict, count=lambda _: 1.0)
    whole = SimpleNamespace(meta=bare_meta(0, 0), loss_mask=np.ones(4, np.uint8))
    meta = msgspec.structs.replace(bare_meta(0, 1), branches=[(0, 2), (2, 4)])
    episode = SimpleNamespace(meta=meta, loss_mask=np.ones(4, np.uint8))

    def leader(takes_branches: bool) -> Any:
        ranks = SimpleNamespace(control=None)
        backend: Any = SimpleNamespace(ranks=ranks, objective=objective, takes_branches=takes_branches)
        return Leader(backend)

    for call in ("accumulate", "log_probabilities"):
        with pytest.raises(BadInput, match=r"an episode of 2 branches.*roles.trainer.backend = \"torch\""):
            getattr(leader(False), call)([whole, episode])
    assert not given and not done
    leader(False).accumulate([whole])
    leader(True).accumulate([whole, episode])
    leader(True).log_probabilities([episode])
    assert given == ["accumulate", "accumulate", "log_probabilities"]
    assert done == ["gradients", "gradients", "log-probabilities"]


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
    assert waits.wait(120) and thread.is_alive()
    follower._copied.set()
    thread.join(120)
    assert not thread.is_alive() and said == ["this rank's copy of its weights for a publication", ""]
