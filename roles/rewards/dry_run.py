"""A few calls of the user's reward function before anything starts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from relax_rt.config.problems import Problem
from relax_rt.roles.data.items import PromptItem
from relax_rt.roles.rewards.loader import load_reward
from relax_rt.roles.rewards.scoring import Failed, Request, Scorer
from relax_rt.roles.sections import RewardTable
from relax_rt.transport.errors import RelaxError

KEY = ("reward", "function")
ITEMS = 4
Verifier = Callable[[str, dict[str, Any]], float]


def offered(question: str, metadata: dict[str, Any], verify: Verifier | None, **about: Any) -> dict[str, Any]:
    """What a reward function may ask for by parameter name.

    The keys of the item's metadata; over them `question`, `metadata` and what is known about the completion (item,
    split, finish_reason, truncated, tokens); `score`, the task's verifier of a text, where there is one.
    """
    info = {**metadata, "question": question, "metadata": metadata, **about}
    if verify is not None:
        info["score"] = lambda text: verify(text, metadata)
    return info


def dry_run(
    table: RewardTable, config_dir: Path, items: Sequence[PromptItem], verify: Verifier | None
) -> list[Problem]:
    """Load the reward function and call it on a few items with right, wrapped, empty and junk completions.

    Returns:
        One problem at most, about `reward.function`: what went wrong first, on which completion, at which line.
    """
    try:
        scorer = Scorer(load_reward(table.function, config_dir), table.timeout_s)
    except RelaxError as error:
        return [Problem(KEY, error.why or str(error), error.hint)]
    requests = []
    for item in items[:ITEMS]:
        for text in (item.answer, f"The answer is {item.answer}.", "", "\u2603 <junk> -1e999 \x00 {]" * 8):
            about = {
                "item": item.item,
                "split": item.split,
                "finish_reason": "stop",
                "truncated": False,
                "tokens": max(1, len(text)),
                **({"verdict": 0.5} if table.judge is not None else {}),
            }
            requests.append(Request(text, item.answer, offered(item.question, item.metadata, verify, **about)))
    try:
        return asyncio.run(_first_failure(scorer, requests))
    finally:
        scorer.close()


async def _first_failure(scorer: Scorer, requests: Sequence[Request]) -> list[Problem]:
    for request in requests:
        # One at a time: after a call that does not return there is no point in the others.
        (result,) = await scorer.score([request])
        if isinstance(result, Failed):
            called = f"on completion {request.completion!r:.60}, answer {request.answer!r:.40}"
            return [Problem(KEY, f"reward.function failed in a dry run: {result.reason}, {called}")]
    return []
