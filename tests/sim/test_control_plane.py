"""The whole control plane under a virtual clock: a thousand runs with faults of all kinds, judged by what happened.

One seed makes one run, always the same. ``pytest tests/sim --sim-seed N`` (or RELAX_SIM_SEED=N) plays run N alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec
import pytest
from plane_world import FAULT_KINDS, World
from sim_checker import STANDSTILL

from relax_rt.transport.base.versions import VersionTree

RUNS, CHUNK = 1000, 50


def judged(seeds: Iterable[int]) -> Counter[str]:
    """Play these runs; what happened in them."""
    happened: Counter[str] = Counter()
    for seed in seeds:
        world = World(seed).play()
        if world.checker.findings:
            found = "\n".join(f"  {kind}: {detail}" for kind, detail in world.checker.findings[:8])
            pytest.fail(
                f"{world.describe()}\nfound:\n{found}\nagain: pytest tests/sim --sim-seed {seed}", pytrace=False
            )
        happened += world.happened
        happened["effects"] += world.checker.effects
        happened["committed"] += len(world.checker.committed)
    return happened


@pytest.mark.parametrize("first", range(0, RUNS, CHUNK))
def test_run_reaches_its_target_under_all_faults(first: int, sim_seed: int | None) -> None:
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
    assert first.describe() == second.describe() != other.describe()
    assert first.broker.journal == second.broker.journal and first.kernel.now == second.kernel.now


def test_remembered_state_does_not_grow_with_the_number_of_faults() -> None:
    """Ten minutes of faults in one run: supervisor, registry and what head and nodes know of each other stay as large
    as they were. Versions are remembered, one a step."""
    world, sizes = World(2, faults_s=600.0, target=100_000, period_s=10.0), []
    assert world.kind == "three hosts"
    world.mix = {"kill": 4, "stop": 2, "hang": 1, "server stop": 1, "operator": 1, "node": 3}

    def measure() -> None:
        registry = world.servers["registry/0"]
        parts = [world.agent.core, world.agent.head, getattr(registry, "core", None)]
        parts += [node_agent.core for node_agent in world.node_agents.values()]
        sizes.append(sum(size(part) for part in parts))
        world.kernel.after(20.0, measure)

    world.kernel.after(100.0, measure)
    world.play()
    assert {kind for kind, _ in world.checker.findings} == {STANDSTILL}, "it has more to do than there is time"
    assert world.happened["slot_exited"] > 300 and len(sizes) > 20
    early, late = sorted(sizes[:10]), sorted(sizes[-10:])
    assert late[5] < 1.3 * early[5]


def size(what: Any, seen: set[int] | None = None) -> int:
    """Things in it, and in what it consists of."""
    seen = set() if seen is None else seen
    if id(what) in seen or callable(what) or isinstance(what, (str, bytes, int, float)) or what is None:
        return 0
    seen.add(id(what))
    if isinstance(what, Mapping):
        return sum(1 + size(value, seen) for value in what.values())
    if isinstance(what, (list, tuple, AbstractSet)) or type(what).__name__ == "deque":
        return sum(1 + size(value, seen) for value in what)
    if isinstance(what, msgspec.Struct):
        return sum(size(getattr(what, name), seen) for name in what.__struct_fields__)
    inside = {} if isinstance(what, VersionTree) else getattr(what, "__dict__", {})
    return sum(size(value, seen) for value in inside.values())
