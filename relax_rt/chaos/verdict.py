"""The verdict on a run under faults: every check on the evidence, and what it adds up to. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from relax_rt.chaos import process_checks as processes
from relax_rt.chaos import training_checks as training
from relax_rt.chaos.evidence import MAX_SHOWN, Breach, Evidence, Finding
from relax_rt.chaos.timeline import Ettr, Recovery, carried_out, ettr, over, recoveries

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
    """Run every check on the records of a run; a check that has nothing to judge says why."""
    return [_finding(name, *how, evidence) for name, how in CHECKS.items()]


def breaches(findings: list[Finding]) -> list[Breach]:
    """All breaches of these findings."""
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
    """A check that saw nothing where there had to be something is not passed: the records are missing."""
    if name in MUST_SEE_OF_TRAINING and evidence.trains and evidence.steps:
        return evidence.complete or name not in ("staleness_held", "versions_grow")
    return name in MUST_SEE and evidence.complete


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
        recovered: of a living run: every slot has come back; None: it has ended, or this was not checked.
        left: strikes that were never due, because the run ended before.
        injected: faults by name, without the `failed` ones that were not carried out.
        struck: by kind of role, how often each fault; kinds that were never struck are included.
    """

    ok: bool
    status: str
    ended: bool
    recovered: bool | None
    left: int
    injected: dict[str, int]
    struck: dict[str, dict[str, int]]
    withheld: int
    failed: int
    roles: list[RoleFigures]
    ettr: Ettr
    findings: list[Finding]

    @property
    def shown(self) -> bool:
        """No guarantee was broken, and every fault was injected and shown."""
        return self.ok and not self.left


def judge(evidence: Evidence, baseline: Sequence[dict[str, Any]] | None = None, *, left: int = 0) -> Verdict:
    """The verdict on the records of a run.

    Args:
        baseline: step records of an undisturbed run of the same config.
        left: strikes that were never due.
    """
    findings = check(evidence)
    came_back = recoveries(evidence.events)
    kinds = Counter(str(e.get("kind")) for e in evidence.events)
    injected = Counter(str(e.get("name")) for _, e in carried_out(evidence.events))
    return Verdict(
        ok=not breaches(findings),
        status=evidence.status,
        ended=evidence.ended,
        recovered=None if evidence.ended else evidence.recovered,
        left=left,
        struck=struck(evidence),
        injected=dict(sorted(injected.items())),
        withheld=kinds["fault_withheld"],
        failed=kinds["fault_injected"] - sum(injected.values()),
        roles=role_figures(came_back),
        ettr=ettr(evidence.steps, baseline, disturbances(evidence, came_back)),
        findings=findings,
    )


def struck(evidence: Evidence) -> dict[str, dict[str, int]]:
    """How often each fault struck each kind of role of the run."""
    roles = {str(e.get("slot")).partition("/")[0] for e in evidence.events if e.get("kind") == "slot_spawned"}
    found: dict[str, Counter[str]] = {role: Counter() for role in sorted(roles)}
    for _, event in carried_out(evidence.events):
        if event.get("slot"):
            role = str(event["slot"]).partition("/")[0]
            found.setdefault(role, Counter())[str(event.get("name"))] += 1
    return {role: dict(sorted(counts.items())) for role, counts in found.items()}


def role_figures(came_back: Sequence[Recovery]) -> list[RoleFigures]:
    """Figures of each kind of role, sorted by name."""
    by_role: dict[str, list[Recovery]] = {}
    for one in came_back:
        by_role.setdefault(one.role, []).append(one)
    return [
        RoleFigures(
            role=role,
            faults=len(of_role),
            exited=over([r.exited_s for r in of_role if r.exited_s is not None]),
            ready=over([r.ready_s for r in of_role if r.ready_s is not None]),
            worked=over([r.worked_s for r in of_role if r.worked_s is not None]),
            wait=over([r.wait_s for r in of_role if r.exited_s is not None]),
            lost=sum(r.ready_s is None for r in of_role),
        )
        for role, of_role in sorted(by_role.items())
    ]


def disturbances(evidence: Evidence, came_back: Sequence[Recovery]) -> list[tuple[float, float]]:
    """Begin and end of each fault on the monotonic clock, recovery included."""
    back = {(r.number, r.at): max(r.ready_s or 0.0, r.worked_s or 0.0) for r in came_back}
    found = []
    for _, event in carried_out(evidence.events):
        lasted = max(float(event.get("seconds", 0.0)), back.get((event.get("number", 0), event["m"]), 0.0))
        found.append((float(event["m"]), float(event["m"]) + lasted))
    return found


def render(verdict: Verdict) -> str:
    """The verdict as text."""
    lines = [_harm(verdict), *_struck(verdict), *_recovery_table(verdict.roles), _ettr(verdict.ettr), ""]
    for finding in verdict.findings:
        state = f"{len(finding.breaches)} BROKEN" if finding.breaches else "ok" if not finding.why_not else "-"
        about = finding.why_not or f"{finding.looked_at} {finding.of}"
        lines.append(f"{state:>9}  {finding.check:22} {about:22} {finding.promise}")
        lines += [f"{'':11}not shown: {what}" for what in finding.not_shown[:MAX_SHOWN]]
        for breach in finding.breaches[:MAX_SHOWN]:
            lines.append(f"{'':11}{breach.what}")
            lines += [f"{'':13}{event}" for event in breach.events]
        if len(finding.breaches) > MAX_SHOWN:
            lines.append(f"{'':11}and {len(finding.breaches) - MAX_SHOWN} more")
    return "\n".join([*lines, "", _sentence(verdict)])


def _sentence(verdict: Verdict) -> str:
    if not verdict.ok:
        return "verdict: promises were BROKEN"
    if verdict.left:
        return f"verdict: no promise was broken, but {verdict.left} strikes never fell: the run ended before"
    return "verdict: every promise was kept"


def _state(verdict: Verdict) -> str:
    if verdict.ended:
        return f"has ended: {verdict.status}"
    return "goes on" + {True: ", every slot is back", False: ", NOT every slot is back", None: ""}[verdict.recovered]


def _harm(verdict: Verdict) -> str:
    told = ", ".join(f"{n} x {name}" for name, n in verdict.injected.items()) or "none"
    withheld = f"; {verdict.withheld} withheld" if verdict.withheld else ""
    withheld += f"; {verdict.failed} failed" if verdict.failed else ""
    return f"faults: {told}{withheld}; the run {_state(verdict)}"


def _struck(verdict: Verdict) -> list[str]:
    if not verdict.injected:
        return []
    told = [f"{role} {sum(counts.values())} ({counts.get('kill', 0)} kills)" for role, counts in verdict.struck.items()]
    return [f"struck: {', '.join(told)}"]


def _recovery_table(roles: Sequence[RoleFigures]) -> list[str]:
    if not roles:
        return []
    lines = [f"{'role':14}{'ends':>6}{'exit seen, ms':>20}{'ready, s':>20}{'first work, s':>20}{'not back':>10}"]
    for one in roles:
        cells = f"{_cell(one.exited, 1000)}{_cell(one.ready)}{_cell(one.worked)}"
        lines.append(f"{one.role:14}{one.faults:>6}{cells}{one.lost or '':>10}")
    return lines


def _cell(figures: Figures, scale: float = 1.0) -> str:
    if not figures["n"]:
        return f"{'-':>20}"
    name = "p99" if "p99" in figures else "max"
    return f"{figures['p50'] * scale:>9.2f} {name} {figures[name] * scale:>6.2f}"


def _ettr(found: Ettr) -> str:
    if found.value is None:
        return f"ETTR: cannot be told: {found.why}"
    kind = "measured" if found.measured else "ESTIMATE from this run's undisturbed steps"
    return (
        f"ETTR: {found.value:.1%} ({kind}): steps {found.first} to {found.last} in {found.disturbed_s:.1f} s, "
        f"undisturbed {found.undisturbed_s:.1f} s"
    )
