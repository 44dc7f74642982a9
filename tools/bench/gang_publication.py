"""How long the ranks of a Megatron gang stand still for a publication: a gang of two, tensor-parallel, over gloo.

    python tools/bench/gang_publication.py [--rounds 12] [--layers 30] [--json]

The model has the widths of SmolLM2-135M with 8 heads in place of 9, which two ranks can share; float32, published in
bfloat16. Each round takes one step with nothing beside it and one that begins when a publication is ordered. Both are
timed on rank 0, from the order until the optimizer is done. A rank stands still while it takes "no other order", and
while its optimizer waits. Medians, milliseconds.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORLD, GROUPS, PROMPT, NEW = 2, 2, 16, 16


def save_model(folder: Path, layers: int) -> None:
    """Random weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def batch() -> list[Any]:
    """Samples of one step."""
    import numpy as np

    from relax_rt.roles.base.sample import Sample, bare_meta

    random, length = np.random.default_rng(0), PROMPT + NEW
    mask = np.zeros(length, np.uint8)
    mask[PROMPT:] = 1
    return [
        Sample(
            meta=bare_meta(group, 0),
            tokens=random.integers(0, 49_152, length).astype(np.int32),
            loss_mask=mask,
            behaviour_logprobs=np.full(length, -10.8, np.float32) * mask,
            versions=[],
            reward=1.0,
            advantages=mask.astype(np.float32) * (1.0 if group % 2 else -1.0),
        )
        for group in range(GROUPS)
    ]


class Timed:
    """Milliseconds by what they went into."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {}

    def of(self, what: str, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        try:
            return call()
        finally:
            self.found.setdefault(what, []).append(1000 * (time.perf_counter() - began))


def lead(backend: Any, rounds: int, timed: Timed) -> None:
    """Rank 0's side: a warm round, then those that count."""
    from relax_rt.roles.training.backend.gang import Leader

    leader, samples = Leader(backend), batch()
    into = memoryview(bytearray(leader.layout("bfloat16").nbytes))
    early = "copied" in inspect.signature(leader.export).parameters

    def step(number: int, copied: threading.Event) -> None:
        time.sleep(0.005)  # until the publication has its turn

        def turn() -> None:
            with leader._turn:
                pass

        timed.of("rank 0: no other order", turn)
        count = leader.accumulate(samples).count
        leader.apply(count, number, lambda: timed.of("rank 0: the optimizer waits", copied.wait))

    free = threading.Event()
    free.set()
    for number in range(rounds + 1):
        if number == 1:
            timed.found.clear()
        timed.of("step alone", lambda number=number: step(2 * number + 1, free))  # type: ignore[misc]
        copied = threading.Event()

        def publish(copied: threading.Event = copied) -> None:
            leader.export(into, "bfloat16", *([copied.set] if early else []))
            copied.set()

        def both(number: int = number, copied: threading.Event = copied, publish: Any = publish) -> threading.Thread:
            thread = threading.Thread(target=lambda: timed.of("publication, until it is whole", publish))
            thread.start()
            step(2 * number + 2, copied)
            return thread

        timed.of("step with a publication", both).join()
    for what in ("rank 0: no other order", "rank 0: the optimizer waits"):
        timed.found[what] = timed.found[what][1::2]
    leader.close()


def follow(backend: Any, timed: Timed) -> None:
    """Another rank's side: how long an order to publish keeps it from the next one, and its optimizer from its step."""
    from relax_rt.roles.training.backend.gang import Follower

    began, order = 0.0, ""

    def doing(name: str) -> None:
        nonlocal began, order
        if order == "export":
            timed.found.setdefault("rank 1: no other order", []).append(1000 * (time.perf_counter() - began))
        began, order = time.perf_counter(), name

    follower: Any = Follower(backend, doing)
    if hasattr(follower, "_weights_may_change"):
        wait = follower._weights_may_change
        follower._weights_may_change = lambda: timed.of("rank 1: the optimizer waits", wait)
    follower.run()
    waits = timed.found.get("rank 1: the optimizer waits", [])
    timed.found["rank 1: the optimizer waits"] = waits[3::2]
    timed.found["rank 1: no other order"] = timed.found["rank 1: no other order"][1:]


def rank_main(rank: int, folder: Path, rounds: int) -> None:
    """One rank, in a process of its own."""
    import torch.distributed as dist

    from relax_rt.roles.training.algorithms.settings import AlgorithmTable
    from relax_rt.roles.training.backend.settings import TrainerSettings
    from relax_rt.roles.training.megatron.backend import MegatronBackend
    from relax_rt.roles.training.megatron.model import sizes_of
    from relax_rt.roles.training.megatron.ranks import MegatronRanks

    table = TrainerSettings(backend="megatron", dtype="float32", count=WORLD, tensor_parallel=WORLD, threads=1)
    store = dist.FileStore(str(folder / "store"), WORLD)  # type: ignore[attr-defined]
    ranks = MegatronRanks(sizes_of(table), store, rank)
    backend = MegatronBackend(folder / "model", AlgorithmTable(learning_rate=1e-5), table, ranks, temperature=1.0)
    timed = Timed()
    if rank == 0:
        lead(backend, rounds, timed)
    else:
        follow(backend, timed)
    (folder / f"{rank}.json").write_text(json.dumps(timed.found))


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.rank is not None:
        rank_main(chosen.rank, chosen.folder, chosen.rounds)
        return
    with tempfile.TemporaryDirectory(prefix="gang-bench-") as name:
        folder, load = Path(name), os.getloadavg()[0]
        save_model(folder / "model", chosen.layers)
        again = [sys.executable, __file__, "--rounds", str(chosen.rounds), "--folder", name]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [subprocess.Popen([*again, "--rank", str(rank)], env=env) for rank in range(WORLD)]
        assert [rank.wait(1800) for rank in ranks] == [0] * WORLD
        found = {k: v for rank in range(WORLD) for k, v in json.loads((folder / f"{rank}.json").read_text()).items()}
    medians = {what: round(statistics.median(values), 1) for what, values in found.items() if values}
    loads = [round(load, 1), round(os.getloadavg()[0], 1)]
    if chosen.json:
        sys.stdout.write(json.dumps({"rounds": chosen.rounds, "load": loads, "median_ms": medians}) + "\n")
        return
    sys.stdout.write(f"{chosen.rounds} publications; load before and after {loads[0]}, {loads[1]}; medians in ms\n")
    for what, value in medians.items():
        spread = f"{min(found[what]):.1f} to {max(found[what]):.1f}"
        sys.stdout.write(f"{what:34} {value:8.1f}   ({spread})\n")


if __name__ == "__main__":
    main()
