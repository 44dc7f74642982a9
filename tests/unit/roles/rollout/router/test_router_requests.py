"""The life of one request under arbitrary events, against a naive model."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from relax_rt.roles.rollout.router.core import GenerationRequest, RequestState
from relax_rt.roles.rollout.router.interface import EngineReport, SequenceRequest, SequenceUpdate
from relax_rt.transport.queue.ledger.messages import VersionSpan
from relax_rt.transport.rpc.errors import Refused

STOP, MOST, LOSSES = 0, 12, 3
REPORT = EngineReport(epoch=1, version=1, generated=0)


def piece(start: int, tokens: list[int], version: int = 1, **more: object) -> SequenceUpdate:
    """One that fits, if it begins where the sequence ends."""
    spans = [VersionSpan(start, start + len(tokens), version, version)] if tokens else []
    logprobs = [-float(t) for t in tokens]
    return SequenceUpdate(start=start, tokens=tokens, logprobs=logprobs, versions=spans, report=REPORT, **more)  # type: ignore[arg-type]


class LifeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        wanted = GenerationRequest(prompt=(1,), max_new_tokens=MOST, stop_ids=frozenset({STOP}), timeout_s=100.0)
        self.life = RequestState(1, wanted, 0.0, LOSSES)
        self.now, self.losses, self.end, self.sent = 0.0, 0, "", 0
        self.tokens: list[int] = []
        self.versions: list[int] = []
        self.lost: set[int] = set()

    def open(self) -> bool:
        return not self.end and self.life.assignment is not None

    def waits(self) -> bool:
        return not self.end and self.life.assignment is None

    @rule(epoch=st.integers(1, 3))
    @precondition(waits)
    def send(self, epoch: int) -> None:
        self.sent += 1
        assert self.life.assign(self.now, "rollout/0", epoch).attempt == self.sent

    @rule(tokens=st.lists(st.integers(1, 9), max_size=5), version=st.integers(1, 3))
    @precondition(open)
    def tokens_come(self, tokens: list[int], version: int) -> None:
        tokens = tokens[: MOST - len(self.tokens) - 1]
        assert self.life.add(self.now, piece(len(self.tokens), tokens, version)) == ""
        self.tokens += tokens
        self.versions += [version] * len(tokens)

    @rule(stop=st.booleans())
    @precondition(open)
    def it_is_complete(self, stop: bool) -> None:
        rest = [STOP] if stop else [7] * (MOST - len(self.tokens))
        reason = "stop" if stop else "length"
        assert self.life.add(self.now, piece(len(self.tokens), rest, finish_reason=reason)) == ""
        self.tokens += rest
        self.versions += [1] * len(rest)
        self.end = "done"

    @rule(how=st.sampled_from(["gap", "again", "logprobs", "versions", "unknown", "kv", "many", "no stop", "short"]))
    @precondition(open)
    def what_does_not_fit_is_not_taken(self, how: str) -> None:
        at = len(self.tokens)
        wrong = {
            "gap": piece(at + 1, [5]),
            "again": piece(at - 1, [5]),
            "logprobs": SequenceUpdate(start=at, tokens=[5], versions=[VersionSpan(at, at + 1, 1, 1)], report=REPORT),
            "versions": SequenceUpdate(start=at, tokens=[5], logprobs=[0.0], report=REPORT),
            "unknown": piece(at, [5], version=0),
            "kv": SequenceUpdate(
                start=at, tokens=[5], logprobs=[0.0], versions=[VersionSpan(at, at + 1, 1, 2)], report=REPORT
            ),
            "many": piece(at, [5] * (MOST - at + 1)),
            "no stop": piece(at, [5], finish_reason="stop"),
            "short": piece(at, [5] * (MOST - at - 1), finish_reason="length"),
        }[how]
        assert self.life.add(self.now, wrong) != ""

    @rule()
    @precondition(open)
    def its_engine_is_lost(self) -> None:
        assert self.life.assignment is not None
        self.lost.add(self.life.assignment.epoch)
        self.life.engine_lost(f"loss {self.losses}")
        self.losses += 1
        self.end = "failed" if len(self.lost) == LOSSES or self.losses == 9 else ""

    @rule()
    @precondition(open)
    def its_engine_does_not_want_it(self) -> None:
        self.life.unassign("full")

    @rule(way=st.sampled_from(["cancel", "expire", "refuse"]))
    @precondition(lambda self: bool(self.end))
    def a_second_outcome_is_an_error(self, way: str) -> None:
        before = self.life.outcome
        with pytest.raises(AssertionError):
            self.life.refuse("no") if way == "refuse" else getattr(self.life, way)()
        assert self.life.outcome is before

    @rule()
    @precondition(lambda self: not self.end)
    def its_owner_leaves(self) -> None:
        self.life.cancel()
        self.end = "cancelled"

    @rule()
    @precondition(lambda self: not self.end)
    def its_deadline_comes(self) -> None:
        self.life.expire()
        self.end = "late"

    @invariant()
    def it_is_as_the_naive_account_says(self) -> None:
        life = self.life
        assert life.tokens == self.tokens
        assert life.logprobs == [-float(t) for t in self.tokens]
        assert [s.version for s in life.versions for _ in range(s.start, s.end)] == self.versions
        assert (life.outcome.kind if life.outcome else "") == self.end
        if life.outcome is not None:
            assert life.outcome.tokens == self.tokens
            assert (life.outcome.kind == "done") == (life.outcome.why == "")
        else:
            assert life.waiting_on or life.tokens, "a wait has a reason"


LifeMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLife = LifeMachine.TestCase


def test_a_late_outcome_says_what_it_waited_for() -> None:
    life = RequestState(1, GenerationRequest(prompt=(1,), max_new_tokens=4, timeout_s=2.0), 0.0, LOSSES)
    life.waiting_on = "an engine at version 7: rollout/0 is at version 6, 1 behind"
    life.expire()
    assert life.outcome is not None
    assert "2 s" in life.outcome.why and "rollout/0 is at version 6" in life.outcome.why


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"seed": -1}, "seed -1"),
        ({"seed": 1 << 64}, "seed"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -0.5}, "temperature"),
        ({"prompt": (1, -1)}, "token -1"),
        ({"stop_ids": frozenset({1 << 40})}, "token"),
    ],
)
def test_invalid_sampling_is_refused_before_an_engine_is_asked(change: dict[str, object], match: str) -> None:
    values: dict[str, object] = {"prompt": (1,), "max_new_tokens": 4} | change
    with pytest.raises(Refused, match=match):
        GenerationRequest(**values)  # type: ignore[arg-type]
    plain = {"prompt": [1], "seed": 0, "max_new_tokens": 4, "allowed": [1]}
    msgspec.convert(plain, SequenceRequest)
    wire = plain | {key: list(v) if isinstance(v, (tuple, frozenset)) else v for key, v in change.items()}
    if wire["seed"] != 1 << 64:  # msgpack has no such number
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wire, SequenceRequest)


def test_refused_and_slow_outcomes_differ() -> None:
    wanted = GenerationRequest(prompt=(1,), max_new_tokens=4, timeout_s=2.0)
    refused, slow, waiting = (RequestState(1, wanted, 0.0, LOSSES) for _ in range(3))
    refused.refuse("its context is 8 tokens")
    slow.expire(slow=True)
    waiting.expire()
    ends = [life.outcome for life in (refused, slow, waiting) if life.outcome is not None]
    assert [(end.kind, end.slow) for end in ends] == [("refused", False), ("late", True), ("late", False)]


def test_routing_rows_are_kept_when_another_engine_resumes() -> None:
    life = RequestState(1, GenerationRequest(prompt=(1, 2, 3), max_new_tokens=4, routing=True), 0.0, LOSSES)
    life.assign(0.0, "rollout/0", 1)
    prompt = {"prompt_routing": b"ppqq"}
    for wrong in (
        {},
        {"routing": b"abcd"},
        {"routing": b"abc", **prompt},
        {"routing": b"abcd", "prompt_routing": b"p"},
    ):
        assert "bytes of" in life.add(0.0, piece(0, [5, 6], **wrong))
    assert life.tokens == []
    assert life.add(0.0, piece(0, [5, 6], routing=b"aabb", **prompt)) == ""
    assert life.add(0.0, piece(2, [])) == ""
    life.unassign("it stops")
    life.assign(0.0, "rollout/1", 1)
    assert "routing rows" in life.add(0.0, piece(2, [7], routing=b"c"))
    # The second engine computed the prompt anew: the rows of tokens stay, those of the prompt are of who ended it.
    assert life.add(0.0, piece(2, [7, 8], routing=b"ccdd", finish_reason="length", prompt_routing=b"PPQQ")) == ""
    assert life.outcome is not None
    assert (life.outcome.routing, life.outcome.prompt_routing) == (b"aabbccdd", b"PPQQ")


def test_rows_of_a_prompt_start_at_the_requested_position() -> None:
    life = RequestState(
        1, GenerationRequest(prompt=(1, 2, 3, 4), max_new_tokens=2, routing=True, rows_from=2), 0.0, LOSSES
    )
    life.assign(0.0, "rollout/0", 1)
    whole = {"routing": b"aabb", "prompt_routing": b"ppqqrr"}
    assert "from position 2 on, with 6 bytes" in life.add(0.0, piece(0, [5, 6], **whole))
    ended = {**whole, "prompt_routing": b"rr", "finish_reason": "length"}
    assert life.add(0.0, piece(0, [5, 6], **ended)) == ""
    assert life.outcome is not None and life.outcome.prompt_routing == b"rr"
    last = GenerationRequest(prompt=(1, 2), max_new_tokens=1, routing=True, rows_from=1)
    life = RequestState(2, last, 0.0, LOSSES)
    life.assign(0.0, "rollout/0", 1)
    assert life.add(0.0, piece(0, [5], routing=b"aa", finish_reason="length")) == ""
    for start in (-1, 2):
        with pytest.raises(Refused, match=f"routing rows from position {start} on of a prompt of 2"):
            msgspec.structs.replace(last, rows_from=start)
