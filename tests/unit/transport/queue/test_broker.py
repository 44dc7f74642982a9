from __future__ import annotations

import asyncio
import errno
import os
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from broker_world import AGENT, World, until, world

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.queue.client import NewSample, QueueClient
from relax_rt.transport.queue.ledger.messages import Failure, LeaseRequest, SampleKey, Ticket, VersionSpan
from relax_rt.transport.queue.ledger.policy import QueueLimits
from relax_rt.transport.rpc.errors import OutOfSpace, Refused, StaleEpoch, Unreachable
from relax_rt.transport.rpc.identity import Incarnation

ENGINE, JUDGE = Incarnation("rollout/0", 1), Incarnation("reward/0", 2)
TRAINER = Incarnation("trainer/0", 3)
V1 = VersionRecord(1, 0, 0)


def sample(ticket: Ticket, member: int, version: int, length: int = 500) -> NewSample:
    tokens = np.full(length, ticket.group * 10 + member, dtype=np.int32)
    return NewSample(SampleKey(ticket.group, member), {"tokens": tokens}, [VersionSpan(0, length, version, version)])


async def generate(engine: QueueClient, version: int = 1, groups: int = 1) -> list[Ticket]:
    tickets = (await engine.admit(version, groups, wait_s=0)).tickets
    for ticket in tickets:
        await engine.put_samples([sample(ticket, member, version) for member in range(ticket.size)])
    return tickets


async def judge_all(judge: QueueClient) -> None:
    while batch := await judge.lease("reward", samples=16, wait_s=0):
        await judge.complete(batch, {one.key: {"reward": float(one["tokens"].sum())} for one in batch.samples})


async def test_prompt_to_freed_memory(tmp_path: Path) -> None:
    async with (
        world(tmp_path) as w,
        w.client(ENGINE) as engine,
        w.client(JUDGE) as judge,
        w.client(TRAINER) as trainer,
    ):
        await engine.warm()
        await trainer.rollback(0, V1)
        tickets = await generate(engine, groups=2)
        assert engine.groups == {}
        two_groups = engine.arena.used_bytes
        await judge_all(judge)
        batch = await trainer.lease("train", groups=2, wait_s=1)
        assert [one.key.group for one in batch.samples] == [ticket.group for ticket in tickets for _ in range(2)]
        for one in batch.samples:
            assert (one["tokens"] == one.key.group * 10 + one.key.member).all()
            assert not one["tokens"].flags.writeable
            assert one["reward"] == 500.0 * (one.key.group * 10 + one.key.member)
            assert one.decode("reward", float) == one["reward"]
            assert "tokens" in one and one.names == ["tokens", "reward"]
        assert list(batch.groups()) == [ticket.group for ticket in tickets]
        await trainer.complete_step(batch, 1, VersionRecord(2, 1, 1))
        assert engine.arena.used_bytes == two_groups > 0
        await trainer.commit(1, "step-1")
        await generate(engine, version=2)
        assert engine.arena.used_bytes == two_groups // 2
        assert w.broker is not None
        stats = await w.broker.stats()
        assert (stats.step, stats.trainer_version, stats.outstanding, stats.bound) == (1, 2, 2, 8.0)
        assert (await w.broker.account())["trained_twice"] == 0
        assert "step 1" in w.broker.summary()


async def test_waiting_calls_are_woken_and_say_what_they_wait_for(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.client(ENGINE) as engine, w.client(TRAINER) as trainer:
        admission = asyncio.create_task(engine.admit(1, 1, wait_s=120))
        taking = asyncio.create_task(trainer.lease("reward", samples=1, wait_s=120))
        assert w.broker is not None
        async with asyncio.timeout(120):
            while len(waiting := (await w.broker.stats()).waiting) < 2:  # noqa: ASYNC110 the broker has no event for it
                await asyncio.sleep(0.01)
        assert "not announced" in waiting["rollout/0"] and "reward" in waiting["trainer/0"]
        await trainer.rollback(0, V1)
        async with asyncio.timeout(120):
            (ticket,) = (await admission).tickets
            await engine.put_samples([sample(ticket, 0, 1)])
            assert len((await taking).samples) == 1
        assert (await w.broker.stats()).waiting == {}
        answer = await engine.admit(7, 1, wait_s=0.01)
        assert not answer.tickets and "version 7" in answer.waiting_on


async def test_lost_requests_and_answers_change_nothing(tmp_path: Path) -> None:
    async with (
        world(tmp_path) as w,
        w.client(ENGINE) as engine,
        w.client(JUDGE) as judge,
        w.client(TRAINER) as trainer,
    ):
        for client in (engine, judge, trainer):
            for name in ("admit", "put_samples", "lease", "complete", "complete_step", "rollback"):
                client.api.lose_answer.append(name)  # type: ignore[attr-defined]
                client.api.lose_request.append(name)  # type: ignore[attr-defined]
        await trainer.rollback(0, V1)
        assert len(await generate(engine, groups=2)) == 2
        await judge_all(judge)
        batch = await trainer.lease("train", groups=2, wait_s=1)
        await trainer.complete_step(batch, 1, VersionRecord(2, 1, 1))
        assert w.broker is not None
        account = await w.broker.account()
        assert account["trained"] == account["samples_issued"] == 4


async def test_nothing_acknowledged_is_lost_when_the_broker_is_killed(tmp_path: Path) -> None:
    async with (
        world(tmp_path) as w,
        w.client(ENGINE) as engine,
        w.client(JUDGE) as judge,
        w.client(TRAINER) as trainer,
    ):
        await trainer.rollback(0, V1)
        tickets = await generate(engine, groups=2)
        work = await judge.lease("reward", samples=3, wait_s=1)
        await w.kill()
        finishing = asyncio.create_task(judge.complete(work, {one.key: {"reward": 1.0} for one in work.samples}))
        await asyncio.sleep(0.05)
        assert not finishing.done()
        await w.start()
        await finishing
        await judge_all(judge)
        batch = await trainer.lease("train", groups=2, wait_s=1)
        assert [one.key.group for one in batch.samples] == [ticket.group for ticket in tickets for _ in range(2)]
        assert ("queue_recovered" in [kind for kind, _ in w.notices]) and w.broker is not None
        assert await w.broker.account() == {**await w.broker.account(), "samples_issued": 4, "leased": 4}


async def test_recovery_from_snapshots(tmp_path: Path) -> None:
    made = World(tmp_path, max_staleness=float("inf"))
    await made.start(segment_bytes=4096)
    async with made.client(ENGINE) as engine, made.client(TRAINER) as trainer, made.client(JUDGE) as judge:
        await trainer.rollback(0, V1)
        for round_ in range(6):
            await generate(engine, groups=3)
            await judge_all(judge)
            batch = await trainer.lease("train", groups=2, wait_s=1)
            await trainer.complete_step(batch, round_ + 1, VersionRecord(round_ + 2, round_ + 1, round_ + 1))
            await trainer.commit(round_ + 1, "x")
        await until(lambda: bool(list((tmp_path / "queue").glob("snapshot-*.bin"))))
        await generate(engine, version=7)
        assert made.broker is not None
        before = await made.broker.account()
        await made.kill()
        broker = await made.start()
        assert await broker.account() == before
        assert broker._ledger.audit() == []
        await broker.close()


async def test_a_new_run_id_means_that_payloads_are_lost(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        async with w.client(ENGINE) as engine, w.client(TRAINER) as trainer:
            await trainer.rollback(0, V1)
            await generate(engine)
        await w.kill()
        broker = await w.start("run-1")
        assert (await broker.account())["ready"] == 2
        await w.kill()
        broker = await w.start("run-2")
        assert (await broker.account())["lost"] == 2
        assert "payloads_lost" in [kind for kind, _ in w.notices]


async def test_leases_lapse_unless_renewed(tmp_path: Path) -> None:
    lost: list[int] = []
    async with world(tmp_path, limits=QueueLimits(lease_s=2.0)) as w, w.client(TRAINER) as trainer:
        await trainer.rollback(0, V1)
        async with w.client(ENGINE, on_lost=lost.extend) as engine:
            (kept,) = (await engine.admit(1, 1, wait_s=0)).tickets
            other = w.client(Incarnation("rollout/1", 9))  # never renews
            (lapsed,) = (await other.admit(1, 1, wait_s=0)).tickets
            broker = w.broker
            assert broker is not None
            await until(lambda: lapsed.group not in broker._ledger.state.groups)
            assert kept.group in w.broker._ledger.state.groups
            await other.put_samples([sample(lapsed, 0, 1)])  # late: no error, and its memory is free again
            assert other.arena.used_bytes == 0
            await other.close()
            await w.broker.release_groups(10_000, [], "")
            w.caller = ENGINE
            await w.broker.release_groups(10_001, [kept.group], "behind the client's back")
            await until(lambda: bool(lost))
            assert lost == [kept.group] and engine.groups == {}


async def test_a_straggler_is_waited_for_until_its_deadline(tmp_path: Path) -> None:
    async with (
        world(tmp_path, max_staleness=0, straggler_wait_s=2.0, prompts_per_step=3) as w,
        w.client(ENGINE) as engine,
        w.client(JUDGE) as judge,
        w.client(TRAINER) as trainer,
    ):
        await trainer.rollback(0, V1)
        await generate(engine, groups=2)
        (slow,) = (await engine.admit(1, 1, wait_s=0)).tickets
        await judge_all(judge)
        assert "over-stale" in (await trainer.lease("train", groups=2, wait_s=0)).waiting_on
        async with asyncio.timeout(120):
            batch = await trainer.lease("train", groups=2, wait_s=120)
        assert slow.group not in {one.key.group for one in batch.samples}
        assert w.broker is not None and (await w.broker.account())["stragglers"] == 1


async def test_what_a_cancelled_call_was_granted_is_given_back(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.client(ENGINE) as engine, w.client(TRAINER) as trainer:
        asking = asyncio.create_task(engine.admit(1, 1, wait_s=3))
        await asyncio.sleep(0.02)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await trainer.rollback(0, V1)
        broker = w.broker
        assert broker is not None
        await until(lambda: broker._ledger.account().get("dropped(returned)") == 2)
        assert engine.groups == {}


@pytest.mark.parametrize("name", ["admit", "lease"])
async def test_a_grant_is_released_when_its_caller_is_cancelled_as_it_arrives(tmp_path: Path, name: str) -> None:
    async with world(tmp_path) as w, w.client(ENGINE) as engine, w.client(TRAINER) as trainer:
        await trainer.rollback(0, V1)
        if name == "lease":
            await generate(engine)
        granted = getattr(engine.api, name)

        async def grant(*args: object) -> object:
            answer = await granted(*args)
            # It runs before the caller, which the result of the call wakes later in this turn of the loop.
            asyncio.get_running_loop().call_soon(asking.cancel)
            return answer

        setattr(engine.api, name, grant)
        call = engine.admit(1, 1, wait_s=0) if name == "admit" else engine.lease("reward", samples=2, wait_s=0)
        asking: asyncio.Task[object] = asyncio.create_task(call)
        await asyncio.wait([asking])
        assert asking.cancelled()
        await asyncio.gather(*engine._background)
        assert w.broker is not None
        state = w.broker._ledger.state
        assert not engine.groups and not engine.leases and not state.leases
        assert not any(group.holder == ENGINE for group in state.groups.values())


async def test_a_copy_of_a_lease_request_that_was_answered_with_nothing_gets_nothing(tmp_path: Path) -> None:
    async with world(tmp_path) as w, w.client(ENGINE) as engine, w.client(JUDGE) as judge, w.client(TRAINER) as trainer:
        await trainer.rollback(0, V1)
        await judge.progress()
        broker = w.broker
        assert broker is not None
        w.caller = JUDGE
        copy = asyncio.create_task(broker.lease(77, "reward", LeaseRequest(2), 60.0))
        await until(lambda: "reward/0" in broker._waits.reasons())
        w.caller = JUDGE
        assert (await broker.lease(77, "reward", LeaseRequest(2), 0.0)).waiting_on
        await generate(engine)
        assert not await copy and not broker._ledger.state.leases


async def test_a_full_arena_waits_for_freed_extents(tmp_path: Path) -> None:
    reasons: list[str] = []
    async with (
        world(tmp_path, max_staleness=8) as w,
        w.client(ENGINE, slab_bytes=12288, capacity_bytes=12288, on_wait=reasons.append, space_wait_s=120) as engine,
        w.client(TRAINER) as trainer,
        w.client(JUDGE) as judge,
    ):
        await trainer.rollback(0, V1)
        await generate(engine, groups=2)
        blocked = asyncio.create_task(generate(engine, groups=2))
        await until(lambda: bool(reasons) and "8320 of 12288 bytes" in reasons[-1])
        assert not blocked.done()
        await judge_all(judge)
        batch = await trainer.lease("train", groups=2, wait_s=1)
        await trainer.complete_step(batch, 1, VersionRecord(2, 1, 1))
        await trainer.commit(1, "x")
        async with asyncio.timeout(120):
            assert len(await blocked) == 2
        assert reasons[-1] == ""
        engine._payload._wait_s = 0.1
        with pytest.raises(OutOfSpace):
            await generate(engine, version=2, groups=1)


async def test_slabs_of_the_dead_are_unlinked_once_no_one_needs_them(tmp_path: Path) -> None:
    async with world(tmp_path, prompts_per_step=1) as w, w.client(JUDGE) as judge, w.client(TRAINER) as trainer:
        await trainer.rollback(0, V1)
        (w.shm / "weights-not-a-number.slab").write_bytes(b"x")
        async with w.client(ENGINE) as engine:
            await generate(engine)
        idle = w.client(Incarnation("rollout/1", 5))
        await idle.warm()
        assert (w.shm / "rollout-1-5-1.slab").exists()
        assert w.broker is not None
        for seq, who in enumerate([ENGINE, idle.who]):
            w.caller = AGENT
            await w.broker.process_exited(seq + 1, who, "killed")
        await until(lambda: not (w.shm / "rollout-1-5-1.slab").exists())
        assert (w.shm / "rollout-0-1-1.slab").exists()
        await judge_all(judge)
        batch = await trainer.lease("train", groups=1, wait_s=1)
        assert (batch.samples[0]["tokens"] == batch.samples[0].key.group * 10).all()
        await trainer.complete_step(batch, 1, VersionRecord(2, 1, 1))
        await trainer.commit(1, "x")
        await until(lambda: not (w.shm / "rollout-0-1-1.slab").exists())
        assert (w.shm / "weights-not-a-number.slab").exists()
        with pytest.raises(StaleEpoch):
            await w.client(ENGINE).admit(1, 1, wait_s=0)


async def test_failures_and_abandoned_work(tmp_path: Path) -> None:
    async with (
        world(tmp_path) as w,
        w.client(ENGINE) as engine,
        w.client(JUDGE) as judge,
        w.client(TRAINER) as trainer,
    ):
        await trainer.rollback(0, V1)
        (ticket,) = await generate(engine)
        batch = await judge.lease("reward", samples=8, wait_s=1)
        await judge.release(batch, "stopping")
        batch = await judge.lease("reward", samples=8, wait_s=1)
        bad, good = (one.key for one in batch.samples)
        await judge.complete(batch, {good: {"reward": 1.0}}, [Failure(bad, "timeout")])
        again = await generate(engine)
        assert (again[0].prompt, again[0].attempt) == (ticket.prompt, 1)
        with pytest.raises(Refused):
            await trainer.lease("nonsense", samples=1, wait_s=0)


async def test_the_last_losses_of_a_cause_are_reported_on_request(tmp_path: Path) -> None:
    async with (
        world(tmp_path, failures_per_prompt=100) as w,
        w.client(ENGINE) as engine,
        w.client(JUDGE) as judge,
        w.client(TRAINER) as trainer,
    ):
        await trainer.rollback(0, V1)
        for _ in range(3):
            await generate(engine)
            batch = await judge.lease("reward", samples=8, wait_s=1)
            await judge.complete(batch, {}, [Failure(one.key, "no server") for one in batch.samples])
        assert w.broker is not None

        def counts() -> list[int]:
            return [fields["members"] for kind, fields in w.notices if kind == "members_lost"]

        assert counts() == [1, 2, 4]
        w.broker.report_losses(older_s=600.0)
        assert counts() == [1, 2, 4], "reported a moment ago"
        w.broker.report_losses()
        w.broker.report_losses()
        assert counts() == [1, 2, 4, 6] == [*counts()[:-1], (await trainer.progress()).losses[0].members]
        live = msgspec.msgpack.decode(w.broker._ledger.snapshot())
        await w.kill()
        replayed = msgspec.msgpack.decode((await w.start())._ledger.snapshot())
        assert replayed == live, "its journal has the reports too"


async def test_a_broker_that_failed_reports_no_losses(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        assert w.broker is not None
        w.broker._fail(OSError("no disk"))
        with pytest.raises(Unreachable, match="no disk"):
            w.broker.report_losses()


async def test_what_is_flushed_is_on_disk_also_while_the_journal_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fdatasync

    async with world(tmp_path, fsync_every_s=0.05) as w, w.client(TRAINER) as trainer:
        assert w.broker is not None
        journal = w.broker._journal

        def slow(fd: int) -> None:
            if Path(f"/proc/self/fd/{fd}").readlink().name != f"segment-{journal._begins}.log":
                time.sleep(0.4)
            real(fd)

        monkeypatch.setattr(os, "fdatasync", slow)
        await trainer.rollback(0, V1)
        journal._segment_bytes = 1
        await until(lambda: journal._rotating)
        assert not journal.snapshots
        await trainer.flush()
        # What was acknowledged may lie in the segment before the present one, which must be on disk as well.
        assert journal.snapshots == 1


async def test_a_journal_that_cannot_be_forced_to_disk_stops_the_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path, fsync_every_s=600.0) as w, w.client(TRAINER, patience_s=0.2) as trainer:
        await trainer.rollback(0, V1)
        assert w.broker is not None
        running = asyncio.create_task(w.broker.run())

        def broken() -> None:
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patched:
            patched.setattr(w.broker._journal, "sync", broken)
            with pytest.raises(Unreachable, match="Input/output error"):
                await trainer.flush()
            with pytest.raises(OSError, match="Input/output error"):
                async with asyncio.timeout(120):
                    await running


async def test_a_full_disk_stops_the_broker_before_it_answers(tmp_path: Path) -> None:
    async with (
        world(tmp_path, fsync_every_s=600.0) as w,
        w.client(ENGINE) as engine,
        w.client(TRAINER) as trainer,
    ):
        await trainer.rollback(0, V1)
        assert w.broker is not None
        running = asyncio.create_task(w.broker.run())
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, w.broker._journal._fd)
        os.close(full)
        asking = asyncio.create_task(engine.admit(1, 1, wait_s=1))
        with pytest.raises(OutOfSpace, match="No space left"):
            async with asyncio.timeout(120):
                await running
        await w.broker.close()
        w.broker = None
        assert not asking.done()
        await w.start()
        async with asyncio.timeout(120):
            assert len((await asking).tickets) == 1
        assert w.broker is not None
        assert (await w.broker.account())["samples_issued"] == 2


async def test_a_dead_broker_is_reported_after_the_clients_patience(tmp_path: Path) -> None:
    reasons: list[str] = []
    async with world(tmp_path) as w, w.client(ENGINE, patience_s=0.2, on_wait=reasons.append) as engine:
        await w.kill()
        with pytest.raises(Unreachable):
            await engine.admit(1, 1, wait_s=0)
        assert "no broker" in reasons[0]


async def test_the_window_keeps_old_calls_recognisable(tmp_path: Path) -> None:
    async with world(tmp_path, max_staleness=1000) as w, w.client(ENGINE) as engine, w.client(TRAINER) as trainer:
        await trainer.rollback(0, V1)
        slow = asyncio.create_task(engine.lease("reward", samples=1, wait_s=0.5))
        await asyncio.sleep(0.01)
        async with asyncio.timeout(120):
            for _ in range(200):
                await engine.admit(1, 1, wait_s=0)
            await slow
        assert len(engine.groups) == 200


async def test_a_producer_learns_which_items_are_retired_and_passes_over_them(tmp_path: Path) -> None:
    async with (
        world(tmp_path, item_timeouts=1, failures_per_prompt=100) as w,
        w.client(ENGINE) as engine,
        w.client(JUDGE) as judge,
        w.client(TRAINER) as trainer,
    ):
        await trainer.rollback(0, V1)
        bad, _ = await generate(engine, groups=2)
        assert engine.retired == set()
        for _ in range(2):
            batch = await judge.lease("reward", samples=16, wait_s=0)
            keys = [one.key for one in batch.samples]
            late = [Failure(key, "too late", True, "q7", "12 + 1") for key in keys if key.group == bad.group]
            scored = {key: {"reward": 1.0} for key in keys if key.group != bad.group}
            await judge.complete(batch, scored, late)
            if len(keys) > len(late):
                for ticket in (await engine.admit(1, 1, wait_s=0)).tickets:
                    await engine.put_samples([sample(ticket, member, 1) for member in ticket.wanted()])
        (ticket,) = (await engine.admit(1, 1, wait_s=0)).tickets
        assert engine.retired == {"q7"}
        await engine.skip_groups([ticket.group])
        assert not engine.groups and w.broker is not None
        report = await trainer.progress()
        assert [(one.item, one.about, one.timeouts) for one in report.retired] == [("q7", "12 + 1", 2)]
        await w.broker.reinstate(["q7", "q8"])
        await engine.admit(1, 1, wait_s=0)
        assert engine.retired == set()
