"""What engines are made of, without a model: chunks put together, members, prompts kept for others."""

from __future__ import annotations

from functools import partial

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from relax_rt.roles.rollout.engines.base import Assembly, Chunk, GroupRequest, Partial  # noqa: E402
from relax_rt.roles.rollout.engines.decoder import DecodedSequence  # noqa: E402
from relax_rt.roles.rollout.engines.kv_cache import PrefixStore, common_prefix  # noqa: E402
from relax_rt.roles.rollout.engines.routing import RoutingShape, canonical_rows, encode_rows  # noqa: E402
from relax_rt.transport.queue.ledger.messages import VersionSpan  # noqa: E402
from relax_rt.transport.rpc.errors import Refused  # noqa: E402

SHAPE = RoutingShape(layers=2, chosen=1)


def rows(*experts: int) -> np.ndarray:
    """A row for each, which says whose it is."""
    return np.array([[[expert], [0]] for expert in experts], np.int16).reshape(-1, 2, 1)


def request(**changes: object) -> GroupRequest:
    plain = GroupRequest(
        id=1, prompt=(1, 2), seeds=(7,), temperature=1.0, max_new_tokens=60, stop_ids=frozenset([5]), chunk_tokens=4
    )
    return msgspec.structs.replace(plain, **changes)


@given(
    tokens=st.lists(st.tuples(st.integers(6, 90), st.integers(0, 3), st.booleans()), min_size=1, max_size=59),
    had=st.integers(0, 20),
    chunk=st.integers(0, 9),
)
def test_chunks_make_up_what_was_sampled(tokens: list[tuple[int, int, bool]], had: int, chunk: int) -> None:
    had = min(had, len(tokens) - 1)
    before = Partial(
        (9,) * had, (-0.5,) * had, (VersionSpan(0, had, 0, 0),) if had else (), encode_rows(rows(*[9] * had))
    )
    asked = request(partials=(before,), chunk_tokens=chunk, routing=True)
    sequence, assembly = DecodedSequence(asked, 0, SHAPE), Assembly()
    assembly.expect(asked)
    version = 0
    sequence.set_prompt_rows(rows(1, 2, 3))
    for token, more, due in tokens[had:]:
        version += more
        sequence.append(token, -1.0, version, rows(token)[0])
        if due or sequence.is_due:
            assert assembly.add(sequence.chunk()) is None
    known = assembly.had(1, 0)
    assert known is not None and len(known.tokens) == sequence.reported
    sequence.finish_reason = "abort"
    done = assembly.add(sequence.chunk())
    assert done is not None and assembly.had(1, 0) is None
    assert done.tokens == [9] * had + [t for t, *_ in tokens[had:]]
    assert len(done.logprobs) == len(tokens)
    assert done.versions == sequence.spans
    assert done.versions[-1].end == len(tokens)
    assert SHAPE.rows(done.prompt_routing, done.routing)[:, 0, 0].tolist() == [1, 2, *done.tokens]


def test_rows_of_a_request_that_did_not_ask_for_them_are_not_told() -> None:
    sequence = DecodedSequence(request(), 0, SHAPE)
    sequence.set_prompt_rows(rows(1, 2))
    sequence.append(9, -1.0, 1, rows(9)[0])
    assert (sequence.chunk().routing, sequence.chunk().prompt_routing) == (b"", b"")


def test_a_lost_or_repeated_chunk_is_found() -> None:
    for start in (0, 3):
        assembly = Assembly()
        assembly.expect(request())
        assembly.add(Chunk(1, 0, 0, [9, 9], [-1.0] * 2, [VersionSpan(0, 2, 0, 0)]))
        with pytest.raises(Refused, match="end at token 2"):
            assembly.add(Chunk(1, 0, start, [9], [-1.0], [VersionSpan(start, start + 1, 0, 0)]))


def test_chunks_of_what_was_forgotten_are_ignored() -> None:
    assembly = Assembly()
    assembly.expect(request())
    assembly.forget(1)
    assert assembly.add(Chunk(1, 0, 0, [9], [-1.0], [VersionSpan(0, 1, 0, 0)], "stop")) is None


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12))
def test_the_common_beginning_of_two_prompts(one: list[int], other: list[int]) -> None:
    plain = 0
    while plain < min(len(one), len(other)) and one[plain] == other[plain]:
        plain += 1
    assert common_prefix(tuple(one), tuple(other)) == plain


def kept(length: int) -> torch.Tensor:
    return torch.zeros(2, 1, 1, length, 1)


def test_prompts_are_found_by_their_beginning_and_only_at_their_version() -> None:
    store = PrefixStore(100)
    store.put(3, (1, 2, 3, 4), lambda: kept(4))
    assert store.find(3, (1, 2, 9))[0] == 2
    assert store.find(3, (1, 2, 3, 4))[0] == 4
    assert store.find(3, (8,)) == (0, None)
    assert store.find(4, (1, 2, 3, 4)) == (0, None)
    store.put(4, (7,), lambda: kept(1))
    assert store.find(4, (1, 2, 3, 4)) == (0, None)
    assert store.positions == 1


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9).map(tuple), max_size=40))
def test_no_more_is_kept_than_there_is_room_for(prompts: list[tuple[int, ...]]) -> None:
    store = PrefixStore(12)
    for prompt in prompts:
        store.find(0, prompt)
        store.put(0, prompt, partial(kept, len(prompt)))
        assert store.positions <= 12
        assert store.find(0, prompt)[0] == len(prompt)


def test_rows_are_in_ascending_order_and_name_no_expert_where_there_is_none() -> None:
    chosen = np.array([[[5, 2], [0, 0], [1, 7]], [[3, 9], [0, 0], [4, 4]]])
    made = canonical_rows(chosen, [1])
    assert made.dtype == np.int16 and made.tolist() == [[[2, 5], [-1, -1], [1, 7]], [[3, 9], [-1, -1], [4, 4]]]
    assert RoutingShape(3, 2).rows(encode_rows(made[:1]), encode_rows(made[1:])).tolist() == made.tolist()
