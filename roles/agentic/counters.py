"""Counters of an env slot's metrics."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relax_rt.roles.agentic.episode import PlayedEpisode


@dataclass
class EpisodeCounters:
    """What an env slot has played since its last metrics record."""

    since: float = field(default_factory=time.monotonic)
    episodes: int = 0
    failed: int = 0
    stuck: int = 0
    over_limit: int = 0
    left: int = 0
    lost: int = 0
    turns: int = 0
    truncated: int = 0
    truncated_by: dict[str, int] = field(default_factory=dict)
    cut: int = 0
    tokens: int = 0
    branches: int = 0
    drift: int = 0
    dropped_tokens: int = 0
    reward: float = 0.0
    info: dict[str, float] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)

    def add(self, played: PlayedEpisode) -> None:
        """Count an episode."""
        self.episodes += 1
        self.turns += played.turns
        if played.truncated:
            self.truncated += 1
            self.truncated_by[played.truncated] = self.truncated_by.get(played.truncated, 0) + 1
        self.cut += played.cut
        self.tokens += sum(len(branch.tokens) for branch in played.episode.branches)
        self.branches += len(played.episode.branches)
        self.drift += played.episode.counts.drift
        self.dropped_tokens += played.episode.counts.dropped_tokens
        self.left += played.left
        self.reward += played.reward
        for totals, values in ((self.info, played.info), (self.parts, played.parts)):
            for name, value in values.items():
                totals[name] = totals.get(name, 0.0) + float(value)

    def record(self) -> dict[str, object]:
        """Return counts, and means over episodes of turns, tokens, reward and info."""
        n = max(1, self.episodes)
        return {
            **{k: getattr(self, k) for k in ("episodes", "failed", "stuck", "over_limit", "lost")},
            **{k: getattr(self, k) for k in ("truncated", "cut", "left", "branches", "drift", "dropped_tokens")},
            **{k: getattr(self, k) / n for k in ("turns", "tokens", "reward")},
            "truncated_by": self.truncated_by,
            "info": {name: value / n for name, value in self.info.items()},
            "rewards": {name: value / n for name, value in self.parts.items()},
            "seconds": time.monotonic() - self.since,
        }
