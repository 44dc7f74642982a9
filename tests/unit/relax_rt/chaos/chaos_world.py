"""The records of a small run in which all is well; tests doctor them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from relax_rt.chaos.evidence import Checkpoint, Evidence, JournaledWrite

Record = dict[str, Any]
STEPS, BATCH = 6, 2


class Log:
    """An event log and records that are written in order, a tenth of a second apart."""

    def __init__(self) -> None:
        self.events: list[Record] = []
        self.steps: list[Record] = []
        self.made: list[Record] = []
        self._now = itertools.count(1)

    def tick(self) -> float:
        return next(self._now) / 10

    def event(self, kind: str, by: str = "agent", **fields: Any) -> Record:
        m = self.tick()
        self.events.append({"t": 1000 + m, "m": m, "by": by, "kind": kind, **fields})
        return self.events[-1]

    def spawn(self, slot: str, epoch: int, pid: int) -> None:
        if slot != "registry/0":
            self.event("epoch_issued", "registry/0#0", slot=slot, epoch=epoch)
        self.event("slot_spawned", slot=slot, epoch=epoch, pid=pid)
        self.event("slot_announced", "registry/0#0", slot=slot, epoch=epoch, pid=pid)
        self.event("slot_ready", slot=slot, epoch=epoch)

    def exit(self, slot: str, epoch: int, pid: int, kind: str = "killed", *, finished: bool = False) -> None:
        signal = "SIGKILL" if kind == "killed" else ""
        cause = "finished" if kind == "clean" else "SIGKILL from outside the run"
        diagnosis = {"slot": slot, "epoch": epoch, "kind": kind, "cause": cause, "signal": signal, "pid": pid}
        self.event("slot_exited", slot=slot, epoch=epoch, finished=finished, diagnosis=diagnosis)

    def kill(self, slot: str, epoch: int, pid: int, number: int) -> None:
        fields = {"role": slot.partition("/")[0], "seconds": 0.0, "seed": 1}
        self.event("fault_injected", "chaos", name="kill", slot=slot, epoch=epoch, pid=pid, number=number, **fields)
        self.exit(slot, epoch, pid)
        self.event("slot_restarting", slot=slot, epoch=epoch, wait_s=0.05, restarts=1)

    def ask(self, slot: str, epoch: int, pid: int, name: str, number: int) -> None:
        """A fault that the role has to carry out itself."""
        fields = {"role": slot.partition("/")[0], "seconds": 0.1, "seed": 1}
        self.event("fault_injected", "chaos", name=name, slot=slot, epoch=epoch, pid=pid, number=number, **fields)

    def commit(self, version: int, parent: int, step: int, epoch: int) -> None:
        told = {"version": version, "slot": "trainer/0", "epoch": epoch}
        self.event("version_issued", "registry/0#0", **told)
        self.event("version_committed", "registry/0#0", **told, parent=parent, step=step, digest=f"d{version}")

    def step(self, step: int, version: int, epoch: int, groups: int) -> None:
        """One step on samples of version - 1, made just before."""
        keys = [f"{groups}.{member}" for member in range(BATCH)]
        made = [(key, f"digest {key}", [version - 1]) for key in keys]
        self.made.append({"t": 1000 + self.tick(), "by": "rollout/0#2", "kind": "produced", "samples": made})
        self.commit(version, version - 1, step, epoch)
        self.steps.append(
            {
                "t": 1000 + self.tick(),
                "by": f"trainer/0#{epoch}",
                "kind": "step",
                "step": step,
                "version": version,
                "epoch": epoch,
                "keys": keys,
                "digests": [f"digest {key}" for key in keys],
                "versions": [[version - 1] for _ in keys],
                "staleness": [0 for _ in keys],
                "trained_version": version - 1,
                "changed": True,
            }
        )


def well() -> Evidence:
    """Six steps with a checkpoint at the second; the trainer is killed at the third and does it again."""
    log = Log()
    log.event("run_started", run_id="ab", pid=1, slots=["registry/0", "rollout/0", "trainer/0"])
    log.spawn("registry/0", 0, 10)
    log.spawn("rollout/0", 2, 12)
    log.spawn("trainer/0", 3, 13)
    log.commit(1, 0, 0, 3)
    log.ask("rollout/0", 2, 12, "hang_loop", 9)
    log.event("fault_started", "rollout/0#2", slot="rollout/0", epoch=2, order="hang_loop")
    for step in (1, 2, 3):
        log.step(step, step + 1, 3, groups=step)
        if step == 2:
            log.event("checkpoint", "trainer/0#3", step=2, folder="step-000002", seconds=0.1)
    log.kill("trainer/0", 3, 13, 1)
    log.spawn("trainer/0", 4, 14)
    log.event("resumed", "trainer/0#4", checkpoint="step-000002", step=2, version=3)
    # The weights of step 2 again, as a version of its own.
    log.commit(5, 3, 2, 4)
    for step in (3, 4, 5, 6):
        log.step(step, step + 3, 4, groups=10 + step)
    log.event("checkpoint", "trainer/0#4", step=6, folder="step-000006", seconds=0.1)
    log.event("queue_account", "queue/0#1", trained_twice=0, freed=STEPS * BATCH)
    log.exit("trainer/0", 4, 14, "clean", finished=True)
    log.event("run_draining", reason="trainer/0 has finished", exit_code=0)
    for slot, epoch, pid in (("rollout/0", 2, 12), ("registry/0", 0, 10)):
        log.exit(slot, epoch, pid, "clean")
    log.event("run_ended", status="finished", exit_code=0)
    return Evidence(
        events=log.events,
        steps=log.steps,
        produced=log.made,
        evaluations=[{"t": 1.0, "when": "after", "version": 9}],
        writes=[
            JournaledWrite(1, "trainer/0#3", "trained"),
            JournaledWrite(2, "trainer/0#4", "rollback"),
            JournaledWrite(3, "agent/0#5", "process_exited", "trainer/0#3"),
            JournaledWrite(4, "trainer/0#4", "trained"),
        ],
        checkpoints=[Checkpoint("step-000006", 6, 9, "d9", 4)],
        ended=True,
        status="finished",
        target=STEPS,
        batch=BATCH,
        max_staleness=0.0,
    )


def one(records: list[Record], where: Callable[[Record], bool]) -> int:
    """Place of the first record that fits."""
    return next(n for n, record in enumerate(records) if where(record))


def event(evidence: Evidence, kind: str, nth: int = 0, **fields: Any) -> Record:
    """The nth event of that kind with those fields."""
    return [e for e in evidence.events if e["kind"] == kind and fields.items() <= e.items()][nth]
