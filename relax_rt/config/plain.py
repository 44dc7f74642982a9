"""The job `plain`: the roles of the config and nothing else. For actors and services that are to be supervised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from relax_rt.config.job import Column, PlanLine, TriedSample
from relax_rt.config.problems import Problem
from relax_rt.config.schema import RoleSettings, RunConfig
from relax_rt.transport.errors import Refused

if TYPE_CHECKING:
    from relax_rt.transport.ledger.policy import LedgerPolicy


class PlainJob:
    """See relax_rt.config.job.Job. It ends when all its significant roles have finished, or by `relax-rt down`."""

    Config: ClassVar[type[RunConfig]] = RunConfig
    Roles: ClassVar[Mapping[str, type[RoleSettings]]] = {}
    headline: ClassVar[Sequence[Column]] = ()

    def check(self, config: Any, config_dir: Path) -> list[Problem]:
        """A run of nothing is a mistake."""
        if not set(config.roles) - {"registry", "queue"}:
            return [Problem(("roles",), "the run has no roles", 'add [roles.<name>] with target = "file.py:Class"')]
        return []

    def preflight(self, config: Any, config_dir: Path) -> list[Problem]:
        """The roles' classes are imported when the config is loaded."""
        return []

    def plan(self, config: Any) -> list[PlanLine]:
        """How many processes."""
        return [PlanLine("roles", kind, f"{table.count}") for kind, table in config.roles.items()]

    def ledger_policy(self, config: Any) -> LedgerPolicy:
        """The queue of a plain run holds single samples, for one task."""
        from relax_rt.transport.ledger.policy import LedgerPolicy

        return LedgerPolicy(group_size=1, prompts_per_step=1, max_staleness=0, tasks={"train": ()})

    def shm_bytes(self, config: Any) -> int:
        """None besides the queue's."""
        return 0

    def steps(self, config: Any) -> int | None:
        """It has no steps."""
        return None

    def finish(self, run_dir: Path, config: Any) -> dict[str, Any]:
        """Nothing to sum up."""
        return {}

    def closing(self, summary: dict[str, Any]) -> list[str]:
        """Nothing to say."""
        return []

    def sample(
        self, config: Any, run_dir: Path | None, items: int, *, held_out: bool = False, prompts: Sequence[str] = ()
    ) -> list[TriedSample]:
        """It has no samples.

        Raises:
            Refused: always.
        """
        raise Refused("samples of a plain run", why="it has no model", hint="set run.job to the job that has one")
