"""What keeps a reward from being computed, as far as it shows without user code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from relax_rt.config.problems import Problem
from relax_rt.roles.rewards.settings import RewardTable
from relax_rt.roles.training.algorithms.settings import AlgorithmTable

if TYPE_CHECKING:
    from relax_rt.config.schema import RunConfig


def check_reward(config: RunConfig) -> Iterator[Problem]:
    """Components, their options and weights."""
    from relax_rt.roles.agentic.settings import env_settings
    from relax_rt.roles.rewards.compose import read_components, takes_groups

    table = config.table(RewardTable)
    if env_settings(config) is not None:
        return  # see roles/agentic
    yield from (one for one in read_components(table) if isinstance(one, Problem))
    if takes_groups(table) and config.table(AlgorithmTable).group_size < 2:
        message = "a reward that compares the completions of a prompt, and algorithm.group_size is 1"
        yield Problem(("reward",), message, "raise algorithm.group_size", at="key")


def box_commands(config: RunConfig) -> list[list[str]]:
    """What the programs of a config's rewards are run with, each once; an empty one is this interpreter."""
    from relax_rt.roles.agentic.rewards import reward_table
    from relax_rt.roles.rewards.compose import Component, read_components

    table = reward_table(config) or config.table(RewardTable)
    found = [one for one in read_components(table) if isinstance(one, Component)]
    commands = [one.box.command for one in found if one.box is not None]
    return [one for number, one in enumerate(commands) if one not in commands[:number]]


async def describe_boxes(config: RunConfig) -> str:
    """Describe how the programs of rewards are isolated on this machine; empty if there are none.

    The dry run checks whether that is sufficient.
    """
    from relax_rt.roles.rewards.box.run import BoxFailed, mode_here

    modes = []
    for command in box_commands(config):
        try:
            modes.append(str(await mode_here(command)))
        except BoxFailed as error:
            modes.append(f"no program can be run here: {error.why}")
    return "; ".join(dict.fromkeys(modes))
