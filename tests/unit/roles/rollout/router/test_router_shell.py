"""The router over real sockets: engines die, hang, stop and lag; callers disconnect; each request has one outcome."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from router_far_end import FleetOfTests, Rollout, fleet, token

from relax_rt.roles.rollout.router import GenerationRequest, NotGenerated, Router, RouterEnded, RouterLimits
from relax_rt.roles.rollout.router import router as router_module
from relax_rt.roles.rollout.router.fleet import HealthLimits
from relax_rt.transport.rpc.errors import Refused

LIMITS = RouterLimits(silent_s=3.0, full_s=0.05, health=HealthLimits(stuck_s=0.5, dead_s=5.0, probe_every_s=0.1))


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[FleetOfTests]:
    async with fleet(tmp_path) as made:
        made.commit()
        yield made


def wanted(tokens: int = 20, seed: int = 5, **more: Any) -> GenerationRequest:
    return GenerationRequest(prompt=(1, 2, 3), seed=seed, max_new_tokens=tokens, chunk_tokens=2, timeout_s=60.0, **more)


def right(tokens: int = 20, seed: int = 5) -> list[int]:
    return [token(seed, n) for n in range(tokens)]


async def eventually(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - the other side has no event to give
            await asyncio.sleep(0.005)


async def test_requests_are_distributed_and_done(run: FleetOfTests) -> None:
    one, two = await Rollout(run, "rollout/0").begin(), await Rollout(run, "rollout/1").begin()
    async with Router(run, limits=LIMITS) as router:
        outcomes = await asyncio.gather(*(router.generate(wanted(seed=n)) for n in range(10)))
        assert [o.tokens for o in outcomes] == [right(seed=n) for n in range(10)]
        assert all((o.kind, o.finish_reason, len(o.logprobs)) == ("done", "length", 20) for o in outcomes)
        assert {(s.start, s.end, s.version) for o in outcomes for s in o.versions} == {(0, 20, 1)}
        assert (len(one.engine.seen), len(two.engine.seen)) == (5, 5)
        stats = router.statistics()
        assert (stats.counts["done"], stats.running, stats.waiting, stats.committed) == (10, 0, 0, 1)
        assert [(e.slot, e.state, e.lag) for e in stats.engines] == [
            ("rollout/0", "healthy", 0),
            ("rollout/1", "healthy", 0),
        ]


async def test_a_sequence_moves_with_its_tokens(run: FleetOfTests) -> None:
    first = await Rollout(run, "rollout/0").begin()
    async with Router(run, limits=LIMITS) as router:
        parts: list[int] = []
        stream = router.stream(wanted(60))
        async for part in stream:
            assert part.start == len(parts)
            parts += part.tokens
            if len(parts) >= 10 and len(run.rollouts) == 1:
                second = await Rollout(run, "rollout/1").begin()
                await first.die()
        assert parts == right(60)
        (request,) = second.engine.seen
        partial = request.partial(0)
        assert (
            partial is not None and list(partial.tokens) == parts[: len(partial.tokens)] and len(partial.tokens) >= 10
        )
        assert router.statistics().counts["resumed"] == 1
        assert router.core.fleet.health("rollout/0") == "dead"


async def test_a_hanging_engine_loses_its_sequences_and_gets_the_cancellation(run: FleetOfTests) -> None:
    first = await Rollout(run, "rollout/0").begin()
    async with Router(run, limits=LIMITS) as router:
        asked = asyncio.create_task(router.generate(wanted(60)))
        await eventually(lambda: first.engine.tokens > 10)
        first.engine.held = True
        second = await Rollout(run, "rollout/1").begin()
        outcome = await asked
        assert outcome.tokens == right(60)
        assert outcome.engines == [str(first.who), str(second.who)]
        assert first.engine.aborted, "it was not told"


async def test_only_engines_at_an_allowed_version_get_requests(run: FleetOfTests) -> None:
    old = await Rollout(run, "rollout/0").begin()
    async with Router(run, limits=LIMITS) as router:
        await router.generate(wanted())
        version = run.commit()
        await eventually(lambda: router.statistics().committed == version)
        asked = asyncio.create_task(router.generate(wanted()))
        await eventually(router.waiting_on)
        (reason,) = router.waiting_on()
        assert f"an engine at version {version}" in reason and "rollout/0 is at version 1, 1 behind" in reason
        assert (await router.generate(wanted(lag=1))).versions[0].version == 1
        assert len(old.engine.seen) == 2 and not asked.done()
        old.swap(version)
        assert {span.version for span in (await asked).versions} == {version}


async def test_an_engine_rejects_by_its_own_version(run: FleetOfTests) -> None:
    """A new incarnation answers at the old one's address, without weights."""
    first = await Rollout(run, "rollout/0").begin()
    # Nothing tells the router in time: the registry's news is late, and it is not the time for a probe.
    async with Router(run, limits=replace(LIMITS, health=HealthLimits(probe_every_s=30.0))) as router:
        await router.generate(wanted())
        await asyncio.sleep(0.2)
        run.silent = True
        await first.die()
        again = Rollout(run, "rollout/0", version=0)
        asked = asyncio.create_task(router.generate(wanted()))
        await again.begin()
        await eventually(lambda: router.statistics().counts.get("rejected_stale"))
        assert not again.engine.seen
        run.silent = False
        again.swap(1)
        assert (await asked).engines == [str(again.who)]


async def test_a_cancelled_caller_ends_its_sequence(run: FleetOfTests) -> None:
    one = await Rollout(run, "rollout/0").begin()
    async with Router(run, limits=LIMITS) as router:
        asked = asyncio.create_task(router.generate(wanted(10_000)))
        await eventually(lambda: one.engine.running)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await eventually(lambda: one.engine.aborted)
        async for _ in router.stream(wanted(10_000, seed=6)):
            break
        await eventually(lambda: len(one.engine.aborted) == 2)
        assert not one.engine.running
        counts = router.statistics().counts
        assert counts["cancelled"] == 2 and not router.core.requests


async def test_a_late_request_keeps_its_tokens(run: FleetOfTests) -> None:
    one = await Rollout(run, "rollout/0").begin()
    async with Router(run, limits=LIMITS) as router:
        # So that the way to it is known, and the time goes into tokens.
        await router.generate(wanted())
        with pytest.raises(NotGenerated, match="late: not finished in 3 s") as late:
            await router.generate(GenerationRequest(prompt=(1,), max_new_tokens=100_000, timeout_s=3.0, chunk_tokens=2))
        assert late.value.outcome.tokens == right(len(late.value.outcome.tokens), seed=0)
        assert len(late.value.outcome.tokens) > 5
        await eventually(lambda: one.engine.aborted)
    async with Router(run, role="nobody", limits=LIMITS) as router:
        with pytest.raises(NotGenerated, match="waited for an engine: none has entered the registry"):
            await router.generate(GenerationRequest(prompt=(1,), max_new_tokens=5, timeout_s=0.3))


async def test_a_stopping_engine_hands_over_without_a_loss(run: FleetOfTests) -> None:
    first = await Rollout(run, "rollout/0").begin()
    async with Router(run, limits=LIMITS) as router:
        asked = asyncio.create_task(router.generate(wanted(80)))
        await eventually(lambda: first.engine.tokens > 10)
        await Rollout(run, "rollout/1").begin()
        first.stopping.set()
        assert (await asked).tokens == right(80)
        counts = router.statistics().counts
        assert counts["rejected_stopping"] >= 1 and not counts.get("lost")


async def test_a_full_engine_gets_no_more_and_nothing_is_lost(run: FleetOfTests) -> None:
    one = await Rollout(run, "rollout/0", room=3).begin()
    async with Router(run, limits=LIMITS) as router:
        peak = 0
        asked = [asyncio.create_task(router.generate(wanted(seed=n))) for n in range(12)]
        while not all(task.done() for task in asked):
            peak = max(peak, len(one.engine.running))
            await asyncio.sleep(0.002)
        assert [task.result().tokens for task in asked] == [right(seed=n) for n in range(12)]
        assert peak <= 3
        # Only of the first burst, sent before the engine had said how many it takes.
        assert router.statistics().counts.get("rejected_full", 0) <= RouterLimits().first_room - 3


async def test_an_impossible_request_fails_at_once(run: FleetOfTests) -> None:
    one = await Rollout(run, "rollout/0").begin()

    def refuse(requests: Any) -> None:
        raise Refused("request 1: 9 prompt + 9 new tokens", why="the model's context is 8 tokens")

    one.engine.submit = refuse  # type: ignore[method-assign]
    async with Router(run, limits=LIMITS) as router:
        with pytest.raises(NotGenerated, match="the model's context is 8 tokens"):
            await router.generate(wanted())
        with pytest.raises(Refused, match="a prompt, at least one token"):
            await router.generate(GenerationRequest(prompt=(), max_new_tokens=1))
        assert router.core.fleet.health("rollout/0") == "healthy"


async def test_requests_continue_without_the_registry(run: FleetOfTests, monkeypatch: pytest.MonkeyPatch) -> None:
    await Rollout(run, "rollout/0").begin()
    async with Router(run, limits=LIMITS) as router:
        await router.generate(wanted())

        async def away(since: int, wait_s: float) -> Any:
            await asyncio.sleep(30)

        monkeypatch.setattr(run, "watch", away)
        assert (await router.generate(wanted())).tokens == right()


async def test_a_router_that_ends_cancels_its_callers(run: FleetOfTests) -> None:
    one = await Rollout(run, "rollout/0").begin()
    async with Router(run, limits=LIMITS) as router:
        asked = asyncio.create_task(router.generate(wanted(10_000)))
        await eventually(lambda: one.engine.running)
    with pytest.raises(NotGenerated, match="cancelled"):
        await asked
    await eventually(lambda: not one.engine.running)


async def test_a_background_job_that_fails_once_is_restarted(
    run: FleetOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_module, "RETRY_S", 0.01)
    async with Router(run, limits=LIMITS) as router:
        for name in ("on_members", "tick"):
            whole, failed = getattr(router.core, name), asyncio.Event()

            def once(*args: Any, name: str = name, whole: Any = whole, failed: asyncio.Event = failed) -> Any:
                monkeypatch.setattr(router.core, name, whole)
                failed.set()
                raise ZeroDivisionError(name)

            monkeypatch.setattr(router.core, name, once)
            await Rollout(run, f"rollout/{len(run.rollouts)}").begin()
            await asyncio.wait_for(failed.wait(), 120)
        assert (await router.generate(wanted())).tokens == right()
        with pytest.raises(NotGenerated, match=r"not finished in 0\.3 s"):
            await router.generate(replace(wanted(10_000), timeout_s=0.3))
        assert len(router.statistics().engines) == 2


@pytest.mark.parametrize("name", ["on_members", "tick"])
async def test_a_background_job_that_fails_for_good_fails_its_callers(
    run: FleetOfTests, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(router_module, "RETRY_S", 0.01)

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError(name)

    async with Router(run, limits=LIMITS) as router:
        await eventually(lambda: router.statistics().committed)
        asked = asyncio.create_task(router.generate(wanted()))
        streamed = asyncio.create_task(anext(router.stream(wanted())))
        await asyncio.sleep(0)
        monkeypatch.setattr(router.core, name, broken)
        run.commit()
        for task in (asked, streamed):
            with pytest.raises(Refused, match="failed 5 times, at last with ZeroDivisionError"):
                await asyncio.wait_for(task, 120)
        with pytest.raises(Refused, match="make a new router"):
            await router.generate(wanted())


WANTED = GenerationRequest(prompt=(1, 2, 3), seed=5, max_new_tokens=20, chunk_tokens=2, timeout_s=60.0)


async def test_a_retry_after_the_routers_end_is_refused(tmp_path: Path) -> None:
    told: list[str] = []

    async def insist(router: Router) -> None:
        while True:
            try:
                await router.generate(WANTED)
            except NotGenerated:
                told.append("cancelled")

    async with fleet(tmp_path) as run, asyncio.timeout(120):
        router = Router(run)
        async with router:
            # There is no engine: it waits.
            insisting = asyncio.create_task(insist(router))
            await asyncio.sleep(0)
        with pytest.raises(RouterEnded, match=r"its `async with` has ended \(ask within"):
            await insisting
        assert told == ["cancelled"]
        with pytest.raises(RouterEnded, match="has ended"):
            await router.generate(WANTED)
        run.commit()
        await Rollout(run, "rollout/0").begin()
        async with router:
            assert (await router.generate(WANTED)).kind == "done"
