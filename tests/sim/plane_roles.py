"""The roles of a simulated run: what they do with registry, queue, stage, each other, and their agent."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from plane_checker import MIXED
from plane_parts import Host, Process
from sim_checker import FOREIGN, UNEXPECTED, Trained
from sim_kernel import Promise, Steps

from relax_rt.supervision.executor import GangRendezvous, StartOrder
from relax_rt.supervision.protocol import SlotFinished, SlotProgress, SlotReady
from relax_rt.transport.base.versions import ROOT, VersionRecord
from relax_rt.transport.memory.refs import BlockRef
from relax_rt.transport.queue.ledger import events as ev
from relax_rt.transport.queue.ledger.messages import (
    BlockPut,
    LeaseGrant,
    LeaseRequest,
    RowPut,
    SampleKey,
    Ticket,
    VersionSpan,
)
from relax_rt.transport.rpc.errors import Refused, StaleEpoch
from relax_rt.transport.rpc.identity import Incarnation

if TYPE_CHECKING:
    from plane_agent import Executor
    from plane_world import World

BEAT_S = 1.0
MEET_S = 4.0
"""A collective whose ranks are not all there by then is ended."""
RETRY_S = 0.5


class Failed(Exception):
    """A role ends with an error."""


class Role(Process):
    """One incarnation: reports to the agent of its host, keeps its lease at the registry, and works."""

    def __init__(self, world: World, order: StartOrder, host: Host, executor: Executor) -> None:
        super().__init__(world, str(Incarnation(order.slot, order.epoch)), host)
        self.slot, self.order, self.executor = order.slot, order, executor
        self.who = Incarnation(order.slot, order.epoch)
        self.pid = world.new_pid()
        self.held: set[int] = set()
        self.version = self.committed = 0
        self.state = "starting"
        self.is_stopping = False
        self._seq = self._n = 0
        self._waiting = ""
        self._ended = False
        self.thread(self._live())
        self.thread(self._beat())
        if order.slot != "registry/0":
            self.thread(self._keep_membership())

    # --- life

    def main(self) -> Steps:
        raise NotImplementedError

    def _live(self) -> Steps:
        try:
            yield from self.main()
            self.tell(SlotFinished(self.slot))
            yield 0.01
            self.end("clean", "finished")
        except StaleEpoch as error:
            self.end("exception", str(error))
        except (Failed, Refused, TimeoutError) as error:
            self.end("exception", f"{type(error).__name__}: {error}")

    def end(self, kind: str, cause: str) -> None:
        """Exit; the agent sees it."""
        if self.alive and not self._ended:
            self._ended = True
            self.world.kernel.after(0.0, lambda: self.exit(kind, cause))

    def exit(self, kind: str, cause: str) -> None:
        if self.alive:
            self.die()
            self.world.note("exit", who=self.name, kind=kind, cause=cause)
            self.executor.exited(self, kind, cause)

    def asked_to_stop(self) -> None:
        """The stop request has come; sometimes the work in hand takes longer than the patience of the agent."""
        self.is_stopping, self.state = True, "draining"
        slow = self.world.faulty and self.world.kernel.random.random() < 0.1
        self.later(3.0 if slow else self.world.kernel.random.uniform(0.01, 0.2), lambda: self.end("clean", "stopped"))

    # --- towards the agent

    def tell(self, event: Any) -> None:
        self.world.kernel.after(0.001, lambda: self.executor.told(self, event))

    def report_ready(self) -> None:
        self.state = "ready"
        self.tell(SlotReady(self.slot))

    def waiting(self, reason: str) -> None:
        if reason != self._waiting:
            self._waiting = reason
            self.tell(SlotProgress(self.slot, self._n, reason))

    def advance(self) -> None:
        self._n += 1
        self._waiting = ""
        self.tell(SlotProgress(self.slot, self._n))

    def _beat(self) -> Steps:
        while True:
            yield BEAT_S
            if self._waiting:
                self.tell(SlotProgress(self.slot, self._n, self._waiting))

    # --- towards the registry

    def _keep_membership(self) -> Steps:
        ttl_s, announced, who = self.world.ttl_s, False, self.who
        while True:
            try:
                if not announced:
                    yield from self.ask("registry/0", "announce", who, ttl_s, give_up_s=ttl_s, shown=False)
                    announced = True
                answer = yield from self.ask(
                    "registry/0", "renew", who, self.state, self._n, self.version, give_up_s=ttl_s, shown=False
                )
                self.committed = answer.committed
                yield ttl_s / 3
            except StaleEpoch as error:
                self.end("exception", str(error))
                return
            except Refused:
                announced = False
                yield RETRY_S
            except TimeoutError:
                yield RETRY_S

    # --- towards the queue

    def call(self, event: ev.Event, *, may_refuse: bool = False) -> Steps:
        """The answer. Copies of the call have its number.

        Raises:
            StaleEpoch: it is fenced.
            Refused: the queue does not do it.
        """
        self._seq += 1
        seq, who, first_sent = self._seq, self.who, self.world.kernel.now
        try:
            answer = yield from self.ask("queue/0", "event", who, seq, event)
        except StaleEpoch:
            raise
        except Refused as error:
            if not may_refuse:
                self.world.checker.found(UNEXPECTED, f"{who}: {error}")
            raise
        self.world.checker.answered(who, first_sent, self.world.kernel.now)
        return answer

    def renew_leases(self) -> Steps:
        """For a thread of its own."""
        who = self.who
        while True:
            yield self.world.limits.lease_s / 3
            if self.held:
                try:
                    lost = yield from self.ask(
                        "queue/0", "renew_held", who, sorted(self.held), timeout_s=0.5, give_up_s=2.0, shown=False
                    )
                except (Refused, TimeoutError):
                    continue
                self.held.difference_update(lost)

    def work(self, seconds: float) -> Steps:
        """Slower than others now and then, as long as there are faults."""
        yield seconds

    def read(self, batch: LeaseGrant) -> dict[SampleKey, str]:
        """What each sample is, as its bytes say."""
        checker, seen = self.world.checker, dict[SampleKey, str]()
        for info in batch.infos():
            for block, row in info.parts:
                ref = batch.blocks[block]
                text = ref.inline.decode().split("|")[row]
                if ref.fields == ("tokens",):
                    checker.read(self.who, info.key, text)
                    seen[info.key] = text
                elif text != f"reward of {seen.get(info.key)}":
                    checker.found(FOREIGN, f"{self.who} read {text!r} as reward of {seen.get(info.key)}")
        return seen


class Rollout(Role):
    """An engine: follows the committed weights, generates what it gets tickets for."""

    def main(self) -> Steps:
        world, rng = self.world, self.world.kernel.random
        yield rng.uniform(0.1, 0.5)
        self.thread(self._follow())
        self.thread(self.renew_leases())
        self.report_ready()
        self.waiting("the first policy version")
        while not self.version:
            yield 0.2
        while True:
            version = self.version
            try:
                answer = yield from self.call(ev.RequestTickets(version, rng.randint(1, 2)), may_refuse=True)
            except StaleEpoch:
                raise
            except Refused:
                # The queue does not know the version yet.
                yield 0.3
                continue
            if not answer.tickets:
                self.waiting(answer.waiting_on or "room")
                yield rng.uniform(0.3, 0.6)
                continue
            self.waiting("")
            self.held.update(ticket.group for ticket in answer.tickets)
            for ticket in answer.tickets:
                yield from self._generate(ticket)
                self.held.discard(ticket.group)
            world.note("generated", who=self.name)

    def _follow(self) -> Steps:
        """Fetch each newly committed version, verify the copy, swap."""
        revision, wanted, rng = 0, 0, self.world.kernel.random
        while True:
            try:
                changes = yield from self.ask("registry/0", "watch", revision, timeout_s=6.0, shown=False)
            except Refused:
                yield RETRY_S
                continue
            revision = changes.revision
            if changes.committed is None or changes.committed.version <= wanted:
                continue
            record = changes.committed
            manifest = self.world.stage.manifests.get(record.version)
            yield rng.uniform(0.02, 0.2)
            # It may have been retired, or staged anew by another trainer, while it was copied.
            if manifest is None or self.world.stage.manifests.get(record.version) != manifest:
                revision = 0
                yield RETRY_S
                continue
            if manifest[1] != record.digest:
                revision = 0
                yield RETRY_S
                continue
            wanted = record.version
            self.world.checker.took_weights(self.who, record.version, manifest[1])
            self.version = record.version

    def _generate(self, ticket: Ticket) -> Steps:
        world, rng = self.world, self.world.kernel.random
        versions = [self.version]
        members = list(ticket.wanted())
        yield from self.work(min(rng.lognormvariate(-1.0, 1.1), 7.0))
        if ticket.group not in self.held:
            return
        if self.version != versions[0]:
            versions.append(self.version)
        digests = [world.new_digest(f"{ticket.group}.{member}") for member in members]
        rows = []
        for row, (member, digest) in enumerate(zip(members, digests, strict=True)):
            key = SampleKey(ticket.group, member)
            rows.append(RowPut(key, row, 1, [VersionSpan(n, n + 1, v, v) for n, v in enumerate(versions)]))
            world.checker.made(digest, key, versions)
        puts = [BlockPut(BlockRef(None, len(rows), ("tokens",), "|".join(digests).encode()), rows)]
        yield from self.call(ev.PutSamples(puts))
        for digest, one in zip(digests, rows, strict=True):
            world.checker.produced[digest].kept_as = one.key
        self.advance()


class Reward(Role):
    """Scores samples."""

    def main(self) -> Steps:
        rng = self.world.kernel.random
        yield rng.uniform(0.05, 0.3)
        self.thread(self.renew_leases())
        self.report_ready()
        while True:
            batch = yield from self.call(ev.RequestLease("reward", LeaseRequest(samples=rng.randint(2, 4))))
            if not batch.lease:
                self.waiting(batch.waiting_on or "samples")
                yield rng.uniform(0.2, 0.4)
                continue
            if not len(batch):
                yield from self.call(ev.ReleaseLease(batch.lease, "it ended"))
                continue
            self.waiting("")
            self.held.add(batch.lease)
            seen = self.read(batch)
            yield from self.work(rng.uniform(0.05, 0.3))
            rows = [RowPut(key, row) for row, key in enumerate(seen)]
            text = "|".join(f"reward of {digest}" for digest in seen.values())
            puts = [BlockPut(BlockRef(None, len(rows), ("reward",), text.encode()), rows)]
            yield from self.call(ev.CompleteLease(batch.lease, puts, [], False))
            self.held.discard(batch.lease)
            self.advance()


class Meeting:
    """Where the ranks of a gang meet: the store behind one port, until another gang gets the port."""

    def __init__(self, generation: int, world_size: int) -> None:
        self.generation, self.world_size = generation, world_size
        self.there: dict[int, tuple[Role, Promise]] = {}
        self.word = ""
        self.gangs: set[int] = set()

    def admits(self, role: Role) -> bool:
        """The ranks of another generation are not let in."""
        assert role.order.gang is not None
        return role.order.gang.generation == self.generation


class Rank(Role):
    """A rank of the trainer gang. Rank 0 takes batches, publishes and makes checkpoints; each step needs all ranks."""

    def main(self) -> Steps:
        gang = self.order.gang
        assert gang is not None
        yield self.world.kernel.random.uniform(0.2, 0.8)
        if gang.rank:
            self.report_ready()
            while True:
                self.waiting("the next step")
                if (yield from self.meet("next", patient=True)) == "end":
                    return
                yield from self.work(self.world.kernel.random.uniform(0.1, 0.5))
                self.advance()
        yield from self._train()

    def meet(self, word: str, *, patient: bool = False) -> Steps:
        """A collective of all ranks of the gang; answers with rank 0's word.

        Raises:
            Failed: not all were there in time.
        """
        gang, world = self.order.gang, self.world
        assert gang is not None
        deadline = world.kernel.now + (60.0 if patient else MEET_S)
        while True:
            store = world.meetings.get(GangRendezvous(gang.master_addr, gang.master_port))
            if store is not None and store.admits(self) and self._reaches(store):
                break
            if world.kernel.now > deadline or store is None or not store.admits(self):
                raise Failed("the rendezvous is not there")
            yield 0.3
        done = Promise()
        store.there[gang.rank] = (self, done)
        store.gangs.add(world.gang_of[self.name])
        if len(store.gangs) > 1:
            world.checker.found(MIXED, f"{self.name} of gang {world.gang_of[self.name]} meets {store.gangs}")
        if gang.rank == 0:
            store.word = word
        if len(store.there) == store.world_size and all(role.alive for role, _ in store.there.values()):
            there, store.there = store.there, {}
            said = store.word
            for role, box in there.values():
                world.kernel.after(0.01, partial(role.take, partial(box.settle, (said,))))
        world.kernel.after(max(0.0, deadline - world.kernel.now), lambda: done.settle(None))
        got = yield done
        if got is None:
            raise Failed(f"the collective was ended after {deadline - world.kernel.now:.0f} s")
        return got[0]

    def _reaches(self, store: Meeting) -> bool:
        now = self.world.kernel.now
        hosts = {role.host for role, _ in store.there.values()} | {self.host}
        return len(hosts) < 2 or all(host.cut_until <= now for host in hosts)

    # --- rank 0

    def _train(self) -> Steps:
        world, rng, who = self.world, self.world.kernel.random, self.who
        self.thread(self.renew_leases())
        world.disk.open(who.epoch)
        world.stage.fence(who)
        step, saved, path = world.disk.newest()
        known = yield from self.ask("registry/0", "versions")
        # Without a checkpoint: the initial weights, which an earlier incarnation may have published.
        parent = saved if step else known[0].version if known else ROOT
        record = yield from self._new_version(parent, step, changed=parent == ROOT)
        yield from self.call(ev.Rollback(step, record))
        world.path = path
        record = yield from self._publish(record)
        self.report_ready()
        while step < world.target:
            batch = yield from self.call(ev.RequestLease("train", LeaseRequest(groups=world.policy.prompts_per_step)))
            if not batch.samples:
                self.waiting(batch.waiting_on or "whole groups")
                yield rng.uniform(0.2, 0.4)
                continue
            self.waiting("")
            self.held.add(batch.lease)
            seen = self.read(batch)
            for info in batch.samples:
                world.checker.consumed(who, record.version, seen[info.key], info.masked)
            yield from self.meet("step")
            yield from self.work(rng.uniform(0.1, 0.4))
            record = yield from self._new_version(record.version, step + 1, changed=True)
            world.checker.stepped_on.update(seen.values())
            yield from self.call(ev.CompleteStep([batch.lease], step + 1, record), may_refuse=True)
            self.held.discard(batch.lease)
            step += 1
            path[step] = [Trained(i.key, i.prompt, seen[i.key]) for i in batch.samples]
            record = yield from self._publish(record)
            self.advance()
            if step % 2 == 0 or step >= world.target:
                yield from self._save(step, record.version, path)
        yield from self.meet("end")

    def _new_version(self, parent: int, step: int, *, changed: bool) -> Steps:
        version = yield from self.ask("registry/0", "issue_version", self.who)
        self.world.checker.version(version, parent, changed=changed)
        return VersionRecord(version, parent, step, changed=changed)

    def _publish(self, record: VersionRecord) -> Steps:
        world, who = self.world, self.who
        world.stage.fence(who)
        yield world.kernel.random.uniform(0.02, 0.5)
        digest = world.new_digest(f"weights {record.version}")
        world.stage.seal(who, record.version, digest)
        staged = VersionRecord(record.version, record.parent, record.step, digest, record.changed)
        committed = yield from self.ask("registry/0", "commit", who, staged)
        world.stage.retire(committed.version)
        self.version = committed.version
        return committed

    def _save(self, step: int, version: int, path: dict[int, list[Trained]]) -> Steps:
        world = self.world
        yield world.kernel.random.uniform(0.05, 0.3)
        if not world.disk.save(self.who.epoch, step, version, path):
            raise StaleEpoch(f"checkpoint of {self.who}", why="a newer incarnation writes here")
        world.checker.effect("checkpoints", self.who)
        yield from self.call(ev.Commit(step, f"step-{step}"))


class Doomed(Role):
    """Fails again and again, soon after it was ready."""

    def main(self) -> Steps:
        yield self.world.kernel.random.uniform(0.02, 0.1)
        self.report_ready()
        yield self.world.kernel.random.uniform(0.05, 0.3)
        raise Failed("it cannot work")
