"""The payload of a lease goes to the node that trains on it, in a gang over several nodes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import share_far_end

from relax_rt.roles.base.sample import Sample, bare_meta
from relax_rt.roles.training.backend.gang import decode_samples, encode_samples
from relax_rt.roles.training.backend.shares import assign_replicas, decode_runs, encode_runs, shared


def test_each_node_receives_the_payload_of_its_own_share_alone(tmp_path: Path) -> None:
    commands = [[sys.executable, share_far_end.__file__, str(rank), str(tmp_path)] for rank in range(2)]
    ranks = [subprocess.Popen(one) for one in commands]
    try:
        assert ranks[0].wait(280) == 0 and ranks[1].wait(60) == 0
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    found = json.loads((tmp_path / "answer.json").read_text())
    received = found["received"]
    assert set(received) == {"node-0", "node-1"} and sum(received.values()) == found["payload"]
    for nbytes in received.values():
        assert 0.4 < nbytes / found["payload"] < 0.6
    # Rank 0 has the tokens of its own share alone, and all that it decides by.
    assert found["held"] == len(found["wanted"]) / 2
    assert found["masks_agree"] and found["digests_agree"] and found["values_are_tokens"] and found["behaviour_agrees"]
    assert found["entropies"][0] == pytest.approx(found["entropies"][1])
    # Each sample is computed once, with the tokens that were put and the advantage that rank 0 gave it.
    first, second = found["computed"]
    assert len(first) == len(second) and sorted(first + second) == sorted(found["wanted"])
    assert {group for group, *_ in first}.isdisjoint(group for group, *_ in second), "a group was divided"


def test_a_sample_that_went_to_another_replica_is_not_computed_twice() -> None:
    """A rank may still hold a sample of a lease that another rank could not read."""
    sample = Sample(
        meta=bare_meta(3, 0),
        tokens=np.arange(4, dtype=np.int32),
        loss_mask=np.array([0, 0, 1, 1], np.uint8),
        behaviour_logprobs=np.full(4, -0.5, np.float32),
        versions=[],
    )
    held = {(3, 0): shared(sample, replica=1)}
    for replica, tokens in ((1, 4), (0, 0)):
        (decoded,) = decode_samples(encode_samples([shared(sample, replica)]), held)
        assert len(decoded.tokens) == tokens


def samples(*lengths: tuple[int, int]) -> list[Any]:
    """Leased samples of these (group, tokens)."""
    return [SimpleNamespace(key=SimpleNamespace(group=group), length=length) for group, length in lengths]


def loads(leased: list[Any], found: list[int], groups: set[int]) -> list[int]:
    chosen = [(replica, one.length) for replica, one in zip(found, leased, strict=True) if one.key.group in groups]
    return [sum(length for replica, length in chosen if replica == number) for number in range(2)]


def test_replicas_get_about_as_many_tokens_of_every_update() -> None:
    leased = samples(*((group, 100 * (group + 1)) for group in range(8) for _ in range(2)))
    found = assign_replicas(leased, 2, whole_groups=False, updates=2)
    assert all(found[place] == found[place + 1] for place in range(0, 16, 2)), "a group was divided"
    for update in ({0, 2, 4, 6}, {1, 3, 5, 7}):
        first, second = loads(leased, found, update)
        assert abs(first - second) <= 400


def test_a_group_is_divided_only_where_there_are_fewer_groups_than_replicas() -> None:
    leased = samples((0, 10), (0, 10), (0, 10), (0, 10))
    assert sorted(assign_replicas(leased, 2, whole_groups=False, updates=1)) == [0, 0, 1, 1]
    assert len(set(assign_replicas(leased, 2, whole_groups=True, updates=1))) == 1


@pytest.mark.parametrize(
    "values",
    [
        np.zeros(0, np.uint8),
        np.array([0, 0, 1, 1, 1, 0], np.uint8),
        np.array([0.0, -0.0, 0.5, 0.5, np.nan, np.nan], np.float32),
        np.arange(7, dtype=np.float32),
    ],
)
def test_runs_of_equal_values_are_what_they_were_to_the_bit(values: Any) -> None:
    assert decode_runs(encode_runs(values), values.dtype).tobytes() == values.tobytes()
