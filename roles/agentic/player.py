"""Plays episodes of a run's environment: makes what each needs and lets go of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from relax_rt.roles.agentic.episode import Generate, Limits, Played, Sampling, Talk, play
from relax_rt.roles.agentic.interface import Task
from relax_rt.roles.agentic.loading import Factory
from relax_rt.roles.agentic.pool import Broken, Pool
from relax_rt.roles.agentic.settings import EnvSettings
from relax_rt.roles.agentic.tokens import ChatTemplate, TokenLedger
from relax_rt.roles.rewards.loader import user_line
from relax_rt.roles.sections import SamplingTable

MOST_NAMED = 3
"""Things that are named where it is said what episodes are at."""


@dataclass
class Player:
    """See the module.

    Attributes:
        pool: of worker processes, where the environment's methods block.
        lag: see Talk. told: is called with the tokens of each reply.
    """

    factory: Factory
    pool: Pool | None
    chat: ChatTemplate
    generate: Generate
    settings: EnvSettings
    sampling: SamplingTable
    stop_ids: frozenset[int]
    lag: Callable[[int], int]
    told: Callable[[int], None]

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
        """Play one episode; see `episode.play` for what it raises.

        Args:
            name: of the episode, for people and for engines.
            temperature: unless it is the run's.
            fresh: sample all of it at the newest weights.
        """
        sampling = Sampling(
            seed=seed,
            temperature=self.sampling.temperature if temperature is None else temperature,
            stop_ids=self.stop_ids,
            session=name,
        )
        ledger = TokenLedger(
            self.chat,
            max_tokens=self.settings.max_tokens,
            drift=self.settings.drift,
            reasoning=self.settings.reasoning,
            session=name,
        )
        lag = (lambda oldest: 0) if fresh else self.lag
        talk = Talk(ledger, self.generate, self.limits, sampling, lag=lag, told=self.told)
        self._talks[name] = talk
        try:
            return await play(self.factory, await self._environment(name), task, talk, self.limits)
        finally:
            del self._talks[name]

    async def _environment(self, name: str) -> Any:
        if self.pool is not None:
            return await self.pool.environment(name)
        try:
            return self.factory.make()
        except Exception as error:
            raise Broken("a new environment", why=f"{type(error).__name__}: {error} at {user_line(error)}") from error

    @property
    def playing(self) -> int:
        """Episodes at work."""
        return len(self._talks)

    def doing(self) -> str:
        """What most of the episodes are at, in words."""
        counts = Counter(talk.doing.rstrip(" 0123456789") for talk in self._talks.values())
        return ", ".join(f"{number} x {what}" for what, number in counts.most_common(MOST_NAMED))
