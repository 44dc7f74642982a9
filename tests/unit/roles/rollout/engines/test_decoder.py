"""Parts of engines without a model: sampling, attention segments, chunks, sequences, the prefix store."""

from __future__ import annotations

from functools import partial

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from relax_rt.roles.rollout.engines.attention import CALL_COST, length_class, segments  # noqa: E402
from relax_rt.roles.rollout.engines.base import Assembly, Chunk, GroupRequest, Partial  # noqa: E402
from relax_rt.roles.rollout.engines.decoder import (  # noqa: E402
    DecodedSequence,
    Sampler,
    member_uniforms,
)
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
def test_chunks_add_up_to_the_sampled_tokens(tokens: list[tuple[int, int, bool]], had: int, chunk: int) -> None:
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


def test_rows_are_not_reported_unless_requested() -> None:
    sequence = DecodedSequence(request(), 0, SHAPE)
    sequence.set_prompt_rows(rows(1, 2))
    sequence.append(9, -1.0, 1, rows(9)[0])
    assert (sequence.chunk().routing, sequence.chunk().prompt_routing) == (b"", b"")


def test_a_lost_or_repeated_chunk_is_detected() -> None:
    for start in (0, 3):
        assembly = Assembly()
        assembly.expect(request())
        assembly.add(Chunk(1, 0, 0, [9, 9], [-1.0] * 2, [VersionSpan(0, 2, 0, 0)]))
        with pytest.raises(Refused, match="end at token 2"):
            assembly.add(Chunk(1, 0, start, [9], [-1.0], [VersionSpan(start, start + 1, 0, 0)]))


def test_chunks_of_a_removed_request_are_ignored() -> None:
    assembly = Assembly()
    assembly.expect(request())
    assembly.forget(1)
    assert assembly.add(Chunk(1, 0, 0, [9], [-1.0], [VersionSpan(0, 1, 0, 0)], "stop")) is None


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12))
def test_the_common_prefix_of_two_prompts(one: list[int], other: list[int]) -> None:
    plain = 0
    while plain < min(len(one), len(other)) and one[plain] == other[plain]:
        plain += 1
    assert common_prefix(tuple(one), tuple(other)) == plain


def kept(length: int) -> torch.Tensor:
    return torch.zeros(2, 1, 1, length, 1)


def test_prompts_are_found_by_prefix_and_version() -> None:
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
def test_the_prefix_store_is_bounded(prompts: list[tuple[int, ...]]) -> None:
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


@pytest.mark.parametrize("shift", [0, 300])
def test_draws_follow_the_distribution(shift: int) -> None:
    logits = torch.full((10_000, 400), -torch.inf)
    logits[:, shift : shift + 4] = torch.log(torch.tensor([0.1, 0.2, 0.0, 0.7]))
    uniforms = (torch.arange(10_000) + 0.5) / 10_000
    tokens, logprobs = Sampler(400)(logits, torch.ones(10_000), uniforms)
    counts = torch.bincount(tokens, minlength=400)
    assert counts[shift : shift + 4].tolist() == pytest.approx([1000, 2000, 0, 7000], abs=2)
    assert counts.sum() == 10_000
    expected = torch.tensor([0.1, 0.2, 0.0, 0.7])[tokens - shift]
    torch.testing.assert_close(logprobs.exp(), expected)


@pytest.mark.parametrize("vocabulary", [97, 256, 49_152])
def test_logprobs_are_of_the_whole_vocabulary_at_the_temperature(vocabulary: int) -> None:
    torch.manual_seed(vocabulary)
    logits = torch.randn(6, vocabulary) * 5
    temperatures = torch.tensor([1.0, 0.5, 2.0, 0.0, 1.0, 1.3])
    tokens, logprobs = Sampler(vocabulary)(logits, temperatures, torch.rand(6))
    divisors = torch.where(temperatures == 0, 1.0, temperatures)
    expected = torch.log_softmax(logits.double() / divisors[:, None], -1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=1e-5)
    assert tokens[3] == logits[3].argmax()


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-24])
def test_zero_probability_is_never_drawn(uniform: float) -> None:
    torch.manual_seed(0)
    for _ in range(50):
        logits = torch.randn(8, 1000) * 3
        allowed = torch.rand(8, 1000) < 0.02
        allowed[:, 500] = True
        logits[~allowed] = -torch.inf
        tokens, logprobs = Sampler(1000)(logits, torch.ones(8), torch.full((8,), uniform))
        assert bool(allowed.gather(-1, tokens[:, None]).all())
        assert bool(logprobs.isfinite().all())


def test_the_draw_at_a_position_does_not_depend_on_how_many_follow() -> None:
    short, long = member_uniforms(7, 33), member_uniforms(7, 1000)
    assert short.tolist() == long[:33].tolist()
    assert member_uniforms(8, 33).tolist() != short.tolist()


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=64))
def test_every_row_is_read_to_its_end_and_none_twice(lengths: list[int]) -> None:
    cut = segments(lengths)
    assert [s.start for s in cut] == [0, *(s.end for s in cut)][:-1]
    assert cut[-1].end == len(lengths)
    for segment in cut:
        assert segment.start < segment.end
        assert segment.upto == max(lengths[segment.start : segment.end])


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=64))
def test_cutting_never_costs_more_than_one_call_for_all(lengths: list[int]) -> None:
    cut = segments(lengths)
    cost = sum((s.end - s.start) * s.upto + CALL_COST for s in cut)
    assert cost <= len(lengths) * max(lengths) + CALL_COST


def test_one_long_row_does_not_make_others_read_as_far() -> None:
    assert [tuple(s) for s in segments([4000, *[100] * 63])] == [(0, 1, 4000), (1, 64, 100)]
    assert [tuple(s) for s in segments([130, *[120] * 7])] == [(0, 8, 130)]


@given(st.integers(1, 100_000))
def test_a_length_class_spans_at_most_a_factor_of_two(length: int) -> None:
    longest = max(n for n in (64 << k for k in range(12)) if length_class(n) <= length_class(length))
    assert length <= longest
    if length > 64:
        assert length * 2 > longest
