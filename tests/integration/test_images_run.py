"""A run of a model that sees: episodes of images, through engine, queue and trainer."""

from __future__ import annotations

import pytest
from tiny_run import Make, steps_that_count
from tiny_vision import build_seeing_model

pytest.importorskip("torch")
pytest.importorskip("PIL")
pytestmark = pytest.mark.integration

CONFIG = """
[run]
name = "lights"
seed = 1

[model]
path = "model"

[roles.env]
environment = "lights.py:Lights"
tasks = 50
max_turns = 2
max_tokens = 128
media_kib = 8

[sampling]
max_new_tokens = 4

[algorithm]
group_size = 4
prompts_per_step = 2
steps = 2
max_staleness = 0
learning_rate = 1e-3

[checkpoint]
every_steps = 2

[evaluation]
items = 4

[queue]
capacity_mib = 16
slab_mib = 2

[roles.rollout]
dtype = "float32"

[roles.trainer]
dtype = "float32"
mismatch = "all"
"""
GAME = '''
import random

import numpy as np

from relax_rt.roles.agentic import Observation, Reply, Step, Task
from relax_rt.roles.agentic.adapters.gymnasium import image_url


class Lights:
    """Says whether it is dark or light, twice."""

    def shown(self):
        self.light = self.draw.random() < 0.5
        pixels = np.full((20, 24, 3), 255 * self.light, np.uint8)
        return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": image_url(pixels)}}]}]

    def reset(self, task: Task) -> Observation:
        self.draw, self.turn = random.Random(task.seed), 0
        return Observation(messages=self.shown())

    def step(self, reply: Reply) -> Step:
        self.turn += 1
        right = float(len(reply.text) > 2) if self.light else float(len(reply.text) <= 2)
        return Step(messages=[] if self.turn == 2 else self.shown(), reward=right, done=self.turn == 2)
'''


def test_a_model_that_sees_is_trained_on_episodes_of_images(make: Make) -> None:
    run = make({"roles.toml": CONFIG, "lights.py": GAME})
    model = run.config.parent / "model"
    model.mkdir()
    build_seeing_model(model)
    assert run.start().wait() == 0, run.text()
    path = steps_that_count(run.records("step"))
    assert sorted(path) == [1, 2]
    made = {name: digest for record in run.records("produced") for name, digest, _ in record["samples"]}
    for record in path.values():
        assert [made[key] for key in record["keys"]] == record["digests"]
        assert record["measured_tokens"] and record["difference_max"] < 1e-3, "engine and trainer see otherwise"
    assert sum(record["failed"] for record in run.records("env")) == 0
    assert {record["when"] for record in run.records("evaluation")} == {"before", "after"}
    run.gone(run.run_id())
