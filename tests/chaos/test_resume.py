"""A run that is killed and resumed, in short (the long form is tools/soak/resume.py), and what its account finds."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "soak"))

import resume
from resume_account import SABOTAGES, Account, Job, account, final_path

from relax_rt.chaos.evidence import Checkpoint, Evidence

STEPS = 60
JOB = Job(steps=STEPS, prompts_per_step=2, group_size=2, max_staleness=1)
UNDONE = 7
"""Steps from 30 on that a death of the trainer undid."""


@pytest.mark.chaos
@pytest.mark.long
def test_each_prompt_counts_once_whoever_is_killed(tmp_path: Path) -> None:
    kept = ["--keep", str(tmp_path), "--alone", "--seeds", "1", "--kills", "3", "--steps", "90", "--items", "64"]
    assert resume.main(kept) == 0
    result = resume.judge(resume.folder_of(tmp_path, 1))
    assert result["kills"] == dict.fromkeys(resume.KINDS, 1) and result["ups"] == 2
    assert result["prompts_trained"] == 90 * 8 and result["trainer_lives"] >= 2
    for name in SABOTAGES:
        assert resume.main(["--judge", str(tmp_path), "--sabotage", name]) == 1, name


# --- the account: a small run in which all is well, and then one thing is not


def step_of(number: int, epoch: int, groups: list[int]) -> dict[str, Any]:
    """A step on groups that were made for the prompts ten below them."""
    keys = [f"{group}.{member}" for group in groups for member in range(2)]
    prompts = sorted(group - 10 for group in groups)
    return {"step": number, "epoch": epoch, "keys": keys, "prompts": prompts, "version": 1000 * epoch + number}


def checkpoint_told(step: int, epoch: int) -> dict[str, Any]:
    return {"kind": "checkpoint", "by": f"trainer/0#{epoch}", "step": step, "folder": f"step-{step}"}


def evidence() -> Evidence:
    """60 steps on two prompts each; steps 31 to 37 were taken twice, by a second trainer; one prompt is pending."""
    groups = {step: [2 * step + 8, 2 * step + 9] for step in range(1, STEPS + 1)}
    steps = [step_of(step, 1, groups[step]) for step in range(1, 31 + UNDONE)]
    steps += [step_of(step, 2, groups[step]) for step in range(31, STEPS + 1)]
    made = [{"prompts": {str(group): group - 10 for group in pair}} for pair in groups.values()]
    made.append({"prompts": {"130": 120}})
    told = {"freed": 240, "trained": 0, "trained_twice": 0, "prompts_trained_twice": 0, "prompts_retired": 0}
    told |= {"prompts_first_issued": 122, "prompts_waiting": 1, "reserved": 1, "waiting": 0, "ready": 1, "leased": 0}
    return Evidence(
        events=[
            checkpoint_told(20, 1),
            checkpoint_told(30, 1),
            {"kind": "slot_spawned", "slot": "trainer/0", "epoch": 2},
            {"kind": "resumed", "by": "trainer/0#2", "checkpoint": "step-30", "step": 30},
            {"kind": "queue_account", **told},
        ],
        steps=steps,
        produced=made,
        checkpoints=[Checkpoint("step-30", 30, 1030, "", 1), Checkpoint("step-60", 60, 2060, "", 2)],
    )


def wrong_with(change: Callable[[Evidence], object]) -> str:
    changed = evidence()
    change(changed)
    return "; ".join(account(changed, JOB).wrong)


def test_a_sound_run_has_a_whole_account() -> None:
    found = account(evidence(), JOB)
    assert found == Account(
        issued=121,
        trained={prompt: prompt // 2 + 1 for prompt in range(120)},
        pending=[120],
        steps=STEPS,
        redone=UNDONE,
        falls=1,
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("double", "prompt 0 was trained in step 1 and again in step 31"),
        ("fall-back", "trainer/0#2 resumed from step 30, although step-000031 of step 31 was complete before it"),
        ("leave-out", "prompt 58 was left out"),
        ("lose-step", "took step 31 where step 30 was due"),
        ("miscount", "samples trained: 240 by the records, 232 by the queue"),
        ("swap", "its groups were made for"),
    ],
)
def test_planted_breaches_are_found(name: str, reason: str) -> None:
    assert reason in wrong_with(SABOTAGES[name])


def lose_life(e: Evidence) -> None:
    e.steps = [record for record in e.steps if record["epoch"] == 2]


def end_early(e: Evidence) -> None:
    e.steps.pop()


def split_group(e: Evidence) -> None:
    e.steps[0]["keys"].pop()


def make_nothing(e: Evidence) -> None:
    e.produced.pop(0)


def make_for_two(e: Evidence) -> None:
    e.produced.append({"prompts": {"10": 7}})


def fall_to(step: int, *, told: bool = True) -> Callable[[Evidence], None]:
    """The second trainer goes on from there; what it does again has the same groups: the path is whole."""

    def change(e: Evidence) -> None:
        again = [{**record, "epoch": 2, "version": 2000 + record["step"]} for record in e.steps if record["epoch"] == 1]
        place = next(n for n, record in enumerate(e.steps) if record["epoch"] == 2)
        e.steps[place:place] = [record for record in again if step < record["step"] <= 30]
        e.checkpoints[0] = Checkpoint("step-30", 30, 2030, "", 2)
        e.events[3]["step"] = step
        if not told:
            e.events.pop(3)

    return change


def drop(prompt: int) -> Callable[[Evidence], None]:
    def change(e: Evidence) -> None:
        e.events.insert(0, {"kind": "group_ended", "prompt": prompt, "prompt_fate": "retire", "state": "quarantined"})

    return change


def tell(**fields: int) -> Callable[[Evidence], None]:
    return lambda e: e.events[-1].update(fields)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lose_life, "trainer 2 begins with step 31, and the path before it has 0 steps"),
        (fall_to(0), "trainer/0#2 resumed from step 0, although step-30 of step 30 was complete before it"),
        (fall_to(0, told=False), "trainer/0#2 resumed from step 0, although step-30 of step 30"),
        (fall_to(20), "trainer/0#2 resumed from step 20, although step-30 of step 30"),
        (lambda e: e.events[3].update(step=20), "reported to resume from step 20, but its first step is 31"),
        (end_early, "the path has 59 steps of 60; it lacks \\[60\\]"),
        (split_group, "step 1 has 2 groups of \\[1, 2\\] samples"),
        (make_nothing, "step 1 was trained on groups \\[10, 11\\], which no rollout has made"),
        (make_for_two, "group 10 was made for prompt 0 and for prompt 7"),
        (drop(5), "prompt 5 was dropped \\(quarantined\\) and trained in step 3"),
        (drop(120), "prompts dropped: 1 by the records, 0 by the queue"),
        (lambda e: e.produced.append({"prompts": {"200": 130}}), "11 prompts are pending, and 4 may be under way"),
        (tell(prompts_first_issued=100), "100 prompts were issued by the queue, 121 by the records"),
        (tell(prompts_waiting=2), "prompts pending: 1 by the records and 1 unseen, 3 by the queue"),
        (tell(trained_twice=2), "samples trained twice: 0 by the records, 2 by the queue"),
        (lambda e: e.events.clear(), "the queue has left no account"),
        (lambda e: e.checkpoints.pop(), "there is no checkpoint of step 60"),
        (
            lambda e: e.checkpoints.append(Checkpoint("step-35", 35, 1035, "", 1)),
            "checkpoint step-35 has version 1035, step 35 of the path has 2035",
        ),
    ],
)
def test_whatever_does_not_fit_is_told(change: Callable[[Evidence], object], reason: str) -> None:

    assert re.search(reason, wrong_with(change)), wrong_with(change)


def test_a_whole_path_shows_no_fall_back_that_was_too_deep() -> None:
    """Nothing else is wrong with it: that is why it is looked for."""
    changed = evidence()
    fall_to(0)(changed)
    (only,) = account(changed, JOB).wrong
    assert "although step-30" in only


def test_what_a_later_life_took_again_is_off_the_path() -> None:
    path, wrong = final_path(evidence().steps)
    assert wrong == [] and [path[step]["epoch"] for step in (30, 31, 37, 60)] == [1, 2, 2, 2]


def test_instants_are_those_of_the_seed() -> None:
    plan = resume.instants(3, 20, 300)
    assert plan == resume.instants(3, 20, 300) != resume.instants(4, 20, 300)
    assert {kind: sum(one.victim == kind for one in plan) for kind in resume.KINDS} == {
        "trainer/0": 7,
        "queue/0": 7,
        "agent": 6,
    }
    assert plan[0].step > 0 and all(one.step < 270 for one in plan)


# --- what the seeds show together


def judged(killed: float, quiet: float, half: float, *, items: int = 1000, ok: bool = True) -> dict[str, Any]:
    """What `judge` says of a seed with these accuracies."""
    shares = {resume.KILLED: killed, resume.UNDISTURBED: quiet, resume.HALF: half}
    return {"ok": ok, "scores": {name: {"right": round(s * items), "items": items} for name, s in shares.items()}}


def test_three_seeds_that_end_alike_and_a_control_that_does_not_show_equivalence() -> None:
    seeds = {1: judged(0.71, 0.70, 0.5), 2: judged(0.69, 0.71, 0.52), 3: judged(0.72, 0.71, 0.49)}
    spans, verdict = resume.compare(seeds)
    killed, half = spans[resume.KILLED], spans[resume.HALF]
    assert killed is not None and killed.inside and half is not None and half.apart
    assert verdict.verdict == "equivalent" and not verdict.reasons


@pytest.mark.parametrize(
    ("seeds", "reason"),
    [
        ([judged(0.7, 0.7, 0.5)] * 2, "2 seeds, at least 3"),
        ([judged(0.7, 0.7, 0.5, items=100)] * 3, "100 items, at least 500"),
        ([judged(0.6, 0.7, 0.5)] * 3, "is not inside"),
        ([judged(0.7, 0.7, 0.69)] * 3, "is not told apart"),
        ([judged(0.7, 0.7, 0.5), judged(0.7, 0.7, 0.5), judged(0.7, 0.7, 0.5, ok=False)], "seed 3: the account"),
    ],
)
def test_less_than_that_is_not_shown(seeds: list[dict[str, Any]], reason: str) -> None:
    _, verdict = resume.compare(dict(enumerate(seeds, 1)))
    assert verdict.verdict == "not shown" and any(reason in one for one in verdict.reasons)
