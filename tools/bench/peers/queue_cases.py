"""The data of the queue benchmarks, the same for every system: needs numpy and nothing else of this project."""

from __future__ import annotations

import itertools
import mmap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

SEED = 20
TASK = "train"
KEPT = 5
"""The first batches are all kept until the last of them was read: every put of theirs goes to memory not used before,
as while a trainer keeps what no checkpoint covers yet. After them each batch is freed before the next."""
SINGLE_FLOATS = 2048
"""8 KiB: the sample of the rows that go one by one."""
BATCHED = 256
"""Samples in one call of the batched rows."""
UNDER_WAY = 64
"""Calls that are under way at once in the pipelined rows."""

Columns = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One batch of samples. A column is an array [samples, ...] or a list with one value a sample."""

    name: str
    samples: int
    columns: Columns
    nbytes: int

    def rows(self) -> list[dict[str, Any]]:
        """The batch sample by sample."""
        return [{name: values[i] for name, values in self.columns.items()} for i in range(self.samples)]


def tensors(name: str, samples: int, fields: int, width: int) -> Case:
    """Fixed columns [samples, width] of float32."""
    rng = np.random.default_rng(SEED)
    columns = {f"f{i}": rng.standard_normal((samples, width), dtype=np.float32) for i in range(fields)}
    return Case(name, samples, columns, samples * fields * width * 4)


def ragged(name: str, samples: int) -> Case:
    """Token ids and log-probabilities of log-normal length (median 512), a completion's text, a small record."""
    rng = np.random.default_rng(SEED)
    lengths = np.clip(rng.lognormal(np.log(512), 0.8, samples), 8, 8192).astype(int)
    columns: Columns = {
        "tokens": [rng.integers(0, 150_000, n, dtype=np.int32) for n in lengths],
        "logprobs": [-rng.exponential(1.0, n).astype(np.float32) for n in lengths],
        "text": ["token " * int(n // 2) for n in lengths],
        "record": [{"source": "arithmetic", "turns": int(n) % 7, "tags": ["a", "b"], "reward": 0.5} for n in lengths],
    }
    nbytes = int(sum(8 * n + 6 * (n // 2) for n in lengths))
    return Case(name, samples, columns, nbytes)


def small() -> Case:
    return tensors("2 MiB", 64, 4, 2048)


def large() -> Case:
    return tensors("151 MB", 512, 9, 8192)


def mixed() -> Case:
    return ragged("ragged + text", 256)


BATCHES = {"2 MiB": small, "151 MB": large, "ragged + text": mixed}


class PlainCopy:
    """memcpy of a case's arrays and texts into shared memory whose pages are there: nothing can put faster.

    The pages are touched by the first run, which does not count.
    """

    def __init__(self, case: Case) -> None:
        # A ragged column counts as one copy, not as one for each sample.
        self._sources = [_bytes_of(values) for values in case.columns.values()]
        total = sum(source.nbytes for source in self._sources)
        shared = np.frombuffer(mmap.mmap(-1, total), dtype=np.uint8)
        ends = list(itertools.accumulate(source.nbytes for source in self._sources))
        self._targets = [shared[end - s.nbytes : end] for end, s in zip(ends, self._sources, strict=True)]
        self.run()

    def run(self) -> float:
        """Seconds of one copy."""
        start = time.perf_counter()
        for target, source in zip(self._targets, self._sources, strict=True):
            target[:] = source
        return time.perf_counter() - start


def _bytes_of(values: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    if isinstance(values, np.ndarray):
        return values.reshape(-1).view(np.uint8)
    if isinstance(values[0], np.ndarray):
        return np.concatenate(values).view(np.uint8)
    return np.frombuffer("".join(map(str, values)).encode(), np.uint8)


def single(n: int = 1) -> np.ndarray[Any, np.dtype[np.float32]]:
    """n samples of 8 KiB, [n, 2048]."""
    return np.random.default_rng(SEED).standard_normal((n, SINGLE_FLOATS), dtype=np.float32)


def touch(value: Any) -> float:
    """Read the first and the last element of a value: what lies in memory must be there, what is encoded decoded."""
    if isinstance(value, str | bytes | dict):
        return float(len(value))
    first, last = value[(0,) * value.ndim], value[(-1,) * value.ndim]
    return float(first) + float(last)


def touch_all(values: Iterator[Any]) -> float:
    """touch() of each."""
    return sum(map(touch, values))


def chunks(n: int, size: int) -> Iterator[range]:
    """range(n) in ranges of `size`."""
    for start in itertools.count(0, size):
        if start >= n:
            return
        yield range(start, min(start + size, n))
