"""Samples for the tests of packing and backends."""

from __future__ import annotations

import msgspec
import numpy as np

from relax_rt.roles.base.sample import Sample, bare_meta


def make_sample(group: int, member: int, prompt: list[int], tail: list[int], mask: list[int] | None = None) -> Sample:
    """A sample with every column, drawn by its group and member."""
    rng = np.random.default_rng(group * 100 + member)
    length = len(prompt) + len(tail)
    loss_mask = np.array([0] * len(prompt) + (mask or [1] * len(tail)), np.uint8)
    meta = msgspec.structs.replace(bare_meta(group, member), item="i")
    return Sample(
        meta=meta,
        tokens=np.array(prompt + tail, np.int32),
        loss_mask=loss_mask,
        behaviour_logprobs=(rng.normal(-4, 0.3, length) * loss_mask).astype(np.float32),
        versions=[],
        advantages=(loss_mask * rng.normal()).astype(np.float32),
        reward=float(rng.normal()),
        proximal_logprobs=(rng.normal(-4, 0.3, length) * loss_mask).astype(np.float32),
        reference_logprobs=(rng.normal(-4, 0.3, length) * loss_mask).astype(np.float32),
    )


SAMPLES = [
    make_sample(0, 0, [1, 2, 3, 4], [5, 6]),
    make_sample(0, 1, [1, 2, 3, 4], [7]),
    make_sample(0, 2, [1, 2, 3, 4], [8, 9, 10, 11, 12]),
    make_sample(1, 0, [20], [21, 22, 23]),
    make_sample(1, 1, [20], [24, 25]),
    # A turn of the environment in the middle: its tokens are context, not trained.
    make_sample(2, 0, [30, 31], [32, 33, 34, 35, 36], [1, 1, 0, 0, 1]),
    make_sample(2, 1, [30, 31], [37, 38, 39], [1, 0, 1]),
]
