"""The narrow interface between a rollout (or evaluator) and the engine that samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from relax_rt.transport.queue.api import VersionSpan


class GroupRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Sample len(seeds) completions of one prompt.

    Attributes:
        id: the caller's name of the request, unique while it is in the engine.
        prompt: token ids.
        seeds: one 64-bit seed a member; a member's tokens depend on its seed and the weights, not on its neighbours.
        temperature: 0 is greedy (then log-probabilities are those at temperature 1).
        stop_ids: sampling one of these ends the completion; the token is part of it.
    """

    id: int
    prompt: tuple[int, ...]
    seeds: tuple[int, ...]
    temperature: float
    max_new_tokens: int
    stop_ids: frozenset[int]


class Completion(msgspec.Struct, frozen=True):
    """One finished member.

    Attributes:
        tokens: sampled ids, the stop token included.
        logprobs: behaviour log-probability of each token.
        versions: policy version of each token, run-length coded over positions in `tokens`.
        finish_reason: stop, length or abort.
    """

    request: int
    member: int
    tokens: list[int]
    logprobs: list[float]
    versions: list[VersionSpan]
    finish_reason: str


class EngineLoad(msgspec.Struct, frozen=True):
    """What an engine does right now; tokens and swaps count since it was created."""

    version: int
    running: int
    waiting: int
    tokens_generated: int
    swaps: int


OnCompletion = Callable[[Completion], object]


class Engine(Protocol):
    """Continuous batching with per-token log-probabilities and versions.

    `submit`, `abort` and `swap` are thread-safe and return at once; completions arrive on the engine's thread.
    """

    def start(self, on_completion: OnCompletion, on_failure: Callable[[BaseException], None]) -> None:
        """Begin to work in a thread of the engine's own."""

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Queue requests.

        Raises:
            Refused: a prompt with its completion does not fit the model's context, or the queue is full.
        """

    def abort(self, request: int) -> None:
        """End a request's members where they are; each completes with finish_reason abort."""

    def load(self) -> EngineLoad:
        """What it does now."""

    def close(self, timeout_s: float) -> None:
        """Stop the thread at the next token boundary."""
