"""Calls of the store that no client of ours makes: each is answered, or refused without a trace."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_rt.transport.compat.store import ledger as ev
from relax_rt.transport.compat.store.api import RowNames, StoreApi, StoreConfig, StoreSampler
from relax_rt.transport.compat.store.ledger import StoreLedger
from relax_rt.transport.memory.refs import BlobRef, BlockRef, Extent
from relax_rt.transport.rpc.errors import RelaxError
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.interface import methods_of

WHO = [Incarnation("a/0", 1), Incarnation("b/0", 2)]
LIMITS = ev.StoreLimits(capacity_bytes=1024, max_row_bytes=512, spill_bytes=1 << 20)

small = st.integers(0, 9)
numbers = st.sampled_from([0] * 9 + [1, 2, 3, -1, 2**31, 2**48, 2**63, 2**64 - 1, -(2**63)])
texts = st.sampled_from(["p", "p", "q", "", "\0", "x" * 300])
keys = st.lists(st.sampled_from(["k", "l", "m", "n", "o", "p", ""]), max_size=6)
fields = st.lists(st.sampled_from(["x", "x", "y", ""]), max_size=3)
rows = (
    st.builds(RowNames, texts, keys)
    | st.builds(RowNames, texts, st.just([]), st.lists(small, max_size=6))
    | st.builds(RowNames, texts, keys, st.lists(numbers, max_size=3))
)
slabs = st.sampled_from(["a-0-1-1.slab"] * 5 + ["b-0-2-1.slab", "spill-1-1.slab", "", "../x.slab"])
extents = st.builds(Extent, slabs, st.integers(0, 1 << 16).map(lambda at: at * 64), st.just(64) | numbers)
blocks = st.builds(
    BlockRef, st.none() | extents, small | numbers, fields.map(tuple), st.sampled_from([b"", b"\1", b"\1" * 2000])
)
blobs = st.lists(st.builds(BlobRef, st.sampled_from([b"d" * 16, b"e" * 16, b""]), extents), max_size=2)
integers = st.sampled_from([0, 3, -5, 2**40, 2**64 - 1])
lengths = integers.map(msgspec.msgpack.encode) | st.sampled_from([b"", b"\xc1", b"\xa1\xff", b"\x91" * 3000, b"\xcb"])
tags = st.dictionaries(st.sampled_from(["total_lengths", "u", ""]), lengths, max_size=2)
kinds = st.sampled_from(["ranked", "groups", "balanced", "sequential"])
samplers = st.builds(StoreSampler, kinds, st.integers(1, 2), st.integers(1, 2))
configs = st.builds(StoreConfig, samplers, st.sampled_from([0, 0, 2]), st.sampled_from([0, 0, 0, 6]))
odd_configs = st.builds(StoreConfig, st.builds(StoreSampler, kinds | st.just("mine"), small, small), numbers, numbers)


def _put(rows: RowNames, at: int, field: str, length: int) -> ev.PutRows:
    count = len(rows.keys or rows.indexes)
    block = BlockRef(Extent("a-0-1-1.slab", at * 64, 64), count, (field,))
    return ev.PutRows(rows, block=block, tags=[{"total_lengths": msgspec.msgpack.encode(length)}] * count)


def often(*shares: tuple[int, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """One of these, each as often as its number says."""
    return st.sampled_from([kind for times, kind in shares for _ in range(times)]).flatmap(lambda kind: kind)


bit = st.integers(0, 1)
named = st.builds(
    RowNames, st.sampled_from("ppq"), st.lists(st.sampled_from("klmn"), min_size=1, max_size=3, unique=True)
)
numbered = st.builds(RowNames, st.just(""), st.just([]), st.lists(small, min_size=1, max_size=4, unique=True))
proper = often(
    (4, st.builds(_put, named, st.integers(0, 1 << 16), st.sampled_from("xxy"), small)),
    (2, st.builds(_put, numbered, st.integers(0, 1 << 16), st.sampled_from("xxy"), small)),
    (5, st.builds(ev.SampleRows, st.just("p"), st.just("t"), st.just(["x"]), st.integers(1, 2), bit, bit)),
    (1, st.builds(ev.GetRows, st.builds(RowNames, st.just("p"), keys))),
    (1, st.builds(ev.ClearRows, st.builds(RowNames, st.just("p"), keys.filter(bool)))),
    (
        1,
        st.builds(
            ev.ClearRows, st.builds(RowNames, st.just("p"), st.just([]), st.lists(small, min_size=1, max_size=4))
        ),
    ),
    (1, st.builds(ev.UnpinRows, st.lists(st.integers(1, 4), max_size=2))),
    (1, st.builds(ev.ResetTask, st.just("p"), st.sampled_from([None, "t"]))),
)
odd: st.SearchStrategy[ev.StoreCall] = st.one_of(
    st.builds(ev.PutRows, rows, numbers, st.none() | blocks, blobs, st.lists(tags, max_size=6), st.booleans()),
    st.builds(ev.PutRows, rows, small, st.none(), st.just([]), st.just([]), st.booleans()),
    st.builds(ev.GetRows, rows, st.none() | fields),
    st.builds(ev.UnpinRows, st.lists(small | numbers, max_size=3)),
    st.builds(ev.ClearRows, rows),
    st.builds(
        ev.SampleRows,
        texts,
        st.sampled_from("tu"),
        fields,
        small | numbers,
        st.none() | small | numbers,
        st.none() | small | numbers,
    ),
    st.builds(ev.ResetTask, texts, st.none() | texts),
    st.builds(ev.ConfigureStore, odd_configs),
)
calls = often(
    (9, st.tuples(st.just(WHO[0]), st.just(0), proper)),
    (4, st.tuples(st.sampled_from(WHO), st.sampled_from([0, 0, 0, 5, 6, 7, 8]), odd)),
)
"""Caller; 0: with the next number, else with one that may have been used; event."""


def wired(entry: ev.StoreEntry) -> ev.StoreEntry | None:
    """As the ledger gets it; None: the decoder refuses it."""
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(entry), type=ev.StoreEntry)
    except msgspec.ValidationError:
        return None


class Hostile:
    """A ledger with its journal, and a second one that begins again from a snapshot every now and then."""

    def __init__(self) -> None:
        self.ledger, self.restarted = StoreLedger(), StoreLedger()
        self.n = 0
        self.apply(ev.StoreOpened("memory", LIMITS), None, 0)
        for who in WHO:
            self.apply(ev.CallerJoined(who, 1, 1), None, 0)

    def apply(self, event: Any, who: Incarnation | None, seq: int) -> None:
        self.n += 1
        entry = wired(ev.StoreEntry(self.ledger.state.n + 1, event, who, seq or self.n))
        if entry is None:
            return
        before = self.ledger.snapshot()
        try:
            outcome = self.ledger.apply(entry)
        except RelaxError:
            assert self.ledger.snapshot() == before, entry
            return
        assert self.ledger.audit() == [], entry
        if not outcome.changed:
            assert self.ledger.snapshot() == before, entry
            return
        if self.n % 3 == 0:
            self.restarted = StoreLedger(self.restarted.snapshot())
        assert self.restarted.apply(entry).changed
        # Not their bytes: a set has no order.
        assert self.restarted.state == self.ledger.state, entry


@settings(deadline=None, max_examples=200)
@given(st.none() | configs, st.lists(calls, min_size=8, max_size=40))
def test_hostile_calls_are_answered_or_refused(config: StoreConfig | None, script: list[tuple[Any, int, Any]]) -> None:
    hostile = Hostile()
    if config is not None:
        hostile.apply(ev.ConfigureStore(config), WHO[0], 0)
    for who, seq, event in script:
        hostile.apply(event, who, seq)
    for who in WHO:
        hostile.apply(ev.CallerGone(who), None, 0)
    assert hostile.ledger.state.pins == {}


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("configure", (1, StoreConfig(expected=2**40))),
        ("configure", (1, StoreConfig(expected=-1))),
        ("configure", (1, StoreConfig(max_rows=-1))),
        ("configure", (1, StoreConfig(StoreSampler(ranks=2**40)))),
        ("put", (1, RowNames("p"), 2**40, None, [], [], False, 0.0)),
        ("put", (1, RowNames("p"), -1, None, [], [], False, 0.0)),
        ("unpin", (-1, [])),
    ],
)
def test_numbers_out_of_bounds_are_refused_by_the_decoder(method: str, arguments: tuple[Any, ...]) -> None:
    found = methods_of(StoreApi)[method]
    with pytest.raises(RelaxError):
        found.decode_arguments(msgspec.Raw(found.encode_arguments(arguments)))
