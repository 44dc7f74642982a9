"""Time slicing of a device: the pure schedule, and a simulation in which calls are lost and processes die."""

from __future__ import annotations

import random

import pytest

from relax_rt.interfaces.registry import Member
from relax_rt.roles.rollout.engines.time_slicing import (
    DeviceGrant,
    DeviceSchedule,
    EngineExcluded,
    HolderReport,
    StartTraining,
    nobody_trains,
)
from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.rpc.identity import Incarnation

LIMIT_S = 5.0
TRAINER = 7


def member(slot: str, epoch: int = 1, state: str = "ready", address: str = "unix://x") -> Member:
    return Member(Incarnation(slot, epoch), state=state, address=address)


def report(slot: str, call: int, *, holds: bool, trainer: int = TRAINER, epoch: int = 1) -> HolderReport:
    return HolderReport(slot, epoch, call, holds, trainer)


def changing(*slots: str) -> DeviceSchedule:
    """Engines that have memory by the trainer's word, and a trainer that wants the device."""
    schedule = DeviceSchedule(TRAINER, LIMIT_S)
    for slot in slots:
        schedule.on_report(report(slot, 1, holds=False))
        assert schedule.answer(report(slot, 1, holds=False)) == DeviceGrant(TRAINER, "hold")
    schedule.request()
    schedule.on_members([member(slot) for slot in slots], 0.0, whole=True)
    return schedule


def test_the_trainer_starts_when_all_have_released_and_they_resume_afterwards() -> None:
    schedule = changing("a", "b")
    assert (
        schedule.changes_for(report("a", 2, holds=True))
        and schedule.answer(report("a", 2, holds=True)).word == "release"
    )
    assert schedule.on_report(report("a", 3, holds=False)) == []
    assert schedule.holders == ["b"]
    assert schedule.on_report(report("b", 3, holds=False)) == [StartTraining(())]
    assert not schedule.changes_for(report("a", 3, holds=False)), "it waits"
    with pytest.raises(Refused, match="under way"):
        schedule.request()
    schedule.release()
    assert schedule.answer(report("a", 3, holds=False)).word == "hold"
    schedule.request()
    schedule.on_members([member("a"), member("b")], 1.0, whole=True)
    assert schedule.holders == ["a"], "what it was allowed counts as taken, though nobody heard of it since"


def test_an_engine_that_does_not_release_is_excluded() -> None:
    schedule = changing("a", "b")
    schedule.on_report(report("a", 2, holds=False))
    assert schedule.deadline == LIMIT_S and schedule.tick(LIMIT_S - 0.1) == []
    out, train = schedule.tick(LIMIT_S)
    assert isinstance(out, EngineExcluded) and out.slot == "b" and "did not give its memory back" in out.why
    assert train == StartTraining(("b",))
    schedule.release()
    schedule.request()
    schedule.on_members([member("a"), member("b")], 9.0, whole=True)
    assert schedule.holders == ["b"], "it is asked again"


def test_a_dead_engine_is_ignored_and_its_successor_is_not() -> None:
    schedule = changing("a", "b")
    schedule.on_report(report("a", 2, holds=False))
    assert schedule.on_members([member("b", state="gone")], 1.0, whole=False) == [StartTraining(())]
    schedule = changing("a")
    assert schedule.on_members([member("a", epoch=2, state="starting", address="")], 1.0, whole=False) == []
    assert schedule.on_report(report("a", 2, holds=False)) == [], "the one before it has nothing to say any more"
    assert schedule.on_report(report("a", 1, holds=False, epoch=2)) == [StartTraining(())]
    assert schedule.answer(report("a", 1, holds=False, epoch=2)).word == "release", "who starts in its turn waits"


def test_reports_to_another_trainer_or_before_the_list_are_ignored() -> None:
    schedule = DeviceSchedule(TRAINER, LIMIT_S)
    schedule.request()
    assert schedule.on_report(report("a", 1, holds=False)) == [], "the list of engines is not there yet"
    schedule = DeviceSchedule(TRAINER, LIMIT_S)
    schedule.request()
    schedule.on_members([member("a")], 0.0, whole=True)
    assert schedule.on_report(report("a", 1, holds=False, trainer=TRAINER - 1)) == []
    assert schedule.changes_for(report("a", 1, holds=False, trainer=TRAINER - 1)), (
        "it is told at once whose word this is"
    )
    assert schedule.on_report(report("a", 2, holds=False)) == [StartTraining(())]


@pytest.mark.parametrize(
    ("found", "last", "free"),
    [
        (None, 0, True),
        (member("trainer/0", 3, "gone"), 3, True),
        (member("trainer/0", 3, "ready"), 0, False),
        (member("trainer/0", 3, "lapsed"), 3, False),
        (member("trainer/0", 4, "starting", ""), 3, True),
        (member("trainer/0", 3, "starting", ""), 3, False),
    ],
)
def test_memory_is_taken_without_a_grant_only_if_nobody_can_train(found: Member | None, last: int, free: bool) -> None:
    assert nobody_trains(found, last) is free


class Engine:
    """An engine's side as roles/rollout/engines/time_slicing.py has it, a step at a time."""

    def __init__(self, slot: str, epoch: int) -> None:
        self.slot, self.epoch = slot, epoch
        self.call = self.trainer = 0
        self.holds = self.leaving = False

    def next(self) -> HolderReport:
        self.call += 1
        return HolderReport(self.slot, self.epoch, self.call, self.holds, self.trainer)

    def told(self, told: DeviceGrant) -> None:
        self.trainer = max(self.trainer, told.trainer)
        if told.trainer != self.trainer:
            return
        if told.word == "hold":
            self.holds = True
        elif self.holds:
            self.leaving = True


class World:
    """Trainer incarnations, engines and a registry; calls arrive late, twice or never, and their answers too.

    `careless`: the trainer's rules are broken on purpose, to see that the check finds it.
    """

    def __init__(self, seed: int, *, careless: str = "") -> None:
        self.random, self.careless = random.Random(seed), careless
        self.epochs = 0
        self.registry: dict[str, Member] = {}
        self.calls: list[tuple[int, HolderReport]] = []
        self.answers: list[tuple[HolderReport, DeviceGrant]] = []
        self.engines: dict[str, Engine] = {}
        self.schedule: DeviceSchedule | None = None
        self.announced = self.training = False
        self.had = {"turns": 0, "free": 0, "out": 0}
        self.now = 0.0
        for slot in ("a", "b"):
            self.start_engine(slot)
        self.start_trainer()

    def enter(self, slot: str) -> int:
        self.epochs += 1
        self.registry[slot] = member(slot, self.epochs, "starting", "")
        return self.epochs

    def start_engine(self, slot: str) -> None:
        self.engines[slot] = Engine(slot, self.enter(slot))

    def start_trainer(self) -> None:
        self.schedule, self.announced, self.training = DeviceSchedule(self.enter("trainer/0"), LIMIT_S), False, False

    def die(self, slot: str) -> None:
        if slot == "trainer/0":
            self.schedule, self.training = None, False
        else:
            del self.engines[slot]
        self.registry[slot] = member(slot, self.registry[slot].who.epoch, "gone", "")

    # --- steps

    def step(self) -> None:
        self.now += 0.1
        often = (self.ask, self.ask, self.arrive, self.arrive, self.answer, self.answer, self.leave, self.leave)
        seldom = (self.look, self.want, self.list, self.list, self.release, self.announce, self.deaths, self.again)
        self.random.choice([*often, *seldom])()

    def one(self) -> Engine | None:
        return self.random.choice([*self.engines.values(), None])

    def ask(self) -> None:
        if (engine := self.one()) is not None and not engine.leaving:
            call = engine.next()
            if self.schedule is not None:
                self.calls += [(self.schedule.trainer, call)] * self.random.choice([0, 1, 1, 2])

    def arrive(self) -> None:
        """Of the calls some come in any order, and also long after their caller has given them up."""
        if not self.calls or self.schedule is None:
            return
        at, call = self.calls.pop(self.random.randrange(len(self.calls)))
        if at == self.schedule.trainer:
            self.carry_out(self.schedule.on_report(call))
            if self.schedule.changes_for(call) or self.random.random() < 0.3:
                self.answers.append((call, self.schedule.answer(call)))

    def answer(self) -> None:
        """An answer counts for the call that its engine makes now, and for no earlier one."""
        if not self.answers:
            return
        call, told = self.answers.pop(self.random.randrange(len(self.answers)))
        engine = self.engines.get(call.slot)
        current = engine is not None and engine.epoch == call.epoch and engine.call == call.call
        if engine is not None and current and self.random.random() < 0.8:
            engine.told(told)
            engine.call += 1  # it is over: what answers it again is passed over

    def leave(self) -> None:
        if (engine := self.one()) is not None and engine.leaving:
            engine.holds = engine.leaving = False

    def look(self) -> None:
        """A call has failed: the registry is asked."""
        engine = self.one()
        if engine is not None and not engine.holds:
            engine.call += 1
            last = -1 if self.careless == "last" else engine.trainer
            if nobody_trains(self.registry.get("trainer/0"), last):
                engine.holds = True
                self.had["free"] += 1

    def announce(self) -> None:
        if self.schedule is not None and not self.announced:
            self.announced = True
            self.registry["trainer/0"] = member("trainer/0", self.schedule.trainer)

    def want(self) -> None:
        if self.schedule is not None and self.schedule.phase == "engines":
            self.schedule.request()
            if self.careless == "list":
                self.schedule._listed, self.schedule.deadline = True, self.now + LIMIT_S
                self.carry_out(self.schedule._start_if_free())

    def list(self) -> None:
        if self.schedule is not None and self.schedule.phase == "changing" and self.announced:
            engines = [m for slot, m in self.registry.items() if slot != "trainer/0"]
            self.carry_out(self.schedule.on_members(engines, self.now, whole=True))
            self.carry_out(self.schedule.tick(self.now))

    def release(self) -> None:
        if self.schedule is not None and self.training and self.random.random() < 0.5:
            self.training = False
            self.schedule.release()

    def deaths(self) -> None:
        alive = [*self.engines, *(["trainer/0"] if self.schedule is not None else [])]
        if alive and self.random.random() < 0.3:
            self.die(self.random.choice(alive))

    def again(self) -> None:
        if self.schedule is None and self.random.random() < 0.5:
            self.start_trainer()
        for slot in {"a", "b"} - self.engines.keys():
            if self.random.random() < 0.5:
                self.start_engine(slot)

    def carry_out(self, actions: list[EngineExcluded | StartTraining]) -> None:
        for action in actions:
            if isinstance(action, EngineExcluded):
                self.had["out"] += 1
            else:
                self.training, self.without = True, action.without
                self.had["turns"] += 1

    def wrong(self) -> str:
        """Who has the device together with the trainer, though nobody said so."""
        if not self.training:
            return ""
        return ", ".join(slot for slot, engine in self.engines.items() if engine.holds and slot not in self.without)

    def settle(self) -> bool:
        """No more deaths and losses: the trainer gets its turn, and after it every engine its memory back."""
        self.deaths = lambda: None  # type: ignore[method-assign]
        for _ in range(3000):
            self.step()
            if self.training:
                break
        had, self.want = self.training, lambda: None  # type: ignore[method-assign]
        for _ in range(3000):
            self.step()
            if not self.training and len(self.engines) == 2 and all(engine.holds for engine in self.engines.values()):
                return had
        return False


def run(seed: int, careless: str = "") -> tuple[str, World]:
    world = World(seed, careless=careless)
    for _ in range(600):
        world.step()
        if wrong := world.wrong():
            return wrong, world
    return "", world


def test_the_device_is_never_shared_and_nobody_waits_for_ever() -> None:
    had = {"turns": 0, "free": 0, "out": 0}
    for seed in range(150):
        wrong, world = run(seed)
        assert not wrong, f"seed {seed}: {wrong} and the trainer have the device"
        had = {name: had[name] + count for name, count in world.had.items()}
        assert world.settle(), f"seed {seed}: it does not go on"
    assert min(had.values()) > 20, f"too little happened: {had}"


@pytest.mark.parametrize("careless", ["list", "last"])
def test_the_simulation_detects_both_broken_rules(careless: str) -> None:
    assert any(run(seed, careless)[0] for seed in range(400))
