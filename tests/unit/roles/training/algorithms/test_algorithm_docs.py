"""docs/guides/algorithms.md names every part and every option that there is, and its examples hold."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import get_args

import pytest
import torch
from algorithm_samples import sample, tokens

from relax_rt.roles.training.algorithms.objective import Objective
from relax_rt.roles.training.algorithms.registry import NEEDS, Kind, parts
from relax_rt.roles.training.algorithms.settings import PRESETS, AlgorithmTable

TEXT = (Path(__file__).parents[5] / "docs/guides/algorithms.md").read_text()
ROWS = [line for line in TEXT.splitlines() if line.startswith("| ")]


@pytest.mark.parametrize("kind", get_args(Kind))
def test_every_part_has_a_row_with_its_options(kind: Kind) -> None:
    for name, part in parts(kind).items():
        rows = [row for row in ROWS if row.startswith(f"| `{name}` |")]
        assert rows, f"{kind} {name} has no row"
        for option in part.options.model_fields:
            shared = option in ("clip_low", "clip_high", "ratio_to", "place", "coefficient", "dual_clip")
            assert shared or any(f"`{option}`" in row for row in rows), f"{kind} {name}: {option}"


def test_every_preset_and_need_is_named() -> None:
    for name in (*PRESETS, *NEEDS):
        assert f"`{name}`" in TEXT, name


def test_the_examples_are_valid(tmp_path: Path) -> None:
    configs = [tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)]
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "mine.py").write_text(code)
    objectives = [Objective.of(AlgorithmTable(**c["algorithm"]), base=tmp_path) for c in configs]
    assert [o.parts.loss.part.name for o in objectives] == ["dual_clip", "decoupled_ppo", "my_loss"]
    one = sample(0, [0, 1], 0.5)
    objectives[2].advantages([one])
    assert one.advantages is not None and one.advantages.tolist() == [0.0, 1.0]
    given = tokens([2])
    torch.testing.assert_close(objectives[2].loss(given)[0], -(given.advantages * given.logprobs).sum())
