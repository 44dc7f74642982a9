"""Which prompt comes when, and with which seed a sample is drawn: pure functions of the run's seed.

All are keyed blake2b hashes, so that they are the same on every machine and with every version of every library, and
depend neither on the number of workers nor on restarts.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

CHUNK = 65_536
BLOCK = 64
"""Positions per block of the mixture."""


def epoch_order(seed: int, epoch: int, items: Sequence[str]) -> NDArray[np.intp]:
    """Return the order of one pass over the data: positions in `items`, sorted by blake2b-64(item id; seed, epoch).

    Args:
        items: item ids. Where two are equal (duplicates that were kept), they stay in their order.
    """
    # Hashing takes 1 µs per item. It runs in chunks: a Python object for each of millions of hashes would be most of
    # the memory of a role.
    hasher = hashlib.blake2b(key=struct.pack("<QQ", seed, epoch), digest_size=8, person=b"relax-order")
    ranks = np.empty(len(items), np.uint64)
    for start in range(0, len(items), CHUNK):
        digests = []
        for item in items[start : start + CHUNK]:
            one = hasher.copy()
            one.update(item.encode())
            digests.append(one.digest())
        ranks[start : start + CHUNK] = np.frombuffer(b"".join(digests), ">u8")
    return np.argsort(ranks, kind="stable")


class SourceMixture:
    """Assigns positions of the run's order to sources by weight.

    In each block of BLOCK positions a source of weight w gets w · BLOCK, rounded up or down at random (systematic
    sampling), so the shares are exact in expectation and within one per block.

    Args:
        weights: one per source; they need not sum to 1.
    """

    def __init__(self, seed: int, weights: Sequence[float]) -> None:
        self._seed = seed
        self._bounds = np.cumsum(np.array(weights, np.float64)) / sum(weights)
        self._block = lru_cache(maxsize=64)(self._deal)
        # Cumulative positions per source before each block, computed on demand.
        self._before = np.zeros((1, len(weights)), np.int64)

    def place(self, index: int) -> tuple[int, int]:
        """Return the source at position `index`, and how many earlier positions that source has."""
        block, at = divmod(index, BLOCK)
        while len(self._before) <= block:
            known = len(self._before) - 1
            dealt = [np.bincount(self._deal(b), minlength=len(self._bounds)) for b in range(known, known + 256)]
            self._before = np.vstack((self._before, self._before[-1] + np.cumsum(dealt, axis=0)))
        dealt_here = self._block(block)
        source = int(dealt_here[at])
        return source, int(self._before[block][source] + np.count_nonzero(dealt_here[:at] == source))

    def _deal(self, block: int) -> NDArray[np.intp]:
        """Return the sources of a block's positions: systematic sampling at one random offset, then shuffled."""
        digest = hashlib.blake2b(struct.pack("<Q", block), key=struct.pack("<Q", self._seed), person=b"relax-mixture")
        draws = np.frombuffer(digest.digest(), "<u8")
        offset = float(draws[0] >> np.uint64(11)) / 2.0**53
        sources = np.searchsorted(self._bounds, (np.arange(BLOCK) + offset) / BLOCK, side="right")
        sources = np.minimum(sources, len(self._bounds) - 1)
        keys = np.frombuffer(hashlib.shake_128(digest.digest()).digest(8 * BLOCK), "<u8")
        return sources[np.argsort(keys, kind="stable")]


def substitute(item: int, attempt: int, count: int) -> int:
    """Return index below `count` that replaces an unusable item: blake2b-64(item, attempt) modulo `count`."""
    digest = hashlib.blake2b(struct.pack("<QQ", item, attempt), digest_size=8, person=b"relax-instead").digest()
    return int.from_bytes(digest, "little") % count


def sample_seed(seed: int, prompt: int, member: int, attempt: int) -> int:
    """Return seed of one sample, 63 bits: blake2b-64(prompt, member, attempt; run seed) without its top bit.

    Args:
        seed: the run's seed.
        prompt: index in the run's prompt order. member: place in the group. attempt: how often it was given out before.
    """
    message = struct.pack("<QQQ", prompt, member, attempt)
    digest = hashlib.blake2b(message, key=struct.pack("<Q", seed), digest_size=8, person=b"relax-sample").digest()
    return int.from_bytes(digest, "little") >> 1
