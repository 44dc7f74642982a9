"""The interface of the registry, which every role, the agent and programs outside the run talk to."""

from __future__ import annotations

from typing import Protocol

import msgspec

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.interface import idempotent

REGISTRY_SLOT, QUEUE_SLOT = "registry/0", "queue/0"
"""Slots of the system roles that every other process of a run talks to."""
SLOT_STATES = ("starting", "ready", "draining", "lapsed", "gone")


class IncarnationEnd(msgspec.Struct, frozen=True):
    """How an incarnation ended."""

    epoch: int
    reason: str


class Member(msgspec.Struct, frozen=True):
    """What the registry knows of a slot's newest incarnation.

    Attributes:
        who: slot and epoch.
        pid: operating-system process id (0 until announced).
        address: where it serves, ``unix:///…`` or ``tcp://host:port``; empty if it serves nothing.
        state: one of SLOT_STATES.
        policy_version: newest version that an engine holds in full, 0 otherwise.
        progress: its progress counter (tokens, samples, steps).
        detail: what it does or waits for, as text.
        revision: the registry revision of the last change.
        before: how the slot's last incarnation before this one ended, once that is known.
        node: where it runs; empty in a run of one node.
        remote: where it serves for other nodes, ``tcp://host:port``; empty if it does not.
    """

    who: Incarnation
    pid: int = 0
    address: str = ""
    state: str = "starting"
    policy_version: int = 0
    progress: int = 0
    detail: str = ""
    revision: int = 0
    before: IncarnationEnd | None = None
    node: str = ""
    remote: str = ""


class Renewed(msgspec.Struct, frozen=True):
    """Answer to a renewal: the lease's length and the newest committed version (0: none yet)."""

    ttl_s: float
    committed: int


class Changes(msgspec.Struct, frozen=True):
    """Answer to a watch: everything that changed after the revision asked for.

    Attributes:
        revision: pass it to the next watch.
        snapshot: True when `members` is the whole list (the revision asked for was too old, or 0).
        members: changed members.
        committed: the newest committed version, if any.
    """

    revision: int
    snapshot: bool
    members: list[Member]
    committed: VersionRecord | None = None


class RegistryApi(Protocol):
    """Slots, addresses, readiness, leases, epochs and policy versions of a run. Durable.

    A call that writes under an epoch lower than the slot's newest raises StaleEpoch.
    """

    @idempotent
    async def issue_epoch(self, slot: str, token: str = "") -> int:
        """Issue an epoch for a new incarnation of the slot; all earlier ones are fenced from now on.

        A call with the token of the slot's last call returns the same epoch, so that a repeated call, or one that
        arrives late, fences no incarnation. A registry that was restarted in between issues another one: then no
        process was started under the first.
        """

    @idempotent
    async def announce(self, pid: int, address: str, ttl_s: float, node: str = "", remote: str = "") -> Renewed:
        """Register the caller (its slot and epoch come with the connection) with a lease of ttl_s; see Member."""

    @idempotent
    async def renew(self, state: str, progress: int, detail: str, policy_version: int) -> Renewed:
        """Renew the caller's lease and report its state."""

    @idempotent
    async def leave(self, reason: str) -> None:
        """End the caller's membership in good order."""

    @idempotent
    async def process_exited(self, who: Incarnation, reason: str) -> None:
        """Report by the agent: the incarnation's process has ended."""

    @idempotent
    async def watch(self, since: int, wait_s: float) -> Changes:
        """Changes after revision `since`, at once if there are any, else the next ones within wait_s."""

    @idempotent
    async def issue_version(self) -> int:
        """A new policy version number under the caller's epoch. A number never committed is skipped, so that asking
        twice does no harm."""

    @idempotent
    async def commit_version(self, record: VersionRecord) -> VersionRecord:
        """Make a staged version the committed one: a compare-and-set under the caller's epoch.

        Refused when the record's parent is not a known version or a newer version is committed already.
        """

    @idempotent
    async def versions(self) -> list[VersionRecord]:
        """All committed versions, oldest first."""
