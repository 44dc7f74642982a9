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

from relax_rt.chaos.ettr import Ettr, ettr
from relax_rt.chaos.faults import FAULTS, roles_named
from relax_rt.chaos.injector import Injector
from relax_rt.chaos.schedule import Strike, by_steps
from relax_rt.chaos.session import play
from relax_rt.chaos.timeline import Recovery, recoveries
from relax_rt.metrics import read_metrics
from relax_rt.registry.api import RegistryApi
from relax_rt.supervision.api import RunStatus
from relax_rt.transport.errors import RelaxError
from relax_rt.transport.identity import Incarnation
from relax_rt.transport.queue.api import QueueApi
from relax_rt.transport.rpc import Client, make_hello

HERE = Path(__file__).resolve().parent
TINY = HERE.parent.parent / "tests/tiny_job/roles.toml"
QUICKSTART = HERE.parent.parent / "examples/quickstart/roles.toml"
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
BY_THE_BOUND = ("bound", "admission", "the end of the run")


class Killed(msgspec.Struct, frozen=True, kw_only=True):
    """One kill and what came of it, in seconds.

    Attributes:
        ended_s: from the kill until the kernel had ended the process, as seen here by pidfd.
        seen_s: from then until its exit stood in the event log.
        still: how long training stood still beyond its usual pause between two steps.
        rollouts_idle: of rollouts, for other reasons than the staleness bound, while the slot was away.
    """

    recovery: Recovery
    ended_s: float
    seen_s: float
    still: float | None = None
    rollouts_idle: float = 0.0


def kills(run: ToyRun, injector: Injector, slot: str, count: int, seed: int) -> Iterator[Killed]:
    """Kill a slot again and again, each time once it is ready, has worked, and a random moment has passed."""
    dice = random.Random(f"moments {seed} {slot}")
    for number in range(1, count + 1):
        run.until(f"{slot} to be ready", lambda: _state(run.status(), slot) == "ready", BACK_WITHIN_S)
        time.sleep(0.1 + dice.random() * 0.4)
        seen = len(run.poll())
        end = End(next(s.pid for s in run.ready(BACK_WITHIN_S).slots if s.slot == slot))
        outcome = injector.strike(Strike(number=number, fault="kill", slot=slot))
        if outcome.withheld:
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
    idle = 0.0
    looked = time.monotonic()
    probe = Probe(run.status(), slot)
    answered: list[float] = []

    def back() -> bool:
        nonlocal idle, looked
        now = time.monotonic()
        if now - looked >= LOOK_S:
            idle += (now - looked) * _idle_rollouts(run.status(), slot)
            looked = now
        found = [e for e in run.poll()[seen:] if e["kind"] == "slot_exited" and e["slot"] == slot]
        if found and probe.api is not None and not answered and probe.answers():
            answered.append(time.monotonic() - at["m"])
        one = _recovery(run, at)
        return one.ready_s is not None and (one.worked_s is not None or bool(answered))

    try:
        run.until(f"{slot} to work again", back, BACK_WITHIN_S)
    finally:
        probe.close()
    one = _recovery(run, at)
    one.worked_s = one.worked_s if one.worked_s is not None else (answered or [None])[0]  # type: ignore[list-item]
    end.close()
    assert one.exited_s is not None
    ended_s = end.at - at["m"]
    seen_s = max(0.0, one.exited_s - ended_s)
    return Killed(recovery=one, ended_s=ended_s, seen_s=seen_s, still=_still(run, at, one), rollouts_idle=idle)


def _recovery(run: ToyRun, at: dict[str, Any]) -> Recovery:
    started = max(0, run.events.index(at) - 400)
    # The life that the kill ended began before it; the newest part of the log is enough for the rest.
    spawned = [e for e in run.events[:started] if e["kind"] == "slot_spawned" and e.get("slot") == at["slot"]][-1:]
    return next(r for r in recoveries([*spawned, *run.events[started:]]) if r.at == at["m"])


def _state(status: RunStatus | None, slot: str) -> str:
    return next((s.state for s in status.slots if s.slot == slot), "") if status is not None else ""


def _idle_rollouts(status: RunStatus | None, killed: str) -> float:
    """Share of the other rollouts that wait for something that is not the bound."""
    if status is None:
        return 0.0
    others = [s for s in status.slots if s.kind == "rollout" and s.slot != killed]
    waits = [s for s in others if s.waiting and not any(word in s.waiting for word in BY_THE_BOUND)]
    return len(waits) / len(others) if others else 0.0


def _still(run: ToyRun, at: dict[str, Any], one: Recovery) -> float | None:
    """The longest pause between two steps from the kill until it was over, less the usual one."""
    begin, end = at["m"], at["m"] + max(one.worked_s or 0.0, one.ready_s or 0.0)
    limit = time.monotonic() + STEP_WITHIN_S
    times: list[float] = []
    while time.monotonic() < limit and (not times or times[-1] < end):
        time.sleep(LOOK_S)
        times = [r["m"] for r in read_metrics(run.run_dir, "step")][-400:]
    gaps = [(a, b) for a, b in itertools.pairwise(times)]
    usual = sorted(b - a for a, b in gaps if b < begin)
    around = [b - a for a, b in gaps if b > begin and a < end]
    if not usual or not around:
        return None
    return max(0.0, max(around) - usual[len(usual) // 2])


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
        address = next((s.address for s in self._status.slots if s.slot == self._slot), "") if self._status else ""
        if not address:
            # It was away when the run was asked; the socket's place follows from the slot's name.
            return False
        assert self._status is not None
        client = Client(address, make_hello(self._status.run_id, Incarnation("cli/0", 0)))
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
    """The trainer of the quickstart, SmolLM2-135M."""
    overrides = {**AS_FIRST, "algorithm.steps": 10_000, "checkpoint.every_steps": 2}
    return _one_by_one(ToyRun(_made(folder / "smollm"), QUICKSTART, overrides), ("trainer/0",), count, seed)


def _one_by_one(run: ToyRun, slots: Sequence[str], count: int, seed: int) -> dict[str, list[Killed]]:
    with run:
        run.ready(300.0)
        if run.config != run.run_dir.parent / "roles.toml":
            run.until("some steps", lambda: len(list(read_metrics(run.run_dir, "step"))) >= 5, 300.0)
        with Injector(run.run_dir, seed) as injector:
            return {slot: list(kills(run, injector, slot, count, seed)) for slot in slots}


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """Undisturbed and disturbed training of the same config. step_s: median time of an undisturbed step."""

    ettr: Ettr
    step_s: float
    faults: int
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
    with harmed:
        slots = roles_named("", [s.slot for s in harmed.ready().slots])
        schedule = by_steps(seed, share, 2, steps - 1, [FAULTS["kill"]], slots)
        with Injector(harmed.run_dir, seed) as injector:
            session = play(harmed.run_dir, injector, schedule, settle_s=0.0)
        _to_its_end(harmed)
    found = ettr(list(read_metrics(harmed.run_dir, "step")), baseline, [])
    gaps = sorted(b["m"] - a["m"] for a, b in itertools.pairwise(baseline))
    by_role: dict[str, float] = {}
    for one in session.outcomes:
        role = one.strike.slot.partition("/")[0]
        by_role[role] = by_role.get(role, 0) + (not one.withheld)
    done = sum(not one.withheld for one in session.outcomes)
    return Trained(ettr=found, step_s=gaps[len(gaps) // 2], faults=done, steps=steps, by_role=by_role)


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
