"""The checker finds each broken guarantee in doctored records, and nothing in sound ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from chaos_world import STEPS, event, well

from relax_rt.chaos.evidence import Checkpoint, Evidence, JournaledWrite
from relax_rt.chaos.verdict import CHECKS, run_checks, violations

Doctor = Callable[[Evidence], Any]


def test_a_sound_run_has_no_violation_and_everything_was_judged() -> None:
    findings = run_checks(well())
    assert violations(findings) == []
    assert {f.check: f.not_judged for f in findings if not f.judged} == {}


def two_at_once(evidence: Evidence) -> None:
    exited = event(evidence, "slot_exited", slot="trainer/0")
    evidence.events.remove(exited)
    spawned = evidence.events.index(event(evidence, "slot_spawned", slot="trainer/0", epoch=4))
    exited["m"] = evidence.events[spawned]["m"] + 0.01
    evidence.events.insert(spawned + 1, exited)


def dead_man_writes(evidence: Evidence) -> None:
    exited = event(evidence, "slot_exited", slot="trainer/0")
    late = {"t": 0.0, "m": exited["m"] + 0.02, "by": "trainer/0#3", "kind": "published"}
    evidence.events.insert(evidence.events.index(exited) + 1, {**late, "version": 4, "parent": 3, "step": 3})


def dead_man_records(evidence: Evidence) -> None:
    exited = event(evidence, "slot_exited", slot="trainer/0")
    evidence.steps[2]["m"] = exited["m"] + 0.01


def record_of_an_earlier_session(evidence: Evidence) -> None:
    """The agent died without a word of its roles' ends; one of them goes on into the next session."""
    start = event(evidence, "run_started")
    spawned = event(evidence, "slot_spawned", slot="trainer/0", epoch=4)
    evidence.events.remove(event(evidence, "slot_exited", slot="trainer/0"))
    evidence.events.insert(evidence.events.index(spawned), {**start, "m": spawned["m"] - 0.05})
    evidence.produced[3] |= {"by": "rollout/0#2", "m": spawned["m"]}


def checkpoint_of_the_overtaken(evidence: Evidence) -> None:
    """Epoch 4 has begun at step 3; this one would have been there to begin from."""
    evidence.checkpoints.append(Checkpoint("step-000004", 4, 4, "d4", 3))


def checkpoint_of_nobody(evidence: Evidence) -> None:
    evidence.checkpoints[:] = [Checkpoint("step-000006", 6, 9, "d9", 77)]


def epoch_again(evidence: Evidence) -> None:
    for one in evidence.events:
        if one.get("slot") == "trainer/0" and one.get("epoch") == 4:
            one["epoch"] = 3


def no_diagnosis(evidence: Evidence) -> None:
    event(evidence, "slot_exited", slot="trainer/0")["diagnosis"]["cause"] = ""


def nobody_comes_back(evidence: Evidence) -> None:
    """The rollout dies in the middle of the run and the log goes on without it."""
    exited = event(evidence, "slot_exited", slot="rollout/0")
    exited["diagnosis"] |= {"kind": "exception", "cause": "broke"}
    evidence.events[:] = [e for e in evidence.events if e["kind"] not in ("run_draining", "run_ended")]
    evidence.events.append({"t": 2000.0, "m": 1000.0, "by": "agent", "kind": "tick"})
    evidence.ended = False


def exit_untold(evidence: Evidence) -> None:
    event(evidence, "slot_exited", slot="trainer/0")["diagnosis"]["signal"] = ""


def kill_of_a_stranger(evidence: Evidence) -> None:
    event(evidence, "fault_injected", name="kill")["pid"] = 99


def nobody_began(evidence: Evidence) -> None:
    evidence.events.remove(event(evidence, "fault_started"))
    evidence.events[-1]["m"] += 60.0
    for exited in [e for e in evidence.events if e["kind"] == "slot_exited" and e["slot"] == "rollout/0"]:
        exited["m"] += 60.0


def late_commit(evidence: Evidence) -> None:
    event(evidence, "version_committed", version=5)["epoch"] = 3


def late_in_queue(evidence: Evidence) -> None:
    evidence.writes.append(JournaledWrite(9, "trainer/0#3", "trained"))


def after_its_end(evidence: Evidence) -> None:
    evidence.writes += [
        JournaledWrite(9, "agent/0#5", "process_exited", "rollout/0#2"),
        JournaledWrite(10, "rollout/0#2", "put"),
    ]


def fault_of_the_supervisor(evidence: Evidence) -> None:
    evidence.events.append({"t": 0.0, "m": 99.0, "by": "agent", "kind": "supervisor_fault", "error": "impossible"})


def step_left_out(evidence: Evidence) -> None:
    evidence.steps.remove(next(s for s in evidence.steps if s["step"] == 4))


def step_skipped_in_a_life(evidence: Evidence) -> None:
    first = evidence.steps[0]
    evidence.steps.insert(1, {**first, "t": first["t"] + 0.01})


def target_missed(evidence: Evidence) -> None:
    evidence.target = STEPS + 1


def sample_again(evidence: Evidence) -> None:
    evidence.steps[-1]["keys"] = evidence.steps[-2]["keys"]
    evidence.steps[-1]["digests"] = evidence.steps[-2]["digests"]


def short_batch(evidence: Evidence) -> None:
    for column in ("keys", "digests", "versions", "staleness"):
        evidence.steps[-1][column] = evidence.steps[-1][column][:1]


def queue_disagrees(evidence: Evidence) -> None:
    event(evidence, "queue_account")["freed"] = 1


def queue_says_twice(evidence: Evidence) -> None:
    event(evidence, "queue_account")["trained_twice"] = 1


def other_content(evidence: Evidence) -> None:
    evidence.steps[-1]["digests"][0] = "of something else"


def other_versions(evidence: Evidence) -> None:
    evidence.produced[-1]["samples"][0][2][:] = [5]


def told_over_stale(evidence: Evidence) -> None:
    evidence.steps[-1]["staleness"][0] = 1


def over_stale_untold(evidence: Evidence) -> None:
    """Version 6 trained on at 8, two publications away; told as fresh."""
    evidence.steps[-1]["versions"][0] = [6]
    evidence.produced[-1]["samples"][0][2][:] = [6]


def version_of_nobody(evidence: Evidence) -> None:
    evidence.steps[-1]["versions"][0] = [77]
    evidence.produced[-1]["samples"][0][2][:] = [77]


def version_again(evidence: Evidence) -> None:
    event(evidence, "version_committed", version=5)["version"] = 4


def parent_of_nobody(evidence: Evidence) -> None:
    event(evidence, "version_committed", version=5)["parent"] = 77


def no_final_checkpoint(evidence: Evidence) -> None:
    evidence.checkpoints[:] = [Checkpoint("step-000002", 2, 3, "d3", 3)]


def checkpoint_of_other_weights(evidence: Evidence) -> None:
    evidence.checkpoints[:] = [Checkpoint("step-000006", 6, 9, "d8", 4)]


def checkpoint_told(evidence: Evidence, step: int) -> dict[str, Any]:
    """Of the first trainer, right before it is killed."""
    killed = evidence.events.index(event(evidence, "fault_injected", name="kill"))
    m = evidence.events[killed]["m"] - 0.01
    told = {"kind": "checkpoint", "by": "trainer/0#3", "m": m, "step": step, "folder": f"step-{step:06d}"}
    evidence.events.insert(killed, told)
    return told


def begun_anew(evidence: Evidence) -> None:
    """By its steps: the second trainer makes the first two again, and no word of it is left."""
    evidence.events.remove(event(evidence, "resumed"))
    place = next(n for n, s in enumerate(evidence.steps) if s["epoch"] == 4)
    evidence.steps[place:place] = [{**s, "by": "trainer/0#4", "epoch": 4} for s in evidence.steps[:2]]


def one_checkpoint_too_old(evidence: Evidence) -> None:
    checkpoint_told(evidence, 3)


def one_too_old_behind_a_refused_one(evidence: Evidence) -> None:
    checkpoint_told(evidence, 3)
    checkpoint_told(evidence, 4)
    refuse(evidence, 4)


def an_idle_life_too_old(evidence: Evidence) -> None:
    """A third trainer, which took no step: the checkpoint of step 6 was there."""
    evidence.events.append({**event(evidence, "resumed"), "m": evidence.events[-1]["m"], "by": "trainer/0#5"})


def says_other_than_it_does(evidence: Evidence) -> None:
    event(evidence, "resumed")["step"] = 4


def refuse(evidence: Evidence, step: int, kind: str = "checkpoint_quarantined") -> None:
    """By the second trainer, as it begins."""
    resumed = event(evidence, "resumed")
    said = {"kind": kind, "by": resumed["by"], "m": resumed["m"] - 0.01, "checkpoint": f"step-{step:06d}"}
    evidence.events.insert(evidence.events.index(resumed), said)


def evaluated_other_weights(evidence: Evidence) -> None:
    evidence.evaluations[-1]["version"] = 4


def failed(evidence: Evidence) -> None:
    evidence.status, evidence.target = "failed", 100


def died_without_a_word(evidence: Evidence) -> None:
    evidence.status = "agent died"


def slots_away(evidence: Evidence) -> None:
    evidence.ended, evidence.status, evidence.recovered = False, "running", False


def nobody_said_what_was_made(evidence: Evidence) -> None:
    evidence.produced.clear()


def no_keys(evidence: Evidence) -> None:
    for record in evidence.steps:
        record["keys"] = record["digests"] = record["versions"] = record["staleness"] = []
    evidence.batch = None


def no_commit_told(evidence: Evidence) -> None:
    evidence.events[:] = [e for e in evidence.events if not e["kind"].startswith("version_")]


def unknown_weights(evidence: Evidence) -> None:
    evidence.steps[-1]["trained_version"] = 77


def lengths_differ(evidence: Evidence) -> None:
    evidence.steps[-1]["versions"].pop()


def staleness_of_one_is_missing(evidence: Evidence) -> None:
    evidence.steps[-1]["staleness"].pop()


def journal_gone(evidence: Evidence) -> None:
    event(evidence, "slot_ready", slot="rollout/0")["slot"] = "queue/0"
    evidence.writes, evidence.has_journal = [], False


def journal_damaged(evidence: Evidence) -> None:
    evidence.writes, evidence.journal_error = [], "record 3 is damaged"


def something_left(evidence: Evidence) -> None:
    evidence.leftovers.append("process 13")


@pytest.mark.parametrize(
    ("doctor", "name"),
    [
        (two_at_once, "single_incarnation"),
        (dead_man_writes, "single_incarnation"),
        (dead_man_records, "single_incarnation"),
        (record_of_an_earlier_session, "single_incarnation"),
        (epoch_again, "epochs_increase"),
        (no_diagnosis, "deaths_handled"),
        (nobody_comes_back, "deaths_handled"),
        (exit_untold, "faults_observed"),
        (kill_of_a_stranger, "faults_observed"),
        (nobody_began, "faults_observed"),
        (late_commit, "fencing"),
        (late_in_queue, "fencing"),
        (after_its_end, "fencing"),
        (checkpoint_of_the_overtaken, "fencing"),
        (checkpoint_of_nobody, "fencing"),
        (fault_of_the_supervisor, "supervisor_consistent"),
        (step_left_out, "steps_once"),
        (step_skipped_in_a_life, "steps_once"),
        (target_missed, "steps_once"),
        (sample_again, "trained_once"),
        (short_batch, "trained_once"),
        (queue_disagrees, "trained_once"),
        (queue_says_twice, "trained_once"),
        (other_content, "trained_as_produced"),
        (other_versions, "trained_as_produced"),
        (told_over_stale, "staleness_bounded"),
        (over_stale_untold, "staleness_bounded"),
        (version_of_nobody, "staleness_bounded"),
        (version_again, "versions_increase"),
        (parent_of_nobody, "versions_increase"),
        (no_final_checkpoint, "checkpoint_recovery"),
        (checkpoint_of_other_weights, "checkpoint_recovery"),
        (begun_anew, "checkpoint_recovery"),
        (one_checkpoint_too_old, "checkpoint_recovery"),
        (one_too_old_behind_a_refused_one, "checkpoint_recovery"),
        (an_idle_life_too_old, "checkpoint_recovery"),
        (says_other_than_it_does, "checkpoint_recovery"),
        (evaluated_other_weights, "checkpoint_recovery"),
        (failed, "run_recovered"),
        (died_without_a_word, "run_recovered"),
        (slots_away, "run_recovered"),
        (nobody_said_what_was_made, "trained_as_produced"),
        (no_keys, "trained_once"),
        (no_commit_told, "staleness_bounded"),
        (no_commit_told, "versions_increase"),
        (unknown_weights, "staleness_bounded"),
        (lengths_differ, "staleness_bounded"),
        (lengths_differ, "trained_as_produced"),
        (staleness_of_one_is_missing, "staleness_bounded"),
        (journal_gone, "fencing"),
        (journal_damaged, "fencing"),
        (something_left, "no_leftovers"),
    ],
)
def test_each_broken_guarantee_is_found_with_evidence(doctor: Doctor, name: str) -> None:
    evidence = well()
    doctor(evidence)
    found = [v for v in violations(run_checks(evidence)) if v.check == name]
    assert found, violations(run_checks(evidence))
    assert all(violation.what for violation in found)
    if doctor not in (something_left, journal_damaged, checkpoint_of_nobody) and not found[0].what.startswith(
        "nothing judged"
    ):
        assert any(violation.events for violation in found)


def test_every_check_is_ablated() -> None:
    """The list above leaves none out."""
    marks = test_each_broken_guarantee_is_found_with_evidence.pytestmark  # type: ignore[attr-defined]
    assert {name for _, name in marks[0].args[1]} == set(CHECKS)


def untold(evidence: Evidence) -> None:
    """Killed between the rename of step 2's folder and its event: newer than all that was told."""
    evidence.events.remove(event(evidence, "checkpoint", step=2))
    checkpoint_told(evidence, 1)


def told_after_it_began(evidence: Evidence) -> None:
    """The word of one that was overtaken, or that comes late from another node."""
    told = checkpoint_told(evidence, 3)
    evidence.events.remove(told)
    evidence.events.insert(evidence.events.index(event(evidence, "resumed")), told)


def set_aside(evidence: Evidence) -> None:
    checkpoint_told(evidence, 3)
    refuse(evidence, 3)


def refused_by_one_that_was_killed_then(evidence: Evidence) -> None:
    checkpoint_told(evidence, 3)
    refuse(evidence, 3, "checkpoint_damaged")
    said = event(evidence, "checkpoint_damaged")
    evidence.events.remove(said)
    spawned = evidence.events.index(event(evidence, "slot_spawned", slot="trainer/0", epoch=4))
    evidence.events.insert(spawned, {**said, "m": 0.0, "by": "trainer/0#3"})


def moved_by_hand_as_it_was_asked_for(evidence: Evidence) -> None:
    checkpoint_told(evidence, 3)
    cause = "checkpoint step-000003 of step 3: the queue knows of no step after 2"
    event(evidence, "slot_exited", slot="trainer/0")["diagnosis"] |= {"kind": "given_up", "cause": cause}


def without_words(evidence: Evidence, epoch: int) -> None:
    """The disk was full: nothing that tells of this trainer is left."""
    evidence.events.remove(event(evidence, "slot_spawned", slot="trainer/0", epoch=epoch))
    evidence.events[:] = [e for e in evidence.events if e["by"] != f"trainer/0#{epoch}"]


def told_after_it_began_as_only_it_says(evidence: Evidence) -> None:
    evidence.events.remove(event(evidence, "slot_spawned", slot="trainer/0", epoch=4))
    told = checkpoint_told(evidence, 3)
    evidence.events.remove(told)
    evidence.events.insert(evidence.events.index(event(evidence, "resumed")) + 1, told)


@pytest.mark.parametrize(
    "doctor",
    [
        untold,
        told_after_it_began,
        set_aside,
        refused_by_one_that_was_killed_then,
        moved_by_hand_as_it_was_asked_for,
        told_after_it_began_as_only_it_says,
        lambda evidence: without_words(evidence, 3),
        lambda evidence: without_words(evidence, 4),
    ],
)
def test_a_trainer_that_rightly_begins_elsewhere_is_no_breach(doctor: Doctor) -> None:
    evidence = well()
    doctor(evidence)
    assert [v for v in violations(run_checks(evidence)) if v.check == "checkpoint_recovery"] == []


def test_a_fall_back_is_seen_by_epochs_where_no_beginning_is_reported() -> None:
    evidence = well()
    one_checkpoint_too_old(evidence)
    without_words(evidence, 4)
    (found,) = [v.what for v in violations(run_checks(evidence)) if v.check == "checkpoint_recovery"]
    assert found.startswith("trainer/0#4 resumed from step 2, although step-000003 of step 3 was complete before it")


@pytest.mark.parametrize(
    "end",
    [{"cause": "5 steps in a row were thrown away"}, {"kind": "exception", "cause": "checkpoint step-000003: EIO"}],
)
def test_an_end_after_which_the_same_checkpoint_is_due_excuses_no_fall_back(end: dict[str, str]) -> None:
    evidence = well()
    moved_by_hand_as_it_was_asked_for(evidence)
    event(evidence, "slot_exited", slot="trainer/0")["diagnosis"] |= end
    assert any(violation.check == "checkpoint_recovery" for violation in violations(run_checks(evidence)))


def test_a_commit_whose_event_died_with_the_registry_is_no_breach() -> None:
    """Killed between the commit and its event: the trainer's own word of it is left."""
    evidence = well()
    lost = event(evidence, "version_committed", version=7)
    kept = {k: lost[k] for k in ("t", "m", "version", "parent", "step", "digest")}
    evidence.events[evidence.events.index(lost)] = {**kept, "kind": "published", "by": "trainer/0#4"}
    assert violations(run_checks(evidence)) == []


def test_a_process_may_tell_the_queue_itself_that_it_goes() -> None:
    evidence = well()
    evidence.writes.append(JournaledWrite(9, "rollout/0#2", "process_exited", "rollout/0#2"))
    assert violations(run_checks(evidence)) == []


def test_who_was_overtaken_and_refused_nothing_shows_nothing() -> None:
    evidence = well()
    exited = event(evidence, "slot_exited", slot="trainer/0")
    overtaken = {"kind": "slot_overtaken", "slot": "trainer/0", "epoch": 3, "by_epoch": 4, "m": exited["m"] - 0.01}
    evidence.events.append({"t": 0.0, "by": "chaos", **overtaken})

    def not_shown() -> list[str]:
        return next(f.unconfirmed for f in run_checks(evidence) if f.check == "fencing")

    assert "no write of trainer/0#3 was refused" in not_shown()[0] and violations(run_checks(evidence)) == []
    exited["diagnosis"]["trace"] = "StaleEpoch: call of trainer/0#3"
    assert not_shown() == []


def test_epochs_of_several_slots_may_be_reported_in_any_order() -> None:
    evidence = well()
    rollout, trainer = (event(evidence, "epoch_issued", slot=slot) for slot in ("rollout/0", "trainer/0"))
    a, b = evidence.events.index(rollout), evidence.events.index(trainer)
    evidence.events[a], evidence.events[b] = trainer, rollout
    assert violations(run_checks(evidence)) == []


def test_three_of_a_hundred_steps_without_records_is_no_pass() -> None:
    evidence = well()
    evidence.status, evidence.target, evidence.steps = "failed", 100, evidence.steps[:3]
    evidence.produced, evidence.writes, evidence.has_journal = [], [], False
    found = {violation.check for violation in violations(run_checks(evidence))}
    assert found >= {"run_recovered", "trained_as_produced"}


def test_what_judged_nothing_says_so() -> None:
    evidence = well()
    evidence.events[:] = [e for e in evidence.events if e["kind"] != "fault_injected"]
    (kills,) = [f for f in run_checks(evidence) if f.check == "faults_observed"]
    assert (kills.judged, kills.not_judged, kills.violations) == (0, "nothing judged", [])
    assert {b.check for b in violations(run_checks(Evidence(events=[], ended=True, status="finished")))} == {
        "single_incarnation",
        "supervisor_consistent",
    }


def test_samples_of_a_dropped_segment_are_not_counted_as_judged() -> None:
    evidence = well()
    (whole,) = [f for f in run_checks(evidence) if f.check == "staleness_bounded"]
    no_commit_told(evidence)
    evidence.complete = False
    (cut,) = [f for f in run_checks(evidence) if f.check == "staleness_bounded"]
    assert (whole.judged, cut.judged, cut.violations) == (14, 0, [])


def test_a_run_stopped_by_hand_is_not_asked_for_its_target() -> None:
    evidence = well()
    evidence.status, evidence.target = "stopped", 100
    (end,) = [f for f in run_checks(evidence) if f.check == "run_recovered"]
    assert (end.not_judged, end.violations) == ("it was stopped at step 6", [])


def test_a_run_that_continues_is_not_asked_for_its_end() -> None:
    evidence = well()
    evidence.ended, evidence.status, evidence.target = False, "running", 100
    assert violations(run_checks(evidence)) == []


def test_the_death_of_an_agent_ends_the_lives_of_its_session() -> None:
    evidence = well()
    cut = evidence.events.index(event(evidence, "slot_spawned", slot="trainer/0", epoch=4)) + 2
    evidence.events.insert(cut, {"t": 0.0, "m": 50.0, "by": "keeper", "kind": "agent_died", "cause": "SIGKILL"})
    evidence.events.insert(cut + 1, {"t": 0.0, "m": 51.0, "by": "agent", "kind": "run_started", "slots": []})
    found = {b.check for b in violations(run_checks(evidence))}
    assert "single_incarnation" not in found and "deaths_handled" not in found


def test_a_job_without_training_is_judged_by_its_processes() -> None:
    evidence = well()
    evidence.steps, evidence.produced, evidence.checkpoints, evidence.evaluations = [], [], [], []
    evidence.target = evidence.batch = evidence.max_staleness = None
    evidence.events[:] = [e for e in evidence.events if e["kind"] != "queue_account"]
    assert violations(run_checks(evidence)) == []
    assert {f.check for f in run_checks(evidence) if f.not_judged} >= {"steps_once", "staleness_bounded"}
