"""How fast a run is whole again: every kind of role killed with SIGKILL, one kill at a time, and training under faults.

    python tools/bench/recovery.py [--quick] [--json] [--only toys,tiny,smollm,ettr,up,ray]

Each row is p50 and p99 (200 kills and more; else the maximum) of: the kill until the kernel has ended the process (its
memory is given back first: that is no business of ours), from then, and from the kill, until the exit stands in the
event log (a negative time: the agent saw it before this program did), from the kill until a replacement is ready (the
wait before a first restart, up to 0.1 s, included), until its first new work; and how long the others stood still. ETTR
is undisturbed ÷ disturbed wall-clock to the same step, both measured here, checkpoints included, with faults in 10% of
the steps and roles drawn uniformly; it holds only if so many were carried out: one that finds no process falls a step
later. Beside it Ray, with `make peer-env` or RELAX_PEER_PYTHON: ray.init, eight actors, an actor with the same imports
killed with SIGKILL until it answers again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import peer_env
import recovery_cases as cases

from relax_rt.chaos.timeline import percentiles

KILLS, QUICK_KILLS = 200, 3
SMOLLM_KILLS = 20
ROLES = ("rollout/0", "reward/0", "trainer/0", "evaluator/0")
PARTS = ("toys", "tiny", "smollm", "ettr", "up", "ray")
DETECTED_S, TRIVIAL_S, TRAINER_S, ETTR_GOAL, UP_S = 0.010, 0.5, 5.0, 0.9, 1.0
RAY_TIMEOUT_S = 900


def worst(durations: Sequence[float]) -> tuple[str, float | None]:
    """p99 of 200 and more, else the maximum, by its name."""
    figures = percentiles(durations)
    if not figures["n"]:
        return "max", None
    name = "p99" if "p99" in figures else "max"
    return name, figures[name]


def row(name: str, ours: float | None, goal: float | None = None, **more: Any) -> dict[str, Any]:
    """One row of the machine-readable result."""
    better = more.pop("better", "lower")
    holds = None if goal is None or ours is None else (ours <= goal if better == "lower" else ours >= goal)
    return {
        "name": name,
        "unit": "s",
        "better": better,
        "ours": ours,
        "peers": {},
        "limit": None,
        "goal": goal,
        "holds": holds,
    } | more


def rows_of(slot: str, killed: Sequence[cases.Killed], model: str) -> list[dict[str, Any]]:
    """The rows of one kind of role."""
    role = slot.partition("/")[0]
    what = f"{role} ({model})"
    trivial = role in ("idler", "registry", "queue", "reward")
    goals = {"ready": TRIVIAL_S if trivial else None}
    if role == "trainer" and model != "tiny":
        goals["ready"] = TRAINER_S
    found = []
    for name, goal, values in (
        ("process ended", None, [one.ended_s for one in killed]),
        ("exit seen after that", DETECTED_S, [one.seen_s for one in killed]),
        ("exit seen after the kill", None, [s for one in killed if (s := one.recovery.exited_s) is not None]),
    ):
        which, value = worst(values)
        found.append(row(f"{what}: {name}, {which}", value, goal, p50=percentiles(values).get("p50"), n=len(values)))
    for name, title in (("ready", "replacement ready"), ("worked", "first new work")):
        values = [v for one in killed if (v := getattr(one.recovery, f"{name}_s")) is not None]
        which, value = worst(values)
        p50 = percentiles(values).get("p50")
        found.append(row(f"{what}: {title}, {which}", value, goals.get(name), p50=p50, n=len(values)))
    stood = [one.still for one in killed if one.still is not None]
    if stood and role != "trainer":
        which, value = worst(stood)
        name, p50 = f"{what}: training stood still, {which}", percentiles(stood).get("p50")
        found.append(row(name, value, p50=p50, n=len(stood), not_measured=len(killed) - len(stood)))
    if role == "trainer":
        idle = [one.rollouts_idle for one in killed if one.rollouts_idle is not None]
        which, value = worst(idle)
        # The queue is asked every 0.05 s: two looks are nothing.
        found.append(row(f"{what}: rollouts idle but for the bound, {which}", value, 0.1, n=len(idle)))
    return found


def ettr_rows(trained: cases.Trained) -> list[dict[str, Any]]:
    """ETTR, and what it depends on."""
    found = trained.ettr
    cost = (found.disturbed_s - found.undisturbed_s) / trained.faults if trained.faults and found.value else None
    title = f"ETTR, {trained.faults} faults in {trained.steps} steps of {trained.step_s:.2f} s"
    short = trained.faults < trained.wanted
    why = f"only {trained.faults} of {trained.wanted} faults were carried out" if short else found.why
    first = row(title, found.value, ETTR_GOAL, better="higher", unit="share", by_role=trained.by_role, why=why)
    first["holds"] = bool(first["holds"]) and not short
    return [
        first | {"faults": trained.faults, "wanted": trained.wanted, "deferred": trained.deferred},
        row("  strikes put off a step, as their slot had no process", trained.deferred, unit="strikes"),
        row("  wall-clock that one fault costs, mean", cost),
        row("  checkpoints a step, undisturbed", trained.checkpoint_s[0]),
        row("  checkpoints a step, disturbed", trained.checkpoint_s[1]),
    ]


def ray_rows(kills: int) -> list[dict[str, Any]]:
    """What the peer needs; no rows without it."""
    out = peer_env.run("ray_recovery.py", [str(kills), "torch"], timeout_s=RAY_TIMEOUT_S)
    if out is None:
        return []
    told = last_object(out)
    if told is None:
        print(f"peers/ray_recovery.py told nothing that can be read: {out[-500:]!r}", file=sys.stderr)
        return []
    found = [
        row("Ray: ray.init", None, peers={"ray": told["init_s"]}),
        row("Ray: eight trivial actors answer", None, peers={"ray": told["eight_actors_s"]}),
    ]
    for imports, times in told["restart_s"].items():
        which, value = worst(times)
        name = f"Ray: actor that imports {imports} answers again, {which}"
        found.append(row(name, None, peers={"ray": value}, p50=percentiles(times).get("p50"), n=len(times)))
    return found


def last_object(text: str) -> dict[str, Any] | None:
    """The last line that is a JSON object: a peer's own words may come behind it."""
    for line in reversed(text.splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    return None


def up_rows(folder: Path) -> list[dict[str, Any]]:
    """Eight trivial roles."""
    up = cases.eight(folder)
    return [
        row("eight trivial roles and a registry: all ready after the zygote", up.after_zygote, UP_S),
        row("  after the agent's start", up.after_agent),
        row("  after the command", up.after_command),
    ]


def measure(options: argparse.Namespace, folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """All that was asked for, and the parts that failed: an hour's measurements are not lost by one of them."""
    quick = options.quick
    count = options.kills or (QUICK_KILLS if quick else KILLS)
    steps, prompts = (40, 16) if quick else (options.steps, options.prompts)
    parts: dict[str, Callable[[], Iterable[list[dict[str, Any]]]]] = {
        "toys": lambda: (rows_of(s, k, "no model") for s, k in cases.toys(folder, count, options.seed).items()),
        "tiny": lambda: (rows_of(s, k, "tiny") for s, k in cases.tiny(folder, count, options.seed, ROLES).items()),
        "smollm": lambda: (
            rows_of(s, k, "SmolLM2") for s, k in cases.smollm(folder, min(count, SMOLLM_KILLS), options.seed).items()
        ),
        "ettr": lambda: [ettr_rows(cases.trained_under_faults(folder, steps, prompts, 0.1, options.seed))],
        "up": lambda: [up_rows(folder)],
        "ray": lambda: [ray_rows(3 if quick else 20)],
    }
    found: list[dict[str, Any]] = []
    failed: list[str] = []
    for name in (part for part in PARTS if part in options.only):
        try:
            for rows in parts[name]():
                found += rows
        except (Exception, SystemExit) as error:
            if isinstance(error, SystemExit) and isinstance(error.code, int):
                raise
            failed.append(name)
            print(f"part {name} failed: {error!r}", file=sys.stderr)
    return found, failed


def show(rows: Sequence[dict[str, Any]]) -> None:
    """The table for people."""
    print(f"{'':64}{'n':>5}{'p50':>10}{'ours':>10}{'goal':>9}{'peer':>10}")
    for r in rows:
        cells = [r.get("p50"), r["ours"], r["goal"], r["peers"].get("ray")]
        shown = [f"{'-' if c is None else format(c, '.4f'):>{w}}" for c, w in zip(cells, (10, 10, 9, 10), strict=True)]
        verdict = "" if r["holds"] is None else "  yes" if r["holds"] else "  NO"
        print(f"{r['name']:64}{r.get('n', ''):>5}{''.join(shown)}{verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="three kills of each, few steps, no SmolLM2")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON on the last line")
    parser.add_argument("--only", default="", help=f"comma-separated, of {', '.join(PARTS)}")
    parser.add_argument("--kills", type=int, default=0, help=f"of each kind of role (default {KILLS})")
    parser.add_argument("--steps", type=int, default=200, help="of the training under faults")
    parser.add_argument("--prompts", type=int, default=128, help="a step of it; 8 completions each")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.only = [p for p in options.only.split(",") if p] or [
        p for p in PARTS if not (options.quick and p == "smollm")
    ]
    if unknown := set(options.only) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there is {', '.join(PARTS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder = Path(tempfile.mkdtemp(prefix="recovery-bench-"))
    try:
        rows, failed = measure(options, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    show(rows)
    if options.json:
        print(json.dumps(rows))
    if failed:
        sys.exit(f"not measured: {', '.join(failed)}")


if __name__ == "__main__":
    main()
