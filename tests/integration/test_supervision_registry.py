"""The supervised tree with the real registry: epochs, its death, and fencing."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from live_run import LiveRun, until

from relax_rt.interfaces.registry import Member, RegistryApi
from relax_rt.supervision import control
from relax_rt.transport.queue.api import QueueApi
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.rpc import RpcClient, make_hello

pytestmark = pytest.mark.integration
T = TypeVar("T")
LEASE = "[supervision]\nlease_s = 0.6\n"


def ask(run: LiveRun, call: Callable[[Any], Awaitable[T]], slot: str = "registry-0", api: type = RegistryApi) -> T:
    async def go() -> T:
        hello = make_hello(run.paths.run_id, Incarnation("test/0", 0))
        client = RpcClient(f"unix://{run.paths.socket_dir / slot}.sock", hello)
        try:
            return await call(client.bind(api, timeout_s=120))
        finally:
            await client.close()

    return asyncio.run(go())


def members(run: LiveRun) -> dict[str, Member]:
    return {m.who.slot: m for m in ask(run, lambda registry: registry.watch(0, 0.0)).members}


def test_registry_dies_and_the_others_go_on(tmp_path: Path) -> None:
    with LiveRun(tmp_path, "[roles.worker]\ncount = 2", LEASE, system=("registry",)) as run:
        run.ready("registry/0", "worker/0", "worker/1")
        before = {slot: run.pid(slot) for slot in ("worker/0", "worker/1")}
        epoch = run.event("slot_ready", slot="worker/0")["epoch"]
        os.kill(run.pid("registry/0"), signal.SIGKILL)
        os.kill(before["worker/0"], signal.SIGKILL)
        run.event("slot_ready", slot="registry/0", nth=1)
        assert run.event("slot_ready", slot="worker/0", nth=1)["epoch"] > epoch
        assert run.pid("worker/1") == before["worker/1"]
        until("all are members again", lambda: all(m.state == "ready" for m in members(run).values()))
        found = members(run)
        assert found["worker/0"].pid == run.pid("worker/0") and found["worker/1"].pid == before["worker/1"]
        control.stop(run.run_dir, wait_s=120)
        assert run.ends() == 0 and run.left() == []
        exits = [e for e in run.poll() if e["kind"] == "slot_exited"]
        assert exits[-1]["slot"] == "registry/0" and not any(e["diagnosis"]["kind"] == "exception" for e in exits)


def test_exit_is_reported_to_the_registry_before_the_lease_lapses(tmp_path: Path) -> None:
    with LiveRun(tmp_path, "[roles.once]\n[roles.worker]", "[supervision]\nlease_s = 600", system=("registry",)) as run:
        run.ready("once/0", "worker/0")
        until("it is a member", lambda: members(run)["once/0"].state == "ready")
        os.kill(run.pid("once/0"), signal.SIGKILL)
        until("it is known to be gone", lambda: members(run)["once/0"].state == "gone")
        assert "SIGKILL" in members(run)["once/0"].detail


def test_fenced_role_exits_and_says_why(tmp_path: Path) -> None:
    with LiveRun(tmp_path, "[roles.worker]", LEASE, system=("registry",)) as run:
        run.ready("worker/0")
        until("it is a member", lambda: "worker/0" in members(run))
        ask(run, lambda registry: registry.issue_epoch("worker/0"))
        end = run.event("slot_exited", slot="worker/0")["diagnosis"]
        assert end["kind"] == "exception" and "fenced" in end["cause"]
        run.event("slot_ready", slot="worker/0", nth=1)


def test_exit_is_reported_to_the_queue_across_its_own_death(tmp_path: Path) -> None:
    tables = "[supervision.restart]\nbackoff_first_s = 0.05\n[queue]\ncapacity_mib = 16\n"
    with LiveRun(tmp_path, "[roles.holder]\n[roles.worker]", tables, system=("registry", "queue")) as run:
        run.ready("registry/0", "queue/0", "worker/0")
        assert run.event("held")["groups"]
        os.kill(run.pid("queue/0"), signal.SIGSTOP)
        os.kill(run.pid("holder/0"), signal.SIGKILL)
        run.event("slot_exited", slot="holder/0")
        os.kill(run.pid("queue/0"), signal.SIGKILL)
        run.event("slot_ready", slot="queue/0", nth=1)
        # Long before the lease of the group (60 s) lapses.
        until(
            "the group is given back",
            lambda: ask(run, lambda queue: queue.stats(), "queue-0", QueueApi).prompts_returned,
        )
        control.stop(run.run_dir, wait_s=120)
        assert run.ends() == 0 and run.left() == []
