"""Whole runs of the tiny job under `relax-rt chaos`, judged by its checker (the long form is tools/soak)."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tiny_run import RELAX, TinyRun

from relax_rt.chaos.evidence import read_evidence
from relax_rt.chaos.faults import FAULTS, poisson
from relax_rt.chaos.verdict import run_checks, violations
from relax_rt.roles.models.resolve import resolve_model

pytest.importorskip("torch")
pytestmark = pytest.mark.chaos

KINDS = ("registry", "queue", "reward", "rollout", "trainer", "evaluator")
PATIENT = {"supervision.restart.max_restarts": 50, "supervision.restart.period_s": 600}


@pytest.fixture(scope="module", autouse=True)
def tiny_model() -> None:
    """Converted once, outside any run's deadlines."""
    resolve_model("package:tiny", Path())


def relax(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([RELAX, *argv], capture_output=True, text=True, timeout=300, check=False)


def verdict_of(run: TinyRun, *argv: str) -> dict[str, Any]:
    """Of `relax-rt chaos`, which must find every guarantee kept."""
    done = relax("chaos", str(run.run_dir), *argv, "--json")
    assert done.returncode == 0, done.stdout + done.stderr + run.text()
    return dict(json.loads(done.stdout))


def judged(verdict: dict[str, Any], name: str) -> int:
    return int(next(r["judged"] for r in verdict["results"] if r["check"] == name))


def test_every_kind_of_role_is_killed_and_the_run_reaches_its_target(runs: list[TinyRun], tmp_path: Path) -> None:
    schedule = poisson(10, 1.2, 18.0, [FAULTS["kill"]], {kind: [f"{kind}/0"] for kind in KINDS})
    drawn = Counter(fault.slot.partition("/")[0] for fault in schedule)
    assert min(drawn[kind] for kind in KINDS) >= 2, drawn
    run = TinyRun(tmp_path / "run", **{"algorithm.steps": 200, "checkpoint.every_steps": 10, **PATIENT})
    runs.append(run.start())
    run.until("a checkpoint", lambda: run.last_step() >= 12)
    shown = json.loads(relax("chaos", str(run.run_dir), *CHAOS, "--dry-run", "--json").stdout)
    assert [s["slot"] for s in shown["faults"]] == [s.slot for s in schedule]
    verdict = verdict_of(run, *CHAOS, "--wait", "4m")
    assert run.wait() == 0, run.text()
    assert verdict["ended"] and verdict["status"] == "finished"
    assert {r["role"] for r in verdict["roles"]} == set(KINDS), verdict["roles"]
    assert {role for role, faults in verdict["faults_by_role"].items() if faults.get("kill")} == set(KINDS), verdict[
        "faults_by_role"
    ]
    assert verdict["not_injected"] == 0
    assert verdict["ettr"]["value"] is None or verdict["ettr"]["value"] > 0
    for name in ("trained_once", "trained_as_produced", "staleness_bounded", "fencing", "no_leftovers"):
        assert judged(verdict, name) > 0, name
    story = json.loads(relax("why", "--run", str(run.run_dir), "--json").stdout)
    killed = {fault.slot for fault in schedule}
    assert {death["slot"] for death in story["deaths"]} >= killed
    assert all(death["last"]["cause"] for death in story["deaths"])


CHAOS = ("--seed", "10", "--mean", "1.2s", "--for", "18s")


@pytest.mark.long
def test_what_was_overtaken_while_it_was_stopped_writes_nothing_any_more(runs: list[TinyRun], tmp_path: Path) -> None:
    run = TinyRun(tmp_path / "run", **{"algorithm.steps": 60, "checkpoint.every_steps": 10, **PATIENT})
    runs.append(run.start())
    run.until("some steps", lambda: run.last_step() >= 12)
    verdict = verdict_of(
        run, "--at-once", "overtake:trainer/0:1s", "--at-once", "overtake:rollout/0:1s", "--wait", "4m"
    )
    assert run.wait() == 0, run.text()
    assert verdict["injected"] == {"overtake": 2}
    assert judged(verdict, "fencing") > 0
    for slot in ("trainer/0", "rollout/0"):
        (fenced,) = [e for e in run.events("slot_overtaken") if e["slot"] == slot]
        assert fenced["by_epoch"] > fenced["epoch"]
        (end,) = [e for e in run.events("slot_exited") if (e["slot"], e["epoch"]) == (slot, fenced["epoch"])]
        assert "StaleEpoch" in end["diagnosis"]["trace"] or "fenced" in end["diagnosis"]["cause"], end
        back = [e for e in run.events("slot_spawned") if e["slot"] == slot]
        assert back[-1]["epoch"] > fenced["by_epoch"]


@pytest.mark.long
def test_what_is_stopped_beyond_its_deadline_is_replaced(runs: list[TinyRun], tmp_path: Path) -> None:
    settings = {"algorithm.steps": 100, "roles.rollout.hang_after_s": 8.0, "queue.lease_s": 8.0}
    run = TinyRun(tmp_path / "run", **settings)
    runs.append(run.start())
    run.until("some steps", lambda: run.last_step() >= 12)
    verdict = verdict_of(run, "--at-once", "stop:rollout/0:30s", "--wait", "4m")
    assert run.wait() == 0, run.text()
    (end,) = [e for e in run.events("slot_exited") if e["slot"] == "rollout/0" and e["diagnosis"]["kind"] != "clean"]
    assert end["diagnosis"]["kind"] == "hang"
    assert [e["reason"] for e in run.events("fault_ended")] == ["the process is gone"]
    assert verdict["ok"]


@pytest.mark.long
def test_a_killed_agent_at_random_moments_leaves_nothing_and_up_resumes(runs: list[TinyRun], tmp_path: Path) -> None:
    dice = random.Random(3)
    run = TinyRun(tmp_path / "run", **{"algorithm.steps": 60, "checkpoint.every_steps": 5})
    runs.append(run)
    for _ in range(3):
        run.start()
        run_id = run.until("an agent", lambda: alive(run))
        time.sleep(dice.uniform(0.0, 6.0))
        os.kill(run.agent_pid(), signal.SIGKILL)
        assert run.wait() == 137, run.text()
        run.gone(run_id)
    run.start()
    assert run.wait() == 0, run.text()
    run.gone(run.run_id())
    evidence = read_evidence(run.run_dir)
    assert evidence.reached
    assert violations(run_checks(evidence)) == []


def alive(run: TinyRun) -> str:
    """The id of the run, once its agent has said who it is."""
    try:
        record = json.loads((run.run_dir / "run.json").read_text())
    except (OSError, ValueError):
        return ""
    started = record.get("agent") and record["status"] in ("starting", "running")
    return str(record["run_id"]) if started else ""
