"""What each `algorithm.name` stands for: defaults of the other keys of [algorithm], each of which can be overridden.

`grpo` is the table's own defaults: group advantages by mean and standard deviation, decoupled clipping (samples may be
older than the weights that are trained), every token of the step counting alike. Bounds of a ratio to the proximal
policy, which most of these have, act where a step has several updates. A preset that sets one bound sets both: with
another loss written beside it, one would be the preset's and one that loss's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Name = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "sapo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "ppo",
    "decoupled_ppo",
    "m2po",
    "turn_grpo",
    "process_grpo",
    "gigpo",
    "distillation",
    "dpo",
    "sft",
]

PRESETS: Mapping[Name, Mapping[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"normalise_std": False, "aggregation": "fixed_length", "clip_low": 0.2, "clip_high": 0.2},
    "dapo": {"loss": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28, "aggregation": "token_mean"},
    # Bounds so narrow are for what the trainer's own updates do: an engine's rounding alone is beyond them. The paper's
    # experiments take four mini-batches from a batch (arXiv 2507.18071, section 5.1; from memory).
    "gspo": {
        "loss": {"name": "gspo", "ratio_to": "proximal"},
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "aggregation": "sequence_mean",
        "corrections": ["tis"],
        "updates_per_step": 4,
    },
    "cispo": {"loss": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    "sapo": {"loss": "sapo", "aggregation": "sequence_mean"},
    "rloo": {
        "advantage": "rloo",
        "loss": "policy_gradient",
        "aggregation": "fixed_length",
        "corrections": ["tis"],
    },
    "reinforce_pp": {"advantage": "reinforce_pp", "clip_low": 0.2, "clip_high": 0.2},
    "reinforce_pp_baseline": {"advantage": "reinforce_pp_baseline", "clip_low": 0.2, "clip_high": 0.2},
    "ppo": {"advantage": "gae", "clip_low": 0.2, "clip_high": 0.2},
    "decoupled_ppo": {"loss": "decoupled_ppo", "clip_low": 0.2, "clip_high": 0.2},
    "m2po": {"loss": "m2po"},
    "turn_grpo": {"advantage": "turn_grpo"},
    "process_grpo": {"advantage": "process_grpo"},
    "gigpo": {"advantage": "gigpo", "normalise_std": False},
    "distillation": {"advantage": "distillation", "loss": "policy_gradient", "corrections": ["tis"]},
    "dpo": {"advantage": "preference", "loss": "dpo", "aggregation": "pair_mean"},
    "sft": {"advantage": "none", "loss": "sft"},
}
