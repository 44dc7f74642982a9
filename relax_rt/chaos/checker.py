"""The invariant checker: every promise that a run under faults must keep, held against independent records; no I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from relax_rt.chaos import process_checks as processes
from relax_rt.chaos import training_checks as training
from relax_rt.chaos.findings import Breach, Evidence, Finding

Check = Callable[[Evidence], Iterator[int | Breach | str]]

CHECKS: dict[str, tuple[Check, str]] = {
    "one_incarnation": (processes.one_incarnation, "processes"),
    "epochs_grow": (processes.epochs_grow, "epochs"),
    "deaths_answered": (processes.deaths_answered, "deaths"),
    "faults_seen": (processes.faults_seen, "faults"),
    "late_writes": (processes.late_writes, "accepted writes"),
    "supervisor_sound": (processes.supervisor_sound, "sessions"),
    "steps_once": (training.steps_once, "steps"),
    "trained_once": (training.trained_once, "samples"),
    "trained_what_was_made": (training.trained_what_was_made, "samples"),
    "staleness_held": (training.staleness_held, "samples"),
    "versions_grow": (training.versions_grow, "versions"),
    "checkpoint_stands": (training.checkpoint_stands, "checkpoints"),
    "run_recovered": (processes.run_recovered, "run"),
    "nothing_left": (processes.nothing_left, "run"),
}
OF_TRAINING = {"steps_once", "trained_once", "trained_what_was_made", "staleness_held", "checkpoint_stands"}
MUST_SEE = {"one_incarnation", "supervisor_sound"}
MUST_SEE_OF_TRAINING = {"steps_once", "trained_once", "trained_what_was_made", "staleness_held", "versions_grow"}


def check(evidence: Evidence) -> list[Finding]:
    """Every check on what is known of a run; a check that has nothing to judge says why."""
    return [_finding(name, *how, evidence) for name, how in CHECKS.items()]


def breaches(findings: list[Finding]) -> list[Breach]:
    """All that is wrong."""
    return [breach for finding in findings for breach in finding.breaches]


def _finding(name: str, judge: Check, of: str, evidence: Evidence) -> Finding:
    promise = (judge.__doc__ or "").strip().splitlines()[0]
    if why_not := _not_to_judge(name, evidence):
        return Finding(check=name, promise=promise, looked_at=0, of=of, why_not=why_not)
    looked_at, found, not_shown = 0, list[Breach](), list[str]()
    for one in judge(evidence):
        if isinstance(one, Breach):
            found.append(one)
        elif isinstance(one, str):
            not_shown.append(one)
        else:
            looked_at += one
    why_not = "" if looked_at or found else "nothing judged"
    if why_not and _must_see(name, evidence):
        found.append(Breach(name, f"nothing judged: the run has recorded no {of} that this check could look at"))
    return Finding(
        check=name,
        promise=promise,
        looked_at=looked_at,
        of=of,
        breaches=found,
        why_not=why_not,
        not_shown=not_shown,
    )


def _not_to_judge(name: str, evidence: Evidence) -> str:
    """Why a check does not apply; empty: it does."""
    if name in OF_TRAINING and not evidence.steps:
        return "no training step is recorded"
    if name == "staleness_held" and evidence.max_staleness is None:
        return "the job has no bound"
    if name == "nothing_left" and not evidence.ended:
        return "the run goes on"
    if name == "run_recovered" and evidence.ended and evidence.status == "stopped":
        return f"it was stopped at step {evidence.last_step}" if evidence.trains else "it was stopped"
    if name == "run_recovered" and not evidence.ended and evidence.recovered is None:
        return "nobody looked"
    return ""


def _must_see(name: str, evidence: Evidence) -> bool:
    """A check that saw nothing where there had to be something has not been passed: the records are gone."""
    if name in MUST_SEE_OF_TRAINING and evidence.trains and evidence.steps:
        return evidence.complete or name not in ("staleness_held", "versions_grow")
    return name in MUST_SEE and evidence.complete
