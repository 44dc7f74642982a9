"""Unfinished sequences survive the rollout that samples them: real processes, real model, really killed and stopped."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import xxhash
from tiny_run import TinyRun

from relax_rt.transport.base.journal import Journal
from relax_rt.transport.queue.ledger import events as ev
from relax_rt.transport.queue.ledger.events import JournalEntry
from relax_rt.transport.queue.ledger.messages import PartialChunk, SampleKey

pytest.importorskip("torch")
pytestmark = pytest.mark.integration

EVERY = 16
JOB = Path(__file__).parent.parent / "tiny_job"
REWARD = "def right(completion, answer):\n    return len(completion) % 3 / 2\n"
"""What is rewarded is of no matter, but members must differ: where none has an advantage, nothing is computed."""
LONG = {
    # Nearly uniform over a hundred tokens, one of which ends a sequence; weights as good as still, so that the trainer
    # finds the behaviour log-probabilities again whatever version a token is of.
    "sampling.temperature": 10.0,
    "sampling.max_new_tokens": 400,
    "algorithm.learning_rate": 1e-9,
    "algorithm.group_size": 4,
    "algorithm.prompts_per_step": 4,
    "algorithm.max_staleness": 2,
    "checkpoint.every_steps": 4,
    "evaluation.items": 8,
    "evaluation.temperature": 0,
    "roles.rollout.count": 2,
    "roles.rollout.groups_in_flight": 1,  # fewer than the trainer takes, so that there is always one in the making
    "roles.rollout.journal_every_tokens": EVERY,
}


@pytest.fixture
def run(tmp_path: Path, runs: list[TinyRun]) -> TinyRun:
    shutil.copytree(JOB, tmp_path / "job")
    (tmp_path / "job" / "reward.py").write_text(REWARD)
    runs.append(TinyRun(tmp_path / "run", tmp_path / "job" / "roles.toml", **LONG, **{"algorithm.steps": 18}))
    return runs[-1]


class Held:
    """What the queue's journal says was marked, member by member, and how much of it when a producer ended."""

    def __init__(self, folder: Path, copy: Path) -> None:
        shutil.copytree(folder, copy)
        self.marks: dict[str, bytearray] = defaultdict(bytearray)
        self.logprobs: dict[str, bytearray] = defaultdict(bytearray)
        self.versions: dict[str, set[int]] = defaultdict(set)
        self.when_ended: list[dict[str, int]] = []
        recovered = Journal(copy).recover()
        assert not recovered.snapshot, "the run is too long for this test: its first events are in a snapshot"
        for _, payload in recovered.records:
            event = msgspec.msgpack.decode(payload, type=JournalEntry).event
            if isinstance(event, ev.SavePartials):
                for mark in event.chunks:
                    self._add(mark)
            elif isinstance(event, ev.ProcessExited | ev.ReleaseGroups | ev.Lapse):
                self.when_ended.append({key: len(tokens) // 4 for key, tokens in self.marks.items()})

    def _add(self, mark: PartialChunk) -> None:
        for kept, new in ((self.marks, mark.tokens), (self.logprobs, mark.logprobs)):
            assert mark.start * 4 <= len(kept[str(mark.key)])
            kept[str(mark.key)][mark.start * 4 :] = new
        self.versions[str(mark.key)].update(span.version for span in mark.versions)

    def digest(self, key: str, count: int) -> str:
        """Of the first tokens and their log-probabilities."""
        digest = xxhash.xxh3_64(bytes(self.marks[key][: count * 4]))
        digest.update(bytes(self.logprobs[key][: count * 4]))
        return digest.hexdigest()


def check_gone_on_with(run: TinyRun, tmp_path: Path) -> int:
    """Every sample that another rollout began has the journaled tokens; answers with how many there are."""
    held = Held(run.run_dir / "queue", tmp_path / "journal")
    for event in run.events("group_resumed"):
        names = [str(SampleKey(event["group"], member)) for member in event["members"]]
        told = dict(zip(names, event["tokens"], strict=True))
        assert any(all(then.get(name, 0) == count for name, count in told.items()) for then in held.when_ended), told
    found = 0
    for record in run.records("produced"):
        versions = {key: set(of) for key, _, of in record["samples"]}
        for key, (count, digest) in record.get("resumed", {}).items():
            assert held.digest(key, count) == digest, f"{key}: its first {count} tokens are not those marked"
            assert held.versions[key] <= versions[key]
            found += 1
    for step in run.records("step"):
        # An independent word on every log-probability, those of tokens taken over among them.
        assert 0 < step["ratio_max_deviation"] < 2e-3, step
    account = run.events("queue_account")[-1]
    assert account["trained_twice"] == 0 and account.get("dropped(producer gone)", 0) < account["freed"]
    return found


def kill_until(run: TinyRun, signum: int, what: str, happened: Callable[[], bool]) -> None:
    """End rollout/0 in mid-generation, again and again until it has happened."""

    def struck() -> bool:
        life = next(iter(run.processes_of("rollout/0")[::-1]), {})
        if life.get("ready") and not life.get("exited") and not happened():
            time.sleep(0.4)  # it has just begun, and may have no work yet
            with suppress(ProcessLookupError):
                os.kill(life["pid"], signum)
            time.sleep(1.0)
        return happened()

    run.until("a step", lambda: bool(run.records("step")))
    run.until(what, struck)


def test_a_killed_rollout_costs_what_it_sampled_since_its_last_mark(run: TinyRun, tmp_path: Path) -> None:
    run.start()
    # Who goes on with a group may be the next to be killed: what counts is a sample that was made.
    kill_until(
        run,
        signal.SIGKILL,
        "a sample that was gone on with",
        lambda: any(record.get("resumed") for record in run.records("produced")),
    )
    assert run.wait() == 0, run.text()
    assert check_gone_on_with(run, tmp_path) > 0


@pytest.mark.long
def test_a_stopped_rollout_hands_over_all_that_it_sampled(run: TinyRun, tmp_path: Path) -> None:
    run.start()
    what = "groups_handed_over"
    kill_until(run, signal.SIGTERM, what, lambda: any(e["by"].startswith("rollout/0") for e in run.events(what)))
    assert run.wait() == 0, run.text()
    assert check_gone_on_with(run, tmp_path) > 0
    assert next(e["late"] for e in run.events("groups_handed_over") if e["by"].startswith("rollout/0")) == 0
