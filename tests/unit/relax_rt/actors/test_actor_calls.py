"""Calls, tells, options, bounds and errors of actors over real sockets."""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import AsyncIterator

import pytest
from actor_far_end import Judge, Text, directory, fails, living
from waiting import eventually

from relax_rt.actors import Actor
from relax_rt.transport.rpc.errors import DeadlineExceeded, ProtocolError, Refused, RemoteError
from relax_rt.transport.rpc.rpc import CurveKeys


@pytest.mark.parametrize("carrier", ["unix", "curve"])
async def test_a_call_and_a_tell(carrier: str, tmp_path: pathlib.Path) -> None:
    keys = CurveKeys.make() if carrier == "curve" else None
    address = f"unix://{tmp_path}/j.sock" if carrier == "unix" else "tcp://127.0.0.1:0"
    async with living(address, curve=keys) as (actor, real), directory({"judge/0": real}, curve=keys) as known:
        judge = known.actor("judge/0", Judge)
        assert await judge.score(Text(["a", "b"], 0.5), factor=3.0) == 3.0
        assert await judge.who_asks() == "tester/0"
        await judge.note("heard")
        await eventually(lambda: actor.notes == ["heard"])
        assert [i async for i in judge.count(200)] == list(range(200))
        assert repr(judge) == "<reference to Judge judge/0>"
        await eventually(lambda: actor.ctx.advanced == 4 + 200)
        assert actor.ctx.waits[0] == "calls"


async def test_the_interface_is_the_public_async_methods(tmp_path: pathlib.Path) -> None:
    async with living(f"unix://{tmp_path}/j.sock") as (_, real), directory({"judge/0": real}) as known:
        judge = known.actor("judge/0", Judge)
        with pytest.raises(AttributeError, match=r"Judge\.helper cannot be called from afar"):
            judge.helper()
        with pytest.raises(AttributeError, match=r"Judge has no method scores: did you mean 'score'\?"):
            judge.scores()  # type: ignore[attr-defined]
        with pytest.raises(AttributeError, match="cannot be called from afar"):
            await judge.setup()
        with pytest.raises(TypeError, match="missing a required argument"):
            await judge.score()  # type: ignore[call-arg]


async def test_a_caller_with_another_interface_is_refused(tmp_path: pathlib.Path) -> None:
    class Newer(Judge):
        async def extra(self) -> None: ...

    Newer.__name__ = "Judge"
    Other = type("Jugde", (Judge,), {})
    async with living(f"unix://{tmp_path}/j.sock") as (_, real), directory({"judge/0": real}) as known:
        with pytest.raises(Refused, match=r"call of Judge\.extra: Judge has no method extra"):
            await known.actor("judge/0", Newer).extra()
        with pytest.raises(Refused, match=r"offers no interface Jugde \(did you mean 'Judge'\?"):
            await known.actor("judge/0", Other).pid()


async def test_bad_input_is_named(tmp_path: pathlib.Path) -> None:
    async with (
        living(f"unix://{tmp_path}/j.sock", max_message_bytes=100_000) as (_, real),
        directory({"judge/0": real}) as known,
    ):
        judge = known.actor("judge/0", Judge)
        with pytest.raises(Refused, match=r"arguments of Judge\.score: Expected `float`, got `str` - at `factor`"):
            await judge.score(Text([]), "much")  # type: ignore[arg-type]
        with pytest.raises(
            Refused,
            match=r"Expected `str`, got `int` - at `text\.words\[0\]` \(it takes text: Text, factor: float\)",
        ):
            await judge.score(Text([1]))  # type: ignore[list-item]
        with pytest.raises(Refused, match=r"cannot be sent: .*object.* has no place in a message"):
            await judge.score(object())  # type: ignore[arg-type]
        with pytest.raises(ProtocolError, match=r"Judge\.score.*limit of .* is 100000"):
            await judge.score(Text(["x" * 100_000]))
        with pytest.raises(ProtocolError, match=r"result of Judge\.big.*100000 .*answer in parts"):
            await judge.big(100_000)
        assert await judge.score(Text(["fine"])) == 1.0


async def test_errors_carry_the_remote_cause(tmp_path: pathlib.Path) -> None:
    async with living(f"unix://{tmp_path}/j.sock") as (_, real), directory({"judge/0": real}) as known:
        judge = known.actor("judge/0", Judge)
        error = await fails(judge.fail(), RemoteError)
        assert (error.kind, error.message, error.where) == ("KeyError", "'spelling'", "judge/0#1 Judge.fail")
        assert 'raise KeyError("spelling")' in "".join(error.__notes__)
        with pytest.raises(Refused, match="a text: it is empty"):
            await judge.refuse()


async def test_deadline_and_options(tmp_path: pathlib.Path) -> None:
    async with living(f"unix://{tmp_path}/j.sock") as (actor, real), directory({"judge/0": real}) as known:
        judge = known.actor("judge/0", Judge)
        with pytest.raises(DeadlineExceeded, match=r"Judge\.hold.*not finished"):
            await judge.with_options(timeout_s=2.0).hold()
        await eventually(lambda: actor.ended == ["hold cancelled"])
        for wrong in ({"timeout_s": 0.0}, {"timeout_s": float("nan")}, {"window": 0}):
            with pytest.raises(Refused):
                judge.with_options(**wrong)
        for name in ("", "judge/x", "/0"):
            with pytest.raises(Refused, match="names no slot and no role"):
                known.actor(name, Judge)
        with pytest.raises(Refused, match="no registry"):
            await known.actor("judge", Judge).pid()


async def test_cancelling_the_caller_cancels_the_handler(tmp_path: pathlib.Path) -> None:
    async with living(f"unix://{tmp_path}/j.sock") as (actor, real), directory({"judge/0": real}) as known:
        judge = known.actor("judge/0", Judge)
        call = asyncio.create_task(judge.hold())
        await eventually(lambda: actor.working)
        call.cancel()
        await eventually(lambda: actor.ended == ["hold cancelled"])
        assert actor.working == 0


async def test_no_more_than_max_concurrency_at_work_and_the_mailbox_is_bounded(tmp_path: pathlib.Path) -> None:
    async with (
        living(f"unix://{tmp_path}/j.sock") as (actor, real),
        directory({"judge/0": real}) as one,
        directory({"judge/0": real}) as two,
    ):
        calls = [asyncio.create_task(known.actor("judge/0", Judge).hold()) for _ in range(40) for known in (one, two)]
        await eventually(lambda: len(actor.ctx.server.calls) == 16)
        await asyncio.sleep(0.1)
        # Eight at work, eight in the mailbox, one held for each connection; the others are not read.
        assert (actor.working, len(actor.ctx.server.calls), len(actor.ctx.server.held)) == (8, 16, 2)
        actor.release.set()
        assert len(await asyncio.gather(*calls)) == 80
        assert actor.peak == 8
        assert actor.ctx.server.statistics().peak_inflight == 16


async def test_one_after_the_other(tmp_path: pathlib.Path) -> None:
    class Single(Actor):
        max_concurrency = 1

        async def setup(self) -> None:
            self.inside = 0

        async def work(self) -> int:
            self.inside += 1
            await asyncio.sleep(0.001)
            seen, self.inside = self.inside, self.inside - 1
            return seen

    async with (
        living(f"unix://{tmp_path}/s.sock", Single, "single/0") as (_, real),
        directory({"single/0": real}) as known,
    ):
        single = known.actor("single/0", Single)
        assert set(await asyncio.gather(*(single.work() for _ in range(20)))) == {1}


async def test_a_tell_waits_when_the_other_side_is_full(tmp_path: pathlib.Path) -> None:
    """Upstream back-pressure: what is told and not yet read is bounded by the sockets between, not by memory."""

    class Slow(Actor):
        max_concurrency = 1
        mailbox = 2

        async def setup(self) -> None:
            self.taken = 0
            self.go = asyncio.Event()

        async def take(self, data: bytes) -> None:
            await self.go.wait()
            self.taken += 1

    from relax_rt.transport.rpc.interface import tell

    Slow.take = tell(Slow.take)  # type: ignore[method-assign]
    async with (
        living(f"unix://{tmp_path}/s.sock", Slow, "slow/0") as (actor, real),
        directory({"slow/0": real}) as known,
    ):
        slow = known.actor("slow/0", Slow)
        sent = 0

        async def tell_all() -> None:
            nonlocal sent
            for _ in range(200):
                await slow.take(bytes(100_000))
                sent += 1

        work = asyncio.create_task(tell_all())
        await eventually(lambda: sent > 3)
        stood_at = 0
        while sent > stood_at:
            stood_at = sent
            await asyncio.sleep(0.2)
        assert stood_at < 60
        actor.go.set()
        await work
        await eventually(lambda: actor.taken == 200)


async def test_names_that_belong_to_references() -> None:
    with pytest.raises(TypeError, match=r"Bad\.all: the name belongs to references"):
        type("Bad", (Actor,), {"all": lambda self: None})


async def test_actors_that_cannot_be(tmp_path: pathlib.Path) -> None:
    class Empty(Actor):
        pass

    class Untyped(Actor):
        async def score(self, text) -> float:  # type: ignore[no-untyped-def]
            return 0.0

    class Yields(Actor):
        async def tokens(self) -> str:  # type: ignore[misc]
            yield "a"

    class Bare(Actor):
        async def tokens(self) -> AsyncIterator:  # type: ignore[type-arg]
            yield "a"

    class None_(Actor):
        max_concurrency = 0

        async def score(self) -> None: ...

    for cls, why in (
        (Empty, "no public `async def`"),
        (Untyped, "parameter text has no annotation"),
        (Yields, "it yields, and its result is"),
        (Bare, "does not say what it yields"),
        (None_, "max_concurrency is 0"),
    ):
        with pytest.raises(Refused, match=why):
            async with living(f"unix://{tmp_path}/e.sock", cls):
                pass
