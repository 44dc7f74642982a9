"""Score right answers against themselves: one that does not get 1 is misread by the reward.

`validate` and the start of a run check some rows, `validate --all` all of them. A user's function may score in any way,
so only rewards that define what a right completion looks like (`Reward.gold`) are checked.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_rt.config.job import AnswerReport, UnreadableAnswer
from relax_rt.roles.data.index import RowIndex
from relax_rt.roles.data.items import answer_text
from relax_rt.roles.data.settings import DataTable
from relax_rt.roles.rewards.compose import Rewards
from relax_rt.roles.rewards.dry_run import offered_info
from relax_rt.roles.rewards.library.functions import rewards
from relax_rt.roles.rewards.scoring import RewardRequest, Score
from relax_rt.roles.rewards.settings import ComponentTable, RewardTable

if TYPE_CHECKING:
    from relax_rt.roles.data.settings import DataTable

FIRST, DRAWN = 256, 256
"""Rows that are checked without --all: the first, and as many drawn from the others."""
SEED = 0
CHUNK = 2048
MAX_PRINTED, MAX_EXAMPLES = 10, 1000
MAX_ANSWER_CHARS = 1000
"""Characters of an answer in a report; what is cut ends in an ellipsis."""


def answer_reports(
    table: RewardTable | None, data: DataTable, config_dir: Path, *, every: bool = False
) -> list[AnswerReport]:
    """Run check_answers with the reward functions and the data of a run.

    Raises:
        RelaxError: a reward cannot be started, or the data cannot be read.
    """
    has_rows = data.path or data.task or data.sources
    if table is None or not has_rows or not _comparing(table):
        return []
    return check_answers(table, RowIndex.open(data, config_dir), config_dir, every=every)


def check_answers(table: RewardTable, rows: RowIndex, config_dir: Path, *, every: bool = False) -> list[AnswerReport]:
    """Score right answers of rows with each reward that compares with them.

    Args:
        every: all rows; else the first FIRST and DRAWN others.

    Raises:
        RelaxError: a reward cannot be started.
    """
    comparing = _comparing(table)
    if not comparing:
        return []
    chosen: Sequence[int] = range(len(rows))
    if not every:
        rest = range(FIRST, len(rows))
        drawn = random.Random(SEED).sample(rest, min(DRAWN, len(rest)))
        chosen = [*range(min(FIRST, len(rows))), *sorted(drawn)]
    return [asyncio.run(_check(table, one, right, rows, chosen, config_dir)) for one, right in comparing]


def _comparing(table: RewardTable) -> list[tuple[ComponentTable, Callable[[Any], str]]]:
    """Return the named rewards that define a right completion, each with its `Reward.gold`."""
    named = table.components or ([ComponentTable(name=table.function)] if table.function in rewards() else [])
    found = []
    for one in named:
        right = named_reward.gold if (named_reward := rewards().get(one.name or "")) is not None else None
        if right is not None and one.weight != 0:
            found.append((one, right))
    return found


async def _check(
    table: RewardTable,
    one: ComponentTable,
    right: Callable[[Any], str],
    rows: RowIndex,
    chosen: Sequence[int],
    config_dir: Path,
) -> AnswerReport:
    report = AnswerReport(str(one.label or one.name), len(rows))
    workers = max(1, min(4, len(os.sched_getaffinity(0)))) if table.workers else 0
    # With weight 1, so that the total of a right answer is 1 whatever the component counts in the run.
    component = one.model_copy(update={"weight": 1.0})
    alone = table.model_copy(update={"function": None, "components": [component], "judge": None, "workers": workers})
    scorer = Rewards(alone, config_dir)
    # Most data sets have few different answers.
    known: dict[str, str] = {}
    try:
        await scorer.start()
        for start in range(0, len(chosen), CHUNK):
            items = [rows.raw(number) for number in chosen[start : start + CHUNK]]
            fresh = {_key(item.answer): item.answer for item in items if _key(item.answer) not in known}
            requests = []
            for group, answer in enumerate(fresh.values()):
                text = right(answer)
                about = {"finish_reason": "stop", "truncated": False, "tokens": max(1, len(text)), "turns": []}
                info = offered_info("", {}, None, item="", split="train", **about)
                requests.append(RewardRequest(text, answer, info, group))
            for key, result in zip(fresh, await scorer.score(requests), strict=True):
                known[key] = _why(result)
            for item in items:
                report.checked += 1
                if why := known[_key(item.answer)]:
                    report.wrong += 1
                    if len(report.examples) < MAX_EXAMPLES:
                        shown = (
                            answer
                            if len(answer := answer_text(item.answer)) <= MAX_ANSWER_CHARS
                            else f"{answer[:MAX_ANSWER_CHARS]}…"
                        )
                        report.examples.append(UnreadableAnswer(item.where, shown, why))
            if len(known) > 1_000_000:
                known.clear()
    finally:
        await scorer.close()
    return report


def _key(answer: Any) -> str:
    return f"{type(answer).__name__} {answer!r}"


def _why(result: Any) -> str:
    """Return why a right answer did not get 1; empty if it did."""
    if isinstance(result, Score) and not result.unreadable:
        return "" if result.total == 1.0 else f"it gets {result.total:g}"
    reason = result.unreadable if isinstance(result, Score) else result.reason
    return str(reason).rpartition("cannot be read: ")[2] or str(reason)
