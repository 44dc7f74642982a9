"""Which prompt comes when, and with which seed a sample is drawn: pure functions of the run's seed.

Both are keyed blake2b hashes, so that they are the same on every machine and with every version of every library, and
depend neither on the number of workers nor on restarts.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence


def epoch_order(seed: int, epoch: int, items: Sequence[str]) -> list[int]:
    """The order of one pass over the data: positions in `items`, sorted by blake2b-64(item id; seed, epoch).

    Args:
        items: item ids, without duplicates.
    """
    key = struct.pack("<QQ", seed, epoch)
    ranks = [
        hashlib.blake2b(item.encode(), key=key, digest_size=8, person=b"relax-order").digest() + item.encode()
        for item in items
    ]
    return sorted(range(len(items)), key=ranks.__getitem__)


def sample_seed(seed: int, prompt: int, member: int, attempt: int) -> int:
    """Seed of one sample, 63 bits: blake2b-64(prompt, member, attempt; run seed) without its top bit.

    Args:
        seed: the run's seed.
        prompt: index in the run's prompt order. member: place in the group. attempt: how often it was given out before.
    """
    message = struct.pack("<QQQ", prompt, member, attempt)
    digest = hashlib.blake2b(message, key=struct.pack("<Q", seed), digest_size=8, person=b"relax-sample").digest()
    return int.from_bytes(digest, "little") >> 1
