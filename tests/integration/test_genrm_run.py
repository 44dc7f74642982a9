"""A generative judge in a real run: the tiny model judges, is killed, and its verdicts are those of its own weights."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_run import TinyRun, steps_that_count

from relax_rt.roles.models.resolve import resolve_model

pytest.importorskip("torch")
pytestmark = [pytest.mark.integration, pytest.mark.long]

STEPS = 20
REWARD = """
import json

def judged(completion, answer, verdict):
    with open({seen!r}, "a") as out:
        out.write(json.dumps([completion, answer, verdict]) + "\\n")
    return {{"verdict": verdict, "right": float(completion == answer)}}
"""
JUDGE = {"prompt": "{completion} + {answer} =", "highest": 200.0, "otherwise": 0.0, "max_new_tokens": 4}


@pytest.fixture
def run(tmp_path: Path, runs: list[TinyRun]) -> TinyRun:
    shutil.copytree(Path(__file__).parent.parent / "tiny_job", tmp_path / "job")
    (tmp_path / "job/reward.py").write_text(REWARD.format(seen=str(tmp_path / "seen.jsonl")))
    overrides: dict[str, Any] = {
        "reward.function": '"reward.py:judged"',
        "algorithm.steps": STEPS,
        "evaluation.items": 8,
        "roles.genrm.dtype": '"float32"',
        **{f"reward.judge.{key}": json.dumps(value) for key, value in JUDGE.items()},
    }
    runs.append(TinyRun(tmp_path / "run", tmp_path / "job/roles.toml", **overrides))
    return runs[-1]


def test_verdicts_depend_on_the_completion_and_a_death_of_the_judge_costs_only_time(run: TinyRun) -> None:
    run.start()
    run.until("the end of the checks, which call the function too", lambda: run.events("run_started"))
    (run.run_dir.parent / "seen.jsonl").unlink()
    run.until("a few steps", lambda: run.last_step() >= 4)
    run.kill("genrm/0")
    run.until("it judges again", lambda: len(run.events("first_work")) and run.last_step() >= 8)
    assert run.wait() == 0, run.text()
    path = steps_that_count(run.records("step"))
    assert sorted(path) == list(range(1, STEPS + 1))
    keys = [key for record in path.values() for key in record["keys"]]
    assert len(set(keys)) == len(keys) == 64 * STEPS
    assert [e["slot"] for e in run.events("slot_exited") if e["diagnosis"]["signal"] == "SIGKILL"] == ["genrm/0"]
    assert not run.events("reward_failed"), "its death failed samples"
    assert all("verdict" in record["rewards"] for record in path.values())
    assert sum(record["tokens"] for record in run.records("genrm")) > 0

    seen = [tuple(json.loads(line)) for line in (run.run_dir.parent / "seen.jsonl").read_text().splitlines()]
    assert len(seen) >= 64 * STEPS
    by_answer: dict[str, set[float]] = {}
    by_pair: dict[tuple[str, str], set[float]] = {}
    for completion, answer, verdict in seen:
        by_answer.setdefault(answer, set()).add(verdict)
        by_pair.setdefault((completion, answer), set()).add(verdict)
    assert sum(len(verdicts) > 1 for verdicts in by_answer.values()) > 10, "verdicts do not depend on the completion"
    # The policy moves and the judge does not. Greedy words may turn where two tokens are as good as equally likely.
    assert sum(len(verdicts) == 1 for verdicts in by_pair.values()) >= 0.98 * len(by_pair)

    pairs = sorted(by_pair)[:32]
    ours = verdicts_of(pairs)
    assert sum(verdict in by_pair[pair] for pair, verdict in zip(pairs, ours, strict=True)) >= len(pairs) - 1, (
        "not what its own weights say"
    )


def verdicts_of(pairs: list[tuple[str, str]]) -> list[float]:
    """What the tiny model's own greedy words say, asked here one by one."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.set_num_threads(1)
    folder = resolve_model("package:tiny", Path())
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found = []
    for completion, answer in pairs:
        text = f"<|user|>{completion} + {answer} =<|end|><|assistant|>"
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        for _ in range(JUDGE["max_new_tokens"]):  # type: ignore[call-overload]
            with torch.no_grad():
                token = int(model(ids).logits[0, -1].argmax())
            if token == tokenizer.eos_token_id:
                break
            ids = torch.cat([ids, torch.tensor([[token]])], 1)
        words = tokenizer.decode(ids[0], skip_special_tokens=False).rpartition("<|assistant|>")[2]
        numbers = re.findall(r"-?\d+(?:\.\d+)?", words)
        found.append(min(1.0, max(0.0, float(numbers[-1]) / 200.0)) if numbers else 0.0)
    return found


def test_a_judge_is_shown_before_a_run(run: TinyRun) -> None:
    from relax_rt.config.loader import load_config
    from relax_rt.roles.job.try_out import sample

    overrides = [f"{key}={value}" for key, value in run.overrides.items()]
    config = load_config(run.config, overrides)
    (one, *rest) = sample(config, None, 4, held_out=False, prompts=())  # type: ignore[arg-type]
    assert "the judge said" in one.note and set(one.rewards) == {"verdict", "right"}
    assert len({tried.rewards["verdict"] for tried in (one, *rest)}) > 1
