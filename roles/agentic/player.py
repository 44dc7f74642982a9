"""Plays episodes of a run's environment: makes what each needs and lets go of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from relax_rt.roles.agentic.episode import Generate, Limits, Played, Sampling, Talk, play_seats, turn_seed
from relax_rt.roles.agentic.errors import EnvironmentFailed
from relax_rt.roles.agentic.interface import Task
from relax_rt.roles.agentic.loading import Factory
from relax_rt.roles.agentic.settings import EnvSettings
from relax_rt.roles.agentic.tokens import ChatTemplate, TokenLedger
from relax_rt.roles.agentic.user_tasks import AbandonedTasks
from relax_rt.roles.agentic.workers import EnvironmentPool
from relax_rt.roles.base.user_code import user_line
from relax_rt.roles.rewards.scoring import Failed, Request, Score
from relax_rt.roles.rollout.engines.settings import SamplingTable

if TYPE_CHECKING:
    from relax_rt.roles.agentic.program_episodes import Programs
    from relax_rt.roles.agentic.replay_cache import Replies

MOST_NAMED = 3
"""Things that are named where it is said what episodes are at."""


@dataclass
class Player:
    """See the module.

    Attributes:
        pool: of worker processes, where the environment's methods block.
        lag: see Talk. told: is called with the tokens of each reply.
        routing: replies that are trained come with routing rows.
        rewards: scores an episode besides what its environment gives.
        programs: play, where environments are programs.
        strays: coroutines of environments that go on although they were cancelled.
    """

    factory: Factory
    pool: EnvironmentPool | None
    chat: ChatTemplate
    generate: Generate
    settings: EnvSettings
    sampling: SamplingTable
    stop_ids: frozenset[int]
    lag: Callable[[int], int]
    told: Callable[[int], None]
    routing: bool = False
    rewards: Callable[[Request], Awaitable[Score | Failed]] | None = None
    programs: Programs | None = None
    abandoned: AbandonedTasks = field(default_factory=AbandonedTasks)

    def __post_init__(self) -> None:
        self._talks: dict[str, Talk] = {}
        self.limits = Limits(
            max_turns=self.settings.max_turns,
            max_new_tokens=self.sampling.max_new_tokens,
            turn_timeout_s=self.settings.turn_timeout_s,
            episode_timeout_s=self.settings.episode_timeout_s,
        )

    async def play(
        self, name: str, task: Task, seed: int, *, temperature: float | None = None, fresh: bool = False
    ) -> Played:
        """Play one episode, or one game and tell of its first seat; see `play_seats`."""
        return (await self.play_seats(name, task, seed, temperature=temperature, fresh=fresh))[0]

    async def play_seats(
        self,
        name: str,
        task: Task,
        seed: int,
        *,
        temperature: float | None = None,
        fresh: bool = False,
        kept: Sequence[Replies] = (),
    ) -> list[Played]:
        """Play one game, and reward it; an episode for each seat. See `episode.play_seats` for what it raises.

        Args:
            name: of the episode, for people and for engines.
            seed: of its replies; those of other seats are drawn from it.
            kept: what was said in each seat when it was played before.
            temperature: unless it is the run's.
            fresh: sample all of it at the newest weights; it is not trained, and needs no routing rows.
        """
        lag = (lambda oldest: 0) if fresh else self.lag
        wanted = self.sampling.temperature if temperature is None else temperature
        routing = self.routing and not fresh
        if self.programs is not None:
            played = await self.programs.play(name, task, seed, temperature=wanted, fresh=fresh, routing=routing)
            return [played if self.rewards is None else await self._rewarded(task, played)]
        names = [name, *(f"{name}/{seat}" for seat in range(1, self.factory.seats))]
        talks = [
            self._talk(one, turn_seed(seed, -n) if n else seed, wanted, lag, routing=routing)
            for n, one in enumerate(names)
        ]
        for talk, replies in zip(talks, kept, strict=False):
            talk.kept = replies
        self._talks.update(zip(names, talks, strict=True))
        try:
            environment = await self._environment(name)
            found = await play_seats(self.factory, environment, task, talks, self.limits, self.abandoned, name)
            if self.rewards is None:
                return found
            for talk in talks:
                talk.doing = "is rewarded"
            return list(await asyncio.gather(*(self._rewarded(task, one) for one in found)))
        finally:
            for one in names:
                self._talks.pop(one, None)

    def _talk(self, session: str, seed: int, temperature: float, lag: Callable[[int], int], *, routing: bool) -> Talk:
        sampling = Sampling(
            seed=seed, temperature=temperature, stop_ids=self.stop_ids, session=session, routing=routing
        )
        ledger = TokenLedger(
            self.chat,
            max_tokens=self.settings.max_tokens,
            max_media_bytes=self.settings.media_kib << 10,
            drift=self.settings.drift,
            reasoning=self.settings.reasoning,
            session=session,
        )
        return Talk(ledger, self.generate, self.limits, sampling, lag=lag, told=self.told)

    async def _rewarded(self, task: Task, played: Played) -> Played:
        from relax_rt.roles.agentic.rewards import labels_of, request_of, rewarded

        assert self.rewards is not None
        score = await self.rewards(request_of(task, played, self.chat.tokenizer))
        return rewarded(played, score, labels_of(self.settings.rewards))

    async def _environment(self, name: str) -> Any:
        if self.pool is not None:
            return await self.pool.environment(name)
        try:
            return self.factory.make()
        except Exception as error:
            raise EnvironmentFailed(
                "a new environment", why=f"{type(error).__name__}: {error} at {user_line(error)}"
            ) from error

    @property
    def playing(self) -> int:
        """Episodes at work."""
        return len(self._talks) + (len(self.programs.doing) if self.programs is not None else 0)

    def doing(self) -> str:
        """What most of the episodes are at, in words."""
        counts = Counter(talk.doing.rstrip(" 0123456789") for talk in self._talks.values())
        counts.update(self.programs.doing.values() if self.programs is not None else ())
        return ", ".join(f"{number} x {what}" for what, number in counts.most_common(MOST_NAMED))
