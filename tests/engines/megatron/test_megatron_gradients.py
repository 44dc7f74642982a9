"""The gradients of every loss and aggregation, over replicas, cut and streamed in unequal parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from gang_objectives import TABLES, judged
from megatron_parts import Gang


def test_gradients_do_not_depend_on_replicas_nor_on_the_cut(
    gang: Callable[[int], Gang], model: Callable[[str], Path]
) -> None:
    one, two = gang(1), gang(2)
    one.call("build", model=model("qwen3"), division={}, algorithm={})
    two.call("build", model=model("qwen3"), division={"tokens_per_micro_batch": 40}, algorithm={})
    for label, table in TABLES.items():
        batch = judged(table)
        for ranks in (one, two):
            ranks.call("use", algorithm=table)
        (wanted,) = one.call("grads", batches=[batch])
        assert max(float(np.abs(value).max()) for value in wanted.values()) > 1e-3, label
        found = two.call("grads", batches=[batch[2:4], [], batch[:2] + batch[6:], batch[4:6]])
        for name, value in wanted.items():
            # Replicas add theirs up when the step is applied.
            both = found[0][name] + found[1][name]
            scale = max(1.0, float(np.abs(value).max()))
            np.testing.assert_allclose(both, value, rtol=1e-4, atol=3e-6 * scale, err_msg=f"{label}: {name}")
