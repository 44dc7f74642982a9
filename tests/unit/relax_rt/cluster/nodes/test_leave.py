"""A node says that nothing of the run lives on it only when that is so."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from relax_rt.cluster.join import Joiner, JoinRequest
from relax_rt.cluster.nodes.agent import EXIT_FAULT, NodeAgent
from relax_rt.cluster.nodes.api import JoinReply, NodeMembership
from relax_rt.cluster.nodes.join_key import make_key, read_key
from relax_rt.cluster.nodes.membership import JoinRecord, MembershipEnd
from relax_rt.config.schema import RunConfig
from relax_rt.process import procfs
from relax_rt.supervision.local import LocalExecutor
from relax_rt.supervision.rundir import RunPaths

MEMBERSHIP = NodeMembership("cafe0002", "b", 1)
STUCK = [4242]


class Around:
    """Head, event log, server and the like; keeps what was called."""

    def __init__(self, left: list[int]) -> None:
        self.left = left
        self.calls: list[str] = []

    async def leave(self, membership: NodeMembership, reason: str) -> None:
        self.calls.append("leave")

    def emit(self, kind: str, **fields: Any) -> None:
        self.calls.append(kind)

    def poll(self) -> list[Any]:
        return []


class Awaited(Around):
    async def close(self) -> list[int]:
        return self.left


class Closed(Around):
    def close(self) -> None: ...


@pytest.mark.parametrize("left", [[], STUCK])
async def test_an_agent_leaves_only_when_nothing_is_left(tmp_path: Path, left: list[int]) -> None:
    agent: Any = object.__new__(NodeAgent)
    waited, closed = Awaited(left), Closed(left)
    agent._events = follower = closed
    agent._local = agent._client = agent._head = server = waited
    agent._session = SimpleNamespace(nothing_to_report=True)
    agent.paths, agent.membership, agent._log = RunPaths("none", tmp_path), MEMBERSHIP, structlog.get_logger()
    await agent._close(
        server, follower, MembershipEnd(membership=str(MEMBERSHIP), over=True, exit_code=0, reason="test")
    )
    assert waited.calls == ([] if left else ["leave"])


@pytest.mark.parametrize("left", [[], STUCK])
async def test_an_executor_tells_what_it_could_not_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: list[int]
) -> None:
    monkeypatch.setattr(procfs, "kill_until_none", lambda find, reap: left)
    seen = Around([])
    config = RunConfig.model_validate({"run": {"name": "t", "dir": str(tmp_path)}})
    local = LocalExecutor(
        config, RunPaths("none", tmp_path), [], on_event=print, on_address=print, emit=seen.emit, node="b"
    )
    assert await local.close() == left
    assert seen.calls == (["processes_unkillable"] if left else [])


@pytest.mark.parametrize("left", [[], STUCK])
def test_the_joining_process_leaves_only_when_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: list[int]
) -> None:
    said: list[str] = []
    request = JoinRequest(head="tcp://127.0.0.1:1", key=read_key(make_key(tmp_path)), name="b", run_dir=tmp_path)
    joiner = Joiner(request, said.append)
    around = Around(left)

    async def take_leave(membership: NodeMembership, reason: str) -> None:
        await around.leave(membership, reason)

    held = os.open(tmp_path, os.O_RDONLY)
    monkeypatch.setattr(joiner, "_prepare", lambda record: (RunPaths("none", tmp_path), held))
    monkeypatch.setattr(joiner, "_run_agent", lambda paths, held: (137, left))
    monkeypatch.setattr(joiner, "_leave", take_leave)
    joined = JoinReply(membership=MEMBERSHIP, config="{}", system=[], lease_s=1.0, stop_s=1.0)
    end = joiner._run_member(JoinRecord(head="", host="", reply=joined))
    assert around.calls == ([] if left else ["leave"])
    assert end.over == bool(left), "it does not join again beside what is left"
    assert any("4242" in line for line in said) == bool(left)


@pytest.mark.parametrize("name", ["carrying out orders", "reporting", "housekeeping", "following events"])
async def test_work_of_an_agent_that_fails_ends_its_part(name: str) -> None:
    agent: Any = object.__new__(NodeAgent)
    told = Around([])
    agent._events, agent.membership, agent._log = told, MEMBERSHIP, structlog.get_logger()
    agent._living, agent._local = {"a/0"}, SimpleNamespace(carry_out=lambda order: told.calls.append(order.slot))
    agent._over = asyncio.get_running_loop().create_future()

    async def fails() -> None:
        raise KeyError("what nobody thought of")

    task = asyncio.create_task(fails(), name=name)
    task.add_done_callback(agent._work_ended)
    end = await asyncio.wait_for(agent._over, 120)
    assert (end.over, end.exit_code) == (True, EXIT_FAULT) and f"{name} has failed: KeyError" in end.reason
    assert told.calls == ["supervisor_fault", "a/0"], "its roles are ended at once"


async def test_work_that_is_called_off_is_no_fault() -> None:
    agent: Any = object.__new__(NodeAgent)
    agent._over = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(asyncio.sleep(60))
    task.add_done_callback(agent._work_ended)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not agent._over.done()
