"""The conversations of a session as a tree of calls and completions; finds the position of a new call.

A conversation is a sequence of keys: that of its tools, then one for each message. A call node has the messages that
are new in it; its completions continue them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from relax_rt.roles.agentic.tokens.messages import ASSISTANT, Key
from relax_rt.roles.agentic.tokens.types import CONTEXT, Branch, BranchTurn, Kind, Message, Sampled, Tool
from relax_rt.roles.data.media.images import ImageRef, ImageSpan, image_digest
from relax_rt.roles.rollout.engines.base import extend_spans
from relax_rt.transport.queue.ledger.messages import VersionSpan


@dataclass(slots=True, eq=False)
class CompletionNode:
    """A completion.

    Attributes:
        id, number: its id, and its number in the session.
        choice: its index among its call's completions.
        keys: of its message as sampled, as delivered, and as callers who named it sent it back.
        message: as sampled. told: key of the delivered message, if that has less text.
        text: its tokens as text, stop token included.
        trained: its tokens are trained.
        rows: positions, from the first on, whose routing rows were recorded with it and the completions before it.
        calls: those that continue it in the conversation. extended: how many of them continue its tokens.
    """

    id: str
    number: int
    call: CallNode
    sampled: Sampled
    keys: set[Key]
    message: Message
    text: str
    choice: int = 0
    trained: bool = True
    rows: int = 0
    told: Key | None = None
    calls: list[CallNode] = field(default_factory=list)
    extended: int = 0

    @property
    def end(self) -> int:
        """Number of tokens up to its last."""
        return self.call.end + len(self.sampled.tokens)

    @property
    def order(self) -> tuple[int, int]:
        """Sort key among the replies of the session: by call, then by choice."""
        return self.call.order, self.choice

    @property
    def depth(self) -> int:
        """Number of keys of the conversation up to it."""
        return self.call.depth + len(self.call.keys) + 1


@dataclass(slots=True, eq=False)
class CallNode:
    """A call: what is new in it, and its completions.

    Attributes:
        order: its position among the calls: its number, unless it takes the position of another.
        above: the completion that its conversation continues. extends: its tokens continue it, too; else they start
            from the beginning.
        keys, messages: the new ones.
        tokens, text: what was rendered for it, after that of `above` or alone. media: the images among `tokens`.
        start, depth: number of tokens and keys before its own; stored, so that long conversations cost no summing up.
        tools: all of them. waiting: completions that may still come. room: tokens of each. held: tokens reserved for
            each.
        may_call: its completions may call the tools.
    """

    number: int
    order: int
    above: CompletionNode | None
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
    completions: list[CompletionNode] = field(default_factory=list)
    start: int = 0
    depth: int = 0
    media: tuple[ImageSpan, ...] = ()
    may_call: bool = True

    def __post_init__(self) -> None:
        self.depth = 0 if self.above is None else self.above.depth
        self.start = 0 if self.base is None else self.base.end

    @property
    def base(self) -> CompletionNode | None:
        """The completion whose tokens it continues."""
        return self.above if self.extends else None

    @property
    def rows(self) -> int:
        """Number of leading positions of its prompt whose routing rows earlier completions have recorded."""
        return 0 if self.base is None else self.base.rows

    @property
    def end(self) -> int:
        """Number of tokens of the whole prompt."""
        return self.start + len(self.tokens)

    @property
    def each(self) -> int:
        """Tokens that each pending completion counts in the budget."""
        return self.end + self.held


class SessionLoad(msgspec.Struct, frozen=True):
    """The size of a session: branches, and the tokens of all of them."""

    branches: int
    tokens: int


class CallPosition(msgspec.Struct, frozen=True):
    """The position of a conversation in the tree.

    Attributes:
        above: the last known completion in it. known: number of keys up to there.
        old: the call where a drift departs from history; it and everything below it are left behind.
    """

    above: CompletionNode | None
    known: int
    kind: Kind
    old: CallNode | None = None


class Tree:
    """The calls and completions of a session. The caller bounds its size.

    Attributes:
        first: calls that start a conversation. calls: all, by number. completions: all, by id.
        load: branches, and the tokens of all of them; pending completions count with their reserved tokens.
    """

    def __init__(self) -> None:
        self.first: list[CallNode] = []
        self.calls: dict[int, CallNode] = {}
        self.completions: dict[str, CompletionNode] = {}
        self.load = SessionLoad(0, 0)

    def below(self, completion: CompletionNode | None) -> list[CallNode]:
        """Return the calls that continue a completion, or that start a conversation."""
        return self.first if completion is None else completion.calls

    def add(self, call: CallNode) -> None:
        """Add a call."""
        self.calls[call.number] = call
        self.below(call.above).append(call)
        if call.base is not None:
            call.base.extended += 1
            if call.base.extended == 1:
                self._count(-1, call.base.end)
        self._count(call.waiting, call.each)

    def remove(self, call: CallNode) -> None:
        """Remove a call that nothing continues."""
        self._count(-call.waiting, call.each)
        if call.base is not None:
            call.base.extended -= 1
            if call.base.extended == 0:
                self._count(1, call.base.end)
        del self.calls[call.number]
        self.below(call.above).remove(call)

    def hold(self, call: CallNode, tokens: int) -> None:
        """Reserve this many tokens for each of a call's completions."""
        self._count(-call.waiting, call.each)
        call.held = tokens
        self._count(call.waiting, call.each)

    def answer(self, completion: CompletionNode) -> None:
        """Add a completion of a call."""
        self._count(-1, completion.call.each)
        completion.call.waiting -= 1
        completion.call.completions.append(completion)
        self.completions[completion.id] = completion
        self._count(1, completion.end)

    def abandon(self, call: CallNode) -> None:
        """Abandon a call: its pending completions will not come."""
        self._count(-call.waiting, call.each)
        call.abandoned, call.waiting = True, 0

    def prune(self, calls: Iterable[CallNode]) -> None:
        """Remove untrained completions that nothing continues, and finished calls without completions, among these
        calls and those above them."""
        for one in sorted(calls, key=lambda one: -one.number):
            call: CallNode | None = one
            while call is not None and call.number in self.calls:
                for completion in [
                    completion for completion in call.completions if not completion.trained and not completion.calls
                ]:
                    call.completions.remove(completion)
                    del self.completions[completion.id]
                    self._count(-1, completion.end)
                if call.waiting or call.completions:
                    break
                self.remove(call)
                call = None if call.above is None else call.above.call

    def _count(self, branches: int, tokens: int) -> None:
        """Add this many branches of this many tokens each to the load."""
        self.load = SessionLoad(self.load.branches + branches, self.load.tokens + branches * tokens)

    def place(self, keys: Sequence[Key], previous: CompletionNode | None) -> CallPosition:
        """Find the position of a conversation; `previous`: the completion that the caller says it continues."""
        if previous is not None and self._goes_on(keys, previous):
            above: CompletionNode | None = previous
            known = previous.depth
        else:
            above, known = self._deepest(keys)
        others, rest = self.below(above), keys[known:]
        if previous is not None and above is not previous:
            if (completion := _child_on_path(previous, above)) is not None:
                return CallPosition(above, known, "drift", completion)
            return CallPosition(above, known, "drift")
        if not others:
            return CallPosition(above, known, "continuation" if above else "first")
        if (old := _changed_call(others, rest)) is not None:
            return CallPosition(above, known, "drift", old)
        again = any(call.keys == tuple(rest) for call in others)
        apart = above is None and not any(_common_prefix(call.keys, rest) > 1 for call in others)
        open_ = any(call.waiting for call in others)
        return CallPosition(above, known, "fork" if again or apart or open_ else "edit")

    def _goes_on(self, keys: Sequence[Key], completion: CompletionNode) -> bool:
        """Return whether a conversation continues a completion, whatever the caller made of its text."""
        known = completion.depth
        if len(keys) < known or keys[known - 1][0] != ASSISTANT:
            return False
        at = 0
        for one in completion_path(completion):
            end = at + len(one.call.keys)
            if tuple(keys[at:end]) != one.call.keys or (one is not completion and keys[end] not in one.keys):
                return False
            at = end + 1
        return True

    def _deepest(self, keys: Sequence[Key]) -> tuple[CompletionNode | None, int]:
        """Return the last completion that a conversation has in common with the tree, and the number of keys up to it.

        Of several with the same text, prefer one that nothing continues yet, then the newest.
        """
        best: CompletionNode | None = None
        rank = (0, False, 0)
        ahead: list[tuple[CompletionNode | None, int]] = [(None, 0)]
        while ahead:
            above, known = ahead.pop()
            for call in self.below(above):
                end = known + len(call.keys)
                if end >= len(keys) or tuple(keys[known:end]) != call.keys:
                    continue
                for completion in [completion for completion in call.completions if keys[end] in completion.keys]:
                    ahead.append((completion, end + 1))
                    if (end + 1, not completion.calls, completion.number + 1) > rank:
                        best, rank = completion, (end + 1, not completion.calls, completion.number + 1)
        return best, rank[0]


def completion_path(completion: CompletionNode | None) -> list[CompletionNode]:
    """Return the completions of a conversation up to this one, first to last."""
    found: list[CompletionNode] = []
    while completion is not None:
        found.append(completion)
        completion = completion.call.above
    return found[::-1]


def token_path(completion: CompletionNode | None) -> list[CompletionNode]:
    """Return the completions whose tokens precede its own, itself the last."""
    found: list[CompletionNode] = []
    while completion is not None:
        found.append(completion)
        completion = completion.call.base
    return found[::-1]


def calls_below(call: CallNode) -> Iterator[CallNode]:
    """Yield a call and all calls below it."""
    ahead = [call]
    while ahead:
        one = ahead.pop()
        yield one
        for completion in one.completions:
            ahead += completion.calls


def completions_below(call: CallNode) -> Iterator[CompletionNode]:
    """Return the completions of a call and of all calls below it."""
    return (completion for one in calls_below(call) for completion in one.completions)


def _child_on_path(completion: CompletionNode, above: CompletionNode | None) -> CallNode | None:
    """Return the call right below `above` on the path to a completion; None if `above` is not on that path."""
    while completion.call.above is not None and completion.call.above is not above:
        completion = completion.call.above
    return completion.call if completion.call.above is above else None


def _common_prefix(one: Sequence[Key], other: Sequence[Key]) -> int:
    """Return the length of the common prefix of two sequences."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))


def _changed_call(others: Sequence[CallNode], rest: Sequence[Key]) -> CallNode | None:
    """Return the call whose history these keys change, if any.

    They do if they contain a completion of it or of a call below it (what that was sampled on was changed), or another
    answer to the same messages. The first criterion goes first; the newest of several calls is returned.
    """
    answers = {key for key in rest if key[0] == ASSISTANT}
    if not answers:
        return None
    for call in reversed(others):
        if any(completion.keys & answers for completion in completions_below(call)):
            return call
    for call in reversed(others):
        end = len(call.keys)
        if call.completions and len(rest) > end and rest[end][0] == ASSISTANT and tuple(rest[:end]) == call.keys:
            return call
    return None


def branches_of(completion: Sequence[CompletionNode]) -> Iterator[Branch]:
    """Yield a branch up to each trained completion that no other continues; a shared one is trained in the first."""
    counted = [one for one in completion if one.trained and one.sampled.tokens]
    inner = {before.number for one in counted for before in token_path(one.call.base)}
    owned: set[int] = set()
    for last in counted:
        if last.number not in inner:
            path = token_path(last)
            yield _branch(path, {one.number for one in path if one.trained} - owned)
            owned |= {one.number for one in path}


def _branch(path: Sequence[CompletionNode], owned: set[int]) -> Branch:
    tokens: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    versions: list[VersionSpan] = []
    turns: list[BranchTurn] = []
    media: list[ImageRef] = []
    for completion in path:
        rendered, sampled = completion.call.tokens, completion.sampled.tokens
        begun = len(tokens)
        media += (ImageRef(one.start + begun, one.end + begun, image_digest(one.data)) for one in completion.call.media)
        if rendered:
            messages = (*_before(completion.call), *completion.call.messages)
            # A call without messages asks for another reply after the last one.
            last = messages[-1]["role"] if messages else ASSISTANT
            role = CONTEXT if last == ASSISTANT else last
            turns.append(BranchTurn(len(tokens), len(tokens) + len(rendered), role, messages=messages))
        start = len(tokens) + len(rendered)
        trained = completion.number in owned
        if sampled:
            role = ASSISTANT if trained else CONTEXT
            turns.append(BranchTurn(start, start + len(sampled), role, completion.id, trained))
        tokens += [*rendered, *sampled]
        mask += [0] * len(rendered) + [int(trained)] * len(sampled)
        logprobs += [0.0] * len(rendered) + (list(completion.sampled.logprobs) if trained else [0.0] * len(sampled))
        for span in completion.sampled.versions if trained else ():
            extend_spans(versions, VersionSpan(span.start + start, span.end + start, span.version, span.kv_version))
    return Branch(
        tokens=tuple(tokens),
        loss_mask=tuple(mask),
        logprobs=tuple(logprobs),
        versions=tuple(versions),
        turns=tuple(turns),
        finish_reason=path[-1].sampled.finish_reason,
        routing=_routing(path),
        media=tuple(media),
    )


def _before(call: CallNode) -> Iterator[Message]:
    """Yield the earlier messages that were rendered with a call: the whole conversation, if the call does not continue
    the tokens of a completion."""
    for completion in completion_path(call.above if call.base is None else None):
        yield from (*completion.call.messages, completion.message)


def with_new_routing(call: CallNode, what: Sampled) -> tuple[Sampled, int]:
    """Strip a completion's routing rows to positions that have none yet, so that an episode has one row a token,
    however many turns it has.

    Returns:
        The completion, and the number of leading positions that have rows then.
    """
    count = len(what.tokens)
    if not count:
        return msgspec.structs.replace(what, routing=b"", prompt_routing=b""), call.rows
    width = len(what.routing) // count
    first = call.end - 1 - len(what.prompt_routing) // width if width else -1
    if not 0 <= first <= call.rows or len(what.prompt_routing) % width:
        # Rows after a gap cannot be used.
        return msgspec.structs.replace(what, routing=b"", prompt_routing=b""), 0
    new = what.prompt_routing[(call.rows - first) * width :]
    return msgspec.structs.replace(what, prompt_routing=new), call.end - 1 + count


def _routing(path: Sequence[CompletionNode]) -> bytes:
    """Return the routing rows of all positions but the last.

    Rows of sampled tokens were recorded when they were sampled; those of context with the first completion after it.
    """
    if path[-1].rows < path[-1].end - 1:
        return b""
    parts: list[bytes] = []
    for completion in path:
        if not completion.rows:
            # The rows that follow start with the first position again.
            parts.clear()
        parts += [completion.sampled.prompt_routing, completion.sampled.routing]
    return b"".join(parts)
