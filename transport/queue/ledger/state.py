"""All that the ledger knows, as plain data: a snapshot is its encoding."""

from __future__ import annotations

import msgspec

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.memory.block_table import BlockTable
from relax_rt.transport.memory.refs import Extent
from relax_rt.transport.queue.api import Batch, Failure, Loss, Retired, SampleKey, VersionSpan
from relax_rt.transport.queue.ledger.callers import Callers
from relax_rt.transport.queue.ledger.policy import LedgerPolicy, QueueLimits
from relax_rt.transport.queue.ledger.prompts import Prompt, PromptPool
from relax_rt.transport.rpc.identity import Incarnation


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Columns of a sample: a row of a block.

    Attributes:
        task: who put them; empty: the producer.
        version: the weights they were computed with (-1: of no matter).
    """

    block: int
    row: int
    task: str = ""
    version: int = -1


class Held(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens of an unfinished member, from the first one on (see Mark)."""

    tokens: bytes
    logprobs: bytes
    spans: list[VersionSpan]
    origin: bytes = b""
    rows: bytes = b""

    @property
    def length(self) -> int:
        """Tokens."""
        return len(self.tokens) // 4

    @property
    def row_bytes(self) -> int:
        """Of what is kept of each token besides."""
        return len(self.rows) // self.length

    @property
    def nbytes(self) -> int:
        """What it takes, as far as it grows."""
        return 2 * len(self.tokens) + len(self.rows) + 32 * len(self.spans) + 64


class Sample(msgspec.Struct, array_like=True, gc=False):
    """One member of a group.

    Attributes:
        generated: its producer has put it; until then it is reserved.
        parts: where its columns are.
        length: tokens, -1 if its producer did not say.
        priority: for the priority sampler.
        spans: policy versions of its tokens.
        leases: lease id by task, for the tasks other than the step task that work on it.
        done: tasks that finished with it.
        deaths: consumers that died or lapsed on it, in a row.
        left_out: the group goes on without it (see LedgerPolicy.on_failed_member).
        mark: what its producer has sampled of it so far. most: tokens that were ever marked of it.
    """

    generated: bool = False
    parts: list[Part] = []
    length: int = -1
    priority: float = 0.0
    spans: list[VersionSpan] = []
    leases: dict[str, int] = {}
    done: list[str] = []
    deaths: int = 0
    left_out: bool = False
    mark: Held | None = None
    most: int = 0


class Group(msgspec.Struct, array_like=True, gc=False):
    """The samples of one prompt, or of one offer, from admission to commit.

    Attributes:
        prompt: None for a group that was offered.
        version: the trainer's version at admission (it is in the ticket).
        base: the generating engine's version at admission: the version of the members not yet put.
        holder: who generates members of it. making: which ones.
        lease: lease of the step task that it is part of, or 0.
        remade: how often members of it were given out again (they count as attempts of its prompt).
        issue: how many tickets it had. idle: how many of them in a row brought neither a member nor more marked tokens.
        recycled: its over-stale tokens are context (see LedgerPolicy.on_surplus).
        failed_task: the task at which members failed last. failed: which of them, since one got through it.
        item: id of its data item; empty until a failure named it.
        late: all of these failures were timeouts.
        passed: samples of the run that had got through each task when the group was given out first.
    """

    id: int
    prompt: Prompt | None
    version: int
    base: int
    samples: list[Sample]
    holder: Incarnation | None = None
    making: list[int] = []
    lease: int = 0
    remade: int = 0
    issue: int = 0
    idle: int = 0
    recycled: bool = False
    failed_task: str | None = None
    failed: list[int] = []
    late: bool = True
    passed: dict[str, int] = {}
    item: str = ""

    @property
    def size(self) -> int:
        """Its members, without those left out."""
        size = len(self.samples)
        for sample in self.samples:
            size -= sample.left_out
        return size

    @property
    def complete(self) -> bool:
        """Whether all members are there."""
        return all(sample.generated for sample in self.samples if not sample.left_out)

    def sample_keys(self) -> list[SampleKey]:
        """The keys of its samples, without those left out."""
        return [SampleKey(self.id, member) for member, sample in enumerate(self.samples) if not sample.left_out]

    def members(self) -> list[tuple[SampleKey, Sample]]:
        """Its samples with their keys, without those left out."""
        return [(SampleKey(self.id, n), sample) for n, sample in enumerate(self.samples) if not sample.left_out]

    def missing(self) -> list[int]:
        """Members not yet there."""
        return [n for n, sample in enumerate(self.samples) if not sample.generated and not sample.left_out]


class Lease(msgspec.Struct, array_like=True, gc=False):
    """Samples that one incarnation works on, or several ranks of a stream.

    Attributes:
        blocks: those that its holders were told of. pins: the extents of these, which they may be reading.
        holders: who works on it; of an ended lease, who may still be reading.
        finished: ranks that are done with a shared lease. reading: those of them that still read its memory.
        told: what each of them is told, whatever became of the samples since: their parts must fit together.
        pending: columns that they put, with the sample's length; they are seen when all ranks are done.
        failures: samples that they say failed.
        stream, readers: see Want.
    """

    id: int
    task: str
    keys: list[SampleKey]
    blocks: list[int]
    pins: list[Extent]
    holders: list[Incarnation]
    finished: list[Incarnation] = []
    reading: list[Incarnation] = []
    told: Batch | None = None
    pending: list[tuple[SampleKey, Part, int]] = []
    failures: list[Failure] = []
    stream: str = ""
    readers: int = 1

    def groups(self) -> list[int]:
        """Ids of its groups, each once."""
        return list(dict.fromkeys(key.group for key in self.keys))


class Stream(msgspec.Struct, array_like=True, gc=False):
    """Batches that several ranks read in step: the next index to grant, and the leases of those under way."""

    next_index: int = 0
    live: dict[int, int] = {}


class TrainedGroup(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the record of a step keeps of a group."""

    group: int
    prompt: Prompt | None
    size: int
    skipped: bool = False


class LossCause(msgspec.Struct):
    """Members that were lost for one cause since the run was started.

    Attributes:
        gist: what makes it one cause: the line that raised, else the reason without its numbers.
        loss: what is reported of it.
        last_groups, last_prompts: the newest ones.
        reported, reported_at: count and time of the last report.
    """

    gist: str
    loss: Loss
    last_groups: list[int] = []
    last_prompts: list[str] = []
    reported: int = 0
    reported_at: float = 0.0


class LateItem(msgspec.Struct, frozen=True, array_like=True):
    """Whole attempts of an item at one task that were late.

    Attributes:
        times: how many in a row, since the task last was late with other items as well.
        since: samples of the run that had got through the task when that row began. passed: at the newest attempt.
    """

    times: int
    since: int
    passed: int


class ProgressState(msgspec.Struct):
    """See transport/queue/ledger/progress.py.

    Attributes:
        failed_groups: in a row. prompts: different indices of these, as many as the rule asks for.
        verdict: the row is as long as the policy allows.
        passed: samples that got through each task.
        late: by task and item, the oldest first. retired: items by id. revision: grows with each change of these.
    """

    failed_groups: int = 0
    prompts: list[int] = []
    verdict: bool = False
    causes: list[LossCause] = []
    passed: dict[str, int] = {}
    late: dict[str, dict[str, LateItem]] = {}
    retired: dict[str, Retired] = {}
    revision: int = 0


class State(msgspec.Struct):
    """The ledger.

    Attributes:
        n: sequence number of the last event applied.
        run_id: the shared memory that payloads lie in.
        next_id: groups and leases are numbered from one counter, so that an id names one of them only.
        next_epoch: for those who join of their own accord.
        groups: groups not yet trained. trained: groups trained and not yet covered by a checkpoint.
        reopened: groups of which members are to be made again, and nobody makes them yet.
        leases: held leases. lapsed: ended ones whose process may still read their extents.
        streams: by task and name, see Want.
        trainer_version: version of the trainer's weights; None before they were announced.
        since_update: samples trained since the trainer's weights last changed.
        blocked_since: since when a batch that is there waits for stragglers only.
        path: the groups of each step, on the path of steps that leads to the trainer's present weights.
        committed: steps up to this one are covered by a checkpoint.
        folded_steps: the path up to this step is kept as the counts `folded` only.
        ended: samples by terminal state. issued: samples that were ever reserved or offered.
        tallies: counts of other events, for the account.
        marks_bytes: of the marks of unfinished members.
        asked: groups that may be under way beyond the bound until the next step, as over_provision.
        refused_told: tokens refused as over-stale that the trainer was told of.
        progress: what was lost of what, and whether anything comes of the run.
    """

    policy: LedgerPolicy | None = None
    limits: QueueLimits = QueueLimits()
    n: int = 0
    run_id: str = ""
    next_id: int = 1
    next_epoch: int = 1
    prompts: PromptPool = msgspec.field(default_factory=PromptPool)
    groups: dict[int, Group] = {}
    trained: dict[int, Group] = {}
    reopened: dict[int, None] = {}
    leases: dict[int, Lease] = {}
    lapsed: dict[int, Lease] = {}
    streams: dict[str, Stream] = {}
    blocks: BlockTable = msgspec.field(default_factory=BlockTable)
    callers: Callers = msgspec.field(default_factory=Callers)
    versions: list[VersionRecord] = []
    trainer_version: int | None = None
    step: int = 0
    since_update: int = 0
    blocked_since: float | None = None
    path: dict[int, list[TrainedGroup]] = {}
    committed: int = 0
    folded_steps: int = 0
    folded: dict[str, int] = {}
    payloads_lost: list[int] = []
    ended: dict[str, int] = {}
    issued: int = 0
    tallies: dict[str, int] = {}
    marks_bytes: int = 0
    asked: int = 0
    refused_told: int = 0
    progress: ProgressState = msgspec.field(default_factory=ProgressState)
