"""A run that records routing rows, of a mixture of experts whose rollouts are killed: no sample lacks a row."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_partial_rollout import JOB, LONG, REWARD, Held, kill_until
from tiny_run import TinyRun

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from relax_rt.roles.engines.routing import sparse_layers  # noqa: E402
from relax_rt.roles.models.tiny import CONTEXT, character_tokenizer  # noqa: E402

pytestmark = [pytest.mark.integration, pytest.mark.long]


def build(folder: Path) -> None:
    """A random Qwen3-MoE with the tiny model's tokenizer."""
    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        mlp_only_layers=[1],
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[TinyRun]:
    build(tmp_path / "model")
    shutil.copytree(JOB, tmp_path / "job")
    (tmp_path / "job" / "reward.py").write_text(REWARD)
    settings = {
        **LONG,
        "model.path": json.dumps(str(tmp_path / "model")),
        "algorithm.steps": 12,
        "roles.rollout.routing": "true",
        "roles.rollout.kv_on_update": '"recompute"',
    }
    made = TinyRun(tmp_path / "run", tmp_path / "job" / "roles.toml", **settings)
    yield made
    if made.process.poll() is None:
        made.process.kill()
        made.process.wait()


class RowsHeld(Held):
    """Besides, the rows of every mark."""

    def __init__(self, folder: Path, copy: Path, row_bytes: int) -> None:
        self.row_bytes, self.count = row_bytes, 0
        super().__init__(folder, copy)

    def _add(self, mark: object) -> None:
        super()._add(mark)  # type: ignore[arg-type]
        count = len(mark.tokens) // 4  # type: ignore[attr-defined]
        assert len(mark.rows) == count * self.row_bytes  # type: ignore[attr-defined]
        self.count += count


def test_no_sample_lacks_a_row_though_rollouts_are_killed(run: TinyRun, tmp_path: Path) -> None:
    run.start()
    kill_until(run, signal.SIGKILL, "group_gone_on_with")
    assert run.wait() == 0, run.text()
    shape, sparse = sparse_layers(tmp_path / "model")
    assert (shape.row_bytes, sparse) == (12, (True, False, True))
    assert RowsHeld(run.run_dir / "queue", tmp_path / "journal", shape.row_bytes).count > 0
    # A sample that lacked one would have ended its rollout with the reason.
    assert sum(len(record["samples"]) for record in run.records("made")) >= 12 * 16
    assert any(record.get("gone_on_with") for record in run.records("made"))
    assert not [event for event in run.events("slot_exited") if "routing rows" in json.dumps(event)]
