"""Figures of each slot from the registry and the metrics, for `ps` and `export`: version, lag, staleness, depth."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from relax_rt.interfaces.agent import RunStatus
from relax_rt.interfaces.registry import Changes, RegistryApi
from relax_rt.observe.metrics import METRICS, Tail
from relax_rt.transport.base.versions import VersionRecord, VersionTree
from relax_rt.transport.rpc.errors import RelaxError
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.rpc import Client, make_hello

ASK_TIMEOUT_S = 1.0
LOOK_BACK_BYTES = 256 << 10
STEP_LOOK_BACK_BYTES = 2 << 20
"""The newest step record may stand far from the end: other roles write many records during a slow step."""


class Figures(msgspec.Struct, frozen=True):
    """Figures of one slot; None where it has none.

    Attributes:
        version: its policy version.
        lag: publications that it is behind: the distance from its version to the newest committed one.
        staleness: of a trainer, the largest among the samples of its last step.
        depth: its waiting work: samples outstanding, sequences admitted.
        depth_bound: upper bound of it.
    """

    version: int | None = None
    lag: int | None = None
    staleness: int | None = None
    depth: int | None = None
    depth_bound: int | None = None


def figures_of(status: RunStatus) -> dict[str, Figures]:
    """The figures of every living slot that has any; what cannot be read is left out."""
    changes, records = _ask_registry(status)
    return judge(status, changes, records, newest(_metrics(Path(status.run_dir))))


class EmptySteps(msgspec.Struct, frozen=True):
    """The newest steps of a run, which trained nothing: their count, the newest one, and why."""

    count: int
    step: int
    why: str


def empty_steps(run_dir: Path) -> EmptySteps | None:
    """Return the newest steps if they trained nothing, by the record of the newest one; None if it trained."""
    steps = [record for record in _metrics(run_dir, STEP_LOOK_BACK_BYTES) if record.get("kind") == "step"]
    if not steps or not (why := steps[-1].get("empty_reason")):
        return None
    return EmptySteps(int(steps[-1].get("empty_steps", 0)), int(steps[-1].get("step", 0)), str(why))


def describe_empty_steps(run_dir: Path) -> str:
    """Say why the newest steps of a run trained nothing; empty if the newest one trained."""
    found = empty_steps(run_dir)
    if found is None:
        return ""
    return f"the last {found.count} steps, up to step {found.step}, trained nothing: {found.why}"


def judge(
    status: RunStatus,
    changes: Changes | None,
    versions: Sequence[VersionRecord],
    metrics: Mapping[tuple[str, str], Mapping[str, Any]],
) -> dict[str, Figures]:
    """Compute the figures from what was read, as for `figures_of`.

    Args:
        metrics: the newest record of each incarnation and kind of record.
    """
    members = {m.who.slot: m for m in changes.members if m.state != "gone"} if changes else {}
    tree = VersionTree(versions)
    found: dict[str, Figures] = {}
    for slot in status.slots:
        version = slot.policy_version if slot.policy_version > 0 else None
        member = members.get(slot.slot)
        if member is not None and member.policy_version:
            version = member.policy_version
        stale: int | None = None
        lag = _behind(tree, version, changes.committed if changes else None)
        depth: tuple[int | None, int | None] = (None, None)
        who = f"{slot.slot}#{slot.epoch}"
        for (by, _), record in metrics.items():
            if by == who:
                stale = _largest(record.get("staleness"), stale)
                depth = _depth(record, depth)
        one = Figures(version, lag, stale, *depth)
        if one != Figures():
            found[slot.slot] = one
    return found


def newest(records: Iterable[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """The newest record of each incarnation and kind."""
    return {(str(record.get("by", "")), str(record.get("kind", ""))): record for record in records}


def _metrics(run_dir: Path, last_bytes: int = LOOK_BACK_BYTES) -> list[dict[str, Any]]:
    tail = Tail(run_dir / METRICS, last_bytes=last_bytes, read_bytes=2 * last_bytes)
    try:
        return tail.poll()
    finally:
        tail.close()


def _behind(tree: VersionTree, version: int | None, committed: VersionRecord | None) -> int | None:
    if version is None or committed is None or version not in tree or committed.version not in tree:
        return None
    return tree.distance(version, committed.version)


def _largest(value: Any, otherwise: int | None) -> int | None:
    known = [v for v in value if isinstance(v, int)] if isinstance(value, list) else []
    if isinstance(value, int):
        known = [value]
    return max(known, default=otherwise)


def _depth(record: Mapping[str, Any], otherwise: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    bound = record.get("bound")
    most = int(bound) if isinstance(bound, int | float) and math.isfinite(bound) else None
    for keys in (("depth",), ("outstanding",), ("running", "waiting")):
        known = [record.get(key) for key in keys]
        if all(isinstance(value, int) for value in known):
            return sum(value for value in known if isinstance(value, int)), most
    return otherwise


def _ask_registry(status: RunStatus) -> tuple[Changes | None, list[VersionRecord]]:
    address = next((slot.address for slot in status.slots if slot.slot == "registry/0"), "")
    if not address:
        return None, []

    async def ask() -> tuple[Changes, list[VersionRecord]]:
        client = Client(address, make_hello(status.run_id, Incarnation("cli/0", 0)))
        try:
            registry = client.bind(RegistryApi, timeout_s=ASK_TIMEOUT_S)
            return await registry.watch(0, 0.0), await registry.versions()
        finally:
            await client.close()

    try:
        return asyncio.run(ask())
    except RelaxError:
        return None, []
