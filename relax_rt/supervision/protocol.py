"""Events that the supervisor takes, the actions that it returns, and the orders that carry them out on a node."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from relax_rt.interfaces.agent import Diagnosis
from relax_rt.supervision.placement import Node


class NodeMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of what also crosses between the head and the nodes that join."""


class RunStarted(msgspec.Struct, frozen=True):
    """The run begins: the lowest tier starts."""


class SlotSpawned(NodeMessage, frozen=True):
    """The process ordered by `Start` exists, on that node."""

    slot: str
    epoch: int
    pid: int
    node: str = ""


class SlotReady(NodeMessage, frozen=True):
    """The role is ready."""

    slot: str


class SlotFinished(NodeMessage, frozen=True):
    """The role has finished; its process is about to exit."""

    slot: str


class SlotExited(NodeMessage, frozen=True):
    """The process is gone, or was never spawned. Every `Start` leads to exactly one of these."""

    slot: str
    diagnosis: Diagnosis


class SlotProgress(NodeMessage, frozen=True):
    """The role's progress counter and what it does.

    Attributes:
        n: units of work since the process started; only grows.
        waiting: why the role is idle; empty while it is busy.
        extend_s: known slow work announced since the last report: the deadline moves out by this.
        detail: what it does, in words.
    """

    slot: str
    n: int
    waiting: str = ""
    extend_s: float = 0.0
    detail: str = ""


SlotEvent = SlotSpawned | SlotReady | SlotFinished | SlotExited | SlotProgress
"""What happens to a slot on its node."""


class StopRequested(msgspec.Struct, frozen=True):
    """Drain: stop every slot in reverse order, then end with exit_code."""

    reason: str
    exit_code: int = 0


class KillRequested(msgspec.Struct, frozen=True):
    """End at once: kill every slot."""

    reason: str
    exit_code: int = 1


class RestartRequested(msgspec.Struct, frozen=True):
    """Restart this slot or its whole gang, by an operator's request; not counted as a failure."""

    slot: str
    reason: str = "restart requested"


class ScaleRequested(msgspec.Struct, frozen=True):
    """Change the number of a role's slots, by an operator's request; the highest indices are drained first."""

    kind: str
    count: int


class DrainRequested(msgspec.Struct, frozen=True):
    """Stop a slot or a role until it is restarted or scaled, or empty a node: its slots start elsewhere."""

    what: str


class NodeJoined(msgspec.Struct, frozen=True):
    """A node has joined with its resources."""

    node: Node


class NodeLost(msgspec.Struct, frozen=True):
    """A node is gone, with all its processes: they are dead, or fenced by epoch.

    Attributes:
        node: its name.
        reason: how it was found.
        keep: its slots wait for a node of this name, instead of being placed elsewhere.
        at: wall-clock time in seconds, for the diagnoses.
    """

    node: str
    reason: str
    keep: bool = False
    at: float = 0.0


class Tick(msgspec.Struct, frozen=True):
    """Time has passed: check deadlines."""


Event = (
    RunStarted
    | SlotEvent
    | StopRequested
    | KillRequested
    | RestartRequested
    | ScaleRequested
    | DrainRequested
    | NodeJoined
    | NodeLost
    | Tick
)


class Start(msgspec.Struct, frozen=True):
    """Get an epoch and start a process for the slot; leads to SlotSpawned and one SlotExited, or SlotExited only."""

    slot: str
    node: str = ""
    devices: tuple[int, ...] = ()


class StartGang(msgspec.Struct, frozen=True):
    """Start all ranks of a gang, in their order, with one new rendezvous; each leads to the events of a `Start`."""

    kind: str
    generation: int
    ranks: list[Start]


class Stop(NodeMessage, frozen=True):
    """Ask the role to finish (or call off a start that has not spawned yet)."""

    slot: str


class Kill(NodeMessage, frozen=True):
    """SIGKILL the slot's process group. kind and reason go into the diagnosis of the exit."""

    slot: str
    kind: Literal["killed", "hang"]
    reason: str


class DumpStacks(NodeMessage, frozen=True):
    """Write the stacks of all threads of the role to its log."""

    slot: str


class Emit(msgspec.Struct, frozen=True):
    """A line for the run's event log."""

    kind: str
    fields: dict[str, Any]


class RunDone(msgspec.Struct, frozen=True):
    """Every slot has ended: leave with exit_code.

    Attributes:
        exit_code: 0 finished or stopped, 1 failed, 2 configuration, or what the stop request asked for.
        reason: why the run ended, in words.
        diagnosis: the failure that ended it, if one did.
        first: the earliest failure of that series, when it is another one: often the cause.
    """

    exit_code: int
    reason: str
    diagnosis: Diagnosis | None = None
    first: Diagnosis | None = None


Action = Start | StartGang | Stop | Kill | DumpStacks | Emit | RunDone
