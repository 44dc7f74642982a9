"""What holds for the supervisor whatever happens: one process a slot, whole gangs, no start after a stop, an end to
every run, and nothing that waits for nothing."""

from __future__ import annotations

import copy
import random
from typing import Any, NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from relax_rt.interfaces.agent import Diagnosis
from relax_rt.supervision.placement import Node, NoRoom, Placement, Placer
from relax_rt.supervision.protocol import (
    Action,
    DrainRequested,
    Emit,
    Event,
    Kill,
    KillRequested,
    NodeJoined,
    NodeLost,
    RestartRequested,
    RunDone,
    RunStarted,
    ScaleRequested,
    SlotExited,
    SlotFinished,
    SlotProgress,
    SlotReady,
    SlotSpawned,
    Start,
    StartGang,
    Stop,
    StopRequested,
    Tick,
)
from relax_rt.supervision.supervisor import Supervisor
from relax_rt.supervision.tree import RoleSpec, Slot, SlotSpec
from relax_rt.transport.rpc.errors import Refused


class Shape(NamedTuple):
    """A role to be drawn."""

    tier: int
    slots: int
    restart: str
    strategy: str
    gang: bool
    min_ready: int | None
    significant: bool
    system: bool
    max_restarts: int
    role_restarts: int
    gpus: float

    def role(self, kind: str) -> RoleSpec:
        return RoleSpec(
            kind=kind,
            strategy=self.strategy,  # type: ignore[arg-type]
            gang=self.gang,
            min_ready=None if self.gang else self.min_ready,
            role_restarts=self.role_restarts,
            role_period_s=1e9,
            slot=self.slot(kind, 0),
        )

    def slot(self, kind: str, n: int) -> SlotSpec:
        # Windows that never end: whatever is restarted, is counted.
        return SlotSpec(
            slot=f"{kind}/{n}",
            kind=kind,
            tier=self.tier,
            restart=self.restart,  # type: ignore[arg-type]
            significant=self.significant,
            system=self.system,
            max_restarts=self.max_restarts,
            period_s=1e9,
            gpus=self.gpus,
        )

    @property
    def most_starts(self) -> int:
        """Of one slot that no operator and no lost node has touched."""
        together = self.slots if self.strategy == "rest_for_one" else 1
        return (together * self.max_restarts + 1) * (self.role_restarts + 1)


SHAPES = st.lists(
    st.builds(
        Shape,
        tier=st.sampled_from([1, 2, 3]),
        slots=st.integers(1, 3),
        restart=st.sampled_from(["permanent", "permanent", "transient", "temporary"]),
        strategy=st.sampled_from(["one_for_one", "one_for_all", "rest_for_one"]),
        gang=st.booleans(),
        min_ready=st.sampled_from([None, 0, 1]),
        significant=st.booleans(),
        system=st.just(False) | st.booleans(),
        max_restarts=st.integers(0, 2),
        role_restarts=st.integers(0, 1),
        gpus=st.sampled_from([0.0, 1.0]),
    ),
    min_size=1,
    max_size=3,
)
# Failures that are tried again come more often: a run that has ended shows nothing more.
KINDS = st.sampled_from([*["clean", "exception", "killed", "hang", "oom"] * 3, "config", "given_up", "import_error"])
NODES = {"n1": Node("n1", 4, 3), "n2": Node("n2", 4, 2)}


class World(RuleBasedStateMachine):
    """Processes as the operating systems of two nodes would keep them, driven at random."""

    @initialize(shapes=SHAPES, placed=st.booleans(), seed=st.integers(0, 99))
    def build(self, shapes: list[Shape], placed: bool, seed: int) -> None:
        self.shapes = {f"r{i}": shape for i, shape in enumerate(shapes)}
        specs = [shape.slot(kind, n) for kind, shape in self.shapes.items() for n in range(shape.slots)]
        roles = [shape.role(kind) for kind, shape in self.shapes.items()]
        self.nodes = set(NODES) if placed else set[str]()
        placer = Placer([NODES[name] for name in sorted(self.nodes)]) if placed else None
        self.core = Supervisor(specs, random.Random(seed).random, roles, placer)
        self.now, self.epoch, self.events = 0.0, 0, 0
        self.live: dict[str, bool] = {}
        """Slots with a start that was not answered by an exit; true once a process exists."""
        self.at: dict[str, str] = {}
        self.ready: set[str] = set()
        self.stopped: set[str] = set()
        self.stopping = False
        self.generation = dict.fromkeys(self.shapes, 0)
        self.starts: dict[str, int] = {}
        self.touched: set[str] = set()
        """Kinds that operators or lost nodes had restarted, which no limit counts."""
        self.down: set[str] = set()
        self.wanted = {kind: shape.slots for kind, shape in self.shapes.items()}
        self.done: RunDone | None = None
        self.send(RunStarted())

    # What the core does to the world.

    def send(self, event: Event) -> bool:
        """False when it was refused."""
        self.events += 1
        if isinstance(event, NodeLost):
            for slot in [slot for slot in self.live if self.at[slot] == event.node]:
                self.forget(slot)
        try:
            actions = self.core.handle(event, self.now)
        except Refused:
            return False
        for action in actions:
            assert self.done is None, "nothing follows RunDone"
            # From this action on: one event may stop a slot for a restart first, and then lead to the end of the run.
            self.stopping = self.stopping or (isinstance(action, Emit) and action.kind == "run_draining")
            self.carry_out(action)
        return True

    def carry_out(self, action: Action) -> None:
        match action:
            case Start():
                assert not self.shape(action.slot).gang, "ranks start together"
                self.begin(action)
            case StartGang(kind=kind, generation=generation, ranks=ranks):
                assert generation > self.generation[kind], "each start of a gang has a rendezvous of its own"
                assert [r.slot for r in ranks] == [f"{kind}/{n}" for n in range(self.shapes[kind].slots)]
                assert not self.of(kind), "a rank of an older generation is alive"
                self.generation[kind] = generation
                for rank in ranks:
                    self.begin(rank)
            case Stop(slot=slot):
                assert slot in self.live
                if self.stopping and slot not in self.stopped:
                    tiers = [self.shape(o).tier for o in self.live]
                    assert self.shape(slot).tier == max(tiers), "stop runs from the top tier down"
                self.stopped.add(slot)
            case Kill(slot=slot):
                assert slot in self.live
                self.stopped.add(slot)
            case RunDone():
                assert not self.live, "done while a process lives"
                self.done = action

    def begin(self, start: Start) -> None:
        slot = start.slot
        kind, _, index = slot.partition("/")
        assert slot not in self.live, "two live incarnations of one slot"
        assert not self.stopping, "a start after the run began to end"
        assert slot not in self.down, "what was drained stays down"
        assert int(index) < self.wanted[kind], "a slot that was scaled away"
        assert not self.nodes or start.node in self.nodes, "a start on a node that is not there"
        if slot not in self.starts:
            self.check_lower_tiers(kind)
        self.starts[slot] = self.starts.get(slot, 0) + 1
        self.live[slot], self.at[slot] = False, start.node
        self.stopped.discard(slot)

    def check_lower_tiers(self, kind: str) -> None:
        states = {v.slot: v.state for v in self.core.view()}
        for other, shape in self.shapes.items():
            if shape.tier < self.shapes[kind].tier:
                wanted = [s for s, state in states.items() if s.startswith(f"{other}/") and state != "ended"]
                least = shape.role(other).min_ready
                enough = len(wanted) if least is None else min(least, len(wanted))
                assert len(self.ready.intersection(wanted)) >= enough, f"{kind} has started before {other} was ready"

    def shape(self, slot: str) -> Shape:
        return self.shapes[slot.partition("/")[0]]

    def of(self, kind: str) -> list[str]:
        return [slot for slot in self.live if slot.startswith(f"{kind}/")]

    def pick(self, data: st.DataObject, among: Any) -> str:
        return str(data.draw(st.sampled_from(sorted(among))))

    def forget(self, slot: str) -> None:
        del self.live[slot]
        self.ready.discard(slot)

    # What processes do.

    @precondition(lambda self: any(not up for up in self.live.values()))
    @rule(data=st.data())
    def spawn(self, data: st.DataObject) -> None:
        slot = self.pick(data, [s for s, up in self.live.items() if not up])
        self.epoch += 1
        self.live[slot] = True
        self.send(SlotSpawned(slot, self.epoch, 100 + self.epoch))

    @precondition(lambda self: any(not up for up in self.live.values()))
    @rule()
    def all_come_up(self) -> None:
        for slot in [s for s, up in self.live.items() if not up]:
            if slot in self.live:
                self.epoch += 1
                self.live[slot] = True
                self.send(SlotSpawned(slot, self.epoch, 100 + self.epoch))
                self.ready.add(slot)
                self.send(SlotReady(slot))

    @precondition(lambda self: any(self.live.values()))
    @rule(data=st.data())
    def becomes_ready(self, data: st.DataObject) -> None:
        slot = self.pick(data, [s for s, up in self.live.items() if up])
        self.ready.add(slot)
        self.send(SlotReady(slot))

    @precondition(lambda self: any(self.live.values()))
    @rule(data=st.data(), n=st.integers(0, 50), waiting=st.sampled_from(["", "x"]), extend=st.sampled_from([0.0, 50.0]))
    def reports(self, data: st.DataObject, n: int, waiting: str, extend: float) -> None:
        self.send(SlotProgress(self.pick(data, [s for s, up in self.live.items() if up]), n, waiting, extend))

    @precondition(lambda self: any(self.live.values()))
    @rule(data=st.data())
    def finishes(self, data: st.DataObject) -> None:
        self.send(SlotFinished(self.pick(data, [s for s, up in self.live.items() if up])))

    @precondition(lambda self: bool(self.live))
    @rule(data=st.data(), kind=KINDS)
    def exits(self, data: st.DataObject, kind: str) -> None:
        self.exit(self.pick(data, self.live), kind)

    @precondition(lambda self: bool(self.stopped & self.live.keys()))
    @rule(data=st.data(), kind=st.sampled_from(["clean", "killed"]))
    def exits_as_asked(self, data: st.DataObject, kind: str) -> None:
        self.exit(self.pick(data, self.stopped & self.live.keys()), kind)

    def exit(self, slot: str, kind: str) -> None:
        self.forget(slot)
        diagnosis = Diagnosis(slot=slot, epoch=self.epoch, kind=kind, cause="c", at=self.now)  # type: ignore[arg-type]
        self.send(SlotExited(slot, diagnosis))

    @precondition(lambda self: self.done is None)
    @rule(dt=st.sampled_from([0.05, 1.0, 7.0, 130.0]))
    def passes(self, dt: float) -> None:
        self.now += dt
        self.send(Tick())

    # What people and nodes do.

    @precondition(lambda self: self.done is None and not self.stopping)
    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        slot = self.pick(data, [v.slot for v in self.core.view()] or ["none/0"])
        kind = slot.partition("/")[0]
        before = self.down
        if kind in self.shapes and self.shapes[kind].gang:
            self.down = {s for s in self.down if not s.startswith(f"{kind}/")}
        else:
            self.down = self.down - {slot}
        self.touched.add(kind)
        if not self.send(RestartRequested(slot)):
            self.down = before

    @precondition(lambda self: self.done is None and not self.stopping)
    @rule(data=st.data(), count=st.integers(0, 4))
    def scale(self, data: st.DataObject, count: int) -> None:
        kind = self.pick(data, self.shapes)
        before, down = self.wanted[kind], self.down
        self.wanted[kind] = count
        self.down = {s for s in self.down if not s.startswith(f"{kind}/")}
        if self.send(ScaleRequested(kind, count)):
            self.touched.add(kind)
            assert not self.shapes[kind].gang
        else:
            self.wanted[kind], self.down = before, down

    @precondition(lambda self: self.done is None and not self.stopping)
    @rule(data=st.data(), whole=st.booleans())
    def drain(self, data: st.DataObject, whole: bool) -> None:
        views = {v.slot: v for v in self.core.view()}
        slot = self.pick(data, views or ["none/0"])
        kind = slot.partition("/")[0]
        if self.send(DrainRequested(kind if whole else slot)):
            together = whole or self.shapes[kind].gang
            chosen = [s for s in views if s.startswith(f"{kind}/")] if together else [slot]
            self.down |= set(chosen)

    @precondition(lambda self: self.done is None and bool(self.nodes))
    @rule(data=st.data(), keep=st.booleans())
    def node_is_lost(self, data: st.DataObject, keep: bool) -> None:
        name = self.pick(data, self.nodes)
        self.nodes = self.nodes - {name} or {"none left"}
        self.touched |= set(self.shapes)
        self.send(NodeLost(name, "silent", keep))

    @precondition(lambda self: self.done is None and bool(self.nodes) and self.nodes != set(NODES))
    @rule(data=st.data())
    def node_joins(self, data: st.DataObject) -> None:
        name = self.pick(data, NODES.keys() - self.nodes)
        self.nodes = (self.nodes | {name}) - {"none left"}
        self.send(NodeJoined(NODES[name]))

    @precondition(lambda self: self.done is None and bool(self.nodes - {"none left"}) and not self.stopping)
    @rule(data=st.data())
    def node_is_drained(self, data: st.DataObject) -> None:
        self.touched |= set(self.shapes)
        self.send(DrainRequested(self.pick(data, self.nodes)))

    @precondition(lambda self: self.done is None and self.events > 20)
    @rule()
    def stop_run(self) -> None:
        self.send(StopRequested("asked"))
        assert self.core.draining

    @precondition(lambda self: self.done is None and self.events > 30)
    @rule()
    def kill_run(self) -> None:
        self.send(KillRequested("asked"))
        assert self.live.keys() <= self.stopped or self.done

    @precondition(lambda self: self.done is not None)
    @rule()
    def stays_done(self) -> None:
        assert self.core.handle(Tick(), self.now) == []

    # What holds at every moment.

    @invariant()
    def restarts_are_bounded(self) -> None:
        for slot, starts in getattr(self, "starts", {}).items():
            if slot.partition("/")[0] not in self.touched:
                assert starts <= self.shape(slot).most_starts, slot

    @invariant()
    def scale_loses_no_slot_and_keeps_none_too_many(self) -> None:
        if not hasattr(self, "core"):
            return
        known = {v.slot for v in self.core.view()}
        wanted = {f"{kind}/{n}" for kind, count in self.wanted.items() for n in range(count)}
        assert wanted <= known
        assert self.stopping or known - wanted <= self.live.keys(), "what was scaled away is kept only until it exits"

    @invariant()
    def the_core_knows_who_is_alive(self) -> None:
        if hasattr(self, "core"):
            assert {s.name for s in self.core._tree if s.live} == self.live.keys()

    @invariant()
    def nothing_waits_for_nothing(self) -> None:
        if not hasattr(self, "core") or self.stopping:
            return
        for s in self.core._tree:
            if s.state == "backoff":
                assert s.deadline is not None or (s.restart_group is not None and s.restart_group.missing), s.name
            elif s.state == "pending":
                if s.unplaceable:
                    slots = s.role.slots if s.role.rules.gang else [s]
                    assert isinstance(self.room_for(slots), NoRoom), f"there is room for {s.name}"
                assert s.unplaceable or (s.gated and self.core._tree.not_ready_below(s.spec.tier)), s.name
                assert s.status(self.core._now).waiting, "what is not started says why"
            elif s.live and s.state != "ready":
                assert s.deadline is not None, s.name

    def room_for(self, slots: list[Slot]) -> list[Placement] | NoRoom:
        """What a look for room would find now."""
        real, self.core._placer = self.core._placer, copy.deepcopy(self.core._placer)
        try:
            return self.core._find_room(slots)
        finally:
            self.core._placer = real

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        if self.done is None:
            self.send(StopRequested("end of test"))
        rounds = len(self.live)
        while self.live:
            self.exit(sorted(self.live)[0], "killed")
            rounds -= 1
            assert rounds >= 0, "a drained run starts nothing again"
        assert self.done is not None, "the run ends once all exits are delivered"


World.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestWorld = World.TestCase
