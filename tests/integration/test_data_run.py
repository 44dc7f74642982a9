"""A run over two weighted sources, one of them parquet of other columns and one compressed; and its resume."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tiny_run import CONFIG as TINY
from tiny_run import Make

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

REWARD = """
import json, pathlib

SEEN = pathlib.Path(__file__).with_name("seen.jsonl")


def right(completion, answer, finish_reason, source, metadata):
    with SEEN.open("a") as file:
        file.write(json.dumps([source, type(answer).__name__, answer, sorted(metadata)]) + "\\n")
    return float(finish_reason == "stop" and completion.strip() == str(int(answer)))
"""


def sums(first: int, count: int) -> list[tuple[str, int]]:
    return [(f"{a} + {b} =", a + b) for a in range(first, first + 20) for b in range(10, 10 + count // 20)]


def write_sources(folder: Path) -> None:
    table = pyarrow.table(
        {
            "problem": [asked for asked, _ in sums(10, 300)],
            "reward_model": [{"ground_truth": float(answer), "style": "rule"} for _, answer in sums(10, 300)],
        }
    )
    parquet.write_table(table, folder / "a.parquet", row_group_size=50)
    (folder / "b").mkdir()
    for shard in range(2):
        rows = sums(40 + 20 * shard, 100)
        lines = [json.dumps({"prompt": asked, "answer": answer, "tag": shard}) for asked, answer in rows]
        (folder / "b" / f"{shard}.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))


CONFIG = """
[[data.sources]]
path = "a.parquet"
name = "a"
weight = 3
columns = { prompt = "problem", answer = "reward_model.ground_truth" }

[[data.sources]]
path = "b"
name = "b"
weight = 1
"""


def job() -> dict[str, str]:
    """The tiny job with these sources in place of its task."""
    head, _, rest = TINY.read_text().partition("[data]")
    return {"roles.toml": f"{head}[data]\n{rest[rest.index('held_out') :]}{CONFIG}", "reward.py": REWARD}


SMALL: dict[str, Any] = {
    "algorithm.steps": 1,
    "algorithm.group_size": 2,
    "evaluation.items": 4,
    "evaluation.during_items": 4,
    **{f"roles.{role}.dtype": '"float32"' for role in ("rollout", "trainer", "evaluator")},
}


def test_two_weighted_sources_are_trained_on_and_a_resume_holds_to_them(make: Make) -> None:
    run = make(job(), **SMALL)
    folder = run.config.parent
    write_sources(folder)
    assert run.start().wait() == 0, run.text()
    text = run.output.read_text()
    assert "form of the rows: prompt 200, verl 300" in text
    assert "column 'tag' (200 rows" in text
    seen = [json.loads(line) for line in (folder / "seen.jsonl").read_text().splitlines()]
    kinds = Counter((source, kind) for source, kind, _, _ in seen)
    assert {("a", "float"), ("b", "int")} <= set(kinds)
    assert kinds["a", "float"] > kinds["b", "int"], "three to one"
    assert {tuple(keys) for source, _, _, keys in seen if source == "a"} == {("reward_model", "source")}
    assert {tuple(keys) for source, _, _, keys in seen if source == "b"} == {("source", "tag")}
    assert json.loads((run.run_dir / "data.json").read_text())["rows"] == 500
    # More steps on the same rows, written again; then on others.
    (folder / "a.parquet").write_bytes((folder / "a.parquet").read_bytes())
    run.overrides["algorithm.steps"] = 2
    assert run.start().wait() == 0, run.text()
    assert run.last_step() == 2
    (folder / "b" / "1.jsonl.gz").unlink()
    run.overrides["algorithm.steps"] = 3
    assert run.start().wait() == 2, "refused before a role is started"
    assert "not those that the run was started with: 500 then, 400 now" in run.output.read_text()
