"""Client of a run's agent, by run directory; synchronous, for the command line and for tests.

Functions raise NoRun where there is no live run in the directory, Unreachable where its agent does not answer, and
Refused where the agent refuses the request (see AgentApi for its reasons).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from relax_rt.config.problems import BadInput
from relax_rt.config.version import RUN_FORMAT, VERSION
from relax_rt.interfaces.agent import AgentApi, NodeStatus, RunStatus
from relax_rt.supervision.rundir import RUNNING, RunPaths, owner_lives, read_run
from relax_rt.transport.rpc.errors import RelaxError, Unreachable
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.rpc import RpcClient, make_hello

T = TypeVar("T")
CALL_TIMEOUT_S = 5.0
POLL_S = 0.05


class NoRun(BadInput):
    """No live run in this directory."""


class FoundRun(msgspec.Struct, frozen=True):
    """A run directory's run.

    Attributes:
        alive: its agent lives.
        record: run.json.
    """

    paths: RunPaths
    alive: bool
    record: dict[str, Any]

    @property
    def joined(self) -> bool:
        """It is part of a run that another machine leads: its agent serves only the roles of this node."""
        return self.alive and self.record["status"] == "joined"


def check_format(run_dir: Path, record: dict[str, Any]) -> None:
    """Refuse a run directory that another version wrote in another format. Raises NoRun: which version wrote it, and
    what to do."""
    if record.get("format") != RUN_FORMAT:
        raise NoRun(
            f"{run_dir} is the run directory of relax-rt {record.get('version', '0.1')}, which {VERSION} cannot read",
            why=f"its format is {record.get('format', 1)}, this version reads {RUN_FORMAT}",
            hint="use that version for it, or move it away and start the run anew",
        )


def find_run(run_dir: Path) -> FoundRun:
    """Return the newest run of a run directory, alive or ended. Raises NoRun: the directory holds no run at all, or one
    of another format."""
    record = read_run(run_dir)
    if record is None or "run_id" not in record:
        raise NoRun(f"no run in {run_dir}", why="there is no run.json", hint="give the run directory, as runs/my-run")
    check_format(run_dir, record)
    owner = record.get("agent")
    alive = record.get("status") in RUNNING and isinstance(owner, dict) and owner_lives(owner) is True
    return FoundRun(RunPaths(record["run_id"], run_dir.resolve()), alive, record)


def status(run_dir: Path) -> RunStatus:
    """Return the state of a run; of an ended one, how it ended. Raises NoRun: the directory holds no run, alive or
    ended."""
    run = find_run(run_dir)
    if run.alive and not run.joined:
        try:
            return _ask(run, lambda agent: agent.status())
        except Unreachable:
            # It may have ended before the call.
            run = find_run(run_dir)
            if run.alive:
                raise
    return _final(run)


def stop(run_dir: Path, reason: str = "relax-rt down", wait_s: float = 0.0) -> None:
    """Drain a run; with wait_s, wait until it has ended. Raises RelaxError: it did not end within wait_s."""
    _end(run_dir, lambda agent: agent.stop(reason), wait_s)


def kill(run_dir: Path, reason: str = "relax-rt down --now", wait_s: float = 0.0) -> None:
    """End every role of a run now; errors as for `stop`."""
    _end(run_dir, lambda agent: agent.kill(reason), wait_s)


def restart(run_dir: Path, slot: str) -> None:
    """Restart a slot (of a gang: the whole gang) or all slots of a role, or open a drained node again."""
    _ask(_living(run_dir), lambda agent: agent.restart(slot))


def scale(run_dir: Path, kind: str, count: int) -> None:
    """Change the number of a role's slots."""
    _ask(_living(run_dir), lambda agent: agent.scale(kind, count))


def drain(run_dir: Path, what: str) -> None:
    """Stop a slot or a role in order and leave it down, or empty a node."""
    _ask(_living(run_dir), lambda agent: agent.drain(what))


def inject(run_dir: Path, slot: str, fault: str, seconds: float = 0.0, amount: float = 0.0) -> None:
    """Inject a fault into a role."""
    _ask(_living(run_dir), lambda agent: agent.inject(slot, fault, seconds, amount))


def nodes(run_dir: Path) -> list[NodeStatus]:
    """Return the nodes of a run."""
    return _ask(_living(run_dir), lambda agent: agent.nodes())


def wait_ended(run_dir: Path, wait_s: float) -> bool:
    """Wait until the agent of a run is gone; False when it is still there after wait_s."""
    end = time.monotonic() + wait_s
    while find_run(run_dir).alive:
        if time.monotonic() > end:
            return False
        time.sleep(POLL_S)
    return True


def _end(run_dir: Path, call: Callable[[AgentApi], Awaitable[None]], wait_s: float) -> None:
    _ask(_living(run_dir), call)
    if wait_s > 0 and not wait_ended(run_dir, wait_s):
        raise RelaxError(
            f"the run in {run_dir} has not ended within {wait_s:g} s", hint="`relax-rt ps` shows what it waits for"
        )


def _living(run_dir: Path) -> FoundRun:
    run = find_run(run_dir)
    if run.joined:
        raise NoRun(
            f"no run is led from {run_dir}",
            why=f"it belongs to node {run.record.get('node')!r} of a run at {run.record.get('head')}",
            hint="ask the head, in its own run directory",
        )
    if not run.alive:
        final = _final(run)
        raise NoRun(
            f"no live run in {run_dir}",
            why=f"run {final.run_id} is over: {final.status}" + (f", {final.reason}" if final.reason else ""),
            hint="`relax-rt up` resumes it",
        )
    return run


def _final(run: FoundRun) -> RunStatus:
    """Return run.json as a status. A run that should be running, but has no agent, died with its keeper."""
    record = run.record
    state = record.get("status", "")
    fields = {
        "run_id": run.paths.run_id,
        "name": record.get("name", ""),
        "run_dir": str(run.paths.run_dir),
        "status": "agent died" if state in RUNNING and not run.joined else state,
        "reason": record.get("reason") or "",
        "exit_code": record.get("exit_code") if record.get("exit_code") is not None or run.joined else 1,
        "diagnosis": record.get("diagnosis"),
        "first": record.get("first"),
    }
    return msgspec.convert(fields, RunStatus)


def _ask(run: FoundRun, call: Callable[[AgentApi], Awaitable[T]]) -> T:
    async def ask() -> T:
        hello = make_hello(run.paths.run_id, Incarnation("cli/0", 0))
        client = RpcClient(f"unix://{run.paths.agent_socket}", hello)
        try:
            return await call(client.bind(AgentApi, timeout_s=CALL_TIMEOUT_S))
        finally:
            await client.close()

    return asyncio.run(ask())
