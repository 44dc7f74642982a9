"""A gang behind the interface of one backend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gang_harness import check_digests
from megatron_parts import Gang, samples


@pytest.mark.parametrize("division", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}, {}], ids=["tp2", "pp2", "dp2"])
def test_rank_0_speaks_for_all(
    division: dict[str, Any], gang: Callable[[int], Gang], model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, batch = model("qwen3"), samples(8)
    saved, damaged = tmp_path / "saved", tmp_path / "damaged"
    saved.mkdir()
    damaged.mkdir()
    algorithm = {"learning_rate": 1e-2}
    one = gang(1)
    one.call("build", model=folder, division={}, algorithm=algorithm)
    before = one.call("export")[0][1]
    logprobs = one.logprobs(batch)
    wanted = one.call("step", batches=[batch], count=40.0)[0]

    two = gang(2)
    two.call("build", model=folder, division={"tokens_per_micro_batch": 32, **division}, algorithm=algorithm)
    found, followed = two.call("orders", batch=batch, count=40.0, folder=saved, damaged=damaged)
    for ours, theirs in zip(found["logprobs"], logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert found["exported"] == before, "the update waited for the copy of the weights before it"
    assert found["result"].grad_norm == pytest.approx(wanted.grad_norm, rel=1e-4)
    assert found["result"].loss == pytest.approx(wanted.loss, abs=1e-5)
    assert "no state of an optimizer" in found["refused"]
    assert found["restored"] == two.call("export")[0][1] != before
    steps = ["log_probabilities", "accumulate", "accumulate", "apply", "snapshot", "write", "restore", "restore"]
    assert sorted(followed["orders"]) == sorted([*steps, "export", "export"])
    check_digests(saved, 2)
