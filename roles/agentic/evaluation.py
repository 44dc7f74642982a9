"""Evaluate the policy on held-out episodes: before the first step, during the run, and with the last weights."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Literal

from relax_rt.config.schema import RunConfig
from relax_rt.interfaces.role import RoleContext
from relax_rt.observe.metrics import read_metrics
from relax_rt.roles.agentic.episode import PlayedEpisode
from relax_rt.roles.agentic.interface import EnvironmentFailed, EnvironmentStuck, EpisodeLost, GenerationFailed, Task
from relax_rt.roles.agentic.player import Player
from relax_rt.roles.agentic.stall_detection import EpisodesStalled
from relax_rt.roles.agentic.tasks import Tasks
from relax_rt.roles.agentic.user_tasks import cancel_all
from relax_rt.roles.evaluation.sampling import SEED_DOMAIN, SampleSeed
from relax_rt.roles.evaluation.scoring import Z95, difference, wilson
from relax_rt.roles.evaluation.sets import MAIN, EvaluationSchedule, VersionLineage, schedules
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import RelaxError

MAX_ATTEMPTS = 5
"""Attempts at an episode that is lost through no fault of its own."""
EXTRA_SILENCE_S = 180.0
"""On top of twice an episode's time limit: if no episode ended within that, none will."""
NOT_PLAYED: Literal["lost"] = "lost"
"""Stands for an episode that could not be played, which says nothing about the policy."""
EpisodeResult = PlayedEpisode | Literal["lost"] | None


class EpisodeEvaluation:
    """Plays the held-out tasks when they are due. Earlier evaluations are read back from the run's metrics.

    Args:
        seed: of (task's number, sample, attempt). at_a_time: episodes.
    """

    def __init__(
        self, ctx: RoleContext, config: RunConfig, tasks: Tasks, player: Player, seed: SampleSeed, max_in_flight: int
    ) -> None:
        self._ctx, self._tasks, self._player, self._seed = ctx, tasks, player, seed
        self._success = player.settings.success
        self._max_silence_s = 2 * player.settings.episode_timeout_s + EXTRA_SILENCE_S
        self._finished = 0
        """Attempts that have ended."""
        self._slots = asyncio.Semaphore(max_in_flight)
        records = (r for r in read_metrics(ctx.run_dir) if r.get("kind") == "evaluation")
        self.schedule: EvaluationSchedule = schedules(config, records)[MAIN]
        self._lineage = VersionLineage(ctx)

    async def on_version(self, record: VersionRecord) -> None:
        """Take note of new weights: only evaluations on the path to them count."""
        self.schedule.keep_path(await self._lineage.path_to(record))

    def due(self, record: VersionRecord) -> str:
        """Return before, during or after, if these weights must be evaluated; else empty."""
        return self.schedule.when(record.step, record.version)

    async def evaluate(self, record: VersionRecord, when: str) -> None:
        """Play the held-out tasks with these weights or newer ones, and record the scores.

        Raises:
            Fruitless: not one of them could be played. RelaxError: those that are left do not end.
        """
        spec, began = self.schedule.spec, time.monotonic()
        tasks = self._tasks.held_out(spec.count(when))
        about = {"set": MAIN, "when": when, "step": record.step, "version": record.version}
        about |= {"for_steps": self.schedule.due_steps(record.step)}
        self._ctx.event("evaluation_started", **about, items=len(tasks))
        results = await self._play_all(
            [self._episode(task, sample) for task in tasks for sample in range(spec.samples)]
        )
        if results and all(one == NOT_PLAYED for one in results):
            why = f"each was lost {MAX_ATTEMPTS} times; the events episode_lost and episode_not_generated say why"
            hint = "see the engines: `relax-rt why`; they are played again"
            raise EpisodesStalled(f"{len(results)} held-out episodes, {when}", why=why, hint=hint)
        scores = score_episodes(results, spec.samples, self._success, self.schedule.before)
        result = {"kind": "evaluation", **about, **scores, "seconds": round(time.monotonic() - began, 3)}
        self._ctx.metrics(result)
        summary = {key: scores[key] for key in ("items", "exact", "reward", "turns", "failed", "lost")}
        self._ctx.event("evaluation_done", **about, **summary, seconds=result["seconds"])
        self._ctx.log.info(f"held-out episodes, {when}", step=record.step, version=record.version, **summary)
        self.schedule.record(result)

    async def _play_all(self, episodes: Sequence[Coroutine[Any, Any, EpisodeResult]]) -> list[EpisodeResult]:
        """Play all episodes, as long as some of them end."""
        tasks = [asyncio.create_task(one) for one in episodes]
        pending = set(tasks)
        try:
            while pending:
                before = self._finished
                over, pending = await asyncio.wait(
                    pending, timeout=self._max_silence_s, return_when=asyncio.FIRST_EXCEPTION
                )
                for task in over:
                    task.result()
                if pending and not over and self._finished == before:
                    what = f"{len(pending)} of {len(tasks)} held-out episodes"
                    why = f"none of them ended within {self._max_silence_s:g} s: they are {self._player.activity()}"
                    raise RelaxError(what, why=why, hint="see `relax-rt why`; they are played again")
            return [task.result() for task in tasks]
        finally:
            await cancel_all(pending)

    async def _episode(self, task: Task, sample: int) -> EpisodeResult:
        """Play an episode; None: its environment failed."""
        spec = self.schedule.spec
        async with self._slots:
            for attempt in range(MAX_ATTEMPTS):
                seed = self._seed(task.index, sample, attempt) | SEED_DOMAIN
                name = f"held-out {task.index}.{sample}"
                try:
                    return await self._player.play(name, task, seed, temperature=spec.temperature, fresh=True)
                except EpisodeLost as error:
                    self._ctx.event("episode_lost", episode=name, why=str(error))
                except GenerationFailed as error:
                    self._ctx.event("episode_not_generated", episode=name, item=task.item, why=str(error))
                    return NOT_PLAYED
                except (EnvironmentStuck, EnvironmentFailed) as error:
                    stuck = isinstance(error, EnvironmentStuck)
                    kind = "environment_stuck" if stuck else "environment_failed"
                    self._ctx.event(kind, episode=name, item=task.item, why=str(error))
                    return None
                finally:
                    self._finished += 1
        return NOT_PLAYED


def score_episodes(
    results: Sequence[EpisodeResult], samples: int, success: float, before: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Score held-out episodes, `samples` of each task, task by task; those that failed (None) count as reward 0,
    those that were lost not at all.

    Returns:
        items: tasks with an episode that counts; samples; exact: share of successes, with its 95% interval (Wilson) of
        as many draws as there are items; reward: mean, with the 95% interval of the mean over tasks; format: share that
        ended by themselves; turns and tokens: means; versions: first and last policy version sampled from; failed,
        lost: episodes; with `before` also gain of exact.
    """
    tasks = [_counted(results[n : n + samples]) for n in range(0, len(results), samples)]
    by_task = [[0.0 if one is None else one.reward for one in task] for task in tasks if task]
    episodes = _counted(results)
    wins = sum(one is not None and one.reward > success for one in episodes)
    share, items = wins / len(episodes) if episodes else 0.0, len(by_task)
    low, high = wilson(share * items, items)
    means = [statistics.fmean(rewards) for rewards in by_task]
    spread = Z95 * statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else 0.0
    reward = statistics.fmean(reward for rewards in by_task for reward in rewards) if by_task else 0.0
    played = [one for one in episodes if one is not None]
    branches = [branch for one in played for branch in one.episode.branches]
    versions = sorted({span.version for branch in branches for span in branch.versions})
    count = max(1, len(played))
    result: dict[str, Any] = {
        "items": items,
        "samples": samples,
        "exact": share,
        "exact_low": low,
        "exact_high": high,
        "reward": reward,
        "reward_low": reward - spread,
        "reward_high": reward + spread,
        "format": sum(not one.truncated for one in played) / max(1, len(episodes)),
        "turns": sum(one.turns for one in played) / count,
        "tokens": sum(len(branch.tokens) for branch in branches) / count,
        "versions": [versions[0], versions[-1]] if versions else [],
        "failed": len(episodes) - len(played),
        "lost": len(results) - len(episodes),
    }
    if before is not None and "exact" in before:
        n = int(before["items"])
        gain_low, gain_high = difference((float(before["exact"]) * n, n), (share * items, items))
        result |= {"gain": share - float(before["exact"]), "gain_low": gain_low, "gain_high": gain_high}
    return result


def _counted(results: Sequence[EpisodeResult]) -> list[PlayedEpisode | None]:
    """Return the episodes that were played or failed."""
    return [one for one in results if not isinstance(one, str)]
