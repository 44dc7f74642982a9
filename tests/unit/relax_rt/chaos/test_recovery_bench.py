"""What the recovery bench makes of its measurements: nothing bad is left out, and no goal holds by default."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[4] / "tools" / "bench"))

import recovery
import recovery_cases as cases

from relax_rt.chaos.timeline import Ettr, Recovery
from relax_rt.interfaces.agent import RunStatus

SLOTS = ("rollout/0", "rollout/1")


def looks(counters: list[int], *, full: bool = False) -> list[cases.Look]:
    """One every 0.05 s."""
    return [cases.Look(n * 0.05, dict.fromkeys(SLOTS, count), full) for n, count in enumerate(counters)]


def test_rollouts_that_make_nothing_while_there_is_room_are_idle() -> None:
    still = [0] * 41
    assert cases.idle_s(looks(still), {}, 0.0, 2.0) == pytest.approx(2.0)
    assert cases.idle_s(looks(still, full=True), {}, 0.0, 2.0) == 0.0
    assert cases.idle_s([], {}, 0.0, 2.0) is None
    busy = {slot: [n * 0.05 for n in range(41)] for slot in SLOTS}
    assert cases.idle_s(looks(still), busy, 0.0, 2.0) == 0.0
    assert cases.idle_s(looks(still), {"rollout/0": busy["rollout/0"]}, 0.0, 2.0) == pytest.approx(1.0)


def test_a_counter_that_grows_is_work_only_where_nothing_was_reported() -> None:
    """A long sequence is counted before it is made; one that was made at once hides no pause after it."""
    grown = [0] * 40 + [900]
    assert cases.idle_s(looks(grown), {}, 0.0, 2.0) == 0.0
    told = {slot: [0.1] for slot in SLOTS}
    assert cases.idle_s(looks(grown), told, 0.0, 2.0) == pytest.approx(1.8, abs=0.06)


def test_the_stall_that_never_ended_counts_as_the_worst() -> None:
    steps = [n * 0.5 for n in range(11)]
    assert cases.stood_still([*steps, 8.0], 5.1, 7.0, 8.1) == pytest.approx(2.5)
    assert cases.stood_still(steps, 5.1, 7.0, 27.0) == pytest.approx(21.5)
    assert cases.stood_still([1.0], 0.5, 7.0, 27.0) is None


def trained(faults: int, wanted: int, value: float | None = 0.95) -> cases.Trained:
    found = Ettr(value=value, measured=True, undisturbed_s=95.0, disturbed_s=100.0)
    return cases.Trained(
        ettr=found,
        step_s=0.5,
        checkpoint_s=(0.05, 0.06),
        faults=faults,
        wanted=wanted,
        deferred=3,
        steps=200,
        by_role={},
    )


def test_an_ettr_without_its_faults_does_not_hold() -> None:
    whole, none, short = (recovery.ettr_rows(trained(n, 20)) for n in (20, 0, 19))
    assert whole[0]["holds"] is True
    assert none[0]["holds"] is False and short[0]["holds"] is False
    assert "only 19 of 20" in short[0]["why"]
    assert recovery.ettr_rows(trained(20, 20, None))[0]["holds"] is False
    assert {r["name"].strip(): r["ours"] for r in whole}["checkpoints a step, undisturbed"] == 0.05


def test_detection_is_reported_from_the_kill_too_and_may_be_negative() -> None:
    back = Recovery(number=1, fault="kill", slot="reward/0", at=5.0, exited_s=0.010, ready_s=0.6, worked_s=0.7)
    killed = [cases.Killed(recovery=back, ended_s=0.012, seen_s=-0.002)]
    rows = {r["name"].partition(": ")[2]: r for r in recovery.rows_of("reward/0", killed, "no model")}
    assert rows["exit seen after that, max"]["ours"] == -0.002
    assert rows["exit seen after the kill, max"]["ours"] == 0.010
    assert (rows["replacement ready, max"]["goal"], rows["replacement ready, max"]["holds"]) == (0.5, False)


def test_a_system_role_is_found_while_it_is_away() -> None:
    """After a kill the run knows no address of it until it is back: what was asked then must not be asked in vain."""
    status = RunStatus(run_id="abc", name="a", run_dir="/runs/a", status="running", agent_pid=1, uptime_s=1.0, slots=[])
    assert cases.address_of(status, "registry/0") == "unix:///tmp/relax-abc/registry-0.sock"


def test_one_part_that_fails_does_not_lose_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        recovery.cases, "eight", lambda folder: cases.Up(after_command=1, after_agent=1, after_zygote=1)
    )
    monkeypatch.setattr(recovery, "ray_rows", lambda kills: 1 / 0)
    options = SimpleNamespace(only=["up", "ray"], quick=True, kills=0, steps=1, prompts=1, seed=1)
    rows, failed = recovery.measure(options, tmp_path)  # type: ignore[arg-type]
    assert len(rows) == 3 and failed == ["ray"]


def test_the_peer_may_say_more_than_its_result() -> None:
    assert recovery.last_object('[1]\n{"a": 1}\nbye\n3') == {"a": 1}
    assert recovery.last_object("no") is None
