"""Result of a run that has ended: end time, steps done, last evaluation and files."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from relax_rt.cli.runs import resolved_config
from relax_rt.cli.time_left import records
from relax_rt.config.job import load_job
from relax_rt.observe.headline import Headline
from relax_rt.observe.metrics import METRICS
from relax_rt.observe.text import duration
from relax_rt.supervision.rundir import read_run
from relax_rt.transport.rpc.errors import RelaxError

FILES = ("summary.json", "metrics.jsonl", "events/", "logs/", "checkpoints/", "plots/")


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """A run that has ended; what is not known is None or empty.

    Attributes:
        ended_at: wall-clock time (s). ran_s: duration of its last start.
        step, steps: the last step that was done, and the number to do.
        resumes_at: step of the checkpoint that `up` continues from; 0: there is none.
        evaluation: the newest evaluation, as a line.
        files: what is in its directory.
    """

    ended_at: float | None = None
    ran_s: float | None = None
    step: int | None = None
    steps: int | None = None
    resumes_at: int | None = None
    evaluation: str = ""
    files: list[str] = []

    def rows(self) -> list[tuple[str, str]]:
        """Return the lines that `ps` prints, as pairs of a name and a text."""
        found = []
        if self.ended_at is not None:
            ran = f", after {duration(self.ran_s)}" if self.ran_s is not None else ""
            ago = duration(max(0.0, time.time() - self.ended_at))
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.ended_at))
            found.append(("ended", f"{at} ({ago} ago){ran}"))
        if self.steps is not None:
            found.append(("steps", f"{self.step or 0} of {self.steps}" + self._resumes()))
        if self.evaluation:
            found.append(("evaluated", self.evaluation))
        if self.files:
            found.append(("files", ", ".join(self.files)))
        return found

    def _resumes(self) -> str:
        if self.resumes_at is None or self.steps is None or self.resumes_at >= self.steps:
            return ""
        at = f"the checkpoint of step {self.resumes_at}" if self.resumes_at else "the beginning: there is no checkpoint"
        return f"; `relax-rt up` resumes from {at}"


def ended(run_dir: Path) -> Ended:
    """Read the result of a run from its directory."""
    run = read_run(run_dir) or {}
    at, began = run.get("ended_at"), run.get("started_at")
    ended_at = at if isinstance(at, float) else None
    ran_s = ended_at - began if ended_at is not None and isinstance(began, float) else None
    known: dict[str, Any] = {}
    with suppress(RelaxError):
        config = resolved_config(run_dir)
        job = load_job(config.run.job)
        headline, lines = Headline(job.headline, job.steps(config)), list[str]()
        for record in records(run_dir / METRICS):
            headline.take(record)
            lines = headline.lines(record) or lines
        known = {"step": headline.step, "steps": headline.target, "evaluation": lines[-1] if lines else ""}
        known["resumes_at"] = job.resumes_at(run_dir)
    files = [name for name in FILES if (run_dir / name).exists()]
    return Ended(ended_at=ended_at, ran_s=ran_s, files=files, **known)
