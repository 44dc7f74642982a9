"""The token ledger of a session: what was sampled, on which tokens, and what of it is trained.

The env role (episode.py) and the gateway (sessions) render each prompt and record each completion here; `episode`
returns the training sequences in the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from relax_rt.roles.agentic.tokens.images import MAX_MEDIA_BYTES, SessionImages
from relax_rt.roles.agentic.tokens.messages import ASSISTANT, check_messages, message_key
from relax_rt.roles.agentic.tokens.parsers import ParsedCompletion
from relax_rt.roles.agentic.tokens.template import ChatTemplate
from relax_rt.roles.agentic.tokens.tree import (
    CallNode,
    CallPosition,
    CompletionNode,
    ConversationTree,
    branches_of,
    calls_below,
    completion_path,
    completions_below,
    token_path,
    with_new_routing,
)
from relax_rt.roles.agentic.tokens.types import (
    FINISHED,
    Drift,
    Episode,
    LedgerReply,
    Message,
    PromptPlan,
    Reasoning,
    SampledCompletion,
    SessionCounts,
    Tool,
)
from relax_rt.transport.rpc.errors import Gone, Refused

if TYPE_CHECKING:
    from relax_rt.roles.data.media.image_processor import ImageProcessor, ProcessedImage


class TokenLedger:
    """Builds each prompt from the tokens that were sampled before it, and decides what is trained. Pure.

    Rendering a conversation again may tokenize a reply differently from how it was sampled; training on such tokens
    would be wrong. So the tokens of replies are never rendered again: only what is new since the last reply is.

    Calls and completions are a tree. A call is
    - `first`: nothing came before it;
    - `continuation`: it continues a completion that no other call continues yet. Clients' messages are compared by
      content and name, the model's by its text without surrounding space and by tool calls; reasoning never;
    - `fork`: it asks the same again, continues a completion beside a call that is still open, or starts another
      conversation;
    - `edit`: it has other messages where earlier ones were answered already, and none of those answers;
    - `drift`: the caller changed history. What a completion was sampled on is not there any more (messages before it,
      or the tools), an answer is not the one that was given, or it does not continue `previous`.

    Tokens of a fork, edit or drift continue those of the last common completion, as a branch of their own; what differs
    is rendered again, as context. Of what a drift leaves behind,
    - `fork` trains everything;
    - `realign` trains the completions that the new history still has (where they were sampled, and only there);
    - `drop` trains nothing.

    Reasoning that a caller leaves out: `keep_reasoning` continues the sampled tokens, reasoning included. `strip`
    renders what the caller sends; if that does not start with what was sampled, the call becomes a branch of its own.

    Args:
        session: prefix of reply ids.
        max_tokens: of all branches together, shared context counted in each, as `episode` returns them.
        max_media_bytes: of all images together, each counted once, encoded.
    """

    def __init__(
        self,
        chat: ChatTemplate,
        *,
        max_tokens: int,
        max_branches: int = 64,
        max_media_bytes: int = MAX_MEDIA_BYTES,
        drift: Drift = "fork",
        reasoning: Reasoning = "keep_reasoning",
        session: str = "session",
    ) -> None:
        self._chat, self._drift, self._reasoning, self._session = chat, drift, reasoning, session
        self.max_tokens, self._max_branches = max_tokens, max_branches
        self._tree = ConversationTree()
        self._images = SessionImages(max_media_bytes)
        self._counts = SessionCounts()
        self._calls = self._replies = self._tool_calls = 0
        self._reply_ids: dict[int, list[tuple[tuple[int, int], str]]] = {}
        """Number of the call -> order and id of each reply."""

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
        """Return the tokens for the next completion. The call is open until its completions are recorded, or `abandon`.

        Args:
            messages: the whole conversation, as the caller has it.
            may_call: parse tool calls in the completions; else they are all text.
            previous: id of the reply that it continues, whatever the caller made of its text; else the reply is found
                by comparing messages.
            n: completions wanted.
            max_new_tokens: of each; this many tokens of the budget, or what is left of it, are reserved for them. None:
                reserves none, so that concurrent calls may use them up.
            instead: plan of an abandoned call whose position in the order of replies this one takes.

        Raises:
            Refused: a budget is used up, `previous` is not known, or the template does not render the conversation.
                Nothing is changed then.
        """
        check_messages(messages)
        keys = [self._chat.tools_key(tools), *(message_key(message) for message in messages)]
        place = self._tree.place(keys, self._find(previous) if previous is not None else None)
        messages = list(messages)
        for completion in completion_path(place.above):
            # Replies have the text that was sampled, also if the caller got less of it. The first key is the tools'.
            if completion.delivered is not None and keys[completion.depth - 1] == completion.delivered:
                at = completion.depth - 2
                messages[at] = {**messages[at], "content": completion.message["content"]}
        tokens, text, extends = self._render(place, messages, tools)
        new = messages[max(place.known - 1, 0) :]
        offered = tuple(tools)
        if place.above is not None and place.above.call.tools == offered:
            # Callers send the same tools with each call: store them once.
            offered = place.above.call.tools
        tokens, media = self._chat.expand_images(tokens, self._images.in_messages(new if extends else messages))
        call = CallNode(
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
        self._add_call(call, max_new_tokens)
        self._calls += 1
        setattr(self._counts, call.kind, getattr(self._counts, call.kind) + 1)
        if place.above is not None:
            self._counts.realigned += not call.extends
            place.above.keys.add(keys[place.known - 1])
        if place.old is not None and self._drift != "fork":
            # Stop training the history that a drift left behind.
            for completion in completions_below(place.old):
                if completion.trained and not (self._drift == "realign" and completion.keys & set(call.keys)):
                    completion.trained = False
                    self._counts.dropped_tokens += len(completion.sampled.tokens)
            self._tree.prune(list(calls_below(place.old)))
        path = token_path(call.base)
        return PromptPlan(
            node=call.number,
            tokens=(
                *(token for completion in path for token in (*completion.call.tokens, *completion.sampled.tokens)),
                *call.tokens,
            ),
            kind=call.kind,
            reused=sum(len(completion.sampled.tokens) for completion in path),
            room=call.room,
            n=n,
            rows=call.rows,
            media=(
                *(one.shifted(completion.call.start) for completion in path for one in completion.call.media),
                *(one.shifted(call.start) for one in call.media),
            ),
            unseen=bool(offered) and keys[0] == self._chat.tools_key(()),
        )

    @property
    def image_processor(self) -> ImageProcessor | None:
        """The image processor, if the model takes images."""
        return self._chat.image_processor

    def add_image(self, image: ProcessedImage) -> Message:
        """Add an image and return the part by which messages refer to it.

        Raises:
            Refused: there are too many, or they are too large together.
        """
        return self._images.add(image)

    def _find(self, response: str) -> CompletionNode:
        if (completion := self._tree.completions.get(response)) is None:
            raise Refused(
                f"response {response!r}",
                why=f"session {self._session} has no such response, or dropped it",
                hint="name one of this session's replies, or send the conversation without naming one",
            )
        return completion

    def _render(
        self, place: CallPosition, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[list[int], str, bool]:
        """Return what follows the tokens of the completion it continues, or the whole prompt if it cannot follow them.

        Returns:
            Token ids, their text, and whether they continue the completion's tokens.
        """
        completion = place.above
        if completion is not None and self._reasoning == "keep_reasoning":
            delta = self._chat.delta(messages, tools, place.known - 1)
            if delta is not None:
                return *self._chat.behind(completion.sampled.tokens, delta), True
        whole = self._chat.text(messages, tools)
        if completion is not None and self._reasoning == "strip":
            before = "".join(one.call.text + one.text for one in token_path(completion))
            if whole.startswith(before):
                delta = self._chat.stop_text(completion.sampled.tokens) + whole[len(before) :]
                return *self._chat.behind(completion.sampled.tokens, delta), True
        return self._chat.encode(whole), whole, False

    def _add_call(self, call: CallNode, max_new_tokens: int | None) -> None:
        """Add a call to the tree, if the budgets allow it."""
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

    def record(self, plan: PromptPlan, what: SampledCompletion, choice: int | None = None) -> LedgerReply:
        """Record a completion, at most `plan.n` of them (more than one are siblings).

        Args:
            choice: its index among the call's completions; None: they come in order.

        Raises:
            Refused: it does not fit (lengths, versions, finish reason, room), or there are as many as wanted already.
            Gone: the call was abandoned.
        """
        call = self._tree.calls.get(plan.node)
        about = f"a completion of call {plan.node} of session {self._session}"
        if call is None or call.abandoned:
            raise Gone(about, why="the call was abandoned, or dropped with the history it belonged to")
        if not call.waiting:
            raise Refused(about, why=f"as many as were wanted are recorded already: {plan.n}")
        count = len(what.tokens)
        if wrong := _invalid(what):
            raise Refused(about, why=wrong)
        # Its prompt is counted already, and the reserved tokens are for it.
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
        kept, rows = with_new_routing(call, what)
        choice = len(call.completions) if choice is None else choice
        completion = CompletionNode(
            name, self._replies, call, kept, {message_key(message)}, dict(message), spelled, choice, rows=rows
        )
        self._tree.answer(completion)
        self._reply_ids.setdefault(call.number, []).append((completion.order, name))
        called = parsed.calls and what.finish_reason == "stop"
        return LedgerReply(completion.id, message, "tool_calls" if called else what.finish_reason, text)

    def record_delivered(self, response: str, message: Message) -> None:
        """Record that the caller got a reply with less text than was sampled, as one that was cut at a stop string.

        The reply is recognised by that text from now on; what was sampled stays.

        Raises:
            Refused: there is no such reply.
        """
        completion = self._find(response)
        completion.delivered = message_key(message)
        completion.keys.add(completion.delivered)

    def _message(self, parsed: ParsedCompletion) -> Message:
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
        """Cancel a call: its completions are not trained, and further ones are refused.

        If a later call continues one of them already, that stays as context.
        """
        self._reply_ids.pop(plan.node, None)
        call = self._tree.calls.get(plan.node)
        if call is None or call.abandoned:
            return
        self._counts.abandoned += 1
        self._tree.abandon(call)
        for completion in call.completions:
            self._counts.abandoned_tokens += len(completion.sampled.tokens) if completion.trained else 0
            completion.trained = False
        self._tree.prune([call])

    def conversation(self, response: str) -> list[Message]:
        """Return the messages up to a reply, to which new ones can be added for `prompt(..., previous=response)`.

        Raises:
            Refused: there is no such reply.
        """
        path = completion_path(self._find(response))
        return [dict(message) for completion in path for message in (*completion.call.messages, completion.message)]

    @property
    def replies(self) -> tuple[str, ...]:
        """Ids of all replies in order; see Episode."""
        return tuple(name for _, name in sorted(one for given in self._reply_ids.values() for one in given))

    def episode(self) -> Episode:
        """Return what is trained at this moment; open calls are not part of it."""
        branches = tuple(branches_of(sorted(self._tree.completions.values(), key=lambda one: one.order)))
        images = self._images.data({one.digest for branch in branches for one in branch.media})
        return Episode(branches, msgspec.structs.replace(self._counts), images, self.replies)


def budget_exhausted(error: Refused) -> bool:
    """Return whether a ledger refused a call because it has no tokens or branches left."""
    return "or raise max_" in (error.hint or "")


def _invalid(what: SampledCompletion) -> str:
    """Return why this is not a valid completion; empty if it is."""
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
