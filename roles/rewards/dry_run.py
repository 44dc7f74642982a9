"""A dry run of the reward before a run starts, and what a reward function may ask for by parameter name."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from relax_rt.config.problems import KeyPath, Problem
from relax_rt.roles.data.items import answer_text
from relax_rt.roles.models.cache import say
from relax_rt.roles.rewards.compose import REWARD, Rewards
from relax_rt.roles.rewards.scoring import RewardFailed, RewardRequest
from relax_rt.roles.rewards.settings import RewardTable
from relax_rt.roles.rewards.worker import TaskSpec
from relax_rt.transport.rpc.errors import RelaxError

KEY = ("reward", "function")
ITEMS = 4
SETTING = re.compile(r"(reward\.components|roles\.env\.rewards)\[(\d+)\](?:\.(\w+))?")
Verifier = Callable[[str, dict[str, Any]], float]


def offered_info(question: str, metadata: dict[str, Any], verify: Verifier | None, **about: Any) -> dict[str, Any]:
    """Return what a reward function may ask for by parameter name.

    The keys of the item's metadata; over them `question`, `metadata` and what is known about the completion (item,
    split, finish_reason, truncated, tokens); `score`, the task's verifier of a text, where there is one.
    """
    info = {**metadata, "question": question, "metadata": metadata, **about}
    if verify is not None:
        info["score"] = lambda text: verify(text, metadata)
    return info


class RewardItem(Protocol):
    """The item that a completion answers: a prompt, or an episode's task."""

    @property
    def item(self) -> str: ...
    @property
    def split(self) -> str: ...
    @property
    def question(self) -> str: ...
    @property
    def answer(self) -> Any: ...
    @property
    def metadata(self) -> dict[str, Any]: ...


class TaskData(Protocol):
    """The part of [data], or of an evaluation set, that names a task."""

    @property
    def task(self) -> str | None: ...
    @property
    def options(self) -> dict[str, Any]: ...
    @property
    def size(self) -> int: ...


def task_of(data: TaskData) -> TaskSpec | None:
    """Return the task whose verdict a function may take; None if the prompts come from files."""
    return None if data.task is None else TaskSpec(data.task, data.options, data.size)


def dry_run(
    table: RewardTable,
    config_dir: Path,
    items: Sequence[RewardItem],
    task: TaskSpec | None,
    path: KeyPath = REWARD,
    key: str = "components",
    also: Callable[[str], Mapping[str, Any]] = lambda completion: {},
) -> list[Problem]:
    """Load the reward and call it on a few items with right, wrapped, empty and junk completions.

    A reward that is the same for all of them is reported as a warning: nothing can be learned from it.

    Args:
        path, key: of the components in the config.
        also: further information that functions may ask for, given the completion.

    Returns:
        One problem at most: what went wrong first, on which completion, at which line.
    """
    try:
        rewards = Rewards(table, config_dir, task, path=path, key=key)
        return asyncio.run(_first_failure(rewards, requests_for(table, items, also), table, (*path, key)))
    except RelaxError as error:
        # The key of the component that the error names.
        named = SETTING.match(error.what)
        at: KeyPath = KEY
        if named is not None:
            at = (*named[1].split("."), int(named[2]), *([named[3]] if named[3] else []))
        return [Problem(at, error.why or str(error), error.hint)]


def requests_for(
    table: RewardTable, items: Sequence[RewardItem], also: Callable[[str], Mapping[str, Any]] = lambda completion: {}
) -> list[RewardRequest]:
    """Return four completions of each item."""
    requests = []
    for group, item in enumerate(items[:ITEMS]):
        right = answer_text(item.answer)
        for text in (right, f"The answer is {right}.", "", "\u2603 <junk> -1e999 \x00 {]" * 8):
            about = {
                "item": item.item,
                "split": item.split,
                "finish_reason": "stop",
                "truncated": False,
                "tokens": max(1, len(text)),
                "turns": [],
                **({"verdict": 0.5} if table.judge is not None else {}),
                **also(text),
            }
            requests.append(
                RewardRequest(text, item.answer, offered_info(item.question, item.metadata, None, **about), group)
            )
    return requests


async def _first_failure(
    rewards: Rewards, requests: Sequence[RewardRequest], table: RewardTable, path: KeyPath
) -> list[Problem]:
    totals: set[float] = set()
    try:
        await rewards.start()
        # One at a time, or one group: after a call that does not return there is no point in the others.
        for _, members in itertools.groupby(requests, key=lambda r: r.group if rewards.groups else id(r)):
            asked = list(members)
            for request, result in zip(asked, await rewards.score(asked), strict=True):
                if isinstance(result, RewardFailed):
                    called = f"on completion {request.completion!r:.60}, answer {request.answer!r:.40}"
                    if table.function is not None:
                        return [Problem(KEY, f"reward.function failed in a dry run: {result.reason}, {called}")]
                    labels = [one.label for one in rewards.components]
                    index = next((i for i, label in enumerate(labels) if result.reason.startswith(f"{label}: ")), 0)
                    return [Problem((*path, index), f"a reward failed in a dry run: {result.reason}, {called}")]
                totals.add(result.total)
    finally:
        await rewards.close()
    if len(totals) == 1 and table.judge is None:
        warning = (
            f"the reward is {totals.pop():g} for each of {len(requests)} completions in a dry run, for right answers "
            "and for junk: a policy learns nothing from equal rewards"
        )
        answer = requests[0].answer
        if not isinstance(answer, str):
            warning += f". Answers are {type(answer).__name__}, as {answer!r:.40}: annotate `answer: str` to get text"
        say(f"warning: {warning}")
    return []
