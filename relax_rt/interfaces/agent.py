"""Interface of the agent on agent.sock: the state of a run, why processes ended, and the requests of operators."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from relax_rt.transport.rpc.interface import idempotent

Kind = Literal[
    "clean",
    "killed",
    "oom",
    "exception",
    "import_error",
    "config",
    "given_up",
    "hang",
    "cuda",
    "node_lost",
    "unknown",
]

TAIL_LINES = 20
TRACE_LINES = 30
CAUSE_PREFIX = 80
"""Characters by which a repeated cause is recognised."""

_FRAME = re.compile(r'^  File "([^"]+)", line \d+')
RUNTIME = f"{Path(__file__).parents[1]}/"
PACKAGES = tuple(f"{sysconfig.get_path(name)}/" for name in ("purelib", "platlib"))
STDLIB = f"{sysconfig.get_path('stdlib')}/"


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """Why one incarnation ended.

    Attributes:
        slot, epoch, pid: which process (pid 0: it was never spawned).
        kind: the class of the cause.
        cause: the cause in one line.
        signal: name of the signal that ended it, or empty.
        exit_code: its exit status, None when a signal ended it.
        last_lines: end of its log, if it failed.
        trace: tail of the traceback, if it raised.
        at: wall-clock time of the exit in seconds; the smallest of several is the first failure.
    """

    slot: str
    epoch: int
    kind: Kind
    cause: str
    pid: int = 0
    signal: str = ""
    exit_code: int | None = None
    last_lines: list[str] = []
    trace: str = ""
    at: float = 0.0

    @property
    def failed(self) -> bool:
        """True unless it ended in good order."""
        return self.kind != "clean"

    @property
    def final(self) -> bool:
        """Whether the role itself reported that another start would end in the same way."""
        return self.kind in ("config", "given_up")

    def evidence(self, trace_lines: int = TRACE_LINES, log_lines: int = TAIL_LINES) -> list[str]:
        """Return the end of its traceback, else of its log, without lines that only repeat the cause.

        A role that ended because of its input or a limit explains itself in the cause: of its traceback only the lines
        of the user's own code remain.
        """
        if self.final:
            trace = _user_frames(self.trace)
        else:
            trace = [line for line in self.trace.splitlines() if not self._repeats(line)]
        return trace[-trace_lines:] or self.last_lines[-log_lines:]

    def _repeats(self, line: str) -> bool:
        """Return whether a line is the cause, alone or behind the name of an exception."""
        start = self.cause[:CAUSE_PREFIX]
        return bool(start) and (line.startswith(start) or line.partition(": ")[2].startswith(start))

    def __str__(self) -> str:
        return f"{self.slot}#{self.epoch} {self.kind}: {self.cause}"


def _user_frames(trace: str) -> list[str]:
    """Return the frames of a traceback that are the user's code, with their source lines.

    The runtime and the standard library are left out. Installed packages are left out if any other frame remains: a
    user may have installed the code of a reward or an environment.
    """
    frames: list[tuple[str, list[str]]] = []
    inside = False
    for line in trace.splitlines():
        if frame := _FRAME.match(line):
            path = frame[1]
            # Paths within compiled modules are relative.
            inside = path.startswith("/") and not path.startswith(RUNTIME)
            inside = inside and (path.startswith(PACKAGES) or not path.startswith(STDLIB))
            frames += [(path, [line])] if inside else []
        elif inside and line.startswith("    "):
            frames[-1][1].append(line)
        else:
            inside = False
    own = [lines for path, lines in frames if not path.startswith(PACKAGES)]
    return [line for lines in own or [lines for _, lines in frames] for line in lines]


class SlotStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one slot.

    Attributes:
        slot, kind, tier: which one, and its place in the start order.
        state: pending, requested, starting, ready, hung, stopping, killing, backoff or ended.
        pid: of the living process, else 0.
        epoch: of the newest incarnation.
        restarts: since the run began.
        uptime_s: age of the living process, else 0.
        state_s: time in this state.
        progress: the role's counter; detail: what it does; waiting: why it is idle, or empty.
        address: where it serves, or empty.
        log: its log file.
        last: why its previous incarnation ended.
        node: where it runs or last ran; empty is the head's own node in a run of one node.
        policy_version: as the role reported it; -1 when it has not.
        ready_s: time its living process took from spawn to ready, 0 until it is.
        given_up: it used up its restarts, and its role continues without it.
        generation: of the gang it belongs to; 0 outside gangs.
        kill_s, kill_latest_s: of a stopping slot, the time until it is killed: unless it makes progress before, and
            whatever it does; else None.
    """

    slot: str
    kind: str
    tier: int
    state: str
    pid: int = 0
    epoch: int = 0
    restarts: int = 0
    uptime_s: float = 0.0
    state_s: float = 0.0
    progress: int = 0
    detail: str = ""
    waiting: str = ""
    address: str = ""
    log: str = ""
    last: Diagnosis | None = None
    node: str = ""
    policy_version: int = -1
    ready_s: float = 0.0
    given_up: bool = False
    generation: int = 0
    kill_s: float | None = None
    kill_latest_s: float | None = None


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one node.

    Attributes:
        node: its name; the head's is empty in a run of one node.
        state: alive, leaving, lost or left.
        host: name or address of the machine.
        agent_pid: of its agent.
        cores, memory_mib, gpus: what it offers.
        slots: the slots that run on it.
        seen_s: time since its last call.
    """

    node: str
    state: str = "alive"
    host: str = ""
    agent_pid: int = 0
    cores: int = 0
    memory_mib: int = 0
    gpus: int = 0
    slots: list[str] = []
    seen_s: float = 0.0


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the run.

    Attributes:
        status: starting, running or draining; finished, stopped, killed, failed or "agent died" once it has ended.
        reason: why it is ending or has ended.
        exit_code: once it has ended.
        diagnosis: the failure that ended it; first: the earliest one of that series, if another.
        nodes: the nodes of the run, the head's first.
        roles: the kinds of role in start order, also those that have no slots now, without those that the job
            has nothing to do for.
    """

    run_id: str
    name: str
    run_dir: str
    status: str
    reason: str = ""
    agent_pid: int = 0
    uptime_s: float = 0.0
    exit_code: int | None = None
    slots: list[SlotStatus] = []
    diagnosis: Diagnosis | None = None
    first: Diagnosis | None = None
    nodes: list[NodeStatus] = []
    roles: list[str] = []

    @property
    def ended(self) -> bool:
        """True when nothing of the run is left."""
        return self.exit_code is not None


class AgentApi(Protocol):
    """The node agent, on agent.sock."""

    @idempotent
    async def status(self) -> RunStatus:
        """Return every slot and the state of the run."""

    @idempotent
    async def stop(self, reason: str) -> None:
        """Drain the run: every role finishes its work in hand, top tier first. Returns at once."""

    @idempotent
    async def kill(self, reason: str) -> None:
        """End every role now. Returns at once."""

    async def restart(self, slot: str) -> None:
        """Stop and start one slot (of a gang: the whole gang) or all slots of a role; not counted as a failure. Or open
        a drained node again.

        Refused when there is no such slot, role or node, when there can be no room for it, or the run is ending."""

    async def scale(self, kind: str, count: int) -> None:
        """Change the number of a role's slots; the highest indices are drained first. Returns at once.

        Refused for an unknown role, a gang, a system role, a number that the config may not have or that the machines
        cannot carry, or an ending run."""

    async def drain(self, what: str) -> None:
        """Stop a slot or a role in order: it stays down until scaled or restarted. Or empty a node: its slots stop and
        start elsewhere, and nothing new is placed there. Returns at once.

        Refused when there is no such slot, role or node, or the run is ending."""

    async def inject(self, slot: str, fault: str, seconds: float, amount: float) -> None:
        """Inject a fault (see FaultMsg) into a role, to test the others.

        Refused for an unknown fault, a slot without a process, or a run with [supervision] chaos = false."""

    @idempotent
    async def nodes(self) -> list[NodeStatus]:
        """Return every node of the run."""


class WhereApi(Protocol):
    """Where slots are, for the processes of one node: the node's agent answers it on agent.sock."""

    @idempotent
    async def where(self, slot: str) -> str:
        """Return the address at which a process of this node reaches the slot; empty while it runs nowhere."""
