"""What keeps a reward from being computed, as far as it shows without user code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from relax_rt.config.problems import Problem

if TYPE_CHECKING:
    from relax_rt.roles.sections import RLConfig


def check_reward(config: RLConfig) -> Iterator[Problem]:
    """Components, their options and weights."""
    from relax_rt.roles.agentic.settings import env_settings
    from relax_rt.roles.rewards.compose import read_components, takes_groups

    table = config.reward
    if env_settings(config) is not None:
        if table.components:
            message = "the environment gives the rewards: [reward] has no effect"
            yield Problem(("reward",), message, "leave it out; reward in the environment's step", at="key")
        return
    yield from (one for one in read_components(table) if isinstance(one, Problem))
    if takes_groups(table) and config.algorithm.group_size < 2:
        message = "a reward that compares the completions of a prompt, and algorithm.group_size is 1"
        yield Problem(("reward",), message, "raise algorithm.group_size", at="key")


async def look_at_boxes(config: RLConfig) -> tuple[str, list[Problem]]:
    """How code would be run here: a warning if that is less well closed in than it could be, and why it cannot be."""
    from relax_rt.roles.rewards.box.run import BoxFailed, mode_here

    if not runs_code(config):
        return "", []
    try:
        mode = await mode_here()
    except BoxFailed as error:
        hint = "let this user have namespaces, or an interpreter that everybody may run"
        return "", [Problem(("reward",), f"no code can be run here: {error.why}", hint)]
    return ("" if mode.level == "namespaces" else str(mode)), []


def runs_code(config: RLConfig) -> bool:
    """Whether a component runs programs in boxes."""
    named = {config.reward.function, *(one.name for one in config.reward.components)}
    return not named.isdisjoint({"code", "unit_tests"})
