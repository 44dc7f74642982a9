"""A cache of the replies of unfinished episodes, in files, for playing an episode again.

An episode that lost its environment or its env role is played again from its beginning. If it asks as before, in the
same turn and behind the very same tokens, it gets the reply that was sampled then; from the first different prompt on,
everything is sampled anew. So a token is reused exactly where it follows what it was sampled on, whatever the
environment does, and long episodes are not lost more often than short ones.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from relax_rt.roles.data.media.images import ImageSpan, image_digest
from relax_rt.roles.rollout.router.core import Outcome

FOLDER = "episodes"
LENGTH = struct.Struct("<I")
SWEEP_EVERY = 64
"""Lookups between two removals of expired files."""


class CachedReply(msgspec.Struct, frozen=True, array_like=True):
    """A cached reply: its turn, a digest of its prompt, and what was sampled."""

    turn: int
    prompt: int
    outcome: Outcome


class ReplayCache:
    """The replies of one episode, in a file that outlives any process. Its calls block for one page write.

    Attributes:
        replayed: replies that were used again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found = {(one.turn, one.prompt): one.outcome for one in _read(path)}
        self.replayed = 0

    def oldest(self) -> int:
        """Return the oldest policy version among them; 0 if there are none."""
        spans = (span for outcome in self._found.values() for span in outcome.versions)
        return min((span.kv_version for span in spans), default=0)

    def take(
        self, turn: int, prompt: Sequence[int], rows: int | None = None, media: Sequence[ImageSpan] = ()
    ) -> Outcome | None:
        """Return and remove the reply of this turn to this prompt, if there is one.

        Args:
            rows: positions at the prompt's beginning whose routing rows are there; a reply without those of all other
                positions is not used. None: routing rows are not needed.
        """
        found = self._found.pop((turn, _digest(prompt, media)), None)
        if found is None:
            return None
        if rows is not None:
            # Each token must have a routing row, and so must the positions before the prompt's last.
            width = len(found.routing) // max(1, len(found.tokens))
            if not width or len(found.prompt_routing) < (len(prompt) - 1 - rows) * width:
                return None
        self.replayed += 1
        return found

    def add(self, turn: int, prompt: Sequence[int], outcome: Outcome, media: Sequence[ImageSpan] = ()) -> None:
        """Store a reply. If the disk is full, it just cannot be used again."""
        body = msgspec.msgpack.encode(CachedReply(turn, _digest(prompt, media), outcome))
        with suppress(OSError), self._path.open("ab") as file:
            file.write(LENGTH.pack(len(body)) + body)

    def clear(self) -> None:
        """Remove all replies: the episode is over, or must be sampled anew."""
        self._found = {}
        self._path.unlink(missing_ok=True)


class ReplayStore:
    """The replies of all unfinished episodes of a run on this machine.

    Args:
        seats: of a game, whose members go together.
        lifetime_s: after that no episode is resumed.
        is_too_stale: whether replies of a policy version would be too stale to be trained.
    """

    def __init__(self, run_dir: Path, seats: int, lifetime_s: float, is_too_stale: Callable[[int], bool]) -> None:
        self._folder, self._seats = run_dir / FOLDER, seats
        self._lifetime_s, self._is_too_stale = lifetime_s, is_too_stale
        self._lookups = 0
        self._folder.mkdir(exist_ok=True)

    def caches_of(self, prompt: int, member: int) -> list[ReplayCache]:
        """Return the caches of each seat of a member's game, in order."""
        if self._lookups % SWEEP_EVERY == 0:
            # Remove expired files: a group may end without a message to this slot.
            before = time.time() - self._lifetime_s
            for path in self._folder.iterdir():
                with suppress(OSError):
                    if path.stat().st_mtime < before:
                        path.unlink()
        self._lookups += 1
        first = member // self._seats * self._seats
        found = [ReplayCache(self._path(prompt, first + seat)) for seat in range(self._seats)]
        if any((version := one.oldest()) and self._is_too_stale(version) for one in found):
            clear_all(found)
        return found

    def clear(self, prompt: int, member: int) -> None:
        """Remove the replies of a finished member."""
        self._path(prompt, member).unlink(missing_ok=True)

    def _path(self, prompt: int, member: int) -> Path:
        return self._folder / f"{prompt}.{member}"


def clear_all(caches: Sequence[ReplayCache]) -> None:
    """Remove the replies of a game."""
    for one in caches:
        one.clear()


def _digest(prompt: Sequence[int], media: Sequence[ImageSpan]) -> int:
    """Return xxh3-64 of token ids, as int32, and of the images among them."""
    images = "".join(image_digest(one.data) for one in media)
    return xxhash.xxh3_64_intdigest(np.array(prompt, np.int32).tobytes() + images.encode())


def _read(path: Path) -> list[CachedReply]:
    """Return the replies of a file; the last one may be incomplete."""
    try:
        data = path.read_bytes()
    except OSError:
        return []
    found: list[CachedReply] = []
    at = 0
    while at + LENGTH.size <= len(data):
        (length,) = LENGTH.unpack_from(data, at)
        at += LENGTH.size + length
        try:
            found.append(msgspec.msgpack.decode(data[at - length : at], type=CachedReply))
        except msgspec.DecodeError:
            break
    return found
