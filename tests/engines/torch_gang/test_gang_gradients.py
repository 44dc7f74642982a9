"""The gradients of every loss and aggregation, over ranks that share the model, cut and streamed in unequal parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from gang_harness import Gang
from gang_objectives import TABLES, judged


def test_gradients_do_not_depend_on_ranks_nor_on_the_cut(
    torch_gang: Callable[[int], Gang], shared_model: Callable[[str], Path]
) -> None:
    one, two = torch_gang(1), torch_gang(2)
    one.call("build", model=shared_model("dense"), algorithm={})
    two.call("build", model=shared_model("dense"), algorithm={}, budget=40)
    for label, table in TABLES.items():
        batch = judged(table)
        for gang in (one, two):
            gang.call("use", algorithm=table)
        (wanted,) = one.call("grads", batches=[batch])
        assert max(float(np.abs(value).max()) for value in wanted.values()) > 1e-3, label
        # One part has a single group, which one rank computes alone; one has nothing.
        found = two.call("grads", batches=[batch[2:4], [], batch[:2] + batch[6:], batch[4:6]])
        for name, value in wanted.items():
            # Each rank has rows of a tensor, the last perhaps none.
            rows = np.concatenate([part[name] for part in found if name in part])
            scale = max(1.0, float(np.abs(value).max()))
            np.testing.assert_allclose(rows, value, rtol=1e-4, atol=3e-6 * scale, err_msg=f"{label}: {name}")
