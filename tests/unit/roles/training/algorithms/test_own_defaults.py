"""Whose default an option has: what was written, else what the preset sets, else the part's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast, get_args

import pytest

from relax_rt.config.loader import load_config, read_resolved, write_resolved
from relax_rt.config.problems import ConfigErrors
from relax_rt.roles.config.algorithm_checks import check_algorithm
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.training.algorithms.objective import COMMON_OPTIONS, Objective, ObjectiveParts
from relax_rt.roles.training.algorithms.registry import Kind, parts
from relax_rt.roles.training.algorithms.settings import PRESETS, AlgorithmTable

OF_OBJECTIVE = ("advantage", "loss", "aggregation", "correction", "kl", "entropy")
BARE = [(kind, name) for kind in OF_OBJECTIVE for name in parts(cast(Kind, kind))]
LENGTH = 64


def bound_parts(table: AlgorithmTable) -> ObjectiveParts:
    return Objective.of(table, longest=LENGTH).parts


def options(table: AlgorithmTable) -> tuple[float | None, float | None, bool | None]:
    """Bounds of the loss and whether the advantage divides, as they are bound; None where a part has no such option."""
    found = bound_parts(table)
    low, high = (getattr(found.loss.options, key, None) for key in ("clip_low", "clip_high"))
    return low, high, getattr(found.advantage.options, "normalise_std", None)


def test_the_kinds_are_all_that_an_objective_has() -> None:
    assert set(OF_OBJECTIVE) == set(get_args(Kind)) - {"filter", "sampler"}


@pytest.mark.parametrize(("kind", "name"), BARE, ids=str)
def test_a_part_named_alone_has_its_own_defaults(kind: Kind, name: str) -> None:
    key, given = ("corrections", [name]) if kind == "correction" else (kind, name)
    found = bound_parts(AlgorithmTable.model_validate({key: given}))
    (one,) = (part for part in found.all() if part.part.kind == kind)
    # The longest completion is told to whoever asks for a length; the rest is the part's own.
    length = {"length": LENGTH} if "length" in one.part.options.model_fields else {}
    assert one.options == one.part.options(**length)


# Written from the table in docs/guides/algorithms.md.
DOCUMENTED = {
    "ppo_clip": {"clip_low": 0.2, "clip_high": 0.28, "ratio_to": "behaviour"},
    "dual_clip": {"clip_low": 0.2, "clip_high": 0.28, "ratio_to": "behaviour", "dual_clip": 3.0},
    "decoupled_ppo": {"clip_low": 0.2, "clip_high": 0.28, "weight_cap": 5.0},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "ratio_to": "behaviour"},
    "cispo": {"clip_low": 1.0, "clip_high": 4.0, "ratio_to": "behaviour"},
}


def test_losses_with_bounds_have_those_that_are_documented() -> None:
    found = {name: part.options().model_dump() for name, part in parts("loss").items()}
    assert {name: table for name, table in found.items() if "clip_low" in table} == DOCUMENTED
    divides = {n: p.options().model_dump().get("normalise_std") for n, p in parts("advantage").items()}
    assert {n: told for n, told in divides.items() if told is not None} == {
        "grpo": True, "turn_grpo": True, "process_grpo": True, "gigpo": False,
    }  # fmt: skip


OF_PRESETS: dict[str, tuple[float | None, float | None, bool | None]] = {
    "grpo": (0.2, 0.28, True),
    "dr_grpo": (0.2, 0.2, False),
    "dapo": (0.2, 0.28, True),
    "gspo": (3e-4, 4e-4, True),
    "cispo": (1.0, 4.0, True),
    "sapo": (None, None, True),
    "rloo": (None, None, None),
    "reinforce_pp": (0.2, 0.2, None),
    "reinforce_pp_baseline": (0.2, 0.2, None),
    "ppo": (0.2, 0.2, None),
    "decoupled_ppo": (0.2, 0.2, True),
    "m2po": (None, None, True),
    "turn_grpo": (0.2, 0.28, True),
    "process_grpo": (0.2, 0.28, True),
    "gigpo": (0.2, 0.28, False),
    "distillation": (None, None, None),
    "dpo": (None, None, None),
    "sft": (None, None, None),
}


def test_presets_stand_for_these_options() -> None:
    assert {name: options(AlgorithmTable(name=name)) for name in PRESETS} == OF_PRESETS


def test_a_preset_sets_both_bounds_or_none() -> None:
    for name, keys in PRESETS.items():
        assert ("clip_low" in keys) == ("clip_high" in keys), name
    assert options(AlgorithmTable(name="ppo", loss="gspo"))[:2] == (0.2, 0.2)


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({"loss": "gspo", "clip_low": 0.2}, (0.2, 4e-4, True)),
        ({"loss": "cispo", "clip_high": 2.0}, (1.0, 2.0, True)),
        ({"advantage": "gigpo", "normalise_std": True}, (0.2, 0.28, True)),
        ({"advantage": "grpo", "normalise_std": False}, (0.2, 0.28, False)),
        ({"name": "gspo", "clip_high": 0.28}, (3e-4, 0.28, True)),
        ({"name": "gspo", "loss": {"name": "gspo", "clip_low": 0.1}, "clip_high": 0.3}, (0.1, 0.3, True)),
        ({"name": "dr_grpo", "normalise_std": True}, (0.2, 0.2, True)),
    ],
    ids=str,
)
def test_what_is_written_counts(keys: dict[str, Any], wanted: tuple[float, float, bool]) -> None:
    assert options(AlgorithmTable.model_validate(keys)) == wanted


def test_a_user_s_part_has_its_own_defaults_and_what_is_written(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)

    def found(**keys: Any) -> float:
        table = AlgorithmTable(loss="mine.py:loss", **keys)
        return float(Objective.of(table, base=tmp_path).parts.loss.options.clip_low)

    assert (found(), found(clip_low=0.1)) == (0.7, 0.1)


OWN = """
from relax_rt.config.schema import Table
from relax_rt.roles.training.algorithms.registry import part


class Options(Table):
    clip_low: float = 0.7


@part("loss", options=Options)
def loss(tokens, options):
    return -tokens.logprobs, {}
"""

CONFIG = """
[run]
name = "x"
[model]
path = "package:tiny"
[data]
task = "chain_sum"
[reward]
function = "reward.py:score"
[algorithm]
"""


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., RLConfig]:
    """The config of an [algorithm] table, with overrides, as `relax-rt up` reads it."""

    def write(lines: str, *overrides: str) -> RLConfig:
        path = tmp_path / "roles.toml"
        path.write_text(CONFIG + lines)
        config = load_config(path, overrides)
        assert isinstance(config, RLConfig)
        return config

    return write


@pytest.mark.parametrize(
    ("lines", "overrides", "wanted"),
    [
        ('loss = "gspo"', (), (3e-4, 4e-4, True)),
        ('loss = "cispo"', (), (1.0, 4.0, True)),
        ('loss = "gspo"', ("algorithm.clip_low=0.1",), (0.1, 4e-4, True)),
        ('loss = "gspo"\nclip_high = 0.3', (), (3e-4, 0.3, True)),
        ('name = "cispo"', ("algorithm.clip_high=3.0", "algorithm.normalise_std=false"), (1.0, 3.0, False)),
        ('advantage = "gigpo"', (), (0.2, 0.28, False)),
        ('advantage = "gigpo"', ("algorithm.normalise_std=true",), (0.2, 0.28, True)),
    ],
    ids=str,
)
def test_every_process_of_a_run_has_the_same(
    written: Callable[..., RLConfig],
    tmp_path: Path,
    lines: str,
    overrides: tuple[str, ...],
    wanted: tuple[float, float, bool],
) -> None:
    config = written(lines, *overrides)
    assert options(config.algorithm) == wanted
    # As roles and a resume read it, and as rank 0 sends it to the others.
    write_resolved(config, tmp_path / "config.json")
    stored = read_resolved(tmp_path / "config.json")
    assert isinstance(stored, RLConfig)
    assert options(stored.algorithm) == wanted
    assert options(AlgorithmTable(**stored.algorithm.model_dump())) == wanted


def test_a_key_counts_as_written_where_it_could_not_act(written: Callable[..., RLConfig]) -> None:
    with pytest.raises(ConfigErrors) as caught:
        written("", "algorithm.clip_low=0.2")
    (problem,) = caught.value.problems
    assert problem.path == ("algorithm", "clip_low") and "no effect" in problem.message
    # The same loss by a preset that sets bounds: nothing was written, nothing is refused.
    assert list(check_algorithm(written('name = "decoupled_ppo"'))) == []


def test_an_infinite_bound_is_refused_and_an_unset_one_is_none(written: Callable[..., RLConfig]) -> None:
    with pytest.raises(ConfigErrors, match="clip_high must be finite"):
        written('loss = "cispo"\nclip_high = inf')
    assert all(getattr(written('loss = "cispo"').algorithm, key) is None for key in COMMON_OPTIONS)
