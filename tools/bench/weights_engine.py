"""An embedded engine that generates all the while and gets one version after the other; see weights.py."""

from __future__ import annotations

import asyncio
import pathlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging
from weights_pause import Compared, compare, mean_gap

from relax_rt.roles.models.precision import cpu_dtype
from relax_rt.roles.rollout.engines.base import Chunk, GroupRequest
from relax_rt.roles.rollout.engines.embedded import EmbeddedEngine
from relax_rt.roles.rollout.engines.weights import model_layout
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.weights.manifest import Layout
from relax_rt.transport.weights.source import StageSource
from relax_rt.transport.weights.stage import WeightStage

SEQUENCES, POSITIONS = 4, 8192
CALM_S, SETTLE_S = 2.5, 0.5
"""Of undisturbed generation between two updates: what is usual is measured in it. Before it, tokens go by."""
APART_S = 1.0
"""Between a transfer and its swap, so that what each costs is told apart."""
GAPS = 2.5
"""Behind the end of a transfer, or the order to swap, that are looked at: in the first is the swap, and in the next the
first pass with new weights, which are in no cache."""
FIRST_TOKENS_S = 120.0


@dataclass
class Updates:
    """What was seen, in seconds.

    Attributes:
        transfer_s, pause_s: of each update, until the version was verified, and by the engine's own word at the swap.
        transfer, swap: windows with these in them, and with nothing.
    """

    parameters: int = 0
    transfer_s: list[float] = field(default_factory=list)
    pause_s: list[float] = field(default_factory=list)
    swap: Compared = field(default_factory=Compared)
    transfer: Compared = field(default_factory=Compared)


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
    dtype = cpu_dtype().dtype
    weights = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    layout = model_layout(weights, getattr(torch, dtype))
    found = Updates(parameters=sum(p.numel() for p in weights.parameters()))
    stage = WeightStage(stage_folder, 1)
    engine = EmbeddedEngine(model, dtype=dtype, max_sequences=SEQUENCES, threads=2)
    arrivals: list[float] = []
    first = asyncio.Event()

    def arrive(chunks: Sequence[Chunk]) -> None:
        if any(chunk.member == 0 and chunk.tokens for chunk in chunks):
            arrivals.append(time.perf_counter())
            first.set()

    failures: list[BaseException] = []
    await engine.start(arrive, failures.append)
    times: list[tuple[float, float, float]] = []
    calm: list[tuple[float, float]] = []
    try:
        engine.submit([_endless()])
        async with asyncio.timeout(FIRST_TOKENS_S):
            await first.wait()
        for version in range(1, swaps + 2):
            record = await asyncio.to_thread(_stage, stage, layout, weights, version)
            calm.append(await _undisturbed())
            began = time.perf_counter()
            await engine.prepare(StageSource(stage_folder, record))
            fetched = time.perf_counter()
            await asyncio.sleep(APART_S)
            ordered = time.perf_counter()
            swap = await engine.commit(record, "keep")
            times.append((began, fetched, ordered))
            found.transfer_s.append(fetched - began)
            found.pause_s.append(swap.pause_s)
            await asyncio.sleep(SETTLE_S)
        calm.append(await _undisturbed())
        if failures:
            raise failures[0]
    finally:
        await engine.close(10.0)
        stage.close()
    # At the first one the engine's memory was not there before.
    del times[0], calm[0], found.transfer_s[0], found.pause_s[0]
    behind_s = GAPS * mean_gap(arrivals, calm)
    found.swap = compare(arrivals, [(ordered, ordered + behind_s) for *_, ordered in times], calm)
    found.transfer = compare(arrivals, [(began, fetched + behind_s) for began, fetched, _ in times], calm)
    return found


async def _undisturbed() -> tuple[float, float]:
    began = time.perf_counter()
    await asyncio.sleep(CALM_S)
    return began, time.perf_counter()


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
            raw.view(parameter.dtype).view(entry.shape).copy_(parameter.detach())
        record = VersionRecord(version, version - 1, version, stage.seal(version, layout, file, view).digest)
        del flat, raw
    stage.retire(version)
    return record
