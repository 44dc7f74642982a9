"""What the processes of queue_chaos.py write down, each for itself, and how it is read again.

A record is one line of JSON, written by one write() to a file that only its process appends to: whoever is killed
loses at most the line that it had not yet finished. Times are CLOCK_MONOTONIC, the same for all processes.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from relax_rt.transport.queue.ledger.messages import SampleKey, VersionSpan

FIELDS = ("tokens", "logprobs", "image", "text")
"""What a producer puts."""


class Joined(msgspec.Struct, tag="joined"):
    """The queue gave the process its epoch."""

    at: float
    slot: str
    epoch: int
    pid: int


class Made(msgspec.Struct, array_like=True):
    key: SampleKey
    digest: str
    versions: list[VersionSpan]


class Making(msgspec.Struct, tag="making"):
    """A producer is about to put these samples."""

    at: float
    samples: list[Made]


class Put(msgspec.Struct, tag="put"):
    """A put was acknowledged; it began at `begun`."""

    begun: float
    at: float
    keys: list[SampleKey]


class Seen(msgspec.Struct, array_like=True):
    """A sample as a consumer read it from memory.

    digest: of the producer's columns. staleness: as the queue said.
    score: digest of the reward's columns, empty when they are not there. due: what it must be.
    """

    key: SampleKey
    digest: str
    prompt: int
    staleness: int = -1
    score: str = ""
    due: str = ""


class Read(msgspec.Struct, tag="read"):
    """A consumer has read its lease's samples; version: of the trainer's weights, for the trainer."""

    at: float
    task: str
    lease: int
    samples: list[Seen]
    version: int = -1


class Again(msgspec.Struct, tag="again"):
    """Arrays of a lease were kept, and looked at once more: `digest` has become `now`."""

    at: float
    lease: int
    key: SampleKey
    digest: str
    now: str


class Done(msgspec.Struct, tag="done"):
    """A completion was acknowledged."""

    begun: float
    at: float
    lease: int


class Weights(msgspec.Struct, tag="weights"):
    """The trainer is about to announce this version."""

    at: float
    version: int
    parent: int
    changed: bool


class Step(msgspec.Struct, tag="step"):
    """A step was acknowledged; the trainer's weights are `version`."""

    begun: float
    at: float
    step: int
    lease: int
    version: int
    skipped: bool


class Fallback(msgspec.Struct, tag="fallback"):
    """The roll-back to the checkpoint of `step` was acknowledged; deliberate: to an older one than the newest."""

    begun: float
    at: float
    step: int
    version: int
    deliberate: bool


class Checkpoint(msgspec.Struct, tag="checkpoint"):
    """The checkpoint's folder is in place."""

    at: float
    step: int
    version: int


class Fenced(msgspec.Struct, tag="fenced"):
    """The queue does not hear this process any more."""

    at: float
    why: str


Record = Joined | Making | Put | Read | Again | Done | Weights | Step | Fallback | Checkpoint | Fenced


class Life(msgspec.Struct):
    """The records of one process. number: of all processes that the slot ever had."""

    slot: str
    number: int
    records: list[Record]

    @property
    def joined(self) -> Joined | None:
        """When and as whom it joined; None if it never did."""
        return next((record for record in self.records if isinstance(record, Joined)), None)


def record_file(folder: Path, slot: str, number: int) -> Path:
    """Where a process writes."""
    return folder / f"{slot.replace('/', '-')}-{number}.jsonl"


class Book:
    """Writes the records of this process."""

    def __init__(self, folder: Path, slot: str, number: int) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(record_file(folder, slot, number), flags, 0o600)
        self._encoder = msgspec.json.Encoder()

    def write(self, record: Record) -> None:
        """When it returns, the death of this process does not lose the record."""
        line = self._encoder.encode(record) + b"\n"
        if os.write(self._fd, line) != len(line):
            raise OSError("the disk of the records is full")


_decode = msgspec.json.Decoder(Record).decode


def read_life(path: Path) -> Life:
    """The records of one process, as far as it has finished writing them."""
    name, index, number = path.stem.rsplit("-", 2)
    lines = path.read_bytes().split(b"\n")
    # What follows the last line's end is being written, or was when the process was killed.
    return Life(f"{name}/{index}", int(number), [_decode(line) for line in lines[:-1]])


def read_lives(folder: Path, role: str = "") -> list[Life]:
    """The records of all processes, or of a role's, oldest process of a slot first."""
    lives = [read_life(path) for path in folder.glob(f"{role}*.jsonl")]
    return sorted(lives, key=lambda life: (life.slot, life.number))


def now() -> float:
    """Seconds, the same clock for all processes of the machine."""
    return time.monotonic()


def digest_of(columns: Mapping[str, Any]) -> str:
    """Of names, dtypes, shapes and bytes."""
    state = hashlib.blake2b(digest_size=12)
    for name in sorted(columns):
        value = columns[name]
        if isinstance(value, str):
            state.update(f"{name}:str:".encode() + value.encode())
        else:
            array = np.ascontiguousarray(value)
            state.update(f"{name}:{array.dtype.str}:{array.shape}:".encode())
            state.update(array.data)
    return state.hexdigest()


def scored(tokens: np.ndarray[Any, Any]) -> dict[str, Any]:
    """The columns that a reward consumer puts on a sample: they follow from its tokens."""
    return {"reward": float(tokens[:16].sum() % 997), "token_reward": (tokens % 31).astype(np.float32)}
