"""What roles do about losses: skip retired items, say which setting helps, and end a run that makes no progress.

The queue counts losses (transport/queue/ledger/failures.py). This module has the advice against them, what is
said of steps that train nothing, the error that ends the run, and the time without movement after which a run counts as
stalled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from relax_rt.config.schema import RoleSettings
from relax_rt.roles.agentic.settings import env_settings
from relax_rt.roles.base.settings import ProgressTable
from relax_rt.roles.rewards.settings import RewardTable
from relax_rt.roles.rollout.engines.settings import SamplingTable
from relax_rt.roles.training.algorithms.settings import AlgorithmTable
from relax_rt.roles.training.publication.settings import PublicationTable
from relax_rt.transport.queue.ledger.messages import ProgressReport, Ticket, describe_cause
from relax_rt.transport.rpc.errors import GivenUp

if TYPE_CHECKING:
    from relax_rt.config.schema import RunConfig
    from relax_rt.roles.base.sample import Sample
    from relax_rt.transport.queue.client import QueueClient

SHOWN = 3
"""Causes that the end of a run names."""
SLACK = 2.0
"""A run is at a standstill after this many times its slowest deadline."""
LEAST_S = 600.0
GENERATION, TRAIN = "", "train"


class NoProgress(GivenUp):
    """Groups fail one after the other, and none is trained: the run ends."""


async def without_retired(queue: QueueClient, tickets: list[Ticket], item: Callable[[Ticket], str]) -> list[Ticket]:
    """The tickets whose items are not retired; the others are skipped."""
    gone = [ticket.group for ticket in tickets if queue.retired and item(ticket) in queue.retired]
    if gone:
        await queue.skip_groups(gone)
    return [ticket for ticket in tickets if ticket.group not in gone]


def advice(config: RunConfig, loss: Mapping[str, Any]) -> str:
    """The setting that helps against a loss.

    Args:
        loss: fields of a Loss.
    """
    table, task, late = config.table(AlgorithmTable), loss.get("task"), loss.get("late")
    env = env_settings(config) is not None
    where = loss.get("where")
    found = [f"mend {where}"] if where else []
    if late and env:
        found.append("raise roles.env.turn_timeout_s or roles.env.episode_timeout_s")
    elif late and task == "reward":
        judged = config.table(RewardTable).judge is not None and "judge" in str(loss.get("cause"))
        found.append("raise reward.judge.timeout_s" if judged else "raise reward.timeout_s or reward.workers")
    if loss.get("partial") and table.on_failed_member == "regenerate" and table.group_size > table.min_group:
        found.append('algorithm.on_failed_member = "shrink" trains groups without the members that fail')
    elif loss.get("partial") and table.on_failed_member == "shrink" and table.min_group > 2:
        found.append(f"lower algorithm.min_group = {table.min_group}")
    return ", or ".join(found) or "see the logs of the roles: `relax-rt logs`"


def no_token(config: RunConfig, samples: Sequence[Sample]) -> str:
    """Say why a step without a token to train trained nothing, and what helps."""
    cut = sum(sample.meta.truncated for sample in samples)
    limit, truncated = config.table(SamplingTable).max_new_tokens, config.table(AlgorithmTable).truncated
    return (
        f"none of {len(samples)} samples has a token to train; {cut} were cut at sampling.max_new_tokens = {limit}"
        f' (algorithm.truncated = "{truncated}")'
    )


def no_advantage(config: RunConfig, samples: Sequence[Sample], left_out_tokens: int) -> str:
    """Say why the advantages of a step are all 0, and what helps.

    Args:
        left_out_tokens: tokens whose advantage the loss set to 0 before the update.
    """
    if left_out_tokens:
        hint = "a lower algorithm.max_staleness, or a wider trust region in algorithm.loss"
        return f"the loss set the advantages of all {left_out_tokens} tokens that had one to 0; what helps: {hint}"
    rewards: dict[int, set[float]] = {}
    for sample in samples:
        rewards.setdefault(sample.meta.group, set()).add(sample.reward or 0.0)
    equal = all(len(values) == 1 for values in rewards.values())
    mean = sum(sample.reward or 0.0 for sample in samples) / len(samples)
    cause = "rewards are equal within each group" if equal else "all advantages are 0"
    table = config.table(AlgorithmTable)
    hints = ["easier or harder prompts", "a reward with more than one value"]
    hints.append(f"more samples a prompt (algorithm.group_size = {table.group_size})")
    if not table.filters:
        hints.append('dynamic sampling (algorithm.filters = ["zero_variance"])')
    return f"{cause}, mean reward {mean:.3g}; what helps: {', '.join(hints)}"


def ending(config: RunConfig, report: ProgressReport) -> NoProgress:
    """The error that ends the run, with the causes and the settings that would help.

    It names no numbers of samples: some are lost until the last role has ended.
    """
    what = f"{report.failed_groups} groups of {report.prompts} or more prompts failed in a row, and none was trained"
    causes = "; ".join(describe_cause(loss) for loss in report.losses[:SHOWN])
    left = len(report.losses) - SHOWN
    if left > 0:
        causes += f"; and {left} further causes"
    hints = [advice(config, msgspec.structs.asdict(loss)) for loss in report.losses[:SHOWN]]
    hint = "; ".join(dict.fromkeys(hints)) or "see `relax-rt why`"
    again = "then the same `relax-rt up` again, which resumes the run with new counts"
    return NoProgress(what, why=causes, hint=f"{hint}; {again} (progress.failed_groups = {report.most})")


def slowest_s(config: RunConfig) -> float:
    """The longest time for which a run may stand still although nothing is wrong, by its roles' own deadlines."""
    reward, publication = config.table(RewardTable), config.table(PublicationTable)
    found = [
        LEAST_S,
        reward.timeout_s,
        config.table(AlgorithmTable).straggler_wait_s,
        publication.ack_timeout_s,
    ]
    found += [publication.directory_timeout_s, config.queue.lease_s]
    found += [table.hang_after_s for table in _tables(config)]
    if reward.judge is not None:
        found.append(reward.judge.timeout_s)
    if (env := env_settings(config)) is not None:
        found += [env.turn_timeout_s, env.episode_timeout_s, env.hang_after_s]
    for table in _tables(config):
        if (server := getattr(table, "sglang", None)) is not None and getattr(table, "engine", "") == "sglang":
            found += [server.stall_timeout_s, server.update_timeout_s]
    return max(found)


def stall_after_s(config: RunConfig) -> float | None:
    """After how long without any movement the run ends; None: never."""
    progress = config.table(ProgressTable)
    if progress.stall_after_s is not None:
        return progress.stall_after_s
    return None if pausing(config) else SLACK * slowest_s(config)


def pausing(config: RunConfig) -> list[str]:
    """Roles through which callers from outside may pause the run: a gateway, and roles of the user's own."""
    return [f"roles.{kind}" for kind, table in config.roles.items() if kind == "gateway" or _is_own(table)]


def _is_own(table: Any) -> bool:
    """Whether it is a role of the user's own; their tables may still be as they were read."""
    return bool(table.get("target") if isinstance(table, dict) else table.target)


def _tables(config: RunConfig) -> Sequence[RoleSettings]:
    return [table for table in config.roles.values() if isinstance(table, RoleSettings)]
