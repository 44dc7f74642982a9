"""The router's core against a fleet that dies, stands still, hangs, stops and lags, over a network that loses things;
and each of its safeguards switched off alone, which the checker must find."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import router_world
from msgspec.structs import replace
from router_world import LEAK, NONE, ROUTED, STALE, STUCK, UNJUST, WRONG, World

from relax_rt.roles.rollout import generation
from relax_rt.roles.rollout.router.core import RequestState, RouterCore
from relax_rt.roles.rollout.router.fleet import Fleet, HealthLimits
from relax_rt.transport.base.versions import VersionTree

SEEDS = range(6)
"""Of the runs without findings."""
ABLATION_SEEDS = range(12)


def forgetful(request: RequestState, why: str) -> None:
    request.assignment, request.waiting_on = None, why
    request.tokens, request.logprobs, request.versions = [], [], []


def patient(**kept: float) -> Any:
    """The limits of the world without one timeout."""
    limits = replace(
        router_world.LIMITS, health=HealthLimits(**{"stuck_s": 3.0, "paused_s": 6.0, "dead_s": 8.0} | kept)
    )
    return patch.object(router_world, "LIMITS", limits)


ABLATIONS: dict[str, tuple[list[Any], set[str]]] = {
    "updates are checked": ([patch.object(RequestState, "_mismatch", lambda *_: "")], {WRONG}),
    "old attempts are not listened to": (
        [patch.object(RouterCore, "_current", lambda core, number, _: core.requests.get(number))],
        {WRONG, UNJUST},
    ),
    "tokens are kept": ([patch.object(RequestState, "unassign", forgetful)], {WRONG}),
    "the engine checks its version": ([patch.object(generation, "admissible", lambda *_: True)], {STALE}),
    "stale is not routable": (
        [patch.object(Fleet, "routable", lambda fleet, slot, lag: fleet.health(slot) in ("healthy", "stale"))],
        {ROUTED},
    ),
    "lineage": ([patch.object(VersionTree, "distance", lambda _, a, b: abs(a - b))], {STALE, ROUTED}),
    "an engine is told to end a sequence": (
        [patch.object(RouterCore, "_cancel_attempt", lambda core, request: core._release(request))],
        {LEAK},
    ),
    "silence is noticed": (
        [
            patch.object(router_world, "LIMITS", replace(router_world.LIMITS, silent_s=1e9)),
            patch.object(Fleet, "why_revoke", lambda *_: ""),
        ],
        {STUCK},
    ),
    "progress is watched": ([patient(stuck_s=1e9, paused_s=1e9)], {STUCK}),
    "the deadline": (
        [patch.object(RequestState, "deadline", property(lambda _: 1e9, lambda *_: None), create=True)],
        {NONE},
    ),
}


@contextmanager
def without(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        for one in ABLATIONS[name][0]:
            stack.enter_context(one)
        yield


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_each_request_has_one_outcome_and_its_own_tokens(seed: int) -> None:
    world = World(seed)
    assert world.checker.findings == []
    kinds = Counter(r.outcomes[0].kind for r in world.requests.values())
    assert len(world.requests) > 80
    assert kinds["done"] > 0.7 * len(world.requests), kinds
    assert world.checker.moved > 3 and world.checker.kept > 20, "nothing was moved with its tokens: no harm was done"


def test_undisturbed_everything_is_done_and_nothing_is_moved() -> None:
    world = World(100, faulty=False)
    assert world.checker.findings == []
    assert {r.outcomes[0].kind for r in world.requests.values()} <= {"done", "cancelled"}
    assert world.core.counts["lost"] == 0 and world.checker.moved == 0


@pytest.mark.parametrize("name", ABLATIONS)
def test_missing_safeguard_is_detected(name: str) -> None:
    seen: set[str] = set()
    for seed in ABLATION_SEEDS:
        with without(name):
            try:
                seen |= World(seed).checker.kinds()
            except AssertionError as error:
                # A safeguard behind it: the machine refuses what cannot be.
                seen.add(f"refused: {error}")
        if seen & ABLATIONS[name][1]:
            return
    raise AssertionError(f"{len(ABLATION_SEEDS)} runs without it, and the checker found {sorted(seen)} only")
