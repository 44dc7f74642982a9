"""What holds for the supervisor whatever happens: one process a slot, no start after a stop, an end to every run."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from relax_rt.supervision.core import Supervisor
from relax_rt.supervision.diagnosis import Diagnosis
from relax_rt.supervision.protocol import (
    Done,
    Event,
    Kill,
    KillRequested,
    Progress,
    RestartRequested,
    RunStarted,
    SlotExited,
    SlotFinished,
    SlotReady,
    SlotSpawned,
    Start,
    Stop,
    StopRequested,
    Tick,
)
from relax_rt.supervision.spec import SlotSpec

SPECS = st.lists(
    st.builds(
        lambda tier, restart, significant, system, limit: (tier, restart, significant, system, limit),
        st.sampled_from([1, 2, 3]),
        st.sampled_from(["permanent", "transient", "temporary"]),
        st.booleans(),
        st.booleans(),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=5,
)
# Failures that are tried again come more often: a run that has ended shows nothing more.
KINDS = st.sampled_from([*["clean", "exception", "killed", "hang", "oom"] * 3, "config", "import_error"])


class World(RuleBasedStateMachine):
    """Processes as the operating system would keep them, driven at random."""

    @initialize(raw=SPECS, seed=st.integers(0, 99))
    def build(self, raw: list[tuple[int, str, bool, bool, int]], seed: int) -> None:
        self.specs = {
            f"s/{i}": SlotSpec(
                slot=f"s/{i}", kind="s", tier=t, restart=r, significant=s, system=y, max_restarts=m, period_s=20.0
            )  # type: ignore[arg-type]
            for i, (t, r, s, y, m) in enumerate(raw)
        }
        self.core = Supervisor(self.specs.values(), random.Random(seed).random)
        self.now, self.epoch, self.events = 0.0, 0, 0
        self.live: dict[str, bool] = {}
        self.ready: set[str] = set()
        self.stopped: set[str] = set()
        self.stopping = False
        self.unhealthy_starts: dict[str, int] = dict.fromkeys(self.specs, 0)
        self.done: Done | None = None
        self.send(RunStarted())

    def send(self, event: Event) -> None:
        self.events += 1
        actions = self.core.handle(event, self.now)
        self.stopping = self.stopping or bool(self.core.draining)
        for action in actions:
            assert self.done is None, "nothing follows Done"
            match action:
                case Start(slot=slot):
                    assert slot not in self.live, "two live incarnations of one slot"
                    assert not self.stopping, "a start after the run began to end"
                    if slot not in self.ready:
                        spec = self.specs[slot]
                        below = [o for o in self.specs.values() if o.tier < spec.tier]
                        first = self.unhealthy_starts[slot] == 0
                        assert not first or all(o.slot in self.ready or o.slot not in self.live for o in below)
                    self.unhealthy_starts[slot] += 1
                    self.live[slot] = False
                    self.stopped.discard(slot)
                case Stop(slot=slot):
                    assert slot in self.live
                    if self.stopping:
                        tiers = [self.specs[o].tier for o in self.live]
                        assert self.specs[slot].tier == max(tiers), "stop runs from the top tier down"
                    self.stopped.add(slot)
                case Kill(slot=slot):
                    assert slot in self.live
                    self.stopped.add(slot)
                case Done():
                    assert not self.live, "done while a process lives"
                    self.done = action

    def pick(self, data: st.DataObject, among: list[str]) -> str:
        return data.draw(st.sampled_from(sorted(among)))

    @precondition(lambda self: any(not up for up in self.live.values()))
    @rule(data=st.data())
    def spawn(self, data: st.DataObject) -> None:
        slot = self.pick(data, [s for s, up in self.live.items() if not up])
        self.epoch += 1
        self.live[slot] = True
        self.send(SlotSpawned(slot, self.epoch, 100 + self.epoch))

    @precondition(lambda self: any(self.live.values()))
    @rule(data=st.data())
    def becomes_ready(self, data: st.DataObject) -> None:
        slot = self.pick(data, [s for s, up in self.live.items() if up])
        self.ready.add(slot)
        self.send(SlotReady(slot))

    @precondition(lambda self: any(self.live.values()))
    @rule(data=st.data(), n=st.integers(0, 50), waiting=st.sampled_from(["", "x"]), extend=st.sampled_from([0.0, 50.0]))
    def reports(self, data: st.DataObject, n: int, waiting: str, extend: float) -> None:
        self.send(Progress(self.pick(data, [s for s, up in self.live.items() if up]), n, waiting, extend))

    @precondition(lambda self: any(self.live.values()))
    @rule(data=st.data())
    def finishes(self, data: st.DataObject) -> None:
        self.send(SlotFinished(self.pick(data, [s for s, up in self.live.items() if up])))

    @precondition(lambda self: bool(self.live))
    @rule(data=st.data(), kind=KINDS)
    def exits(self, data: st.DataObject, kind: str) -> None:
        self.exit(self.pick(data, list(self.live)), kind)

    def exit(self, slot: str, kind: str) -> None:
        del self.live[slot]
        self.ready.discard(slot)
        self.send(SlotExited(slot, Diagnosis(slot=slot, epoch=self.epoch, kind=kind, cause="c", at=self.now)))  # type: ignore[arg-type]

    @precondition(lambda self: self.done is not None)
    @rule()
    def stays_done(self) -> None:
        assert self.core.handle(Tick(), self.now) == []

    @precondition(lambda self: self.done is None)
    @rule(dt=st.sampled_from([0.05, 1.0, 7.0, 130.0]))
    def passes(self, dt: float) -> None:
        self.now += dt
        self.send(Tick())

    @precondition(lambda self: self.done is None and self.events > 8)
    @rule()
    def stop_run(self) -> None:
        self.send(StopRequested("asked"))
        assert self.core.draining

    @precondition(lambda self: self.done is None and self.events > 16)
    @rule()
    def kill_run(self) -> None:
        self.send(KillRequested("asked"))
        assert self.live.keys() <= self.stopped or self.done

    @precondition(lambda self: self.done is None and not self.stopping)
    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        slot = self.pick(data, list(self.specs))
        self.unhealthy_starts[slot] = -1000  # an operator's restarts are not bounded by the policy
        self.send(RestartRequested(slot))

    @invariant()
    def restarts_without_good_work_are_bounded(self) -> None:
        for slot, starts in getattr(self, "unhealthy_starts", {}).items():
            view = next(v for v in self.core.view() if v.slot == slot)
            good = self.core._slots[slot].good_s
            periods = 1 + int(good / self.specs[slot].period_s)
            assert starts <= (self.specs[slot].max_restarts + 1) * periods, view

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        if self.done is None:
            self.send(StopRequested("end of test"))
        rounds = 0
        while self.live:
            self.exit(sorted(self.live)[0], "killed")
            rounds += 1
            assert rounds <= len(self.specs), "a drained run starts nothing again"
        assert self.done is not None, "the run ends once all exits are delivered"


World.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
TestWorld = World.TestCase
