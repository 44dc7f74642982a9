"""What the job and the queue's settings ask of the ledger."""

from __future__ import annotations

import msgspec

from relax_rt.transport.errors import Refused

TRAIN = "train"
"""The task whose completion is an optimizer step."""


class LedgerPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The job's part: what a batch is, how stale it may be, and who consumes what.

    Attributes:
        group_size: samples of one prompt.
        prompts_per_step: groups of one optimizer step (one publication).
        max_staleness: longest distance from the trainer's weights to any token's version; may be inf.
        tasks: the fields that each consumer task needs; `train` must be among them.
        straggler_wait_s: how long a batch is held for unfinished groups which its update would make over-stale;
            then they are revoked. 0 revokes at once.
        prompts: the run's prompt order ends after this many; None: it does not end.
        failures_per_prompt: a prompt whose groups failed this often is retired instead of being made again.
    """

    group_size: int
    prompts_per_step: int
    max_staleness: float
    tasks: dict[str, tuple[str, ...]]
    straggler_wait_s: float = 120.0
    prompts: int | None = None
    failures_per_prompt: int = 8

    def check(self) -> None:
        """Raises:
        Refused: the policy cannot work.
        """
        if self.group_size < 1 or self.prompts_per_step < 1:
            raise Refused("queue policy", why="group_size and prompts_per_step must be at least 1")
        if not self.max_staleness >= 0:
            raise Refused("queue policy", why=f"max_staleness is {self.max_staleness}, must be 0 or more")
        if TRAIN not in self.tasks:
            raise Refused("queue policy", why=f"no task '{TRAIN}' among {sorted(self.tasks)}")

    @property
    def batch_samples(self) -> int:
        """Samples of one publication (b)."""
        return self.group_size * self.prompts_per_step


class QueueLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The runtime's part: the [queue] table.

    Attributes:
        lease_s: length of tickets and leases.
        quarantine_after: a sample whose consumers died or lapsed this often is set aside.
        capacity_bytes: payload bytes in shared memory from which on producers wait.
    """

    lease_s: float = 60.0
    quarantine_after: int = 3
    capacity_bytes: int = 256 << 20
