"""The single truth of an episode: what was sampled, on what, and what of it is trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from relax_rt.roles.agentic.tokens.branches import branches_of, with_new_rows
from relax_rt.roles.agentic.tokens.messages import ASSISTANT, Key, check_messages, message_key
from relax_rt.roles.agentic.tokens.parsers import Parsed
from relax_rt.roles.agentic.tokens.pictures import MOST_MEDIA_BYTES, Pictures
from relax_rt.roles.agentic.tokens.template import ChatTemplate
from relax_rt.roles.agentic.tokens.tree import Call, Place, Said, Tree, calls_under, chain, token_chain, under
from relax_rt.roles.agentic.tokens.types import (
    FINISHED,
    Counts,
    Drift,
    Episode,
    Message,
    PromptPlan,
    Reasoning,
    Reply,
    Sampled,
    Tool,
)
from relax_rt.roles.data.media.pictures import Shown
from relax_rt.transport.rpc.errors import Gone, Refused

if TYPE_CHECKING:
    from relax_rt.roles.data.media.sight import Looked, Sight


class TokenLedger:
    """Feeds an engine token by token with what it sampled itself, and says in the end what is trained. Pure.

    Calls and completions are a tree. A call is
    - `first`: nothing came before it;
    - `continuation`: it goes on from a completion that nothing went on from yet. Client's messages are compared by
      content and name, the model's by words without the space around them and by tool calls; reasoning never;
    - `fork`: it asks the same again, goes on from a completion beside a call that is still open, or begins another
      conversation;
    - `edit`: it puts other messages where earlier ones were answered already, and none of those answers is in it;
    - `drift`: the caller changed history. What a completion in it was sampled on is not there any more (messages
      before it, or the tools), an answer is not the one that was given, or it does not go on from `previous`.

    Tokens of a fork, edit or drift go on behind those of the last completion in common, as a branch of their own; what
    differs is rendered anew, as context. Of what the drift left behind,
    - `fork` trains everything;
    - `realign` trains the completions that the new history still has (where they were sampled, and only there);
    - `drop` trains nothing.

    Reasoning that a caller leaves out: `keep_reasoning` goes on behind the sampled tokens all the same, thoughts and
    all. `strip` renders what the caller sends; where that does not begin with what was sampled, thoughts and all, the
    call becomes a branch of its own.

    Args:
        session: begins the ids of replies.
        max_tokens: of all branches together, shared context counted in each, as `episode` gives them.
        max_branches: branches at most.
        max_media_bytes: of all pictures together, each counted once, encoded.
    """

    def __init__(
        self,
        chat: ChatTemplate,
        *,
        max_tokens: int,
        max_branches: int = 64,
        max_media_bytes: int = MOST_MEDIA_BYTES,
        drift: Drift = "fork",
        reasoning: Reasoning = "keep_reasoning",
        session: str = "session",
    ) -> None:
        self._chat, self._drift, self._reasoning, self._session = chat, drift, reasoning, session
        self.max_tokens, self._max_branches = max_tokens, max_branches
        self._tree = Tree()
        self._pictures = Pictures(max_media_bytes)
        self._counts = Counts()
        self._calls = self._replies = self._tool_calls = 0
        self._given: dict[int, list[tuple[tuple[int, int], str]]] = {}
        """By number of the call: the place of each reply, and its id."""

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        may_call: bool = True,
        previous: str | None = None,
        n: int = 1,
        max_new_tokens: int | None = None,
        instead: PromptPlan | None = None,
    ) -> PromptPlan:
        """The tokens that the next completion is sampled on. The call is open until its completions came, or `abandon`.

        Args:
            messages: the whole conversation, as the caller has it.
            may_call: calls of the tools are looked for in what is said; else it is all words.
            previous: id of the reply that it goes on from, whatever the caller made of its words; else that is found
                by what was said.
            n: completions wanted.
            max_new_tokens: of each; so many tokens of the budget, or what is left, are held until they come. None:
                holds none, so that calls beside it may use them up.
            instead: of a call that was abandoned, whose place in the order of replies this one takes.

        Raises:
            Refused: a budget is used up, `previous` is not known, or the template takes no such conversation. Nothing
                is changed then.
        """
        check_messages(messages)
        keys = [self._chat.tools_key(tools), *(message_key(message) for message in messages)]
        place = self._tree.place(keys, self._named(previous) if previous is not None else None)
        messages = _as_sampled(messages, keys, place)
        tokens, text, extends = self._rendered(place, messages, tools)
        new = messages[max(place.known - 1, 0) :]
        offered = tuple(tools)
        if place.above is not None and place.above.call.tools == offered:
            # Callers send them with each call: they are kept once.
            offered = place.above.call.tools
        tokens, media = self._chat.with_pictures(tokens, self._pictures.of(new if extends else messages))
        call = Call(
            number=self._calls,
            order=self._calls if instead is None else instead.node,
            above=place.above,
            keys=tuple(keys[place.known :]),
            messages=tuple(dict(message) for message in new),
            kind=place.kind,
            tools=offered,
            may_call=may_call,
            waiting=n,
            tokens=tuple(tokens),
            text=text,
            extends=extends,
            media=media,
        )
        self._admit(call, max_new_tokens)
        self._calls += 1
        setattr(self._counts, call.kind, getattr(self._counts, call.kind) + 1)
        if place.above is not None:
            self._counts.realigned += not call.extends
            place.above.keys.add(keys[place.known - 1])
        if place.old is not None:
            self._leave(place.old, set(call.keys))
        path = token_chain(call.base)
        return PromptPlan(
            node=call.number,
            tokens=(*(token for said in path for token in (*said.call.tokens, *said.what.tokens)), *call.tokens),
            kind=call.kind,
            reused=sum(len(said.what.tokens) for said in path),
            room=call.room,
            n=n,
            rows=call.rows,
            media=(*(one.moved(said.call.start) for said in path for one in said.call.media), *_moved(call)),
            unseen=bool(offered) and keys[0] == self._chat.tools_key(()),
        )

    @property
    def sight(self) -> Sight | None:
        """What looks at pictures, if the model sees."""
        return self._chat.sight

    def show(self, looked: Looked) -> Message:
        """A picture that messages may have from now on; the part by which they do.

        Raises:
            Refused: there are too many, or they are too large together.
        """
        return self._pictures.add(looked)

    def _named(self, response: str) -> Said:
        if (said := self._tree.said.get(response)) is None:
            raise Refused(
                f"response {response!r}",
                why=f"session {self._session} has no such response, or dropped it",
                hint="name one of this session's replies, or send the conversation without naming one",
            )
        return said

    def _rendered(
        self, place: Place, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[list[int], str, bool]:
        """What an engine is given behind the tokens of what was said; if it cannot stand there, the whole prompt."""
        said = place.above
        if said is not None and self._reasoning == "keep_reasoning":
            delta = self._chat.delta(messages, tools, place.known - 1)
            if delta is not None:
                return *self._chat.behind(said.what.tokens, delta), True
        whole = self._chat.text(messages, tools)
        if said is not None and self._reasoning == "strip":
            before = "".join(one.call.text + one.text for one in token_chain(said))
            if whole.startswith(before):
                delta = self._chat.stop_text(said.what.tokens) + whole[len(before) :]
                return *self._chat.behind(said.what.tokens, delta), True
        return self._chat.encode(whole), whole, False

    def _admit(self, call: Call, max_new_tokens: int | None) -> None:
        """Take a call into the tree, if the budgets allow it."""
        what = f"a call of session {self._session} with a prompt of {call.end} tokens"
        if call.waiting < 1 or (max_new_tokens is not None and max_new_tokens < 1):
            raise Refused(what, why=f"n = {call.waiting}, max_new_tokens = {max_new_tokens}: at least one is sampled")
        self._tree.add(call)
        load = self._tree.load
        left = self.max_tokens - load.tokens
        call.room = min(left // call.waiting, max_new_tokens or left)
        if load.branches <= self._max_branches and call.room >= 1:
            self._tree.hold(call, call.room if max_new_tokens is not None else 0)
            return
        self._tree.remove(call)
        if load.branches > self._max_branches:
            why = f"the episode would have {load.branches} branches, max_branches is {self._max_branches}"
            raise Refused(what, why=why, hint="end the episode here, or raise max_branches")
        why = f"the episode's branches would have {load.tokens} tokens before an answer, max_tokens is"
        raise Refused(what, why=f"{why} {self.max_tokens}", hint="end the episode here, or raise max_tokens")

    def _leave(self, old: Call, kept: set[Key]) -> None:
        """Do with what a drift left behind as the policy says."""
        if self._drift == "fork":
            return
        for said in under(old):
            if said.trained and not (self._drift == "realign" and said.keys & kept):
                said.trained = False
                self._counts.dropped_tokens += len(said.what.tokens)
        self._tree.prune(list(calls_under(old)))

    def sampled(self, plan: PromptPlan, what: Sampled, choice: int | None = None) -> Reply:
        """Record a completion; `plan.n` times at most (more than once: siblings).

        Args:
            choice: which of the call's it is, from 0; None: they come in their order.

        Raises:
            Refused: it does not fit (lengths, versions, finish reason, room), or as many as wanted are there.
            Gone: the call was abandoned.
        """
        call = self._open(plan)
        count = len(what.tokens)
        if wrong := _wrong(what):
            raise Refused(f"a completion of call {call.number} of session {self._session}", why=wrong)
        # Its prompt is counted already, and what was held is for it.
        taken = self._tree.load.tokens - call.held
        if count > call.room or taken + count > self.max_tokens:
            left = max(0, min(call.room, self.max_tokens - taken))
            raise Refused(
                f"a completion of {count} tokens of session {self._session}",
                why=f"{left} are left for it",
                hint="sample no more than plan.room, and say max_new_tokens where calls run beside each other",
            )
        stop = self._chat.stop_text(what.tokens)
        spelled = self._chat.tokenizer.spell(what.tokens)
        text = spelled.removesuffix(stop)
        end = self._chat.turn_end
        self._counts.foreign_ends += bool(end) and not end.startswith(stop)
        parsed = self._chat.parse(text, call.tools if call.may_call else (), prompt=call.text)
        self._counts.malformed_calls += parsed.malformed
        message = self._message(parsed)
        self._replies += 1
        name = f"{self._session}-{self._replies}"
        kept, rows = with_new_rows(call, what)
        choice = len(call.said) if choice is None else choice
        said = Said(name, self._replies, call, kept, {message_key(message)}, dict(message), spelled, choice, rows=rows)
        self._tree.answer(said)
        self._given.setdefault(call.number, []).append((said.order, name))
        called = parsed.calls and what.finish_reason == "stop"
        return Reply(said.id, message, "tool_calls" if called else what.finish_reason, text)

    def told(self, response: str, message: Message) -> None:
        """The caller was told a reply in these words, which are not all that was sampled: it was cut before a stop
        string, say. With them it is known again, where it was said; what was sampled stays.

        Raises:
            Refused: there is no such reply.
        """
        said = self._named(response)
        said.told = message_key(message)
        said.keys.add(said.told)

    def _open(self, plan: PromptPlan) -> Call:
        call = self._tree.calls.get(plan.node)
        what = f"a completion of call {plan.node} of session {self._session}"
        if call is None or call.abandoned:
            raise Gone(what, why="the call was abandoned, or dropped with the history it belonged to")
        if not call.waiting:
            raise Refused(what, why=f"as many as were wanted are recorded already: {plan.n}")
        return call

    def _message(self, parsed: Parsed) -> Message:
        message: Message = {"role": ASSISTANT, "content": parsed.content}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if parsed.calls:
            message["content"] = parsed.content or None
            calls: list[dict[str, Any]] = []
            message["tool_calls"] = calls
            for one in parsed.calls:
                self._tool_calls += 1
                function = {"name": one.name, "arguments": one.arguments}
                # Nine letters and digits: Mistral's templates take no other ids.
                name = f"call{self._tool_calls % 100_000:05d}"
                if one.id and one.id not in [call["id"] for call in calls]:
                    # Templates repeat the id with the result.
                    name = one.id
                calls.append({"id": name, "type": "function", "function": function})
        return message

    def abandon(self, plan: PromptPlan) -> None:
        """The call was cancelled: what was sampled for it is not trained, and what still comes is refused.

        Where a later call goes on from it already, it stays there as context.
        """
        self._given.pop(plan.node, None)
        call = self._tree.calls.get(plan.node)
        if call is None or call.abandoned:
            return
        self._counts.abandoned += 1
        self._tree.give_up(call)
        for said in call.said:
            self._counts.abandoned_tokens += len(said.what.tokens) if said.trained else 0
            said.trained = False
        self._tree.prune([call])

    def conversation(self, response: str) -> list[Message]:
        """The messages up to and with a reply, to which new ones can be added for `prompt(..., previous=response)`.

        Raises:
            Refused: there is no such reply.
        """
        path = chain(self._named(response))
        return [dict(message) for said in path for message in (*said.call.messages, said.message)]

    @property
    def replies(self) -> tuple[str, ...]:
        """See Episode."""
        return tuple(name for _, name in sorted(one for given in self._given.values() for one in given))

    def episode(self) -> Episode:
        """What is to be trained, as it stands now; open calls are not part of it."""
        branches = tuple(branches_of(sorted(self._tree.said.values(), key=lambda one: one.order)))
        pictures = self._pictures.data({one.digest for branch in branches for one in branch.media})
        return Episode(branches, msgspec.structs.replace(self._counts), pictures, self.replies)


def budget_exhausted(error: Refused) -> bool:
    """Return whether a ledger refused a call because it has no tokens or branches left."""
    return "or raise max_" in (error.hint or "")


def _as_sampled(messages: Sequence[Message], keys: Sequence[Key], place: Place) -> Sequence[Message]:
    """A conversation with the replies that it goes on from in the words that were sampled, where callers were told
    less."""
    found = list(messages)
    for said in chain(place.above):
        # The first key is that of the tools.
        if said.told is not None and keys[said.depth - 1] == said.told:
            found[said.depth - 2] = {**found[said.depth - 2], "content": said.message["content"]}
    return found


def _moved(call: Call) -> Iterator[Shown]:
    """The pictures that are new in a call, where they stand in its prompt."""
    return (one.moved(call.start) for one in call.media)


def _wrong(what: Sampled) -> str:
    """Why this is no completion."""
    count = len(what.tokens)
    if what.finish_reason not in FINISHED:
        return f"it ended as {what.finish_reason!r}: only {' and '.join(FINISHED)} are ends, others are abandoned"
    if len(what.logprobs) != count:
        return f"{count} tokens with {len(what.logprobs)} log-probabilities"
    ends = [0, *(span.end for span in what.versions)]
    if ends[-1] != count or any(
        span.start != at or span.end <= at for span, at in zip(what.versions, ends, strict=False)
    ):
        return f"{count} tokens of versions {what.versions!r:.200}"
    if what.routing and (not count or len(what.routing) % count):
        return f"{count} tokens with {len(what.routing)} bytes of routing rows"
    return ""
