"""The conversations of a session as a tree of calls and completions: where a new call belongs, and what it changes.

A conversation is a sequence of keys: that of its tools, then one for each message. A call holds those of its messages
that are new, and its completions go on from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from relax_rt.roles.agentic.tokens.messages import ASSISTANT, Key
from relax_rt.roles.agentic.tokens.types import Kind, Message, Sampled, Tool
from relax_rt.roles.data.media.pictures import Shown


@dataclass(slots=True, eq=False)
class Said:
    """A completion.

    Attributes:
        id, number: its name, and how many came before it in the session.
        choice: which of its call's it is.
        keys: of its message as it was sampled, as the caller was told, and as callers who named it sent it back.
        message: as it was sampled. told: key of what the caller was told, if that is less.
        text: its tokens spelled, stop token and all.
        trained: its tokens count.
        rows: positions, from the first on, whose routing rows were recorded with it and with those it stands behind.
        calls: those that go on from it in the conversation. extended: how many of them go on behind its tokens.
    """

    id: str
    number: int
    call: Call
    what: Sampled
    keys: set[Key]
    message: Message
    text: str
    choice: int = 0
    trained: bool = True
    rows: int = 0
    told: Key | None = None
    calls: list[Call] = field(default_factory=list)
    extended: int = 0

    @property
    def end(self) -> int:
        """Tokens up to its last."""
        return self.call.end + len(self.what.tokens)

    @property
    def order(self) -> tuple[int, int]:
        """Its place among the replies of the session: by the call, then the choice."""
        return self.call.order, self.choice

    @property
    def depth(self) -> int:
        """Keys of the conversation up to it."""
        return self.call.depth + len(self.call.keys) + 1


@dataclass(slots=True, eq=False)
class Call:
    """A call: what was new in it, and what came of it.

    Attributes:
        order: its place among the calls; its number, unless it takes the place of another.
        above: the completion that its conversation goes on from. extends: its tokens do, too; else they begin anew.
        keys, messages: what is new.
        tokens, text: what was rendered for it, behind that of `above` or alone. media: the pictures among `tokens`.
        start, depth: tokens and keys before its own. A conversation may be as long as it likes: they are not summed up
            along it.
        tools: all of them. waiting: completions that may still come. room: tokens of each. held: of each, kept in the
            budget.
        abandoned: it was given up. may_call: its completions may call the tools.
    """

    number: int
    order: int
    above: Said | None
    keys: tuple[Key, ...]
    messages: tuple[Message, ...]
    kind: Kind
    tools: tuple[Tool, ...]
    waiting: int
    tokens: tuple[int, ...] = ()
    text: str = ""
    extends: bool = False
    room: int = 0
    held: int = 0
    abandoned: bool = False
    said: list[Said] = field(default_factory=list)
    start: int = 0
    depth: int = 0
    media: tuple[Shown, ...] = ()
    may_call: bool = True

    def __post_init__(self) -> None:
        self.depth = 0 if self.above is None else self.above.depth
        self.start = 0 if self.base is None else self.base.end

    @property
    def base(self) -> Said | None:
        """The completion whose tokens it goes on behind."""
        return self.above if self.extends else None

    @property
    def rows(self) -> int:
        """Positions of its prompt, from the first on, whose routing rows are there from completions before it."""
        return 0 if self.base is None else self.base.rows

    @property
    def end(self) -> int:
        """Tokens of the whole prompt."""
        return self.start + len(self.tokens)

    @property
    def each(self) -> int:
        """Tokens that a completion still to come counts with."""
        return self.end + self.held


class Load(msgspec.Struct, frozen=True):
    """What a session comes to: branches, and the tokens of all of them."""

    branches: int
    tokens: int


class Place(msgspec.Struct, frozen=True):
    """Where a conversation belongs.

    Attributes:
        above: the last completion in it. known: keys up to there.
        old: what a drift leaves behind: the call where it parts, and all that follows that.
    """

    above: Said | None
    known: int
    kind: Kind
    old: Call | None = None


class Tree:
    """All that a session still has. Bounded by who adds to it.

    Attributes:
        first: calls that begin a conversation. calls: all, by number. said: all completions, by id.
        load: branches, and the tokens of all of them; completions that are still to come count with what is held for
            them.
    """

    def __init__(self) -> None:
        self.first: list[Call] = []
        self.calls: dict[int, Call] = {}
        self.said: dict[str, Said] = {}
        self.load = Load(0, 0)

    def below(self, said: Said | None) -> list[Call]:
        """The calls that go on from a completion, or that begin a conversation."""
        return self.first if said is None else said.calls

    def add(self, call: Call) -> None:
        """A call is there."""
        self.calls[call.number] = call
        self.below(call.above).append(call)
        if call.base is not None:
            call.base.extended += 1
            if call.base.extended == 1:
                self._count(-1, call.base.end)
        self._count(call.waiting, call.each)

    def remove(self, call: Call) -> None:
        """It never was; nothing may go on from it."""
        self._count(-call.waiting, call.each)
        if call.base is not None:
            call.base.extended -= 1
            if call.base.extended == 0:
                self._count(1, call.base.end)
        del self.calls[call.number]
        self.below(call.above).remove(call)

    def hold(self, call: Call, tokens: int) -> None:
        """Keep so many for each of its completions."""
        self._count(-call.waiting, call.each)
        call.held = tokens
        self._count(call.waiting, call.each)

    def answer(self, said: Said) -> None:
        """One of a call's completions is there."""
        self._count(-1, said.call.each)
        said.call.waiting -= 1
        said.call.said.append(said)
        self.said[said.id] = said
        self._count(1, said.end)

    def give_up(self, call: Call) -> None:
        """What still was to come of a call does not."""
        self._count(-call.waiting, call.each)
        call.abandoned, call.waiting = True, 0

    def prune(self, calls: Iterable[Call]) -> None:
        """Forget completions that are not trained, and calls that are over without any, where nothing goes on: of these
        calls and those above them."""
        for one in sorted(calls, key=lambda one: -one.number):
            call: Call | None = one
            while call is not None and call.number in self.calls:
                for said in [said for said in call.said if not said.trained and not said.calls]:
                    call.said.remove(said)
                    del self.said[said.id]
                    self._count(-1, said.end)
                if call.waiting or call.said:
                    break
                self.remove(call)
                call = None if call.above is None else call.above.call

    def _count(self, branches: int, tokens: int) -> None:
        """So many branches of so many tokens each come to what there is."""
        self.load = Load(self.load.branches + branches, self.load.tokens + branches * tokens)

    def place(self, keys: Sequence[Key], previous: Said | None) -> Place:
        """Where a conversation belongs; `previous`: what the caller says that it goes on from."""
        if previous is not None and self._goes_on(keys, previous):
            above: Said | None = previous
            known = previous.depth
        else:
            above, known = self._deepest(keys)
        others, rest = self.below(above), keys[known:]
        if previous is not None and above is not previous:
            if (said := _last_of(previous, above)) is not None:
                return Place(above, known, "drift", said)
            return Place(above, known, "drift")
        if not others:
            return Place(above, known, "continuation" if above else "first")
        if (old := _parted(others, rest)) is not None:
            return Place(above, known, "drift", old)
        again = any(call.keys == tuple(rest) for call in others)
        apart = above is None and not any(_alike(call.keys, rest) > 1 for call in others)
        open_ = any(call.waiting for call in others)
        return Place(above, known, "fork" if again or apart or open_ else "edit")

    def _goes_on(self, keys: Sequence[Key], said: Said) -> bool:
        """Whether a conversation goes on from a completion, whatever the caller made of its words."""
        known = said.depth
        if len(keys) < known or keys[known - 1][0] != ASSISTANT:
            return False
        at = 0
        for one in chain(said):
            end = at + len(one.call.keys)
            if tuple(keys[at:end]) != one.call.keys or (one is not said and keys[end] not in one.keys):
                return False
            at = end + 1
        return True

    def _deepest(self, keys: Sequence[Key]) -> tuple[Said | None, int]:
        """The last completion that a conversation has in common with the tree, and the keys up to it.

        Of several that say the same, the one that nothing goes on from yet; then the newest.
        """
        best: Said | None = None
        rank = (0, False, 0)
        ahead: list[tuple[Said | None, int]] = [(None, 0)]
        while ahead:
            above, known = ahead.pop()
            for call in self.below(above):
                end = known + len(call.keys)
                if end >= len(keys) or tuple(keys[known:end]) != call.keys:
                    continue
                for said in [said for said in call.said if keys[end] in said.keys]:
                    ahead.append((said, end + 1))
                    if (end + 1, not said.calls, said.number + 1) > rank:
                        best, rank = said, (end + 1, not said.calls, said.number + 1)
        return best, rank[0]


def chain(said: Said | None) -> list[Said]:
    """The completions of a conversation up to this one, first to last."""
    found: list[Said] = []
    while said is not None:
        found.append(said)
        said = said.call.above
    return found[::-1]


def token_chain(said: Said | None) -> list[Said]:
    """Those whose tokens it stands behind, itself the last."""
    found: list[Said] = []
    while said is not None:
        found.append(said)
        said = said.call.base
    return found[::-1]


def calls_under(call: Call) -> Iterator[Call]:
    """A call and all that goes on from it."""
    ahead = [call]
    while ahead:
        one = ahead.pop()
        yield one
        for said in one.said:
            ahead += said.calls


def under(call: Call) -> Iterator[Said]:
    """The completions of a call and of all that goes on from it."""
    return (said for one in calls_under(call) for said in one.said)


def _last_of(said: Said, above: Said | None) -> Call | None:
    """The call right below `above` on the way to a completion; None: it is not on that way."""
    while said.call.above is not None and said.call.above is not above:
        said = said.call.above
    return said.call if said.call.above is above else None


def _alike(one: Sequence[Key], other: Sequence[Key]) -> int:
    """How many keys two sequences begin with in common."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))


def _parted(others: Sequence[Call], rest: Sequence[Key]) -> Call | None:
    """The call whose history these keys change, if they do.

    They do if one of its completions, or of what goes on from it, is among them (what it was sampled on was changed),
    or if there is another answer to the same messages. Found by the first, then by the second; the newest of several.
    """
    answers = {key for key in rest if key[0] == ASSISTANT}
    if not answers:
        return None
    for call in reversed(others):
        if any(said.keys & answers for said in under(call)):
            return call
    for call in reversed(others):
        end = len(call.keys)
        if call.said and len(rest) > end and rest[end][0] == ASSISTANT and tuple(rest[:end]) == call.keys:
            return call
    return None
