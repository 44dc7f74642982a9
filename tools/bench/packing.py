"""Sequences of uneven length in micro-batches: padded beside each other, or one behind the other without padding.

    python tools/bench/packing.py [--model FOLDER] [--threads 2] [--dtype auto] [--budget 4096] [--only sft]

Forward and backward of one step's batch by the torch backend, without the optimizer. Unless a model is given it has the
shapes of SmolLM2-135M, and random weights. Lengths are log-normal, drawn once. Of each batch: tokens of its sequences,
prompts that are shared counted once; tokens computed, padding included; medians of the time by the clock and of the
processor (which says more where the machine is not free, and then with one thread), and the former by them. `auto`
marks what runs do: the one that `plan_micro_batches` estimates to be cheaper.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
import transformers

from relax_rt.roles.base.sample import Sample, bare_meta
from relax_rt.roles.models.precision import cpu_dtype
from relax_rt.roles.training.algorithms.objective import Objective
from relax_rt.roles.training.algorithms.settings import AlgorithmTable
from relax_rt.roles.training.batch.rows import Costs, SampleRow, plan_micro_batches, shared_rows
from relax_rt.roles.training.torch.backend import TorchBackend

WORDS = 49_152
SIGMA = 0.8
SHORTEST, LONGEST = 8, 1024
BATCHES = {
    # groups, members of each, median tokens of a prompt, of what follows
    "sft, median 180": (24, 1, 60, 120),
    "sft, median 40": (64, 1, 20, 20),
    "dpo pairs": (12, 2, 60, 120),
    "grpo 8 x 8, short": (8, 8, 40, 16),
    "grpo 4 x 8, long": (4, 8, 60, 120),
}


def batch(groups: int, members: int, prompt: int, tail: int) -> list[Sample]:
    """Samples of these groups."""
    random = np.random.default_rng(0)

    def length(median: int) -> int:
        return int(np.clip(random.lognormal(np.log(median), SIGMA), SHORTEST, LONGEST))

    found = []
    for group in range(groups):
        begin = random.integers(0, WORDS, length(prompt)).astype(np.int32)
        for member in range(members):
            tokens = np.concatenate([begin, random.integers(0, WORDS, length(tail)).astype(np.int32)])
            mask = (np.arange(len(tokens)) >= len(begin)).astype(np.uint8)
            found.append(
                Sample(
                    meta=msgspec.structs.replace(bare_meta(group, member), item="i"),
                    tokens=tokens,
                    loss_mask=mask,
                    behaviour_logprobs=np.zeros(len(tokens), np.float32),
                    versions=[],
                    advantages=mask.astype(np.float32),
                    reward=1.0 - member % 2,
                    reference_logprobs=np.zeros(len(tokens), np.float32),
                )
            )
    return found


def random_model(folder: Path) -> Path:
    """SmolLM2-135M's shapes."""
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class Found(NamedTuple):
    """A way of laying out: tokens computed; s by the clock and of the processor, medians."""

    way: str
    computed: int
    seconds: float
    processor: float


class Packed(Costs):
    """Padding costs more, whatever the rows are."""

    def padded(self, rows: Sequence[SampleRow]) -> float:
        """See `Costs.padded`."""
        return math.inf


def measure(trainer: TorchBackend, samples: list[Sample], ways: dict[str, Costs | None], rounds: int) -> list[Found]:
    """Each way of laying the batch out, in turns; one round is not counted."""
    taken: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    computed = {}
    for _ in range(rounds + 1):
        for way, costs in ways.items():
            trainer.costs = costs
            began = time.perf_counter(), time.process_time()
            trainer.accumulate(samples)
            taken[way].append((time.perf_counter() - began[0], time.process_time() - began[1]))
            computed[way] = int(trainer._sums["computed"])
            trainer._accumulation.forget()
    medians = {way: [statistics.median(column) for column in zip(*taken[way][1:], strict=True)] for way in ways}
    return [Found(way, computed[way], *medians[way]) for way in ways]


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--budget", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="batches whose names have this")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        model = chosen.model or random_model(Path(folder))
        for name, shape in ((name, shape) for name, shape in BATCHES.items() if chosen.only in name):
            table = AlgorithmTable(name=name.split()[0].rstrip(","))
            trainer = TorchBackend(
                model,
                table,
                dtype=cpu_dtype().dtype if chosen.dtype == "auto" else chosen.dtype,
                threads=chosen.threads,
                tokens_per_micro_batch=chosen.budget,
                temperature=1.0,
                on_progress=lambda _: None,
            )
            costs, samples = trainer.costs, batch(*shape)
            assert costs is not None
            Objective.of(table).advantages(samples)
            rows = shared_rows(samples, chosen.budget)
            auto = plan_micro_batches(rows, chosen.budget, costs, whole_groups="pairs" in trainer.objective.needs)
            own, best = sum(row.length for row in rows), "padded" if auto[0].costs is None else "packed"
            for found in measure(
                trainer, samples, {"padded": None, "packed": Packed(costs.pair, costs.call)}, chosen.rounds
            ):
                print(
                    f"{name:18} {found.way:7} {own:6} tokens, {found.computed:6} computed, {found.seconds:7.2f} s, "
                    f"{own / found.seconds:6.0f} tokens/s; processor {found.processor:7.2f} s, "
                    f"{own / found.processor:6.0f} tokens/s{'  (auto)' if found.way == best else ''}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
