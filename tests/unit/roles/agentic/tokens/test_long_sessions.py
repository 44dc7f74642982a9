"""Sessions of any length: nothing goes through all turns by calling itself, and what there is need not be added up."""

from __future__ import annotations

import sys
from itertools import pairwise

from chat_fixtures import says, tiny, user

from relax_rt.roles.agentic.tokens.ledger import TokenLedger
from relax_rt.roles.agentic.tokens.template import ChatTemplate
from relax_rt.roles.agentic.tokens.tree import (
    CallNode,
    CompletionNode,
    ConversationTree,
    SessionLoad,
    calls_below,
    completion_path,
    token_path,
)
from relax_rt.roles.agentic.tokens.types import SampledCompletion
from relax_rt.transport.queue.ledger.messages import VersionSpan

TURNS = 3000
WHAT = SampledCompletion((7, 8), (-1.0, -2.0), (VersionSpan(0, 2, 1, 1),), "stop")


def grown(tree: ConversationTree, turns: int) -> CompletionNode:
    """A conversation of so many turns, three tokens rendered and two sampled in each."""
    completion: CompletionNode | None = None
    for number in range(turns):
        message = {"role": "user", "content": str(number)}
        key = ("user", str(number))
        extends = completion is not None
        call = CallNode(
            number, number, completion, (key,), (message,), "continuation", (), 1, tokens=(1, 2, 3), extends=extends
        )
        tree.add(call)
        completion = CompletionNode(
            f"s-{number}", number, call, WHAT, {("assistant", str(number))}, {"role": "assistant"}, "x"
        )
        tree.answer(completion)
    assert completion is not None
    return completion


def test_a_conversation_may_be_longer_than_the_stack() -> None:
    tree = ConversationTree()
    last = grown(tree, TURNS)
    assert 2 * sys.getrecursionlimit() < TURNS
    assert (last.end, last.depth) == (5 * TURNS, 2 * TURNS)
    assert tree.load == SessionLoad(1, 5 * TURNS)
    assert len(completion_path(last)) == len(token_path(last)) == TURNS
    first = tree.first[0]
    # Given up as a whole: nothing is left of it.
    for call in list(calls_below(first)):
        tree.abandon(call)
        for completion in call.completions:
            completion.trained = False
    tree.prune(list(calls_below(first)))
    assert (tree.calls, tree.completions, tree.first, tree.load) == ({}, {}, [], SessionLoad(0, 0))


def test_a_session_of_many_turns() -> None:
    chat = ChatTemplate(tiny())
    book = TokenLedger(chat, max_tokens=1 << 20)
    messages, last = [user("a")], ""
    lengths = []
    for _ in range(360):
        plan = book.prompt(messages, previous=last or None, max_new_tokens=4)
        reply = book.record(plan, says(chat, "b"))
        last = reply.id
        messages += [reply.message, user("c")]
        lengths.append(len(plan.tokens))
    (branch,) = book.episode().branches
    assert sum(branch.loss_mask) == 360 * 2 and len({b - a for a, b in pairwise(lengths)}) == 1
