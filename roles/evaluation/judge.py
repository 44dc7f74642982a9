"""Judge held-out completions of a set with its own reward function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from relax_rt.roles.rewards.compose import Rewards
from relax_rt.roles.rewards.dry_run import offered_info
from relax_rt.roles.rewards.scoring import RewardFailed, RewardRequest, Score
from relax_rt.roles.rewards.settings import RewardTable

if TYPE_CHECKING:
    from relax_rt.roles.data.items import PromptItem
    from relax_rt.roles.evaluation.settings import EvaluationSet
    from relax_rt.roles.rewards.worker import TaskSpec

MAX_HUNG_BATCHES = 2
"""After this many batches with a hanging call, which each take a whole deadline, the rest is not judged."""


class JudgedCompletion(msgspec.Struct, frozen=True):
    """A completion to judge: its text without special tokens, its length in tokens, and how it ended."""

    text: str
    tokens: int
    finish_reason: str

    @property
    def stopped(self) -> bool:
        """Whether it ended by itself."""
        return self.finish_reason == "stop"


class SetVerdict(msgspec.Struct):
    """Which completions are right, and the mean reward of those that have one.

    Attributes:
        right: one a completion; one that could not be judged is not right.
        reward: None if none could be judged.
        failed: completions that could not be judged, for reasons like `reason`.
    """

    right: list[bool]
    reward: float | None = None
    failed: int = 0
    reason: str = ""


class SetJudge:
    """Judges completions of one set with its reward function.

    Args:
        timeout_s: for one call.
        task: of the prompts, where they are of one.
    """

    def __init__(self, table: EvaluationSet, config_dir: Path, timeout_s: float, task: TaskSpec | None) -> None:
        assert table.reward is not None
        self._success, self._name = table.success, table.reward
        self._rewards = Rewards(RewardTable(function=table.reward, timeout_s=timeout_s), config_dir, task)
        self._started = False
        self._hung_batches = 0

    async def judge(
        self, items: Sequence[PromptItem], completions: Sequence[JudgedCompletion], after_each: Callable[[], None]
    ) -> SetVerdict:
        """Judge the completions, given item by item; once calls hang, the rest is not judged.

        Raises:
            RelaxError: the function cannot be loaded.
        """
        if not self._started:
            await self._rewards.start()
            self._started = True
        samples = len(completions) // len(items)
        requests = [self._request(items[i // samples], completion) for i, completion in enumerate(completions)]
        verdict = SetVerdict([])
        rewards: list[float] = []
        size = self._rewards.concurrency
        for first in range(0, len(requests), size):
            for result in await self._score(requests[first : first + size], after_each):
                verdict.right.append(not isinstance(result, RewardFailed) and result.total > self._success)
                if isinstance(result, RewardFailed):
                    verdict.failed += 1
                    verdict.reason = verdict.reason or result.reason[:500]
                else:
                    rewards.append(result.total)
        verdict.reward = sum(rewards) / len(rewards) if rewards else None
        return verdict

    async def _score(
        self, requests: Sequence[RewardRequest], after_each: Callable[[], None]
    ) -> list[Score | RewardFailed]:
        if self._hung_batches >= MAX_HUNG_BATCHES:
            reason = f"{self._name} hung before and is not called any more"
            return [RewardFailed(reason) for _ in requests]
        results = await self._rewards.score(requests, after_each)
        self._hung_batches += any(isinstance(result, RewardFailed) and result.excess for result in results)
        return results

    def _request(self, item: PromptItem, completion: JudgedCompletion) -> RewardRequest:
        about = {
            "item": item.item,
            "split": item.split,
            "finish_reason": completion.finish_reason,
            "truncated": completion.finish_reason == "length",
            "tokens": completion.tokens,
        }
        return RewardRequest(completion.text, item.answer, offered_info(item.question, item.metadata, None, **about))

    async def close(self) -> None:
        """Stop its worker processes."""
        await self._rewards.close()
