"""An embedded engine that generates all the while and gets one version after the other; see weights.py."""

from __future__ import annotations

import asyncio
import itertools
import pathlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging

from relax_rt.roles.engines.base import Chunk, GroupRequest
from relax_rt.roles.engines.embedded import EmbeddedEngine
from relax_rt.roles.engines.weights import model_layout
from relax_rt.transport.versions import VersionRecord
from relax_rt.transport.weights.manifest import Layout
from relax_rt.transport.weights.source import StageSource
from relax_rt.transport.weights.stage import WeightStage

SEQUENCES, POSITIONS = 4, 8192
CALM_S = 3.0
"""Of undisturbed generation between two updates: what is usual is measured in it."""
FIRST_TOKENS_S = 120.0


@dataclass
class Updates:
    """What was seen, seconds and tokens a second."""

    parameters: int = 0
    transfer_s: list[float] = field(default_factory=list)
    pause_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)
    usual_gap_s: float = 0.0
    during: float = 0.0
    without: float = 0.0


def random_model(folder: pathlib.Path) -> pathlib.Path:
    """A model of SmolLM2-135M's shape with random weights."""
    shape = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
    )
    logging.disable_progress_bar()
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


async def updates(model: pathlib.Path, stage_folder: pathlib.Path, swaps: int) -> Updates:
    """Generate, update `swaps` times, and tell what that cost."""
    weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    layout = model_layout(weights, torch.bfloat16)
    found = Updates(parameters=sum(p.numel() for p in weights.parameters()))
    stage = WeightStage(stage_folder, 1)
    engine = EmbeddedEngine(model, dtype="bfloat16", max_sequences=SEQUENCES, threads=2)
    arrivals: list[float] = []
    first = asyncio.Event()

    def arrive(chunks: Sequence[Chunk]) -> None:
        if any(chunk.member == 0 and chunk.tokens for chunk in chunks):
            arrivals.append(time.perf_counter())
            first.set()

    failures: list[BaseException] = []
    await engine.start(arrive, failures.append)
    try:
        engine.submit([_endless()])
        await asyncio.wait_for(first.wait(), FIRST_TOKENS_S)
        during: list[tuple[float, int]] = []
        calm: list[tuple[float, int]] = []
        for version in range(1, swaps + 2):
            record = await asyncio.to_thread(_stage, stage, layout, weights, version)
            calm.append(await _tokens(engine, asyncio.sleep(CALM_S)))
            began = time.perf_counter()
            moved = await _tokens(engine, engine.prepare(StageSource(stage_folder, record)))
            committed = time.perf_counter()
            swap = await engine.commit(record, "keep")
            await asyncio.sleep(0.5)
            if version == 1:
                continue  # its memory was not there before
            during.append(moved)
            found.transfer_s.append(committed - began)
            found.pause_s.append(swap.pause_s)
            usual = statistics.median(_gaps(arrivals, committed - CALM_S, began))
            # The gap in which the swap fell, and the one behind it: new weights are not in any cache.
            found.gap_s.append(max(0.0, max(_gaps(arrivals, committed - usual, committed + 2 * usual)) - usual))
            found.usual_gap_s = usual
        found.during = sum(n for _, n in during) / sum(s for s, _ in during)
        found.without = sum(n for _, n in calm) / sum(s for s, _ in calm)
        if failures:
            raise failures[0]
    finally:
        await engine.close(10.0)
        stage.close()
    return found


def _endless() -> GroupRequest:
    return GroupRequest(
        id=1,
        prompt=(1, 2, 3, 4),
        seeds=tuple(range(SEQUENCES)),
        temperature=1.0,
        max_new_tokens=POSITIONS - 8,
        stop_ids=frozenset(),
        chunk_tokens=1,
    )


def _stage(stage: WeightStage, layout: Layout, model: torch.nn.Module, version: int) -> VersionRecord:
    with stage.writing(layout, version - 1) as (file, view):
        flat = torch.frombuffer(view, dtype=torch.uint8)
        for entry, parameter in zip(layout.entries, model.parameters(), strict=True):
            raw = flat[entry.offset : entry.offset + entry.nbytes]
            raw.view(torch.bfloat16).view(entry.shape).copy_(parameter.detach())
        record = VersionRecord(version, version - 1, version, stage.seal(version, layout, file, view).digest)
        del flat, raw
    stage.retire(version)
    return record


async def _tokens(engine: EmbeddedEngine, work: object) -> tuple[float, int]:
    """Seconds that it took, and tokens sampled meanwhile."""
    before, began = engine.load().tokens_generated, time.perf_counter()
    await work  # type: ignore[misc]
    return time.perf_counter() - began, engine.load().tokens_generated - before


def _gaps(arrivals: Sequence[float], begin: float, end: float) -> list[float]:
    """Times between tokens that overlap a span of time."""
    pairs = itertools.pairwise(arrivals)
    return [after - before for before, after in pairs if after > begin and before < end] or [0.0]
