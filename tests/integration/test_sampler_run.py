"""Prompt samplers in real runs: the prompts follow the history, and no death changes a choice."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tiny_run import TinyRun

from relax_rt.roles.data.items import PromptItem
from relax_rt.roles.data.settings import DataTable
from relax_rt.roles.data.source import PromptSource
from relax_rt.roles.models.resolve import resolve_model
from relax_rt.roles.models.tokenizer import load_tokenizer
from relax_rt.transport.base.journal import Journal
from relax_rt.transport.queue.ledger import events as ev
from relax_rt.transport.queue.ledger.events import JournalEntry
from relax_rt.transport.queue.ledger.machine import Ledger

pytest.importorskip("torch")
pytestmark = [pytest.mark.integration, pytest.mark.long]

GROUPS = 8
TINY = Path(__file__).resolve().parent.parent / "tiny_job" / "roles.toml"
REWARDS = '''
"""Rewards that depend on the prompt: sums that end in 0 or 1 succeed now and then, even ones always, others never."""


def easy(completion: str, answer: str) -> float:
    last = int(answer[-1])
    if last < 2:
        return float(sum(map(ord, completion)) % 5 == 0)
    return float(last % 2 == 0)
'''


@pytest.fixture
def make(tmp_path: Path, runs: list[TinyRun]) -> Any:
    (tmp_path / "rewards.py").write_text(REWARDS)
    config = tmp_path / "roles.toml"
    config.write_text(TINY.read_text().replace("reward.py:right", "rewards.py:easy"))

    def start(name: str, steps: int, **overrides: Any) -> TinyRun:
        sets = {"algorithm.steps": steps, "data.size": 80, "evaluation.items": 4, "evaluation.during_items": 4}
        runs.append(TinyRun(tmp_path / name, config, **sets, **overrides))
        return runs[-1].start()

    return start


def prompts(run: TinyRun) -> list[PromptItem]:
    config = json.loads((run.run_dir / "config.json").read_text())
    data, tokenizer = DataTable.model_validate(config["data"]), load_tokenizer(resolve_model("package:tiny", Path()))
    return list(PromptSource.load(data, tokenizer, seed=config["run"]["seed"], config_dir=run.run_dir.parent).train)


def trained_items(run: TinyRun) -> tuple[list[tuple[int, int]], dict[int, set[int]]]:
    """Place in the order and item of each group trained, step by step; and what the journal says was chosen."""
    copy = run.run_dir.parent / f"{run.run_dir.name}-journal"
    shutil.copytree(run.run_dir / "queue", copy)
    recovered = Journal(copy).recover()
    ledger, chosen = Ledger(recovered.snapshot), dict[int, set[int]]()
    for _, payload in recovered.records:
        entry = msgspec.msgpack.decode(payload, type=JournalEntry)
        ledger.apply(entry)
        if isinstance(entry.event, ev.AssignItems):
            for index, item in entry.event.items.items():
                chosen.setdefault(index, set()).add(item)
    found = [record.prompt for _, records in sorted(ledger.state.path.items()) for record in records]
    return [(prompt.index, prompt.item) for prompt in found if prompt is not None], chosen


def history(run: TinyRun) -> dict[str, list[Any]]:
    """What the last checkpoint knows of each item: groups, samples, successes, rate, step."""
    folder = max((run.run_dir / "checkpoints").glob("step-*"))
    return dict(json.loads((folder / "sampling.json").read_text())["history"]["items"])


def check(run: TinyRun, steps: int) -> list[PromptItem]:
    """The queue's word and the samples' own agree; the prompts of all groups, in the order of steps."""
    items, (trained, chosen) = prompts(run), trained_items(run)
    assert len(trained) == steps * GROUPS and len({index for index, _ in trained}) == len(trained)
    assert all(item in chosen.get(index, {item}) for index, item in trained) and min(item for _, item in trained) >= 0
    assert Counter(items[item].item for _, item in trained) == Counter({k: v[0] for k, v in history(run).items()})
    return [items[item] for _, item in trained]


def always(item: PromptItem) -> bool:
    return int(item.answer[-1]) in (2, 4, 6, 8)


def sometimes(item: PromptItem) -> bool:
    return int(item.answer[-1]) < 2


def test_a_curriculum_comes_to_the_prompts_of_the_wanted_difficulty_whoever_dies(make: Any) -> None:
    table = '{ name = "curriculum", target = 1.0, width = 0.1, unknown = 0.3, floor = 0.002, candidates = 64 }'
    run = make("curriculum", 120, **{"algorithm.sampler": table})
    run.until("some steps", lambda: run.last_step() >= 4)
    for slot in ("trainer/0", "queue/0", "rollout/0"):
        run.kill(slot)
    assert run.last_step() < 120, "too late to be killed within the run"
    assert run.wait() == 0, run.text()
    groups = check(run, 120)
    share = sum(map(always, prompts(run))) / len(prompts(run))
    assert 0.2 < share < 0.6
    late = [always(item) for item in groups[len(groups) // 2 :]]
    assert sum(late) / len(late) > max(0.8, 1.5 * share)


def test_replay_comes_back_to_prompts_that_rarely_succeed(make: Any) -> None:
    run = make("replay", 16, **{"algorithm.sampler": '{ name = "replay", share = 0.8, below = 0.6, after = 1 }'})
    assert run.wait() == 0, run.text()
    groups = check(run, 16)
    share = sum(map(sometimes, prompts(run))) / len(prompts(run))
    late = [sometimes(item) for item in groups[len(groups) // 2 :]]
    assert 0.05 < share < 0.4 and sum(late) / len(late) > 1.5 * share
