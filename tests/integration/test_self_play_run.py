"""A run in which the policy plays both seats of a game, with a reward beside the game's own in a killable worker."""

from __future__ import annotations

import pytest
from tiny_run import Make, steps_that_count

pytest.importorskip("torch")
pytestmark = [pytest.mark.integration, pytest.mark.long]

CONFIG = """
[run]
name = "duel"
seed = 1
[model]
path = "package:tiny"
[roles.env]
environment = "duel.py:Duel"
tasks = 500
max_turns = 2
max_tokens = 64
rewards = [{ function = "duel.py:brief", weight = 0.5 }]
[reward]
timeout_s = 10
[sampling]
max_new_tokens = 5
[algorithm]
group_size = 4
prompts_per_step = 4
steps = 4
learning_rate = 3e-4
[evaluation]
items = 12
every_steps = 4
during_items = 12
[queue]
capacity_mib = 16
slab_mib = 2
[roles.rollout]
dtype = "float32"
[roles.trainer]
dtype = "float32"
"""
GAME = """
import random, time
from pathlib import Path
from relax_rt.roles.agentic import Observation, Step

class Duel:
    seats = 2

    async def reset(self, task):
        self.draw, self.right, self.asked = random.Random(task.seed), [0, 0], 0
        return Observation(messages=self.ask(), seat=0)

    def ask(self):
        a, b = self.draw.randrange(10, 100), self.draw.randrange(10, 100)
        self.answer, self.asked = str(a + b), self.asked + 1
        return f"{a} + {b} ="

    async def step(self, reply):
        seat = (self.asked - 1) % 2
        self.right[seat] += reply.text == self.answer
        if self.asked == 4:
            lead = float(self.right[0] - self.right[1])
            return Step(rewards={0: lead, 1: -lead}, done=True)
        return Step(messages=self.ask(), seat=1 - seat)

def brief(completion, answer, item, turns):
    mark = Path(__file__).with_name("hung")
    if item == "train-3" and not mark.exists():
        mark.touch()
        time.sleep(600)
    assert [turn["role"] for turn in turns] in (["user", "assistant"], ["user", "assistant"] * 2)
    return float(len(completion) < 4)
"""


def test_both_seats_are_trained_and_a_reward_that_hangs_costs_its_group_only(make: Make) -> None:
    run = make({"roles.toml": CONFIG, "duel.py": GAME}).start()
    assert run.wait() == 0, run.text()
    path = steps_that_count(run.records("step"))
    assert sorted(path) == [1, 2, 3, 4]
    for record in path.values():
        rewards = dict(zip(record["keys"], record["sample_rewards"], strict=True))
        assert len(rewards) == 16
        for key, reward in rewards.items():
            group, member = key.split(".")
            # Members 0 and 1 have played one game, 2 and 3 the other: what one has won the other has lost, and the
            # reward beside it is 0 or a half for each.
            assert reward + rewards[f"{group}.{int(member) ^ 1}"] in (0.0, 0.5, 1.0)
    parts = [record["rewards"] for record in run.records("env") if record["episodes"]]
    assert parts and all(part.keys() == {"episode", "environment", "brief"} for part in parts)
    assert (run.config.parent / "hung").exists()
    (lost,) = run.events("reward_worker_lost")
    assert "did not return within reward.timeout_s = 10 s" in lost["reason"]
    assert {event["item"] for event in run.events("environment_failed")} == {"train-3"}
    run.gone(run.run_id())
