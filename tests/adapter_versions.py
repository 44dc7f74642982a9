"""Versions made of adapters on a stage, for tests of what carries them."""

from __future__ import annotations

from pathlib import Path

import torch

from relax_rt.transport.base.versions import ROOT, VersionRecord
from relax_rt.transport.weights.manifest import layout_of
from relax_rt.transport.weights.payloads import Adapter, Lora, encode_lora
from relax_rt.transport.weights.source import add_adapters, base_of
from relax_rt.transport.weights.stage import WeightStage, adapters_view, read_manifest, verify

MODULE, RANK = "layers.0.up_proj", 3
ROWS, COLUMNS = 640, 512
LAYOUT = layout_of(
    [(f"{MODULE}.weight", "float32", (ROWS, COLUMNS), ROWS * COLUMNS * 4), ("norm.weight", "float32", (50,), 200)]
)


def lora(version: int, base_digest: str, rank: int = RANK, rows: int = ROWS) -> Lora:
    """Adapters as they are at a version."""
    generator = torch.Generator().manual_seed(version)
    a, b = torch.randn(rank, COLUMNS, generator=generator), torch.randn(rows, rank, generator=generator)
    return Lora(rank, 2.0 * rank, ROOT, base_digest, {MODULE: Adapter(a, b)})


def fill_base(view: memoryview, seed: int = 0) -> None:
    """The model's own weights."""
    values = torch.randn(LAYOUT.nbytes // 4, generator=torch.Generator().manual_seed(seed))
    torch.frombuffer(view, dtype=torch.float32).copy_(values)


def publish(folder: Path, version: int, *, epoch: int = 1, seed: int = 0) -> VersionRecord:
    """Stage a version as a trainer does, and what its adapters are added to with the first."""
    stage = WeightStage(folder, epoch)
    try:
        base = stage.seal_base(LAYOUT, lambda view: fill_base(view, seed))
        blob = encode_lora(lora(version, base.digest))
        with stage.writing(LAYOUT, version - 1) as (file, view):
            add_adapters(memoryview(blob), folder, base, view)
            manifest = stage.seal(version, LAYOUT, file, view, b"", blob, base.digest)
        stage.retire(version)
    finally:
        stage.close()
    return VersionRecord(version, version - 1, version, manifest.digest)


def made(folder: Path, record: VersionRecord) -> bytes:
    """A version on the stage as receivers elsewhere make it of what lies there, verified."""
    manifest = read_manifest(folder, record.version)
    into = bytearray(b"\x55" * LAYOUT.nbytes)
    with adapters_view(folder, manifest) as blob:
        add_adapters(blob, folder, base_of(folder, manifest), memoryview(into))
    verify(manifest, memoryview(into))
    return bytes(into)


def whole(version: int, seed: int = 0) -> bytes:
    """A version's bytes, worked out by matrix product: close to what is published, and not the same bits."""
    data = bytearray(LAYOUT.nbytes)
    fill_base(memoryview(data), seed)
    flat = torch.frombuffer(data, dtype=torch.float32)
    one = lora(version, "")
    (a, b) = one.adapters[MODULE]
    flat[: ROWS * COLUMNS].view(ROWS, COLUMNS).add_(b @ a, alpha=one.scale)
    return bytes(data)
