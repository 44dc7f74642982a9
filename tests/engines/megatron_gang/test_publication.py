"""A Megatron gang's weights are gathered beside its next step."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gang_publication import check_killed, check_no_room, check_overlap, check_struck, check_thrown_away
from megatron_parts import Gang

ALGORITHM: dict[str, Any] = {"learning_rate": 1e-2}
HERE = Path(__file__).parent


def builder(gang: Gang, folder: Path, division: dict[str, Any], **options: Any) -> Callable[[], None]:
    """Many small buckets."""

    def build() -> None:
        gang.call("build", model=folder, division=division, algorithm=ALGORITHM, bucket_bytes=4096, **options)

    return build


@pytest.mark.parametrize(
    ("family", "division", "dtype"),
    [
        ("qwen3", {"tensor_parallel": 2}, "float32"),
        ("qwen2", {"tensor_parallel": 2}, "bfloat16"),
        ("qwen3", {"tensor_parallel": 2, "dtype": "bfloat16"}, "bfloat16"),
        ("llama", {"pipeline_parallel": 2}, "float32"),
        ("qwen3", {"distributed_optimizer": True}, "float32"),
        ("qwen3_moe", {"expert_parallel": 2}, "float32"),
    ],
    ids=str,
)
def test_a_version_is_gathered_after_the_next_step_as_it_was_before(
    family: str,
    division: dict[str, Any],
    dtype: str,
    gang: Callable[[int], Gang],
    model: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    two = gang(2)
    check_overlap(two, builder(two, model(family), division), tmp_path, dtype)


def test_a_step_that_is_thrown_away_beside_it_changes_nothing(
    gang: Callable[[int], Gang], model: Callable[[str], Path], tmp_path: Path
) -> None:
    two = gang(2)
    check_thrown_away(two, builder(two, model("qwen3"), {"tensor_parallel": 2}), tmp_path)


@pytest.fixture
def mortal() -> Iterator[Gang]:
    """A gang that serves one test."""
    made = Gang(2, HERE / "work.py")
    yield made
    made.kill()


def test_a_rank_that_is_killed_in_the_middle_is_named(mortal: Gang, model: Callable[[str], Path]) -> None:
    builder(mortal, model("qwen3"), {"tensor_parallel": 2})()
    assert re.search(r"bucket \d+ of 30 from", check_killed(mortal)["why"])


def test_a_rank_that_stands_still_in_the_middle_is_waited_for_no_longer_than_its_deadline(
    mortal: Gang, model: Callable[[str], Path]
) -> None:
    builder(mortal, model("qwen3"), {"tensor_parallel": 2}, gather_s=3.0)()
    assert re.search(r"bucket \d+ of 30 from", check_struck(mortal, seconds=3.0)["why"])


def test_a_rank_that_cannot_copy_its_weights_says_so(mortal: Gang, model: Callable[[str], Path]) -> None:
    builder(mortal, model("qwen3"), {"tensor_parallel": 2})()
    check_no_room(mortal)
