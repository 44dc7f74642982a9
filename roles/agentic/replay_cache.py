"""Replies of episodes that are not over yet, for whoever plays them again.

An episode that lost its environment or its env role is played again from its beginning. Where it asks as it did before,
in the same turn and behind the very same tokens, it gets the reply that was sampled then; from the first prompt on that
differs, everything is sampled anew. So a token is kept exactly where it stands behind what it was sampled on, whatever
the environment does, and an episode is lost no more often for being long.
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

from relax_rt.roles.data.media.pictures import Shown, digest_of
from relax_rt.roles.rollout.router.core import Outcome

FOLDER = "episodes"
LENGTH = struct.Struct("<I")
FEW = 64
"""So many lists are asked for between two looks for those that nobody will."""


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """A reply: its turn, a digest of the tokens before it, and what was sampled."""

    turn: int
    prompt: int
    outcome: Outcome


class Replies:
    """Those of one episode, in a file of its own, which outlives any process. All of it blocks for as long as a page of
    memory is written.

    Attributes:
        used: replies that were given once more.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found = {(one.turn, one.prompt): one.outcome for one in _read(path)}
        self.used = 0

    def oldest(self) -> int:
        """The oldest policy version among them; 0: there are none."""
        spans = (span for outcome in self._found.values() for span in outcome.versions)
        return min((span.kv_version for span in spans), default=0)

    def take(
        self, turn: int, prompt: Sequence[int], rows: int | None = None, media: Sequence[Shown] = ()
    ) -> Outcome | None:
        """What was said in this turn behind these tokens and pictures, once.

        Args:
            rows: positions at the prompt's beginning that have their routing rows; a reply without those of all others
                is none. None: rows are not wanted.
        """
        found = self._found.pop((turn, _digest(prompt, media)), None)
        if found is None or (rows is not None and not _has_rows(found, len(prompt) - 1 - rows)):
            return None
        self.used += 1
        return found

    def add(self, turn: int, prompt: Sequence[int], outcome: Outcome, media: Sequence[Shown] = ()) -> None:
        """A reply was sampled. A full disk costs no more than what could have been kept."""
        body = msgspec.msgpack.encode(Kept(turn, _digest(prompt, media), outcome))
        with suppress(OSError), self._path.open("ab") as file:
            file.write(LENGTH.pack(len(body)) + body)

    def forget(self) -> None:
        """The episode is over, or is not to be gone on with."""
        self._found = {}
        self._path.unlink(missing_ok=True)


class Store:
    """The replies of all unfinished episodes of a run on this machine.

    Args:
        seats: of a game, whose members go together.
        lasts_s: after that nobody goes on with an episode.
        too_old: whether replies of a policy version would be too stale to be trained.
    """

    def __init__(self, run_dir: Path, seats: int, lasts_s: float, too_old: Callable[[int], bool]) -> None:
        self._folder, self._seats, self._lasts_s, self._too_old = run_dir / FOLDER, seats, lasts_s, too_old
        self._asked = 0
        self._folder.mkdir(exist_ok=True)

    def of(self, prompt: int, member: int) -> list[Replies]:
        """Those of each seat of the game that a member plays, in order."""
        if self._asked % FEW == 0:
            self._sweep()
        self._asked += 1
        first = member // self._seats * self._seats
        found = [Replies(self._path(prompt, first + seat)) for seat in range(self._seats)]
        if any((version := one.oldest()) and self._too_old(version) for one in found):
            forget(found)
        return found

    def forget(self, prompt: int, member: int) -> None:
        """A member is over."""
        self._path(prompt, member).unlink(missing_ok=True)

    def _path(self, prompt: int, member: int) -> Path:
        return self._folder / f"{prompt}.{member}"

    def _sweep(self) -> None:
        """Groups may end without a word: what nobody added to for so long is of one that did."""
        before = time.time() - self._lasts_s
        for path in self._folder.iterdir():
            with suppress(OSError):
                if path.stat().st_mtime < before:
                    path.unlink()


def forget(kept: Sequence[Replies]) -> None:
    """The replies of a game are not to be given again."""
    for one in kept:
        one.forget()


def _has_rows(outcome: Outcome, positions: int) -> bool:
    """Whether there is a routing row for each token, and one for each of so many positions before the prompt's last."""
    width = len(outcome.routing) // max(1, len(outcome.tokens))
    return width > 0 and len(outcome.prompt_routing) >= positions * width


def _digest(prompt: Sequence[int], media: Sequence[Shown]) -> int:
    """xxh3-64 of token ids, as int32, and of the pictures among them."""
    pictures = "".join(digest_of(one.data) for one in media)
    return xxhash.xxh3_64_intdigest(np.array(prompt, np.int32).tobytes() + pictures.encode())


def _read(path: Path) -> list[Kept]:
    """What a file has; the last one may be torn."""
    try:
        data = path.read_bytes()
    except OSError:
        return []
    found: list[Kept] = []
    at = 0
    while at + LENGTH.size <= len(data):
        (length,) = LENGTH.unpack_from(data, at)
        at += LENGTH.size + length
        try:
            found.append(msgspec.msgpack.decode(data[at - length : at], type=Kept))
        except msgspec.DecodeError:
            break
    return found
