"""Interface of the agent on agent.sock: the state of a run, and the requests of operators."""

from __future__ import annotations

from typing import Protocol

import msgspec

from relax_rt.supervision.diagnosis import Diagnosis
from relax_rt.transport.rpc.rpc import idempotent


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
        seen_s: time since it was last heard of.
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
