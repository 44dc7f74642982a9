"""Whatever a client does to its conversations: what is trained is what was sampled, on what it was sampled on."""

from __future__ import annotations

import copy
import json
import struct
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from chat_fixtures import LLAMA3, QWEN3, TOOLS, llama, prompt_text, smollm2, tiny, tokens_of, user
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_rt.roles.agentic.tokens.ledger import TokenLedger
from relax_rt.roles.agentic.tokens.messages import message_key
from relax_rt.roles.agentic.tokens.template import ChatTemplate
from relax_rt.roles.agentic.tokens.tree import SessionLoad
from relax_rt.roles.agentic.tokens.types import Drift, LedgerReply, PromptPlan, SampledCompletion
from relax_rt.transport.queue.ledger.messages import VersionSpan

WORDS = st.sampled_from(["yes", "No, it is not.", "a\nb", "1 + 1 = 2", "<b>", '{"a": 1}', "<tool", "x" * 30])
STOP = "\nObservation:"
THOUGHTS = st.sampled_from(["hm", "first\n\nthen", "1 + 1"])
ARGUMENTS = st.dictionaries(st.sampled_from(["a", "note"]), st.one_of(st.integers(0, 9), WORDS), max_size=2)


@dataclass
class View:
    """A conversation as its client has it, and the same with all thoughts, as the model knows it."""

    sent: list[dict[str, Any]]
    meant: list[dict[str, Any]]
    of: PromptPlan | None = None


@dataclass
class Session:
    """A client that talks with a sampler through a ledger, and remembers everything that the sampler did."""

    chat: ChatTemplate
    oracle: ChatTemplate
    ways: frozenset[str]
    draw: Any
    drift: Drift = "fork"
    routed: bool = False
    book: TokenLedger = field(init=False)
    said: int = 0
    views: list[View] = field(default_factory=list)
    given: list[View] = field(default_factory=list)
    """All that there ever was, also what was abandoned."""
    record: dict[str, tuple[PromptPlan, SampledCompletion]] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    """Of each completion: the number that is in its routing rows."""

    def __post_init__(self) -> None:
        self.book = TokenLedger(self.chat, max_tokens=1 << 20, max_branches=512, drift=self.drift)

    def step(self) -> None:
        """Open one or two calls, and answer them in any order."""
        opened = [self.open() for _ in range(self.draw(st.integers(1, 2)))]
        for plan, view in self.draw(st.permutations(opened)):
            for _ in range(plan.n):
                self.answer(plan, view)
            if self.draw(st.integers(0, 7)) == 0:
                self.abandon(plan)

    def open(self) -> tuple[PromptPlan, View]:
        view = self.following()
        tools = TOOLS if "calls" in self.ways else ()
        meant = {self.oracle.text(one, tools) for one in self.meanings(view)}
        plan = self.book.prompt(view.sent, tools, n=self.draw(st.integers(1, 2)))
        assert prompt_text(self.chat, plan) in meant and ("repeats" in self.ways or len(meant) == 1)
        return plan, view

    def meanings(self, view: View) -> list[list[dict[str, Any]]]:
        """What a conversation may mean: where several completions say the same, the last one in it may be any."""
        keys = [message_key(message) for message in view.sent]
        ends = [one for one in self.given if keys[: len(one.sent)] == [message_key(m) for m in one.sent]]
        longest = max((len(one.sent) for one in ends), default=0)
        found = [[*one.meant, *view.meant[longest:]] for one in ends if len(one.sent) == longest]
        return found or [view.meant]

    def following(self) -> View:
        """What the client sends next: it begins, goes on from anywhere, puts its last words otherwise, or repeats."""
        old = self.draw(st.sampled_from(self.views)) if self.views else View([], [])
        how = self.draw(st.sampled_from(["go on", "go on", "begin", "edit", "repeat", *self.ways & {"rewrites"}]))
        if how == "begin" or not old.sent:
            return self.grown(View([], []))
        if how == "go on":
            return self.grown(old)
        if how == "rewrites":
            place = self.draw(st.integers(0, len(old.sent) - 1))
            changed = [*old.sent[:place], {**old.sent[place], "content": "Never mind."}, *old.sent[place + 1 :]]
            return self.grown(View(changed, changed))
        keep = max(place for place, message in enumerate(old.sent) if message["role"] == "assistant")
        return (
            View(old.sent[:keep], old.meant[:keep])
            if how == "repeat"
            else self.grown(View(old.sent[: keep - 1], old.meant[: keep - 1]))
        )

    def grown(self, view: View) -> View:
        last = view.meant[-1] if view.meant else {}
        new = [
            {"role": "tool", "content": self.draw(WORDS), "tool_call_id": call["id"]}
            for call in last.get("tool_calls", ())
        ]
        if not new or self.draw(st.booleans()):
            new.append(user(self.draw(WORDS)))
        return View([*view.sent, *copy.deepcopy(new)], [*view.meant, *new])

    def answer(self, plan: PromptPlan, view: View) -> None:
        what = self.sample()
        if self.routed:
            # An engine may tell more of the prompt's than are lacking.
            start, prompt = self.draw(st.integers(0, plan.rows)), len(plan.tokens)
            told = rows_of(self.said, start, prompt - 1)
            own = rows_of(self.said, prompt - 1, prompt - 1 + len(what.tokens))
            what = msgspec.structs.replace(what, routing=own, prompt_routing=told)
        reply = self.book.record(plan, what)
        self.record[reply.id] = (plan, what)
        self.rows[reply.id] = self.said
        sent, meant = [*view.sent, self.sent_back(self.told(reply))], [*view.meant, copy.deepcopy(reply.message)]
        self.views.append(View(sent, meant, plan))
        self.given.append(self.views[-1])

    def told(self, reply: LedgerReply) -> LedgerReply:
        """What the client hears of a reply: that up to the stop string, if it has one."""
        content = reply.message["content"] or ""
        if "stops" not in self.ways or STOP not in content:
            return reply
        message = {**reply.message, "content": content.partition(STOP)[0]}
        self.book.record_delivered(reply.id, message)
        return msgspec.structs.replace(reply, message=message)

    def sample(self) -> SampledCompletion:
        # Where no two completions say the same it is known which one a client means that names none.
        words = self.draw(st.sampled_from(["yes", "no"]))
        words = words if "repeats" in self.ways else f"{chr(ord('A') + self.said)} {self.draw(WORDS)}"
        words += STOP if "stops" in self.ways and self.draw(st.booleans()) else ""
        self.said += 1
        if "calls" in self.ways and self.draw(st.booleans()):
            call = json.dumps({"name": "add", "arguments": self.draw(ARGUMENTS)}, ensure_ascii=False)
            words += f"\n<tool_call>\n{call}\n</tool_call>"
        if "thinks" in self.ways:
            words = f"<think>\n{self.draw(THOUGHTS)}\n</think>\n\n{words}"
        tokens = tokens_of(self.chat, words, letters=self.draw(st.booleans()))
        cut = "is cut" in self.ways and self.draw(st.integers(0, 3)) == 0
        tokens = tokens[: self.draw(st.integers(0, len(tokens)))] if cut else [*tokens, self.chat.tokenizer.end_id]
        count = len(tokens)
        middle, version = self.draw(st.integers(0, count)), self.draw(st.integers(1, 3))
        spans = [VersionSpan(0, middle, version, version), VersionSpan(middle, count, version + 1, version)]
        logprobs = tuple(-(self.said * 1000 + place + 1) / 1024 for place in range(count))
        known = tuple(span for span in spans if span.start < span.end)
        return SampledCompletion(tuple(tokens), logprobs, known, "length" if cut else "stop")

    def sent_back(self, reply: LedgerReply) -> dict[str, Any]:
        """As clients send a reply back: without thoughts, with space around words, arguments spaced otherwise."""
        message = copy.deepcopy(reply.message)
        if "rewrites" in self.ways:
            return message
        if self.draw(st.booleans()):
            message.pop("reasoning_content", None)
        if message["content"]:
            message["content"] = self.draw(st.sampled_from(["", " ", "\n"])) + message["content"].strip() + "\n"
        for call in message.get("tool_calls", ()):
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())), indent=1)
        return message

    def abandon(self, plan: PromptPlan) -> None:
        self.book.abandon(plan)
        for name in [name for name, (of, _) in self.record.items() if of is plan]:
            del self.record[name]
        self.views = [view for view in self.views if view.of is not plan]


def rows_of(number: int, start: int, end: int) -> bytes:
    """Rows of 4 bytes of these positions, which say which completion brought them, and whose they are."""
    return b"".join(struct.pack("<HH", number, place) for place in range(start, end))


def check_rows(session: Session) -> None:
    """Each position but a branch's last has one row: of a sampled token that of its own sampling, of context that of
    the first completion that was sampled on it. No row is kept twice."""
    for branch in session.book.episode().branches:
        expected, end = b"", 1
        for turn in branch.turns:
            if turn.response:
                expected += rows_of(session.rows[turn.response], end - 1, turn.end - 1)
                end = turn.end
        assert branch.routing == expected and len(expected) == 4 * (len(branch.tokens) - 1)
    kept = [completion.sampled for completion in session.book._tree.completions.values()]
    held = sum(len(what.routing) + len(what.prompt_routing) for what in kept)
    assert held <= 4 * session.book._tree.load.tokens


def counted(book: TokenLedger) -> SessionLoad:
    """What a session comes to, added up anew."""
    tree, ends = book._tree, []
    for call in tree.calls.values():
        before, above = 0, call.base
        while above is not None:
            before += len(above.sampled.tokens) + len(above.call.tokens)
            above = above.call.base
        prompt = before + len(call.tokens)
        ends += [prompt + call.held] * call.waiting
        ends += [
            prompt + len(one.sampled.tokens)
            for one in call.completions
            if not any(below.extends for below in one.calls)
        ]
    return SessionLoad(len(ends), sum(ends))


def check(session: Session) -> None:
    """Each completion is trained once, where it stands behind the tokens that it was sampled on."""
    seen: list[str] = []
    for branch in session.book.episode().branches:
        mask, logprobs, versions = [0] * len(branch.tokens), [0.0] * len(branch.tokens), []
        for turn in branch.turns:
            if turn.trained:
                plan, what = session.record[turn.response]
                seen.append(turn.response)
                assert branch.tokens[: turn.end] == plan.tokens + what.tokens
                mask[turn.start : turn.end] = [1] * len(what.tokens)
                logprobs[turn.start : turn.end] = what.logprobs
                for span in what.versions:
                    versions += [(at + turn.start, span.version, span.kv_version) for at in range(span.start, span.end)]
        assert branch.loss_mask == tuple(mask) and branch.logprobs == tuple(logprobs) and any(mask)
        got = [(at, span.version, span.kv_version) for span in branch.versions for at in range(span.start, span.end)]
        assert got == versions
        ends = [turn.end for turn in branch.turns]
        assert [turn.start for turn in branch.turns] == [0, *ends[:-1]] and ends[-1] == len(branch.tokens)
    assert session.book._tree.load == counted(session.book)
    missing = {name: what for name, (_, what) in session.record.items() if what.tokens and name not in seen}
    assert len(set(seen)) == len(seen)
    assert sum(len(what.tokens) for what in missing.values()) == session.book.episode().counts.dropped_tokens


def chats() -> dict[str, tuple[ChatTemplate, ChatTemplate, set[str]]]:
    """Template, what prompts are held against, and what the model does."""
    smol, small, big = ChatTemplate(smollm2()), ChatTemplate(tiny()), ChatTemplate(llama(), template=LLAMA3)
    thinking = ChatTemplate(smollm2(), template=QWEN3)
    kept = ChatTemplate(smollm2(), template=QWEN3, variables={"keep_all": True})
    return {
        "smollm2": (smol, smol, {"is cut"}),
        "tiny": (small, small, {"is cut"}),
        "llama": (big, big, set()),
        "qwen3 with tools": (thinking, kept, {"calls"}),
        "qwen3 that thinks": (thinking, kept, {"calls", "thinks"}),
        "tiny that repeats itself": (small, small, {"is cut", "repeats", "stops"}),
        "qwen3 that repeats itself": (thinking, kept, {"calls", "thinks", "repeats", "stops"}),
    }


NAMES = [
    "smollm2",
    "tiny",
    "llama",
    *(f"qwen3 {what}" for what in ("with tools", "that thinks", "that repeats itself")),
]
NAMES.append("tiny that repeats itself")


@pytest.mark.parametrize("examples", [12, pytest.param(120, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_trained_is_what_was_sampled(name: str, examples: int) -> None:
    chat, oracle, ways = chats()[name]

    @settings(max_examples=examples, derandomize=True, database=None)
    @given(st.data())
    def play(data: st.DataObject) -> None:
        session = Session(chat, oracle, frozenset(ways), data.draw, routed=data.draw(st.booleans()))
        for _ in range(data.draw(st.integers(1, 5))):
            session.step()
        check(session)
        if session.routed:
            check_rows(session)
        counts = session.book.episode().counts
        assert (counts.drift, counts.dropped_tokens, counts.realigned) == (0, 0, 0)
        assert (counts.malformed_calls, counts.foreign_ends) == (0, 0)

    play()


@pytest.mark.parametrize("drift", ["fork", "realign", "drop"])
@settings(max_examples=12, derandomize=True, database=None)
@given(data=st.data())
def test_clients_that_change_history_lose_what_the_policy_says(drift: Drift, data: st.DataObject) -> None:
    chat = ChatTemplate(tiny())
    session = Session(chat, chat, frozenset({"is cut", "rewrites"}), data.draw, drift, routed=True)
    for _ in range(data.draw(st.integers(1, 6))):
        session.step()
    check(session)
    check_rows(session)
    counts = session.book.episode().counts
    assert counts.realigned == 0
    assert counts.dropped_tokens == 0 or (drift != "fork" and counts.drift)
