"""State of the ledger as plain data; a snapshot is its encoding."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.memory.block_table import BlockTable
from relax_rt.transport.memory.refs import Extent, is_spilled, owner_key
from relax_rt.transport.queue.ledger.messages import Loss, Reply, Retired, SampleKey, VersionSpan
from relax_rt.transport.queue.ledger.policy import LedgerPolicy, QueueLimits
from relax_rt.transport.queue.ledger.prompts import Prompt, PromptPool
from relax_rt.transport.rpc.errors import Refused, StaleEpoch
from relax_rt.transport.rpc.identity import Incarnation

REPLIES_KEPT = 128
"""Replies kept for each incarnation; a client has fewer changing calls under way (see QueueClient)."""


class ClientProcess(msgspec.Struct, frozen=True, array_like=True):
    """Location of an incarnation.

    Attributes:
        who: the incarnation.
        node: its node; payloads: address of its payload server, empty if the node's own serves its slabs.
        pid, started: its process on the broker's node, 0 when it is not to be watched.
    """

    who: Incarnation
    node: str = ""
    payloads: str = ""
    pid: int = 0
    started: int = 0


class Callers(msgspec.Struct):
    """Which incarnations may call, by the lowest epoch of each slot, and the newest replies to each, by owner key.

    Attributes:
        processes: of those who joined of their own accord, by owner key; kept while slabs of theirs may be read.
        node, payloads: the broker's own.
    """

    lowest: dict[str, int] = {}
    replies: dict[str, dict[int, Reply]] = {}
    processes: dict[str, ClientProcess] = {}
    node: str = ""
    payloads: str = ""

    def check(self, who: Incarnation) -> None:
        """Refuse a late call of a fenced process.

        Raises:
            StaleEpoch: a newer incarnation of the slot was seen, or this one was reported dead.
        """
        lowest = self.lowest.get(who.slot)
        if lowest is not None and who.epoch < lowest:
            raise StaleEpoch(
                f"call of {who}", why=f"the slot's epoch is {lowest} or higher", hint="a fenced process must exit"
            )

    def knows(self, who: Incarnation) -> bool:
        """Whether the incarnation is the slot's newest one and has joined."""
        return owner_key(who) in self.replies

    def join(self, who: Incarnation) -> None:
        """Accept calls of this incarnation from now on, and fence those before it."""
        self.fence(who.slot, who.epoch)
        self.replies.setdefault(owner_key(who), {})

    def fence(self, slot: str, lowest: int) -> None:
        """Refuse incarnations of the slot with a lower epoch from now on."""
        self.lowest[slot] = max(self.lowest.get(slot, lowest), lowest)
        prefix = slot.replace("/", "-")
        for owner in list(self.replies):
            name, _, epoch = owner.rpartition("-")
            if name == prefix and int(epoch) < lowest:
                del self.replies[owner]

    def forget_processes(self, live: Iterable[str]) -> None:
        """Forget processes that are fenced and own none of the slabs of the `live` owners."""
        keep = {*live, *self.replies}
        self.processes = {owner: home for owner, home in self.processes.items() if owner in keep}

    def remote(self, who: Incarnation, owners: Iterable[str]) -> dict[str, str]:
        """Payload servers of those owners whose slabs are not where the caller's are."""
        here = self._memory_of(owner_key(who))
        places = {owner: self._memory_of(owner) for owner in owners}
        return {owner: place[1] for owner, place in places.items() if place != here}

    def _memory_of(self, owner: str) -> tuple[str, str]:
        """Node and payload server of an owner's slabs. Processes that serve their own do not share memory."""
        home = self.processes.get(owner)
        if home is None or not home.payloads or is_spilled(owner + "-"):
            return self.node_of(owner), self.payloads
        return home.node, home.payloads

    def node_of(self, owner: str) -> str:
        """The node of a slab's owner; one that did not say, and spilled blocks, are on the broker's."""
        home = self.processes.get(owner)
        return home.node if home is not None and not is_spilled(owner + "-") else self.node

    def alive(self, owner: str) -> bool:
        """Whether the incarnation with this key (see refs.owner_key) may call."""
        return owner in self.replies

    def ended(self, owner: str) -> bool:
        """Whether the incarnation with this key is fenced."""
        slot, _, epoch = owner.rpartition("-")
        lowest = self.lowest.get("/".join(slot.rsplit("-", 1)))
        return lowest is not None and epoch.isdigit() and int(epoch) < lowest

    def reply(self, who: Incarnation, seq: int) -> Reply | None:
        """The reply given to this call before, if it was.

        Raises:
            Refused: the call is so old that its reply is no longer kept.
        """
        kept = self.replies[owner_key(who)]
        if seq in kept:
            return kept[seq]
        if len(kept) >= REPLIES_KEPT and seq < next(iter(kept)):
            raise Refused(f"call {seq} of {who}", why=f"replies are kept for the last {REPLIES_KEPT} calls only")
        return None

    def keep(self, who: Incarnation, seq: int, reply: Reply) -> None:
        """Keep the reply of a call that changed the ledger.

        Those with the highest numbers are kept: a call with a lower one that is not among them was answered long ago.
        """
        kept = self.replies.get(owner_key(who))
        if kept is None:
            # The call was the caller's own end.
            return
        late = bool(kept) and seq < next(reversed(kept))
        kept[seq] = reply
        if late:
            # Numbers mostly come in order. Keep them so, that the lowest one is found without a search.
            kept = self.replies[owner_key(who)] = dict(sorted(kept.items()))
        if len(kept) > REPLIES_KEPT:
            del kept[next(iter(kept))]


class SamplePart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Columns of a sample: a row of a block.

    Attributes:
        task: who put them; empty: the producer.
        version: the weights they were computed with (-1: they do not depend on weights).
    """

    block: int
    row: int
    task: str = ""
    version: int = -1


class PartialTokens(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Partial completion of an unfinished member, from its first token on (see PartialChunk)."""

    tokens: bytes
    logprobs: bytes
    spans: list[VersionSpan]
    origin: bytes = b""
    rows: bytes = b""

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.tokens) // 4

    @property
    def row_bytes(self) -> int:
        """Bytes of extra data (experts, say) kept for each token."""
        return len(self.rows) // self.length

    @property
    def nbytes(self) -> int:
        """Bytes that count against the limits: all that grows with the tokens."""
        return 2 * len(self.tokens) + len(self.rows) + 32 * len(self.spans) + 64


class SampleRange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Samples [start, end) of the packed run whose first sample is `run`."""

    run: int
    start: int
    end: int


class PackedSamples(msgspec.Struct, array_like=True, gc=False):
    """Samples of one put, each a group of its own, that nothing has happened to but leases and completions in order.

    Attributes:
        first: group id of the first one; the others follow.
        count: how many were put.
        block: where their columns are; sample n has row n.
        lengths: tokens of each; empty: not known.
        next: by task that can work on them, the first sample that it has not leased yet.
        leases: task, start and end of each held lease, by its id.
        left: for each sample, the number of tasks that are not done with it; at 0 it is finished.
        open: how many are not finished.
    """

    first: int
    count: int
    block: int
    lengths: list[int]
    next: dict[str, int]
    leases: dict[int, tuple[str, int, int]]
    left: bytes
    open: int


class SampleState(msgspec.Struct, array_like=True, gc=False):
    """One member of a group.

    Attributes:
        generated: its producer has put it; until then it is `reserved`.
        parts: where its columns are.
        length: tokens, -1 if its producer did not say.
        priority: for the priority sampler.
        spans: policy versions of its tokens.
        leases: lease id by task, for the tasks other than the step task that work on it.
        done: tasks that finished with it.
        deaths: consumers that died or lapsed on it, in a row.
        excluded: the group continues without it (see LedgerPolicy.on_failed_member).
        partial: what its producer has sampled of it so far. longest_partial: tokens that it ever had.
    """

    generated: bool = False
    parts: list[SamplePart] = []
    length: int = -1
    priority: float = 0.0
    spans: list[VersionSpan] = []
    leases: dict[str, int] = {}
    done: list[str] = []
    deaths: int = 0
    excluded: bool = False
    partial: PartialTokens | None = None
    longest_partial: int = 0


class SampleGroup(msgspec.Struct, array_like=True, gc=False):
    """The samples of one prompt, or of one put, from admission to commit.

    Attributes:
        prompt: None for a group that was put without a ticket.
        version: the trainer's version at admission (it is in the ticket).
        base: the generating engine's version at admission: the version of the members not yet put.
        holder: the incarnation that generates members of it. making: which members.
        lease: lease of the step task that it is part of, or 0.
        regenerations: how often members of it were regenerated (they count as attempts of its prompt).
        issue: how many tickets it had. idle: how many of them in a row brought neither a member nor more tokens.
        recycled: its over-stale tokens are masked (see LedgerPolicy.on_surplus).
        failed_task: the task at which members failed last. failed: which of them, since one got through it.
        item: id of its data item; empty until a failure named it.
        late: all of these failures were timeouts.
        passed: samples of the run that had completed each task when the group was first admitted.
    """

    id: int
    prompt: Prompt | None
    version: int
    base: int
    samples: list[SampleState]
    holder: Incarnation | None = None
    making: list[int] = []
    lease: int = 0
    regenerations: int = 0
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
        """Number of members, without excluded ones."""
        size = len(self.samples)
        for sample in self.samples:
            size -= sample.excluded
        return size

    @property
    def complete(self) -> bool:
        """Whether all members are there."""
        return all(sample.generated for sample in self.samples if not sample.excluded)

    def sample_keys(self) -> list[SampleKey]:
        """Keys of the samples, without excluded ones."""
        return [SampleKey(self.id, member) for member, sample in enumerate(self.samples) if not sample.excluded]

    def members(self) -> list[tuple[SampleKey, SampleState]]:
        """Samples with their keys, without excluded ones."""
        return [(SampleKey(self.id, n), sample) for n, sample in enumerate(self.samples) if not sample.excluded]

    def missing(self) -> list[int]:
        """Members not yet there."""
        return [n for n, sample in enumerate(self.samples) if not sample.generated and not sample.excluded]


class Lease(msgspec.Struct, array_like=True, gc=False):
    """Samples that one incarnation works on.

    Attributes:
        blocks: those in its holder's grant. pins: the extents of these, which it may be reading.
        holder: who works on it; of an ended lease, who may still be reading.
        slices: its samples while they are packed (see PackedSamples); keys is empty then.
    """

    id: int
    task: str
    keys: list[SampleKey]
    blocks: list[int]
    pins: list[Extent]
    holder: Incarnation
    slices: list[SampleRange] = []

    def groups(self) -> list[int]:
        """Ids of its groups, each once."""
        return list(dict.fromkeys(key.group for key in self.keys))


class TrainedGroup(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A group in the record of a step."""

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


class TimedOutItem(msgspec.Struct, frozen=True, array_like=True):
    """Whole attempts of an item at one task that were late.

    Attributes:
        times: how many in a row, since the task last was late with other items as well.
        since: samples of the run that had got through the task when that row began. passed: at the newest attempt.
    """

    times: int
    since: int
    passed: int


class ProgressState(msgspec.Struct):
    """See transport/queue/ledger/failures.py.

    Attributes:
        failed_groups: in a row. prompts: different indices of these, as many as the rule asks for.
        no_progress: the row is as long as the policy allows.
        passed: samples that got through each task.
        late: by task and item, the oldest first. retired: items by id. revision: grows with each change of these.
    """

    failed_groups: int = 0
    prompts: list[int] = []
    no_progress: bool = False
    causes: list[LossCause] = []
    passed: dict[str, int] = {}
    late: dict[str, dict[str, TimedOutItem]] = {}
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
        runs: packed groups, by the id of the first one.
        reopened: groups with members to regenerate that no producer holds.
        leases: held leases. pinned: ended ones whose holder may still read their extents.
        trainer_version: version of the trainer's weights; None before they were announced.
        since_update: samples trained since the trainer's weights last changed.
        blocked_since: since when a batch that is there waits for stragglers only.
        path: the groups of each step, on the path of steps that leads to the trainer's present weights.
        committed: steps up to this one are covered by a checkpoint.
        folded_steps: of the path up to this step only the counts in `folded` are kept.
        ended: samples by terminal state. issued: samples that were ever reserved or put.
        tallies: counts of other events, for the account.
        partials_bytes: of the partial completions of unfinished members.
        surplus_requested: groups that may be under way beyond the bound until the next step, as over_provision.
        refused_reported: tokens refused as over-stale that were reported to the trainer.
        progress: what was lost of what, and whether anything comes of the run.
    """

    policy: LedgerPolicy | None = None
    limits: QueueLimits = QueueLimits()
    n: int = 0
    run_id: str = ""
    next_id: int = 1
    next_epoch: int = 1
    prompts: PromptPool = msgspec.field(default_factory=PromptPool)
    groups: dict[int, SampleGroup] = {}
    runs: dict[int, PackedSamples] = {}
    trained: dict[int, SampleGroup] = {}
    reopened: dict[int, None] = {}
    leases: dict[int, Lease] = {}
    pinned: dict[int, Lease] = {}
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
    partials_bytes: int = 0
    surplus_requested: int = 0
    refused_reported: int = 0
    progress: ProgressState = msgspec.field(default_factory=ProgressState)
