"""Runs that lose what they make say so while they live, and end or go on: real processes, the tiny model."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from tiny_run import DEADLINE_S, RELAX, Make, TinyRun, steps_that_count

pytest.importorskip("torch")
pytestmark = pytest.mark.integration

COMMON = """
[run]
name = "progress"
seed = 1
[model]
path = "package:tiny"
[sampling]
max_new_tokens = 3
[algorithm]
group_size = 4
prompts_per_step = 2
steps = 3
max_staleness = 1
learning_rate = 3e-4
[checkpoint]
every_steps = 50
[evaluation]
items = 2
during_items = 2
[queue]
capacity_mib = 16
slab_mib = 2
[roles.rollout]
dtype = "float32"
[roles.trainer]
dtype = "float32"
"""
WITH_DATA = """
[data]
path = "sums.jsonl"
held_out = 0.1
max_prompt_tokens = 16
[reward]
function = "reward.py:score"
timeout_s = 2
[roles.evaluator]
dtype = "float32"
"""
WITH_GAME = """
[roles.env]
environment = "game.py:Game"
tasks = 12
episodes_in_flight = 16
max_tokens = 256
max_turns = 4
turn_timeout_s = 2
"""
GAME = """
import collections
import os
import time
from relax_rt.roles.agentic import Environment, Observation, Reply, Step, Task

SEEN = collections.Counter()


class Game(Environment):
    async def reset(self, task):
        self.task = task
        if task.split == "train":
            SEEN[task.item] += 1
            {reset}
        return Observation(messages=f"{{10 + task.seed % 80}} + 11 =")

    async def step(self, reply):
        task = self.task
        if task.split == "train":
            {step}
        return Step(reward=float(len(reply.text) % 3), done=True)
"""
PASS = "pass"
SLEEPER = "30 + 11 ="


def game(*, reset: str = PASS, step: str = PASS) -> dict[str, str]:
    return {"roles.toml": COMMON + WITH_GAME, "game.py": GAME.format(reset=reset, step=step)}


def rewarded(body: str, prompts: int = 14, *, head: str = "def score") -> dict[str, str]:
    rows = [json.dumps({"prompt": f"{a} + 11 =", "answer": str(a + 11)}) for a in range(24, 24 + prompts)]
    signature = f'{head}(completion, answer, question="", tokens=0, **info)'
    reward = f"import asyncio, os, time\n{signature}:\n    {body}\n    return 1.0\n"
    return {"roles.toml": COMMON + WITH_DATA, "sums.jsonl": "\n".join(rows) + "\n", "reward.py": reward}


def why(run: TinyRun) -> dict[str, Any]:
    done = subprocess.run(
        [RELAX, "why", "--run", str(run.run_dir), "--json"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    return dict(json.loads(done.stdout)) if done.returncode == 0 else {}


def shown(run: TinyRun, *command: str) -> str:
    return subprocess.run(
        [RELAX, *command, "--run", str(run.run_dir)], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    ).stdout


MEMBER_FOUR = """
import asyncio
from pathlib import Path

LOOKED = Path(__file__).with_name("looked")


async def member_four(member, items):
    while items > 16 and not LOOKED.exists():
        await asyncio.sleep(0.05)
    if member >= 4:
        raise RuntimeError("member four never works")
"""
"""The run does not end before the test has looked at it: after some groups nothing begins until there is a file."""


def test_a_run_whose_groups_all_fail_says_so_at_once_ends_and_goes_on_once_it_is_mended(make: Make) -> None:
    """One member of each group always fails: its group never becomes whole."""
    files = game(reset="await member_four(SEEN[task.item], len(SEEN))")
    files["game.py"] = MEMBER_FOUR + files["game.py"]
    line = 1 + next(n for n, text in enumerate(files["game.py"].splitlines()) if "raise RuntimeError" in text)
    sets = {"algorithm.steps": 1, "progress.failed_groups": 24, "roles.env.turn_timeout_s": 120}
    run = make(files, **sets, **{"roles.env.tasks": 1000, "roles.env.episode_timeout_s": 240}).start()
    run.until("a loss", lambda: run.events("members_lost"))
    found = why(run)
    assert found["exit_code"] is None, "the run still lives"
    (loss,) = found["losses"]
    assert loss["where"].endswith(f"game.py:{line}") and "RuntimeError: member four never works" in loss["cause"]
    assert 'on_failed_member = "shrink"' in loss["hint"]
    assert "member four never works" in shown(run, "ps")
    (run.config.parent / "looked").touch()
    assert run.wait() == 1, run.text()
    text = run.text()
    assert "groups of 4 or more prompts failed in a row, and none was trained" in text
    assert f"game.py:{line}" in text and 'on_failed_member = "shrink"' in text and "failed_groups = 24" in text
    assert "WARNING" in text and "samples of" in text, "said while it went on"
    (ended,) = run.events("no_progress")
    assert ended["failed_groups"] == 24 and not run.records("step")
    run.gone(run.run_id())
    # With the setting that was named the same run goes on.
    run.overrides["algorithm.on_failed_member"] = '"shrink"'
    assert run.start().wait() == 0, run.text()
    assert sorted(steps_that_count(run.records("step"))) == [1]
    assert why(run)["exit_code"] == 0


def test_an_item_whose_reward_never_returns_is_retired_and_the_run_goes_on(make: Make) -> None:
    """It costs two visits, whatever the number of epochs."""
    files = rewarded(f"if question == {SLEEPER!r}: time.sleep(1e6)")
    run = make(files, **RETIRES, **{"reward.workers": 2}).start()
    item = until_passed_over(run)
    told = shown(run, "retired")
    assert SLEEPER in told and "reward.timeout_s = 2 s" in told and "progress.kept_items" in told
    # Taken back from the command line while the run lives: it is sampled again, and is late again.
    run.until("a queue that takes it back", lambda: shown(run, "reinstate", item) == f"reinstated: {item}\n")
    assert [event["item"] for event in run.events("item_reinstated")] == [item]
    run.until("the item to be late again", lambda: len(run.events("item_retired")) == 2)
    run.down()
    check_retired(run, SLEEPER, times=2)
    # Taken back by the config.
    run.overrides |= {"algorithm.steps": run.last_step() + 1, "progress.kept_items": json.dumps([item])}
    assert run.start().wait() == 0, run.text()
    assert [event["item"] for event in run.events("item_reinstated")] == [item] * 2


RETIRES = {"algorithm.steps": 10_000, "algorithm.group_size": 2, "evaluation.every_steps": 10_000}


def until_passed_over(run: TinyRun) -> str:
    """Wait until an item is retired, and then for so many steps that it comes again; its id."""
    (retired, *_) = run.until("a retired item", lambda: run.events("item_retired"))
    made = run.last_step()
    # All prompts in half as many steps, and what is under way ahead of the trainer.
    run.until("another epoch", lambda: run.last_step() >= made + 14 // 2 + 4)
    return str(retired["item"])


def check_retired(run: TinyRun, about: str = "", times: int = 1) -> None:
    """One item is retired, so many times, and nothing is made of it from then on. All steps are there."""
    path = steps_that_count(run.records("step"))
    assert sorted(path) == list(range(1, run.last_step() + 1))
    found = run.events("item_retired")
    assert len(found) == times and len({event["item"] for event in found}) == 1
    assert all(event["timeouts"] == 2 and about in event["about"] for event in found)
    account = run.events("queue_account")[-1]
    assert account["items_retired"] == times and account["prompts_skipped"] >= 1, "it was drawn again and skipped"
    assert account["trained_twice"] == 0
    # Two visits of each member, and those that were under way then.
    assert 4 * times <= sum(loss["members"] for loss in why(run)["losses"]) <= 20 * times


REAL = "if tokens == 3: "
"""Two digits and the end: what the model says, and nothing that the dry run of `up` tries."""
FEW = {"progress.failed_groups": 8, "algorithm.group_size": 2}
ALL_FAIL: dict[str, tuple[dict[str, str], dict[str, Any], str]] = {
    "the reward raises": (rewarded(REAL + "raise KeyError(answer)"), {}, "reward.py:3"),
    "the reward is no number": (rewarded(REAL + "return float('nan')"), {}, "must be finite"),
    "the reward is text": (rewarded(REAL + "return 'good'"), {}, "must be a number"),
    "the reward ends its process": (rewarded(REAL + "os._exit(3)"), FEW, "its process ended: exit code 3"),
    "every reward is late": (
        rewarded(REAL + "time.sleep(1e6)"),
        FEW | {"reward.timeout_s": 1},
        "raise reward.timeout_s",
    ),
    "no episode begins": (game(reset="raise ValueError('no board')"), {}, "ValueError: no board"),
    "no turn ends": (
        game(step="import asyncio; await asyncio.sleep(1e6)"),
        FEW | {"roles.env.turn_timeout_s": 1},
        "raise roles.env.turn_timeout_s",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("what", ALL_FAIL)
def test_run_ends_with_cause_when_every_group_fails(make: Make, what: str) -> None:
    files, sets, cause = ALL_FAIL[what]
    run = make(files, **{"progress.failed_groups": 16, **sets}).start()
    assert run.wait() == 1, run.text()
    assert cause in run.text() and "failed in a row, and none was trained" in run.text()
    assert run.events("no_progress") and not run.events("item_retired") and not run.records("step")
    found = why(run)
    assert found["losses"] and all(loss["hint"] for loss in found["losses"])
    if "process" in what:
        assert "reward workers were killed" in found["workers"]
    run.gone(run.run_id())


ONE_ITEM = {
    "an async reward waits": rewarded(f"if question == {SLEEPER!r}: await asyncio.sleep(1e6)", head="async def score"),
    "a reward computes for ever": rewarded(f"while question == {SLEEPER!r}: pass"),
    "an async reward blocks its loop": rewarded(f"if question == {SLEEPER!r}: time.sleep(1e6)", head="async def score"),
    "a reset waits": game(reset="if task.item == 'train-3': import asyncio; await asyncio.sleep(1e6)"),
    "a step waits": game(step="if task.item == 'train-3': import asyncio; await asyncio.sleep(1e6)"),
}


@pytest.mark.long
@pytest.mark.parametrize("what", ONE_ITEM)
def test_an_item_that_only_times_out_is_retired(make: Make, what: str) -> None:
    run = make(ONE_ITEM[what], **RETIRES).start()
    until_passed_over(run)
    run.down()
    check_retired(run)


@pytest.mark.long
def test_items_that_fail_for_another_reason_are_reported_and_the_run_goes_on(make: Make) -> None:
    run = make(
        rewarded("if tokens == 3 and int(answer) % 3 == 0: raise KeyError(answer)"), **{"algorithm.steps": 12}
    ).start()
    assert run.wait() == 0, run.text()
    found = why(run)
    assert [loss["where"].rsplit("/")[-1] for loss in found["losses"]] == ["reward.py:3"]
    assert not found["retired"] and not run.events("no_progress")
