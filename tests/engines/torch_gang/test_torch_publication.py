"""The weights of ranks that share a model (FSDP2) are gathered beside their next step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gang_harness import Gang
from gang_publication import check_killed, check_no_room, check_overlap, check_struck, check_thrown_away

ALGORITHM: dict[str, Any] = {"learning_rate": 1e-2}
HERE = Path(__file__).parent


def builder(gang: Gang, folder: Path, **options: Any) -> Callable[[], None]:
    def build() -> None:
        gang.call("build", model=folder, algorithm=ALGORITHM, **options)

    return build


@pytest.mark.parametrize(
    ("family", "world", "options", "dtype"),
    [
        ("dense", 2, {}, "float32"),
        ("dense", 3, {}, "bfloat16"),
        ("experts", 2, {}, "float32"),
        ("dense", 2, {"lora": {"rank": 4, "alpha": 8}}, "float32"),
        # Of the four rows of A rank 0 has two, rank 1 two, rank 2 none.
        ("dense", 3, {"lora": {"rank": 4, "alpha": 8}}, "bfloat16"),
    ],
    ids=str,
)
def test_a_version_is_gathered_after_the_next_step_as_it_was_before(
    family: str,
    world: int,
    options: dict[str, Any],
    dtype: str,
    torch_gang: Callable[[int], Gang],
    shared_model: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    several = torch_gang(world)
    check_overlap(several, builder(several, shared_model(family), **options), tmp_path, dtype)


def test_a_step_that_is_thrown_away_beside_it_changes_nothing(
    torch_gang: Callable[[int], Gang], shared_model: Callable[[str], Path], tmp_path: Path
) -> None:
    two = torch_gang(2)
    check_thrown_away(two, builder(two, shared_model("dense")), tmp_path)


@pytest.fixture
def mortal() -> Iterator[Gang]:
    """A gang that serves one test."""
    made = Gang(2, HERE / "torch_work.py")
    yield made
    made.kill()


def test_a_rank_that_is_killed_in_the_middle_is_named(mortal: Gang, shared_model: Callable[[str], Path]) -> None:
    builder(mortal, shared_model("dense"))()
    check_killed(mortal)


def test_a_rank_that_stands_still_in_the_middle_is_waited_for_no_longer_than_its_deadline(
    mortal: Gang, shared_model: Callable[[str], Path]
) -> None:
    builder(mortal, shared_model("dense"), gather_s=3.0)()
    check_struck(mortal, seconds=3.0)


def test_a_rank_that_cannot_copy_its_weights_says_so(mortal: Gang, shared_model: Callable[[str], Path]) -> None:
    builder(mortal, shared_model("dense"))()
    check_no_room(mortal)
