"""Either backend goes on from the other's checkpoints, with experts too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_parts import Gang, samples
from transformers import AutoModelForCausalLM

TORCH = Path(__file__).parents[1] / "torch_gang" / "torch_work.py"
ALGORITHM: dict[str, Any] = {"learning_rate": 1e-2}
TEMPERATURE = 0.9
"""That of `torch_work.build`."""


@pytest.fixture(scope="module")
def torch_gang() -> Iterator[Callable[[int], Gang]]:
    started: dict[int, Gang] = {}

    def of(world: int) -> Gang:
        if world not in started:
            started[world] = Gang(world, TORCH)
        return started[world]

    yield of
    for one in started.values():
        one.close()


def steps(gang: Gang, first: int) -> list[Any]:
    """Two steps."""
    batches = [(number, [samples(6, seed=number)]) for number in (first, first + 1)]
    return [gang.call("step", batches=batch, count=20.0, number=number)[0] for number, batch in batches]


def assert_goes_on(gang: Gang, other: Gang, first: int, folder: Path) -> None:
    """One has the other's weights from its checkpoint in this folder, and takes the same steps from there on."""
    gang.call("restore", folder=folder)
    kept = other.weights()
    assert all(torch.equal(value, kept[name]) for name, value in gang.weights().items())
    for ours, theirs in zip(steps(gang, first), steps(other, first), strict=True):
        assert theirs.changed and ours.loss == pytest.approx(theirs.loss, abs=3e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=2e-3)
    for name, value in other.weights().items():
        # Adam divides by the root of its moments: without them each element would be off by about the learning rate.
        torch.testing.assert_close(gang.weights()[name], value, atol=2e-3, rtol=0, msg=name)
        assert float((gang.weights()[name] - value).abs().mean()) < 1e-4, name


@pytest.mark.parametrize(
    ("family", "ranks", "division"),
    [
        ("qwen3", 1, (2, {"tensor_parallel": 2})),
        ("qwen3_moe", 1, (2, {"expert_parallel": 2})),
        ("qwen3_moe", 2, (2, {"tensor_parallel": 2, "expert_tensor_parallel": 2})),
    ],
)
def test_training_goes_on_with_the_other_backend_and_back(
    family: str,
    ranks: int,
    division: tuple[int, dict[str, Any]],
    gang: Callable[[int], Gang],
    torch_gang: Callable[[int], Gang],
    model: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    world, options = division
    ours, theirs = torch_gang(ranks), gang(world)
    ours.call("build", model=model(family), algorithm=ALGORITHM)
    theirs.call("build", model=model(family), division=options, algorithm=ALGORITHM, temperature=TEMPERATURE)
    steps(ours, 1)
    there, back = tmp_path / "there", tmp_path / "back"
    for folder in (there, back):
        folder.mkdir()
    ours.call("save", folder=there)
    assert_goes_on(theirs, ours, 3, there)
    theirs.call("save", folder=back)
    assert_goes_on(ours, theirs, 5, back)
    for folder in (there, back):
        AutoModelForCausalLM.from_pretrained(folder)
    # What one has written is a model that the other begins with.
    theirs.call("build", model=there, division=options, algorithm=ALGORITHM)
    begun = AutoModelForCausalLM.from_pretrained(there, dtype=torch.float32)
    found = theirs.weights()
    assert all(torch.equal(found[name], value) for name, value in begun.named_parameters())
