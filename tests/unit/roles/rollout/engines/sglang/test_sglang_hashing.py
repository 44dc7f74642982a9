"""The server's hash functions: bytes in a row count, however they are divided, and every bit of them."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from relax_rt.roles.rollout.engines.sglang.options import Device
from relax_rt.roles.rollout.engines.sglang.weights import POSITION, ROTATED, SEEDS, TILE_WORDS, content_hash

LOW = 0xFFFFFFFF


def mixed(x: int) -> int:
    x = (x ^ (x >> 16)) * 0x85EBCA6B & LOW
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & LOW
    return x ^ (x >> 16)


def word_by_word(data: bytes) -> str:
    """The CUDA function as its kernel goes: a word at a time, in Python's integers."""
    data += bytes(-len(data) % 4)
    words = [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)]
    total = 0
    for tile in range(0, len(words), TILE_WORDS):
        sums = [0, 0]
        for i in range(tile, min(tile + TILE_WORDS, len(words))):
            for k in (0, 1):
                rotated = (i << ROTATED[k] | i >> (32 - ROTATED[k])) & LOW
                sums[k] += mixed(words[i] ^ ((i * POSITION[k] + SEEDS[k]) & LOW) ^ rotated)
        high, low = (mixed((one & LOW) ^ (len(words) * 4 & LOW)) for one in sums)
        total += high << 32 | low
    total &= (1 << 64) - 1
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        total = (total ^ (total >> shift)) * factor & (1 << 64) - 1
    return f"{total ^ (total >> 31):016x}"


@pytest.mark.parametrize("size", [1, 4, 7, 4 * TILE_WORDS, 4 * TILE_WORDS + 2, 9 * TILE_WORDS + 40])
def test_each_function_is_what_it_is_said_to_be(size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    assert content_hash([memoryview(data)], 0, "cpu") == hashlib.sha256(data).hexdigest()[:16]
    assert content_hash([memoryview(data)], 0, "cuda") == word_by_word(data)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_parts_and_padding_are_bytes_in_a_row(device: Device) -> None:
    data = np.random.default_rng(1).bytes(5 * TILE_WORDS)
    view = memoryview(data + bytes(12))
    whole = content_hash([view], 0, device)
    assert content_hash([view[:1001], view[1001:-12]], 12, device) == whole
    for at in (0, 4 * TILE_WORDS, len(data) - 1):
        other = bytearray(view)
        other[at] ^= 1
        assert content_hash([memoryview(other)], 0, device) != whole
    swapped = bytes(view[4:8]) + bytes(view[:4]) + bytes(view[8:])
    assert content_hash([memoryview(swapped)], 0, device) != whole


def test_many_tiles_are_taken_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    data = memoryview(np.random.default_rng(2).bytes(4 * TILE_WORDS * 5 + 8))
    whole = content_hash([data], 0, "cuda")
    monkeypatch.setattr("relax_rt.roles.rollout.engines.sglang.weights.TILES_AT_A_TIME", 2)
    assert content_hash([data], 0, "cuda") == whole
