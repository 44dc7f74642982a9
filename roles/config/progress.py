"""The settings that help against lost work, and the time without progress after which a run counts as stalled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from relax_rt.config.schema import RoleSettings
from relax_rt.roles.agentic.settings import env_settings
from relax_rt.roles.config.sections import RLConfig

SLACK = 2.0
"""A run is stalled after this many times its slowest deadline."""
LEAST_S = 600.0


def advice(config: RLConfig, loss: Mapping[str, Any]) -> str:
    """Return the setting that helps against a loss.

    Args:
        loss: fields of a Loss.
    """
    table, task, late = config.algorithm, loss.get("task"), loss.get("late")
    env = env_settings(config) is not None
    where = loss.get("where")
    found = [f"mend {where}"] if where else []
    if late and env:
        found.append("raise roles.env.turn_timeout_s or roles.env.episode_timeout_s")
    elif late and task == "reward":
        judged = config.reward.judge is not None and "judge" in str(loss.get("cause"))
        found.append("raise reward.judge.timeout_s" if judged else "raise reward.timeout_s or reward.workers")
    if loss.get("partial") and table.on_failed_member == "regenerate" and table.group_size > table.min_group:
        found.append('algorithm.on_failed_member = "shrink" trains groups without the members that fail')
    elif loss.get("partial") and table.on_failed_member == "shrink" and table.min_group > 2:
        found.append(f"lower algorithm.min_group = {table.min_group}")
    return ", or ".join(found) or "see the logs of the roles: `relax-rt logs`"


def slowest_s(config: RLConfig) -> float:
    """Return the longest time without progress that is still normal, by the roles' own deadlines."""
    reward, publication = config.reward, config.publication
    found = [
        LEAST_S,
        reward.timeout_s,
        config.algorithm.straggler_wait_s,
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


def stall_after_s(config: RLConfig) -> float | None:
    """Return after how long without progress the run ends; None: never."""
    progress = config.progress
    if progress.stall_after_s is not None:
        return progress.stall_after_s
    return None if pausing(config) else SLACK * slowest_s(config)


def pausing(config: RLConfig) -> list[str]:
    """Return the roles whose outside callers may pause the run: a gateway, and roles of the user's own."""
    return [
        f"roles.{kind}"
        for kind, table in config.roles.items()
        if kind == "gateway" or bool(table.get("target") if isinstance(table, dict) else table.target)
    ]


def _tables(config: RLConfig) -> Sequence[RoleSettings]:
    return [table for table in config.roles.values() if isinstance(table, RoleSettings)]
