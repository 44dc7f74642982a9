"""Losses and aggregations, and batches that have their advantages, for tests of gradients over ranks."""

from __future__ import annotations

import copy
from typing import Any

from gang_harness import samples

from relax_rt.roles.algorithms.objective import Objective
from relax_rt.roles.sample import Sample
from relax_rt.roles.sections import AlgorithmTable

LOSSES: dict[str, dict[str, Any]] = {
    "ppo_clip": {"loss": "ppo_clip"},
    "proximal": {"loss": {"name": "ppo_clip", "ratio_to": "proximal"}},
    "dual_clip": {"loss": "dual_clip"},
    "decoupled_ppo": {"loss": "decoupled_ppo"},
    "policy_gradient": {"loss": "policy_gradient", "corrections": ["tis"]},
    "gspo": {"loss": "gspo", "clip_low": 0.2, "clip_high": 0.2},
    "cispo": {"loss": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    "sapo": {"loss": "sapo"},
    "m2po": {"loss": "m2po"},
    "k3 and entropy": {
        "loss": "ppo_clip",
        "kl": {"name": "k3", "coefficient": 0.3},
        "entropy": {"name": "bonus", "coefficient": 0.2},
    },
    "k2": {"loss": "ppo_clip", "kl": {"name": "k2", "coefficient": 0.3}},
    "unbiased": {
        "loss": "policy_gradient",
        "kl": {"name": "unbiased", "coefficient": 0.3, "ratio_to": "proximal"},
    },
    "rejection": {
        "loss": "decoupled_ppo",
        "corrections": [{"name": "rejection", "level": "geometric", "low": 0.7, "high": 1.4}],
    },
    "mis": {"loss": "policy_gradient", "corrections": ["mis"]},
    "icepop": {
        "loss": {"name": "ppo_clip", "ratio_to": "proximal"},
        "corrections": [{"name": "icepop", "low": 0.7, "high": 1.4}],
    },
    "stale_sequences": {"loss": "policy_gradient", "corrections": ["stale_sequences"]},
}
AGGREGATIONS: list[Any] = ["token_mean", "sequence_mean", {"name": "fixed_length", "length": 6}]
TABLES: dict[str, dict[str, Any]] = {
    **{
        f"{name}, {each if isinstance(each, str) else each['name']}": {**table, "aggregation": each}
        for name, table in LOSSES.items()
        for each in AGGREGATIONS
    },
    "dpo": {"name": "dpo"},
    "sft": {"name": "sft"},
}


def judged(table: dict[str, Any], count: int = 8) -> list[Sample]:
    """A batch of groups of two, with its advantages."""
    batch = copy.deepcopy(samples(count))
    Objective.of(AlgorithmTable(**table)).advantages(batch)
    return batch
