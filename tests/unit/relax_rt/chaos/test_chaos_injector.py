"""What the injector does to a process that need not be the run's, and how it leaves what lasts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relax_rt.chaos.faults import ScheduledFault
from relax_rt.chaos.injector import Injector, _Undo
from relax_rt.interfaces.agent import SlotStatus
from relax_rt.observe.events import read_events
from relax_rt.transport.rpc.errors import Refused

CONTROL = "relax_rt.supervision.control"


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process of run "ours"."""
    env = {**os.environ, "RELAX_RUN_ID": "ours"}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=env) as started:
        yield started
        started.kill()


def run_of(monkeypatch: pytest.MonkeyPatch, run_id: str, pid: int) -> None:
    slot = SlotStatus(slot="trainer/0", kind="trainer", tier=40, state="ready", epoch=3, pid=pid)
    status = SimpleNamespace(run_id=run_id, slots=[slot], nodes=[])
    monkeypatch.setattr(f"{CONTROL}.status", lambda run_dir: status)


def kinds(run_dir: Path) -> list[tuple[str, Any]]:
    return [(e["kind"], e.get("number")) for e in read_events(run_dir)]


@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_process_of_somebody_else_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: subprocess.Popen[bytes], fault: str
) -> None:
    run_of(monkeypatch, "another", process.pid)
    with Injector(tmp_path, 1) as injector:
        assert (
            "does not belong to this run"
            in injector.inject(ScheduledFault(number=1, fault=fault, slot="trainer/0")).skipped
        )
    assert process.poll() is None
    assert kinds(tmp_path) == [("fault_skipped", 1)]


@pytest.mark.parametrize(("state", "temporary"), [("backoff", True), ("ended", False)])
def test_a_slot_between_two_processes_is_distinguished_from_one_that_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, temporary: bool
) -> None:
    slot = SlotStatus(slot="trainer/0", kind="trainer", tier=40, state=state, epoch=3, pid=0)
    monkeypatch.setattr(f"{CONTROL}.status", lambda run_dir: SimpleNamespace(run_id="ours", slots=[slot], nodes=[]))
    with Injector(tmp_path, 1) as injector:
        outcome = injector.inject(ScheduledFault(number=1, fault="kill", slot="trainer/0"), may_retry=True)
    assert outcome.skipped and outcome.temporary is temporary
    assert kinds(tmp_path) == ([] if temporary else [("fault_skipped", 1)]), "what is tried again is told once"


def test_its_own_process_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: subprocess.Popen[bytes]
) -> None:
    run_of(monkeypatch, "ours", process.pid)
    with Injector(tmp_path, 1) as injector:
        assert not injector.inject(ScheduledFault(number=1, fault="kill", slot="trainer/0")).skipped
    assert process.wait(120) == -9


def test_a_fault_that_fails_after_its_event_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise Refused("cannot inject", why="its host does not listen")

    run_of(monkeypatch, "ours", os.getpid())
    monkeypatch.setattr(f"{CONTROL}.inject", refuse)
    with Injector(tmp_path, 1) as injector:
        assert injector.inject(ScheduledFault(number=7, fault="delay", slot="trainer/0")).skipped
    assert kinds(tmp_path) == [("fault_injected", 7), ("fault_failed", 7)]


def test_memory_goes_beyond_the_roles_own_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    run_of(monkeypatch, "ours", os.getpid())
    monkeypatch.setattr(f"{CONTROL}.inject", lambda *args: asked.append(args[-1]))
    with Injector(tmp_path, 1) as injector:
        injector.inject(ScheduledFault(number=1, fault="memory", slot="trainer/0", amount=256.0))
    (tmp_path / "config.json").write_text(json.dumps({"roles": {"trainer": {"memory_mib": 4096}}}))
    with Injector(tmp_path, 1) as injector:
        injector.inject(ScheduledFault(number=2, fault="memory", slot="trainer/0", amount=256.0))
    assert asked == [256.0, 4160.0]


def test_one_that_cannot_be_undone_does_not_keep_the_others(tmp_path: Path) -> None:
    done: list[int] = []

    def fail() -> None:
        raise OSError("no such thing")

    with Injector(tmp_path, 1) as injector:
        for number, work in ((1, fail), (2, lambda: done.append(2))):
            injector._undo.append(_Undo(0.0, ScheduledFault(number=number, fault="stop", slot="a/0"), None, work))
        injector.undo(1.0)
    assert done == [2]
    ended = {e["number"]: e.get("reason", "") for e in read_events(tmp_path)}
    assert "no such thing" in ended[1] and ended[2] == ""
