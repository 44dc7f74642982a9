"""The whole control plane under a virtual clock: a thousand runs with faults of all kinds, judged by what happened.

One seed makes one run, always the same. ``pytest tests/sim --sim-seed N`` (or RELAX_SIM_SEED=N) plays run N alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from plane_world import FAULT_KINDS, World

RUNS, CHUNK = 1000, 50


def judged(seeds: Iterable[int]) -> Counter[str]:
    """Play these runs; what happened in them."""
    happened: Counter[str] = Counter()
    for seed in seeds:
        world = World(seed).play()
        if world.checker.findings:
            found = "\n".join(f"  {kind}: {detail}" for kind, detail in world.checker.findings[:8])
            pytest.fail(f"{world.tell()}\nfound:\n{found}\nagain: pytest tests/sim --sim-seed {seed}", pytrace=False)
        happened += world.happened
        happened["effects"] += world.checker.effects
        happened["committed"] += len(world.checker.committed)
    return happened


@pytest.mark.parametrize("first", range(0, RUNS, CHUNK))
def test_a_run_reaches_its_target_whatever_befalls_it(first: int, sim_seed: int | None) -> None:
    if sim_seed is not None:
        if first:
            pytest.skip(f"run {sim_seed} alone is played")
        judged([sim_seed])
        return
    happened = judged(range(first, first + CHUNK))
    # That the runs were worth judging: things failed in them, came back, and work was done.
    assert happened["slot_exited"] > 8 * CHUNK and happened["slot_ready"] > 8 * CHUNK
    assert happened["effects"] > 150 * CHUNK and happened["committed"] > 4 * CHUNK
    missing = {kind for kind in FAULT_KINDS if not happened[kind]}
    assert not missing


def test_the_same_seed_gives_the_same_run() -> None:
    first, second, other = World(7).play(), World(7).play(), World(8).play()
    assert first.tell() == second.tell() != other.tell()
    assert first.broker.journal == second.broker.journal and first.kernel.now == second.kernel.now
