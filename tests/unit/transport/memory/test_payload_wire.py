"""The messages between a payload server and its readers: what is not one is refused, whatever it is."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_rt.transport.memory import payload_wire
from relax_rt.transport.memory.payload_wire import GetRanges, Range, RangeHead
from relax_rt.transport.rpc.errors import ProtocolError

COUNTS = st.integers(0, 2**63 - 1)
RANGES = st.builds(Range, COUNTS, st.text(max_size=200), COUNTS, st.integers(1, payload_wire.MAX_CHUNK_BYTES))
GETS = st.builds(GetRanges, st.booleans(), st.lists(RANGES, min_size=1, max_size=8))
PARTS = st.builds(RangeHead, st.integers(0, 2**64 - 1), st.integers(0, 2**18), st.integers(0, 2**64 - 1))


@given(GETS)
def test_a_request_is_read_as_it_was_written(get: GetRanges) -> None:
    assert payload_wire.decode_get(payload_wire.encode_get(get)) == get


@given(st.sampled_from([payload_wire.BYTES, payload_wire.FAULT]), st.lists(PARTS, min_size=1, max_size=40))
def test_a_head_is_read_as_it_was_written(kind: int, parts: list[RangeHead]) -> None:
    assert payload_wire.decode_head(payload_wire.encode_head(kind, parts)) == (kind, parts)


@given(st.binary(max_size=300))
def test_bytes_are_refused_or_understood(data: bytes) -> None:
    for decode in (payload_wire.decode_get, payload_wire.decode_head, payload_wire.decode_fault):
        for prefix in (
            b"",
            payload_wire.MAGIC,
            payload_wire.MAGIC + bytes((payload_wire.VERSION, 1)),
            payload_wire.encode_head(2, []),
        ):
            try:
                decode(prefix + data)
            except ProtocolError:
                pass


@given(GETS, st.data())
def test_a_damaged_request_is_refused_or_within_the_bounds(get: GetRanges, data: st.DataObject) -> None:
    frame = bytearray(payload_wire.encode_get(get))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(frame[: data.draw(st.integers(0, len(frame)))])
    for damaged in (bytes(frame), cut):
        try:
            found = payload_wire.decode_get(damaged)
        except ProtocolError:
            continue
        assert 1 <= len(found.ranges) <= payload_wire.MAX_RANGES
        for wanted in found.ranges:
            assert 0 <= wanted.id < 2**63 and 0 <= wanted.offset < 2**63
            assert 1 <= wanted.nbytes <= payload_wire.MAX_CHUNK_BYTES


def raw_get(*ranges: list[object]) -> bytes:
    return payload_wire.encode_get(GetRanges(False, []))[:6] + msgspec.msgpack.encode([False, ranges])


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (b"", "it has 0 bytes"),
        (b"GET / HTTP/1.1", "it begins with b'GET '"),
        (b"RLXP\x02\x01", "it is of version 2"),
        (b"RLXP\x01\x09\x00", "its kind is 9"),
        (raw_get(), "length >= 1"),
        (raw_get([1, "a", 0, 2**63]), "<= 16777216"),
        (raw_get([1, "a", 0, 0]), ">= 1"),
        (raw_get([1, "a", -1, 1]), ">= 0"),
        (raw_get([1, "a", 2**64 - 1, 1]), "<= 9223372036854775807|out of range"),
        (raw_get([1, "a" * 300, 0, 1]), "length <= 256"),
        (raw_get(*[[1, "a", 0, 1]] * 300), "length <= 256"),
        (b"RLXP\x01\x01\xc9\xff\xff\xff\xff", "truncated|ended|array"),
        (b"RLXP\x01\x01" + bytes(payload_wire.MAX_GET_BYTES), "not 6 to 131072"),
    ],
)
def test_a_bad_request_is_explained(frame: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        payload_wire.decode_get(frame)


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (b"RLXP", "it has 4 bytes"),
        (struct.pack("<4sBBH", b"RLXQ", 1, 2, 1) + bytes(20), "it begins with"),
        (struct.pack("<4sBBH", b"RLXP", 1, 1, 1) + bytes(20), "its kind is 1"),
        (struct.pack("<4sBBH", b"RLXP", 1, 2, 65535) + bytes(20), "are not those of 65535 parts"),
        (struct.pack("<4sBBH", b"RLXP", 1, 2, 0), "are not those of 0 parts"),
        (struct.pack("<4sBBHQIQ", b"RLXP", 1, 2, 1, 1, 2**32 - 1, 0), "over the limit of 16777216 bytes"),
    ],
)
def test_a_bad_answer_is_explained(frame: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        payload_wire.decode_head(frame)
