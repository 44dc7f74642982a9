"""Packed micro-batches and the shares of replicas."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from relax_rt.roles.base.sample import Sample, bare_meta
from relax_rt.roles.training.backend.gang import decode_samples, encode_samples
from relax_rt.roles.training.batch.rows import replica_share
from relax_rt.roles.training.megatron.passes import at_wanted_tokens, fill_packs, pack

LENGTHS = st.lists(st.integers(2, 30), min_size=1, max_size=12)


def sample(index: int, length: int) -> Sample:
    """A sample of which every token is another one; the first half is its prompt."""
    mask = np.zeros(length, np.uint8)
    mask[length // 2 :] = 1
    meta = bare_meta(index // 3, index % 3)
    tokens = (100 * index + np.arange(length)).astype(np.int32)
    return Sample(meta=meta, tokens=tokens, loss_mask=mask, behaviour_logprobs=-tokens.astype(np.float32), versions=[])


def batch(lengths: Sequence[int]) -> list[Sample]:
    return [sample(index, length) for index, length in enumerate(lengths)]


@given(LENGTHS, st.integers(1, 60), st.booleans())
def test_every_sample_is_in_one_pack_within_the_budget(lengths: list[int], budget: int, whole: bool) -> None:
    samples = batch(lengths)
    packs = fill_packs(enumerate(samples), budget, whole_groups=whole)
    assert sorted(index for members in packs for index, _ in members) == list(range(len(samples)))
    for members in packs:
        tokens = sum(len(one.tokens) for _, one in members)
        units = {one.meta.group if whole else index for index, one in members}
        assert tokens <= budget or len(units) == 1
    if whole:
        where = {one.meta.group: n for n, members in enumerate(packs) for _, one in members}
        assert all(where[one.meta.group] == n for n, members in enumerate(packs) for _, one in members)


@given(LENGTHS, st.integers(1, 8), st.booleans())
def test_wanted_tokens_are_predicted_one_position_before_them(lengths: list[int], multiple: int, trained: bool) -> None:
    samples = batch(lengths)
    one = pack(list(enumerate(samples)), multiple=multiple, trained_only=trained)
    assert one.tokens % multiple == 0 and one.bounds[-1] == one.tokens
    bounds = one.bounds.tolist()
    assert one.longest == max(b - a for a, b in pairwise(bounds))
    assert torch.equal(one.ids[0, one.rows + 1], one.targets)
    assert torch.equal(one.positions[0, one.rows] + 1, one.at)
    for number, each in enumerate(samples):
        at = one.at[one.sequence == number].numpy()
        expected = np.flatnonzero(each.loss_mask) if trained else np.arange(1, len(each.tokens))
        np.testing.assert_array_equal(at, expected[expected > 0])
        np.testing.assert_array_equal(one.ids[0, bounds[number] : bounds[number + 1]], each.tokens)
    values = at_wanted_tokens(one, [each.behaviour_logprobs for each in samples])
    torch.testing.assert_close(values, -one.targets.float())


@given(LENGTHS, st.integers(1, 5), st.booleans())
def test_replicas_share_a_batch_evenly_and_completely(lengths: list[int], replicas: int, whole: bool) -> None:
    samples = batch(lengths)
    shares = [replica_share(samples, place, replicas, whole_groups=whole) for place in range(replicas)]
    assert sorted(index for part in shares for index, _ in part) == list(range(len(samples)))
    loads = [sum(len(one.tokens) for _, one in part) for part in shares]
    units: dict[int, int] = {}
    for index, one in enumerate(samples):
        key = one.meta.group if whole else index
        units[key] = units.get(key, 0) + len(one.tokens)
    assert max(loads) - min(loads) <= max(units.values())


def test_samples_cross_to_other_ranks_as_they_are() -> None:
    first = batch([5, 9])
    first[0].advantages = np.arange(5, dtype=np.float32)
    for one, other in zip(first, decode_samples(encode_samples(first)), strict=True):
        assert one.meta == other.meta
        for name in ("tokens", "loss_mask", "behaviour_logprobs"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert np.array_equal(decode_samples(encode_samples(first))[0].advantages, first[0].advantages)
    assert decode_samples(encode_samples(first))[1].advantages is None


@given(LENGTHS, st.integers(2, 4))
def test_context_parallel_ranks_share_every_sequence_alike(lengths: list[int], ranks: int) -> None:
    samples = batch(lengths)
    one = pack(list(enumerate(samples)), multiple=4 * ranks, trained_only=True, sequence_multiple=2 * ranks)
    shares = [one.share(rank, ranks) for rank in range(ranks)]
    assert sorted(torch.cat([each.places for each in shares]).tolist()) == list(range(one.tokens))
    assert sorted(torch.cat([each.wanted for each in shares]).tolist()) == list(range(len(one.targets)))
    for own in shares:
        # Its tokens stand in order; the rows that predict are those of the whole pack.
        assert len(own.places) == one.tokens // ranks
        assert torch.equal(own.places[own.rows], one.rows[own.wanted])
        for start, stop in pairwise(one.bounds.tolist()):
            mine = own.places[(own.places >= start) & (own.places < stop)]
            # As many pairs of tokens to attend to as any other.
            total = (stop - start) * (stop - start + 1) // 2
            size = (stop - start) // ranks
            assert int((mine - start + 1).sum()) * ranks == total and len(mine) == size
