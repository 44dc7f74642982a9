"""Inject network faults: delay and partition this process's messages, for tests and for `relax-rt chaos`.

``impair(delay_s=0.2, for_s=5)`` makes every message to and from this process late, ``impair(drop=1.0,
peers=("queue/0",))`` cuts it off from one. The faults are those of TCP: messages stay in order; in
a partition they are held and arrive late, until a connection that was silent for too long is ended; a lost message ends
its connection. When off, a channel pays one check of `active` for each message.
"""

from __future__ import annotations

import asyncio
import collections
import random
import threading
import time
import weakref
from typing import NamedTuple, Protocol

from relax_rt.transport.rpc.errors import Refused

CUT_AFTER_S = 10.0
"""A connection that holds a message for longer than this is ended, as a heartbeat would end it."""
HELD_MAX_BYTES = 64 * 1024 * 1024
"""A connection that would hold more is ended."""
LOOK_S = 0.02

active = False
"""Faults are injected, or messages are still held from before. Read by channels, set here."""


class Impaired(Protocol):
    """What a channel offers so that its messages can be held."""

    peer: str
    who: str

    def pass_on(self, message: bytes, *, out: bool) -> None:
        """Send or deliver a message that was held."""

    def abort(self) -> None: ...


class _Rule(NamedTuple):
    delay_s: float
    drop: float
    peers: tuple[str, ...]
    until: float

    def concerns(self, channel: Impaired) -> bool:
        role = channel.who.partition("/")[0]
        return not self.peers or any(
            peer in channel.peer if "://" in peer else peer == channel.who or peer == role != "" for peer in self.peers
        )


_lock = threading.Lock()
_rules: tuple[_Rule, ...] = ()
_lines: weakref.WeakKeyDictionary[Impaired, tuple[_Line, _Line]] = weakref.WeakKeyDictionary()
_random = random.Random()


def impair(
    *,
    delay_s: float = 0.0,
    drop: float = 0.0,
    peers: tuple[str, ...] = (),
    for_s: float | None = None,
    seed: int | None = None,
) -> None:
    """Impair this process's messages, both ways, besides what is impaired already. Any thread may call it.

    Args:
        delay_s: how late each message is, seconds.
        drop: 1: a partition, nothing passes; between 0 and 1: how probably a message is lost, and with it its
            connection.
        peers: slots (``queue/0``), roles (``queue``) or addresses (``unix:///…``) that it concerns; none: all. A slot
            is known once its connection has greeted.
        for_s: how long, seconds; None: until `clear`.
        seed: of the draws for `drop`.

    Raises:
        Refused: a number is out of range.
    """
    global _rules, active
    if not (0 <= delay_s < float("inf") and 0 <= drop <= 1 and (for_s is None or for_s >= 0)):
        raise Refused(
            f"impair(delay_s={delay_s}, drop={drop}, for_s={for_s})", why="needs delay_s, for_s >= 0 and 0 <= drop <= 1"
        )
    until = float("inf") if for_s is None else time.monotonic() + for_s
    with _lock:
        if seed is not None:
            _random.seed(seed)
        _rules = (*_live(time.monotonic()), _Rule(delay_s, drop, tuple(peers), until))
        active = True


def clear() -> None:
    """Stop injecting faults; held messages pass, in order."""
    global _rules
    with _lock:
        _rules = ()


def hold(channel: Impaired, message: bytes, *, out: bool) -> bool:
    """Hold a message, to pass it on later or to drop it. Called by a channel while `active`, on its loop.

    False: the channel handles the message itself.
    """
    global _rules
    now = time.monotonic()
    with _lock:
        _rules = _live(now)
        line = _lines[channel][out] if channel in _lines else None
        rules = [rule for rule in _rules if rule.concerns(channel)]
        if not rules and (line is None or not line.held):
            _settle()
            return False
        lost = any(0 < rule.drop < 1 and _random.random() < rule.drop for rule in rules)
        if line is None:
            _lines[channel] = _Line(channel, out=False), _Line(channel, out=True)
            line = _lines[channel][out]
    if lost:
        channel.abort()
    else:
        line.put(message, now, max((rule.delay_s for rule in rules), default=0.0))
    return True


def ending(channel: Impaired, *, out: bool) -> None:
    """The channel is closing: messages on their way out (if the peer closed: in) still pass, except in a partition."""
    lines = _lines.get(channel)
    if lines is not None:
        passes = not _cut_off(channel, time.monotonic())
        for way, line in zip((False, True), lines, strict=True):
            line.end(send=passes and way == out)


def _live(now: float) -> tuple[_Rule, ...]:
    return tuple(rule for rule in _rules if rule.until > now)


def _cut_off(channel: Impaired, now: float) -> bool:
    return any(rule.drop >= 1 and rule.until > now and rule.concerns(channel) for rule in _rules)


def _settle() -> None:
    """Clear `active` once there are no rules and nothing is held. Call it under the lock."""
    global active
    if not _rules and not any(line.held for lines in _lines.values() for line in lines):
        active = False


class _Line:
    """Held messages of one direction of a connection."""

    def __init__(self, channel: Impaired, *, out: bool) -> None:
        self._channel = weakref.ref(channel)
        self._out = out
        self._waiting: collections.deque[tuple[float, float, bytes]] = collections.deque()
        self._bytes = 0
        self._passing = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def held(self) -> bool:
        """Whether a new message must queue behind held ones."""
        return bool(self._waiting) or self._passing

    def put(self, message: bytes, now: float, delay_s: float) -> None:
        self._waiting.append((now, now + delay_s, message))
        self._bytes += len(message)
        channel = self._channel()
        if self._bytes > HELD_MAX_BYTES and channel is not None:
            channel.abort()
        elif self._timer is None:
            self._look_again(now)

    def end(self, *, send: bool) -> None:
        """The connection ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting = [message for _, _, message in self._waiting]
        self._waiting.clear()
        self._bytes = 0
        channel = self._channel()
        if channel is not None and send:
            for message in waiting:
                channel.pass_on(message, out=self._out)

    def _pass(self) -> None:
        self._timer = None
        channel, now = self._channel(), time.monotonic()
        if channel is None:
            self._waiting.clear()
        elif _cut_off(channel, now):
            if self._waiting and now - self._waiting[0][0] > CUT_AFTER_S:
                channel.abort()
        else:
            self._passing = True
            try:
                while self._waiting and self._waiting[0][1] <= now:
                    _, _, message = self._waiting.popleft()
                    self._bytes -= len(message)
                    channel.pass_on(message, out=self._out)
            finally:
                self._passing = False
        if self._waiting:
            self._look_again(now)
        else:
            with _lock:
                _settle()

    def _look_again(self, now: float) -> None:
        # Also before the first is due, as rules change meanwhile.
        pause_s = min(LOOK_S, max(0.0, self._waiting[0][1] - now)) or LOOK_S / 10
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._pass)
