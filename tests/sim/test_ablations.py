"""Each safeguard of the data plane is switched off alone, and the checker must find what it guards against.

The safeguards are taken out by patching the real parts for the length of a test: there is no switch in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
from sim_broker import SimBroker
from sim_checker import DOUBLED, FENCED, FOREIGN, LOST, STALE, STANDSTILL, TWICE
from sim_world import World, streaming, training

from relax_rt.transport.base.versions import VersionTree
from relax_rt.transport.memory.block_table import BlockTable
from relax_rt.transport.queue.ledger import admission
from relax_rt.transport.queue.ledger.core import Core
from relax_rt.transport.queue.ledger.machine import Ledger
from relax_rt.transport.queue.ledger.state import Callers, SampleGroup

SEEDS = range(16)
"""Of every test here: the runs without findings, and the most that an ablation may take to be found."""


def append_later(broker: SimBroker, n: int, payload: bytes, notices: list[Any]) -> None:
    """The answer goes out first, and what is journaled comes after it, if the broker is still there."""
    life = broker.life
    keep = SimBroker.__dict__["append"]

    def late() -> None:
        if broker.ledger is not None and broker.life == life:
            keep(broker, n, payload, notices)

    broker.kernel.after(0.2, late)


def forget_marks(core: Core, group: SampleGroup) -> None:
    """Whoever gets a group next does not get what was sampled of it before."""
    for sample in group.samples:
        core.drop_partial(sample)


ABLATIONS: dict[str, tuple[Callable[[int], World], list[Any], set[str]]] = {
    "epoch check": (training, [patch.object(Callers, "check", lambda *_: None)], {FENCED}),
    "dedupe": (streaming, [patch.object(Callers, "reply", lambda *_: None)], {DOUBLED}),
    "lease expiry": (streaming, [patch.object(Ledger, "due", lambda *_: None)], {STANDSTILL}),
    "staleness check": (training, [patch.object(Core, "staleness", lambda *_: 0)], {STALE}),
    "lineage": (training, [patch.object(VersionTree, "distance", lambda _, a, b: abs(a - b))], {STALE}),
    "journal before the acknowledgement": (streaming, [patch.object(SimBroker, "append", append_later)], {LOST, TWICE}),
    "marks of earlier tickets": (training, [patch.object(admission, "count_reissue", forget_marks)], {LOST}),
    "memory pins": (training, [patch.object(BlockTable, "extents_of", lambda *_: [])], {FOREIGN}),
}


@contextmanager
def without(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        for one in ABLATIONS[name][1]:
            stack.enter_context(one)
        yield


@pytest.mark.parametrize("name", ABLATIONS)
def test_missing_safeguard_is_detected(name: str) -> None:
    make, _, right = ABLATIONS[name]
    seen: set[str] = set()
    for seed in SEEDS:
        with without(name):
            seen |= make(seed).checker.kinds()
        if seen & right:
            return
    raise AssertionError(f"{len(SEEDS)} runs without the {name}, and the checker found {sorted(seen)} only")


def test_no_finding_once_all_safeguards_are_restored() -> None:
    """Over the same seeds; that a patch stayed behind would show here."""
    for seed in SEEDS:
        assert training(seed).checker.findings == [] == streaming(seed).checker.findings
