"""A rollout that is killed while its SGLang server boots, at one stage of the boot after the other: nobody else ends,
the next one boots a server of its own, and nothing of those before is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tiny_run import RELAX, TinyRun, steps_that_count

from relax_rt.process.guard import SHM_PREFIXES, SHM_ROOT
from relax_rt.roles.models.resolve import resolve_model

pytest.importorskip("torch")
PYTHON = Path(os.environ.get("RELAX_SGLANG_PYTHON") or Path(__file__).parents[2] / ".venv-sglang/bin/python")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.long,
    pytest.mark.engines,
    pytest.mark.skipif(not PYTHON.exists(), reason="no environment with SGLang: `make sglang-cpu-env`"),
]

STEPS = 4
BOOT_S = 500
OVERRIDES = {
    "algorithm.steps": STEPS,
    "evaluation.items": 16,
    "roles.rollout.engine": '"sglang"',
    "roles.rollout.start_timeout_s": BOOT_S + 60,
    "roles.rollout.sglang": f'{{ python = "{PYTHON}", device = "cpu", boot_timeout_s = {BOOT_S} }}',
    "supervision.restart": "{ max_restarts = 50, backoff_max_s = 0.3 }",
}
ROLE = "rollout/0"
STAGES = ("guard", "server", "its processes", "scheduler")


def stage_of(commands: list[str]) -> set[str]:
    """How far a boot is, by the commands of the role's descendants."""
    servers = [c for c in commands if "sglang.launch_server" in c and "process.guard" not in c]
    spawned = [c for c in commands if "multiprocessing.spawn" in c or c.startswith("sglang::")]
    known = {
        "guard": any("process.guard" in c for c in commands),
        "server": bool(servers),
        "its processes": bool(spawned),
        "scheduler": any(c.startswith("sglang::scheduler") for c in commands),  # its imports are done
    }
    return {stage for stage, reached in known.items() if reached}


def descendants(pid: int) -> dict[int, str]:
    """Commands of all processes below this one."""
    found: dict[int, str] = {}
    try:
        for process in psutil.Process(pid).children(recursive=True):
            try:
                found[process.pid] = " ".join(process.cmdline())
            except psutil.Error:
                continue
    except psutil.NoSuchProcess:
        pass
    return found


def shared_memory() -> set[str]:
    return {path.name for path in SHM_ROOT.iterdir() if path.name.startswith((*SHM_PREFIXES, "sglang"))}


def strike(run: TinyRun, stage: str, before: int) -> int:
    """Kill the role at this stage of its server's boot, once it is another than before; its process id."""
    pid = run.until(f"another {ROLE}", lambda: (p := run.slot(ROLE).get("pid")) != before and p)
    seen: dict[int, str] = {}

    def reached() -> bool:
        seen.update(descendants(pid))
        return stage in stage_of(list(descendants(pid).values()))

    run.until(f"stage {stage!r} of the boot", reached)
    seen.update(descendants(pid))
    assert run.slot(ROLE)["state"] == "starting", "it is still booting"
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 120
    while left := [f"{one}: {command}" for one, command in seen.items() if psutil.pid_exists(one)]:
        assert time.monotonic() < deadline, f"left behind at stage {stage!r}: {left}"
        time.sleep(0.05)
    return int(pid)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyRun]:
    resolve_model("package:tiny", Path())
    before = shared_memory()
    run = TinyRun(tmp_path_factory.mktemp("boot") / "run", **OVERRIDES).start()
    struck = 0
    try:
        for stage in STAGES:
            struck = strike(run, stage, struck)
        booted = run.until("a server that is up", lambda: (s := run.slot(ROLE)).get("state") == "ready" and s["pid"])
        assert booted != struck
        assert run.wait() == 0, run.text()
        assert shared_memory() <= before
        yield run
    finally:
        run.end()


def test_nobody_else_ended_and_nothing_is_left(run: TinyRun) -> None:
    failed = [event["diagnosis"] for event in run.events("slot_exited") if event["diagnosis"]["kind"] != "clean"]
    assert [(one["slot"], one["kind"], one["signal"]) for one in failed] == [(ROLE, "killed", "SIGKILL")] * len(STAGES)
    assert not run.events("agent_died") and not run.events("processes_unkillable")
    assert len(run.events("run_started")) == 1
    run.gone(run.run_id())


def test_the_run_did_all_its_work_with_the_last_server(run: TinyRun) -> None:
    assert sorted(steps_that_count(run.records("step"))) == list(range(1, STEPS + 1))
    swapped = {event["by"] for event in run.events("weights_swapped") if event["by"].startswith(ROLE)}
    assert len(swapped) == 1, "only the last one came to have weights"


def test_why_names_each_kill(run: TinyRun) -> None:
    def why(*options: str) -> str:
        return subprocess.run(
            [RELAX, "why", str(run.run_dir), *options], capture_output=True, text=True, timeout=120, check=True
        ).stdout

    assert "SIGKILL from outside the run" in why()
    (death,) = json.loads(why("--json"))["deaths"]
    assert (death["slot"], death["failures"], death["back"]) == (ROLE, len(STAGES), True)
