"""Policy and limits of the ledger, from the job and its settings."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from relax_rt.transport.rpc.errors import Refused

TRAIN = "train"
"""The usual name of the task whose completion is an optimizer step."""


class SamplerSpec(msgspec.Struct, frozen=True):
    """Which sampler chooses for a task: its short name or import path, and its options."""

    path: str = "fifo"
    options: dict[str, Any] = {}


class LedgerPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The job's part: what a batch is, how stale it may be, and who consumes what.

    Attributes:
        tasks: the fields that each consumer task needs. A sample is finished when all tasks are done with it.
        group_size: samples of one prompt; 0: a queue without prompts, to which producers offer groups of any size.
        prompts_per_step: groups of one optimizer step (one publication); 0 without a step task.
        max_staleness: longest distance from the trainer's weights to any token's version; may be inf.
        step_task: the task whose completion is an optimizer step, or empty: then there are no steps and versions.
        samplers: who chooses among ready work, by task; first in, first out where nothing is said.
        fields: declared columns, as ``int32[*]`` (see transport/memory/fields.py); empty: any column may be put.
        versioned: fields computed with the trainer's weights (proximal log-probabilities, values), which lapse with
            them.
        on_straggler: what becomes of an unfinished group which the next update would make over-stale. `wait` holds
            the batch for straggler_wait_s, then revokes it; `requeue` revokes it at once; `mask` lets it go on: its
            over-stale tokens are context then.
        on_failed_member: a member on which a task cannot succeed is made again (`regenerate`), left out as long as
            min_group members remain (`shrink`), or ends the group (`drop`).
        frozen_by: the task (advantage) that fixes a group's composition: from then on a failure ends the group.
        over_provision: groups that may be under way beyond the bound.
        on_surplus: what becomes of them when an update makes them over-stale, or a batch is complete without them:
            they end as dropped(surplus) (`drop`), or those that are unfinished go on with their tokens, of which the
            over-stale ones are context then (`recycle`).
        prompts: the run's prompt order ends after this many; None: it does not end.
        failures_per_prompt: a prompt whose groups failed this often is retired instead of being made again.
        failed_groups, failed_prompts: so many groups that fail in a row, of so many prompts, end the run; 0: no number
            does. Journals of before this rule are replayed without it.
        item_timeouts: a data item of which whole groups were late this often is retired, if others got through the
            same task meanwhile; 0: none is. kept_items: ids of items that are never retired.
    """

    tasks: dict[str, tuple[str, ...]]
    group_size: int = 0
    prompts_per_step: int = 0
    max_staleness: float = float("inf")
    step_task: str = TRAIN
    samplers: dict[str, SamplerSpec] = {}
    fields: dict[str, str] = {}
    versioned: tuple[str, ...] = ()
    on_straggler: Literal["wait", "requeue", "mask"] = "wait"
    straggler_wait_s: float = 120.0
    on_failed_member: Literal["regenerate", "shrink", "drop"] = "regenerate"
    min_group: int = 2
    frozen_by: str = ""
    over_provision: int = 0
    on_surplus: Literal["drop", "recycle"] = "drop"
    prompts: int | None = None
    failures_per_prompt: int = 8
    failed_groups: int = 0
    failed_prompts: int = 1
    item_timeouts: int = 0
    kept_items: tuple[str, ...] = ()

    def check(self) -> None:
        """Check that the policy can work.

        Raises:
            Refused: it cannot.
        """
        if not self.tasks:
            raise Refused("queue policy", why="no consumer task is named")
        if self.group_size < 0 or self.prompts_per_step < 0:
            raise Refused("queue policy", why="group_size and prompts_per_step cannot be negative")
        if self.group_size and not self.step_task:
            raise Refused("queue policy", why="prompts are admitted for a step task, and none is named")
        if self.group_size and self.prompts_per_step < 1:
            raise Refused("queue policy", why="prompts_per_step must be at least 1")
        if self.failed_groups < 0 or self.item_timeouts < 0 or self.failed_prompts < 1:
            raise Refused(
                "queue policy", why="failed_groups and item_timeouts cannot be negative, failed_prompts below 1"
            )
        if self.failed_groups and self.failed_prompts > self.failed_groups:
            why = f"{self.failed_groups} failed groups are of {self.failed_groups} prompts at most"
            raise Refused(f"queue policy: failed_prompts = {self.failed_prompts}", why=why)
        if not self.max_staleness >= 0:
            raise Refused("queue policy", why=f"max_staleness is {self.max_staleness}, must be 0 or more")
        for what, task in (("step_task", self.step_task), ("frozen_by", self.frozen_by)):
            if task and task not in self.tasks:
                raise Refused("queue policy", why=f"{what} '{task}' is not among the tasks {sorted(self.tasks)}")
        for task in self.samplers:
            if task not in self.tasks:
                raise Refused("queue policy", why=f"a sampler is set for '{task}', the tasks are {sorted(self.tasks)}")
        self._check_fields()

    def _check_fields(self) -> None:
        if not self.fields:
            return
        for task, needed in self.tasks.items():
            unknown = sorted(set(needed) - set(self.fields))
            if unknown:
                raise Refused(
                    "queue policy",
                    why=f"task '{task}' needs {', '.join(unknown)}, the declared fields are {', '.join(self.fields)}",
                )

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
        capacity_samples: samples in the queue from which on producers wait.
        spill_bytes: payload bytes that may be moved to files on disk when shared memory fills; 0: none.
        high_water: part of capacity_bytes from which on cold payloads are spilled and an early checkpoint is asked for.
        max_sample_bytes: a sample with more payload is refused.
        keep_steps: a roll-back can go back this many steps; what is older is kept as counts only.
        durable: payloads lie in files that outlive the node agent.
        partial_bytes: limit of one member's partial completion. partials_bytes: limit of all of them together.
    """

    lease_s: float = 60.0
    quarantine_after: int = 3
    capacity_bytes: int = 256 << 20
    capacity_samples: int = 1_000_000
    spill_bytes: int = 0
    high_water: float = 0.8
    max_sample_bytes: int = 1 << 30
    keep_steps: int = 10_000
    durable: bool = False
    partial_bytes: int = 2 << 20
    partials_bytes: int = 32 << 20

    def check(self) -> None:
        """Raises:
        Refused: a limit cannot be.
        """
        for name, low, high in (
            ("lease_s", 0.01, 1e7),
            ("quarantine_after", 1, 1e6),
            ("capacity_bytes", 1, 1 << 62),
            ("capacity_samples", 1, 1 << 62),
            ("spill_bytes", 0, 1 << 62),
            ("high_water", 0.01, 1),
            ("max_sample_bytes", 1, 1 << 62),
            ("keep_steps", 1, 1 << 40),
            ("partial_bytes", 0, 1 << 30),
            ("partials_bytes", 0, 1 << 40),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise Refused(f"queue limit {name} = {value}", why=f"it must be from {low:g} to {high:g}")
