"""Actors in a real run, called by roles and by a program that is none."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from actor_toys import Asker, Reward
from live_run import TOYS, LiveRun

import relax_rt.cluster.discovery
from relax_rt.actors import ActorDied
from relax_rt.supervision import control
from relax_rt.supervision.control import NoRun
from relax_rt.transport.rpc.errors import Refused, Unreachable

pytestmark = pytest.mark.integration

FILE = TOYS / "actor_toys.py"
ROLES = f"""
[roles.reward2]
target = "{FILE}:Reward"
count = 2
[roles.asker]
target = "{FILE}:Asker"
"""
TABLES = "[supervision.restart]\nbackoff_first_s = 0.05\n"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[LiveRun]:
    with LiveRun(tmp_path, ROLES, TABLES, system=("registry",)) as live:
        yield live.ready("reward2/0", "reward2/1", "asker/0")


async def pid_of(run: LiveRun, slot: str) -> int:
    return await asyncio.to_thread(run.pid, slot)


async def test_calls_from_a_program_and_from_a_role(run: LiveRun) -> None:
    async with relax_rt.cluster.discovery.connect(run.run_dir) as discovery:
        reward = discovery.actor("reward2", Reward)
        assert await reward.score("four") == 2.0
        pids = {await reward.pid() for _ in range(8)}
        assert pids == {await pid_of(run, "reward2/0"), await pid_of(run, "reward2/1")}
        assert {await one.pid() for one in await reward.all()} == pids
        assert [t async for t in reward.tokens("a b c")] == ["a", "b", "c"]
        asker = discovery.actor("asker/0", Asker)
        assert await asker.ask("sixsix") == 3.0
        assert await asker.ask_slot("reward2/1") == await pid_of(run, "reward2/1")
        async with discovery.watch("reward2") as members:
            await members.until(lambda m: len(m.ready) == 2, "both", timeout_s=120)
            assert set(members.by_slot) == {"reward2/0", "reward2/1"}
    await asyncio.to_thread(control.stop, run.run_dir, wait_s=120)
    assert run.ends() == 0 and run.left() == []
    with pytest.raises(NoRun, match="no live run in"):
        async with relax_rt.cluster.discovery.connect(run.run_dir):
            pass


async def test_killed_in_mid_call(run: LiveRun) -> None:
    """Idempotent: the caller sees nothing. Not so: it learns by what its actor died."""
    async with relax_rt.cluster.discovery.connect(run.run_dir) as discovery:
        reward = discovery.actor("reward2/0", Reward)
        pid, epoch = await reward.pid(), run.event("slot_ready", slot="reward2/0")["epoch"]
        again, once = asyncio.create_task(reward.ponder(1.0)), asyncio.create_task(reward.spend())
        await asyncio.to_thread(run.event, "spending")
        await asyncio.to_thread(run.event, "pondering")
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ActorDied, match=r"SIGKILL.*may have been carried out") as found:
            await once
        assert found.value.who == f"reward2/0#{epoch}" and "SIGKILL" in found.value.diagnosis
        successor = await again
        assert successor != pid
        # The reference follows.
        assert await reward.pid() == successor == await pid_of(run, "reward2/0")


async def test_a_call_by_role_goes_to_another_member(run: LiveRun) -> None:
    async with relax_rt.cluster.discovery.connect(run.run_dir) as discovery:
        slot, role = discovery.actor("reward2/0", Reward), discovery.actor("reward2", Reward)
        pid = await slot.pid()
        calls = [asyncio.create_task(role.ponder(1.0)) for _ in range(4)]
        await asyncio.to_thread(run.event, "pondering", pid=pid)
        os.kill(pid, signal.SIGKILL)
        assert pid not in await asyncio.gather(*calls)


async def test_cancellation_and_early_end_reach_the_other_side(run: LiveRun) -> None:
    async with relax_rt.cluster.discovery.connect(run.run_dir) as discovery:
        reward = discovery.actor("reward2/1", Reward)
        call = asyncio.create_task(reward.ponder(50.0))
        await asyncio.to_thread(run.event, "pondering")
        call.cancel()
        await asyncio.to_thread(run.event, "ponder_cancelled")
        async for token in reward.with_options(window=4).tokens("one two three " * 100):
            assert token == "one"
            break
        ended = await asyncio.to_thread(run.event, "tokens_ended")
        assert ended["made"] <= 1 + 4


async def test_a_restart_by_hand_fails_no_call(run: LiveRun) -> None:
    async with relax_rt.cluster.discovery.connect(run.run_dir) as discovery:
        reward = discovery.actor("reward2", Reward)
        failed = []
        done = 0
        over = asyncio.Event()

        async def caller() -> None:
            nonlocal done
            while not over.is_set():
                try:
                    await reward.score("text")
                    done += 1
                except Exception as error:  # noqa: BLE001
                    failed.append(error)
                await asyncio.sleep(0.001)

        callers = [asyncio.create_task(caller()) for _ in range(4)]
        for slot in ("reward2/0", "reward2/1"):
            await asyncio.to_thread(control.restart, run.run_dir, slot)
            await asyncio.to_thread(run.event, "slot_ready", 1, slot=slot)
        over.set()
        await asyncio.gather(*callers)
        assert not failed and done > 0


async def test_the_registry_dies_and_calls_go_on(run: LiveRun) -> None:
    async with relax_rt.cluster.discovery.connect(run.run_dir) as discovery:
        reward = discovery.actor("reward2", Reward)
        await reward.pid()
        os.kill(await pid_of(run, "registry/0"), signal.SIGKILL)
        assert await reward.score("four") == 2.0
        await asyncio.to_thread(run.event, "slot_ready", 1, slot="registry/0")
        await discovery.known().until(lambda m: not m.away and len(m.ready_of("reward2")) == 2, "back", timeout_s=120)
        assert await reward.score("four") == 2.0


async def test_what_cannot_be_connected_to(tmp_path: Path) -> None:
    with pytest.raises(NoRun, match="no run in"):
        async with relax_rt.cluster.discovery.connect(tmp_path):
            pass
    with pytest.raises(Refused, match="run_id is missing"):
        async with relax_rt.cluster.discovery.connect("tcp://127.0.0.1:1"):
            pass
    with pytest.raises(Unreachable, match=r"connecting to run abc in tcp://127\.0\.0\.1:1"):
        async with relax_rt.cluster.discovery.connect("tcp://127.0.0.1:1", run_id="abc", timeout_s=0.3):
            pass
