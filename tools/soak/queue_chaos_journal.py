"""The queue's own version of what happened: its whole journal, applied again from the first record on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from relax_rt.transport.base.journal import Recovered
from relax_rt.transport.queue.ledger import events as ev
from relax_rt.transport.queue.ledger.events import JournalEntry
from relax_rt.transport.queue.ledger.machine import Ledger
from relax_rt.transport.queue.ledger.messages import LeaseGrant, SampleKey
from relax_rt.transport.queue.ledger.state import SampleGroup
from relax_rt.transport.rpc.errors import RelaxError
from relax_rt.transport.rpc.identity import Incarnation

QUEUED, TRAINED, FREED, SKIPPED, LOST, NOWHERE = "in the queue", "trained", "freed", "skipped", "lost", "nowhere"


class Content(msgspec.Struct):
    """One sample that the queue took in: whose put it was, and what has become of it.

    A key has several when its first sample failed and was made again.
    """

    who: Incarnation
    key: SampleKey
    fate: str = QUEUED


class Granted(msgspec.Struct):
    """A lease: who got it, and which content (index) each key stood for."""

    task: str
    who: Incarnation
    contents: dict[SampleKey, int]


class Refusal(msgspec.Struct):
    """A group that was refused as too stale: the trainer's version then, and those of its tokens."""

    group: int
    trainer_version: int
    versions: set[int]


class Story(msgspec.Struct):
    """What the journal tells.

    Attributes:
        contents: samples taken in. puts: by incarnation and key, how often a put of it is in the journal.
        late: puts that came when the group was not the producer's any more, and were not kept.
        path: groups by step. unheard: calls that were taken from incarnations that were fenced.
        error: why the journal could not be applied to its end. records: in it.
        account, audit: of the ledger at the end. tallies: counts of notices and events.
        live_slabs: names of the files that hold payload at the end.
    """

    contents: list[Content] = []
    puts: dict[tuple[str, int, SampleKey], int] = {}
    late: int = 0
    leases: dict[int, Granted] = {}
    refusals: list[Refusal] = []
    path: dict[int, list[int]] = {}
    unheard: list[str] = []
    error: str = ""
    records: int = 0
    account: dict[str, int] = {}
    audit: list[str] = []
    tallies: dict[str, int] = {}
    live_slabs: set[str] = set()


class Teller:
    """Applies the journal's entries one by one and keeps the story."""

    def __init__(self) -> None:
        self.story = Story()
        self.ledger = Ledger()
        self._decode = msgspec.msgpack.Decoder(JournalEntry).decode
        self._live: dict[int, dict[int, int]] = {}
        """Content by group and member, while the ledger has it in the queue or waits for its checkpoint."""
        self._settled: dict[int, list[int]] = {}
        """Contents of groups that were freed or skipped: a deliberate fall-back may lose them."""
        self._newest: dict[str, int] = {}
        self._dead: set[Incarnation] = set()
        self._tallies: Counter[str] = Counter()

    def tell(self, records: Sequence[tuple[int, bytes]]) -> Story:
        """Apply all records; what cannot be applied is an error of the story."""
        for n, payload in records:
            try:
                self._one(self._decode(payload))
            except (RelaxError, msgspec.DecodeError, LookupError, AssertionError, ValueError) as error:
                self.story.error = f"record {n} of {records[-1][0]}: {type(error).__name__}: {error}"
                break
        story, state = self.story, self.ledger.state
        story.records = len(records)
        story.path = {step: [record.group for record in records] for step, records in state.path.items()}
        story.live_slabs = set(state.blocks.live)
        story.tallies = dict(self._tallies)
        if not story.error:
            self.ledger.restart_deadlines(0.0)
            story.account, story.audit = self.ledger.account(), self.ledger.audit()
        return story

    def compare(self, left: Recovered) -> list[str]:
        """Where the state that a broker would begin with (a snapshot, and what came after) differs from ours."""
        ledger = Ledger(left.snapshot)
        for _, payload in left.records:
            ledger.apply(self._decode(payload))
        ours, theirs = msgspec.to_builtins(self.ledger.state), msgspec.to_builtins(ledger.state)
        differing = sorted(name for name in ours if ours[name] != theirs[name])
        return [f"what a broker would begin with differs from the journal in {differing}"] if differing else []

    def _one(self, entry: JournalEntry) -> None:
        self._check_heard(entry)
        event, who = entry.event, entry.who
        kept = self._rows_kept(who, event) if isinstance(event, ev.PutSamples) and who is not None else []
        versions = self._versions(event)
        outcome = self.ledger.apply(entry)
        if not outcome.changed:
            raise AssertionError(f"{type(event).__name__} changes nothing")
        for key in kept:
            assert who is not None
            self._live.setdefault(key.group, {})[key.member] = len(self.story.contents)
            self.story.contents.append(Content(who, key))
        if isinstance(event, ev.RequestLease) and who is not None and isinstance(outcome.answer, LeaseGrant):
            contents = {one.key: self._live[one.key.group][one.key.member] for one in outcome.answer.samples}
            self.story.leases[outcome.answer.lease] = Granted(event.task, who, contents)
        for kind, fields in outcome.notices:
            self._tallies[kind] += 1
            if kind == "lease_lapsed":
                self._tallies["samples_of_lapsed_leases"] += fields["samples"]
        ended = {fields["group"]: fields["state"] for kind, fields in outcome.notices if kind == "group_ended"}
        for id_ in (id_ for id_, state in ended.items() if state == "refused(stale)"):
            version = self.ledger.state.trainer_version
            self.story.refusals.append(Refusal(id_, -1 if version is None else version, versions.get(id_, set())))
        self._follow(ended)
        if isinstance(event, ev.Rollback):
            self._give_up()

    def _check_heard(self, entry: JournalEntry) -> None:
        who = entry.who
        if who is None:
            if isinstance(entry.event, ev.ProcessExited):
                self._dead.add(entry.event.who)
            return
        newest = self._newest.get(who.slot, who.epoch)
        if who.epoch < newest or who in self._dead:
            why = "dead" if who in self._dead else f"followed by epoch {newest}"
            self.story.unheard.append(f"{type(entry.event).__name__} of {who}, which was {why} (record {entry.n})")
        self._newest[who.slot] = max(newest, who.epoch)

    def _rows_kept(self, who: Incarnation, event: ev.PutSamples) -> list[SampleKey]:
        """Samples that must be kept: those of groups that the caller was to make. The others come late."""
        kept: list[SampleKey] = []
        for put in event.puts:
            for row in put.rows:
                at = (who.slot, who.epoch, row.key)
                self.story.puts[at] = self.story.puts.get(at, 0) + 1
                group = self.ledger.state.groups.get(row.key.group)
                if group is not None and group.holder == who and row.key.member in group.making:
                    kept.append(row.key)
                else:
                    self.story.late += 1
        return kept

    def _versions(self, event: ev.Event) -> dict[int, set[int]]:
        """Versions of the tokens of each group that the event may have refused."""
        state = self.ledger.state
        if isinstance(event, ev.PutSamples):
            spans: dict[int, dict[int, set[int]]] = {}
            for row in (row for put in event.puts for row in put.rows):
                spans.setdefault(row.key.group, {})[row.key.member] = {span.version for span in row.versions}
            return {id_: _versions_of(state.groups[id_], new) for id_, new in spans.items() if id_ in state.groups}
        if isinstance(event, ev.CompleteStep | ev.Rollback) or (
            isinstance(event, ev.RequestLease) and event.request.groups
        ):
            return {group.id: _versions_of(group, {}) for group in [*state.groups.values(), *state.trained.values()]}
        return {}

    def _follow(self, ended: dict[int, str]) -> None:
        """Where every sample that was somewhere is now."""
        state = self.ledger.state
        records: dict[int, bool] | None = None
        for id_ in list(self._live):
            members = self._live[id_]
            group = state.groups.get(id_)
            if group is not None:
                for member, content in list(members.items()):
                    if group.samples[member].generated:
                        self.story.contents[content].fate = QUEUED
                    else:
                        self.story.contents[members.pop(member)].fate = "failed"
                continue
            if id_ in state.trained:
                fate = TRAINED
            elif id_ in ended:
                fate = ended[id_]
            else:
                if records is None:
                    records = {one.group: one.skipped for path in state.path.values() for one in path}
                fate = NOWHERE if id_ not in records else SKIPPED if records[id_] else FREED
            for content in members.values():
                self.story.contents[content].fate = fate
            if fate in (FREED, SKIPPED):
                self._settled[id_] = list(members.values())
            if fate != TRAINED:
                del self._live[id_]

    def _give_up(self) -> None:
        """What was freed for a checkpoint that a fall-back gave up is lost."""
        on_path = {one.group for path in self.ledger.state.path.values() for one in path}
        for id_ in [id_ for id_ in self._settled if id_ not in on_path]:
            for content in self._settled.pop(id_):
                self.story.contents[content].fate = LOST


def _versions_of(group: SampleGroup, put: dict[int, set[int]]) -> set[int]:
    """Versions of its tokens; `put` are those of members that are being put. Who is missing counts with its engine."""
    found: set[int] = set()
    for member, sample in enumerate(group.samples):
        if sample.excluded:
            continue
        if sample.generated:
            found.update(span.version for span in sample.spans)
        else:
            found.update(put.get(member, {group.base}))
    return found
