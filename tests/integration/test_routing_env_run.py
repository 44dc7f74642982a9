"""Runs that play episodes with a mixture of experts and record routing rows: of a function whose conversation forks,
and of a program by the gateway, while rollouts and the env role are killed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_experts import build_sparse_model
from tiny_run import TinyRun, steps_that_count

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
SUITE = Path(__file__).resolve().parents[1] / "engines"
if str(SUITE) not in sys.path:
    sys.path.insert(0, str(SUITE))

from harness import replayed, routed  # noqa: E402

pytestmark = [pytest.mark.integration, pytest.mark.long]

TEMPERATURE = 2.0
TOLERANCE = 1e-3
CONFIG = """
[run]
name = "routed"
seed = 1

[model]
path = "model"

[roles.env]
environment = "game.py:play"
tasks = 500
max_turns = 3
max_tokens = 500
episodes_in_flight = 24

[sampling]
temperature = 2.0
max_new_tokens = 60

[algorithm]
group_size = 4
prompts_per_step = 4
steps = 16
# Weights as good as still, so that one forward pass of the first gives rows and log-probabilities of all versions.
learning_rate = 1e-12
max_staleness = 2

[checkpoint]
every_steps = 4

[evaluation]
items = 8

[queue]
capacity_mib = 64
slab_mib = 2
lease_s = 10

[roles.rollout]
count = 2
dtype = "float32"
routing = true

[roles.trainer]
dtype = "float32"
"""
GAME = '''
"""Two turns, and a second answer to another second question. Tells the test what it was asked for and what was put."""
import json
import os
from pathlib import Path

import numpy as np

from relax_rt.roles.agentic import samples
from relax_rt.roles.rollout.router import Router

FOLDER = Path(__file__).parent / "told"
FOLDER.mkdir(exist_ok=True)
put, generate = samples.as_put, Router.generate


def as_put(sample):
    made = put(sample)
    columns = {name: made.columns[name] for name in ("tokens", "loss_mask", "behaviour_logprobs", "routing")}
    branches = np.array(sample.meta.branches or [(0, len(sample.tokens))])
    draft = FOLDER / f".{made.key}.npz"
    np.savez(draft, branches=branches, **columns)
    draft.rename(FOLDER / f"{made.key}.npz")
    return made


async def asks(self, wanted):
    with (FOLDER / f"asked-{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps([wanted.session, wanted.routing, wanted.rows_from, len(wanted.prompt)]) + "\\n")
    return await generate(self, wanted)


samples.as_put, Router.generate = as_put, asks


def user(words):
    return {"role": "user", "content": words}


async def play(task, chat):
    first = await chat.say([user(f"{task.index} + 34 =")])
    chat.reward(len(first.text) % 3 / 2)
    begun = [user(f"{task.index} + 34 ="), first.message]
    await chat.say([*begun, user("and 5?")], previous=first)
    other = await chat.say([*begun, user("or 6?")], previous=first)
    return len(other.text) % 5 / 4
'''
AGENT = """
import json, sys
from openai import OpenAI

client, messages, length = OpenAI(), [], 0
for turn in range(2):
    messages.append({"role": "user", "content": f"{sys.argv[1]} and {turn}"})
    said = client.chat.completions.create(model="policy", messages=messages, stop=["1"]).choices[0].message.content
    messages.append({"role": "assistant", "content": said})
    length += len(said)
print(json.dumps({"reward": length % 7 / 6}))
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[TinyRun]:
    job = tmp_path / "job"
    job.mkdir()
    # Gates that are far from undecided.
    build_sparse_model(job / "model", norm_topk_prob=True, initializer_range=0.15)
    (job / "roles.toml").write_text(CONFIG)
    (job / "game.py").write_text(GAME)
    (job / "agent.py").write_text(AGENT)
    made = TinyRun(tmp_path / "run", job / "roles.toml")
    yield made
    made.end()


def check_run(run: TinyRun, steps: int) -> None:
    """All steps were taken, on what the env role made; nobody ended because rows were lacking."""
    path = steps_that_count(run.records("step"))
    assert sorted(path) == list(range(1, steps + 1))
    made = {name: digest for record in run.records("produced") for name, digest, _ in record["samples"]}
    for record in path.values():
        assert [made[key] for key in record["keys"]] == record["digests"]
    assert not [event for event in run.events("slot_exited") if "routing rows" in json.dumps(event)]
    assert all(record["failed"] == record["lost"] == 0 for record in run.records("evaluation"))


def check_asked(told: Path) -> None:
    """Rows were asked for where they are trained, and of each position once."""
    lines = [line for path in told.glob("asked-*.jsonl") for line in path.read_text().splitlines()]
    asked: list[tuple[str, bool, int, int]] = [json.loads(line) for line in lines]
    held_out = [routing for name, routing, *_ in asked if name.startswith("held-out")]
    assert held_out and not any(held_out)
    trained = [one for one in asked if not one[0].startswith("held-out")]
    assert trained and all(routing for _, routing, *_ in trained)
    assert {start > 0 for _, _, start, _ in trained} == {True, False}
    assert all(start < length for *_, start, length in trained)


def check_rows(model: Any, sample: Any) -> tuple[int, int]:
    """Rows that are others than those of a plain forward pass, of how many. Replayed they give the log-probabilities
    that were recorded, and rows of other experts do not."""
    wrong = count = 0
    rows, tokens = sample["routing"], sample["tokens"]
    assert rows.shape == (len(tokens) - 1, 3, 2) and len(sample["branches"]) == 2
    assert (rows[sample["branches"][0][1] - 1] == -1).all()
    for start, end in sample["branches"]:
        ids, own = tokens[start:end].tolist(), rows[start : end - 1]
        assert (own[:, 1] == -1).all() and (own[:, [0, 2]] >= 0).all()
        wrong += int((own != model_rows(model, ids)).any(axis=(1, 2)).sum())
        count += len(own)
        mask = sample["loss_mask"][start + 1 : end].astype(bool)
        behaviour = sample["behaviour_logprobs"][start + 1 : end]
        again = replayed(model, ids, own, TEMPERATURE).numpy()
        assert mask.any() and np.abs(again - behaviour)[mask].max() < TOLERANCE
        elsewhere = replayed(model, ids, (own + 1) % 8, TEMPERATURE).numpy()
        assert np.abs(elsewhere - behaviour)[mask].max() > 20 * TOLERANCE
    return wrong, count


def model_rows(model: Any, ids: list[int]) -> Any:
    return routed(Path(model.name_or_path), 0, ids)


def test_every_token_of_an_episode_has_the_row_it_was_sampled_with_though_roles_are_killed(
    run: TinyRun, tmp_path: Path
) -> None:
    run.start()
    run.until("a few steps", lambda: run.last_step() >= 2)
    run.kill("rollout/0")
    run.until("a few more", lambda: run.last_step() >= 5)
    run.kill("env/0")
    assert run.wait() == 0, run.text()
    check_run(run, 16)
    told = tmp_path / "job/told"
    check_asked(told)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "job/model", dtype=torch.float32).eval()
    paths = sorted(told.glob("*.npz"))
    keys = {key for record in run.records("step") for key in record["keys"]}
    assert keys <= {path.stem for path in paths} and len(keys) >= 16 * 16
    found = []
    for path in paths[:: max(1, len(paths) // 60)]:
        with np.load(path) as sample:
            found.append(check_rows(model, dict(sample)))
    # Two experts may be as good as alike for a token.
    assert sum(wrong for wrong, _ in found) <= sum(count for _, count in found) / 1000
    assert any(event["replies"] for event in run.events("episode_resumed")), "no reply was given again with its rows"


def test_programs_have_them_by_the_gateway(run: TinyRun) -> None:
    pytest.importorskip("uvicorn")
    pytest.importorskip("openai")
    run.overrides |= {
        "roles.env.environment": '"program:python agent.py {seed}"',
        "roles.env.options": '{ preload = ["openai"], stdin = "none" }',
        "roles.env.max_turns": 2,
        "roles.gateway.models": '["policy"]',
        "algorithm.steps": 6,
    }
    run.start()
    run.until("a step", lambda: run.last_step() >= 1)
    run.kill("gateway/0")
    assert run.wait() == 0, run.text()
    check_run(run, 6)
