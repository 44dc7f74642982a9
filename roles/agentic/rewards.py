"""Reward components that score a finished episode in addition to its environment's own reward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from relax_rt.config.problems import KeyPath, Problem
from relax_rt.config.schema import RunConfig
from relax_rt.roles.agentic.interface import EnvironmentFailed, Task, checked
from relax_rt.roles.agentic.settings import env_settings
from relax_rt.roles.agentic.tokens.messages import ASSISTANT
from relax_rt.roles.agentic.tokens.types import CONTEXT, Episode, Message
from relax_rt.roles.models.chat_template import calls_of, parsed_arguments, words
from relax_rt.roles.models.tokenizer import ChatTokenizer
from relax_rt.roles.rewards.checks import sandbox_commands
from relax_rt.roles.rewards.compose import read_components
from relax_rt.roles.rewards.dry_run import offered_info
from relax_rt.roles.rewards.scoring import Failed, Request, Score
from relax_rt.roles.rewards.settings import ComponentTable, RewardTable

if TYPE_CHECKING:
    from relax_rt.roles.agentic.episode import PlayedEpisode

PLACE: KeyPath = ("roles", "env")
KEY = "rewards"
OWN = "environment"
"""Name of the environment's own reward among the components."""
JUDGED = "genrm"
WHERE = "the rewards of roles.env.rewards"


def reward_table(config: RunConfig) -> RewardTable | None:
    """Return the reward functions of a run: [reward], or with [roles.env] what is added to the environment's own
    reward, within the limits of [reward]; None if that is nothing."""
    table = env_settings(config)
    if table is None:
        return config.table(RewardTable)
    if not table.rewards:
        return None
    return config.table(RewardTable).model_copy(
        update={"function": None, "components": table.rewards, "group": False, "judge": None}
    )


def reward_commands(config: RunConfig) -> list[list[str]]:
    """Return the commands that a run's rewards run programs with, for `relax-rt doctor`."""
    table = reward_table(config)
    return [] if table is None else sandbox_commands(table)


def check_rewards(config: RunConfig) -> Iterator[Problem]:
    """Check roles.env.rewards, without user code."""
    table = reward_table(config)
    if table is None:
        return
    for one in read_components(table, PLACE, KEY):
        if isinstance(one, Problem):
            yield one
    for index, given in enumerate(table.components):
        if given.group:
            message = "group: an episode is scored when it is over, and the others of its group are played still"
            yield Problem((*PLACE, KEY, index, "group"), message, "leave it out", at="key")
        if given.name == JUDGED:
            message = f"'{JUDGED}' is the verdict of a judge, who is not asked about episodes"
            yield Problem((*PLACE, KEY, index, "name"), message, "have the environment ask a model of its own")


def request_of(task: Task, played: PlayedEpisode, tokenizer: ChatTokenizer) -> Request:
    """Return an episode's request: its last reply, or what its program printed, as the completion, and all turns."""
    turns = turns_of(played.episode, tokenizer)
    info = offered_info(
        task.question,
        task.metadata,
        None,
        item=task.item,
        split=task.split,
        finish_reason="length" if played.truncated else "stop",
        truncated=bool(played.truncated),
        tokens=sum(sum(branch.loss_mask) for branch in played.episode.branches),
        turns=turns,
        reward=played.reward,
    )
    # The last branch ends with the last reply.
    last = turns[-1]["text"] if turns else ""
    return Request(last if played.output is None else played.output, task.answer, info)


def turns_of(episode: Episode, tokenizer: ChatTokenizer) -> list[dict[str, str]]:
    """Return the conversations of an episode, branch after branch: each message that the policy got, and its replies as
    it wrote them, reasoning and tool calls included. A reply is an assistant's turn once, where it is trained."""
    found: list[dict[str, str]] = []
    for branch in episode.branches:
        for turn in branch.turns:
            if turn.response:
                found.append({"role": turn.role, "text": tokenizer.decode(branch.tokens[turn.start : turn.end])})
            for message in turn.messages:
                role = CONTEXT if message["role"] == ASSISTANT else message["role"]
                found.append({"role": role, "text": _text(message)})
    return found


def _text(message: Message) -> str:
    """Return a message's text and, each on a line, its tool calls as JSON; images are left out."""
    content = words(message.get("content"))
    parts = [part.get("text", "") for part in content] if isinstance(content, list) else [content]
    lines = ["".join(parts)] if any(parts) else []
    for call in calls_of(message):
        function = {"name": call["function"]["name"], "arguments": parsed_arguments(call["function"].get("arguments"))}
        lines.append(msgspec.json.encode(function).decode())
    return "\n".join(lines)


def rewarded(played: PlayedEpisode, score: Score | Failed, labels: list[str]) -> PlayedEpisode:
    """Return an episode with the components' rewards added: to its turns if they have rewards for them, else to its
    last reply.

    Args:
        score: its `turns` are in the order of `request_of`, which is not that of `played.rewards` if there are
            branches.
        labels: of the components.

    Raises:
        EnvironmentFailed: they failed, or have rewards for another number of turns.
    """

    if isinstance(score, Failed):
        raise EnvironmentFailed(WHERE, why=score.reason)
    rewards = dict(played.rewards)
    if not rewards:
        raise EnvironmentFailed(WHERE, why="the policy never replied")
    trained = played.episode.trained
    if score.turns and len(score.turns) != len(trained):
        raise EnvironmentFailed(WHERE, why=f"{len(score.turns)} turn_rewards for {len(trained)} turns of the assistant")
    for turn, value in zip(trained, score.turns, strict=False):
        rewards[turn.response] += value
    rewards[next(reversed(rewards))] += score.total - math.fsum(score.turns)
    try:
        total = checked(math.fsum(rewards.values()))
    except ValueError as error:
        raise EnvironmentFailed(WHERE, why=str(error)) from error
    # A single component of weight 1 has its own parts in score.components.
    parts = {labels[0]: score.total} if len(labels) == 1 else score.components
    return msgspec.structs.replace(played, rewards=rewards, parts={"episode": total, OWN: played.reward, **parts})


def labels_of(tables: Sequence[ComponentTable]) -> list[str]:
    """Return the names of components in records."""
    return [one.label or one.name or str(one.function).rpartition(":")[2] for one in tables]
