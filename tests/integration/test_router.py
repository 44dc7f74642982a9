"""A program beside a run gets tokens through a router, while an engine dies in mid-sequence and weights move."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_run import TinyRun

from relax_rt.cluster import discovery
from relax_rt.roles.models.resolve import resolve_model
from relax_rt.roles.rollout.router import GenerationRequest, Outcome, Router

pytest.importorskip("torch")
pytestmark = [pytest.mark.integration, pytest.mark.long]

TOKENS = 48


@pytest.fixture
def run(tmp_path: Path) -> Iterator[TinyRun]:
    """A run with two rollouts that is long enough, ended afterwards."""
    resolve_model("package:tiny", Path())
    overrides = {"algorithm.steps": 5000, "roles.rollout.count": 2, "evaluation.items": 16, "evaluation.every_steps": 0}
    started = TinyRun(tmp_path / "run", **overrides).start()
    yield started
    started.end()


class Clients:
    """Callers that want one sequence after the other, and look at what they get piece by piece."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.done: list[Outcome] = []
        self.stopped = asyncio.Event()

    async def one(self, number: int) -> None:
        round_ = 0
        while not self.stopped.is_set():
            round_ += 1
            wanted = GenerationRequest(
                prompt=tuple(range(4, 10)), seed=1000 * number + round_, max_new_tokens=TOKENS, lag=1, timeout_s=60.0
            )
            self.done.append(await self.router.generate(wanted))

    def at(self, slot: str) -> int:
        """Sequences that an engine has begun and not finished."""
        requests = self.router.core.requests.values()
        return sum(
            life.assignment is not None and life.assignment.slot == slot and len(life.tokens) > 4 for life in requests
        )


async def until(run: TinyRun, what: str, condition: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            assert run.process.poll() is None, f"the run ended before {what}:\n{run.text()}"
            await asyncio.sleep(0.01)


async def test_sequences_survive_the_death_of_their_engine_amid_publications(run: TinyRun) -> None:
    await asyncio.to_thread(run.until, "steps", lambda: run.last_step() >= 2)
    async with discovery.connect(run.run_dir) as found, Router(found) as router:
        clients = Clients(router)
        tasks = [asyncio.create_task(clients.one(n)) for n in range(8)]
        await until(run, "both engines work", lambda: clients.at("rollout/0") and len(clients.done) >= 8)
        pid = (await asyncio.to_thread(run.slot, "rollout/0"))["pid"]
        begun = router.statistics().committed
        await until(run, "it is in mid-sequence", lambda: clients.at("rollout/0"))
        os.kill(pid, signal.SIGKILL)
        await until(run, "sequences went on elsewhere", lambda: router.core.counts["resumed"])
        await until(run, "publications went on", lambda: router.statistics().committed >= begun + 3)
        await until(run, "it is back", lambda: router.core.fleet.health("rollout/0") in ("healthy", "stale"))
        sent = router.statistics().sent["rollout/0"]
        await until(run, "it is sent work again", lambda: router.statistics().sent["rollout/0"] > sent)
        clients.stopped.set()
        await asyncio.gather(*tasks)
        statistics = router.statistics()
        committed = {record.version for record in await found.registry.versions()}
    assert {o.kind for o in clients.done} == {"done"}
    assert all(len(o.tokens) == len(o.logprobs) == TOKENS for o in clients.done)
    for outcome in clients.done:
        ends = [0, *(span.end for span in outcome.versions)]
        assert [span.start for span in outcome.versions] == ends[:-1] and ends[-1] == TOKENS
        assert {span.version for span in outcome.versions} <= committed
        numbers = [span.version for span in outcome.versions]
        assert numbers == sorted(numbers), "weights went back"
    moved = [o for o in clients.done if len({e.partition("#")[0] for e in o.engines}) > 1]
    assert moved, "no sequence has tokens of two engines"
    assert statistics.counts["done"] == statistics.counts["submitted"] == len(clients.done)
    assert statistics.counts["tokens"] == TOKENS * len(clients.done), "a token came twice, or was made again"
