"""A run whose episodes are played by a program on the `openai` client, while gateway, spawner and env role die."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tiny_run import Make, TinyRun, processes, steps_that_count

from relax_rt.process import procfs

pytest.importorskip("torch")
pytest.importorskip("uvicorn")
pytest.importorskip("openai")
pytestmark = [pytest.mark.integration, pytest.mark.long]

STEPS = 20
CONFIG = """
[run]
name = "program"
seed = 1

[model]
path = "package:tiny"

[roles.env]
environment = "program:python agent.py --seed {seed}"
options = { preload = ["openai"], stdin = "none" }
tasks = 500
max_turns = 2
max_tokens = 64
episode_timeout_s = 60
episodes_in_flight = 16

[roles.gateway]
models = ["*"]

[sampling]
max_new_tokens = 5

[algorithm]
group_size = 4
prompts_per_step = 4
steps = 20
learning_rate = 3e-4

[checkpoint]
every_steps = 10

[evaluation]
items = 8

[queue]
capacity_mib = 16
slab_mib = 2
lease_s = 10

[roles.rollout]
dtype = "float32"

[roles.trainer]
dtype = "float32"
"""
AGENT = '''
"""Two sums, half a point for each that is right."""
import json, random, sys
from openai import OpenAI

draw = random.Random(int(sys.argv[2]))
client = OpenAI()
messages, right = [], 0
for turn in range(2):
    a, b = draw.randrange(10, 100), draw.randrange(10, 100)
    messages.append({"role": "user", "content": f"{a} + {b} ="})
    said = client.chat.completions.create(model="gpt-4o", messages=messages).choices[0].message
    messages.append({"role": "assistant", "content": said.content})
    right += said.content == str(a + b)
print("done")
print(json.dumps({"reward": right / 2, "info": {"right": right}}))
'''
JOB = {"roles.toml": CONFIG, "agent.py": AGENT}


def playing(run: TinyRun) -> list[int]:
    """Programs at work."""
    found = []
    for pid in processes():
        try:
            command = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if b"OPENAI_API_KEY=rls-" in command and f"RELAX_RUN_ID={run.run_id()}".encode() in command:
            found.append(pid)
    return found


def spawner(run: TinyRun) -> int:
    """The process that starts the programs."""
    found = procfs.children(run.slot("env/0")["pid"])
    return next(pid for pid in found if b"program_spawner" in Path(f"/proc/{pid}/cmdline").read_bytes())


def check(run: TinyRun, steps: int) -> None:
    """All steps were taken, on episodes that the env role says it made, none of them twice."""
    path = steps_that_count(run.records("step"))
    assert sorted(path) == list(range(1, steps + 1))
    keys = [key for record in path.values() for key in record["keys"]]
    assert len(set(keys)) == len(keys) == 16 * steps
    made = {name: digest for record in run.records("produced") for name, digest, _ in record["samples"]}
    for record in path.values():
        assert [made[key] for key in record["keys"]] == record["digests"]
    told = run.records("env")
    assert all(
        record["turns"] == 2 and record["branches"] == record["episodes"] for record in told if record["episodes"]
    )
    assert all(record["failed"] == 0 for record in told) and any(record["info"].get("right") for record in told)
    when = [(record["when"], record["step"]) for record in run.records("evaluation")]
    assert when[0] == ("before", 0) and when[-1] == ("after", steps)


def test_a_program_s_episodes_are_trained_once_though_gateway_spawner_and_env_die_in_the_middle(make: Make) -> None:
    run = make(JOB).start()
    run.until("a few steps", lambda: run.last_step() >= 2)
    run.kill("gateway/0")
    run.until("episodes at the new gateway", lambda: run.last_step() >= 6)
    lost = run.events("episode_lost")
    assert lost, "no episode was at work"
    assert sum(record["lost"] for record in run.records("env")) >= 1
    os.kill(spawner(run), signal.SIGSTOP)
    run.until("one that answers", lambda: run.events("spawner_lost"))
    assert "did not answer" in run.events("spawner_lost")[0]["why"] and run.events("spawner_lost")[0]["programs"] >= 1
    so_far = run.last_step()
    run.until("episodes of another spawner", lambda: run.last_step() >= so_far + 3)
    before = playing(run)
    run.kill("env/0")
    after = playing(run)
    assert not set(before) & set(after), "programs outlive the role that started them"
    assert run.wait() == 0, run.text()
    check(run, STEPS)
    killed = [e["slot"] for e in run.events("slot_exited") if e["diagnosis"]["signal"] == "SIGKILL"]
    assert sorted(killed) == ["env/0", "gateway/0"]
    assert not playing(run)
    run.gone(run.run_id())
