"""The ledger: where calls belong, what is trained, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from call_templates import KIMI_K2
from chat_fixtures import MOVES_TOOLS, QWEN3, TOOLS, made, prompt_text, qwen3, says, smollm2, tiny, tokens_of, user

from relax_rt.roles.agentic.tokens.ledger import TokenLedger
from relax_rt.roles.agentic.tokens.template import ChatTemplate
from relax_rt.roles.agentic.tokens.types import Branch, LedgerReply, PromptPlan, SampledCompletion, SessionCounts
from relax_rt.transport.queue.ledger.messages import VersionSpan
from relax_rt.transport.rpc.errors import Gone, Refused

CHAT = ChatTemplate(tiny())


def ledger(chat: ChatTemplate = CHAT, **settings: Any) -> TokenLedger:
    return TokenLedger(chat, **{"max_tokens": 10_000, "session": "s", **settings})


def ask(
    book: TokenLedger, messages: list[dict[str, Any]], words: str, chat: ChatTemplate = CHAT, **how: Any
) -> tuple[PromptPlan, LedgerReply]:
    plan = book.prompt(messages, **how)
    return plan, book.record(plan, says(chat, words))


def trained(book: TokenLedger, chat: ChatTemplate = CHAT) -> list[list[str]]:
    """What is trained in each branch, completion by completion."""
    return [
        [chat.tokenizer.decode(branch.tokens[turn.start : turn.end]) for turn in branch.turns if turn.trained]
        for branch in book.episode().branches
    ]


def spelled(branch: Branch, chat: ChatTemplate = CHAT) -> str:
    return chat.tokenizer.spell(branch.tokens)


def history(*words: str) -> list[dict[str, Any]]:
    """A conversation in turns, the user's first."""
    return [{"role": "assistant" if place % 2 else "user", "content": one} for place, one in enumerate(words)]


def test_a_conversation_is_one_branch() -> None:
    book = ledger()
    first, reply = ask(book, history("a"), "b")
    second, _ = ask(book, [*history("a"), reply.message, user("c")], "d")
    assert (first.kind, second.kind, first.reused, second.reused) == ("first", "continuation", 0, 2)
    (branch,) = book.episode().branches
    assert spelled(branch) == "<|user|>a<|end|><|assistant|>b<|end|><|user|>c<|end|><|assistant|>d<|end|>"
    assert second.tokens == branch.tokens[: len(second.tokens)]
    assert branch.loss_mask == (0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1)
    b, d = says(CHAT, "b"), says(CHAT, "d")
    assert branch.logprobs == (*[0.0] * 4, *b.logprobs, *[0.0] * 4, *d.logprobs)
    assert branch.versions == (VersionSpan(4, 6, 1, 1), VersionSpan(10, 12, 1, 1))
    assert [(turn.role, turn.response, turn.trained) for turn in branch.turns] == [
        ("user", "", False), ("assistant", "s-1", True), ("user", "", False), ("assistant", "s-2", True)
    ]  # fmt: skip


def test_a_call_may_ask_for_another_reply_without_a_new_message() -> None:
    book = ledger()
    _, reply = ask(book, history("a"), "b")
    ask(book, [*history("a"), reply.message], "c")
    assert trained(book) == [["b", "c"]]
    (branch,) = book.episode().branches
    assert [turn.role for turn in branch.turns] == ["user", "assistant", "context", "assistant"]


@pytest.mark.parametrize("chat", [ChatTemplate(smollm2()), CHAT])
@pytest.mark.parametrize("cut", [False, True])
def test_the_end_of_a_turn_is_there_once(chat: ChatTemplate, cut: bool) -> None:
    book = ledger(chat)
    plan = book.prompt(history("a"))
    reply = book.record(plan, says(chat, "So it is", "length" if cut else "stop"))
    assert reply.finish_reason == ("length" if cut else "stop")
    book.record(book.prompt([*history("a"), reply.message, user("c")]), says(chat, "d"))
    (branch,) = book.episode().branches
    said = history("a", "So it is", "c")
    assert spelled(branch, chat) == chat.text(said) + "d" + chat.tokenizer.spell([chat.tokenizer.end_id])
    # A cut completion was sampled without an end: the template's is context.
    end = branch.turns[1].end - (not cut)
    assert branch.tokens[end] == chat.tokenizer.end_id and branch.loss_mask[end] == int(not cut)


def test_tokens_stay_as_they_were_sampled() -> None:
    chat = ChatTemplate(smollm2())
    book = ledger(chat)
    plan = book.prompt(history("a"))
    odd = [*tokens_of(chat, "wonderful", letters=True), chat.tokenizer.end_id]
    assert odd[:-1] != chat.encode("wonderful")
    reply = book.record(plan, made(odd))
    again = book.prompt([*history("a"), {"role": "assistant", "content": " wonderful\n"}, user("c")])
    assert reply.text == "wonderful" and again.kind == "continuation"
    assert again.tokens[len(plan.tokens) :][: len(odd)] == tuple(odd)


def test_tool_calls_are_the_same_however_they_are_written() -> None:
    book = ledger(qwen3())
    plan = book.prompt([user("1 + 2?")], TOOLS)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "note": "é"}}\n</tool_call>'
    reply = book.record(plan, says(qwen3(), call))
    assert (reply.finish_reason, reply.message["content"], reply.text) == ("tool_calls", None, call)
    (told,) = reply.message["tool_calls"]
    assert json.loads(told["function"]["arguments"]) == {"a": 1, "note": "é"}
    assert len(told["id"]) == 9 and told["id"].isalnum()
    function = {"name": "add", "arguments": '{ "note":"\\u00e9",\n"a": 1}'}
    back = {"role": "assistant", "content": "", "tool_calls": [{"id": "x", "type": "function", "function": function}]}
    result = {"role": "tool", "content": [{"type": "text", "text": "3"}], "tool_call_id": "x"}
    again = book.prompt([user("1 + 2?"), back, result], TOOLS)
    assert again.kind == "continuation"
    want = (
        f"{call}<|im_end|>\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt_text(qwen3(), again) == prompt_text(qwen3(), plan) + want
    function["arguments"] = '{"a": 2, "note": "é"}'
    assert book.prompt([user("1 + 2?"), back, result], TOOLS).kind == "drift"


def test_malformed_calls_stay_text_and_are_counted() -> None:
    book = ledger(qwen3())
    reply = book.record(book.prompt([user("a")], TOOLS), says(qwen3(), "<tool_call>{oops</tool_call>"))
    assert (reply.message["content"], reply.finish_reason) == ("<tool_call>{oops</tool_call>", "stop")
    assert book.prompt([user("a"), reply.message, user("b")], TOOLS).kind == "continuation"
    assert book.episode().counts.malformed_calls == 1


THOUGHT = "<think>\n1 and 1\n</think>\n\nTwo."


@pytest.mark.parametrize("back", ["left out", "told", "inline"])
def test_reasoning_is_kept_or_each_turn_is_a_branch(back: str) -> None:
    chat = qwen3()
    for policy in ("keep_reasoning", "strip"):
        book = ledger(chat, reasoning=policy)
        first, reply = ask(book, [user("1 + 1?")], THOUGHT, chat)
        assert (reply.message["content"], reply.message["reasoning_content"]) == ("Two.", "1 and 1")
        shown = {"left out": {"role": "assistant", "content": "Two."}, "told": reply.message}.get(
            back, {"role": "assistant", "content": THOUGHT}
        )
        second, _ = ask(book, [user("1 + 1?"), shown, user("2 + 2?")], "Four.", chat)
        assert second.kind == "continuation"
        branches = book.episode().branches
        if policy == "keep_reasoning":
            told = "<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
            assert prompt_text(chat, second) == prompt_text(chat, first) + THOUGHT + told
            assert len(branches) == 1 and book.episode().counts.realigned == 0
        else:
            # As the template has it: earlier thoughts are gone.
            assert prompt_text(chat, second) == chat.text([user("1 + 1?"), reply.message, user("2 + 2?")])
            assert "1 and 1" not in prompt_text(chat, second) and second.reused == 0
            assert trained(book, chat) == [[THOUGHT], ["Four."]] and book.episode().counts.realigned == 1


def test_stripping_goes_on_behind_what_the_template_keeps() -> None:
    book = ledger(qwen3(), reasoning="strip")
    call = '<think>\nhm\n</think>\n\nWell.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    asked, reply = ask(book, [user("1?")], call, qwen3(), tools=TOOLS)
    result = {"role": "tool", "content": "1"}
    # Between a question and its answer thoughts stay, if the client sends them.
    told = book.prompt([user("1?"), reply.message, result], TOOLS)
    assert told.reused == len(says(qwen3(), call).tokens)
    assert prompt_text(qwen3(), told) == qwen3().text([user("1?"), reply.message, result], TOOLS)
    assert told.tokens[: len(asked.tokens)] == asked.tokens
    left_out = {name: value for name, value in reply.message.items() if name != "reasoning_content"}
    assert book.prompt([user("1?"), left_out, result], TOOLS).reused == 0


def test_a_thought_that_the_prompt_opens() -> None:
    chat = ChatTemplate(smollm2(), template=QWEN3, variables={"open_thought": True})
    book = ledger(chat)
    first, reply = ask(book, [user("1 + 1?")], THOUGHT.removeprefix("<think>\n"), chat)
    assert (reply.message["content"], reply.message["reasoning_content"]) == ("Two.", "1 and 1")
    second = book.prompt([user("1 + 1?"), {"role": "assistant", "content": "Two."}, user("b")])
    assert prompt_text(chat, first).endswith("<think>\n") and "<think>\n<think>" not in prompt_text(chat, second)
    told = "<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert prompt_text(chat, second) == chat.text([user("1 + 1?")]) + THOUGHT.removeprefix("<think>\n") + told


def test_siblings_share_their_prompt_and_go_on_apart() -> None:
    book = ledger()
    plan = book.prompt(history("a"), n=2)
    for words in ("b", "c"):
        book.record(plan, says(CHAT, words))
    with pytest.raises(Refused, match="recorded already: 2"):
        book.record(plan, says(CHAT, "d"))
    assert ask(book, history("a", "c", "e"), "f")[0].kind == "continuation"
    assert ask(book, history("a", "b", "g"), "h")[0].kind == "continuation"
    assert trained(book) == [["c", "f"], ["b", "h"]]


def test_replies_are_in_the_order_of_calls_and_choices_whichever_came_first() -> None:
    book = ledger()
    pair, other = book.prompt(history("a"), n=2), book.prompt(history("z"))
    alone = book.prompt(history("y"))
    for plan, words, choice in ((other, "d", None), (pair, "c", 1), (alone, "e", None), (pair, "b", 0)):
        book.record(plan, says(CHAT, words), choice)
    assert book.episode().replies == ("s-4", "s-2", "s-1", "s-3") and trained(book) == [["b"], ["c"], ["d"], ["e"]]
    # What is abandoned its caller does not have; what takes its place is where it was.
    book.abandon(other)
    assert book.episode().replies == ("s-4", "s-2", "s-3")
    again = book.prompt(history("z"), instead=other)
    book.record(again, says(CHAT, "d"))
    assert book.episode().replies == ("s-4", "s-2", "s-5", "s-3")


def test_each_sampled_token_is_trained_in_one_branch() -> None:
    book = ledger()
    ask(book, history("a"), "b")
    one, other = book.prompt(history("a", "b", "c")), book.prompt(history("a", "b", "d"))
    assert (one.kind, other.kind) == ("continuation", "fork")
    book.record(other, says(CHAT, "e"))
    book.record(one, says(CHAT, "f"))
    branches = book.episode().branches
    assert trained(book) == [["b", "f"], ["e"]]
    for branch, asked, said in zip(branches, "cd", "fe", strict=True):
        assert spelled(branch).endswith(f"b<|end|><|user|>{asked}<|end|><|assistant|>{said}<|end|>")
    shared = branches[1].turns[1]
    assert (shared.role, shared.response, shared.trained) == ("context", "s-1", False)
    assert sum(map(sum, (branch.loss_mask for branch in branches))) == 6


def test_kinds() -> None:
    book = ledger()
    assert ask(book, history("a"), "b")[0].kind == "first"
    assert ask(book, history("a"), "b2")[0].kind == "fork"
    assert ask(book, history("other"), "b")[0].kind == "fork"
    assert ask(book, history("a", "b", "c"), "d")[0].kind == "continuation"
    assert ask(book, history("a", "b", "c2"), "d")[0].kind == "edit"
    assert ask(book, history("a", "b", "c", "d", "e", "not ours", "f"), "g")[0].kind == "continuation"
    assert ask(book, history("a", "B", "c", "d", "e"), "f")[0].kind == "drift"
    assert ask(book, history("c", "d", "e"), "f")[0].kind == "drift"
    counts = book.episode().counts
    assert (counts.first, counts.continuation, counts.fork, counts.edit, counts.drift) == (1, 2, 2, 1, 2)


def test_examples_that_the_client_wrote_are_no_drift() -> None:
    book = ledger()
    assert ask(book, history("a", "example", "b"), "c")[0].kind == "first"
    plan = book.prompt(history("a", "example", "b", "c", "d"))
    assert (plan.kind, plan.reused) == ("continuation", 2)
    book.abandon(plan)
    assert book.prompt(history("a", "example", "b2")).kind == "edit"


def drifted(policy: str) -> tuple[TokenLedger, PromptPlan]:
    """The client shortens what it said in its second message, after three answers."""
    book = ledger(drift=policy)
    ask(book, history("a"), "b")
    ask(book, history("a", "b", "a long story"), "d")
    ask(book, history("a", "b", "a long story", "d", "e"), "f")
    ask(book, history("a", "b", "a long story", "d", "e", "f", "g"), "h")
    return book, ask(book, history("a", "b", "short", "d", "e", "F", "g"), "i")[0]


@pytest.mark.parametrize(
    ("policy", "want", "dropped"),
    [
        ("fork", [["b", "d", "f", "h"], ["i"]], 0),
        ("realign", [["b", "d"], ["i"]], 4),
        ("drop", [["b", "i"]], 6),
    ],
)
def test_drift(policy: str, want: list[list[str]], dropped: int) -> None:
    book, plan = drifted(policy)
    assert (plan.kind, plan.reused) == ("drift", 2)
    assert prompt_text(CHAT, plan) == CHAT.text(history("a", "b", "short", "d", "e", "F", "g"))
    assert trained(book) == want
    counts = book.episode().counts
    assert (counts.drift, counts.dropped_tokens) == (1, dropped)
    assert book.episode().replies == ("s-1", "s-2", "s-3", "s-4", "s-5"), "it was given them, whatever is trained"
    # What was dropped counts in no budget any more; the new history goes on as if nothing had been.
    assert ask(book, history("a", "b", "short", "d", "e", "F", "g", "i", "j"), "k")[0].kind == "continuation"


def test_other_tools_are_drift_where_the_template_shows_them() -> None:
    for chat, kind in ((qwen3(), "drift"), (ChatTemplate(smollm2()), "continuation")):
        book = ledger(chat)
        ask(book, history("a"), "b", chat, tools=TOOLS)
        plan = book.prompt(history("a", "b", "c"), [*TOOLS, *TOOLS])
        assert plan.kind == kind
        assert prompt_text(chat, plan) == chat.text(history("a", "b", "c"), [*TOOLS, *TOOLS])


def test_a_reply_that_is_named_is_gone_on_from_whatever_became_of_its_words() -> None:
    book = ledger()
    reply = ask(book, history("a"), "A long answer")[1]
    plan, second = ask(book, history("a", "A...", "b"), "c", previous=reply.id)
    assert (plan.kind, plan.reused) == ("continuation", 14)
    # The client goes on to call it so.
    assert book.prompt(history("a", "A...", "b", "c", "d"), previous=second.id).kind == "continuation"
    assert book.prompt(history("a", "A...", "b", "c", "e")).kind == "fork"
    assert book.conversation(second.id) == history("a", "A long answer", "b", "c")
    assert book.prompt([*book.conversation(second.id), user("f")], previous=second.id).kind == "fork"
    assert book.prompt(history("z"), previous=second.id).kind == "drift"
    for call in (lambda: book.prompt(history("a"), previous="s-9"), lambda: book.conversation("s-9")):
        with pytest.raises(Refused, match=r"'s-9'.*no such response"):
            call()


def test_of_completions_that_say_the_same_the_named_one_is_gone_on_from() -> None:
    book = ledger()
    plan = book.prompt(history("a"), n=2)
    one, _ = (
        book.record(plan, SampledCompletion(w.tokens, (p, p), w.versions, "stop"))
        for p in (-1.0, -2.0)
        for w in [says(CHAT, "b")]
    )
    ask(book, history("a", "b", "c"), "d", previous=one.id)
    ask(book, history("a", "b", "e"), "f")
    assert [branch.logprobs[4] for branch in book.episode().branches] == [-1.0, -2.0]


def test_a_template_that_moves_its_tools_is_rendered_anew_and_that_is_counted() -> None:
    chat = ChatTemplate(tiny(), template=MOVES_TOOLS)
    book = ledger(chat)
    ask(book, history("a"), "b", chat, tools=TOOLS)
    plan, _ = ask(book, history("a", "b", "c"), "d", chat, tools=TOOLS)
    assert (plan.kind, plan.reused) == ("continuation", 0)
    assert prompt_text(chat, plan) == chat.text(history("a", "b", "c"), TOOLS)
    assert trained(book, chat) == [["b"], ["d"]]
    assert book.episode().counts.realigned == 1


def test_an_empty_completion_is_gone_on_from() -> None:
    book = ledger()
    plan = book.prompt(history("a"))
    reply = book.record(plan, made([], "length"))
    assert (reply.message["content"], book.episode().branches) == ("", ())
    second = ask(book, [*history("a"), reply.message, user("b")], "c")[0]
    assert (second.kind, second.tokens) == ("continuation", tuple(CHAT.render(history("a", "", "b"))))
    assert trained(book) == [["c"]]


def test_a_stop_token_of_another_kind_stays() -> None:
    chat = ChatTemplate(tiny())
    chat.tokenizer.stop_ids  # noqa: B018
    raw = chat.tokenizer.raw
    other = raw.convert_tokens_to_ids("<|unk|>")
    chat.tokenizer.__dict__["stop_ids"] = frozenset({chat.tokenizer.end_id, other})
    try:
        book = ledger(chat)
        reply = book.record(book.prompt(history("a")), made([*chat.encode("b"), other]))
        assert reply.text == "b"
        plan = book.prompt(history("a", "b", "c"))
        assert "b<|unk|><|end|><|user|>c" in prompt_text(chat, plan)
        assert book.episode().counts.foreign_ends == 1
    finally:
        del chat.tokenizer.__dict__["stop_ids"]


def test_what_is_abandoned_is_not_trained() -> None:
    book = ledger()
    ask(book, history("a"), "b")
    lost = book.prompt(history("a", "b", "c"), max_new_tokens=50)
    book.abandon(lost)
    book.abandon(lost)
    with pytest.raises(Gone, match="abandoned"):
        book.record(lost, says(CHAT, "d"))
    late = book.prompt(history("a", "b", "c"))
    assert late.kind == "continuation"
    book.record(late, says(CHAT, "e"))
    book.abandon(late)
    assert trained(book) == [["b"]]
    # One of two came before its caller left; somebody went on from it.
    pair = book.prompt(history("a", "b", "f"), n=2)
    book.record(pair, says(CHAT, "g"))
    book.prompt(history("a", "b", "f", "g", "h"))
    book.abandon(pair)
    with pytest.raises(Gone):
        book.record(pair, says(CHAT, "g2"))
    counts = book.episode().counts
    assert (counts.abandoned, counts.abandoned_tokens) == (3, 4)


def test_context_that_is_not_trained_stays_context() -> None:
    book = ledger()
    first, _ = ask(book, history("a"), "b")
    ask(book, history("a", "b", "c"), "d")
    book.abandon(first)
    (branch,) = book.episode().branches
    assert spelled(branch).endswith("b<|end|><|user|>c<|end|><|assistant|>d<|end|>") and trained(book) == [["d"]]
    assert branch.logprobs[4] == 0.0 and branch.versions == (VersionSpan(10, 12, 1, 1),)


def test_a_call_keeps_the_id_that_the_model_wrote() -> None:
    chat = ChatTemplate(tiny(), template=KIMI_K2)
    book = ledger(chat)
    call = "<|tool_call_begin|>functions.add:{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    said = "".join(call.format(number) for number in (0, 1, 1))
    _, reply = ask(book, history("a"), said, chat, tools=TOOLS)
    assert [one["id"] for one in reply.message["tool_calls"]] == ["functions.add:0", "functions.add:1", "call00003"]


def test_budgets() -> None:
    book = ledger(max_tokens=16, max_branches=2)
    plan = book.prompt(history("a"), max_new_tokens=4)
    assert plan.room == 4 and book.prompt(history("a")).room == 4
    with pytest.raises(Refused, match="3 branches, max_branches is 2"):
        book.prompt(history("a"))
    with pytest.raises(Refused, match="5 tokens of session s: 4 are left"):
        book.record(plan, says(CHAT, "bcde"))
    book.record(plan, says(CHAT, "bcd"))
    with pytest.raises(Refused, match=r"16 tokens before an answer, max_tokens is 16"):
        book.prompt(history("a", "bcd", "e"))
    assert trained(book) == [["bcd"]]


def test_what_is_held_for_one_call_another_does_not_get() -> None:
    book = ledger(max_tokens=20)
    free, held = book.prompt(history("a")), book.prompt(history("b"), max_new_tokens=8)
    assert (free.room, held.room) == (16, 8)
    with pytest.raises(Refused, match="6 tokens of session s: 4 are left"):
        book.record(free, says(CHAT, "cdefg"))
    book.record(held, says(CHAT, "cdefghi"))
    book.record(free, says(CHAT, "cde"))
    assert sum(len(branch.tokens) for branch in book.episode().branches) == 20


def test_a_refusal_changes_nothing() -> None:
    book = ledger(max_tokens=12)
    ask(book, history("a"), "b")
    for _ in range(3):
        with pytest.raises(Refused):
            book.prompt(history("a", "b", "a long word"))
    with pytest.raises(Refused, match="at least one is sampled"):
        book.prompt(history("a", "b", "c"), n=0)
    assert book.prompt(history("a", "b", "c")).kind == "continuation"
    assert book.episode().counts == SessionCounts(first=1, continuation=1)


@pytest.mark.parametrize(
    ("what", "wrong"),
    [
        (SampledCompletion((7,), (), (VersionSpan(0, 1, 1, 1),), "stop"), "1 tokens with 0 log-probabilities"),
        (SampledCompletion((7,), (-1.0,), (), "stop"), "1 tokens of versions"),
        (SampledCompletion((7,), (-1.0,), (VersionSpan(0, 2, 1, 1),), "stop"), "1 tokens of versions"),
        (
            SampledCompletion((7, 7), (-1.0, -1.0), (VersionSpan(0, 1, 1, 1), VersionSpan(0, 2, 1, 1)), "stop"),
            "of versions",
        ),
        (SampledCompletion((7,), (-1.0,), (VersionSpan(0, 1, 1, 1),), "abort"), "others are abandoned"),
        (
            SampledCompletion((7, 7), (-1.0, -1.0), (VersionSpan(0, 2, 1, 1),), "stop", b"abc"),
            "3 bytes of routing rows",
        ),
    ],
)
def test_what_is_no_completion_is_refused(what: SampledCompletion, wrong: str) -> None:
    book = ledger()
    plan = book.prompt(history("a"))
    with pytest.raises(Refused, match=wrong):
        book.record(plan, what)
    book.record(plan, says(CHAT, "b"))


def test_routing_rows_are_of_every_position_but_the_last() -> None:
    def routed(plan: PromptPlan, mark: bytes) -> SampledCompletion:
        plain = says(CHAT, "b")
        return SampledCompletion(
            *(getattr(plain, name) for name in plain.__struct_fields__[:4]),
            mark.upper() * 2,
            mark * (len(plan.tokens) - 1),
        )

    book = ledger()
    plan = book.prompt(history("a"))
    assert plan.rows == 0
    reply = book.record(plan, routed(plan, b"x"))
    plan = book.prompt([*history("a"), reply.message, user("c")])
    # <|user|> a <|end|> <|assistant|> b <|end|>: the last was sent nowhere yet.
    assert plan.rows == 5
    second = book.record(plan, routed(plan, b"y"))
    assert book.episode().branches[0].routing == b"xxxXXyyyyYY"
    _, third = ask(book, [*history("a"), reply.message, user("d")], "e")
    assert book.episode().branches[1].routing == b""
    # Behind one without rows all of the prompt's are asked for again, and those before it are not taken twice.
    plan = book.prompt([*history("a"), reply.message, user("d"), third.message, user("f")])
    assert plan.rows == 0
    book.record(plan, routed(plan, b"z"))
    assert book.episode().branches[1].routing == b"z" * (len(plan.tokens) - 1) + b"ZZ"
    # With rows that begin behind the first that is lacking there would be a gap.
    plan = book.prompt([*history("a"), reply.message, user("c"), second.message, user("g")])
    whole = routed(plan, b"g")
    gap = whole.prompt_routing[plan.rows + 1 :]
    book.record(plan, msgspec.structs.replace(whole, prompt_routing=gap))
    assert book.episode().branches[-1].routing == b""


def test_calls_that_come_to_nothing_use_up_nothing() -> None:
    book = ledger(drift="drop", max_branches=2)
    said = history("a")
    for place in range(12):
        plan, _ = ask(book, said, "b")
        for _ in range(5):
            book.abandon(book.prompt(said, max_new_tokens=100))
        assert plan.kind == ("drift" if place else "first")
        said = [*said, {"role": "assistant", "content": f"not b, {place}"}, user("c")]
    assert trained(book) == [["b"]]
    assert book.episode().counts.dropped_tokens == 2 * 11
