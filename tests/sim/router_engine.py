"""Engines of the simulated fleet: they make tokens that tell seed, position and version, and do as they are harmed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from relax_rt.roles.rollout import generation
from relax_rt.roles.rollout.engines.base import extend_spans
from relax_rt.roles.rollout.router.core import StartAttempt
from relax_rt.roles.rollout.router.interface import EngineReport, SequenceRequest, SequenceUpdate
from relax_rt.transport.queue.ledger.messages import VersionSpan

if TYPE_CHECKING:
    from router_world import World

STOP = 0
STEP_S, BEAT_S = 0.05, 0.5
ROOM = 6


def length(seed: int) -> int:
    """Of the sequence that belongs to a seed, if nothing bounds it."""
    drawn = int.from_bytes(hashlib.blake2b(b"length %d" % seed, digest_size=2).digest(), "big")
    return 3 + drawn % (8, 64, 150)[seed % 3]


def token(seed: int, position: int, version: int) -> int:
    """What these weights say there; STOP at the end."""
    if position == length(seed) - 1:
        return STOP
    return 1 + hashlib.blake2b(b"%d %d %d" % (seed, position, version), digest_size=1).digest()[0]


@dataclass
class Seq:
    """A sequence that an engine has."""

    order: SequenceRequest
    ends_at: float
    tokens: list[int]
    fresh: list[int] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    said_at: float = 0.0


class SimEngine:
    """An incarnation. Frozen, nothing of it moves; hung, it only says how it does."""

    def __init__(self, world: World, slot: str, epoch: int) -> None:
        self.world, self.slot, self.epoch = world, slot, epoch
        self.alive, self.stopping = True, False
        self.version = self.generated = 0
        self.frozen_until = self.hung_until = self.swapping_until = 0.0
        self.seqs: dict[tuple[int, int], Seq] = {}
        self.inbox: list[tuple[Callable[[SimEngine], None], Callable[[], None]]] = []
        self._steps()

    def report(self) -> EngineReport:
        left = sum(s.order.max_new_tokens - len(s.tokens) for s in self.seqs.values())
        swapping = self.world.kernel.now < self.swapping_until
        return EngineReport(
            epoch=self.epoch,
            version=self.version,
            generated=self.generated,
            running=len(self.seqs),
            outstanding_tokens=left,
            room=max(0, ROOM - len(self.seqs)),
            waiting_on="a swap" if swapping else "",
            stopping=self.stopping,
        )

    def read(self) -> None:
        """What was sent to it, in order, unless it stands still."""
        while self.inbox and self.alive and self.world.kernel.now >= self.frozen_until:
            self.inbox.pop(0)[0](self)

    def open(self, action: StartAttempt) -> None:
        key, order = (action.number, action.assignment.attempt), action.request
        away = ""
        if self.stopping:
            away = "stopping"
        elif not generation.admissible(self.version, order.allowed):
            away = "stale"
        elif len(self.seqs) >= ROOM:
            away = "full"
        if away:
            self.world.from_engine(self, key, SequenceUpdate(rejected=away, report=self.report()))  # type: ignore[arg-type]
            return
        self.world.checker.begun(self, action)
        self.seqs[key] = Seq(order, self.world.kernel.now + order.left_s, list(order.tokens))
        self._say(key)

    def close(self, key: tuple[int, int]) -> None:
        self.seqs.pop(key, None)

    def stop(self) -> None:
        """In order: what it has goes on elsewhere."""
        self.stopping = True
        for key in list(self.seqs):
            self._say(key, rejected="stopping")

    def _steps(self) -> None:
        if self.alive:
            self.world.kernel.after(STEP_S, self._steps)
            if self.world.kernel.now >= self.frozen_until:
                self._step()

    def _step(self) -> None:
        self.read()
        now = self.world.kernel.now
        moves = now >= max(self.hung_until, self.swapping_until)
        for key, seq in list(self.seqs.items()):
            if now >= seq.ends_at:
                del self.seqs[key]
                continue
            if moves:
                self.world.checker.works(self, key)
                self._one(seq)
            ended = bool(seq.tokens) and (seq.tokens[-1] == STOP or len(seq.tokens) >= seq.order.max_new_tokens)
            if ended or len(seq.fresh) >= seq.order.chunk_tokens or now - seq.said_at >= BEAT_S:
                self._say(key, ended=ended)

    def _one(self, seq: Seq) -> None:
        at = len(seq.tokens)
        seq.tokens.append(token(seq.order.seed, at, self.version))
        seq.fresh.append(seq.tokens[-1])
        extend_spans(seq.spans, VersionSpan(at, at + 1, self.version, self.version))
        self.generated += 1

    def _say(self, key: tuple[int, int], *, ended: bool = False, rejected: str = "") -> None:
        seq = self.seqs[key]
        fresh, spans, seq.fresh, seq.spans, seq.said_at = seq.fresh, seq.spans, [], [], self.world.kernel.now
        reason = ("stop" if seq.tokens[-1] == STOP else "length") if ended else ""
        if ended or rejected:
            del self.seqs[key]
        piece = SequenceUpdate(
            start=len(seq.tokens) - len(fresh),
            tokens=fresh,
            logprobs=[-float(t) for t in fresh],
            versions=spans,
            finish_reason=reason,
            rejected=rejected,  # type: ignore[arg-type]
            report=self.report(),
        )
        self.world.from_engine(self, key, piece)
