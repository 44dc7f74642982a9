"""A node with a queue, its processes and a supervisor, under a virtual clock; faults come until a given time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import count

from sim_actors import Process, Seen, agent, consumer, engine, offerer, trainer
from sim_broker import Net, SimBroker
from sim_checker import STANDSTILL, UNEXPECTED, Checker, Trained
from sim_kernel import Exit, Kernel, Steps, Thread
from sim_memory import Memory

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.queue.ledger.policy import LedgerPolicy, QueueLimits
from relax_rt.transport.rpc.identity import Incarnation

FAULTS_S = 60.0
"""So long there are faults; what follows must come to an end by itself."""
PATIENCE_S = 400.0
MEAN_FAULT_S = 2.5
LIMITS = QueueLimits(
    lease_s=5.0, quarantine_after=6, capacity_bytes=12_000, high_water=0.3, spill_bytes=6_000, keep_steps=1000
)


class Disk:
    """Checkpoint folders: each has the trainer's own record of the path that leads to it. A lower epoch is refused."""

    def __init__(self) -> None:
        self.initial = 0
        self._saved: dict[int, tuple[int, dict[int, list[Trained]]]] = {}
        self._epoch = 0

    def open(self, epoch: int) -> None:
        self._epoch = max(self._epoch, epoch)

    def is_fenced(self, epoch: int) -> bool:
        return epoch < self._epoch

    def began_with(self, version: int) -> None:
        """The weights that a run without any checkpoint starts from have a version."""
        self.initial = self.initial or version

    def save(self, epoch: int, step: int, version: int, path: dict[int, list[Trained]]) -> bool:
        if self.is_fenced(epoch):
            return False
        self._saved = {at: one for at, one in self._saved.items() if at < step}
        self._saved[step] = (version, dict(path))
        return True

    def newest(self) -> tuple[int, int, dict[int, list[Trained]]]:
        step = max(self._saved, default=0)
        version, path = self._saved.get(step, (self.initial, {}))
        return step, version, dict(path)

    def damage_newest(self) -> None:
        if self._saved:
            del self._saved[max(self._saved)]


class World:
    """Everything of one run. `slow`: how often a consumer is too slow for its lease."""

    def __init__(self, seed: int, policy: LedgerPolicy, limits: QueueLimits = LIMITS) -> None:
        self.kernel = Kernel(seed)
        self.memory, self.net = Memory(), Net(self.kernel)
        self.broker = SimBroker(self.kernel, self.memory, policy, limits)
        self.policy, self.limits = policy, limits
        self.checker = Checker(policy.max_staleness)
        self.disk = Disk()
        self.arena_cells, self.slow = 96, 0.06
        self.processes: dict[str, Process] = {}
        self.zombies: list[Process] = []
        self.dead: list[Incarnation] = []
        self.published: list[int] = []
        self.path: dict[int, list[Trained]] = {}
        self.committed = 0
        self.faulty = True
        self.to_offer = 0
        self.seen_by: dict[str, set[str]] = {}
        self._roles: dict[str, Callable[[], Callable[[Process], Steps]]] = {}
        self._epochs, self._digests, self._versions = count(1), count(1), count(1)
        self.happened: Counter[str] = Counter()
        self._hung = 0
        self._doomed: set[str] = set()
        self._node_died = False

    # --- what processes ask for

    def new_epoch(self) -> int:
        return next(self._epochs)

    def new_digest(self, what: str) -> str:
        return f"{what}#{next(self._digests)}"

    def new_version(self, epoch: int, parent: int, step: int, *, changed: bool) -> tuple[int, VersionRecord]:
        """A number from the registry, for which a trainer is fenced like anywhere else.

        Raises:
            Exit: a newer trainer was there.
        """
        if self.disk.is_fenced(epoch):
            raise Exit
        version = next(self._versions)
        self.checker.version(version, parent, changed=changed)
        return version, VersionRecord(version, parent, step, changed=changed)

    def is_bad(self, digest: str) -> bool:
        """Whether rewards cannot be computed for the sample."""
        number = digest.rpartition("#")[2]
        return bool(self.policy.group_size) and number.isdigit() and int(number) % 29 == 0

    def completing(self, task: str, seen: Seen) -> None:
        self.seen_by.setdefault(task, set()).update(seen.values())

    # --- the supervisor

    def role(self, slot: str, main: Callable[[], Callable[[Process], Steps]]) -> None:
        self._roles[slot] = main
        self.spawn(slot)

    def spawn(self, slot: str) -> None:
        self.processes[slot] = Process(self, slot, self._roles[slot]())

    def process_ended(self, process: Process) -> None:
        """It has seen that it is fenced, or gave up."""
        self.dead.append(process.who)
        if self.processes.get(process.slot) is process:
            self.kernel.after(0.3, lambda: self._respawn(process))

    def _respawn(self, process: Process) -> None:
        if self.processes.get(process.slot) is process:
            self.spawn(process.slot)

    def kill(self, slot: str) -> None:
        """SIGKILL: the agent sees it, but its word may come after the successor's."""
        self.happened["killed"] += 1
        process = self.processes[slot]
        process.kill()
        self.kernel.after(self.kernel.random.uniform(0.0, 2.0), lambda: self.dead.append(process.who))
        self.kernel.after(self.kernel.random.uniform(0.1, 1.0), lambda: self._respawn(process))

    def pause(self, slot: str) -> None:
        """It does not answer and is replaced; later it wakes and goes on as if nothing had been."""
        self.happened["paused"] += 1
        process = self.processes[slot]
        process.pause(self.kernel.random.uniform(2.0, 12.0))
        self.zombies.append(process)
        self._respawn(process)

    def hangs(self, process: Process) -> bool:
        """Whether it stands still from now on, with all that it has in hand; another place does its work."""
        slot = process.slot
        if slot not in self._doomed or self.processes.get(slot) is not process or self._hung >= 3:
            return False
        self._hung += 1
        self.happened["hung"] += 1
        self._doomed.discard(slot)
        self.kernel.after(0.0, process.kill)
        main = self._roles.pop(slot)
        del self.processes[slot]
        role, _, number = slot.partition("/")
        self.kernel.after(0.1, lambda: self.role(f"{role}/{int(number) + 10}", main))
        return True

    def kill_gang(self) -> None:
        """Processes that die together, as the ranks of a gang."""
        slots = [slot for slot in self.processes if slot.startswith("reference/")]
        for slot in slots:
            self.kill(slot)

    def kill_node(self) -> None:
        self._node_died = True
        self.happened["node died"] += 1
        for process in [*self.processes.values(), *self.zombies]:
            process.kill()
        self.dead.clear()
        self.memory.wipe()
        self.broker.run_id += 1
        self.broker.crash()
        for slot in list(self.processes):
            self.spawn(slot)

    # --- faults

    def faults(self) -> Steps:
        rng = self.kernel.random
        while True:
            yield rng.expovariate(1 / MEAN_FAULT_S)
            if self.kernel.now > FAULTS_S:
                break
            if rng.random() < 0.15:
                self.broker.crash()
            elif rng.random() < 0.02 and not self._node_died:
                self.kill_node()
            else:
                slots = [slot for slot in self.processes if slot != "agent/0"]
                self._harm(rng.choice([*slots, *(slot for slot in slots if slot == "trainer/0")]), rng.random())
        self.faulty = self.net.faulty = False
        self.broker.crash_rate = 0.0

    def _harm(self, slot: str, kind: float) -> None:
        if slot.startswith("reference/"):
            self.kill_gang()
        elif kind < 0.2 and not slot.startswith("trainer/") and self._hung < 3:
            self._doomed.add(slot)
        elif kind < 0.6:
            self.kill(slot)
        else:
            self.pause(slot)

    def run(self, done: Callable[[], bool]) -> None:
        """Until all is done, or it is plain that it will not be."""
        self.broker.start()
        self.broker.crash_rate = 0.02
        Thread(self.kernel, self.faults())
        finished = self.kernel.run(lambda: not self.faulty and done(), FAULTS_S + PATIENCE_S)
        if not finished:
            self.checker.found(STANDSTILL, f"at {self.kernel.now:.0f} s: {self._why()}")
        if self.broker.ledger is not None:
            for wrong in self.broker.ledger.audit():
                self.checker.found(UNEXPECTED, wrong)
            spilled = self.broker.ledger.account().get("blocks_spilled", 0)
            self.happened += Counter({"broker died": self.broker.deaths, "spilled": spilled})

    def _why(self) -> str:
        ledger = self.broker.ledger
        return f"{ledger.account()}" if ledger is not None else "the broker is down"

    # --- what the whole must come to

    def notices(self) -> list[tuple[str, dict[str, object]]]:
        return [notice for n in sorted(self.broker.notices) for notice in self.broker.notices[n]]

    def filtered(self) -> set[int]:
        """Prompts that the queue has told of that a trainer left out."""
        ended = [fields for kind, fields in self.notices() if kind == "group_ended"]
        return {fields["prompt"] for fields in ended if fields["state"] == "dropped(filter)"}  # type: ignore[misc]

    def retired(self) -> set[int]:
        """Prompts that somebody was told of that they will not be tried again."""
        return {
            fields["prompt"]  # type: ignore[misc]
            for kind, fields in self.notices()
            if kind == "group_ended" and fields["prompt_fate"] == "retire"
        }


def training(seed: int, *, prompts: int = 60) -> World:
    """Prompts to checkpoints: engines, reward and reference workers, a trainer."""
    rng = Kernel(seed).random
    policy = LedgerPolicy(
        tasks={"reward": ("tokens",), "reference": ("tokens",), "train": ("tokens", "reward", "reference")},
        group_size=rng.choice([2, 3]),
        prompts_per_step=2,
        max_staleness=(1.0, 2.0, 1.0, 0.0)[seed % 4],
        straggler_wait_s=4.0,
        prompts=prompts,
        over_provision=rng.choice([0, 0, 1]),
        on_straggler=rng.choice(["wait", "wait", "requeue", "mask"]),
        on_failed_member=rng.choice(["regenerate", "regenerate", "shrink", "drop"]),
        on_surplus=rng.choice(["drop", "recycle"]),
    )
    world = World(seed, policy)
    world.role("agent/0", lambda: agent)
    for n in range(3):
        world.role(f"rollout/{n}", lambda: engine)
    for n in range(2):
        world.role(f"reward/{n}", lambda: consumer("reward", "reward"))
    for n in range(2):
        world.role(f"reference/{n}", lambda: consumer("reference", "reference"))
    world.role("trainer/0", lambda: trainer)

    def done() -> bool:
        on_path = {one.prompt for step in world.path.values() for one in step}
        return world.committed >= max(world.path, default=0) and len(on_path | world.retired()) == prompts

    world.run(done)
    ledger = world.broker.ledger
    if ledger is not None and done():
        theirs = {step: sorted({one.group for one in records}) for step, records in ledger.state.path.items()}
        if theirs != {step: sorted({one.key.group for one in trained}) for step, trained in world.path.items()}:
            world.checker.found(UNEXPECTED, f"the ledger's path {theirs} is not that of the trainer")
    world.checker.judge_path(world.path, prompts, world.retired())
    if not world.filtered() <= world.checker.leaving:
        world.checker.found(UNEXPECTED, f"prompts {sorted(world.filtered())} were left out, and nobody asked for it")
    world.checker.judge_samples(world.notices(), world.checker.stepped_on)
    return world


def streaming(seed: int, *, samples: int = 300) -> World:
    """Samples that are offered and read by two tasks, without prompts and steps."""
    policy = LedgerPolicy(tasks={"label": ("tokens",), "store": ("tokens", "label")}, step_task="")
    world = World(seed, policy)
    world.to_offer = samples
    world.role("agent/0", lambda: agent)
    for n in range(2):
        world.role(f"producer/{n}", lambda: offerer)
    for n in range(2):
        world.role(f"label/{n}", lambda: consumer("label", "label"))
    for n in range(2):
        world.role(f"store/{n}", lambda: consumer("store", ""))

    def done() -> bool:
        ledger = world.broker.ledger
        return world.to_offer <= 0 and ledger is not None and not ledger.core.held

    world.run(done)
    world.checker.judge_samples(world.notices(), world.seen_by["store"])
    return world
