"""A run that never was: metrics and events as the roles and the agent write them, with deaths in the middle."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

START = 1_700_000_000.0
SLOTS = ("registry/0", "queue/0", "rollout/0", "rollout/1", "reward/0", "trainer/0", "evaluator/0")
STEP_S = 28.0
GROUPS, GROUP_SIZE = 12, 8


class Writer:
    """Appends to the two files of a run."""

    def __init__(self, run_dir: Path) -> None:
        (run_dir / "events").mkdir(parents=True, exist_ok=True)
        self.metrics = (run_dir / "metrics.jsonl").open("a")
        self.events = (run_dir / "events" / "current.jsonl").open("a")

    def metric(self, kind: str, t: float, by: str, **fields: Any) -> None:
        self.metrics.write(json.dumps({"t": t, "by": by, "kind": kind, **fields}) + "\n")

    def event(self, kind: str, t: float, by: str = "agent", **fields: Any) -> None:
        self.events.write(json.dumps({"t": t, "m": t - START, "by": by, "kind": kind, **fields}) + "\n")

    def close(self) -> None:
        self.metrics.close()
        self.events.close()


def step_record(step: int, epoch: int, first_group: int, rng: random.Random, noise: float = 0.02) -> dict[str, Any]:
    """One trainer line."""
    reward = 0.28 + 0.35 / (1 + math.exp(-(step - 45) / 14)) + rng.gauss(0, noise)
    samples = GROUPS * GROUP_SIZE
    return {
        "step": step,
        "version": step + 1 + epoch,
        "reward_mean": reward,
        "reward_std": 0.41,
        "rewards": {"correct": reward - 0.1, "format": 0.1},
        "staleness": [0 if step == 1 else int(rng.random() < 0.7) for _ in range(samples)],
        "keys": [f"{first_group + g}.{m}" for g in range(GROUPS) for m in range(GROUP_SIZE)],
        "tokens": 14_000 + rng.randrange(2000),
        "computed_tokens": 18_000,
        "loss": rng.gauss(0, 0.01),
        "grad_norm": 0.4,
        "learning_rate": 1e-6,
        "ratio_mean": 1.0,
        "ratio_max_deviation": 0.2,
        "clip_fraction": 0.01,
        "kl_behaviour": 0.001,
        "truncated_fraction": 0.05,
        "length_mean": 150.0,
        "wait_s": 5.0 + 3 * rng.random(),
        "train_s": 20.0 + rng.random(),
        "publish_s": 1.2,
        "epoch": epoch,
    }


def evaluation(when: str, step: int, exact: float, items: int = 512, before: float | None = None) -> dict[str, Any]:
    """One evaluator line."""
    half = 1.96 * math.sqrt(exact * (1 - exact) / items)
    record = {
        "when": when,
        "step": step,
        "version": step + 1,
        "items": items,
        "exact": exact,
        "exact_low": exact - half,
        "exact_high": exact + half,
        "lenient": exact + 0.02,
        "format": 0.97,
        "constant_answer": "12",
        "constant": 0.031,
        "seconds": 61.0,
    }
    if before is not None:
        record |= {"gain_low": exact - before - 1.3 * half, "gain_high": exact - before + 1.3 * half}
    return record


def died(slot: str, epoch: int, kind: str, cause: str, t: float) -> dict[str, Any]:
    """Fields of a slot_exited event."""
    return {
        "slot": slot,
        "epoch": epoch,
        "finished": False,
        "diagnosis": {"slot": slot, "epoch": epoch, "kind": kind, "cause": cause, "signal": "SIGKILL", "at": t},
    }


def make(run_dir: Path, steps: int = 120, crash_at: int = 47, checkpoint: int = 40) -> None:
    """A run of `steps`; the trainer is killed after step `crash_at`, rollout/1 dies twice, reward/0 once."""
    out, rng = Writer(run_dir), random.Random(1)
    epochs = {slot: i + 1 for i, slot in enumerate(SLOTS)}
    out.event("run_started", START, run_id="3fa9c2e1", pid=1, slots=list(SLOTS))
    for slot, epoch in epochs.items():
        out.event("slot_spawned", START + 0.1 * epoch, slot=slot, epoch=epoch, pid=100 + epoch)
        out.event("slot_ready", START + 4 + epoch, slot=slot, epoch=epoch)
    t = START + 20.0
    out.metric("evaluation", t + 60, "evaluator/0#7", **evaluation("before", 0, 0.312))
    t += 70.0
    step, epoch, generated = 0, epochs["trainer/0"], {"rollout/0": 0, "rollout/1": 0}
    crashed, tokens = False, 15_000
    while step < steps:
        step += 1
        record = step_record(step, epoch, 1 + (step - 1) * GROUPS, rng)
        t += record["wait_s"] + record["train_s"] + record["publish_s"]
        for slot in generated:
            generated[slot] += tokens // 2
            line = {"slot": slot, "version": step, "tokens": generated[slot], "tokens_per_s": 270.0 + rng.gauss(0, 20)}
            out.metric("rollout", t - 1, f"{slot}#{epochs[slot]}", **line, running=32, waiting=0)
        queue = {"by_state": {"ready": 96, "leased": 0}, "outstanding": 150, "bound": 192, "payload_bytes": 4_000_000}
        out.metric("queue", t - 1, "queue/0#2", **queue, refused_stale=0)
        out.metric("step", t, f"trainer/0#{epoch}", **record)
        if step % 20 == 0 and step < steps:
            exact = 0.30 + 0.27 / (1 + math.exp(-(step - 45) / 14))
            out.metric("evaluation", t + 10, "evaluator/0#7", **evaluation("during", step, exact, 256, 0.312))
        if step in (30, 80):
            _kill(out, "rollout/1", epochs, t + 5, 3.0, 21 + step)
            generated["rollout/1"] = 0
        if step == 64:
            _kill(out, "reward/0", epochs, t + 5, 1.2, 90)
        if step == crash_at and not crashed:
            crashed, step, epoch = True, checkpoint, 40
            _kill(out, "trainer/0", epochs, t + 8, 14.0, epoch)
            t += 22.0
    if steps:
        out.metric("evaluation", t + 70, "evaluator/0#7", **evaluation("after", steps, 0.561, before=0.312))
    t += 75.0
    counts = {"freed": steps * 96, "samples_issued": steps * 96 + 100, "trained_twice": 0, "refused_stale": 0}
    out.event("queue_account", t, "queue/0#2", **counts)
    out.event("run_draining", t, reason="trainer/0 has finished", exit_code=0)
    for slot in SLOTS:
        clean = {**died(slot, epochs[slot], "clean", "finished", t), "finished": True}
        out.event("slot_exited", t + 0.5, **clean)
    out.close()


def _kill(out: Writer, slot: str, epochs: dict[str, int], t: float, away_s: float, epoch: int) -> None:
    out.event("slot_exited", t, **died(slot, epochs[slot], "killed", "SIGKILL from outside the run", t))
    out.event("slot_restarting", t, slot=slot, epoch=epochs[slot], wait_s=0.1, restarts=1)
    epochs[slot] = epoch
    out.event("slot_spawned", t + 0.2, slot=slot, epoch=epoch, pid=300 + epoch)
    out.event("slot_ready", t + away_s, slot=slot, epoch=epoch)
