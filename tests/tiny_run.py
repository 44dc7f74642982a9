"""A real `relax-rt up` of the tiny job, watched and harmed from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).resolve().parent / "tiny_job" / "roles.toml"
RELAX = str(Path(sys.executable).with_name("relax-rt"))
DEADLINE_S = 600.0
"""Only what hangs takes so long, on one core beside other work too."""


class TinyRun:
    """One run directory; `start` may be called again to resume."""

    def __init__(self, run_dir: Path, config: Path = CONFIG, **overrides: Any) -> None:
        self.run_dir, self.config = run_dir, config
        self.overrides = {"run.dir": json.dumps(str(run_dir)), **overrides}
        self.output = run_dir.parent / f"{run_dir.name}.out"
        self.process: subprocess.Popen[bytes]

    def command(self) -> list[str]:
        sets = [word for key, value in self.overrides.items() for word in ("--set", f"{key}={value}")]
        return [RELAX, "up", str(self.config), *sets]

    def start(self) -> TinyRun:
        with self.output.open("ab") as out:
            # A session of its own, so that a signal reaches only what it is sent to.
            self.process = subprocess.Popen(
                self.command(), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        return self

    def wait(self) -> int:
        try:
            return self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the run did not end:\n{self.text()}") from None

    def down(self) -> None:
        """End it in order, with a last checkpoint."""
        subprocess.run([RELAX, "down", str(self.run_dir)], timeout=DEADLINE_S, check=True)
        assert self.wait() == 0, self.text()

    def end(self) -> None:
        """Leave nothing of it running, whatever became of the test."""
        if hasattr(self, "process") and self.process.poll() is None:
            subprocess.run([RELAX, "down", str(self.run_dir), "--kill"], timeout=DEADLINE_S, check=False)
            self.process.kill()
            self.process.wait()

    def text(self) -> str:
        return self.output.read_text()[-6000:]

    def ps(self) -> dict[str, Any]:
        done = subprocess.run(
            [RELAX, "ps", str(self.run_dir), "--json"], capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        return dict(json.loads(done.stdout)) if done.returncode == 0 else {}

    def slot(self, name: str) -> dict[str, Any]:
        return next((dict(s) for s in self.ps().get("slots", []) if s["slot"] == name), {})

    def processes_of(self, name: str) -> list[dict[str, Any]]:
        """The incarnations of a slot so far, oldest first: pid, epoch, ready, exited.

        From the event log: `relax-rt ps` takes seconds on a slow machine, in which a tiny run may be over.
        """
        found: dict[int, dict[str, Any]] = {}
        for event in self.events("slot_spawned", "slot_ready", "slot_exited"):
            if event["slot"] == name:
                new = {"epoch": event["epoch"], "pid": 0, "ready": False, "exited": False}
                one = found.setdefault(event["epoch"], new)
                one["pid"] = event.get("pid", one["pid"])
                one["ready"] |= event["kind"] == "slot_ready"
                one["exited"] |= event["kind"] == "slot_exited"
        return list(found.values())

    def pid(self, name: str) -> int:
        """Of a slot's process. Never 0: a signal to that would reach the tests' own group."""
        living = [one["pid"] for one in self.processes_of(name) if one["pid"] > 0 and not one["exited"]]
        assert living, f"{name} has no process now"
        return int(living[-1])

    def until(self, what: str, condition: Callable[[], Any]) -> Any:
        """Wait for a condition; the run's end or the deadline fails the test with the run's last lines."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            found = condition()
            if found:
                return found
            assert self.process.poll() is None, f"the run ended before {what}:\n{self.text()}"
            assert time.monotonic() < deadline, f"no {what}:\n{self.text()}"
            time.sleep(0.1)

    def records(self, kind: str) -> list[dict[str, Any]]:
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [r for r in (json.loads(line) for line in lines if line.endswith("}")) if r["kind"] == kind]

    def last_step(self) -> int:
        return max((r["step"] for r in self.records("step")), default=0)

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        paths = [*sorted((self.run_dir / "events").glob("events-*.jsonl")), self.run_dir / "events/current.jsonl"]
        lines = [line for path in paths if path.exists() for line in path.read_text().splitlines()]
        return [r for r in map(json.loads, lines) if r["kind"] in kinds]

    def run_id(self) -> str:
        return str(json.loads((self.run_dir / "run.json").read_text())["run_id"])

    def agent_pid(self) -> int:
        return int(json.loads((self.run_dir / "run.json").read_text())["agent"]["pid"])

    def leftovers(self, run_id: str) -> list[str]:
        """Processes, shared memory and sockets that still carry the run's id."""
        found = [str(p) for p in (Path(f"/dev/shm/relax-{run_id}"), Path(f"/tmp/relax-{run_id}")) if p.exists()]
        for pid in processes():
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes()
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            if f"RELAX_RUN_ID={run_id}".encode() in environment or run_id.encode() in command:
                found.append(f"{pid}: {command.decode(errors='replace')}")
        return found

    def gone(self, run_id: str) -> None:
        """Wait until nothing is left; the caller has made sure that the run has ended."""
        deadline = time.monotonic() + DEADLINE_S
        while left := self.leftovers(run_id):
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.05)

    def kill(self, slot: str) -> int:
        """SIGKILL the slot's process and wait until another is or was ready; returns that one's pid."""

        def ready(after: int = 0) -> dict[str, Any] | None:
            found = [one for one in self.processes_of(slot) if one["ready"] and one["epoch"] > after]
            return found[-1] if found and (after or not found[-1]["exited"]) else None

        old = self.until(f"{slot} to be ready", ready)
        os.kill(old["pid"], signal.SIGKILL)
        return int(self.until(f"{slot} to be back", lambda: ready(old["epoch"]))["pid"])


Make = Callable[..., TinyRun]
"""What the fixture `make` of the integration tests is."""


def processes() -> Iterator[int]:
    """Every process id there is."""
    return (int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit())


def steps_that_count(records: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Step records on the path to the end: after a restart the higher epoch's steps replace what they repeat.

    Written apart from the report's own code, so that the two can disagree.
    """
    path: dict[int, dict[str, Any]] = {}
    for record in sorted(records, key=lambda r: (r["epoch"], r["step"])):
        if record["step"] in path:
            path = {step: r for step, r in path.items() if step < record["step"]}
        path[record["step"]] = record
    return path
