"""The pure parts: framing, codecs, addresses, back-off."""

from __future__ import annotations

import pathlib
import random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_rt.transport.rpc import wire
from relax_rt.transport.rpc.backoff import Backoff, BackoffPolicy
from relax_rt.transport.rpc.channel import AddressError, parse_address
from relax_rt.transport.rpc.errors import Corrupt, ProtocolError, Refused, RelaxError, RemoteError
from relax_rt.transport.rpc.identity import Hello, Incarnation
from relax_rt.transport.rpc.interface import methods_of
from relax_rt.transport.rpc.wire import (
    CancelFrame,
    FaultFrame,
    FrameDecoder,
    GoAwayFrame,
    HelloFrame,
    ReplyFrame,
    RequestFrame,
    TellFrame,
    encode_frame,
    error_of,
    fault_of,
)

numbers = st.integers(0, 2**63 - 1)
raws = st.binary(max_size=300).map(lambda data: msgspec.Raw(msgspec.msgpack.encode(data)))
text = st.text(max_size=20)
durations = st.floats(0, 1e6)
from_client = st.one_of(
    st.builds(RequestFrame, numbers, text, text, durations, raws),
    st.builds(TellFrame, text, text, durations, raws),
    st.builds(CancelFrame, numbers),
)
from_server = st.one_of(
    st.builds(ReplyFrame, numbers, raws),
    st.builds(GoAwayFrame),
    st.builds(FaultFrame, numbers, st.lists(text, max_size=3).map(tuple), text, text, text, text, text, text, text),
)


@given(st.lists(st.one_of(from_client, from_server), max_size=8), st.data())
def test_messages_survive_any_cut_of_the_stream(messages: list[Any], data: st.DataObject) -> None:
    stream = b"".join(encode_frame(wire.encode_message(m)) for m in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    decoder = FrameDecoder(1 << 20)
    out: list[bytes] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        out += decoder.feed(stream[start:end])
    assert decoder.pending_bytes == 0
    decoded = [
        wire.decode_from_client(b)
        if isinstance(m, RequestFrame | TellFrame | CancelFrame)
        else wire.decode_from_server(b)
        for b, m in zip(out, messages, strict=True)
    ]
    assert [comparable(m) for m in decoded] == [comparable(m) for m in messages]


@given(st.one_of(from_client, from_server), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=6))
def test_a_changed_message_is_decoded_or_refused(message: Any, changes: list[tuple[int, int]]) -> None:
    data = bytearray(wire.encode_message(message))
    for at, value in changes:
        data[at % len(data)] = value
    for decode in (wire.decode_from_client, wire.decode_from_server, wire.decode_hello):
        try:
            decode(bytes(data))
        except ProtocolError:
            pass


@pytest.mark.parametrize("data", [b"\x92\xa1q\xa2\xff\xfe", b"\x96\xa1q\x01\xa2\xff\xfe\xa1x\xcb" + bytes(8) + b"\xc0"])
def test_text_that_is_no_utf_8_is_no_message(data: bytes) -> None:
    for decode in (wire.decode_from_client, wire.decode_from_server):
        with pytest.raises(ProtocolError):
            decode(data)


def comparable(message: Any) -> tuple[Any, ...]:
    values = (getattr(message, name) for name in message.__struct_fields__)
    return type(message), *(bytes(v) if isinstance(v, msgspec.Raw) else v for v in values)


@given(st.binary(max_size=200), st.integers(0, 64))
def test_the_frame_decoder_holds_no_more_than_its_bound(data: bytes, bound: int) -> None:
    decoder = FrameDecoder(bound)
    try:
        for i in range(len(data)):
            for message in decoder.feed(data[i : i + 1]):
                assert len(message) <= bound
            assert decoder.pending_bytes < bound + 4
    except ProtocolError as error:
        assert f"the limit of this end is {bound} bytes" in str(error)


@given(st.binary(max_size=300))
def test_decoders_answer_any_bytes_with_a_message_or_a_protocol_error(data: bytes) -> None:
    for decode in (wire.decode_from_client, wire.decode_from_server, wire.decode_hello):
        try:
            decode(data)
        except ProtocolError:
            pass


def test_a_greeting_reads_as_hello() -> None:
    frame = HelloFrame(protocol=1, run_id="r", who=Incarnation("a/0", 2), pid=3, max_message_bytes=9)
    data = wire.encode_message(frame)
    assert wire.decode_hello(data) == frame
    assert msgspec.msgpack.decode(data, type=Hello) == Hello(1, "r", Incarnation("a/0", 2), 3)
    with pytest.raises(ProtocolError, match="the limit is"):
        wire.decode_hello(b"x" * 100_000)


class Wide:
    async def call(
        self, path: pathlib.Path, number: float, flags: dict[str, bool], deep: list[Incarnation]
    ) -> None: ...


def test_numpy_scalars_and_paths_cross() -> None:
    method = methods_of(Wide)["call"]
    values = (pathlib.Path("/a"), np.float32(0.5), {"x": np.bool_(True)}, [Incarnation("a/0", 1)])
    raw = msgspec.Raw(method.encode_arguments(values))
    assert method.decode_arguments(raw) == ((pathlib.Path("/a"), 0.5, {"x": True}, [Incarnation("a/0", 1)]), {})
    with pytest.raises(Refused, match=r"numpy\.ndarray has no place in a message"):
        wire.encode(np.zeros(3), "x")


class Odd(RelaxError):
    pass


def test_an_error_class_unknown_here_comes_as_its_nearest_known_base() -> None:
    known = fault_of(Corrupt("slab 3", why="digest differs"), 1, "queue/0#1 Q.take")
    unknown = msgspec.structs.replace(known, kinds=("their.module:BadSlab", *known.kinds))
    assert type(error_of(unknown)) is Corrupt
    assert type(error_of(fault_of(Odd("x"), 1, "w"))) is Odd
    relayed = fault_of(RemoteError("KeyError", "'k'", where="far/0#1 A.b", trace="t"), 2, "near/0#1 C.d")
    assert str(error_of(relayed)) == "far/0#1 A.b raised KeyError: 'k'"


class Careless(RelaxError):
    def __init__(self) -> None:
        Exception.__init__(self, "forgot its base")


def test_an_error_that_skips_its_base_constructor_still_arrives() -> None:
    assert str(error_of(fault_of(Careless(), 1, "w"))) == "forgot its base"


def test_faults_are_bounded() -> None:
    assert len(wire.encode_message(fault_of(RelaxError("x" * 10**7, why="y" * 10**7), 1, "w"))) < 100_000
    assert len(wire.encode_message(fault_of(ValueError("x" * 10**7), 1, "w"))) < 100_000


@given(st.floats(0.001, 1), st.floats(1, 100), st.floats(1, 4), st.one_of(st.none(), st.integers(0, 40)), st.integers())
def test_backoff_stays_under_a_ceiling_that_grows(
    base: float, stretch: float, factor: float, limit: int | None, seed: int
) -> None:
    policy = BackoffPolicy(base_s=base, cap_s=base * stretch, factor=factor, max_attempts=limit)
    backoff = Backoff(policy, random.Random(seed))
    ceilings = [policy.ceiling_s(i) for i in range(41)]
    assert ceilings == sorted(ceilings)
    assert max(ceilings) <= policy.cap_s
    for attempt in range(41):
        delay = backoff.next_delay_s()
        if limit is not None and attempt >= limit:
            assert delay is None
            break
        assert delay is not None
        assert 0 <= delay <= ceilings[attempt]
    backoff.reset()
    assert (backoff.next_delay_s() is None) == (limit == 0)


def test_backoff_jitter_is_full_and_its_settings_are_checked() -> None:
    backoff = Backoff(BackoffPolicy(base_s=1.0, cap_s=1.0), random.Random(0))
    delays = [backoff.next_delay_s() or 0.0 for _ in range(400)]
    assert min(delays) < 0.1 < 0.9 < max(delays)
    assert BackoffPolicy().ceiling_s(100_000) == BackoffPolicy().cap_s
    for bad in ({"base_s": 0.0}, {"base_s": 2.0, "cap_s": 1.0}, {"factor": 0.5}, {"max_attempts": -1}):
        with pytest.raises(Refused):
            BackoffPolicy(**bad)


@pytest.mark.parametrize(
    "good", ["unix:///a/b.sock", "tcp://host-1:80", "tcp://[::1]:0", "tcp://10.0.0.1:65535", "ipc:///x"]
)
def test_addresses_print_as_they_are_read(good: str) -> None:
    assert str(parse_address(good)) == good


@pytest.mark.parametrize(
    "bad", ["", "unix:", "unix://", "tcp://", "tcp://:80", "tcp://h:", "tcp://h:x", "tcp://h:-1", "tcp://h:²"]
)
def test_malformed_addresses(bad: str) -> None:
    with pytest.raises(AddressError):
        parse_address(bad)


def test_loopback() -> None:
    for near in ("tcp://127.0.0.9:1", "tcp://[::1]:1", "tcp://localhost:1", "unix:///a"):
        assert parse_address(near).loopback, near
    for far in ("tcp://0.0.0.0:1", "tcp://node7:1", "tcp://*:1"):
        assert not parse_address(far).loopback, far
