"""Held-out episodes: before the first step, during the run, and with the last weights."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.agentic.episode import Played
from relax_rt.roles.agentic.errors import EnvironmentFailed, EnvironmentStuck, EpisodeLost, GenerationFailed
from relax_rt.roles.agentic.interface import Task
from relax_rt.roles.agentic.player import Player
from relax_rt.roles.agentic.stall_detection import Fruitless
from relax_rt.roles.agentic.tasks import Tasks
from relax_rt.roles.agentic.user_tasks import cancel_all
from relax_rt.roles.evaluation.sampling import SEED_DOMAIN
from relax_rt.roles.evaluation.scoring import Z95, difference, wilson
from relax_rt.roles.evaluation.sets import MAIN, VersionLineage, schedules
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import RelaxError

if TYPE_CHECKING:
    from relax_rt.config.schema import RunConfig
    from relax_rt.roles.evaluation.sampling import SampleSeed
    from relax_rt.roles.evaluation.sets import EvaluationSchedule

ATTEMPTS = 5
"""How often an episode is begun that was lost through no fault of its own."""
SILENT_S = 180.0
"""Beside twice an episode's time: if none ended within that, none will."""
LOST: Literal["lost"] = "lost"
"""In the place of an episode that could not be played, which says nothing about the policy."""
Found = Played | Literal["lost"] | None


class HeldOut:
    """Plays the held-out tasks when they are due. What was evaluated is read back from the run's metrics.

    Args:
        seed: of (task's number, sample, attempt). at_a_time: episodes.
    """

    def __init__(
        self, ctx: RoleContext, config: RunConfig, tasks: Tasks, player: Player, seed: SampleSeed, at_a_time: int
    ) -> None:
        from relax_rt.observe.metrics import read_metrics

        self._ctx, self._tasks, self._player, self._seed = ctx, tasks, player, seed
        self._success = player.settings.success
        self._silent_s = 2 * player.settings.episode_timeout_s + SILENT_S
        self._ended = 0
        """Attempts at episodes."""
        self._places = asyncio.Semaphore(at_a_time)
        records = (r for r in read_metrics(ctx.run_dir) if r.get("kind") == "evaluation")
        self.schedule: EvaluationSchedule = schedules(config, records)[MAIN]
        self._lineage = VersionLineage(ctx)

    async def arrived(self, record: VersionRecord) -> None:
        """These weights are the newest: only what was evaluated on the way to them counts."""
        self.schedule.keep_path(await self._lineage.path_to(record))

    def due(self, record: VersionRecord) -> str:
        """before, during or after, if these weights are to be evaluated; else empty."""
        return self.schedule.when(record.step, record.version)

    async def evaluate(self, record: VersionRecord, when: str) -> None:
        """Play them with the newest weights, which are these or newer ones, and record how it went.

        Raises:
            Fruitless: not one of them could be played. RelaxError: those that are left do not end.
        """
        spec, began = self.schedule.spec, time.monotonic()
        tasks = self._tasks.held_out(spec.count(when))
        about = {"set": MAIN, "when": when, "step": record.step, "version": record.version}
        about |= {"for_steps": self.schedule.due_steps(record.step)}
        self._ctx.event("evaluation_started", **about, items=len(tasks))
        found = await self._all([self._episode(task, sample) for task in tasks for sample in range(spec.samples)])
        if found and all(one == LOST for one in found):
            why = f"each was lost {ATTEMPTS} times; the events episode_lost and episode_not_generated say why"
            hint = "see the engines: `relax-rt why`; they are played again"
            raise Fruitless(f"{len(found)} held-out episodes, {when}", why=why, hint=hint)
        scores = scored(found, spec.samples, self._success, self.schedule.before)
        result = {"kind": "evaluation", **about, **scores, "seconds": round(time.monotonic() - began, 3)}
        self._ctx.metrics(result)
        told = {key: scores[key] for key in ("items", "exact", "reward", "turns", "failed", "lost")}
        self._ctx.event("evaluation_done", **about, **told, seconds=result["seconds"])
        self._ctx.log.info(f"held-out episodes, {when}", step=record.step, version=record.version, **told)
        self.schedule.record(result)

    async def _all(self, episodes: Sequence[Coroutine[Any, Any, Found]]) -> list[Found]:
        """Play all of them, as long as any ends now and then."""
        tasks = [asyncio.create_task(one) for one in episodes]
        pending = set(tasks)
        try:
            while pending:
                before = self._ended
                over, pending = await asyncio.wait(pending, timeout=self._silent_s, return_when=asyncio.FIRST_EXCEPTION)
                for task in over:
                    task.result()
                if pending and not over and self._ended == before:
                    what = f"{len(pending)} of {len(tasks)} held-out episodes"
                    why = f"none of them ended within {self._silent_s:g} s: they are {self._player.doing()}"
                    raise RelaxError(what, why=why, hint="see `relax-rt why`; they are played again")
            return [task.result() for task in tasks]
        finally:
            await cancel_all(pending)

    async def _episode(self, task: Task, sample: int) -> Found:
        """An episode; None: its environment failed."""
        spec = self.schedule.spec
        async with self._places:
            for attempt in range(ATTEMPTS):
                seed = self._seed(task.index, sample, attempt) | SEED_DOMAIN
                name = f"held-out {task.index}.{sample}"
                try:
                    return await self._player.play(name, task, seed, temperature=spec.temperature, fresh=True)
                except EpisodeLost as error:
                    self._ctx.event("episode_lost", episode=name, why=str(error))
                except GenerationFailed as error:
                    self._ctx.event("episode_not_generated", episode=name, item=task.item, why=str(error))
                    return LOST
                except (EnvironmentStuck, EnvironmentFailed) as error:
                    stuck = isinstance(error, EnvironmentStuck)
                    kind = "environment_stuck" if stuck else "environment_failed"
                    self._ctx.event(kind, episode=name, item=task.item, why=str(error))
                    return None
                finally:
                    self._ended += 1
        return LOST


def scored(found: Sequence[Found], samples: int, success: float, before: Mapping[str, Any] | None) -> dict[str, Any]:
    """Scores of held-out episodes, `samples` of each task, task by task; those that failed (None) count as reward 0,
    those that were lost not at all.

    Returns:
        items: tasks with an episode that counts; samples; exact: share of successes, with its 95% interval (Wilson) of
        as many draws as there are items; reward: mean, with the 95% interval of the mean over tasks; format: share that
        ended by themselves; turns and tokens: means; versions: first and last policy version sampled from; failed,
        lost: episodes; with `before` also gain of exact.
    """
    tasks = [_there(found[n : n + samples]) for n in range(0, len(found), samples)]
    by_task = [[0.0 if one is None else one.reward for one in task] for task in tasks if task]
    episodes = _there(found)
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
        "lost": len(found) - len(episodes),
    }
    if before is not None and "exact" in before:
        n = int(before["items"])
        gain_low, gain_high = difference((float(before["exact"]) * n, n), (share * items, items))
        result |= {"gain": share - float(before["exact"]), "gain_low": gain_low, "gain_high": gain_high}
    return result


def _there(found: Sequence[Found]) -> list[Played | None]:
    """Without those that were lost."""
    return [one for one in found if not isinstance(one, str)]
