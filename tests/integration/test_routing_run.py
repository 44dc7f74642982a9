"""A run that records routing rows, of a mixture of experts whose rollouts are killed: no sample lacks a row, and rows
are those of a plain forward pass, also of tokens that another rollout had sampled."""

from __future__ import annotations

import json
import shutil
import signal
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from test_partial_rollout import JOB, LONG, REWARD, Held, kill_until
from tiny_experts import build_sparse_model
from tiny_run import TinyRun

from relax_rt.transport.queue.ledger.messages import PartialChunk

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from relax_rt.config.loader import load_config  # noqa: E402
from relax_rt.roles.config.sections import RLConfig  # noqa: E402
from relax_rt.roles.data.source import PromptSource  # noqa: E402
from relax_rt.roles.models.tokenizer import load_tokenizer  # noqa: E402
from relax_rt.roles.rollout.engines.routing import sparse_layers  # noqa: E402

pytestmark = [pytest.mark.integration, pytest.mark.long]


@pytest.fixture
def run(tmp_path: Path, runs: list[TinyRun]) -> TinyRun:
    build_sparse_model(tmp_path / "model")
    shutil.copytree(JOB, tmp_path / "job")
    (tmp_path / "job" / "reward.py").write_text(REWARD)
    settings = {
        **LONG,
        "model.path": json.dumps(str(tmp_path / "model")),
        "algorithm.steps": 12,
        "roles.rollout.routing": "true",
        "roles.rollout.kv_on_update": '"recompute"',
    }
    runs.append(TinyRun(tmp_path / "run", tmp_path / "job" / "roles.toml", **settings))
    return runs[-1]


class RowsHeld(Held):
    """Besides, the rows of every mark; by member, and of which group it is."""

    def __init__(self, folder: Path, copy: Path, row_bytes: int) -> None:
        self.row_bytes = row_bytes
        self.rows: dict[str, bytearray] = defaultdict(bytearray)
        self.groups: dict[str, int] = {}
        super().__init__(folder, copy)

    def _add(self, mark: PartialChunk) -> None:
        super()._add(mark)
        assert len(mark.rows) == len(mark.tokens) // 4 * self.row_bytes
        key = str(mark.key)
        self.rows[key][mark.start * self.row_bytes :] = mark.rows
        self.groups[key] = mark.key.group


def prompts_of(run: TinyRun, model: Path) -> PromptSource:
    """What the run's rollouts are asked."""
    sets = [f"{key}={value}" for key, value in run.overrides.items()]
    config = load_config(run.config, sets)
    assert isinstance(config, RLConfig)
    tokenizer = load_tokenizer(model)
    return PromptSource.load(config.data, tokenizer, seed=config.run.seed, config_dir=run.config.parent)


def routed(model: torch.nn.Module, ids: list[int]) -> NDArray[np.int16]:
    """The two experts of each token in the sparse layers, by the logits of one forward pass: [tokens, 2, 2]."""
    with torch.no_grad():
        logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
    rows = [of_layer.topk(2, dim=-1).indices.sort(dim=-1).values for of_layer in logits]
    return np.stack([row.to(torch.int16).numpy() for row in rows], axis=1)


def check_rows(run: TinyRun, model: Path, held: RowsHeld) -> None:
    """Marked rows are those of the pass that gave the token: of the position before it."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    source, made = prompts_of(run, model), run.records("produced")
    asked = {int(group): prompt for record in made for group, prompt in record["prompts"].items()}
    taken_over = {key for record in made for key in record.get("resumed", {})}
    known = [key for key, group in held.groups.items() if group in asked]
    chosen = sorted(known, key=lambda key: key not in taken_over)[:60]
    assert len(chosen) > 30 and taken_over & set(chosen)
    wrong, found = 0, list[NDArray[np.int16]]()
    for key in chosen:
        tokens = np.frombuffer(bytes(held.marks[key]), "<i4").tolist()
        prompt = list(source.prompt(asked[held.groups[key]]).tokens)
        rows = np.frombuffer(bytes(held.rows[key]), "<i2").reshape(-1, 3, 2)
        assert len(rows) == len(tokens) and (rows[:, 1] == -1).all()
        expected = routed(plain, [*prompt, *tokens])[len(prompt) - 1 : -1]
        wrong += int((rows[:, [0, 2]] != expected).any(axis=(1, 2)).sum())
        found.append(rows)
    count, kinds = sum(map(len, found)), len(np.unique(np.concatenate(found), axis=0))
    assert kinds > 20, "all tokens went to the same experts: nothing was tested"
    # Weights are as good as still; two experts may be as good as alike for a token, too.
    assert wrong <= count / 1000, f"{wrong} of {count} rows are others"


def test_no_sample_lacks_a_row_though_rollouts_are_killed(run: TinyRun, tmp_path: Path) -> None:
    run.start()
    kill_until(run, signal.SIGKILL, "group_resumed", lambda: bool(run.events("group_resumed")))
    assert run.wait() == 0, run.text()
    shape, sparse = sparse_layers(tmp_path / "model")
    assert (shape.row_bytes, sparse) == (12, (True, False, True))
    check_rows(run, tmp_path / "model", RowsHeld(run.run_dir / "queue", tmp_path / "journal", shape.row_bytes))
    # A sample that lacked one would have ended its rollout with the reason.
    assert sum(len(record["samples"]) for record in run.records("produced")) >= 12 * 16
    assert any(record.get("resumed") for record in run.records("produced"))
    assert not [event for event in run.events("slot_exited") if "routing rows" in json.dumps(event)]
