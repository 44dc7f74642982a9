"""The table [progress] of roles.toml."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from relax_rt.config.problems import KeyPath, Problem, dotted
from relax_rt.config.schema import Filled, Seconds, Table


class ProgressTable(Table):
    """When a run that trains nothing is ended, and which items it retires by itself (docs/guides/progress.md)."""

    failed_groups: Annotated[int, Field(ge=1, le=1_000_000)] = 64
    """End the run after this many failed groups in a row, with no complete or trained group in between. A group fails
    when each of its members failed without a success in between, or when it is dropped because of failures."""
    failed_prompts: Annotated[int, Field(ge=1, le=1000)] = 4
    """Minimum number of different prompts among those groups, so that a single broken prompt does not end the run."""
    item_timeouts: Annotated[int, Field(ge=0, le=1000)] = 2
    """Retire an item after this many whole groups of it exceeded a time or memory limit while other items completed the
    same task; it is not sampled again (`relax-rt retired` lists such items). 0: never."""
    kept_items: list[Filled] = Field(default_factory=list)
    """Ids of items that are never retired; retired ones are sampled again at the next start."""
    empty_steps: Annotated[int, Field(ge=1, le=1_000_000)] = 3
    """Report after this many consecutive steps that trained nothing: without a token to train, or with rewards that are
    equal within each group."""
    stall_after_s: Seconds | None = None
    """End the run after this time without progress in any role: no token, environment step, reward, download or step.
    Unset: twice the slowest deadline of any role; never in runs with [roles.gateway] or your own roles, whose callers
    may pause."""

    def problems(self, path: KeyPath) -> Iterator[Problem]:
        """Refuse more prompts than groups."""
        if self.failed_prompts > self.failed_groups:
            message = f"failed_prompts = {self.failed_prompts}: {self.failed_groups} failed groups are of fewer prompts"
            yield Problem((*path, "failed_prompts"), message, f"lower it, or raise {dotted(path)}.failed_groups")
