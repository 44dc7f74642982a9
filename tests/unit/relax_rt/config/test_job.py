"""The base class of a job: its defaults, and what is refused as a job."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from relax_rt.cluster.nodes.checks import kinds_of_one_node
from relax_rt.config import job as jobs
from relax_rt.config.job import (
    JOB_GROUP,
    Job,
    Pacing,
    absent_kinds,
    advice,
    job_names,
    load_job,
    pacing_of,
    stall_after_s,
)
from relax_rt.config.schema import RunConfig, RunTable, SupervisionTable
from relax_rt.transport.queue.ledger.policy import LedgerPolicy
from relax_rt.transport.rpc.errors import Refused, RelaxError


class Bare(Job):
    """Overrides only what has no default."""

    def ledger_policy(self, config: Any) -> LedgerPolicy:
        return LedgerPolicy()


class NoJob:
    """Not derived from Job."""


def offer(monkeypatch: pytest.MonkeyPatch, name: str, target: str) -> None:
    entry = EntryPoint(name, target, JOB_GROUP)
    monkeypatch.setattr(jobs, "entry_points", lambda group: [entry])


def config(name: str) -> RunConfig:
    return RunConfig(run=RunTable(name="bare", job=name))


def test_a_job_that_overrides_nothing_has_the_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    offer(monkeypatch, "bare", f"{__name__}:Bare")
    job, run = load_job("bare"), config("bare")
    assert (absent_kinds(run), pacing_of(run), advice(run, {}), stall_after_s(run)) == (frozenset(), Pacing(), "", None)
    assert not kinds_of_one_node(run) and not job.changeable and not job.past(tmp_path) and not job.assumed({})
    assert job.settled({}, SupervisionTable()) == {} and job.choose(run, {}, measured=True, here=True) is run
    assert not (job.check(run, tmp_path) or job.missing_inputs(run, tmp_path) or job.preflight(run, tmp_path))
    assert job.check_answers(run) is None and job.steps(run) is None and job.shm_bytes(run) == 0
    with pytest.raises(Refused, match=r"job 'bare'.*has no model"):
        job.sample(run, None, 1)


@pytest.mark.parametrize("target", ["NoJob", "offer", "JOB_GROUP", "Bare.__name__", "Bare.ledger_policy"])
def test_what_is_not_derived_from_job_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    offer(monkeypatch, "wrong", f"{__name__}:{target}")
    with pytest.raises(RelaxError, match=r"job 'wrong' .* is not a subclass of relax_rt\.config\.job\.Job"):
        load_job("wrong")


def test_installed_jobs_derive_from_job() -> None:
    assert {"plain", "rl"} <= set(job_names())
    assert all(isinstance(load_job(name), Job) for name in ("plain", "rl"))
