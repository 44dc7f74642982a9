"""The types of the token ledger: prompts, completions, replies, and the branches that are trained."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from relax_rt.roles.data.media.images import ImageRef, ImageSpan
from relax_rt.transport.queue.ledger.messages import VersionSpan

Message = dict[str, Any]
"""A chat message as in OpenAI's Chat Completions: `role`, `content` (str, list of parts, or None), `tool_calls`,
`tool_call_id`, `name`, `reasoning_content`. A part of type `image` has the `digest` of an image that the ledger was
shown."""
Tool = dict[str, Any]
"""A tool as in OpenAI's Chat Completions: `{"type": "function", "function": {name, description, parameters}}`."""

Drift = Literal["realign", "fork", "drop"]
Reasoning = Literal["keep_reasoning", "strip"]
Kind = Literal["first", "continuation", "fork", "edit", "drift"]
FINISHED = ("stop", "length")
CONTEXT = "context"
"""Role of assistant text that is not trained at its position: another branch trains it, none does, or a client wrote
it."""


class Sampled(msgspec.Struct, frozen=True):
    """A completion of n tokens, as an engine generated it.

    Attributes:
        tokens: sampled ids, a sampled stop token included.
        logprobs: behaviour log-probability of each token.
        versions: policy versions, run-length coded over positions [0, n) of the completion.
        finish_reason: stop or length.
        routing: n routing rows (mixture of experts), each of the position before its token; empty: none were recorded.
        prompt_routing: rows of the positions before the prompt's last, from position `PromptPlan.rows` on or an
            earlier one.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    finish_reason: str
    routing: bytes = b""
    prompt_routing: bytes = b""


class PromptPlan(msgspec.Struct, frozen=True):
    """The prompt of one call.

    Attributes:
        node: number of the call in its ledger.
        tokens: ids of the whole prompt.
        kind: relation of the call to those before it; see `TokenLedger`.
        reused: number of tokens that are reused as they were sampled.
        room: maximum number of tokens of each completion.
        n: number of completions.
        rows: leading positions of `tokens` whose routing rows earlier completions have recorded.
        media: the images among `tokens`.
        unseen: tools were offered, and the template does not show them.
    """

    node: int
    tokens: tuple[int, ...]
    kind: Kind
    reused: int
    room: int
    n: int = 1
    rows: int = 0
    media: tuple[ImageSpan, ...] = ()
    unseen: bool = False


class Reply(msgspec.Struct, frozen=True):
    """A completion as the caller gets it.

    Attributes:
        id: of this completion, unique in its session; a later call may name it as `previous`.
        message: role, content (None for tool calls without text), and, if there are any, `reasoning_content` and
            `tool_calls` (their arguments as JSON text, their ids nine letters and digits).
        finish_reason: stop, length or tool_calls.
        text: all sampled text, reasoning and tool calls as the model wrote them, without the stop token.
    """

    id: str
    message: Message
    finish_reason: str
    text: str


class BranchTurn(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, end) of a branch.

    Attributes:
        role: assistant: a completion that is trained here; context: assistant text that is not; else the role of the
            last message that was rendered there.
        response: the completion's id; empty for rendered messages.
        trained: the completion is trained in this branch. Of the branches that share a completion, one trains it.
        messages: the messages that were rendered there.
    """

    start: int
    end: int
    role: str
    response: str = ""
    trained: bool = False
    messages: tuple[Message, ...] = ()


class Branch(msgspec.Struct, frozen=True):
    """One causal sequence of T tokens.

    Attributes:
        tokens: ids.
        loss_mask: 1 on sampled tokens that are trained in this branch.
        logprobs: behaviour log-probabilities; 0 where loss_mask is 0.
        versions: of the tokens under loss mask 1, over positions in the branch.
        turns: cover [0, T) in order.
        finish_reason: of the last completion: stop or length.
        routing: T - 1 routing rows, or empty if one of them was not recorded.
        media: the images among its tokens.
    """

    tokens: tuple[int, ...]
    loss_mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    turns: tuple[BranchTurn, ...]
    finish_reason: str
    routing: bytes = b""
    media: tuple[ImageRef, ...] = ()


class Counts(msgspec.Struct):
    """Counters of a session.

    Attributes:
        first, continuation, fork, edit, drift: calls of each kind.
        realigned: calls rendered as a whole although they continue a completion, because the template's rendering does
            not continue it (always so if reasoning is stripped).
        dropped_tokens: sampled tokens that the policy for drift excluded from training.
        abandoned: cancelled calls. abandoned_tokens: tokens that had been recorded of them.
        malformed_calls: tool calls that could not be parsed and stayed text.
        foreign_ends: completions that ended with another stop token than the one that closes a turn in the template; it
            precedes the template's own if the conversation continues.
    """

    first: int = 0
    continuation: int = 0
    fork: int = 0
    edit: int = 0
    drift: int = 0
    realigned: int = 0
    dropped_tokens: int = 0
    abandoned: int = 0
    abandoned_tokens: int = 0
    malformed_calls: int = 0
    foreign_ends: int = 0


class Episode(msgspec.Struct, frozen=True):
    """The training data of a session: each sampled token once.

    Attributes:
        branches: in the order of their last replies; empty if nothing is trained.
        counts: see Counts.
        images: those of the branches, encoded, by digest.
        replies: ids of all delivered completions, also of untrained ones: in the order of their calls, and of the
            choices of a call, whichever was recorded first.
    """

    branches: tuple[Branch, ...]
    counts: Counts
    images: dict[str, bytes] = {}
    replies: tuple[str, ...] = ()

    @property
    def trained(self) -> list[BranchTurn]:
        """The assistant's turns, each trained completion once, branch after branch."""
        return [turn for branch in self.branches for turn in branch.turns if turn.trained]
