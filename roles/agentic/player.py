"""Play episodes of a run's environment, for the env role, evaluation and debugging: create, play, reward, close."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from relax_rt.roles.agentic.episode import (
    EpisodeChat,
    EpisodeLimits,
    Generate,
    PlayedEpisode,
    ReplySampling,
    play_game,
    turn_seed,
)
from relax_rt.roles.agentic.interface import EnvironmentFailed, Task
from relax_rt.roles.agentic.loading import EnvironmentFactory
from relax_rt.roles.agentic.program_episodes import ProgramPlayer
from relax_rt.roles.agentic.replay_cache import ReplayCache
from relax_rt.roles.agentic.rewards import add_rewards, labels_of, request_of
from relax_rt.roles.agentic.settings import EnvSettings
from relax_rt.roles.agentic.tokens.ledger import TokenLedger
from relax_rt.roles.agentic.tokens.template import ChatTemplate
from relax_rt.roles.agentic.user_tasks import AbandonedTasks
from relax_rt.roles.agentic.workers import EnvironmentPool
from relax_rt.roles.base.user_code import user_line
from relax_rt.roles.rewards.scoring import RewardFailed, RewardRequest, Score
from relax_rt.roles.rollout.engines.settings import SamplingTable

MAX_NAMED = 3
"""Different activities that `Player.activity` names."""


@dataclass
class Player:
    """Plays the episodes of one slot.

    Attributes:
        pool: of worker processes, if the environment runs in them.
        lag, on_tokens: see EpisodeChat.
        routing: record routing rows with replies that are trained.
        rewards: scores an episode in addition to its environment's reward.
        programs: plays the episodes if environments are programs.
        abandoned: coroutines of environments that keep running although they were cancelled.
    """

    factory: EnvironmentFactory
    pool: EnvironmentPool | None
    chat: ChatTemplate
    generate: Generate
    settings: EnvSettings
    sampling: SamplingTable
    stop_ids: frozenset[int]
    lag: Callable[[int], int]
    on_tokens: Callable[[int], None]
    routing: bool = False
    rewards: Callable[[RewardRequest], Awaitable[Score | RewardFailed]] | None = None
    programs: ProgramPlayer | None = None
    abandoned: AbandonedTasks = field(default_factory=AbandonedTasks)

    def __post_init__(self) -> None:
        self._chats: dict[str, EpisodeChat] = {}
        self.limits = EpisodeLimits(
            max_turns=self.settings.max_turns,
            max_new_tokens=self.sampling.max_new_tokens,
            turn_timeout_s=self.settings.turn_timeout_s,
            episode_timeout_s=self.settings.episode_timeout_s,
        )

    async def play(
        self, name: str, task: Task, seed: int, *, temperature: float | None = None, fresh: bool = False
    ) -> PlayedEpisode:
        """Play one episode, or one game and return that of its first seat; see `play_game`."""
        return (await self.play_game(name, task, seed, temperature=temperature, fresh=fresh))[0]

    async def play_game(
        self,
        name: str,
        task: Task,
        seed: int,
        *,
        temperature: float | None = None,
        fresh: bool = False,
        replays: Sequence[ReplayCache] = (),
    ) -> list[PlayedEpisode]:
        """Play and reward one game, an episode for each seat. See `episode.play_game` for what it raises.

        Args:
            name: of the episode, for people and for engines.
            seed: of its replies; those of other seats are derived from it.
            replays: for each seat, the replies of an earlier attempt.
            temperature: if not the run's.
            fresh: sample all of it at the newest weights; it is not trained, so it needs no routing rows.
        """
        lag = (lambda oldest: 0) if fresh else self.lag
        wanted = self.sampling.temperature if temperature is None else temperature
        routing = self.routing and not fresh
        if self.programs is not None:
            played = await self.programs.play(name, task, seed, temperature=wanted, fresh=fresh, routing=routing)
            return [played if self.rewards is None else await self._add_rewards(task, played)]
        names = [name, *(f"{name}/{seat}" for seat in range(1, self.factory.seats))]
        chats = []
        for seat, session in enumerate(names):
            ledger = TokenLedger(
                self.chat,
                max_tokens=self.settings.max_tokens,
                max_media_bytes=self.settings.media_kib << 10,
                drift=self.settings.drift,
                reasoning=self.settings.reasoning,
                session=session,
            )
            sampling = ReplySampling(
                seed=turn_seed(seed, -seat) if seat else seed,
                temperature=wanted,
                stop_ids=self.stop_ids,
                session=session,
                routing=routing,
            )
            chats.append(EpisodeChat(ledger, self.generate, self.limits, sampling, lag=lag, on_tokens=self.on_tokens))
        for chat, replies in zip(chats, replays, strict=False):
            chat.replay = replies
        self._chats.update(zip(names, chats, strict=True))
        try:
            if self.pool is not None:
                environment = await self.pool.environment(name)
            else:
                try:
                    environment = self.factory.make()
                except Exception as error:
                    why = f"{type(error).__name__}: {error} at {user_line(error)}"
                    raise EnvironmentFailed("a new environment", why=why) from error
            found = await play_game(self.factory, environment, task, chats, self.limits, self.abandoned, name)
            if self.rewards is None:
                return found
            for chat in chats:
                chat.activity = "is rewarded"
            return list(await asyncio.gather(*(self._add_rewards(task, one) for one in found)))
        finally:
            for one in names:
                self._chats.pop(one, None)

    async def _add_rewards(self, task: Task, played: PlayedEpisode) -> PlayedEpisode:
        assert self.rewards is not None
        score = await self.rewards(request_of(task, played, self.chat.tokenizer))
        return add_rewards(played, score, labels_of(self.settings.rewards))

    @property
    def playing(self) -> int:
        """Number of episodes being played."""
        return len(self._chats) + (len(self.programs.activity) if self.programs is not None else 0)

    def activity(self) -> str:
        """Describe what most of the episodes are doing."""
        counts = Counter(chat.activity.rstrip(" 0123456789") for chat in self._chats.values())
        counts.update(self.programs.activity.values() if self.programs is not None else ())
        return ", ".join(f"{number} x {what}" for what, number in counts.most_common(MAX_NAMED))
