"""Losses, aggregations and advantages, and batches for them, for tests of gradients over ranks."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import numpy as np
from gang_harness import VOCABULARY, near, samples

from relax_rt.roles.base.sample import Sample, TurnSpan, bare_meta
from relax_rt.roles.training.algorithms.objective import Objective
from relax_rt.roles.training.algorithms.settings import AlgorithmTable
from relax_rt.transport.queue.ledger.messages import VersionSpan

LOSSES: dict[str, dict[str, Any]] = {
    "ppo_clip": {"loss": "ppo_clip"},
    "proximal": {"loss": {"name": "ppo_clip", "ratio_to": "proximal"}},
    "dual_clip": {"loss": {"name": "dual_clip", "dual_clip": 1.5}},
    "decoupled_ppo": {"loss": "decoupled_ppo"},
    "policy_gradient": {"loss": "policy_gradient", "corrections": ["tis"]},
    "gspo": {"loss": "gspo", "clip_low": 0.2, "clip_high": 0.2},
    "cispo": {"loss": "cispo", "clip_low": 0.5, "clip_high": 0.5},
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
        "corrections": [{"name": "rejection", "level": "geometric", "low": 0.95, "high": 1.05}],
    },
    "mis": {"loss": "policy_gradient", "corrections": ["mis"]},
    "icepop": {
        "loss": {"name": "ppo_clip", "ratio_to": "proximal"},
        "corrections": [{"name": "icepop", "low": 0.7, "high": 1.4}],
    },
    "stale_sequences": {"loss": "policy_gradient", "corrections": ["stale_sequences"]},
}
AGGREGATIONS: list[Any] = ["token_mean", "sequence_mean", {"name": "fixed_length", "length": 6}]


def crossed(tables: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each of them with each aggregation."""
    return {
        f"{name}, {each if isinstance(each, str) else each['name']}": {**table, "aggregation": each}
        for name, table in tables.items()
        for each in AGGREGATIONS
    }


TABLES: dict[str, dict[str, Any]] = {**crossed(LOSSES), "dpo": {"name": "dpo"}, "sft": {"name": "sft"}}

IN_REWARD = {"name": "k1", "coefficient": 0.3, "place": "reward"}
ADVANTAGES: dict[str, dict[str, Any]] = {
    "grpo by the batch": {"advantage": {"name": "grpo", "std_of": "batch"}},
    "rloo": {"name": "rloo"},
    "rloo, costs": {"name": "rloo", "kl": IN_REWARD},
    "reinforce_pp": {"name": "reinforce_pp", "kl": IN_REWARD},
    "reinforce_pp_baseline": {"name": "reinforce_pp_baseline", "kl": {"name": "k2", "coefficient": 0.3}},
    "gae": {"name": "ppo"},
    "gae, not whitened": {"name": "ppo", "advantage": {"name": "gae", "whiten": False, "gamma": 0.9}},
    "gae, costs": {"name": "ppo", "kl": IN_REWARD},
    "distillation": {"name": "distillation"},
    "distillation, held": {"name": "distillation", "advantage": {"name": "distillation", "limit": 0.2}},
    "turn_grpo": {"name": "turn_grpo"},
    "process_grpo": {"name": "process_grpo"},
    "gigpo": {"name": "gigpo"},
    "m2po": {"name": "m2po"},
    "masked": {"name": "reinforce_pp", "truncated": "mask"},
    "penalised": {"name": "rloo", "truncated": "soft_penalty"},
}
FAMILIES: dict[str, dict[str, Any]] = {
    **crossed(ADVANTAGES),
    "preference": {"name": "dpo"},
    "preference, smoothed": {"name": "dpo", "loss": {"name": "dpo", "label_smoothing": 0.1}},
    "none": {"name": "sft"},
}
"""Advantages that the leader of a gang computes of the whole batch, before ranks have their shares."""


def objective_of(table: dict[str, Any]) -> Objective:
    return Objective.of(AlgorithmTable(**table))


def judged(table: dict[str, Any], count: int = 8) -> list[Sample]:
    """A batch of groups of two, with its advantages."""
    batch = copy.deepcopy(samples(count))
    objective_of(table).advantages(batch)
    return batch


def cut(table: dict[str, Any], batch: list[Sample]) -> list[list[Sample]]:
    """Unequal parts of a batch of four groups of two: one is nothing, and the first leaves one of two ranks with
    nothing, for it is a single sample, or group."""
    pairs = "pairs" in objective_of(table).needs
    parts = [[2, 3], [], [0, 1, 6, 7], [4, 5]] if pairs else [[2], [], [0, 7, 3, 1, 6], [5, 4]]
    return [[batch[index] for index in part] for part in parts]


def episodes(*, branched: bool = False) -> list[Sample]:
    """Groups of three, two, four and one with a prompt in common, of one to three turns, with every column that an
    advantage asks for.

    Args:
        branched: from its second turn on each is another branch, and that turn was sampled first.
    """
    random = np.random.default_rng(3)
    made = []
    for group, size in enumerate((3, 2, 4, 1)):
        prompt = random.integers(0, VOCABULARY, int(random.integers(2, 6)))
        for member in range(size):
            mask, turns = np.zeros(len(prompt), np.uint8), list[TurnSpan]()
            for turn in range(int(random.integers(1, 4))):
                between, own = int(random.integers(1, 3)) if turn else 0, int(random.integers(1, 6))
                turns.append(TurnSpan(len(mask) + between, len(mask) + between + own, "assistant"))
                mask = np.concatenate([mask, np.zeros(between, np.uint8), np.ones(own, np.uint8)])
            rest = random.integers(0, VOCABULARY, len(mask) - len(prompt))
            branches = [(0, turns[0].end), (turns[0].end, len(mask))] if branched and len(turns) > 1 else []
            states = ["first", *("left" if random.random() < 0.7 else "right" for _ in turns[1:])]
            made.append(
                Sample(
                    meta=msgspec.structs.replace(
                        bare_meta(group, member),
                        turns=turns,
                        truncated=(group, member) in ((0, 1), (2, 2)),
                        info={"turn_states": states},
                        branches=branches,
                        turn_order=[1, 0, 2][: len(turns)] if branches else [],
                    ),
                    tokens=np.concatenate([prompt, rest]).astype(np.int32),
                    loss_mask=mask,
                    behaviour_logprobs=near(random, mask),
                    proximal_logprobs=near(random, mask),
                    proximal_version=1,
                    reference_logprobs=near(random, mask),
                    values=(0.5 * random.normal(size=len(mask))).astype(np.float32),
                    versions=[VersionSpan(len(prompt), len(mask), 1, 1)],
                    reward=float(random.normal()),
                    turn_rewards=random.normal(size=len(turns)).astype(np.float32),
                )
            )
    return made


def arrivals(table: dict[str, Any], batch: list[Sample]) -> list[list[Sample]]:
    """The groups of `episodes` as they arrive: one part is nothing, one a group of one; all of them at once where the
    advantages are of the whole batch."""
    if not objective_of(table).streams:
        return [batch]
    return [[s for s in batch if s.meta.group in groups] for groups in ((3,), (), (2, 0), (1,))]
