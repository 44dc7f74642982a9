"""The registry and the queue of a simulated run: the real state machines, and disks that survive them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from plane_checker import LAPSED, VERSIONS
from plane_roles import Role
from sim_broker import Crashed, SimBroker
from sim_kernel import Steps

from relax_rt.cluster.registry.core import TICK_S, Counters, Dropped, Entry, Issued, RegistryCore, RegistryState
from relax_rt.interfaces.registry import Changes
from relax_rt.transport.base.liveness import PauseDetector
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.queue.ledger import events as ev
from relax_rt.transport.queue.ledger.policy import LedgerPolicy, QueueLimits
from relax_rt.transport.rpc.errors import RelaxError, StaleEpoch
from relax_rt.transport.rpc.identity import Incarnation

if TYPE_CHECKING:
    from plane_world import World

WATCH_S = 5.0
QUEUE_TICK_S = 0.5


class Hold:
    """An answer that comes later: `register` is given the way back."""

    def __init__(self, register: Callable[[Callable[[Any], None]], None]) -> None:
        self.register = register


class RegistryDisk:
    """What the registry's file holds, as its store keeps it."""

    def __init__(self) -> None:
        self._generation, self._run = 0, -1
        self._counters = Counters()
        self._entries: dict[str, Entry] = {}
        self._issued: dict[int, Issued] = {}
        self._versions: list[VersionRecord] = []

    def open(self, run: int) -> RegistryState:
        self._generation += 1
        if run != self._run:
            self._run = run
            self._entries = {
                slot: Entry(msgspec.structs.replace(entry.member, state="gone"))
                for slot, entry in self._entries.items()
            }
        return RegistryState(
            self._generation,
            self._counters,
            list(self._entries.values()),
            list(self._issued.values()),
            list(self._versions),
        )

    def put(self, writes: list[Any]) -> None:
        for write in writes:
            match write:
                case Entry(member=member):
                    self._entries[member.who.slot] = write
                case Counters():
                    self._counters = write
                case Issued(version=version):
                    self._issued[version] = write
                case VersionRecord(version=version):
                    self._versions.append(write)
                    self._issued = {v: one for v, one in self._issued.items() if v > version}
                case Dropped(slot=slot):
                    self._entries.pop(slot, None)


class Registry(Role):
    """One life of the registry."""

    core: RegistryCore | None = None

    def main(self) -> Steps:
        world = self.world
        yield world.kernel.random.uniform(0.02, 0.2)
        self.core = RegistryCore(world.registry_disk.open(self.run), self.now())
        self._held: list[tuple[float, int, Callable[[Any], None]]] = []
        self._effects: list[Callable[[], None]] = []
        epoch = self.core.issue_epoch(self.who.slot)
        world.checker.issued(self.who.slot, epoch)
        self.core.enter(Incarnation(self.who.slot, epoch), 1, "unix:///registry", "ready")
        self._flush()
        world.servers[self.slot] = self
        self.report_ready()
        self.waiting("calls")
        while True:
            yield TICK_S
            if self.core is None:
                continue
            for member in self.core.tick(self.now()):
                self._judge_lapse(member.who)
            self._flush()
            self._let_go()

    def _judge_lapse(self, who: Incarnation) -> None:
        """Who did well all the time must not lose its lease."""
        role = self.world.living(who)
        self.world.note("lease lapsed", who=str(who))
        if role is not None and self.world.kernel.now > role.trouble + 2.0 * self.world.ttl_s:
            self.world.checker.found(LAPSED, f"{who}, which was well since {role.trouble:.2f}")

    def serve(self, do: Callable[[Any], Any], back: Callable[[Any], None]) -> None:
        if self.core is None:
            return
        rng, rate = self.world.kernel.random, self.world.crash_rate
        try:
            value = do(self)
        except RelaxError as error:
            value = error
        if rate and self.core.writes and rng.random() < rate:
            if rng.random() < 0.5:
                self._flush()
            self.core = None
            self.end("killed", "crashed in the middle of a call")
            return
        self._flush()
        if isinstance(value, Hold):
            value.register(back)
        else:
            back(value)
        self._let_go()

    def _flush(self) -> None:
        assert self.core is not None
        writes, self.core.writes = self.core.writes, []
        if writes:
            self.world.registry_disk.put(writes)
        effects, self._effects = self._effects, []
        for effect in effects:
            effect()

    # --- its calls, by those who make them

    def issue_epoch(self, slot: str) -> int:
        assert self.core is not None
        epoch = self.core.issue_epoch(slot)
        self._effects.append(lambda: self.world.checker.issued(slot, epoch))
        return epoch

    def announce(self, who: Incarnation, ttl_s: float) -> Any:
        assert self.core is not None
        answer = self.core.announce(who, 1, f"unix:///{who.slot}", ttl_s, self.now())
        self._effects.append(lambda: self.world.checker.effect("registry", who))
        return answer

    def renew(self, who: Incarnation, state: str, n: int, version: int) -> Any:
        assert self.core is not None
        answer = self.core.renew(who, state, n, "", version, self.now())
        self._effects.append(lambda: self.world.checker.effect("registry", who))
        member = self.core.member(who.slot)
        if member is not None:
            self.world.checker.reported(who, member.policy_version)
        return answer

    def gone(self, who: Incarnation) -> None:
        assert self.core is not None
        self.core.process_exited(who, "its process ended")

    def issue_version(self, who: Incarnation) -> int:
        assert self.core is not None
        version = self.core.issue_version(who)
        self._effects.append(lambda: self.world.checker.issued_version(who, version))
        return version

    def commit(self, who: Incarnation, record: VersionRecord) -> VersionRecord:
        assert self.core is not None
        before = self.core.committed
        answer = self.core.commit_version(who, record)
        self._effects.append(lambda: self.world.checker.effect("registry", who))
        if before != self.core.committed:
            self._effects.append(lambda: self.world.checker.committed_version(who, record))
            self.world.note("committed", version=record.version, who=str(who))
        elif answer != record:
            self.world.checker.found(VERSIONS, f"{who} was told that {record} is committed, and {answer} is")
        return answer

    def versions(self) -> list[VersionRecord]:
        assert self.core is not None
        return self.core.versions()

    def watch(self, since: int) -> Hold | Changes:
        assert self.core is not None
        return self.core.changes(since) or Hold(
            lambda back: self._held.append((self.world.kernel.now + WATCH_S, since, back))
        )

    def _let_go(self) -> None:
        """Answer the watches for which there is something, or that waited long enough."""
        if self.core is None or not self._held:
            return
        still = []
        for until, since, back in self._held:
            found = self.core.changes(since)
            if found is None and until > self.world.kernel.now:
                still.append((until, since, back))
            else:
                back(found or Changes(self.core.revision, False, [], self.core.committed))
        self._held = still


class Broker(SimBroker):
    """The queue's ledger and journal; it lives as long as the process that carries it."""

    process: Queue | None = None
    pauses: PauseDetector

    def __init__(self, world: World, policy: LedgerPolicy, limits: QueueLimits) -> None:
        super().__init__(world.kernel, world.no_memory, policy, limits)
        self._world = world

    def now(self) -> float:
        assert self.process is not None
        return self.process.now()

    def crash(self) -> None:
        process = self.process
        if self.ledger is not None and process is not None:
            self.ledger = None
            process.end("killed", "crashed in the middle of a call")

    def keep_time(self) -> None:
        """As the real broker does between calls."""
        ledger = self.ledger
        assert ledger is not None
        now = self.now()
        verdict = self.pauses.check(now)
        if verdict == "restart":
            ledger.restart_deadlines(now)
        elif verdict == "expire" and (lapse := ledger.due(now)) is not None:
            self._judge(lapse)
            self.apply(lapse)
        if len(self.journal) > 200:
            self.snapshot, self.journal = ledger.snapshot(), []

    def _judge(self, lapse: ev.Lapse) -> None:
        assert self.ledger is not None
        state = self.ledger.state
        holders = [(id_, state.groups[id_].holder) for id_ in lapse.groups if id_ in state.groups]
        holders += [(id_, state.leases[id_].holder) for id_ in lapse.leases]
        for id_, who in holders:
            role = self._world.living(who) if who is not None else None
            if role is not None and id_ in role.held and self._world.kernel.now > role.trouble + self._limits.lease_s:
                self._world.checker.found(LAPSED, f"lease {id_} of {who}, which was well since {role.trouble:.2f}")

    def _tick(self, life: int) -> None:
        """The process that carries it keeps the time."""


class Queue(Role):
    """One life of the queue's process."""

    def main(self) -> Steps:
        world, broker = self.world, self.world.broker
        yield world.kernel.random.uniform(0.02, 0.3)
        broker.process, broker.run_id, broker.crash_rate = self, self.run, 0.0
        broker.start()
        broker.crash_rate = world.crash_rate
        broker.pauses = PauseDetector(self.now(), QUEUE_TICK_S)
        world.servers[self.slot] = self
        self.report_ready()
        self.waiting("calls")
        while True:
            yield QUEUE_TICK_S
            try:
                if broker.ledger is not None:
                    broker.keep_time()
            except Crashed:
                continue

    def die(self) -> None:
        super().die()
        if self.world.broker.process is self:
            self.world.broker.ledger = None

    def serve(self, do: Callable[[Any], Any], back: Callable[[Any], None]) -> None:
        if self.world.broker.process is not self or self.world.broker.ledger is None:
            return
        try:
            value = do(self)
        except RelaxError as error:
            value = error
        except Crashed:
            return
        back(value)

    def event(self, who: Incarnation, seq: int, event: ev.Event) -> Any:
        """A call of the queue; one that is made again has the same number."""
        broker = self.world.broker
        value: Any = None

        def answer(got: Any) -> None:
            nonlocal value
            value = got

        broker.receive(broker.life, who, seq, event, answer)
        if broker.ledger is None:
            raise Crashed
        if isinstance(value, RelaxError):
            raise value
        # Nothing came of a call that was told to wait, so it is no matter who hears so again.
        if not isinstance(event, ev.ProcessExited) and not getattr(value, "waiting_on", ""):
            self.world.checker.effect("queue", who, f": {event} -> {value}")
        return value

    def renew_held(self, who: Incarnation, ids: list[int]) -> list[int]:
        ledger = self.world.broker.ledger
        assert ledger is not None
        ledger.knows(who)
        return list(ledger.renew(who, ids, self.now()))


class Stage:
    """The weight stage: what it holds outlives those who write it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._epoch = 0
        self.manifests: dict[int, tuple[int, str]] = {}

    def fence(self, who: Incarnation) -> None:
        if who.epoch < self._epoch:
            raise StaleEpoch(f"weight stage for {who}", why=f"epoch {self._epoch} writes here")
        self._epoch = who.epoch

    def seal(self, who: Incarnation, version: int, digest: str) -> None:
        self.fence(who)
        self._world.checker.effect("stage", who)
        self.manifests[version] = (who.epoch, digest)

    def retire(self, committed: int) -> None:
        self.manifests = {version: one for version, one in self.manifests.items() if version >= committed}
