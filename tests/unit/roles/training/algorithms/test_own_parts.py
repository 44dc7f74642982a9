"""A user's own part that fails: what is said of it, and that it ends the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from algorithm_samples import sample, tokens

from relax_rt.interfaces.agent import Diagnosis
from relax_rt.roles.config.algorithm_checks import check_own_parts
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.training.algorithms.dry_run import DryRunFailure, DryRunRequest, first_failure
from relax_rt.roles.training.algorithms.filters import RefillPolicy, ScoredGroup
from relax_rt.roles.training.algorithms.objective import Objective
from relax_rt.roles.training.algorithms.prompt_history import PromptHistory
from relax_rt.roles.training.algorithms.registry import BoundPart, UserPartFailed, bind
from relax_rt.roles.training.algorithms.samplers import PromptSampler
from relax_rt.roles.training.algorithms.settings import AlgorithmTable
from relax_rt.roles.training.backend.settings import TrainerSettings
from relax_rt.supervision.diagnosis import classify_exception

MINE = """
import os
import sys
import time

import numpy as np
import torch

from relax_rt.roles.training.algorithms.registry import part


def raises(given, *rest):
    options = rest[-1]
    return options.factor


def leaves(given, *rest):
    sys.exit("enough")


def stops(given, *rest):
    os._exit(3)


def asks(tokens, options):
    breakpoint()


def goes_on(tokens, options):
    while True:
        pass


def deaf(tokens, options):
    while True:
        try:
            time.sleep(1)
        except Exception:
            pass


def on_gpu(tokens, options):
    return torch.zeros_like(tokens.logprobs, device="cuda"), {}


def of_sixteen(batch, options):
    rewards = np.array([one.reward for one in batch.trajectories]).reshape(options.prompts, 16)
    return [one.spread(r) for one, r in zip(batch.trajectories, (rewards - rewards.mean(1)[:, None]).flat)]


def to_reference(tokens, options):
    return (tokens.logprobs - tokens.reference) * tokens.advantages, {}


def of_entropy(tokens, options):
    return -tokens.logprobs * tokens.advantages * tokens.entropy, {}


def of_values(batch, options):
    return [one.values.astype("f4") for one in batch.trajectories]


@part("loss", needs={"reference"})
def says_reference(tokens, options):
    return to_reference(tokens, options)


@part("loss", needs={"entropy"})
def says_entropy(tokens, options):
    return of_entropy(tokens, options)


@part("advantage", needs={"values"})
def says_values(batch, options):
    return of_values(batch, options)


def scalar(tokens, options):
    return (tokens.logprobs * tokens.advantages).sum()


def pair_of_scalar(tokens, options):
    return (tokens.logprobs * tokens.advantages).sum(), {}


def detached(tokens, options):
    return tokens.logprobs.detach(), {}


def good(tokens, options):
    return -tokens.advantages * tokens.logprobs, {"seen": tokens.advantages.sum()}


def odd_metric(tokens, options):
    return tokens.logprobs, {"seen": tokens.advantages}


def no_metrics(tokens, options):
    return tokens.logprobs, None


def short(batch, options):
    return [one.spread(1.0)[:-1] for one in batch.trajectories]


def too_few(batch, options):
    return [one.spread(1.0) for one in batch.trajectories[1:]]


def one_number(batch, options):
    return 1.0


def of_tensors(batch, options):
    return [torch.ones(len(one.mask), requires_grad=True) for one in batch.trajectories]


def count_of_groups(group, history, options):
    return np.ones(2)


def nowhere(choice, history, options):
    return len(choice.items)


def greedy(tokens, options):
    raise {kind}("CUDA out of memory")
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE.replace("{kind}", "torch.OutOfMemoryError"))
    return tmp_path


def line(base: Path, text: str, after: str) -> str:
    """Where it stands in the user's file."""
    lines = (base / "mine.py").read_text().splitlines()
    start = next(i for i, one in enumerate(lines) if one.startswith(f"def {after}("))
    return f"{base / 'mine.py'}:{next(i for i in range(start, len(lines)) if text in lines[i]) + 1}"


def ends_the_run(error: Exception) -> bool:
    return Diagnosis(slot="trainer/0", epoch=1, kind=classify_exception(error), cause=str(error)).final


def advantages(base: Path, **table: Any) -> None:
    samples = [sample(0, [0, 1, 1], float(member), member=member) for member in range(2)]
    Objective.of(AlgorithmTable(**table), base=base).advantages(samples)


def loss(base: Path, **table: Any) -> None:
    Objective.of(AlgorithmTable(**table), base=base).loss(tokens([2, 3]))


def own(kind: Any, name: str, base: Path) -> BoundPart:
    found = bind(kind, f"mine.py:{name}", ("algorithm", kind), base=base, defaults={})
    assert isinstance(found, BoundPart)
    return found


def filtering(base: Path, name: str) -> None:
    refill = RefillPolicy(1, [own("filter", name, base)], PromptHistory())
    refill.scored(ScoredGroup(7, "item 7", [0.0, 1.0]), 1)


def sampling(base: Path, name: str) -> None:
    items = ["a", "b"]
    PromptSampler(own("sampler", name, base), items, lambda i: i % 2, seed=1, history=PromptHistory()).choose(3, 1)


def test_what_it_raises_is_told_with_line_and_arguments_and_ends_the_run(base: Path) -> None:
    where = line(base, "options.factor", "raises")
    mine = {"name": "mine.py:raises", "factr": 2.0}
    calls: list[tuple[Any, str, str]] = [
        (lambda: advantages(base, advantage=mine), "advantage", "AdvantageInputs(trajectories 2 x Trajectory(group 0"),
        (lambda: loss(base, loss=mine), "loss", "TokenTensors(logprobs float64 [5], behaviour float64 [5]"),
        (lambda: loss(base, corrections=[mine]), "correction", "mask bool [5]"),
        (lambda: filtering(base, "raises"), "filter", "ScoredGroup(key 7, item 'item 7', rewards 2 x 0.0"),
        (lambda: sampling(base, "raises"), "sampler", "SamplerContext(index 3, step 1, usual 1, items 2 x 'a'"),
    ]
    for call, kind, on in calls:
        with pytest.raises(UserPartFailed) as caught:
            call()
        text = str(caught.value)
        assert text.startswith(f"{kind} 'mine.py:raises' (algorithm.{kind}"), text
        assert f"'FreeOptions' object has no attribute 'factor' at {where}" in text and on in text
        assert ends_the_run(caught.value)
        # No dry run calls filters and samplers.
        assert ("relax-rt validate" in caught.value.hint) == (kind not in ("filter", "sampler"))
        assert "relax-rt up" in caught.value.hint


def test_leaving_the_process_is_a_failure_of_the_part(base: Path) -> None:
    with pytest.raises(UserPartFailed, match="SystemExit: enough at"):
        loss(base, loss="mine.py:leaves")


@pytest.mark.parametrize(
    ("key", "name", "why"),
    [
        ("loss", "scalar", "it returned float64 []: a loss returns (loss [m], metrics), and m is 5"),
        ("loss", "pair_of_scalar", "it returned float64 []: a loss is of each token, a tensor [5]"),
        ("loss", "odd_metric", "its metric 'seen' is float64 [5], and no number"),
        ("loss", "no_metrics", "its metrics are None: they are a table of sums"),
        ("corrections", "scalar", "a correction returns (weight [m], metrics), and m is 5"),
        ("advantage", "short", "it returned shape (2,) for a sample of 3 tokens"),
        ("advantage", "too_few", "it returned 1 arrays for 2 trajectories"),
        ("advantage", "one_number", "it returned 1.0: "),
        ("advantage", "of_tensors", "it returned float32 [3], which is no array of numbers"),
        ("filter", "count_of_groups", "it returned float64 [2]: a filter returns why"),
        ("sampler", "nowhere", "it chose 2, and a sampler returns a place, an int below 2"),
    ],
)
def test_what_it_returns_wrongly_is_told(base: Path, key: str, name: str, why: str) -> None:
    target = f"mine.py:{name}"
    with pytest.raises(UserPartFailed) as caught:
        match key:
            case "filter":
                filtering(base, name)
            case "sampler":
                sampling(base, name)
            case "advantage":
                advantages(base, advantage=target)
            case _:
                loss(base, **{key: [target] if key == "corrections" else target})
    assert why in str(caught.value) and line(base, "def", name) in str(caught.value)
    assert ends_the_run(caught.value)


def test_memory_that_runs_out_in_it_is_no_fault_of_its(base: Path) -> None:
    """Smaller micro-batches may do."""
    with pytest.raises(torch.OutOfMemoryError):
        loss(base, loss="mine.py:greedy")


def config_of(base: Path, keys: dict[str, Any], trainer: dict[str, Any] | None = None) -> RLConfig:
    config = RLConfig.model_validate(
        {
            "run": {"name": "x"},
            "model": {"path": "m"},
            "data": {"path": "d"},
            "reward": {"function": "f.py:f"},
            "algorithm": keys,
        }
    )
    roles = {} if trainer is None else {"trainer": TrainerSettings.model_validate(trainer)}
    return config.model_copy(update={"config_dir": str(base), "roles": roles})


def called(base: Path, keys: dict[str, Any], seconds: float = 30.0) -> DryRunFailure | None:
    return first_failure(DryRunRequest(AlgorithmTable(**keys), base, longest=16, turns=False, calls_s=seconds))


@pytest.mark.parametrize(
    ("keys", "place", "why"),
    [
        ({"loss": "mine.py:scalar"}, "loss", "a loss returns (loss [m], metrics)"),
        ({"loss": "mine.py:detached"}, "loss", "its loss has no gradient"),
        ({"advantage": {"name": "mine.py:raises", "factr": 2.0}}, "advantage", "has no attribute 'factor' at"),
        ({"advantage": "mine.py:short"}, "advantage", "it returned shape (4,) for a sample of 5 tokens"),
        ({"advantage": "mine.py:leaves"}, "advantage", "SystemExit: enough at"),
        ({"loss": "mine.py:to_reference"}, "loss", "TypeError"),
        ({"loss": "mine.py:of_entropy"}, "loss", "TypeError"),
        ({"advantage": "mine.py:of_values"}, "advantage", "has no attribute 'astype'"),
        ({"loss": "mine.py:says_reference"}, "", ""),
        ({"loss": "mine.py:says_entropy"}, "", ""),
        ({"advantage": "mine.py:says_values"}, "", ""),
        ({"loss": "mine.py:good"}, "", ""),
    ],
)
def test_validation_calls_them_on_a_small_batch(base: Path, keys: dict[str, Any], place: str, why: str) -> None:
    """With the columns that they say they need, as in the run."""
    found = called(base, keys)
    assert (found and found.place) == (("algorithm", place) if place else None)
    assert found is None or (why in found.message and "failed in a dry run" in found.message)


def test_the_dry_run_has_groups_of_the_runs_size(base: Path) -> None:
    sixteen = {"name": "mine.py:of_sixteen", "prompts": 3}
    assert called(base, {"advantage": sixteen, "group_size": 16, "prompts_per_step": 3}) is None
    found = called(base, {"advantage": sixteen, "group_size": 15, "prompts_per_step": 3})
    assert found is not None and "reshape" in found.message


def test_what_they_raise_on_the_cpu_refuses_no_run_on_gpus(base: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert check_own_parts(config_of(base, {"loss": "mine.py:on_gpu"}, {"gpus": 1})) == []
    assert "not checked, as the trainer has a GPU" in capfd.readouterr().err
    (told,) = check_own_parts(config_of(base, {"loss": "mine.py:raises"}, {}))
    assert "failed in a dry run" in told.message and told.path == ("algorithm", "loss")
    (told,) = check_own_parts(config_of(base, {"loss": "mine.py:detached"}, {"gpus": 1}))
    assert "no gradient" in told.message


def test_a_part_that_does_not_return_is_told(base: Path) -> None:
    found = called(base, {"loss": "mine.py:goes_on"}, seconds=0.5)
    assert found is not None and found.place == ("algorithm", "loss")
    assert "does not return within 0.5 s at" in found.message and "mine.py:" in found.message


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("deaf", "within 3 s, and catches what interrupts it"),
        ("stops", "ended with 3 and no answer"),
        ("asks", "BdbQuit"),
    ],
)
def test_a_part_that_takes_its_process_along_is_told(base: Path, name: str, why: str) -> None:
    """Nobody answers a debugger, and what catches its interruption is ended."""
    (told,) = check_own_parts(config_of(base, {"loss": f"mine.py:{name}"}), calls_s=3.0)
    assert why in told.message
