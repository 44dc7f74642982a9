"""Engines and a trainer in turns on one device: the order purely, and with the embedded engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from harness import MemorySource

from relax_rt.roles.engines.base import Chunk, GroupRequest, Partial
from relax_rt.roles.engines.colocate import (
    Action,
    Colocation,
    Do,
    Limits,
    Out,
    Serve,
    Train,
    Turns,
    abort_all,
)
from relax_rt.roles.engines.embedded import EmbeddedEngine
from relax_rt.transport.errors import Refused

LIMITS = Limits(drain_s=3.0, release_s=2.0, resume_s=4.0)


def turns(*names: str) -> Turns:
    machine = Turns(LIMITS)
    for name in names:
        machine.add(name)
    return machine


def test_the_trainer_begins_when_all_have_released_and_nobody_resumes_before_it_is_done() -> None:
    machine = turns("a", "b")
    assert machine.wanted(0.0) == [Do("a", "draining"), Do("b", "draining")]
    assert machine.done("a", "draining", 1.0) == [Do("a", "releasing")]
    assert machine.done("a", "releasing", 1.5) == []
    assert machine.done("b", "draining", 2.0) == [Do("b", "releasing")]
    assert machine.done("b", "releasing", 2.5) == [Train(())]
    with pytest.raises(Refused, match="not the engines' turn"):
        machine.add("c")
    with pytest.raises(Refused, match="has it already"):
        machine.wanted(3.0)
    assert machine.trained(9.0) == [Do("a", "resuming"), Do("b", "resuming")]
    assert machine.done("b", "resuming", 9.5) == []
    assert machine.done("a", "resuming", 9.6) == [Serve()]
    with pytest.raises(Refused, match="does not have it"):
        machine.trained(10.0)


@pytest.mark.parametrize("step", ["draining", "releasing"])
def test_an_engine_that_does_not_give_way_is_out_and_the_trainer_is_told(step: str) -> None:
    machine = turns("a", "b")
    machine.wanted(0.0)
    for one in ("draining", "releasing"):
        machine.done("a", one, 0.1)  # type: ignore[arg-type]
    if step == "releasing":
        machine.done("b", "draining", 0.2)
    deadline = machine.deadline
    assert deadline is not None and machine.late(deadline - 0.01) == []
    out, train = machine.late(deadline)
    assert isinstance(out, Out) and (out.engine, out.step) == ("b", step) and "longer than" in out.why
    assert train == Train(("b",))
    assert machine.done("b", "draining", 9.0) == [], "too late: it stays out"
    assert machine.trained(10.0) == [Do("a", "resuming")]


EVENT = st.tuples(st.sampled_from(["wanted", "trained", "done", "failed", "late"]), st.sampled_from("abc"))


@settings(max_examples=150, deadline=None)
@given(events=st.lists(st.tuples(EVENT, st.floats(0.0, 3.0)), max_size=60))
def test_no_order_of_events_lets_both_have_the_device_or_waits_without_a_deadline(
    events: list[tuple[tuple[str, str], float]],
) -> None:
    machine, now, training, holding = turns("a", "b", "c"), 0.0, False, {"a", "b", "c"}
    out: set[str] = set()
    for (kind, name), later in events:
        now += later
        actions: list[Action] = []
        step = machine.engines[name].step
        try:
            if kind == "wanted":
                actions = machine.wanted(now)
            elif kind == "trained":
                actions = machine.trained(now)
                training = False
            elif kind == "late":
                actions = machine.late(now)
            elif step in ("draining", "releasing", "resuming"):
                if kind == "done" and step == "releasing":
                    holding.discard(name)
                actions = machine.done(name, step, now) if kind == "done" else machine.failed(name, step, "?")
        except Refused:
            continue
        for action in actions:
            if isinstance(action, Out):
                assert action.engine not in out, "told once"
                out.add(action.engine)
            elif isinstance(action, Do) and action.step == "resuming":
                assert not training
                holding.add(action.engine)
            elif isinstance(action, Train):
                training = True
                assert set(action.without) == out and holding <= out
        waits = any(e.step in ("draining", "releasing", "resuming") for e in machine.engines.values())
        assert (machine.deadline is not None) == waits
        assert waits or machine.turn != "changing"


class Served:
    """An embedded engine, and an owner that keeps what its sequences have got."""

    def __init__(self, folder: Path) -> None:
        self.engine = EmbeddedEngine(folder, dtype="float32", max_sequences=8, threads=1)
        self.chunks: list[Chunk] = []
        self.source = MemorySource(folder, 1)

    async def __aenter__(self) -> Served:
        await self.engine.start(self.chunks.extend, self._fail)
        await self.engine.prepare(self.source)
        await self.engine.commit(self.source.record, "keep")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.close(5.0)

    def _fail(self, error: BaseException) -> None:
        raise error

    def submit(self, number: int, partial: Partial | None = None) -> None:
        request = GroupRequest(
            id=number,
            prompt=(7, 8, 9),
            seeds=(3,),
            temperature=1.0,
            max_new_tokens=200,
            stop_ids=frozenset(),
            chunk_tokens=4,
            partials=(partial,) if partial else (),
        )
        self.engine.submit([request])

    async def drain(self) -> None:
        await abort_all(self.engine, lambda: [1, 2], 10.0)

    def of(self, number: int) -> list[Chunk]:
        return [c for c in self.chunks if c.request == number]


async def until(condition: object, timeout_s: float = 20.0) -> None:
    assert callable(condition)
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what an engine reports is looked at, as its owner does
            await asyncio.sleep(0.01)


async def test_sequences_go_on_after_training_where_they_were(conformance_model: Path) -> None:
    async with Served(conformance_model) as served:
        colocation = Colocation({"e": (served.engine, served.drain)})
        served.submit(1)
        await until(lambda: len(served.of(1)) >= 2)
        async with colocation.training() as without:
            assert without == ()
            had = served.of(1)
            assert had[-1].finish_reason == "abort"
            with pytest.raises(Refused, match="released"):
                served.submit(2)
            with pytest.raises(Refused, match="has it already"):
                async with colocation.training():
                    pass
        tokens = tuple(t for c in had for t in c.tokens)
        logprobs = tuple(p for c in had for p in c.logprobs)
        versions = tuple(span for c in had for span in c.versions)
        served.submit(2, Partial(tokens, logprobs, versions))
        await until(lambda: served.of(2) and served.of(2)[-1].finish_reason)
        assert served.of(2)[0].start == len(tokens), "its tokens are kept"
        whole = [*tokens, *(t for c in served.of(2) for t in c.tokens)]
        served.submit(1)
        before = len(had)
        await until(lambda: len(served.of(1)) > before and served.of(1)[-1].finish_reason)
        again = [t for c in served.of(1)[before:] for t in c.tokens]
        assert whole == again, "with the same weights and seed: an interruption changes no token"


async def test_an_engine_that_cannot_be_drained_is_out_and_may_join_again(conformance_model: Path) -> None:
    async with Served(conformance_model) as served:
        outs: list[Out] = []

        async def never() -> None:
            await asyncio.sleep(3600)

        colocation = Colocation({"e": (served.engine, never)}, Limits(drain_s=0.05), outs.append)
        async with colocation.training() as without:
            assert without == ("e",)
            with pytest.raises(Refused, match="turn"):
                colocation.join("e", served.engine, served.drain)
        assert [(o.engine, o.step) for o in outs] == [("e", "draining")]
        colocation.join("e", served.engine, served.drain)
        async with colocation.training() as without:
            assert without == ()
        assert len(outs) == 1


async def test_a_refused_release_puts_the_engine_out_with_its_reason(conformance_model: Path) -> None:
    async with Served(conformance_model) as served:
        outs: list[Out] = []

        async def nothing() -> None:
            """A drain that leaves a sequence in flight."""

        served.submit(1)
        colocation = Colocation({"e": (served.engine, nothing)}, None, outs.append)
        async with colocation.training() as without:
            assert without == ("e",)
        assert outs[0].step == "releasing" and "in flight" in outs[0].why


@pytest.mark.parametrize("times", [1, 3])
async def test_a_trainer_that_is_cancelled_while_it_waits_leaves_the_engines_serving(
    conformance_model: Path, times: int
) -> None:
    async with Served(conformance_model) as served:
        held = asyncio.Event()
        colocation = Colocation({"e": (served.engine, held.wait)})

        async def train() -> None:
            async with colocation.training():
                raise AssertionError("it was cancelled before")

        task = asyncio.create_task(train())
        for _ in range(times):
            await asyncio.sleep(0.02)
            task.cancel()
        await asyncio.sleep(0.02)
        held.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert colocation.turns.turn == "engines"
        served.submit(1)
        await until(lambda: served.of(1))
