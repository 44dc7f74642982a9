"""Runs that play episodes: sums in two turns with the tiny model, while the env role dies or an environment hangs."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_run import Make, TinyRun, steps_that_count

pytest.importorskip("torch")
pytestmark = pytest.mark.integration

CONFIG = """
[run]
name = "sums"
seed = 1

[model]
path = "package:tiny"

[roles.env]
environment = "sums.py:Sums"
tasks = 500
max_turns = 2
max_tokens = 64
turn_timeout_s = 60
success = 0.75

[sampling]
max_new_tokens = 5

[algorithm]
group_size = 4
prompts_per_step = 4
steps = 6
learning_rate = 3e-4

[checkpoint]
every_steps = 3

[evaluation]
items = 24
every_steps = 3
during_items = 12

[queue]
capacity_mib = 16
slab_mib = 2
lease_s = 10

[roles.rollout]
dtype = "float32"

[roles.trainer]
dtype = "float32"
"""
GAME = '''
import asyncio, random, time
from pathlib import Path
from relax_rt.roles.agentic import Observation, Reply, Step, Task

async def endure():
    while True:
        try:
            await asyncio.sleep(0.5)
        except BaseException:
            pass

class Sums:
    """Two sums, half a point for each that is right."""

    def __init__(self, folder="", slow="", stubborn=False):
        self.folder, self.slow, self.stubborn, self.turn = folder, slow, stubborn, 0

    {async_}def reset(self, task: Task) -> Observation:
        self.draw, self.name = random.Random(task.seed), task.item
        return Observation(messages=self.ask(), state="first")

    def ask(self):
        a, b = self.draw.randrange(10, 100), self.draw.randrange(10, 100)
        self.answer = str(a + b)
        return f"{{a}} + {{b}} ="

    {async_}def step(self, reply: Reply) -> Step:
        if self.folder and self.name in ("train-3", "train-5"):
            mark = Path(self.folder) / self.name
            if not mark.exists():
                mark.touch()
                if self.stubborn:
                    {await_}endure()
                time.sleep(600)
        if self.name == self.slow or self.slow == "all":
            {nap}(4)
        self.turn += 1
        right = 0.5 * (reply.text == self.answer)
        return Step(messages="" if self.turn == 2 else self.ask(), reward=right, done=self.turn == 2, state="second")
'''
HANGS = {"roles.env.turn_timeout_s": 8}
"""Of runs in which a turn never ends; others are not to be ended by a slow machine."""


@pytest.fixture
def make(make: Make) -> Make:
    """Makes a run of sums; `blocking`: its environment knows nothing of asyncio."""

    def made(*, blocking: bool = False, steps: int = 6, **overrides: Any) -> TinyRun:
        kind, wait = ("", "") if blocking else ("async ", "await ")
        nap = "time.sleep" if blocking else "await asyncio.sleep"
        files = {"roles.toml": CONFIG, "sums.py": GAME.format(async_=kind, await_=wait, nap=nap)}
        return make(files, **{"algorithm.steps": steps, **overrides})

    return made


def check(run: TinyRun) -> None:
    """All steps were taken, on episodes that the env role says it made, none of them twice; the run ended in order."""
    path, steps = steps_that_count(run.records("step")), run.overrides["algorithm.steps"]
    assert sorted(path) == list(range(1, steps + 1))
    keys = [key for record in path.values() for key in record["keys"]]
    assert len(set(keys)) == len(keys) == 16 * steps
    made = {name: digest for record in run.records("produced") for name, digest, _ in record["samples"]}
    for record in path.values():
        assert [made[key] for key in record["keys"]] == record["digests"]
    assert {record["slot"] for record in run.records("produced")} == {"env/0"}
    when = [(record["when"], record["step"]) for record in run.records("evaluation")]
    assert when[0] == ("before", 0) and when[-1] == ("after", steps)
    assert all(record["failed"] == 0 and record["turns"] == 2 for record in run.records("evaluation"))
    first = run.records("evaluation")[0]
    assert first["versions"] == [first["version"]] * 2, "weights moved before the untrained model was evaluated"
    assert not {e["slot"] for e in run.events("slot_started")} & {"reward/0", "evaluator/0"}


def test_an_env_role_that_is_killed_costs_only_time(make: Make) -> None:
    # As many as are still to come when the role is back, on a busy machine too.
    run = make(steps=20).start()
    run.until("a few steps", lambda: run.last_step() >= 2)
    assert not {"reward", "evaluator"} & set(run.ps()["roles"])
    run.kill("env/0")
    assert run.wait() == 0, run.text()
    check(run)
    assert [e["slot"] for e in run.events("slot_exited") if e["diagnosis"]["signal"] == "SIGKILL"] == ["env/0"]
    told = run.records("env")
    assert sum(record["episodes"] for record in told) > 0 and {record["slot"] for record in told} == {"env/0"}
    assert all(record["turns"] == 2 and record["branches"] == record["episodes"] for record in told)
    run.gone(run.run_id())


@pytest.mark.long
@pytest.mark.parametrize("blocking", [True, False])
def test_an_environment_that_hangs_is_named_killed_and_its_episodes_are_played_again(
    make: Make, blocking: bool
) -> None:
    run = make(blocking=blocking, **{**HANGS, "roles.env.workers": 1})
    run.overrides["roles.env.options.folder"] = f'"{run.config.parent}"'
    run.start()
    assert run.wait() == 0, run.text()
    check(run)
    stuck = run.events("environment_stuck")
    assert {e["item"] for e in stuck} == {"train-3", "train-5"}
    how = "did not return within 8 s" if blocking else "it blocks the event loop of its process at "
    assert all(how in e["why"] and "step 1 of" in e["why"] for e in stuck)
    assert max(record["workers_killed"] for record in run.records("env")) >= 1
    assert not [e for e in run.events("slot_exited") if e["diagnosis"]["signal"] == "SIGKILL"], "a role was killed"


@pytest.mark.long
def test_a_run_ends_although_coroutines_of_its_environment_never_do(make: Make) -> None:
    run = make(**{**HANGS, "roles.env.options.stubborn": "true"})
    run.overrides["roles.env.options.folder"] = f'"{run.config.parent}"'
    run.start()
    assert run.wait() == 0, run.text()
    check(run)
    for kind in ("environment_stuck", "environment_abandoned"):
        assert len(run.events(kind)) == 2, run.text()
    assert all(e["call"] == "in step 1" and "sums.py:" in e["line"] for e in run.events("environment_abandoned"))
    assert max(record["abandoned"] for record in run.records("env")) == 2
    assert not [e for e in run.events("slot_exited") if e["diagnosis"]["signal"] == "SIGKILL"], "a role was killed"
    run.gone(run.run_id())


@pytest.mark.long
def test_an_async_environment_that_blocks_is_named_in_the_diagnosis_of_the_hang(make: Make) -> None:
    run = make(**{**HANGS, "roles.env.hang_after_s": 20})
    run.overrides["roles.env.options.folder"] = f'"{run.config.parent}"'
    run.start()
    assert run.wait() == 0, run.text()
    check(run)
    blocked = run.events("loop_blocked")
    assert blocked and all(e["what"].startswith("episode ") and "sums.py:" in e["line"] for e in blocked)
    hangs = [e["diagnosis"] for e in run.events("slot_exited") if e["diagnosis"]["kind"] == "hang"]
    assert len(hangs) == len(blocked) and all("blocks the event loop at" in str(one) for one in hangs)


@pytest.mark.long
def test_two_slots_play_and_the_second_one_waits_for_the_first_evaluation(make: Make) -> None:
    run = make(**{"roles.env.count": 2}).start()
    assert run.wait() == 0, run.text()
    path = steps_that_count(run.records("step"))
    assert sorted(path) == list(range(1, 7))
    assert {record["slot"] for record in run.records("produced")} == {"env/0", "env/1"}
    first = run.records("evaluation")[0]
    assert first["when"] == "before" and first["versions"] == [first["version"]] * 2


SLOW = {"roles.env.turn_timeout_s": 6, "roles.env.episode_timeout_s": 7}
"""Two turns of 4 s, each in time, take longer."""


@pytest.mark.long
def test_a_task_that_is_always_too_slow_is_retired_and_the_run_goes_on(make: Make) -> None:
    # Two whole groups that are late, while others are trained.
    told = {"roles.env.options.slow": '"train-3"', "roles.env.unfinished": '"drop"', "evaluation.every_steps": 10_000}
    run = make(steps=10_000, **SLOW, **told).start()
    run.until("a retired item", lambda: run.events("item_retired"))
    run.down()
    run.overrides["algorithm.steps"] = run.last_step() + 1
    assert run.start().wait() == 0, run.text()
    check(run)
    (retired,) = [event for event in run.events("group_ended") if event["prompt_fate"] == "retire"]
    assert retired["prompt"] == 3
    stuck = run.events("environment_stuck")
    assert {event["item"] for event in stuck} == {"train-3"}
    assert all("not over within 7 s" in event["why"] and "episode_timeout_s" in event["why"] for event in stuck)
    failed = [event for event in run.events("samples_failed") if "not over within" in str(event["reasons"])]
    assert len(failed) == 2 and len({event["group"] for event in failed}) == 1
    assert [event["item"] for event in run.events("item_retired")] == ["train-3"]


@pytest.mark.long
def test_a_run_whose_episodes_are_all_too_slow_ends_and_says_why(make: Make) -> None:
    run = make(**SLOW, **{"roles.env.options.slow": '"all"'}).start()
    assert run.wait() == 1, run.text()
    assert not run.records("step")
    assert run.events("no_progress") and not run.events("env_stalled"), "another process would mend nothing"
    assert "groups of 4 or more prompts failed in a row" in run.text() and "not over within 7 s" in run.text()
    assert not run.events("item_retired"), "no other item was played"
    assert "roles.env.episode_timeout_s" in run.text()
    run.gone(run.run_id())
