"""Settings that were written and would have no effect: refused with what would give them one. Defaults pass."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_config import problems

from relax_rt.config.loader import load_config
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.job.preflight import warnings

TOML = """
[run]
name = "r"
dir = "{dir}/run"
[model]
path = "model"
[data]
task = "chain_sum"
[reward]
function = "relax_rt.roles.rewards.builtin:integer"
"""
FLOAT32 = ('roles.rollout.dtype="float32"', 'roles.evaluator.dtype="float32"')
BFLOAT16 = ('roles.rollout.dtype="bfloat16"', 'roles.evaluator.dtype="bfloat16"')
ZERO_VARIANCE = 'algorithm.filters=["zero_variance"]'


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "roles.toml"
    path.write_text(TOML.format(dir=tmp_path))
    return path


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        (["publication.directory_timeout_s=300"], "set directory"),
        (['publication.wire_dtype="bfloat16"', *BFLOAT16], '"float8"'),
        (['publication.wire_dtype="float32"', *FLOAT32], '"bfloat16" or "float8"'),
        (['publication.wire_dtype="float32"', *BFLOAT16], '"float8"'),
        (['publication.wire_dtype="float8"', 'publication.carrier="shared_memory"'], 'carrier = "auto"'),
        (
            ['publication.wire_dtype="float8"', 'publication.carrier="directory"', 'publication.directory="w"'],
            'carrier = "auto"',
        ),
        (['algorithm.on_surplus="recycle"'], "set over_provision"),
        (["algorithm.over_provision=2", "algorithm.max_staleness=inf"], "set a max_staleness"),
        (['algorithm.on_straggler="mask"', "algorithm.max_staleness=inf"], "set a max_staleness"),
        (['algorithm.on_straggler="requeue"', "algorithm.max_staleness=inf"], "set a max_staleness"),
        (["algorithm.straggler_wait_s=120", "algorithm.max_staleness=inf"], "set a max_staleness"),
        (["algorithm.straggler_wait_s=120", 'algorithm.on_straggler="mask"'], 'on_straggler = "wait"'),
        (["algorithm.straggler_wait_s=120", 'algorithm.on_straggler="requeue"'], 'on_straggler = "wait"'),
        (["algorithm.min_group=2"], 'on_failed_member = "shrink"'),
        (["algorithm.soft_penalty=0.5"], 'truncated = "soft_penalty"'),
        (["algorithm.soft_penalty=0.5", 'algorithm.truncated="mask"'], 'truncated = "soft_penalty"'),
    ],
)
def test_what_was_written_in_vain_is_refused(toml: Path, overrides: list[str], remedy: str) -> None:
    ((key, problem),) = problems(toml, *overrides).items()
    assert key == overrides[0].partition("=")[0]
    assert "leave it out, or " in problem.hint and remedy in problem.hint


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["publication.directory_timeout_s=300", 'publication.directory="w"'],
        ['publication.wire_dtype="bfloat16"', *FLOAT32],
        # Where the dtype is chosen, it may be another one on the next machine.
        ['publication.wire_dtype="bfloat16"'],
        ['publication.wire_dtype="float32"'],
        ['publication.wire_dtype="float8"'],
        ['publication.wire_dtype="float8"', 'publication.carrier="collective"'],
        ["algorithm.max_staleness=inf"],
        ["algorithm.max_staleness=inf", 'algorithm.on_straggler="wait"', "algorithm.over_provision=0"],
        ['algorithm.on_surplus="recycle"', "algorithm.over_provision=2"],
        ['algorithm.on_surplus="recycle"', ZERO_VARIANCE],
        ['algorithm.on_surplus="drop"', 'algorithm.truncated="none"'],
        ['algorithm.on_straggler="mask"'],
        ["algorithm.straggler_wait_s=9"],
        ["algorithm.min_group=3", 'algorithm.on_failed_member="shrink"'],
        ["algorithm.soft_penalty=0.1", 'algorithm.truncated="soft_penalty"'],
    ],
)
def test_what_has_an_effect_passes(toml: Path, overrides: list[str]) -> None:
    assert problems(toml, *overrides) == {}


def test_rounding_without_sending_is_reported_but_may_be_meant(toml: Path) -> None:
    def told(*overrides: str) -> bool:
        config = load_config(toml, overrides)
        assert isinstance(config, RLConfig)
        return any("on one node: versions are rounded" in line for line in warnings(config))

    wire = 'publication.wire_dtype="float8"'
    assert told(wire)
    assert not told() and not told(wire, 'publication.carrier="collective"')


@pytest.mark.parametrize(
    "key",
    [
        "publication.directory",
        "run.dir",
        "model.path",
        "data.path",
        "cold_start.path",
        "roles.rollout.sglang.python",
        "roles.rollout.python",
        "roles.reference.model",
    ],
)
def test_an_empty_path_is_refused(toml: Path, key: str) -> None:
    found = problems(toml, f"{key}=''")[key]
    assert found.message == f"{key}: must not be empty"


def test_the_capacity_names_every_term_of_its_sum(toml: Path) -> None:
    (found,) = problems(toml, "algorithm.over_provision=65536", "algorithm.prompts_per_step=8").values()
    assert "every_steps + max_staleness + over_provision / prompts_per_step + 1 = 8214 batches" in found.message
    assert "a smaller algorithm.over_provision" in found.hint
    (found,) = problems(toml, "checkpoint.every_steps=5000").values()
    assert "every_steps + max_staleness + 1 = 5002 batches" in found.message
    assert "a smaller checkpoint.every_steps" in found.hint


def test_bounds_of_sampling_say_what_the_key_is_for(toml: Path) -> None:
    found = problems(toml, "sampling.temperature=0", "sampling.max_new_tokens=0")
    assert len(found) == 2 and all(problem.hint for problem in found.values())


def test_what_is_not_near_is_not_meant(toml: Path) -> None:
    found = problems(toml, "sampling.stop=['x']", "sampling.max_tokens=9")
    assert "did you mean" not in found["sampling.stop"].hint and "known: " in found["sampling.stop"].hint
    assert found["sampling.max_tokens"].hint == "did you mean 'max_new_tokens'?"
