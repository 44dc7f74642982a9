"""The conformance suite against a real SGLang server on the CPU, one server for all of it; and versions of adapters."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from conformance import *  # noqa: F403
from harness import Driver, MemorySource, Traits, model_of, torch
from sglang_parts import make_engine, needs_server

from relax_rt.transport.base.versions import ROOT, VersionRecord
from relax_rt.transport.weights.manifest import Layout
from relax_rt.transport.weights.payloads import Adapter, Lora, encode_lora
from relax_rt.transport.weights.source import add_adapters
from relax_rt.transport.weights.stage import WeightStage
from relax_rt.transport.weights.stream import StageMirror, stage_server

pytestmark = [pytest.mark.engines, needs_server, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def driver(conformance_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Driver]:
    engine = make_engine(conformance_model, tmp_path_factory.mktemp("sglang"))
    driver = Driver(engine, conformance_model, Traits())
    try:
        yield await driver.start()
    finally:
        await engine.close(10.0)


def adapters_of(layout: Layout, version: int, base_digest: str) -> Lora:
    """Adapters of rank 4 on every matrix within the layers."""
    generator = torch.Generator().manual_seed(version)
    adapters = {}
    for entry in layout.entries:
        if entry.name.endswith("_proj.weight"):
            rows, columns = entry.shape
            a, b = (torch.randn(shape, generator=generator) * 0.1 for shape in ((4, columns), (rows, 4)))
            adapters[entry.name.removesuffix(".weight")] = Adapter(a, b)
    return Lora(4, 8.0, ROOT, base_digest, adapters)


def stage_adapted(folder: Path, driver: Driver, version: int) -> VersionRecord:
    """A version on a stage as a trainer of adapters puts it there: the model's own weights, and adapters beside it."""
    own = driver.source(lambda model, _: MemorySource(model, 0))
    layout = own.manifest.layout
    stage = WeightStage(folder, 1)
    try:
        base = stage.seal_base(layout, own.copy_into)
        blob = encode_lora(adapters_of(layout, version, base.digest))
        with stage.writing(layout, version - 1) as (file, view):
            add_adapters(memoryview(blob), folder, base, view)
            manifest = stage.seal(version, layout, file, view, b"", blob, base.digest)
    finally:
        stage.close()
    return VersionRecord(version, version - 1, version, manifest.digest)


def adapted_model(driver: Driver, version: int) -> Any:
    """The same by plain matrix products."""
    model = copy.deepcopy(model_of(driver.folder, 0))
    layout = driver.source(lambda folder, _: MemorySource(folder, 0)).manifest.layout
    lora = adapters_of(layout, version, "")
    with torch.no_grad():
        for module, (a, b) in lora.adapters.items():
            model.get_submodule(module).weight.add_(b @ a, alpha=lora.scale)
    return model


async def test_a_version_published_as_adapters_is_loaded_and_verified(driver: Driver, tmp_path: Path) -> None:
    """As on another node: the first version comes with what adapters are added to, the next as adapters alone."""
    home, first = tmp_path / "home", driver.version + 100
    server = stage_server(home, None)
    try:
        address = server.start("tcp://127.0.0.1:0")
        mirror = StageMirror(tmp_path / "away", lambda: address, None, connections=1)
        for version in (first, first + 1):
            record, before = await asyncio.to_thread(stage_adapted, home, driver, version), mirror.bytes_in
            source = await asyncio.to_thread(mirror.source, record, 60.0)
            assert (mirror.payload, mirror.why_full) == ("adapters", "")
            assert (mirror.bytes_in - before < source.manifest.layout.nbytes / 2) is (version > first)
            await driver.engine.prepare(source)
            await driver.engine.commit(record, "recompute")
            await sampled_from(adapted_model(driver, version), driver, version)
    finally:
        server.stop()


async def sampled_from(model: Any, driver: Driver, version: int) -> None:
    """The engine's log-probabilities are those of this model."""
    asked = driver.request([7, 8, 9], 4, new=40)
    for completion in await driver.complete(asked):
        assert {span.version for span in completion.versions} == {version}
        with torch.no_grad():
            logits = model(torch.tensor([[*asked.prompt, *completion.tokens]])).logits[0, 2:-1]
        wanted = torch.log_softmax(logits, -1).gather(-1, torch.tensor(completion.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), wanted, atol=1e-4, rtol=0)
