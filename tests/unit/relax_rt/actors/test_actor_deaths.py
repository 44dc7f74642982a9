"""What callers see when an actor dies, stops, comes back, or is one of several."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import signal
from collections import Counter

import pytest
from actor_far_end import Judge, Registry, directory, fails, living, spawn
from waiting import eventually

from relax_rt.actors import Actor
from relax_rt.interfaces.registry import Changes
from relax_rt.transport.rpc.errors import ActorDied, ShuttingDown, Unreachable
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.rpc import CurveKeys


@pytest.mark.parametrize("carrier", ["unix", "curve"])
async def test_killed_in_mid_call(carrier: str, tmp_path: pathlib.Path) -> None:
    """The idempotent call is answered by the successor; the other learns how the incarnation ended."""
    keys = CurveKeys.make() if carrier == "curve" else None
    registry = Registry()
    who = registry.enter("judge/0", "")
    address = f"unix://{tmp_path}/j.sock" if carrier == "unix" else "tcp://127.0.0.1:0"
    first, real = await spawn(address, who.epoch, keys=keys)
    second = None
    try:
        async with directory({"judge/0": real}, registry, keys) as known:
            judge = known.actor("judge/0", Judge)
            again, once = asyncio.create_task(judge.hold()), asyncio.create_task(judge.hold_once())
            await judge.pid()
            first.send_signal(signal.SIGKILL)
            await first.wait()
            await asyncio.sleep(0.05)
            # The news of its end comes after the loss of the connection: it is waited for.
            registry.core.process_exited(who, "signal: killed by SIGKILL")
            died = await fails(once, ActorDied)
            assert (died.who, died.diagnosis) == (str(who), "signal: killed by SIGKILL")
            assert f"{who} ended: signal: killed by SIGKILL" in str(died) and "not marked idempotent" in str(died)
            next_one = registry.enter("judge/0", "")
            second, _ = await spawn(real, next_one.epoch, released=True, keys=keys)
            assert await again == second.pid
            assert await judge.pid() == second.pid
    finally:
        for process in (first, second):
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()


async def test_the_end_is_told_also_when_the_slot_is_filled_again(tmp_path: pathlib.Path) -> None:
    registry = Registry()
    who = registry.enter("judge/0", "")
    async with directory({}, registry) as known:
        registry.core.process_exited(who, "exception: KeyError")
        registry.enter("judge/0", "")
        assert await known.end_of(who, 2.0) == "exception: KeyError"
        third = registry.enter("judge/0", "")
        assert await known.end_of(third, 0.05) == ""


async def test_without_news_of_the_end_the_caller_waits_no_longer_than_its_deadline(tmp_path: pathlib.Path) -> None:
    registry = Registry()
    who = registry.enter("judge/0", "")
    process, real = await spawn(f"unix://{tmp_path}/j.sock", who.epoch)
    async with directory({"judge/0": real}, registry) as known:
        judge = known.actor("judge/0", Judge, timeout_s=3.0)
        once = asyncio.create_task(judge.hold_once())
        await judge.pid()
        process.kill()
        await process.wait()
        died = await fails(once, ActorDied)
        assert died.diagnosis == "" and "how judge/0#1 ended is not known yet" in str(died)


async def test_a_stream_that_began_is_not_taken_up_again(tmp_path: pathlib.Path) -> None:
    registry = Registry()
    who = registry.enter("judge/0", "")
    process, real = await spawn(f"unix://{tmp_path}/j.sock", who.epoch)
    second = None
    try:
        async with directory({"judge/0": real}, registry) as known:
            judge = known.actor("judge/0", Judge)
            begun = judge.pids()
            assert await anext(begun) == process.pid
            process.kill()
            await process.wait()
            registry.core.process_exited(who, "signal: SIGKILL")
            died = await fails(anext(begun), ActorDied)
            assert "after 1 items" in str(died) and died.diagnosis == "signal: SIGKILL"
            # One that has given nothing yet is opened again.
            fresh = asyncio.create_task(anext(judge.pids()))
            second, _ = await spawn(real, who.epoch + 1)
            assert await fresh == second.pid
    finally:
        if second is not None:
            second.kill()
            await second.wait()


async def test_a_role_is_called_where_least_is_outstanding(tmp_path: pathlib.Path) -> None:
    registry = Registry()
    async with living(f"unix://{tmp_path}/0.sock") as (a, one), living(f"unix://{tmp_path}/1.sock") as (b, two):
        addresses = {"judge/0": one, "judge/1": two}
        async with directory(addresses, registry) as known:
            judge = known.actor("judge", Judge)
            early = asyncio.create_task(judge.hold())
            await asyncio.sleep(0.05)
            assert not early.done()
            for slot, address in addresses.items():
                registry.enter(slot, address)
            await eventually(lambda: a.working + b.working == 1)
            calls = [asyncio.create_task(judge.hold()) for _ in range(9)]
            await eventually(lambda: (a.working, b.working) == (5, 5))
            assert len(await judge.all()) == 2
            idle, busy = judge.count(1000), judge.count(1000)
            await anext(idle), await anext(busy)
            assert (len(a.made) > 0, len(b.made) > 0) == (True, True)
            del idle, busy
            for actor in (a, b):
                actor.release.set()
            await asyncio.gather(early, *calls)
            assert known.target("judge/0").outstanding == known.target("judge/1").outstanding == 0


async def test_members_that_are_not_ready_get_nothing(tmp_path: pathlib.Path) -> None:
    registry = Registry()
    async with (
        living(f"unix://{tmp_path}/0.sock") as (_, one),
        directory({"judge/0": one, "judge/1": f"unix://{tmp_path}/none.sock"}, registry) as known,
    ):
        registry.enter("judge/0", one, "starting")
        registry.enter("judge/1", "", "draining")
        judge = known.actor("judge", Judge, timeout_s=2.0)
        with pytest.raises(Unreachable, match=r"no member is ready: judge/0#1 is starting, judge/1#2 is draining"):
            await judge.pid()
        with pytest.raises(Unreachable, match=r"no member is ready: it has no members"):
            await known.actor("judges", Judge, timeout_s=1.0).all()
        registry.enter("judge/0", one)
        # One that says it is ready and cannot be reached is passed over.
        registry.enter("judge/1", "")
        patient = judge.with_options(timeout_s=60.0)
        assert len({await patient.pid() for _ in range(4)}) == 1


async def test_one_of_two_is_killed_and_the_other_takes_over(tmp_path: pathlib.Path) -> None:
    registry = Registry()
    processes = {}
    addresses = {}
    for n in (0, 1):
        who = registry.enter(f"judge/{n}", "")
        processes[n], addresses[who.slot] = await spawn(f"unix://{tmp_path}/{n}.sock", who.epoch, released=n == 1)
    try:
        async with directory(addresses, registry) as known:
            judge = known.actor("judge", Judge)
            spread = Counter([await judge.pid() for _ in range(10)])
            assert set(spread.values()) == {5}
            held = [asyncio.create_task(judge.hold()) for _ in range(6)]
            await asyncio.sleep(0.05)
            processes[0].kill()
            # Its entry in the registry still says ready: the calls go over all the same.
            assert set(await asyncio.gather(*held)) == {processes[1].pid}
            assert {await judge.pid() for _ in range(5)} == {processes[1].pid}
    finally:
        for process in processes.values():
            if process.returncode is None:
                process.kill()
            await process.wait()


async def test_one_that_stops_finishes_what_it_began_and_passes_on_the_rest(tmp_path: pathlib.Path) -> None:
    """Not even calls that must not be repeated fail when an actor stops in order."""
    registry = Registry()
    async with (
        living(f"unix://{tmp_path}/0.sock") as (a, one),
        living(f"unix://{tmp_path}/1.sock") as (b, two),
        directory({"judge/0": one, "judge/1": two}, registry) as known,
    ):
        registry.enter("judge/0", one)
        judge = known.actor("judge", Judge)
        calls = [asyncio.create_task(judge.hold_once()) for _ in range(12)]
        await eventually(lambda: a.working == 8)
        registry.enter("judge/1", two)
        a.ctx.stopping.set()
        await eventually(lambda: a._mailbox._closed)
        a.release.set()
        b.release.set()
        assert len(await asyncio.gather(*calls)) == 12
        assert (a.peak, b.peak > 0) == (8, True)


async def test_another_actor_that_stops_is_not_taken_for_this_one(tmp_path: pathlib.Path) -> None:
    """A call that had begun is not sent again because something that it called was stopping."""

    class Middle(Actor):
        async def setup(self) -> None:
            self.begun = 0

        async def ask(self) -> None:
            self.begun += 1
            raise ShuttingDown("judge/0#1", why="it is stopping")

    async with (
        living(f"unix://{tmp_path}/m.sock", Middle, "middle/0") as (actor, real),
        directory({"middle/0": real}) as known,
    ):
        with pytest.raises(Unreachable, match="it is stopping"):
            await known.actor("middle/0", Middle).ask()
        assert actor.begun == 1


class Pool:
    """Members of a role in this process, whose connections end under whatever they are asked to hold."""

    def __init__(self, folder: pathlib.Path, registry: Registry, members: int) -> None:
        self.registry, self.deadly = registry, True
        self.whos = [registry.enter(f"judge/{n}", "") for n in range(members)]
        self.addresses = {who.slot: f"unix://{folder}/{who.slot.replace('/', '-')}.sock" for who in self.whos}
        self.asked: list[str] = []

    async def enter(self, stack: contextlib.AsyncExitStack) -> None:
        for who in self.whos:
            actor, _ = await stack.enter_async_context(living(self.addresses[who.slot], slot=who.slot, epoch=who.epoch))
            task = asyncio.create_task(self._watch(actor, who))
            stack.callback(task.cancel)

    async def _watch(self, actor: Judge, who: Incarnation) -> None:
        while True:
            await eventually(lambda: actor.working)
            self.asked.append(str(who))
            if self.deadly:
                self.registry.core.process_exited(who, "signal: killed by SIGSEGV")
            for connection in list(actor.ctx.server.connections):  # type: ignore[attr-defined]
                connection.channel.abort()
            await eventually(lambda: not actor.working)


@pytest.mark.parametrize("kind", ["call", "stream"])
async def test_what_kills_its_actor_does_not_go_through_the_pool(kind: str, tmp_path: pathlib.Path) -> None:
    pool = Pool(tmp_path, Registry(), 6)
    async with contextlib.AsyncExitStack() as stack:
        await pool.enter(stack)
        known = await stack.enter_async_context(directory(pool.addresses, pool.registry))
        judge = known.actor("judge", Judge, timeout_s=60.0)
        died = await fails(judge.hold() if kind == "call" else anext(judge.held()), ActorDied)
        assert len(pool.asked) == 3 and died.who == pool.asked[-1]
        assert died.diagnosis == "signal: killed by SIGSEGV" and all(who in str(died) for who in pool.asked)
        assert "the request itself may be what kills them" in str(died)
        # The others are there for everyone else.
        assert await judge.pid()


@pytest.mark.parametrize("kind", ["call", "stream"])
async def test_what_kills_its_actor_is_not_sent_to_each_incarnation(kind: str, tmp_path: pathlib.Path) -> None:
    registry = Registry()
    address = f"unix://{tmp_path}/j.sock"
    async with directory({"judge/0": address}, registry) as known:
        judge = known.actor("judge/0", Judge, timeout_s=60.0)
        call = asyncio.ensure_future(judge.hold() if kind == "call" else anext(judge.held()))
        asked = 0
        while not call.done() and asked < 5:
            who = registry.enter("judge/0", address)
            async with living(address, epoch=who.epoch) as (actor, _):
                await eventually(lambda actor=actor: actor.working or call.done())
                asked += actor.working
            registry.core.process_exited(who, "signal: killed by SIGSEGV")
        died = await fails(call, ActorDied)
        assert asked == 3 and died.diagnosis == "signal: killed by SIGSEGV"


async def test_connections_lost_to_members_that_live_are_no_deaths(tmp_path: pathlib.Path) -> None:
    pool = Pool(tmp_path, Registry(), 4)
    pool.deadly = False
    async with contextlib.AsyncExitStack() as stack:
        await pool.enter(stack)
        known = await stack.enter_async_context(directory(pool.addresses, pool.registry))
        judge = known.actor("judge", Judge, timeout_s=30.0)
        call = asyncio.create_task(judge.hold())
        # Past the bound: that they live is told by the registry.
        await eventually(lambda: len(set(pool.asked)) == 4)
        call.cancel()


async def test_following_goes_on_after_whatever_goes_wrong(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that nobody foresaw, and a cancelled task, cost news for a while and not for good."""
    monkeypatch.setattr("relax_rt.interfaces.members.RETRY_S", 0.05)

    class Faulty(Registry):
        wrong: Exception | None = ValueError("half an answer")

        async def watch(self, since: int, wait_s: float) -> Changes:
            if self.wrong is not None:
                raise self.wrong
            return await super().watch(since, wait_s)

    registry = Faulty()
    async with living(f"unix://{tmp_path}/0.sock") as (_, one), directory({"judge/0": one}, registry) as known:
        registry.enter("judge/0", one)
        judge = known.actor("judge", Judge, timeout_s=2.0)
        with pytest.raises(Unreachable, match=r"the registry is away: following failed: ValueError: half an answer"):
            await judge.pid()
        registry.wrong = None
        patient = judge.with_options(timeout_s=60.0)
        assert await patient.pid()
        assert not known.members("them").away
        following = known._following
        assert following is not None
        following.cancel()
        await asyncio.wait({following})
        assert known._members is not None and "the members are not watched" in known._members.away
        who = registry.enter("judge/0", one)
        await patient.pid()
        await eventually(lambda: known.members("them").lives(who) and not known.members("them").away)
