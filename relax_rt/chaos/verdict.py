"""The verdict on a run under faults: every check on the evidence, and what it adds up to. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from relax_rt.chaos import checks
from relax_rt.chaos.evidence import MAX_SHOWN, CheckResult, Evidence, Violation
from relax_rt.chaos.timeline import Ettr, Recovery, ettr, find_recoveries, injected_faults, percentiles

Check = Callable[[Evidence], Iterator[int | Violation | str]]

CHECKS: dict[str, tuple[Check, str]] = {
    "single_incarnation": (checks.single_incarnation, "processes"),
    "epochs_increase": (checks.epochs_increase, "epochs"),
    "deaths_handled": (checks.deaths_handled, "deaths"),
    "faults_observed": (checks.faults_observed, "faults"),
    "fencing": (checks.fencing, "accepted writes"),
    "supervisor_consistent": (checks.supervisor_consistent, "sessions"),
    "steps_once": (checks.steps_once, "steps"),
    "trained_once": (checks.trained_once, "samples"),
    "trained_as_produced": (checks.trained_as_produced, "samples"),
    "staleness_bounded": (checks.staleness_bounded, "samples"),
    "versions_increase": (checks.versions_increase, "versions"),
    "checkpoint_recovery": (checks.checkpoint_recovery, "checkpoints"),
    "run_recovered": (checks.run_recovered, "run"),
    "no_leftovers": (checks.no_leftovers, "run"),
}
TRAINING_CHECKS = {"steps_once", "trained_once", "trained_as_produced", "staleness_bounded", "checkpoint_recovery"}
REQUIRED = {"single_incarnation", "supervisor_consistent"}
REQUIRED_TRAINING_CHECKS = {
    "steps_once",
    "trained_once",
    "trained_as_produced",
    "staleness_bounded",
    "versions_increase",
}


def run_checks(evidence: Evidence) -> list[CheckResult]:
    """Run every check on the records of a run."""
    return [_run_check(name, *check, evidence) for name, check in CHECKS.items()]


def violations(results: list[CheckResult]) -> list[Violation]:
    """All violations in these results."""
    return [violation for result in results for violation in result.violations]


def _run_check(name: str, check: Check, unit: str, evidence: Evidence) -> CheckResult:
    guarantee = (check.__doc__ or "").strip().splitlines()[0]
    if reason := _not_applicable(name, evidence):
        return CheckResult(check=name, guarantee=guarantee, judged=0, unit=unit, not_judged=reason)
    judged, found, unconfirmed = 0, list[Violation](), list[str]()
    for one in check(evidence):
        if isinstance(one, Violation):
            found.append(one)
        elif isinstance(one, str):
            unconfirmed.append(one)
        else:
            judged += one
    reason = "" if judged or found else "nothing judged"
    if reason and _is_required(name, evidence):
        found.append(Violation(name, f"nothing judged: the run has recorded no {unit} that this check could judge"))
    return CheckResult(
        check=name,
        guarantee=guarantee,
        judged=judged,
        unit=unit,
        violations=found,
        not_judged=reason,
        unconfirmed=unconfirmed,
    )


def _not_applicable(name: str, evidence: Evidence) -> str:
    """Why a check does not apply; empty: it does."""
    if name in TRAINING_CHECKS and not evidence.steps:
        return "no training step is recorded"
    if name == "staleness_bounded" and evidence.max_staleness is None:
        return "the job has no staleness bound"
    if name == "no_leftovers" and not evidence.ended:
        return "the run is live"
    if name == "run_recovered" and evidence.ended and evidence.status == "stopped":
        return f"it was stopped at step {evidence.last_step}" if evidence.trains else "it was stopped"
    if name == "run_recovered" and not evidence.ended and evidence.recovered is None:
        return "not checked"
    return ""


def _is_required(name: str, evidence: Evidence) -> bool:
    """Whether a check that judged nothing fails, because the records that it needs are missing."""
    if name in REQUIRED_TRAINING_CHECKS and evidence.trains and evidence.steps:
        return evidence.complete or name not in ("staleness_bounded", "versions_increase")
    return name in REQUIRED and evidence.complete


Figures = dict[str, float | int]


class RoleFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Recovery times of one kind of role, in seconds from each fault that ended its process.

    Attributes:
        exited: until the exit was seen. ready: until a replacement was ready, back-off included; wait: the back-off
            alone. worked: until its first new work.
        lost: faults after which no replacement was ready within the log.
    """

    role: str
    faults: int
    exited: Figures
    ready: Figures
    worked: Figures
    wait: Figures
    lost: int


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on a run.

    Attributes:
        ok: no guarantee was broken.
        recovered: of a live run: every slot is ready or has ended; None: the run has ended, or this was not checked.
        not_injected: scheduled faults that were never due, because the run ended before.
        injected: faults by name, without the `failed` ones.
        faults_by_role: number of faults by kind of role and name; kinds of role without faults are included.
    """

    ok: bool
    status: str
    ended: bool
    recovered: bool | None
    not_injected: int
    injected: dict[str, int]
    faults_by_role: dict[str, dict[str, int]]
    skipped: int
    failed: int
    roles: list[RoleFigures]
    ettr: Ettr
    results: list[CheckResult]

    @property
    def passed(self) -> bool:
        """No guarantee was broken, and every scheduled fault was due."""
        return self.ok and not self.not_injected


def judge(evidence: Evidence, baseline: Sequence[dict[str, Any]] | None = None, *, not_injected: int = 0) -> Verdict:
    """The verdict on the records of a run.

    Args:
        baseline: step records of an undisturbed run of the same config.
        not_injected: scheduled faults that were never due.
    """
    results = run_checks(evidence)
    recovered = find_recoveries(evidence.events)
    kinds = Counter(str(e.get("kind")) for e in evidence.events)
    injected = Counter(str(e.get("name")) for _, e in injected_faults(evidence.events))
    return Verdict(
        ok=not violations(results),
        status=evidence.status,
        ended=evidence.ended,
        recovered=None if evidence.ended else evidence.recovered,
        not_injected=not_injected,
        faults_by_role=count_by_role(evidence),
        injected=dict(sorted(injected.items())),
        skipped=kinds["fault_skipped"],
        failed=kinds["fault_injected"] - sum(injected.values()),
        roles=role_figures(recovered),
        ettr=ettr(evidence.steps, baseline, disturbances(evidence, recovered)),
        results=results,
    )


def count_by_role(evidence: Evidence) -> dict[str, dict[str, int]]:
    """Number of faults by kind of role and name of the fault."""
    roles = {str(e.get("slot")).partition("/")[0] for e in evidence.events if e.get("kind") == "slot_spawned"}
    found: dict[str, Counter[str]] = {role: Counter() for role in sorted(roles)}
    for _, event in injected_faults(evidence.events):
        if event.get("slot"):
            role = str(event["slot"]).partition("/")[0]
            found.setdefault(role, Counter())[str(event.get("name"))] += 1
    return {role: dict(sorted(counts.items())) for role, counts in found.items()}


def role_figures(recovered: Sequence[Recovery]) -> list[RoleFigures]:
    """Figures of each kind of role, sorted by name."""
    by_role: dict[str, list[Recovery]] = {}
    for one in recovered:
        by_role.setdefault(one.role, []).append(one)
    return [
        RoleFigures(
            role=role,
            faults=len(of_role),
            exited=percentiles([r.exited_s for r in of_role if r.exited_s is not None]),
            ready=percentiles([r.ready_s for r in of_role if r.ready_s is not None]),
            worked=percentiles([r.worked_s for r in of_role if r.worked_s is not None]),
            wait=percentiles([r.wait_s for r in of_role if r.exited_s is not None]),
            lost=sum(r.ready_s is None for r in of_role),
        )
        for role, of_role in sorted(by_role.items())
    ]


def disturbances(evidence: Evidence, recovered: Sequence[Recovery]) -> list[tuple[float, float]]:
    """Begin and end of each fault on the monotonic clock, recovery included."""
    back = {(r.number, r.at): max(r.ready_s or 0.0, r.worked_s or 0.0) for r in recovered}
    found = []
    for _, event in injected_faults(evidence.events):
        lasted = max(float(event.get("seconds", 0.0)), back.get((event.get("number", 0), event["m"]), 0.0))
        found.append((float(event["m"]), float(event["m"]) + lasted))
    return found


def render(verdict: Verdict) -> str:
    """The verdict as text."""
    faults = ", ".join(f"{n} x {name}" for name, n in verdict.injected.items()) or "none"
    faults += f"; {verdict.skipped} skipped" if verdict.skipped else ""
    faults += f"; {verdict.failed} failed" if verdict.failed else ""
    if verdict.ended:
        state = f"has ended: {verdict.status}"
    else:
        state = (
            "is live"
            + {True: ", every slot has recovered", False: ", NOT every slot has recovered", None: ""}[verdict.recovered]
        )
    lines = [f"faults: {faults}; the run {state}"]
    if verdict.injected:
        roles = [
            f"{role} {sum(counts.values())} ({counts.get('kill', 0)} kills)"
            for role, counts in verdict.faults_by_role.items()
        ]
        lines.append(f"faults by role: {', '.join(roles)}")
    lines += [*_recovery_table(verdict.roles), _ettr(verdict.ettr), ""]
    for result in verdict.results:
        failed = len(result.violations)
        state = f"{failed} VIOLATED" if failed else "-" if result.not_judged else "ok"
        about = result.not_judged or f"{result.judged} {result.unit}"
        lines.append(f"{state:>11}  {result.check:22} {about:22} {result.guarantee}")
        lines += [f"{'':13}unconfirmed: {what}" for what in result.unconfirmed[:MAX_SHOWN]]
        for violation in result.violations[:MAX_SHOWN]:
            lines.append(f"{'':13}{violation.what}")
            lines += [f"{'':15}{event}" for event in violation.events]
        if failed > MAX_SHOWN:
            lines.append(f"{'':13}and {failed - MAX_SHOWN} more")
    if not verdict.ok:
        sentence = "guarantees were VIOLATED"
    elif verdict.not_injected:
        sentence = f"no guarantee was violated, but the run ended before {verdict.not_injected} faults were due"
    else:
        sentence = "every guarantee was kept"
    return "\n".join([*lines, "", f"verdict: {sentence}"])


def _recovery_table(roles: Sequence[RoleFigures]) -> list[str]:
    if not roles:
        return []
    lines = [f"{'role':14}{'faults':>8}{'exit seen, ms':>20}{'ready, s':>20}{'first work, s':>20}{'not back':>10}"]
    for one in roles:
        cells = f"{_cell(one.exited, 1000)}{_cell(one.ready)}{_cell(one.worked)}"
        lines.append(f"{one.role:14}{one.faults:>8}{cells}{one.lost or '':>10}")
    return lines


def _cell(figures: Figures, scale: float = 1.0) -> str:
    if not figures["n"]:
        return f"{'-':>20}"
    name = "p99" if "p99" in figures else "max"
    return f"{figures['p50'] * scale:>9.2f} {name} {figures[name] * scale:>6.2f}"


def _ettr(found: Ettr) -> str:
    if found.value is None:
        return f"ETTR: unknown: {found.why}"
    kind = "measured" if found.measured else "ESTIMATE from this run's undisturbed steps"
    return (
        f"ETTR: {found.value:.1%} ({kind}): steps {found.first} to {found.last} in {found.disturbed_s:.1f} s, "
        f"undisturbed {found.undisturbed_s:.1f} s"
    )
