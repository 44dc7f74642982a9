"""What the ledger should do, written down naively: plain objects, everything counted anew whenever it is asked for.

It is told each call and what the ledger chose (which samples a task got, which blocks are to be spilled); everything
else it works out itself. Nothing here is shared with the ledger: not the tree of versions, not the references of
memory, not the indices of ready work.
"""

from __future__ import annotations

from collections.abc import Callable

from ledger_model_holdings import Holdings
from ledger_model_parts import Group, Lease, Part, Sample

from relax_rt.transport.memory.refs import Extent
from relax_rt.transport.queue.ledger.messages import BlockPut, SampleKey, Ticket
from relax_rt.transport.rpc.identity import Incarnation

TRAIN = "train"


class Model(Holdings):
    # --- admission and puts

    def admit(self, who: Incarnation, engine_version: int, groups: int, tickets: list[Ticket]) -> None:
        again = [ticket for ticket in tickets if ticket.group in self.groups]
        open_ = len(self.reopened) if self.lag(engine_version) <= self.policy.max_staleness else 0
        assert [ticket.group for ticket in again] == self.reopened[: min(groups, open_)]
        for ticket in again:
            group = self.groups[ticket.group]
            self.reopened.remove(group.id)
            group.holder, group.base, group.making = who, engine_version, group.missing()
            group.issue, group.idle = group.issue + 1, group.idle + 1
            if group.idle > 3:
                for sample in group.samples:
                    sample.partial = []
            marked = {n: len(group.samples[n].partial) for n in group.making if group.samples[n].partial}
            assert (ticket.issue, ticket.partials) == (group.issue, marked)
            assert (ticket.prompt, ticket.attempt, set(ticket.members)) == (group.prompt, group.attempt, group.making)
            assert ticket.item == (group.item if group.item >= 0 else None)
            assert ticket.losses == group.losses
        size = self.policy.group_size
        surplus = self.surplus()
        for ticket in tickets[len(again) :]:
            assert self._room(size, engine_version, surplus)
            index = min(self.waiting, default=self.cursor)
            self.cursor += index == self.cursor
            attempt, failures, item, losses = self.waiting.pop(index, (0, 0, self.chosen.pop(index, -1), 0))
            assert (ticket.item, ticket.losses) == (item if item >= 0 else None, losses)
            assert (ticket.prompt, ticket.attempt, ticket.wanted()) == (index, attempt, list(range(size)))
            samples = [Sample() for _ in range(size)]
            self.groups[ticket.group] = Group(
                ticket.group, index, attempt, failures, engine_version, samples, who, set(range(size)), item=item,
                losses=losses,
            )  # fmt: skip
            self.issued += size
        assert len(tickets) == groups or not self._room(size, engine_version, surplus)

    def _room(self, size: int, engine_version: int, surplus: int) -> bool:
        full = self.payload_bytes() + self.partials_bytes() >= self.limits.capacity_bytes
        fresh = self.lag(engine_version) <= self.policy.max_staleness
        return fresh and not full and self.outstanding() + size <= self.bound(engine_version) + surplus

    def put(self, who: Incarnation, puts: list[BlockPut]) -> None:
        touched: dict[int, Group] = {}
        for put in puts:
            mine = [row for row in put.rows if self._makes(who, row.key)]
            block = self.new_block(put) if mine else None
            for row in mine:
                assert block is not None
                group = self.groups[row.key.group]
                versions = [span.version for span in row.versions]
                group.samples[row.key.member] = Sample(True, False, [Part(block, row.row, "", -1)], versions)
                group.making.remove(row.key.member)
                self._got_on(group)
                touched[group.id] = group
        for group in touched.values():
            if not group.making:
                group.holder = None
                if group.missing():
                    self.reopened.append(group.id)
            if self.staleness(group) > self.policy.max_staleness and not (group.recycled and self.keep_within(group)):
                self.end(group, "refused(stale)")

    def mark(self, who: Incarnation, issue: int, key: SampleKey, start: int, tokens: list[tuple[int, int]]) -> int:
        """Tokens from `start` on; answers with how many are held."""
        if not self._makes(who, key) or self.groups[key.group].issue != issue:
            return -1
        group = self.groups[key.group]
        sample = group.samples[key.member]
        old, room = sample.partial, self.limits.partials_bytes - self.partials_bytes() + sample.partial_bytes()
        if start <= len(old):
            sample.partial = [*old[:start], *tokens]
            if sample.partial_bytes() > min(self.limits.partial_bytes, room):
                sample.partial = old
            elif len(sample.partial) > sample.longest_partial:
                sample.longest_partial = len(sample.partial)
                self._got_on(group)
        return len(sample.partial)

    def _got_on(self, group: Group) -> None:
        group.idle = 0
        if self.policy.on_failed_member != "drop" or not group.missing():
            group.losses = 0

    def _makes(self, who: Incarnation, key: SampleKey) -> bool:
        group = self.groups.get(key.group)
        return group is not None and group.holder == who and key.member in group.making

    # --- the end of groups and their prompts

    def reopen(self, group: Group, state: str, losses: int) -> None:
        group.holder, group.making = None, set()
        missing = group.missing()
        group.losses += losses if missing else 0
        if group.losses >= 6:
            group.losses = 0
            self.fail({SampleKey(group.id, n) for n in missing})
            return
        anew = {n for n in missing if not group.samples[n].partial}
        if len(anew) == len(group.alive()) or (missing and self.policy.on_failed_member == "drop"):
            self.end(group, state)
        elif missing:
            self.ended[state] += len(anew)
            self.issued += len(anew)
            group.attempt += 1
            self.reopened.append(group.id)

    def end(self, group: Group, state: str, marked: dict[int, str] | None = None, fate: str = "return") -> None:
        self.groups.pop(group.id, None)
        if group.id in self.reopened:
            self.reopened.remove(group.id)
        for member, sample in group.alive():
            self.ended[(marked or {}).get(member, state)] += 1
            sample.parts = []
        failures = group.failures + (fate == "failed")
        if fate == "retire" or (fate == "failed" and failures >= self.policy.failures_per_prompt):
            self.retired.append(group.prompt)
        elif fate == "filter":
            self.filtered.append(group.prompt)
        else:
            losses = 0 if fate == "failed" else group.losses
            self.waiting[group.prompt] = (group.attempt + 1, failures, group.item, losses)

    def give_up(self, of: Callable[[Group], bool], state: str, losses: int = 1) -> None:
        """Whoever makes these groups makes them no more."""
        for group in [group for group in self.groups.values() if group.holder is not None and of(group)]:
            self.reopen(group, state, losses)

    def fail(self, failed: set[SampleKey]) -> None:
        for id_ in {key.group: None for key in sorted(failed)}:
            group = self.groups.get(id_)
            if group is None or group.lease:
                continue
            members = {key.member for key in failed if key.group == id_}
            marked = dict.fromkeys(members, "failed")
            frozen = any(self.policy.frozen_by in sample.done for sample in group.samples)
            mode = "drop" if frozen else self.policy.on_failed_member
            if mode == "regenerate" and group.failures + 1 >= self.policy.failures_per_prompt:
                self.end(group, "dropped(sibling)", marked, "retire")
            elif mode == "drop" or (mode == "shrink" and len(group.alive()) - len(members) < self.policy.min_group):
                self.end(group, "dropped(sibling)", marked, "failed")
            else:
                self._replace(group, members, again=mode == "regenerate")

    def _replace(self, group: Group, members: set[int], *, again: bool, state: str = "failed") -> None:
        self.ended[state] += len(members)
        for sample in group.samples:
            sample.leases.pop(self.policy.frozen_by, None)
        for member in members:
            group.samples[member] = Sample(excluded=not again)
        if again:
            self.issued += len(members)
            group.attempt, group.failures = group.attempt + 1, group.failures + (state == "failed")
            group.losses = 0 if state == "failed" else group.losses
            if group.holder is None and group.id not in self.reopened:
                self.reopened.append(group.id)

    # --- consumers

    def has(self, sample: Sample, task: str) -> bool:
        fields = {name for part in sample.parts for name in part.block.fields}
        return sample.made and not sample.excluded and fields >= set(self.policy.tasks[task])

    def ready(self, task: str) -> set[SampleKey]:
        return {
            SampleKey(group.id, member)
            for group in self.groups.values()
            for member, sample in group.alive()
            if self.has(sample, task) and task not in sample.leases and task not in sample.done
        }

    def whole(self, task: str) -> dict[int, set[SampleKey]]:
        """What a take of whole groups may get."""
        ready, found = self.ready(task), {}
        for group in self.groups.values():
            keys = {SampleKey(group.id, n) for n, sample in group.alive() if task not in sample.done}
            if keys and keys <= ready and not group.missing():
                found[group.id] = keys
        return found

    def step_ready(self) -> list[Group]:
        return [
            group
            for group in self.groups.values()
            if group.holder is None and not group.lease and all(self.has(sample, TRAIN) for _, sample in group.alive())
        ]

    def sample(self, key: SampleKey) -> Sample:
        return self.groups[key.group].samples[key.member]

    def grant(self, who: Incarnation, id_: int, task: str, keys: list[SampleKey]) -> None:
        pins = self.extents_of(keys)
        for key in keys:
            if task == TRAIN:
                self.groups[key.group].lease = id_
            else:
                self.sample(key).leases[task] = id_
        self.leases[id_] = Lease(id_, task, keys, list(pins), who)

    def extents_of(self, keys: list[SampleKey]) -> dict[Extent, None]:
        """Where the columns of these samples lie."""
        found: dict[Extent, None] = {}
        for part in [part for key in keys for part in self.sample(key).parts]:
            found.update(dict.fromkeys([part.block.extent] if part.block.extent is not None else []))
            found.update(dict.fromkeys(self.homes[digest] for digest in part.block.digests))
        return found

    def held(self, lease: Lease) -> dict[SampleKey, Sample]:
        return {
            key: self.sample(key)
            for key in lease.keys
            if key.group in self.groups and self.sample(key).leases.get(lease.task) == lease.id
        }

    def close(self, lease: Lease, *, pinned: bool) -> None:
        del self.leases[lease.id]
        for sample in self.held(lease).values():
            del sample.leases[lease.task]
        for group in self.groups.values():
            if group.lease == lease.id:
                group.lease = 0
        if pinned:
            self.pinned[lease.id] = lease

    def complete(self, who: Incarnation, id_: int, puts: list[BlockPut], failed: set[SampleKey], pinned: bool) -> None:
        lease = self.leases.get(id_)
        if lease is None or lease.holder != who:
            if not pinned:
                self.unpin(who, id_)
            return
        held, pending = self.held(lease), list[tuple[SampleKey, Part]]()
        for put in puts:
            rows = [row for row in put.rows if row.key in held]
            block = self.new_block(put) if rows else None
            versioned = bool(set(put.block.fields) & set(self.policy.versioned))
            for row in rows:
                assert block is not None
                pending.append((row.key, Part(block, row.row, lease.task, put.version if versioned else -1)))
        here = {key for key in lease.keys if key.group in self.groups and not self.sample(key).excluded}
        failed &= here if lease.task == TRAIN else held.keys()
        self.close(lease, pinned=pinned)
        undone = failed | {key for key, part in pending if part.version >= 0 and self.lag(part.version) > 0}
        self.fail(failed)
        if lease.task == self.policy.frozen_by:
            undone |= {key for key in held if key.group in {bad.group for bad in failed}}
        for key, sample in held.items():
            if key in undone or key.group not in self.groups:
                continue
            sample.parts += [part for at, part in pending if at == key]
            sample.done.add(lease.task)
            sample.deaths = 0
        # Nobody will ever put what these lack.
        useful = {key for task in self.policy.tasks for key in self.ready(task) if task != TRAIN}
        self.fail(
            {
                key
                for key in held.keys() - undone - useful
                if key.group in self.groups and not self.sample(key).leases and not self.has(self.sample(key), TRAIN)
            }
        )

    def unpin(self, who: Incarnation, id_: int) -> None:
        if id_ in self.pinned and self.pinned[id_].holder == who:
            del self.pinned[id_]

    def abandon(self, who: Incarnation, id_: int) -> None:
        lease = self.leases.get(id_)
        if lease is None or lease.holder != who:
            self.unpin(who, id_)
            return
        self.close(lease, pinned=False)

    def lapse(self, lease: Lease, *, pinned: bool, blame: bool = True) -> None:
        groups = [self.groups[id_] for id_ in {key.group: None for key in lease.keys} if id_ in self.groups]
        samples = list(self.held(lease).values())
        if lease.task == TRAIN:
            samples = [sample for group in groups for _, sample in group.alive()]
        self.close(lease, pinned=pinned)
        for sample in samples:
            sample.deaths += blame
        for group in groups:
            bad = {n: "quarantined" for n, sample in group.alive() if sample.deaths >= self.limits.quarantine_after}
            if bad and not group.lease:
                self.end(group, "dropped(sibling)", bad, "retire")

    def end_work(self, of: Callable[[Incarnation], bool], *, dead: bool) -> None:
        self.give_up(lambda group: group.holder is not None and of(group.holder), "dropped(producer gone)")
        for lease in list(self.leases.values()):
            if of(lease.holder):
                self.lapse(lease, pinned=not dead)

    def gone(self, who: Incarnation) -> None:
        self.end_work(lambda other: other == who, dead=True)
        for id_ in list(self.pinned):
            self.unpin(who, id_)

    # --- steps

    def may_train(self, who: Incarnation, groups: int, now: float, *, part: bool = False) -> list[SampleKey]:
        """What the trainer gets, after the ledger has made its mind up about stragglers.

        part: fewer groups will do, beside what the trainer holds.
        """
        if self.trainer is None:
            return []
        self.refuse_stale(0)
        at_work = [lease for lease in self.leases.values() if lease.task == TRAIN]
        if any(not part or lease.holder != who for lease in at_work):
            return []
        ready = self.step_ready()
        room = self._places(ready, groups) if part else groups
        granted = min(groups, len(ready))
        if len(ready) < groups and (room or not ready):
            self.blocked = None
            granted = min(granted, room)
        elif self._held(ready, now, part=part):
            granted = min(groups - 1, room)
        if granted < (1 if part else groups):
            return []
        ready.sort(key=lambda group: (-self.staleness(group), group.id))
        return [SampleKey(group.id, n) for group in ready[:granted] for n, _ in group.alive()]

    def _held(self, ready: list[Group], now: float, *, part: bool) -> bool:
        """Whether the batch waits for stragglers. Those beyond the bound end, unless more parts may be taken."""
        assert self.trainer is not None
        late = self._stragglers(ready)
        if late and self.surplus():
            over = self.outstanding() - self.bound(self.trainer) - self.going_on()
            while late and over > 0:
                over -= len(late[-1].alive())
                group = late.pop()
                if not part and not self.recycle(group):
                    self.end(group, "dropped(surplus)")
        since = now if self.blocked is None else self.blocked
        if late and self.policy.on_straggler == "wait" and now - since < self.policy.straggler_wait_s:
            self.blocked = since
            return True
        waited = self.policy.on_straggler == "wait" and self.policy.straggler_wait_s > 0
        for group in late:
            fate = "failed" if waited and group.missing() else "return"
            self.end(group, "dropped(straggler)", fate=fate)
        self.blocked = None
        return False

    def _places(self, ready: list[Group], groups: int) -> int:
        """Those of a step that stragglers do not need; what the next update ends comes first."""
        assert self.trainer is not None
        if self.policy.on_straggler != "wait":
            return groups
        late = self._stragglers(ready)
        over = self.outstanding() - self.bound(self.trainer) - self.going_on() if self.surplus() else 0
        while late and over > 0:
            over -= len(late.pop().alive())
        soon = [group for group in ready if self.staleness(group) + 1 > self.policy.max_staleness]
        return max(len(soon), groups - len(late), 0)

    def _stragglers(self, ready: list[Group]) -> list[Group]:
        if self.policy.on_straggler == "mask":
            return []
        others = [group for group in self.groups.values() if group not in ready and not group.lease]
        return [
            group for group in others if not group.recycled and self.staleness(group) + 1 > self.policy.max_staleness
        ]

    def refuse_stale(self, surplus: int) -> None:
        stale = [
            group
            for group in reversed(list(self.groups.values()))
            if not group.lease and self.staleness(group) > self.policy.max_staleness
        ]
        for group in stale:
            if group.recycled and not self.keep_within(group):
                self.end(group, "dropped(surplus)" if surplus > 0 else "refused(stale)")
        left = surplus - self.going_on() if surplus else 0
        for group in stale:
            if group.recycled:
                continue
            if left <= 0 or not self.recycle(group):
                self.end(group, "dropped(surplus)" if left > 0 else "refused(stale)")
            left -= len(group.alive())

    def going_on(self) -> int:
        """Samples that were recycled and are not ready for training."""
        ready = self.step_ready()
        return sum(
            len(group.alive())
            for group in self.groups.values()
            if group.recycled and not group.lease and group not in ready
        )

    def recycle(self, group: Group) -> bool:
        begun = group.holder is not None or any(sample.partial for sample in group.samples)
        if self.policy.on_surplus == "drop" or not begun:
            return False
        group.recycled = True
        return self.keep_within(group)

    def keep_within(self, group: Group) -> bool:
        """Finished members with no token within the bound are made again, beside others that are not so."""
        bound = self.policy.max_staleness
        stale = {n for n, sample in group.alive() if sample.versions and self.unmasked(sample) > bound}
        if stale and len(stale) == len(group.alive()):
            return False
        if stale and any(self.policy.frozen_by in sample.done for sample in group.samples):
            return False
        if stale:
            self._replace(group, stale, again=True, state="dropped(surplus)")
        return True

    def move_weights(self, version: int) -> None:
        self.trainer = version
        for group in self.groups.values():
            if not group.lease:
                self.lapse_columns(group)

    def lapse_columns(self, group: Group) -> None:
        for sample in group.samples:
            tasks = {part.task for part in sample.parts if part.version >= 0 and self.lag(part.version) > 0}
            lost = {name for part in sample.parts if part.task in tasks for name in part.block.fields}
            sample.parts = [part for part in sample.parts if part.task not in tasks]
            sample.done -= tasks
            for task in [task for task in sample.leases if lost & set(self.policy.tasks[task])]:
                del sample.leases[task]

    def step_done(self, who: Incarnation, ids: list[int], step: int, version: int, *, skipped: bool) -> None:
        before = self.trainer
        for lease in [lease for lease in self.leases.values() if lease.task == TRAIN and lease.id not in ids]:
            self.lapse(lease, pinned=True, blame=False)
        self.move_weights(version)
        for id_ in ids:
            self._train(who, self.leases[id_], step, skipped=skipped)
            if version == before and not skipped:
                self.since_update += len(self.leases[id_].keys)
            self.close(self.leases[id_], pinned=False)
        if version != before:
            self.since_update = 0
        self.step = step
        self.refuse_stale(self.surplus())
        self.asked = min(self.asked, self.beyond())

    def _train(self, who: Incarnation, lease: Lease, step: int, *, skipped: bool) -> None:
        for group in [group for group in self.groups.values() if group.lease == lease.id]:
            del self.groups[group.id]
            self.path.setdefault(step, []).append((group, skipped))
            for sample in group.samples:
                sample.leases, sample.deaths = {}, 0
                if skipped:
                    sample.parts = []
            if skipped:
                self.ended["skipped"] += len(group.alive())
            else:
                self.trained[group.id] = group
                group.lease = 0

    def filter(self, who: Incarnation, id_: int, groups: list[int], *, pinned: bool) -> None:
        """These groups of a train lease are left out of the step."""
        lease = self.leases[id_]
        for group in groups:
            self.end(self.groups[group], "dropped(filter)", fate="filter")
        lease.keys = [key for key in lease.keys if key.group not in groups]
        if not lease.keys:
            self.close(lease, pinned=pinned)
        elif not pinned:
            needed = self.extents_of(lease.keys)
            lease.pins = [extent for extent in lease.pins if extent in needed]

    def ask(self, groups: int) -> None:
        self.asked = max(groups, min(self.asked, self.beyond()))

    def choose(self, items: dict[int, int]) -> None:
        self.chosen.update({index: item for index, item in items.items() if index >= self.cursor})

    def commit(self, step: int) -> None:
        for done in [done for done in self.path if self.committed < done <= step]:
            for group, _ in self.path[done]:
                if self.trained.pop(group.id, None) is not None:
                    self.ended["freed"] += len(group.alive())
        self.committed = max(self.committed, step)

    def rollback(self, who: Incarnation, step: int, version: int) -> None:
        for lease in [lease for lease in self.leases.values() if lease.task == TRAIN]:
            self.lapse(lease, pinned=True, blame=False)
        self.move_weights(version)
        self.commit(min(step, self.step))
        undone = [record for done in sorted(self.path) if done > step for record in self.path.pop(done)]
        self.committed = self.step = step
        self.since_update, self.blocked = 0, None
        self.refuse_stale(0)
        again: list[Group] = []
        for group, skipped in undone:
            if self.trained.pop(group.id, None) is None:
                self.ended["skipped" if skipped else "freed"] -= len(group.alive())
                self.ended["lost"] += len(group.alive())
                self.waiting[group.prompt] = (group.attempt + 1, group.failures, group.item, group.losses)
            elif group.id in self.lost_payloads:
                self.end(group, "lost")
            elif self.staleness(group) > self.policy.max_staleness:
                self.end(group, "refused(stale)")
            else:
                again.append(group)
        self.lost_payloads = set()
        for group in sorted(again, key=lambda group: (-self.staleness(group), group.id)):
            limit = (self.policy.max_staleness + 1) * self.policy.batch_samples
            if self.outstanding() + len(group.alive()) > limit:
                self.end(group, "dropped(surplus)")
            else:
                self.groups[group.id] = group
                self.lapse_columns(group)
        self.asked = min(self.asked, self.beyond())

    # --- disk, node

    def spilled(self, moves: list[tuple[Extent, Extent]]) -> list[Extent]:
        """Copies from one place to another are there; answers with those that are of no use."""
        useless: list[Extent] = []
        for old, new in moves:
            found = [block for block in self.blocks() if block.extent == old]
            if found and self.references()[old] == 1:
                found[0].extent = new
            else:
                useless.append(new)
        return useless

    def new_memory(self) -> None:
        """Shared memory is gone, and with it all processes."""
        self.leases, self.pinned, self.homes = {}, {}, {}
        for sample in self.all_samples():
            sample.parts, sample.leases = [], {}
        for group in list(self.groups.values()):
            group.lease = 0
            if any(sample.partial for sample in group.samples) and self.policy.on_failed_member != "drop":
                self._only_marks_left(group)
            else:
                self.end(group, "lost")
        self.lost_payloads = set(self.trained)
        self.trainer, self.blocked, self.since_update = None, None, 0

    def _only_marks_left(self, group: Group) -> None:
        if group.holder is not None:
            self.reopen(group, "dropped(producer gone)", 0)
        for member, sample in group.alive():
            if sample.made:
                group.samples[member] = Sample()
                self.ended["lost"] += 1
                self.issued += 1
        if group.id not in self.reopened:
            self.reopened.append(group.id)
