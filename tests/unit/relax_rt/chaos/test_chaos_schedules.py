"""Names of faults, schedules, restart budget, recoveries, ETTR, the verdict."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import msgspec
import pytest
from chaos_world import event, well

from relax_rt.chaos import faults
from relax_rt.chaos.injector import RestartBudget
from relax_rt.chaos.timeline import ettr, find_recoveries, percentiles
from relax_rt.chaos.verdict import judge, render
from relax_rt.config.problems import BadInput
from relax_rt.observe.text import parse_duration

SLOTS = ["registry/0", "queue/0", "rollout/0", "rollout/1", "rollout/2", "trainer/0"]
KILL = [faults.FAULTS["kill"]]


@pytest.mark.parametrize(
    ("text", "value"), [("5s", 5.0), ("500ms", 0.5), ("2.5m", 150.0), ("1h", 3600.0), ("7", 7.0), (".5s", 0.5)]
)
def test_durations(text: str, value: float) -> None:
    assert parse_duration(text) == value


@pytest.mark.parametrize("text", ["", "5 x", "-1s", "five", "1d", "inf"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(BadInput, match="not a duration"):
        parse_duration(text)


def test_unknown_names_get_a_suggestion() -> None:
    assert [f.name for f in faults.parse_faults("kill, stop,kill")] == ["kill", "stop"]
    with pytest.raises(BadInput, match="stop"):
        faults.parse_faults("kill,stpo")
    with pytest.raises(BadInput, match="rollout"):
        faults.parse_roles("rolout", SLOTS)
    with pytest.raises(BadInput, match="trainer/0"):
        faults.parse_fault("kill:trainr/0", SLOTS)
    with pytest.raises(BadInput, match="at most"):
        faults.parse_fault("stop:trainer/0:1h", SLOTS)
    assert faults.parse_fault("stop:rollout:12s", SLOTS) == faults.RequestedFault(
        faults.FAULTS["stop"], "rollout/0", 12.0
    )
    assert faults.parse_fault("disk:5s", SLOTS) == faults.RequestedFault(faults.FAULTS["disk"], "", 5.0)
    assert faults.parse_roles("rollout/2,trainer", SLOTS) == {"rollout": ["rollout/2"], "trainer": ["trainer/0"]}


def test_a_seed_is_a_schedule() -> None:
    slots = faults.parse_roles("", SLOTS)
    every = [*faults.FAULTS.values()]
    assert faults.poisson(7, 0.5, 60, every, slots) == faults.poisson(7, 0.5, 60, every, slots)
    assert faults.poisson(7, 0.5, 60, every, slots) != faults.poisson(8, 0.5, 60, every, slots)
    kills, mixed = (faults.poisson(7, 0.5, 60, some, slots) for some in (KILL, [*KILL, faults.FAULTS["stop"]]))
    assert [(s.at_s, s.slot) for s in kills] == [(s.at_s, s.slot) for s in mixed]


def test_roles_are_drawn_uniformly_and_pauses_have_their_mean() -> None:
    planned = faults.poisson(3, 1.0, 6000, KILL, faults.parse_roles("", SLOTS))
    assert len(planned) == pytest.approx(6000, rel=0.1)
    roles = Counter(s.slot.partition("/")[0] for s in planned)
    assert all(n == pytest.approx(len(planned) / 4, rel=0.15) for n in roles.values())
    assert {s.slot for s in planned} == set(SLOTS)
    assert [s.number for s in planned] == list(range(1, len(planned) + 1))
    assert all(a.at_s <= b.at_s for a, b in itertools.pairwise(planned))


def test_each_kind_of_role_gets_two_faults_if_there_are_enough() -> None:
    slots = faults.parse_roles("", [*SLOTS, "reward/0", "evaluator/0"])
    longest = 0
    for seed in range(40):
        planned = faults.poisson(seed, 1.0, 16.0, KILL, slots)
        kinds = Counter(s.slot.partition("/")[0] for s in planned)
        if len(planned) >= 2 * len(slots):
            longest += 1
            assert min(kinds[role] for role in slots) >= 2, seed
        assert [s.number for s in planned] == list(range(1, len(planned) + 1))
        assert {s.slot for s in planned} <= {slot for of_role in slots.values() for slot in of_role}
    assert longest > 5
    by_step = Counter(s.slot.partition("/")[0] for s in faults.by_steps(1, 0.1, 1, 120, KILL, slots))
    assert set(by_step.values()) == {2} and len(by_step) == 6


def test_faults_in_a_share_of_the_steps() -> None:
    planned = faults.by_steps(1, 0.1, 1, 200, KILL, faults.parse_roles("", SLOTS))
    steps = [s.at_step for s in planned]
    assert len(steps) == 20 == len(set(steps))
    assert min(steps) >= 1 and max(steps) <= 200 and steps == sorted(steps)
    for wrong in ({"share": 0.0, "last": 9}, {"share": 0.1, "last": 0}):
        with pytest.raises(BadInput):
            faults.by_steps(1, wrong["share"], 1, int(wrong["last"]), KILL, {"a": ["a/0"]})


@pytest.mark.parametrize(("mean_s", "for_s"), [(0, 1), (1, 0), (1e-6, 1e6)])
def test_schedules_that_cannot_be(mean_s: float, for_s: float) -> None:
    with pytest.raises(BadInput):
        faults.poisson(1, mean_s, for_s, KILL, {"a": ["a/0"]})


def test_a_fault_is_skipped_when_its_slot_has_no_restart_left() -> None:
    budget = RestartBudget(max_restarts=2, period_s=10.0)
    assert budget.remaining("a/0", 0.0) == 2

    def take(kind: str, m: float, **fields: Any) -> None:
        budget.update({"kind": kind, "slot": "a/0", "m": m, **fields})

    take("slot_ready", 0.0)
    take("slot_exited", 1.0, diagnosis={"kind": "killed"})
    take("slot_ready", 100.0)  # time away is no good time
    take("slot_exited", 101.0, diagnosis={"kind": "killed"})
    assert budget.remaining("a/0", 200.0) == 0
    take("slot_ready", 200.0)
    assert budget.remaining("a/0", 208.5) == 0
    assert budget.remaining("a/0", 209.5) == 1
    take("slot_exited", 212.0, diagnosis={"kind": "clean"})
    assert budget.remaining("a/0", 212.0) == 2
    assert budget.remaining("b/0", 212.0) == 2


def test_a_recovery_is_timed_from_the_fault_on() -> None:
    evidence = well()
    worked = {"t": 0.0, "m": event(evidence, "slot_ready", slot="trainer/0", epoch=4)["m"] + 0.05}
    place = evidence.events.index(event(evidence, "slot_ready", slot="trainer/0", epoch=4)) + 1
    evidence.events.insert(place, {**worked, "by": "trainer/0#4", "kind": "first_work"})
    (one,) = find_recoveries(evidence.events)
    at = event(evidence, "fault_injected", name="kill")["m"]
    assert (one.role, one.fault, one.wait_s) == ("trainer", "kill", 0.05)
    assert one.exited_s == pytest.approx(event(evidence, "slot_exited")["m"] - at)
    assert one.ready_s == pytest.approx(event(evidence, "slot_ready", slot="trainer/0", epoch=4)["m"] - at)
    assert one.worked_s == pytest.approx(worked["m"] - at)


def test_a_fault_that_a_process_survived_is_no_recovery() -> None:
    evidence = well()
    kill = event(evidence, "fault_injected", name="kill")
    place = evidence.events.index(kill)
    evidence.events.insert(place, {**kill, "name": "hang_loop", "number": 7, "m": kill["m"] - 0.01})
    rollout = {**kill, "name": "stop", "slot": "rollout/0", "pid": 12, "epoch": 2, "number": 8}
    evidence.events.insert(place, rollout)
    assert [r.number for r in find_recoveries(evidence.events)] == [1]


def test_a_percentile_needs_two_hundred() -> None:
    assert percentiles([]) == {"n": 0}
    assert "p99" not in percentiles([float(n) for n in range(199)])
    figures = percentiles([float(n) for n in range(1, 201)])
    assert (figures["p50"], figures["p99"], figures["max"]) == (100.5, 198.0, 200.0)


def steps(*at: tuple[int, float, int]) -> list[dict[str, Any]]:
    return [{"step": step, "t": t, "epoch": epoch} for step, t, epoch in at]


def test_ettr_is_the_ratio_of_two_measured_times() -> None:
    undisturbed = steps(*[(n, float(n), 1) for n in range(1, 11)])
    disturbed = steps((1, 1.0, 1), (2, 2.0, 1), (3, 3.0, 1), (3, 8.0, 2), *[(n, n + 5.0, 2) for n in range(4, 11)])
    found = ettr(disturbed, undisturbed, [])
    assert found.measured and (found.first, found.last) == (1, 10)
    assert found.value == pytest.approx(9 / 14)


def test_ettr_without_a_baseline_is_named_an_estimate() -> None:
    disturbed = steps(*[(n, float(n), 1) for n in range(1, 8)], (7, 12.0, 2), (8, 13.0, 2))
    found = ettr(disturbed, None, [(6.5, 12.5)])
    assert not found.measured
    assert found.value == pytest.approx(7 / 12)
    assert ettr(steps((1, 1.0, 1)), None, []).value is None
    assert ettr(disturbed, steps((1, 1.0, 1)), []).value is None


def test_verdict_as_text_and_as_json() -> None:
    good = judge(well())
    assert good.ok and good.injected == {"hang_loop": 1, "kill": 1}
    assert "every guarantee was kept" in render(good)
    assert good.faults_by_role == {"registry": {}, "rollout": {"hang_loop": 1}, "trainer": {"kill": 1}} and good.passed
    short = judge(well(), not_injected=3)
    assert short.ok and not short.passed and "before 3 faults were due" in render(short)
    evidence = well()
    event(evidence, "version_committed", version=5)["epoch"] = 3
    bad = judge(evidence)
    assert not bad.ok
    assert "fencing" in render(bad) and "VIOLATED" in render(bad)
    assert msgspec.json.decode(msgspec.json.encode(bad))["ok"] is False


def test_a_fault_that_failed_after_all_is_not_counted() -> None:
    evidence = well()
    evidence.events.append({"t": 0.0, "m": 90.0, "by": "chaos", "kind": "fault_failed", "seed": 1, "number": 1})
    failed = {"kind": "fault_failed", "slot": "rollout/0", "epoch": 2, "order": "hang_loop", "why": "no loop"}
    evidence.events.append({"t": 0.0, "m": 90.0, "by": "rollout/0#2", **failed})
    verdict = judge(evidence)
    assert (verdict.injected, verdict.failed, verdict.roles) == ({}, 2, [])
    assert verdict.faults_by_role == {"registry": {}, "rollout": {}, "trainer": {}}
    assert "2 failed" in render(verdict)
