"""A small whole run: gateway, env role and a reward worker are each killed once while episodes are in the middle."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_program_run import CONFIG
from test_run_survives import check_account
from tiny_run import TinyRun, steps_that_count

from relax_rt.process import procfs
from relax_rt.roles.models.resolve import resolve_model

pytest.importorskip("torch")
pytest.importorskip("uvicorn")
pytestmark = pytest.mark.integration

STEPS, BATCH, HELD = 16, 16, 4
OVERRIDES: dict[str, Any] = {
    "roles.env.environment": '"program:python agent.py {seed}"',
    "roles.env.options": '{ preload = ["json", "http.client"], stdin = "none" }',
    "roles.env.rewards": '[{ function = "reward.py:brief" }]',
    "reward.timeout_s": 60,
    "algorithm.steps": STEPS,
    "checkpoint.every_steps": 5,
    "evaluation.items": 4,
}
AGENT = '''
"""Two sums. While there is a file `hold` it waits between them."""
import http.client, json, os, random, sys, time, urllib.parse
from pathlib import Path

draw, messages = random.Random(int(sys.argv[1])), []
url, key = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"]), os.environ["OPENAI_API_KEY"]
for turn in range(2):
    messages.append({"role": "user", "content": f"{draw.randrange(10, 100)} + {draw.randrange(10, 100)} ="})
    link = http.client.HTTPConnection(url.hostname, url.port, timeout=60)
    body = json.dumps({"model": "policy", "messages": messages})
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    link.request("POST", url.path + "/chat/completions", body, headers)
    answer = link.getresponse()
    said = json.loads(answer.read())
    assert answer.status == 200, said
    messages.append({"role": "assistant", "content": said["choices"][0]["message"]["content"]})
    if turn == 0 and Path("hold").exists():
        Path("held", str(os.getpid())).touch()
        while Path("hold").exists():
            time.sleep(0.02)
print(messages[1]["content"], messages[3]["content"])
'''
REWARD = '''
import time
from pathlib import Path

def brief(completion, answer):
    """The briefer the better. The first call that finds a file `trap` takes it away, and never returns."""
    here = Path(__file__).parent
    try:
        (here / "trap").rename(here / "trapped")
    except FileNotFoundError:
        return 1.0 - len(completion) / 20
    time.sleep(600)
'''


@pytest.fixture
def run(tmp_path: Path) -> Iterator[TinyRun]:
    resolve_model("package:tiny", Path())
    job = tmp_path / "job"
    (job / "held").mkdir(parents=True)
    for name, text in (("roles.toml", CONFIG), ("agent.py", AGENT), ("reward.py", REWARD)):
        (job / name).write_text(text)
    started = TinyRun(tmp_path / "run", job / "roles.toml", **OVERRIDES).start()
    yield started
    (job / "hold").unlink(missing_ok=True)
    started.end()


def kill_in_the_middle(run: TinyRun, slot: str) -> None:
    """Kill a role while programs stand between their first reply and their second."""
    job = run.config.parent
    for old in (job / "held").iterdir():
        old.unlink()
    (job / "hold").touch()
    run.until("episodes in the middle", lambda: len(list((job / "held").iterdir())) >= HELD)
    os.kill(run.pid(slot), signal.SIGKILL)
    (job / "hold").unlink()


def kill_a_reward_worker(run: TinyRun) -> None:
    """Kill a worker that scores an episode."""
    job = run.config.parent
    (job / "trap").touch()
    run.until("a reward that is being computed", (job / "trapped").exists)
    below = procfs.descendants(run.pid("env/0"))
    (worker,) = (pid for pid in below if b"rewards.worker" in command(pid))
    os.kill(worker, signal.SIGKILL)


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def made(run: TinyRun) -> dict[str, str]:
    """Digests of samples as the env role says that it made them, by name."""
    return {name: digest for record in run.records("produced") for name, digest, _ in record["samples"]}


def made_for(run: TinyRun) -> list[tuple[str, int, int]]:
    """By whom samples were made, in which group, and for which prompt."""
    return [(r["by"], int(group), prompt) for r in run.records("produced") for group, prompt in r["prompts"].items()]


def told(run: TinyRun, kind: str) -> set[str]:
    """Names of the episodes that events of a kind are about, without the number of the attempt."""
    names = (str(event["episode"]).partition("+")[0] for event in run.events(kind))
    return {name for name in names if not name.startswith("held-out")}


def check(run: TinyRun) -> None:
    """No sample was trained twice, by the trainer's records, the queue's account and what the env role says it made."""
    check_account(run, STEPS, BATCH)
    digests = made(run)
    for record in steps_that_count(run.records("step")).values():
        assert [digests[key] for key in record["keys"]] == record["digests"]
    account = run.events("queue_account")[-1]
    assert account["prompts_trained_twice"] == account["prompts_retired"] == 0
    when = [record["when"] for record in run.records("evaluation")]
    assert (when[0], when[-1]) == ("before", "after")


def players(run: TinyRun) -> list[str]:
    """Incarnations of the env role that have played episodes."""
    return [event["by"] for event in run.events("first_work") if event["by"].startswith("env/")]


def test_nothing_is_trained_twice_and_what_was_lost_is_played_again(run: TinyRun) -> None:
    run.until("a step", lambda: run.last_step() >= 1)

    kill_in_the_middle(run, "gateway/0")
    run.until("episodes that were lost", lambda: len(told(run, "episode_lost")) >= HELD)
    run.until("all of them, made", lambda: told(run, "episode_lost") <= made(run).keys())

    kill_a_reward_worker(run)
    (failed,) = run.until("the episode that failed", lambda: told(run, "environment_failed"))
    run.until("it, made again", lambda: failed in made(run))
    counted = lambda kind: sum(record[kind] for record in run.records("env"))  # noqa: E731
    run.until("all losses, counted", lambda: counted("lost") == len(run.events("episode_lost")) and counted("failed"))
    assert counted("failed") == 1

    kill_in_the_middle(run, "env/0")
    run.until("another env role", lambda: len(players(run)) == 2)
    assert run.last_step() < STEPS - 2, "the deaths came too late to matter"
    assert run.wait() == 0, run.text()

    check(run)
    killed = [event["slot"] for event in run.events("slot_exited") if event["diagnosis"]["signal"] == "SIGKILL"]
    assert killed == ["gateway/0", "env/0"]
    (lost,), (failure,) = run.events("reward_worker_lost"), run.events("environment_failed")
    assert "signal 9" in lost["reason"] and "signal 9" in failure["why"]
    # What the dead env role had begun others got: the missing members of its groups, or their prompts.
    first, second = players(run)
    left = {event["group"] for event in run.events("group_reopened") if event["holder"] == first}
    returned = {event["prompt"] for event in run.events("group_ended") if event["group"] in left}
    of_group = {group: prompt for _, group, prompt in made_for(run)}
    begun = returned | {of_group[group] for group in left & of_group.keys()}
    assert begun and begun <= {prompt for by, _, prompt in made_for(run) if by == second}
    run.gone(run.run_id())
