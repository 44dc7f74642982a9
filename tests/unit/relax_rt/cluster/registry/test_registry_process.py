"""The registry as a process that is killed and stopped while others use it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from relax_rt.interfaces.members import watch_members
from relax_rt.interfaces.registry import RegistryApi
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import ActorDied, DeadlineExceeded, Refused, StaleEpoch, Unreachable
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.rpc import RpcClient, make_hello

RUN_ID = "0123abcd"
FAR_END = Path(__file__).with_name("registry_far_end.py")
ENOUGH_S = 120.0


class Process:
    """The registry's process, started anew as often as asked."""

    def __init__(self, folder: Path) -> None:
        self.address = f"unix://{folder / 'registry.sock'}"
        self.path = folder / "registry.sqlite"
        self.child: asyncio.subprocess.Process | None = None

    async def start(self, run_id: str = RUN_ID) -> None:
        self.child = await asyncio.create_subprocess_exec(
            sys.executable, str(FAR_END), self.address, str(self.path), run_id, stdout=asyncio.subprocess.PIPE
        )
        assert self.child.stdout is not None
        async with asyncio.timeout(ENOUGH_S):
            assert await self.child.stdout.readline() == b"ready\n"

    async def kill(self) -> None:
        assert self.child is not None
        if self.child.returncode is None:
            self.child.kill()
        await self.child.communicate()

    def signal(self, number: signal.Signals) -> None:
        assert self.child is not None
        os.kill(self.child.pid, number)


@pytest.fixture
def folder() -> Iterator[Path]:
    # A socket's path is limited to 107 bytes; pytest's own folders can be longer.
    path = Path(tempfile.mkdtemp(prefix="rx"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
async def process(folder: Path) -> AsyncIterator[Process]:
    process = Process(folder)
    await process.start()
    yield process
    await process.kill()


@asynccontextmanager
async def connected(
    process: Process, slot: str, epoch: int, timeout_s: float = ENOUGH_S, run_id: str = RUN_ID
) -> AsyncIterator[RegistryApi]:
    client = RpcClient(process.address, make_hello(run_id, Incarnation(slot, epoch)))
    try:
        yield client.bind(RegistryApi, timeout_s=timeout_s)
    finally:
        await client.close()


async def test_what_was_acknowledged_survives_kill_9_and_numbers_only_grow(process: Process) -> None:
    epochs: list[int] = []
    numbers: list[int] = []
    commits: list[VersionRecord] = []

    async def agent() -> None:
        async with connected(process, "agent/0", 0) as registry:
            while True:
                epochs.append(await registry.issue_epoch("rollout/0"))

    async def trainer(epoch: int) -> None:
        async with connected(process, "trainer/0", epoch) as registry:
            while True:
                try:
                    version = await registry.issue_version()
                except (ActorDied, Unreachable):
                    continue
                numbers.append(version)
                record = VersionRecord(version, commits[-1].version if commits else 0, len(commits) + 1, f"{version:x}")
                assert await registry.commit_version(record) == record
                commits.append(record)

    async with connected(process, "agent/0", 0) as registry:
        tasks = [asyncio.create_task(agent()), asyncio.create_task(trainer(await registry.issue_epoch("trainer/0")))]
        for _ in range(4):
            goal = len(epochs) + 20, len(commits) + 10
            async with asyncio.timeout(ENOUGH_S):
                while (len(epochs), len(commits)) < goal or len(commits) < goal[1]:
                    assert not any(task.done() for task in tasks), [t.exception() for t in tasks if t.done()]
                    await asyncio.sleep(0.01)
            await process.kill()
            await process.start()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        known = await registry.versions()
        assert await registry.issue_epoch("rollout/0") > epochs[-1]
    assert epochs == sorted(set(epochs))
    assert numbers == sorted(set(numbers))
    # The last commit may have been carried out though its answer was lost.
    assert known[: len(commits)] == commits
    assert len(known) <= len(commits) + 1


async def test_fencing_survives_the_registry(process: Process) -> None:
    async with connected(process, "agent/0", 0) as agent:
        old = await agent.issue_epoch("trainer/0")
        async with connected(process, "trainer/0", old) as zombie:
            await zombie.announce(1, "", 60.0)
            version = await zombie.issue_version()
            new = await agent.issue_epoch("trainer/0")
            await process.kill()
            await process.start()
            record = VersionRecord(version, 0, 1, "d")
            for call in (zombie.commit_version(record), zombie.renew("ready", 1, "", 0), zombie.announce(1, "", 1.0)):
                with pytest.raises(StaleEpoch):
                    await call
            with pytest.raises(StaleEpoch):
                await zombie.issue_version()
        async with connected(process, "trainer/0", new) as trainer:
            with pytest.raises(Refused, match="issued"):
                await trainer.commit_version(record)
            assert await trainer.issue_version() > version


async def test_a_stopped_registry_lets_nothing_lapse_that_renewed_meanwhile(process: Process) -> None:
    ttl_s = 1.5
    async with connected(process, "agent/0", 0) as agent:
        epoch = await agent.issue_epoch("rollout/0")
        async with connected(process, "rollout/0", epoch) as member:
            await member.announce(1, "", ttl_s)
            await member.renew("ready", 1, "", 0)
            before = await agent.watch(0, 0.0)
            process.signal(signal.SIGSTOP)
            renewal = asyncio.create_task(member.renew("ready", 2, "", 0))
            await asyncio.sleep(2 * ttl_s)
            process.signal(signal.SIGCONT)
            await renewal
            after = await agent.watch(before.revision, 0.0)
            assert after.members == []
        # Nobody renews any more: now it lapses.
        lapsed = await agent.watch(before.revision, ENOUGH_S)
        assert [m.state for m in lapsed.members] == ["lapsed"]


async def test_discovery_follows_members_through_the_registrys_death(process: Process) -> None:
    async with connected(process, "agent/0", 0, timeout_s=2.0) as agent, watch_members(agent, "rollout") as rollouts:
        epoch = await agent.issue_epoch("rollout/0")
        await agent.issue_epoch("reward/0")
        async with connected(process, "rollout/0", epoch) as member:
            await member.announce(7, "unix:///x", 60.0)
            await member.renew("ready", 1, "", 3)
            await rollouts.until(lambda m: len(m.ready) == 1, "a rollout", timeout_s=ENOUGH_S)
            await process.kill()
            await rollouts.until(lambda m: len(m.ready) == 1, "a rollout", timeout_s=ENOUGH_S)
            with pytest.raises(DeadlineExceeded, match="rollout/0#"):
                await rollouts.until(lambda m: len(m.ready) == 2, "two rollouts", timeout_s=0.05)
            await process.start()
            await member.renew("ready", 2, "", 4)
            await rollouts.until(lambda m: m.ready[0].policy_version == 4, "version 4", timeout_s=ENOUGH_S)
            assert set(rollouts.by_slot) == {"rollout/0"}
            await member.leave("finished")
        async with asyncio.timeout(ENOUGH_S):
            async for members in rollouts.changes():
                if [m.state for m in members] == ["gone"]:
                    break


async def test_another_start_of_the_run_keeps_numbers_and_ends_the_old_members(process: Process) -> None:
    async with connected(process, "agent/0", 0) as agent:
        epoch = await agent.issue_epoch("trainer/0")
        async with connected(process, "trainer/0", epoch) as trainer:
            await trainer.announce(1, "unix:///old", 60.0)
            record = VersionRecord(await trainer.issue_version(), 0, 1, "d")
            await trainer.commit_version(record)
    await process.kill()
    await process.start("fedcba98")
    async with connected(process, "agent/0", 0, run_id="fedcba98") as agent:
        found = await agent.watch(0, 0.0)
        assert [(m.who.slot, m.state) for m in found.members] == [("trainer/0", "gone")]
        assert found.committed == record
        assert await agent.issue_epoch("trainer/0") > epoch


async def test_a_watch_waits_for_the_next_change(process: Process) -> None:
    async with connected(process, "agent/0", 0) as agent:
        await agent.issue_epoch("a/0")
        first = await agent.watch(0, 0.0)
        quiet = await agent.watch(first.revision, 0.05)
        assert (quiet.members, quiet.revision, quiet.snapshot) == ([], first.revision, False)
        waiting = asyncio.create_task(agent.watch(first.revision, ENOUGH_S))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await agent.issue_epoch("b/0")
        assert [m.who.slot for m in (await waiting).members] == ["b/0"]
