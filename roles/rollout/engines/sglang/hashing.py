"""The two functions by which an SGLang server names the content of a tensor: one for the CPU, one for CUDA.

Ours must give what the server's give, bit for bit; both are pure functions of bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_rt.roles.rollout.engines.sglang.options import Device

Words = NDArray[np.uint32]
SEED = 0x243F6A88
SEEDS = (SEED, ((SEED * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF)
POSITION = (0x27D4EB2D, 0x165667B1)
ROTATED = (15, 13)
TILE_WORDS = 8192
TILES_AT_A_TIME = 128


def content_hash(parts: Sequence[memoryview], padding: int, device: Device) -> str:
    """64 bits of the content of these bytes in a row and so many zeros, as 16 hexadecimal digits."""
    if device == "cpu":
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part)
        digest.update(bytes(padding))
        return digest.hexdigest()[:16]
    return f"{_of_words(_words(parts, padding)):016x}"


def _words(parts: Sequence[memoryview], padding: int) -> Words:
    size = sum(len(part) for part in parts) + padding
    data = np.zeros(-(-size // 4) * 4, np.uint8)
    at = 0
    for part in parts:
        data[at : at + len(part)] = np.frombuffer(part, np.uint8)
        at += len(part)
    return data.view(np.uint32)


def _of_words(words: Words) -> int:
    """Each tile of words has two 32-bit sums of hashes of (word, position); their sum is mixed once more."""
    if not len(words):
        return 0
    total, step = 0, TILE_WORDS * TILES_AT_A_TIME
    nbytes = np.uint32(len(words) * 4 & 0xFFFFFFFF)
    for start in range(0, len(words), step):
        some = words[start : start + step]
        index = np.arange(start, start + len(some), dtype=np.uint64).astype(np.uint32)
        tiles = np.arange(0, len(some), TILE_WORDS)
        high, low = (
            _mixed(np.add.reduceat(_mixed(some ^ _placed(index, which)), tiles, dtype=np.uint32) ^ nbytes)
            for which in (0, 1)
        )
        both = (high.astype(np.uint64) << np.uint64(32)) | low.astype(np.uint64)
        total += int(both.sum(dtype=np.uint64))
    return finished(total)


def _placed(index: Words, which: int) -> Words:
    turn = ROTATED[which]
    rotated = (index << np.uint32(turn)) | (index >> np.uint32(32 - turn))
    placed: Words = (index * np.uint32(POSITION[which]) + np.uint32(SEEDS[which])) ^ rotated
    return placed


def _mixed(x: Any) -> Any:
    """MurmurHash3's last step."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def finished(x: int) -> int:
    """SplitMix64's last step: a permutation of 64-bit numbers."""
    mask = (1 << 64) - 1
    x &= mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)
