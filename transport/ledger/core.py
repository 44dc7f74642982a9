"""The state together with what is derived from it; the other modules of the ledger are functions over it."""

from __future__ import annotations

from typing import Any

from relax_rt.transport.errors import Refused
from relax_rt.transport.ledger.extents import ExtentTable
from relax_rt.transport.ledger.policy import TRAIN, LedgerPolicy
from relax_rt.transport.ledger.state import Group, Lease, State
from relax_rt.transport.queue.api import Freed, SampleKey
from relax_rt.transport.versions import VersionRecord, VersionTree

Notice = tuple[str, dict[str, Any]]
"""Something a person wants to see in the event log: kind and fields."""


class Core:
    """State, version tree, indices of ready work, and deadlines.

    Deadlines are not part of the state: renewals are not journaled, and after a restart leases start again at
    full length.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.tree = VersionTree(state.versions)
        self.deadlines: dict[int, float] = {}
        self.now = 0.0
        self.changed = False
        self.notices: list[Notice] = []
        self.ready: dict[str, set[SampleKey]] = {}
        self.train_ready: set[int] = set()
        self._lags: dict[int, int] = {}
        if state.policy is not None:
            self.reindex()

    @property
    def policy(self) -> LedgerPolicy:
        """Raises:
        Refused: the ledger was not configured yet.
        """
        if self.state.policy is None:
            raise Refused("call of the queue", why="its policy is not set yet")
        return self.state.policy

    @property
    def extents(self) -> ExtentTable:
        return self.state.extents

    def note(self, kind: str, **fields: Any) -> None:
        """Something to show in the event log."""
        self.notices.append((kind, fields))

    def tally(self, what: str, n: int = 1) -> None:
        self.state.tallies[what] = self.state.tallies.get(what, 0) + n

    def new_id(self) -> int:
        self.state.next_id += 1
        return self.state.next_id - 1

    def hold(self, id_: int) -> None:
        """The ticket or lease runs at full length from now."""
        self.deadlines[id_] = self.now + self.state.limits.lease_s

    def release(self, extents: list[Freed]) -> None:
        """One reference less on each extent."""
        self.extents.release(extents, self.state.callers.alive)

    # --- staleness

    def lag(self, version: int) -> int:
        """Distance from the trainer's weights to a version, which must be known."""
        if version not in self._lags:
            assert self.state.trainer_version is not None
            self._lags[version] = self.tree.distance(self.state.trainer_version, version)
        return self._lags[version]

    def staleness(self, group: Group, member: int | None = None) -> int:
        """Longest distance from the trainer's weights to any version in the group, or in one member.

        Members that are not there yet count with the version of the engine that makes them.
        """
        samples = group.samples if member is None else [group.samples[member]]
        versions = {span.version for sample in samples for span in sample.spans}
        if any(not sample.spans for sample in samples):
            versions.add(group.base)
        return max(self.lag(version) for version in versions)

    def move_weights(self, record: VersionRecord) -> None:
        """The trainer's weights are `record` from now on.

        Raises:
            Refused: the version's parent is not known, or its number was used for another version.
        """
        known = record.version in self.tree
        self.tree.add(record)
        if known:
            self.state.versions = self.tree.records()
        else:
            self.state.versions.append(record)
        self.state.trainer_version = record.version
        self._lags.clear()

    # --- indices

    def reindex(self) -> None:
        """Find all ready work anew."""
        self.ready = {task: set() for task in self.policy.tasks if task != TRAIN}
        self.train_ready.clear()
        for group in self.state.groups.values():
            self.refresh(group)

    def refresh(self, group: Group) -> None:
        """Enter what of the group is ready for which task, after any change of it."""
        for task, ready in self.ready.items():
            fields = self.policy.tasks[task]
            for key, sample in zip(group.sample_keys(), group.samples, strict=True):
                if task not in sample.leases and task not in sample.done and sample.has(fields):
                    ready.add(key)
                else:
                    ready.discard(key)
        fields = self.policy.tasks[TRAIN]
        if group.holder is None and not group.lease and all(sample.has(fields) for sample in group.samples):
            self.train_ready.add(group.id)
        else:
            self.train_ready.discard(group.id)

    def forget(self, group: Group) -> None:
        """Nothing of the group is offered any more."""
        for ready in self.ready.values():
            ready.difference_update(group.sample_keys())
        self.train_ready.discard(group.id)
        self.deadlines.pop(group.id, None)

    # --- the end of groups and leases

    def end(self, group: Group, state: str, *, marked: dict[int, str] | None = None, fate: str = "return") -> None:
        """The group ends before it was trained, its samples in `state` (or their own in `marked`).

        fate is what becomes of the prompt: `return`, `failed` (returned, unless it failed too often), `retire`.
        """
        for member, sample in enumerate(group.samples):
            name = (marked or {}).get(member, state)
            self.state.ended[name] = self.state.ended.get(name, 0) + 1
            self.release(sample.extents)
        self.state.groups.pop(group.id, None)
        self.forget(group)
        if fate == "failed" and group.prompt.failures + 1 >= self.policy.failures_per_prompt:
            fate = "retire"
        if fate == "retire":
            self.state.prompts.retire(group.prompt)
        else:
            self.state.prompts.give_back(group.prompt, failed=fate == "failed")
        self.note("group_ended", group=group.id, prompt=group.prompt.index, state=state, prompt_fate=fate)

    def close(self, lease: Lease, *, pinned: bool = False) -> None:
        """The lease is held no more; with pinned its process may still read, so its extents stay.

        The samples' own marks of the lease are taken off; what comes next is the caller's to say.
        """
        self.state.leases.pop(lease.id, None)
        self.deadlines.pop(lease.id, None)
        for group in self.groups_of(lease):
            if lease.task == TRAIN:
                group.lease = 0
            else:
                for key in lease.keys:
                    if key.group == group.id:
                        group.samples[key.member].leases.pop(lease.task, None)
        if pinned:
            self.state.lapsed[lease.id] = lease
        else:
            self.release(lease.pins)

    def unpin(self, lease: Lease) -> None:
        """A lapsed lease's process reads no more."""
        del self.state.lapsed[lease.id]
        self.release(lease.pins)

    def groups_of(self, lease: Lease) -> list[Group]:
        """The lease's groups that are still there and not yet trained."""
        return [self.state.groups[id_] for id_ in lease.groups() if id_ in self.state.groups]
