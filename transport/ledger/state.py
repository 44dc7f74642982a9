"""All that the ledger knows, as plain data: a snapshot is its encoding."""

from __future__ import annotations

import msgspec

from relax_rt.transport.identity import Incarnation
from relax_rt.transport.ledger.callers import Callers
from relax_rt.transport.ledger.extents import ExtentTable
from relax_rt.transport.ledger.policy import LedgerPolicy, QueueLimits
from relax_rt.transport.ledger.prompts import Prompt, PromptPool
from relax_rt.transport.queue.api import Column, Freed, SampleKey, VersionSpan
from relax_rt.transport.versions import VersionRecord


class Sample(msgspec.Struct, array_like=True):
    """One member of a group.

    Attributes:
        generated: its producer has put it; until then it is reserved.
        spans: policy versions of its tokens.
        leases: lease id by task, for the tasks other than train that work on it.
        done: tasks that finished with it.
        deaths: consumers that died or lapsed on it, in a row.
    """

    generated: bool = False
    columns: list[Column] = []
    spans: list[VersionSpan] = []
    extents: list[Freed] = []
    leases: dict[str, int] = {}
    done: list[str] = []
    deaths: int = 0

    def has(self, fields: tuple[str, ...]) -> bool:
        """Whether all of these columns are there."""
        names = {column.name for column in self.columns}
        return self.generated and names.issuperset(fields)


class Group(msgspec.Struct, array_like=True):
    """The samples of one prompt, from admission to commit.

    Attributes:
        version: the trainer's version at admission (it is in the ticket).
        base: the generating engine's version at admission: the version of the members not yet put.
        holder: who generates it; None once all members are there.
        lease: train lease that it is part of, or 0.
    """

    id: int
    prompt: Prompt
    version: int
    base: int
    samples: list[Sample]
    holder: Incarnation | None = None
    lease: int = 0

    @property
    def size(self) -> int:
        return len(self.samples)

    def sample_keys(self) -> list[SampleKey]:
        """The keys of its samples."""
        return [SampleKey(self.id, member) for member in range(len(self.samples))]


class Lease(msgspec.Struct, array_like=True):
    """Samples that one incarnation works on. `pins` are the extents it may be reading."""

    id: int
    task: str
    who: Incarnation
    keys: list[SampleKey]
    pins: list[Freed]

    def groups(self) -> list[int]:
        """Ids of its groups, each once."""
        return list(dict.fromkeys(key.group for key in self.keys))


class TrainedGroup(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the record of a step keeps of a group for the whole run."""

    group: int
    prompt: Prompt
    size: int


class State(msgspec.Struct):
    """The ledger.

    Attributes:
        n: sequence number of the last event applied.
        run_id: the shared memory that payloads lie in.
        next_id: groups and leases are numbered from one counter, so that an id names one of them only.
        groups: groups not yet trained. trained: groups trained and not yet covered by a checkpoint.
        leases: held leases. lapsed: lapsed ones whose process may still read their extents.
        trainer_version: version of the trainer's weights; None before they were announced.
        since_update: samples trained since the trainer's weights last changed.
        blocked_since: since when a batch that is there waits for stragglers only.
        path: the groups of each step, on the path of steps that leads to the trainer's present weights.
        committed: steps up to this one are covered by a checkpoint.
        ended: samples by terminal state. issued: samples that were ever reserved.
        tallies: counts of other events, for the account.
    """

    policy: LedgerPolicy | None = None
    limits: QueueLimits = QueueLimits()
    n: int = 0
    run_id: str = ""
    next_id: int = 1
    prompts: PromptPool = msgspec.field(default_factory=PromptPool)
    groups: dict[int, Group] = {}
    trained: dict[int, Group] = {}
    leases: dict[int, Lease] = {}
    lapsed: dict[int, Lease] = {}
    extents: ExtentTable = msgspec.field(default_factory=ExtentTable)
    callers: Callers = msgspec.field(default_factory=Callers)
    versions: list[VersionRecord] = []
    trainer_version: int | None = None
    step: int = 0
    since_update: int = 0
    blocked_since: float | None = None
    path: dict[int, list[TrainedGroup]] = {}
    committed: int = 0
    payloads_lost: list[int] = []
    ended: dict[str, int] = {}
    issued: int = 0
    tallies: dict[str, int] = {}
