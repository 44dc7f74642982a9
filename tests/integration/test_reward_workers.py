"""A run whose reward hangs once and forks once: those samples are made again, and nothing else of the run notices."""

from __future__ import annotations

import pytest
from tiny_run import CONFIG, Make

pytest.importorskip("torch")
pytestmark = [pytest.mark.integration, pytest.mark.long]

REWARD = '''
import os, time

def first(name):
    """Whether nobody in the run was here before, of all its processes. Not in the dry run before it."""
    if "RELAX_RUN_ID" not in os.environ:
        return False
    try:
        os.close(os.open(os.path.join(os.path.dirname(__file__), "marks", name), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True

def right(completion, answer, finish_reason):
    if first("hung"):
        time.sleep(600)
    if first("forked"):
        while True:
            os.fork()
    if first("slipped"):
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)
        os._exit(1)
    return float(finish_reason == "stop" and completion.strip() == answer)
'''
TABLE = """[reward]
timeout_s = 10.0
processes = 16
components = [
  { function = "mine.py:right" },
  { name = "regex", pattern = '\\s*\\d+\\s*', whole = true, weight = 0.25, label = "number" },
]
"""


def test_a_reward_that_hangs_and_forks_costs_samples_and_no_role(make: Make) -> None:
    config = CONFIG.read_text().replace('[reward]\nfunction = "reward.py:right"\n', TABLE)
    sets = {"algorithm.steps": 4, "evaluation.items": 4, "evaluation.during_items": 4}
    run = make({"roles.toml": config, "mine.py": REWARD}, **sets)
    marks = run.config.parent / "marks"
    marks.mkdir()
    assert run.start().wait() == 0, run.text()
    run.gone(run.run_id())
    assert {path.name for path in marks.iterdir()} == {"hung", "forked", "slipped"}
    assert [record["step"] for record in run.records("step")] == [1, 2, 3, 4]
    lost = [event["reason"] for event in run.events("reward_worker_lost")]
    assert len(lost) == 3 and all("mine.py:right did not return" in reason for reason in lost), lost
    assert sum(record["failed"] for record in run.records("reward")) == 3
    assert set(run.records("reward")[-1]["components"]) == {"right", "number"}
    # The reward role itself was never started again.
    assert {event["slot"] for event in run.events("slot_exited") if event["diagnosis"].get("signal")} == set()
