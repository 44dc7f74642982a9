"""A run over two hosts made of network namespaces: the head on the first, a node that joins on the second."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from live_run import TOYS, WAIT_S, LiveRun, environment, until
from netns import Nodes

from relax_rt.process import procfs
from relax_rt.supervision import control
from relax_rt.supervision.rundir import RunPaths, members_of_run, read_run

LEASE_S = 5.0
"""A node that is not heard of for so long is lost: longer than a slow machine makes its agent wait for a core."""
FILE_TOYS = f"""
[roles.echo]
target = "{TOYS}/node_toys.py:Echo"
{{echo}}
[roles.caller]
target = "{TOYS}/node_toys.py:Caller"
{{caller}}
"""


def nodes_table(host: str, on_loss: str = "replace") -> str:
    return f'[supervision.nodes]\nlisten = "{host}:0"\nlease_s = {LEASE_S}\non_loss = "{on_loss}"\n'


class Far:
    """`up --join` on the second host."""

    def __init__(self, run: LiveRun, where: list[str], key: Path | None = None, wait_s: float = WAIT_S) -> None:
        self.run, self.where, self.wait_s = run, where, wait_s
        self.key = key or run.run_dir / "join.key"
        self.run_dir = run.run_dir / "nodes" / "b"
        self.output = run.run_dir / "join.out"
        self.run_ids: set[str] = set()

    def start(self) -> Far:
        ended = lambda: self.run.process.poll() is not None  # noqa: E731
        head = until("the head listens", lambda: self.run.record.get("listen"), ended)
        with self.output.open("ab") as out:
            self.process = subprocess.Popen(
                [*self.where, sys.executable, "-m", "supervision_join", head, str(self.key), "b", str(self.wait_s)],
                env=environment(),
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        return self

    @property
    def paths(self) -> RunPaths:
        found = RunPaths((read_run(self.run_dir) or {})["run_id"], self.run_dir)
        self.run_ids.add(found.run_id)
        return found

    @property
    def agent_pid(self) -> int:
        return int(until("the node's agent", lambda: (read_run(self.run_dir) or {}).get("agent"))["pid"])

    @property
    def keeper_pid(self) -> int:
        return int((procfs.stat_fields(self.agent_pid) or ["", "0"])[1])

    def left(self) -> list[str]:
        """What of this host's part is still there."""
        _ = self.paths
        rest = [f"process {pid}" for run_id in self.run_ids for pid in members_of_run(run_id)]
        places = [RunPaths(run_id, self.run_dir) for run_id in self.run_ids]
        return rest + [str(d) for p in places for d in (p.socket_dir, p.shm_dir) if d.exists()]

    def ends(self) -> int:
        return self.process.wait(WAIT_S)

    def close(self) -> None:
        with contextlib.suppress(KeyError):
            _ = self.paths
        for pid in (self.process.pid, self.pid_of_agent()):
            if pid and procfs.start_time(pid):
                os.kill(pid, signal.SIGKILL)
        for run_id in self.run_ids:
            procfs.kill_until_none(lambda run_id=run_id: members_of_run(run_id), reap=False)  # type: ignore[misc]
            # On a host that died at once no keeper is left to do it.
            RunPaths(run_id, self.run_dir).remove_private()
        self.process.wait()

    def pid_of_agent(self) -> int:
        return int(((read_run(self.run_dir) or {}).get("agent") or {}).get("pid", 0))


@contextlib.contextmanager
def two_hosts(
    tmp_path: Path,
    nodes: Nodes,
    roles: str,
    tables: str = "",
    *,
    system: tuple[str, ...] = ("registry",),
    on_loss: str = "replace",
    job: str = "toy",
) -> Iterator[tuple[LiveRun, Far]]:
    """Both up, the node joined."""
    run = LiveRun(tmp_path, roles, tables + nodes_table(nodes.host, on_loss), system=system, job=job)
    run.prefix = nodes.first
    with run:
        far = Far(run, nodes.second).start()
        try:
            run.event("node_joined", node="b")
            has_room(run)
            yield run, far
        except AssertionError as error:
            raise AssertionError(f"{error}\n{far.output.read_text()}") from error
        finally:
            far.close()


def has_room(run: LiveRun) -> None:
    """Wait until slots can be placed on the node."""
    until(
        "the node's agent takes orders", lambda: any(n.agent_pid for n in control.nodes(run.run_dir) if n.node == "b")
    )


def spread(run: LiveRun, kind: str = "worker", count: int = 4) -> dict[str, Any]:
    """Start slots of a role that had none, over both hosts; answers with those on the second."""
    control.scale(run.run_dir, kind, count)
    run.ready(*(f"{kind}/{n}" for n in range(count)))
    there = {name: slot for name, slot in slots(run).items() if slot.node == "b"}
    assert there, "all on the head"
    return there


def slots(run: LiveRun) -> dict[str, Any]:
    return {slot.slot: slot for slot in control.status(run.run_dir).slots}
