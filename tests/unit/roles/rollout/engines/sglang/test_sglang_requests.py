"""Requests to the server: segments of members, batches, the queue, and routing rows."""

from __future__ import annotations

import base64
import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_rt.roles.rollout.engines.base import Assembly, GroupRequest, Partial
from relax_rt.roles.rollout.engines.routing import RoutingShape
from relax_rt.roles.rollout.engines.settings import EngineSettings, RolloutSettings
from relax_rt.roles.rollout.engines.sglang import requests as asking
from relax_rt.roles.rollout.engines.sglang.client import Meta, SequenceEnd, ServerRefused, Span, StreamEvent
from relax_rt.roles.rollout.engines.sglang.options import Boot, server_options
from relax_rt.roles.rollout.engines.sglang.requests import (
    MemberQueue,
    RowDecoder,
    SegmentBatch,
    SegmentedMember,
    request_body,
)
from relax_rt.transport.queue.ledger.messages import VersionSpan
from relax_rt.transport.rpc.errors import Corrupt, ProtocolError, Refused


def request(members: int = 1, new: int = 10, **rest: Any) -> GroupRequest:
    values: dict[str, Any] = {"id": 1, "prompt": (1, 2, 3), "temperature": 1.0, "stop_ids": frozenset([9])}
    return GroupRequest(**{"max_new_tokens": new, "seeds": tuple(range(members)), **values, **rest})


def event(
    member: SegmentedMember, tokens: list[int], *, upto: int, end: str = "", cached: int = 1, **meta: Any
) -> StreamEvent:
    """What the server says of the running segment: `tokens`, the last of them its `upto`-th."""
    values: dict[str, Any] = {
        "completion_tokens": upto,
        "cached_tokens": cached,
        "output_token_logprobs": [(-float(token), token, None) for token in tokens],
        "finish_reason": SequenceEnd(end) if end else None,
    }
    return StreamEvent(tokens, Meta(id=member.rid, **(values | meta)))


def test_a_token_has_the_versions_of_its_segment_and_its_cache() -> None:
    member = SegmentedMember.from_request(request(new=6), 0, 1)
    member.begin("a", 3)
    member.take(event(member, [4, 5], upto=2, cached=0), 3)
    member.end_segment()
    assert (member.rid, member.finish, member.salt) == ("", "", 3)
    member.begin("b", 4)  # the cache is kept
    member.take(event(member, [6], upto=1, cached=4), 4)
    member.end_segment()
    assert member.recompute(5) == 3 + 3
    member.begin("c", 5)
    member.take(event(member, [7, 8], upto=2), 5)
    assert member.spans == [VersionSpan(0, 2, 3, 3), VersionSpan(2, 3, 4, 3), VersionSpan(3, 5, 5, 5)]
    assert member.salt == 5


def test_an_evicted_cache_is_of_the_new_weights() -> None:
    member = SegmentedMember.from_request(request(), 0, 1)
    member.begin("a", 3)
    member.take(event(member, [4], upto=1, cached=0), 3)
    member.end_segment()
    member.begin("b", 4)
    member.take(event(member, [5], upto=1, cached=0), 4)
    assert member.spans[-1] == VersionSpan(1, 2, 4, 4)


def test_reported_tokens_are_not_reported_again() -> None:
    member = SegmentedMember.from_request(request(), 0, 1)
    member.begin("a", 1)
    member.take(event(member, [4, 5], upto=2), 1)
    # An aborted segment ends with its last token once more.
    member.interrupted = True
    assert member.take(event(member, [5], upto=2, end="abort"), 1) == 0
    assert member.tokens == [4, 5]
    assert member.take(event(member, [4, 5, 6], upto=3), 1) == 1
    assert member.tokens == [4, 5, 6]


@pytest.mark.parametrize(
    ("tokens", "upto", "meta", "error"),
    [
        ([6], 4, {}, ProtocolError),  # a gap before it
        ([6], 2, {"output_token_logprobs": []}, ProtocolError),
        ([6], 2, {"output_token_logprobs": [(-1.0, 7, None)]}, ProtocolError),
        ([6], 2, {"output_token_logprobs": [(None, 6, None)]}, ProtocolError),
        ([6], 2, {"weight_versions": [Span("3", 0, 2), Span("4", 2, 3)]}, Corrupt),
    ],
)
def test_impossible_events_are_detected(
    tokens: list[int], upto: int, meta: dict[str, Any], error: type[Exception]
) -> None:
    member = SegmentedMember.from_request(request(), 0, 1)
    member.begin("a", 3)
    member.take(event(member, [4], upto=1), 3)
    with pytest.raises(error):
        member.take(event(member, tokens, upto=upto, **meta), 3)
    assert member.tokens == [4]


def test_an_early_end_is_reported_before_its_tokens_are_checked() -> None:
    """It invents a token without a log-probability for a request that it does not take."""
    member = SegmentedMember.from_request(request(), 0, 1)
    member.begin("a", 3)
    with pytest.raises(ServerRefused, match=r"member 0 .* at 0 of 10 tokens, unasked"):
        member.take(event(member, [4], upto=1, end="abort", output_token_logprobs=[]), 3)


def test_an_event_of_no_member_is_an_error() -> None:
    member = SegmentedMember.from_request(request(), 0, 1)
    member.begin("a", 3)
    batch = SegmentBatch([member])
    assert batch.member(Meta(id="a")) is member
    assert batch.running == [member]
    member.end_segment()
    member.begin("b", 3)
    assert batch.running == []
    for name in ("a", "b", "c"):
        with pytest.raises(ProtocolError):
            batch.member(Meta(id=name))


def test_partials_are_counted_and_not_reported() -> None:
    had = Partial((4, 5), (-1.0, -2.0), (VersionSpan(0, 2, 7, 7),))
    member = SegmentedMember.from_request(request(new=5, partials=(had,), chunk_tokens=2), 0, 1)
    assert (member.left, member.chunk()) == (3, None)
    member.begin("a", 8)
    member.take(event(member, [6, 7], upto=2, cached=0), 8)
    chunk = member.chunk()
    assert chunk is not None
    assert (chunk.start, chunk.tokens, chunk.versions) == (2, [6, 7], [VersionSpan(2, 4, 8, 8)])
    for tokens, finish in (((4, 9), "stop"), ((4,) * 5, "length")):
        over = Partial(tokens, (-1.0,) * len(tokens), (VersionSpan(0, len(tokens), 7, 7),))
        ended = SegmentedMember.from_request(request(new=5, partials=(over,)), 0, 1)
        assert ended.finish == finish
        last = ended.chunk()
        assert last is not None and (last.tokens, last.finish_reason) == ([], finish)


def test_a_stop_token_of_the_model_alone_is_no_end() -> None:
    """The server also ends at the model's own end token; a request that does not name it goes on."""
    member = SegmentedMember.from_request(request(), 0, 1)
    member.begin("a", 1)
    member.take(event(member, [4, 2], upto=2, end="stop"), 1)
    member.end_segment()
    assert member.finish == ""
    member.begin("b", 1)
    member.take(event(member, [9], upto=1, end="stop"), 1)
    member.aborted = True
    member.end_segment()
    assert member.finish == "stop", "one that ended by itself was not aborted"


def test_the_queue_keeps_the_order_of_requests() -> None:
    members = [
        SegmentedMember.from_request(request(2, id=order), index, order) for order in (1, 2, 3) for index in (0, 1)
    ]
    line = MemberQueue()
    line.add(members)
    assert line.take(0) == []
    assert line.take(1) == members[:1]
    assert line.take(9) == members[1:2], "one request at a time"
    assert line.take(9) == members[2:4]
    line.add([members[3], members[0]])
    assert [*line] == [members[0], members[3], members[4], members[5]]
    assert line.drop(3) == members[4:]
    assert len(line) == 2


SHAPE = RoutingShape(1, 2)


def routed(tokens: list[int]) -> np.ndarray:
    """A row for each, which says whose it is."""
    return np.array([[[token, token]] for token in tokens], np.int16)


def told(member: SegmentedMember, **how: bool) -> tuple[list[int], list[int], list[int]]:
    """Tokens, rows and rows of the prompt of a member's next chunk."""
    chunk = member.chunk(**how)
    assert chunk is not None
    rows, prompt = (SHAPE.rows(data)[:, 0, 0].tolist() for data in (chunk.routing, chunk.prompt_routing))
    return chunk.tokens, rows, prompt


def test_only_tokens_with_rows_are_reported() -> None:
    member = SegmentedMember.from_request(request(new=7, chunk_tokens=2, routing=True), 0, 1, SHAPE)
    member.begin("a", 3)
    assert (member.requested, member.rows_from) == (2, 0), (
        "rows come with the end of a segment: a mark's tokens, no more"
    )
    member.take(event(member, [14, 15], upto=2), 3)
    assert member.chunk(everything=True) is None
    # Positions 0 and 1 are the prompt's, token 14 was sampled at position 2.
    member.take_rows(routed([1, 2, 14, 15]), 0)
    member.end_segment(SequenceEnd("length"))
    assert (member.finish, told(member)) == ("", ([14, 15], [14, 15], [1, 2]))
    member.begin("b", 3)
    assert (member.requested, member.rows_from) == (2, 4)
    member.take(event(member, [16, 9], upto=2), 3)
    # Others of the batch have begun before: its rows begin with theirs.
    member.take_rows(routed([0, 0, 16, 9]), 2)
    member.end_segment(SequenceEnd("stop"))
    assert (member.finish, told(member)) == ("stop", ([16, 9], [16, 9], []))


@pytest.mark.parametrize("rows", [None, routed([1, 2, 14])])
def test_tokens_that_came_without_rows_are_sampled_again_if_the_server_was_interrupted(rows: np.ndarray | None) -> None:
    member = SegmentedMember.from_request(request(routing=True), 0, 1, SHAPE)
    member.begin("a", 3)
    member.take(event(member, [14, 15, 16], upto=3), 3)
    with pytest.raises(ProtocolError, match=r"3 tokens with [01] routing rows"):
        member.take_rows(rows, 0)
    member.interrupted = True
    member.take_rows(rows, 0)
    member.end_segment(SequenceEnd("abort"))
    left = [] if rows is None else [14]
    assert (member.tokens, len(member.logprobs), len(member.rows)) == (left, len(left), len(left))
    member.begin("b", 4)
    assert member.rows_from == (0 if rows is None else 3)
    member.take(event(member, [9], upto=1), 4)
    member.take_rows(routed([9] if left else [1, 2, 9]), member.rows_from)
    member.end_segment(SequenceEnd("stop"))
    assert [*told(member)][:2] == [[*left, 9], [*left, 9]]
    spans = [VersionSpan(0, 1, 3, 3), VersionSpan(1, 2, 4, 3)] if left else [VersionSpan(0, 1, 4, 3)]
    assert member.spans == spans


def test_a_partial_has_its_rows_but_not_those_of_the_prompt() -> None:
    had = Partial((4, 5), (-1.0, -2.0), (VersionSpan(0, 2, 7, 7),), routed([4, 5]).tobytes())
    member = SegmentedMember.from_request(request(new=5, partials=(had,), routing=True), 0, 1, SHAPE)
    member.begin("a", 8)
    assert member.rows_from == 0
    member.take(event(member, [6, 9], upto=2), 8)
    member.take_rows(routed([1, 2, 94, 95, 6, 9]), 0)
    member.end_segment(SequenceEnd("stop"))
    assert told(member) == ([6, 9], [6, 9], [1, 2])
    assert member.rows is not None and SHAPE.rows(member.rows.get(0, 4))[:, 0, 0].tolist() == [4, 5, 6, 9]


@pytest.mark.parametrize(("start", "prompt"), [(0, [1, 2]), (1, [2]), (2, [])])
def test_known_rows_of_a_prompt_are_not_requested_again(start: int, prompt: list[int]) -> None:
    asked = request(2, new=3, routing=True, rows_from=start, chunk_tokens=1)
    members = [SegmentedMember.from_request(asked, index, 1, SHAPE) for index in (0, 1)]
    for member in members:
        member.begin("ab"[member.index], 3)
    batch = SegmentBatch(members)
    assert batch.rows_from == start
    for member in members:
        member.take(event(member, [14], upto=1), 3)
        member.take_rows(routed([*prompt, 14]), batch.rows_from)
        member.end_segment(SequenceEnd("length"))
        assert told(member) == ([14], [14], prompt)
    # One goes on; the other's cache is made anew, and it has its prompt's rows all the same.
    members[1].recompute(4)
    for member in members:
        member.begin("cd"[member.index], 4)
    assert SegmentBatch(members).rows_from == 3


SWAPS = st.sampled_from(["none", "keep", "recompute"])


@given(st.lists(st.tuples(st.integers(0, 4), SWAPS, st.booleans()), max_size=12), st.integers(0, 5))
def test_a_completion_is_complete_after_any_interruptions(pieces: list[tuple[int, str, bool]], every: int) -> None:
    """Segments of any length between swaps and pauses: chunks make up the completion, versions cover it and only
    grow, and a cache is never newer than the weights."""
    asked = request(new=20, chunk_tokens=every)
    member, version, assembly = SegmentedMember.from_request(asked, 0, 1), 1, Assembly()
    assembly.expect(asked)
    whole = None
    sampled: list[int] = []
    for number, (count, swap, told) in enumerate([*pieces, (20, "none", False)]):
        member.begin(f"s{number}", version)
        count = min(count, member.left)
        new = [10 + len(sampled) + i for i in range(count)]
        sampled += new
        member.take(event(member, new, upto=count, cached=len(sampled) - count), version)
        member.end_segment()
        if (chunk := member.chunk(everything=told)) is not None:
            assert chunk.tokens or chunk.finish_reason
            whole = assembly.add(chunk)
        if member.finish:
            break
        if swap != "none":
            version += 1
        if swap == "recompute":
            member.recompute(version)
    assert whole is not None and whole.finish_reason == "length"
    assert whole.tokens == sampled
    assert whole.logprobs == [-float(token) for token in sampled]
    spans = whole.versions
    assert [s.start for s in spans] == [0, *(s.end for s in spans)][:-1]
    assert [s.version for s in spans] == sorted(s.version for s in spans)
    assert all(s.kv_version <= s.version for s in spans)


MOE = {
    "model_type": "qwen3_moe", "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 128,
    "num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "mlp_only_layers": [1],
}  # fmt: skip


def reader(folder: Path, **changes: Any) -> RowDecoder:
    (folder / "config.json").write_text(json.dumps(MOE | changes))
    return RowDecoder(folder)


def request_with_rows(**rest: Any) -> GroupRequest:
    return request(2, **{"seeds": (1, 2), "routing": True, **rest})


def test_rows_of_the_server_are_decoded(tmp_path: Path) -> None:
    experts = np.array([[[5, 2], [0, 0], [1, 7]], [[3, 6], [0, 0], [4, 0]]], np.int32)
    read = reader(tmp_path).read(memoryview(base64.b64encode(experts.tobytes())))
    assert read.tolist() == [[[2, 5], [-1, -1], [1, 7]], [[3, 6], [-1, -1], [0, 4]]]
    for odd in (base64.b64encode(experts.tobytes()[:-4]), b"no base64!", b"AAA="):
        with pytest.raises(ProtocolError, match="not of 3 layers and 2 experts"):
            reader(tmp_path).read(memoryview(odd))


async def test_many_rows_are_decoded_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rows in pieces as at once; padding within them is refused, and what has none has none."""
    monkeypatch.setattr(asking, "PIECE", 8)
    experts = np.arange(60, dtype=np.int32).reshape(-1, 3, 2) % 8
    text = base64.b64encode(experts.tobytes())
    rows, threads = reader(tmp_path), []
    read = rows.read
    monkeypatch.setattr(rows, "read", lambda text: threads.append(threading.get_ident()) or read(text))
    for limit, here in ((len(text), True), (len(text) - 1, False)):
        monkeypatch.setattr(asking, "LARGE_BYTES", limit)
        told = await rows.rows_in(Meta("s", routed_experts=msgspec.Raw(b'"' + text + b'"')))
        assert told is not None and (told[:, 0] == np.sort(experts[:, 0])).all()
        assert (threads[-1] == threading.get_ident()) is here
    with pytest.raises(ProtocolError, match="padded before its end"):
        read(memoryview(b"AAAAAAA=" + text))
    for none in (b"", b"null", b'""'):
        assert await rows.rows_in(Meta("s", routed_experts=msgspec.Raw(none))) is None


def test_a_dense_model_is_refused_before_its_server_starts(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="it is dense"):
        reader(tmp_path, model_type="qwen3")
    with pytest.raises(Refused, match="how it routes is not known"):
        reader(tmp_path, model_type="mixtral")


def test_more_rows_than_an_answer_holds_are_refused(tmp_path: Path) -> None:
    wide = reader(tmp_path, num_hidden_layers=48, num_experts=128, num_experts_per_tok=8)
    wide.check(request_with_rows(max_new_tokens=131_000))
    wide.check(request_with_rows(max_new_tokens=1 << 20, routing=False))
    with pytest.raises(Refused, match="rows of 131073 tokens"):
        wide.check(request_with_rows(max_new_tokens=131_070))
    wide.check(request_with_rows(max_new_tokens=131_070, rows_from=2))


def test_a_call_requests_the_rows_that_one_member_lacks(tmp_path: Path) -> None:
    shape = reader(tmp_path).shape
    had = Partial((4, 5), (-1.0, -2.0), (VersionSpan(0, 2, 7, 7),), bytes(2 * shape.row_bytes))
    members = [
        SegmentedMember.from_request(request_with_rows(partials=(had, None), chunk_tokens=4), index, 1, shape)
        for index in (0, 1)
    ]

    def asked() -> tuple[Any, ...]:
        for member in members:
            member.begin(f"s{member.index}", 7)
        body = request_body(SegmentBatch(members), seeded=False)
        lengths = [params["max_new_tokens"] for params in body["sampling_params"]]
        return body["return_routed_experts"], body["routed_experts_start_len"], lengths, body["input_ids"]

    assert asked() == (True, 0, [4, 4], [[1, 2, 3, 4, 5], [1, 2, 3]])
    for member in members:
        member.has_prompt_rows = True
    assert asked()[1] == 2, "the second has no token yet"
    plain = SegmentedMember.from_request(request_with_rows(routing=False), 0, 1, shape)
    plain.begin("s", 7)
    assert "return_routed_experts" not in request_body(SegmentBatch([plain]), seeded=False)


def test_the_server_records_rows_only_if_configured() -> None:
    boot = Boot(model=Path("m"), port=1, name="n", secrets=Path("s"))

    def option(settings: EngineSettings) -> object:
        return server_options(settings, "cpu", boot, kv_tokens=9, context=9).get("enable-return-routed-experts")

    assert option(RolloutSettings(engine="sglang", routing=True)) is True
    assert option(RolloutSettings(engine="sglang")) is option(EngineSettings(engine="sglang")) is None
    with pytest.raises(Refused, match="the engine sets it itself"):
        option(RolloutSettings.model_validate({"sglang": {"arguments": {"enable_return_routed_experts": True}}}))
