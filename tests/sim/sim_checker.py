"""Judges a run by what producers, consumers and trainers saw themselves, never by what the ledger thinks."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from relax_rt.transport.memory.refs import Extent
from relax_rt.transport.queue.ledger.core import Notice
from relax_rt.transport.queue.ledger.messages import BlockPut, SampleKey
from relax_rt.transport.rpc.identity import Incarnation

LOST = "acknowledged sample lost"
TWICE = "trained twice"
SKIPPED = "prompt skipped"
STALE = "over-stale at consumption"
FOREIGN = "foreign bytes under a pin"
FENCED = "a fenced incarnation was heard"
DOUBLED = "applied twice"
STANDSTILL = "stands still after the faults"
UNEXPECTED = "unexpected"
LEFT_OUT = "trained though it was left out"
CHANGED = "a prompt became another one"


class Trained(msgspec.Struct, frozen=True):
    """What a trainer remembers of a sample: in its checkpoints, so that it forgets what it falls back behind."""

    key: SampleKey
    prompt: int
    digest: str


class Produced(msgspec.Struct):
    """A sample as its producer made it; `kept_as` is its name once the queue has acknowledged it."""

    key: SampleKey | None
    versions: tuple[int, ...]
    kept_as: SampleKey | None = None


class Token(msgspec.Struct, frozen=True):
    """Sampled for a member behind another token (0: the prompt), with a policy version."""

    key: SampleKey
    before: int
    version: int


class Checker:
    def __init__(self, max_staleness: float) -> None:
        self.max_staleness = max_staleness
        self.findings: list[tuple[str, str]] = []
        self.parents: dict[int, tuple[int, bool]] = {}
        self.produced: dict[str, Produced] = {}
        self.key_of: dict[str, SampleKey] = {}
        self.heard: dict[str, dict[int, float]] = {}
        self.given_up: set[SampleKey] = set()
        self.stepped_on: set[str] = set()
        self.tokens: dict[int, Token] = {}
        self.marked: dict[SampleKey, tuple[int, int]] = {}
        """Issue of the newest ticket under which tokens of an unfinished member were acknowledged, and how many."""
        self.leaving: set[int] = set()
        self.gone: set[int] = set()
        """Prompts that a trainer wants to leave out, and those of which the queue has said that they are."""
        self.items: dict[int, int | None] = {}
        self.reads = 0

    def found(self, kind: str, detail: str) -> None:
        self.findings.append((kind, detail))

    # --- calls

    def answered(self, who: Incarnation, first_sent: float, now: float) -> None:
        """A call had an effect. None that was sent after a newer incarnation was heard may."""
        epochs = self.heard.setdefault(who.slot, {})
        newer = [epoch for epoch, at in epochs.items() if epoch > who.epoch and at <= first_sent]
        if newer:
            self.found(FENCED, f"{who} at {now:.2f}, after {who.slot}#{newer[0]}")
        epochs.setdefault(who.epoch, now)

    # --- producers

    def made(self, digest: str, key: SampleKey | None, versions: Iterable[int]) -> None:
        self.produced[digest] = Produced(key, tuple(versions))

    def acknowledged(
        self, puts: Sequence[BlockPut], digests: Sequence[str], freed: Sequence[Extent], keys: Sequence[SampleKey]
    ) -> None:
        """A put that was not wanted any more comes back in its own answer."""
        back: set[Extent | None] = set(freed)
        if not any(put.block.extent in back for put in puts):
            for digest, key in zip(digests, keys, strict=True):
                self.produced[digest].kept_as = key

    def sampled(self, key: SampleKey, before: list[int], version: int, count: int) -> list[int]:
        """An engine went on behind these tokens."""
        new: list[int] = []
        for _ in range(count):
            last = (before + new)[-1] if before or new else 0
            new.append(len(self.tokens) + 1)
            self.tokens[new[-1]] = Token(key, last, version)
        return new

    def acknowledged_mark(self, key: SampleKey, issue: int, held: int) -> None:
        """The queue says that it keeps so many tokens."""
        self.marked[key] = max(self.marked.get(key, (0, 0)), (issue, held))

    def issued_again(self, key: SampleKey, issue: int, kept: int) -> None:
        """A later ticket for the member says how many of its tokens are kept."""
        last, held = self.marked.get(key, (0, 0))
        # After three tickets without progress they may be given up.
        if kept < held and 0 < issue - last <= 3:
            self.found(LOST, f"{held} tokens of {key} were marked under ticket {last}, {issue} has {kept}")

    def one_line(self, key: SampleKey, tokens: list[int]) -> None:
        """Each token must have been sampled for this member, behind the one that is before it."""
        for before, token in itertools.pairwise([0, *tokens]):
            made = self.tokens[token]
            if (made.key, made.before) != (key, before):
                self.found(FOREIGN, f"token {token} of {made.key}, sampled behind {made.before}, in {key} at {before}")

    # --- readers

    def read(self, who: Incarnation, key: SampleKey, digest: str | None, before: str | None = None) -> None:
        """Bytes read under a pin. before: what was read there under the same pin."""
        self.reads += 1
        made = self.produced.get(digest or "")
        wrong_key = made is not None and made.key is not None and made.key != key
        if made is None or wrong_key or (before is not None and before != digest):
            self.found(FOREIGN, f"{who} read {digest!r} as {key}, before {before!r}")
            return
        assert digest is not None
        first = self.key_of.setdefault(digest, key)
        if first != key:
            self.found(DOUBLED, f"{digest} is {first} and {key}")

    # --- trainers

    def version(self, version: int, parent: int, *, changed: bool) -> None:
        self.parents[version] = (parent, changed)

    def distance(self, a: int, b: int) -> int:
        """By the set of ancestors of each."""
        apart = self._line(a) ^ self._line(b)
        return sum(self.parents[version][1] for version in apart)

    def _line(self, version: int) -> set[int]:
        found = set()
        while version:
            found.add(version)
            version = self.parents[version][0]
        return found

    def consumed(self, who: Incarnation, weights: int, digest: str, masked: Iterable[tuple[int, int]] = ()) -> None:
        """A trainer is to train on it with these weights. Token n of a sample has its n-th version."""
        made, context = self.produced.get(digest), {n for start, end in masked for n in range(start, end)}
        versions = [version for n, version in enumerate(made.versions) if n not in context] if made else []
        lag = max((self.distance(weights, version) for version in versions), default=0)
        if lag > self.max_staleness:
            self.found(STALE, f"{who} at version {weights} got {digest} of {made}, {lag} updates old")

    def leaves_out(self, prompt: int) -> None:
        """A trainer is about to say so."""
        self.leaving.add(prompt)

    def left_out(self, prompt: int) -> None:
        """The queue has heard it."""
        self.gone.add(prompt)

    def is_of(self, prompt: int, item: int | None) -> None:
        """What a ticket says that the prompt is of."""
        first = self.items.setdefault(prompt, item)
        if first != item:
            self.found(CHANGED, f"prompt {prompt} was of item {first} and is of {item}")

    # --- the end

    def judge_path(self, path: dict[int, list[Trained]], prompts: int, retired: set[int]) -> None:
        """The steps that lead to the final weights."""
        trained = [one for step in path.values() for one in step]
        for what, values in (
            ("sample", [str(one.key) for one in trained]),
            ("digest", [one.digest for one in trained]),
            ("prompt", [str(prompt) for step in path.values() for prompt in {one.prompt for one in step}]),
        ):
            for value, times in Counter(values).items():
                if times > 1:
                    self.found(TWICE, f"{what} {value}: {times} times")
        again = {one.prompt for one in trained} & self.gone
        if again:
            self.found(LEFT_OUT, f"prompts {sorted(again)}")
        missing = set(range(prompts)) - {one.prompt for one in trained} - retired
        if missing:
            self.found(SKIPPED, f"prompts {sorted(missing)}")

    def judge_samples(self, notices: Iterable[Notice], used: set[str]) -> None:
        """Each acknowledged sample was used, or somebody was told of its end."""
        told, members_told = set(), set(self.given_up)
        for kind, fields in notices:
            if kind == "group_ended":
                told.add(fields["group"])
            elif kind == "members_ended":
                members_told.update(SampleKey(fields["group"], member) for member in fields["members"])
        for digest, made in self.produced.items():
            key = made.kept_as
            if key is not None and digest not in used and key.group not in told and key not in members_told:
                self.found(LOST, f"{digest} ({key})")

    def kinds(self) -> set[str]:
        return {kind for kind, _ in self.findings}
