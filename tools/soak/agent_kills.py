"""Kill the node agent with SIGKILL at random moments, and see that nothing of the run is left and that `up` resumes it.

    python tools/soak/agent_kills.py [--kills 10] [--seed 1] [--within-s 2] [--json]

A run of the tiny job is brought up, its agent is killed after a random time (also while it starts), and its processes,
sockets and shared memory are looked for until none is left; then it is brought up again. The last time it runs to its
end, and the records of the whole are checked. The exit status is 0 when all is well.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "toys"))

from toy_run import ToyRun

from relax_rt.chaos.evidence import read_evidence
from relax_rt.chaos.verdict import run_checks, violations
from relax_rt.supervision.rundir import read_run

TINY = Path(__file__).resolve().parents[2] / "tests/tiny_job/roles.toml"
PATIENCE_S = 30.0
LONGEST_S = 12.0
END_S = 600.0
STARTED_S = 60.0


def agent_of(run: ToyRun) -> int:
    """The agent's pid once it has said who it is."""
    record = read_run(run.run_dir) or {}
    return int(record["agent"]["pid"]) if record.get("agent") and record.get("status") in ("starting", "running") else 0


def kill_once(run: ToyRun, after_s: float) -> float:
    """Seconds until nothing was left after the agent was killed; infinite when something stayed."""
    run.start()
    agent = run.until("an agent", lambda: agent_of(run), STARTED_S)
    time.sleep(after_s)
    os.kill(agent, signal.SIGKILL)
    began = time.monotonic()
    while run.leftovers():
        if time.monotonic() - began > PATIENCE_S:
            return float("inf")
        time.sleep(0.01)
    gone_s = time.monotonic() - began
    run.process.wait(PATIENCE_S)
    return gone_s


def soak(folder: Path, kills: int, seed: int, within_s: float) -> dict[str, Any]:
    """All kills, then to the end."""
    dice = random.Random(seed)
    run = ToyRun(folder, TINY, {"algorithm.steps": 100, "checkpoint.every_steps": 5})
    gone: list[float] = []
    wrong: list[str] = []
    try:
        for _ in range(kills):
            after_s = dice.uniform(0.0, LONGEST_S)
            gone.append(kill_once(run, after_s))
            print(f"killed after {after_s:.2f} s, nothing left after {gone[-1]:.3f} s", file=sys.stderr, flush=True)
            if gone[-1] > within_s:
                wrong.append(f"something was left for {gone[-1]:.2f} s: {run.leftovers()}")
        run.start()
        if code := run.process.wait(END_S):
            wrong.append(f"the last `up` ended with {code}: {run.output.read_text()[-2000:]}")
    finally:
        run.__exit__()
    wrong += [f"{breach.check}: {breach.what}" for breach in violations(run_checks(read_evidence(run.run_dir)))]
    return {"ok": not wrong, "kills": len(gone), "gone_s": gone, "gone_max_s": max(gone), "wrong": wrong}


def main() -> int:
    """Entry point; answers with the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--within-s", type=float, default=2.0, help="time in which everything must be gone")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="agent-kills-") as folder:
        report = soak(Path(folder), options.kills, options.seed, options.within_s)
    if options.json:
        print(json.dumps(report))
    else:
        print(f"{report['kills']} kills of the agent, all gone after at most {report['gone_max_s']:.3f} s")
        print("\n".join(f"WRONG: {what}" for what in report["wrong"]) or "verdict: nothing left, and `up` resumed it")
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
