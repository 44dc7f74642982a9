"""The job `plain`: the roles of the config and nothing else. For actors and services that are to be supervised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from relax_rt.config.job import Job, PlanLine
from relax_rt.config.problems import Problem
from relax_rt.transport.queue.ledger.policy import LedgerPolicy


class PlainJob(Job):
    """A run that ends when all its significant roles have finished, or by `relax-rt down`."""

    def check(self, config: Any, config_dir: Path) -> list[Problem]:
        """Refuse a run without roles."""
        if not set(config.roles) - {"registry", "queue"}:
            return [Problem(("roles",), "the run has no roles", 'add [roles.<name>] with target = "file.py:Class"')]
        return []

    def plan(self, config: Any) -> list[PlanLine]:
        """Return the number of processes of each role."""
        return [PlanLine("roles", kind, f"{table.count}") for kind, table in config.roles.items()]

    def ledger_policy(self, config: Any) -> LedgerPolicy:
        """The queue of a plain run holds single samples, for one task."""
        return LedgerPolicy(group_size=1, prompts_per_step=1, max_staleness=0, tasks={"train": ()})
