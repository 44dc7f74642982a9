"""What the naive model of the ledger is made of."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from relax_rt.transport.memory.refs import Extent
from relax_rt.transport.queue.ledger.messages import SampleKey
from relax_rt.transport.rpc.identity import Incarnation


@dataclass(eq=False)
class Block:
    extent: Extent | None
    fields: tuple[str, ...]
    digests: list[bytes]


@dataclass
class Part:
    block: Block
    row: int
    task: str
    version: int


@dataclass(eq=False)
class Sample:
    made: bool = False
    excluded: bool = False
    parts: list[Part] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    leases: dict[str, int] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)
    deaths: int = 0
    partial: list[tuple[int, int]] = field(default_factory=list)
    """Tokens marked, each with its version."""
    longest_partial: int = 0

    def partial_bytes(self) -> int:
        """8 a token, 32 a run of tokens of one version, 64 for itself."""
        if not self.partial:
            return 0
        versions = [version for _, version in self.partial]
        runs = 1 + sum(a != b for a, b in itertools.pairwise(versions))
        return 8 * len(versions) + 32 * runs + 64


@dataclass(eq=False)
class Group:
    id: int
    prompt: int
    attempt: int
    failures: int
    base: int
    samples: list[Sample]
    holder: Incarnation | None
    making: set[int]
    lease: int = 0
    issue: int = 1
    idle: int = 0
    recycled: bool = False
    item: int = -1
    losses: int = 0

    def alive(self) -> list[tuple[int, Sample]]:
        return [(n, sample) for n, sample in enumerate(self.samples) if not sample.excluded]

    def missing(self) -> set[int]:
        return {n for n, sample in self.alive() if not sample.made}


@dataclass(eq=False)
class Lease:
    id: int
    task: str
    keys: list[SampleKey]
    pins: list[Extent]
    holder: Incarnation
