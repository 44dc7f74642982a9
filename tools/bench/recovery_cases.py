"""The runs that recovery.py measures: kills one by one, faults during training, and bringing eight roles up."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import select
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "toys"))

from toy_run import ToyRun

from relax_rt.chaos.faults import FAULTS, ScheduledFault, by_steps, parse_roles
from relax_rt.chaos.injector import Injector, run_schedule
from relax_rt.chaos.timeline import Ettr, Recovery, ettr, find_recoveries
from relax_rt.interfaces.agent import RunStatus
from relax_rt.interfaces.registry import RegistryApi
from relax_rt.observe.events import read_events
from relax_rt.observe.metrics import read_metrics
from relax_rt.supervision.rundir import RESOLVED_CONFIG, RunPaths, read_json, slot_file
from relax_rt.transport.queue.api import QueueApi
from relax_rt.transport.queue.ledger.messages import QueueStats
from relax_rt.transport.rpc.errors import RelaxError
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.rpc import RpcClient, make_hello

HERE = Path(__file__).resolve().parent
TINY = HERE.parent.parent / "tests/tiny_job/roles.toml"
ADDITION = HERE / "addition_job/roles.toml"
QUEUE = "queue/0"
BACK_WITHIN_S = 120.0
LOOK_S = 0.05
STEP_WITHIN_S = 20.0
PROBE_TIMEOUT_S = 0.2
AS_FIRST = {
    "supervision.restart.max_restarts": 1000,
    "supervision.restart.period_s": 200,
    "supervision.restart.backoff_max_s": 0.1,
}
"""Every kill is answered as a first failure is: after a wait drawn from 0 to 0.1 s."""
TOYS = """\
[run]
name = "recovery"
job = "toys"
dir = "{dir}"
[supervision.restart]
max_restarts = 1000
period_s = 200.0
backoff_max_s = 0.1
[queue]
capacity_mib = 16
slab_mib = 1
[roles.idler]
[roles.maker]
[roles.eater]
"""
EIGHT = """\
[run]
name = "eight"
job = "toys"
dir = "{dir}"
[roles.idler]
count = 8
"""
MADE_WITHIN_S = 0.1
"""A rollout that has made nothing for so long, and might have, is idle."""


class Killed(msgspec.Struct, frozen=True, kw_only=True):
    """One kill and what came of it, in seconds.

    Attributes:
        ended_s: from the kill until the kernel had ended the process, as seen here by pidfd.
        seen_s: from then until its exit stood in the event log.
            Negative if the agent saw it first.
        still: how long training stood still beyond its usual pause between two steps; None: no step came before.
        rollouts_idle: how long the rollouts made nothing although the queue had room for a group, while the slot was
            away, on average; None: there are none.
    """

    recovery: Recovery
    ended_s: float
    seen_s: float
    still: float | None = None
    rollouts_idle: float | None = None


def kills(run: ToyRun, injector: Injector, slot: str, count: int, seed: int) -> Iterator[Killed]:
    """Kill a slot again and again, each time once it is ready, has worked, and a random moment has passed."""
    dice = random.Random(f"moments {seed} {slot}")
    for number in range(1, count + 1):
        run.until(f"{slot} to be ready", lambda: _state(run.status(), slot) == "ready", BACK_WITHIN_S)
        time.sleep(0.1 + dice.random() * 0.4)
        seen = len(run.poll())
        end = End(next(s.pid for s in run.ready(BACK_WITHIN_S).slots if s.slot == slot))
        outcome = injector.inject(ScheduledFault(number=number, fault="kill", slot=slot))
        if outcome.skipped:
            end.close()
            continue
        at = next(e for e in run.poll()[seen:] if e["kind"] == "fault_injected")
        yield _follow(run, slot, at, seen, end)


class End:
    """Sees the end of a process by itself, apart from the agent."""

    def __init__(self, pid: int) -> None:
        self._pidfd = os.pidfd_open(pid)
        self.at = 0.0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        if select.select([self._pidfd], [], [], BACK_WITHIN_S)[0]:
            self.at = time.monotonic()

    def close(self) -> None:
        """Wait for the end and release the descriptor."""
        self._thread.join()
        os.close(self._pidfd)


def _follow(run: ToyRun, slot: str, at: dict[str, Any], seen: int, end: End) -> Killed:
    """Watch until the slot works again."""
    looks: list[Look] = []
    stats = Asking(run.status(), QUEUE)
    group = int((read_json(run.run_dir / RESOLVED_CONFIG) or {}).get("algorithm", {}).get("group_size", 1))
    probe = Probe(run.status(), slot)
    answered: list[float] = []

    def back() -> bool:
        now = time.monotonic()
        if slot.startswith("trainer/") and (not looks or now - looks[-1].at >= LOOK_S):
            looks.append(_look(run.status(), slot, stats, group))
        found = [e for e in run.poll()[seen:] if e["kind"] == "slot_exited" and e["slot"] == slot]
        if found and probe.api is not None and not answered and probe.answers():
            answered.append(time.monotonic() - at["m"])
        one = _recovery(run, at)
        return one.ready_s is not None and (one.worked_s is not None or bool(answered))

    try:
        run.until(f"{slot} to work again", back, BACK_WITHIN_S)
    finally:
        probe.close()
        stats.close()
    one = _recovery(run, at)
    one.worked_s = one.worked_s if one.worked_s is not None else (answered or [None])[0]  # type: ignore[list-item]
    end.close()
    assert one.exited_s is not None
    ended_s = end.at - at["m"]
    seen_s = one.exited_s - ended_s
    back_m = at["m"] + max(one.worked_s or 0.0, one.ready_s or 0.0)
    idle = idle_s(looks, _made_at(run.run_dir, at["m"]), at["m"], back_m)
    return Killed(recovery=one, ended_s=ended_s, seen_s=seen_s, still=_still(run, at["m"], back_m), rollouts_idle=idle)


def _recovery(run: ToyRun, at: dict[str, Any]) -> Recovery:
    started = max(0, run.events.index(at) - 400)
    # The life that the kill ended began before it; the newest part of the log is enough for the rest.
    spawned = [e for e in run.events[:started] if e["kind"] == "slot_spawned" and e.get("slot") == at["slot"]][-1:]
    return next(r for r in find_recoveries([*spawned, *run.events[started:]]) if r.at == at["m"])


def _state(status: RunStatus | None, slot: str) -> str:
    return next((s.state for s in status.slots if s.slot == slot), "") if status is not None else ""


class Look(msgspec.Struct, frozen=True):
    """The rollouts' counters at a moment, and whether the queue had no room for another group, by its own count."""

    at: float
    progress: dict[str, int]
    full: bool


def address_of(status: RunStatus, slot: str) -> str:
    """Where a system role of this node answers, also while it is away: the socket's place follows from its name."""
    return f"unix://{RunPaths(status.run_id, Path(status.run_dir)).socket_dir / slot_file(slot, '.sock')}"


class Asking:
    """One connection to a system role that is asked again and again."""

    def __init__(self, status: RunStatus | None, slot: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._client: RpcClient | None = None
        if status is not None:
            self._client = RpcClient(address_of(status, slot), make_hello(status.run_id, Incarnation("cli/0", 0)))

    def stats(self) -> QueueStats | None:
        """The queue's numbers; None when it does not answer."""
        if self._client is None:
            return None
        try:
            bound = self._client.bind(QueueApi, timeout_s=PROBE_TIMEOUT_S)
            return self._loop.run_until_complete(bound.stats())
        except RelaxError:
            return None

    def close(self) -> None:
        """End the connection."""
        if self._client is not None:
            self._loop.run_until_complete(self._client.close())
        self._loop.close()


def _look(status: RunStatus | None, killed: str, queue: Asking, group: int) -> Look:
    slots = status.slots if status is not None else []
    progress = {s.slot: s.progress for s in slots if s.kind == "rollout" and s.slot != killed}
    stats = queue.stats()
    # A queue that does not answer is no excuse.
    full = stats is not None and stats.outstanding + group > stats.bound
    return Look(time.monotonic(), progress, full)


def _made_at(run_dir: Path, since: float) -> dict[str, list[float]]:
    """When each rollout told that it had made something."""
    found: dict[str, list[float]] = {}
    for record in read_metrics(run_dir, "produced"):
        if record["m"] >= since - 10.0:
            found.setdefault(str(record["slot"]), []).append(float(record["m"]))
    return found


def idle_s(looks: Sequence[Look], made: dict[str, list[float]], begin: float, end: float) -> float | None:
    """Time in which rollouts made nothing although the queue had room, mean over them; None without rollouts.

    A rollout tells of what it made at once, and counts its tokens every two seconds: where it told of nothing, but its
    counter grew, it was at work on something long.
    """
    slots = {slot for look in looks for slot in look.progress}
    if not slots or len(looks) < 2:
        return None
    idle = 0.0
    for slot in slots:
        told, counted = made.get(slot, []), [(look.at, look.progress.get(slot, 0)) for look in looks]
        grew = [at for (_, before), (at, now) in itertools.pairwise(counted) if now > before]
        for a, b in itertools.pairwise(looks):
            begun, over = max(a.at, begin), min(b.at, end)
            if over <= begun or a.full or b.full or any(begun - MADE_WITHIN_S <= m <= over for m in told):
                continue
            after = next((at for at in grew if at >= over), None)
            before = max((at for at in grew if at <= begun), default=looks[0].at)
            if after is not None and not any(before <= m <= after for m in told):
                continue
            idle += over - begun
    return idle / len(slots)


def _still(run: ToyRun, begin: float, end: float) -> float | None:
    """How long training stood still, from the step records; waits for the first step after the recovery."""
    limit = time.monotonic() + STEP_WITHIN_S
    times: list[float] = []
    while time.monotonic() < limit and (not times or times[-1] < end):
        time.sleep(LOOK_S)
        times = [r["m"] for r in read_metrics(run.run_dir, "step")][-400:]
    return stood_still(times, begin, end, time.monotonic())


def stood_still(times: Sequence[float], begin: float, end: float, now: float) -> float | None:
    """The longest pause between two steps that touches [begin, end], less the usual one; None: no two steps before.

    A pause that has not ended counts as long as it is by now: it is the worst of all.
    """
    gaps = list(itertools.pairwise(times))
    usual = sorted(b - a for a, b in gaps if b < begin)
    if not usual:
        return None
    if times[-1] < end:
        gaps.append((times[-1], now))
    around = [b - a for a, b in gaps if b > begin and a < end]
    return max(0.0, max(around, default=0.0) - usual[len(usual) // 2])


class Probe:
    """Asks a system role until it answers; other roles tell of their first work themselves."""

    def __init__(self, status: RunStatus | None, slot: str) -> None:
        self.api: Any = {"registry/0": RegistryApi, "queue/0": QueueApi}.get(slot)
        self._status, self._slot = status, slot
        self._loop = asyncio.new_event_loop()

    def answers(self) -> bool:
        """One call, by a connection of its own."""
        return self._loop.run_until_complete(self._ask())

    async def _ask(self) -> bool:
        if self._status is None:
            return False
        client = RpcClient(
            address_of(self._status, self._slot), make_hello(self._status.run_id, Incarnation("cli/0", 0))
        )
        try:
            bound = client.bind(self.api, timeout_s=PROBE_TIMEOUT_S)
            await (bound.versions() if self._slot == "registry/0" else bound.stats())
            return True
        except RelaxError:
            return False
        finally:
            await client.close()

    def close(self) -> None:
        """End its loop."""
        self._loop.close()


def toys(folder: Path, count: int, seed: int) -> dict[str, list[Killed]]:
    """Registry, queue, and a role without a model."""
    return _one_by_one(ToyRun(_made(folder / "toys"), TOYS), ("registry/0", "queue/0", "idler/0"), count, seed)


def tiny(folder: Path, count: int, seed: int, slots: Sequence[str]) -> dict[str, list[Killed]]:
    """The roles of a training run of the tiny model."""
    overrides = {
        **AS_FIRST,
        "algorithm.steps": 1_000_000,
        "checkpoint.every_steps": 5,
        "evaluation.every_steps": 5,
        "evaluation.items": 16,
        "evaluation.during_items": 8,
        "data.size": 20_000,
    }
    return _one_by_one(ToyRun(_made(folder / "tiny"), TINY, overrides), slots, count, seed)


def smollm(folder: Path, count: int, seed: int) -> dict[str, list[Killed]]:
    """The trainer of the addition job, SmolLM2-135M."""
    overrides = {**AS_FIRST, "algorithm.steps": 10_000, "checkpoint.every_steps": 2}
    return _one_by_one(ToyRun(_made(folder / "smollm"), ADDITION, overrides), ("trainer/0",), count, seed)


def _one_by_one(run: ToyRun, slots: Sequence[str], count: int, seed: int) -> dict[str, list[Killed]]:
    with run:
        run.ready(300.0)
        if run.config != run.run_dir.parent / "roles.toml":
            run.until("some steps", lambda: len(list(read_metrics(run.run_dir, "step"))) >= 5, 300.0)
        with Injector(run.run_dir, seed) as injector:
            return {slot: list(kills(run, injector, slot, count, seed)) for slot in slots}


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """Undisturbed and disturbed training of the same config.

    Attributes:
        step_s: median time of an undisturbed step.
        checkpoint_s: spent in checkpoints a step, undisturbed and disturbed.
        faults: carried out. wanted: so many there were to be. deferred: how often one fell a step later, because its
            slot had no process just then.
    """

    ettr: Ettr
    step_s: float
    checkpoint_s: tuple[float, float]
    faults: int
    wanted: int
    deferred: int
    steps: int
    by_role: dict[str, float]


def trained_under_faults(folder: Path, steps: int, prompts: int, share: float, seed: int) -> Trained:
    """Faults in a share of the steps, roles drawn uniformly, against the same training without."""
    overrides = {
        "supervision.restart.max_restarts": 100,
        "supervision.restart.period_s": 3600,
        "algorithm.steps": steps,
        "algorithm.prompts_per_step": prompts,
        "checkpoint.every_steps": 1,
        "data.size": 20_000,
        "queue.capacity_mib": 128,
        "evaluation.items": 32,
    }
    quiet = ToyRun(_made(folder / "undisturbed"), TINY, overrides)
    with quiet:
        _to_its_end(quiet)
    baseline = list(read_metrics(quiet.run_dir, "step"))
    harmed = ToyRun(_made(folder / "disturbed"), TINY, overrides)
    wanted = max(1, round(share * steps))
    with harmed:
        slots = parse_roles("", [s.slot for s in harmed.ready().slots])
        # The last steps are for what is deferred.
        last = max(2 + wanted, steps - 1 - max(2, steps // 20))
        schedule = by_steps(seed, min(1.0, wanted / (last - 1)), 2, last, [FAULTS["kill"]], slots)
        with Injector(harmed.run_dir, seed) as injector:
            session = run_schedule(harmed.run_dir, injector, schedule, recovery_s=0.0, defer=True)
        _to_its_end(harmed)
    found = ettr(list(read_metrics(harmed.run_dir, "step")), baseline, [])
    gaps = sorted(b["m"] - a["m"] for a, b in itertools.pairwise(baseline))
    by_role: dict[str, float] = {}
    for one in session.outcomes:
        role = one.fault.slot.partition("/")[0]
        by_role[role] = by_role.get(role, 0) + (not one.skipped)
    return Trained(
        ettr=found,
        step_s=gaps[len(gaps) // 2],
        checkpoint_s=(_checkpoint_s(quiet, steps), _checkpoint_s(harmed, steps)),
        faults=sum(not one.skipped for one in session.outcomes),
        wanted=wanted,
        deferred=session.deferred,
        steps=steps,
        by_role=by_role,
    )


def _checkpoint_s(run: ToyRun, steps: int) -> float:
    """Time in checkpoints, a step."""
    return sum(float(e.get("seconds", 0.0)) for e in read_events(run.run_dir) if e["kind"] == "checkpoint") / steps


def _to_its_end(run: ToyRun) -> None:
    if run.process.wait(3600):
        raise SystemExit(f"the run failed:\n{run.output.read_text()[-3000:]}")


class Up(msgspec.Struct, frozen=True, kw_only=True):
    """Bringing eight trivial roles up, in seconds. after_zygote: None where none was used."""

    after_command: float
    after_agent: float
    after_zygote: float | None


def eight(folder: Path) -> Up:
    """From the command, from the agent's start, and from the zygote on, until the last one is ready."""
    began = time.monotonic()
    with ToyRun(_made(folder / "eight"), EIGHT, system=("registry",)) as run:
        run.ready()
        events = run.poll()
        ready = max(e["m"] for e in events if e["kind"] == "slot_ready")
        zygote = [e["m"] for e in events if e["kind"] == "zygote_ready"][:1]
        agent = next(e["m"] for e in events if e["kind"] == "run_started")
        run.end()
    return Up(
        after_command=ready - began, after_agent=ready - agent, after_zygote=ready - zygote[0] if zygote else None
    )


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder
