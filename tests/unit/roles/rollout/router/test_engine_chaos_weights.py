"""The engine soak checks the weights in use: half-loaded ones are detected for every transport."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).resolve().parents[5] / "tools" / "soak"))

import engine_chaos_check as judge  # noqa: E402
import engine_chaos_rollout as rollout  # noqa: E402
import engine_chaos_sabotage as sabotage  # noqa: E402

from relax_rt.roles.rollout.engines.embedded import EmbeddedEngine  # noqa: E402
from relax_rt.roles.rollout.engines.weights import FlatWeights, model_layout  # noqa: E402
from relax_rt.transport.base.versions import VersionRecord  # noqa: E402
from relax_rt.transport.rpc.errors import Corrupt  # noqa: E402
from relax_rt.transport.weights.source import StageSource  # noqa: E402
from relax_rt.transport.weights.stage import WeightStage  # noqa: E402


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    shape: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 32, "max_position_embeddings": 64}
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape, **heads)).save_pretrained(folder)
    return folder


async def publish(model_dir: Path, folder: Path, sabotaged: str, *, struck: bool = False) -> list[str]:
    """Bring an engine to five versions; what the check of its own record says."""
    engine = EmbeddedEngine(model_dir, dtype="float32", max_sequences=2, threads=1)
    record = rollout.Record(folder / "rollout-0-1.jsonl")
    orders = rollout.Orders(folder, "rollout/0", record)
    watched: Any = rollout.StruckEngine(engine, orders, record, sabotaged)
    await watched.start(lambda chunks: None, lambda error: None)
    layout = model_layout(engine._decoder._model, torch.float32)
    stage, records = WeightStage(folder / "stage", 1), []
    for version in range(1, 6):
        with stage.writing(layout, version - 1) as (file, view):
            for entry in layout.entries:
                view[entry.offset : entry.offset + entry.nbytes] = bytes([version]) * entry.nbytes
            digest = stage.seal(version, layout, file, view).digest
        records.append(VersionRecord(version, version - 1, version, digest))
        if struck and version == 4:
            (folder / "rollout-0.order").write_text("in_fetch hang")
            with pytest.raises(Corrupt):
                await watched.prepare(StageSource(folder / "stage", records[-1]))
            continue
        await watched.prepare(StageSource(folder / "stage", records[-1]))
        await watched.commit(records[-1], "keep")
    await watched.close(5.0)
    record.close()
    lines = [json.loads(raw) for raw in (folder / "rollout-0-1.jsonl").read_text().splitlines()]
    looked, wrong = judge.weights([judge.Incarnation("rollout/0", 1, lines)], records)
    assert looked == 9 - struck, "after each swap, and after each fetch but the first"
    return wrong


async def test_whole_weights_are_whole(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "HANG_S", 0.01)
    assert await publish(model_dir, tmp_path, "", struck=True) == []


@pytest.mark.parametrize("what", [what for what, checks in sorted(sabotage.EXPECTED.items()) if "weights" in checks])
async def test_half_loaded_weights_are_found(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(FlatWeights, "_point", FlatWeights._point)  # undone at the end
    sabotage.apply(what)
    assert await publish(model_dir, tmp_path, what)
