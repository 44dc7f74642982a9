"""Adapters in place of weights on one node: bytes that move, and what making the version of them costs a processor.

    python tools/bench/adapters.py [--rank 16] [--workers 1] [--rounds 5] [--json]

The model has the shapes of SmolLM2-135M, in bfloat16, with adapters on every linear layer of its decoder. Beside the
adapters: the same version taken in full from shared memory by the same process. Medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from relax_rt.transport.base.versions import ROOT, VersionRecord
from relax_rt.transport.weights.manifest import Layout, layout_of
from relax_rt.transport.weights.payloads import Adapter, Lora, decode_lora, encode_lora, merge_lora
from relax_rt.transport.weights.source import StageSource, add_adapters
from relax_rt.transport.weights.stage import WeightStage, verify

LAYERS, HIDDEN, INNER, KEYS, WORDS = 30, 576, 1536, 192, 49_152
LINEAR = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KEYS, HIDDEN),
    "self_attn.v_proj": (KEYS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
NORMS = ("input_layernorm", "post_attention_layernorm")


def layout() -> Layout:
    """SmolLM2-135M in bfloat16."""
    shapes: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (WORDS, HIDDEN))]
    for layer in range(LAYERS):
        shapes += [(f"model.layers.{layer}.{name}.weight", shape) for name, shape in LINEAR.items()]
        shapes += [(f"model.layers.{layer}.{name}.weight", (HIDDEN,)) for name in NORMS]
    shapes.append(("model.norm.weight", (HIDDEN,)))
    return layout_of([(name, "bfloat16", shape, 2 * torch.Size(shape).numel()) for name, shape in shapes])


def lora(rank: int, base_digest: str) -> Lora:
    """Adapters of every linear layer."""
    adapters = {
        f"model.layers.{layer}.{name}": Adapter(torch.randn(rank, shape[1]) * 0.02, torch.randn(shape[0], rank) * 0.02)
        for layer in range(LAYERS)
        for name, shape in LINEAR.items()
    }
    return Lora(rank, 2.0 * rank, ROOT, base_digest, adapters)


def median_ms(rounds: int, work: Callable[[], object]) -> float:
    """Of so many rounds, behind one that is not counted."""
    taken = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        work()
        taken.append(1000 * (time.perf_counter() - began))
    return round(statistics.median(taken[1:]), 1)


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    flat = layout()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        stage = WeightStage(folder, 1)

        def fill(view: memoryview) -> None:
            torch.frombuffer(view, dtype=torch.bfloat16).copy_(torch.randn(len(view) // 2) * 0.05)

        base = stage.seal_base(flat, fill)
        blob = encode_lora(lora(chosen.rank, base.digest))
        with stage.writing(flat, ROOT) as (file, view):
            add_adapters(memoryview(blob), folder, base, view)
            manifest = stage.seal(1, flat, file, view, b"", blob, base.digest)
        record, into = VersionRecord(1, 0, 1, manifest.digest), memoryview(bytearray(flat.nbytes))
        decoded = decode_lora(memoryview(blob))

        def make() -> None:
            add_adapters(memoryview(blob), folder, base, into)
            verify(manifest, into)

        found = {
            "rank": chosen.rank,
            "workers": chosen.workers,
            "full_mb": round(flat.nbytes / 1e6, 1),
            "adapters_mb": round(len(blob) / 1e6, 1),
            "times_less": round(flat.nbytes / len(blob), 1),
            "full_ms": median_ms(chosen.rounds, lambda: StageSource(folder, record).copy_into(into)),
            "adapters_ms": median_ms(chosen.rounds, make),
            "merge_ms": median_ms(chosen.rounds, lambda: merge_lora(decoded, flat, into, workers=chosen.workers)),
        }
        stage.close()
    print(json.dumps(found) if chosen.json else "\n".join(f"{key:12} {value}" for key, value in found.items()))


if __name__ == "__main__":
    main()
