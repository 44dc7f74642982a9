"""The queue under SIGKILL, in short (the long form is tools/soak/queue_chaos.py), and what its checker finds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "soak"))

import queue_chaos
import queue_chaos_check as checking
from queue_chaos_journal import FREED, LOST, NOWHERE, QUEUED, Content, Granted, Refusal, Story
from queue_chaos_records import (
    Again,
    Checkpoint,
    Fallback,
    Joined,
    Life,
    Made,
    Making,
    Put,
    Read,
    Record,
    Seen,
    Step,
    Weights,
)

from relax_rt.transport.queue.ledger.messages import SampleKey, VersionSpan
from relax_rt.transport.rpc.identity import Incarnation

ENGINE, TRAINER = Incarnation("rollout/0", 1), Incarnation("trainer/0", 2)
LEASE, SCORE = 100, "score"


@pytest.mark.chaos
def test_the_queue_keeps_its_word_while_everything_around_it_is_killed(tmp_path: Path) -> None:
    report = queue_chaos.run(queue_chaos.Settings(seconds=12.0, mean_s=0.8, seed=5, stall_s=0.0), tmp_path)
    assert report.violations == []
    assert report.numbers["steps"] > 0 and report.numbers["broker_outages"] > 0  # type: ignore[operator]


# --- the checker: a small run in which all is well, and then one thing is not


def digest(key: SampleKey) -> str:
    return f"digest of {key}"


def keys(*groups: int) -> list[SampleKey]:
    return [SampleKey(group, member) for group in groups for member in range(2)]


def read_of(step: int) -> Read:
    """The batch of a step: group 1 in the first, and so on."""
    return Read(step, "train", LEASE + step, [seen(key, step) for key in keys(step)], version=step)


def seen(key: SampleKey, version: int) -> Seen:
    return Seen(key, digest(key), prompt=key.group, staleness=version - 1, score=SCORE, due=SCORE)


def evidence() -> checking.Evidence:
    """Two steps of one group each, both made at version 1; a third group is in the queue."""
    puts = keys(1, 2, 3)
    engine: list[Record] = [
        Joined(0, "rollout/0", 1, 1),
        Making(0.1, [Made(key, digest(key), [VersionSpan(0, 9, 1, 1)]) for key in puts]),
        Put(0.1, 0.2, puts),
    ]
    trainer: list[Record] = [
        Joined(0, "trainer/0", 2, 2),
        Weights(0, 1, 0, changed=False),
        Fallback(0, 0, 0, 1, deliberate=False),
    ]
    for step in (1, 2):
        trainer += [read_of(step), Weights(step, step + 1, step, changed=True)]
        trainer.append(Step(step, step, step, LEASE + step, step + 1, skipped=False))
    trainer.append(Checkpoint(3, 2, 3))
    account = {"freed": 4, "ready": 2, "trained": 0, "samples_issued": 6, "trained_twice": 0}
    story = Story(
        contents=[Content(ENGINE, key, QUEUED if key.group == 3 else FREED) for key in puts],
        puts={("rollout/0", 1, key): 1 for key in puts},
        leases={
            LEASE + step: Granted("train", TRAINER, {key: puts.index(key) for key in keys(step)}) for step in (1, 2)
        },
        path={1: [1], 2: [2]},
        account=dict(account),
    )
    lives = [Life("rollout/0", 1, engine), Life("trainer/0", 1, trainer)]
    return checking.Evidence(lives, story, account, 1, 2, 1, begin=0.0, end=2.5, stall_s=1.5)


def last(life: Life, kind: type[Record]) -> Record:
    return [record for record in life.records if isinstance(record, kind)][-1]


def forget_put(e: checking.Evidence) -> None:
    del e.story.puts["rollout/0", 1, SampleKey(3, 1)]


def forget_lease(e: checking.Evidence) -> None:
    del e.story.leases[LEASE + 2]


def vanish(e: checking.Evidence) -> None:
    e.story.contents[0].fate = NOWHERE


def damage_journal(e: checking.Evidence) -> None:
    e.story.error = "record 7: it changes nothing"


def train_again(e: checking.Evidence) -> None:
    read = last(e.lives[1], Read)
    read.samples[:] = read_of(1).samples


def train_prompt_again(e: checking.Evidence) -> None:
    for sample in last(e.lives[1], Read).samples:
        sample.prompt = 1


def count_twice(e: checking.Evidence) -> None:
    e.account["trained_twice"] = e.story.account["trained_twice"] = 2


def repeat_step(e: checking.Evidence) -> None:
    last(e.lives[1], Step).step = 1


def train_half_a_group(e: checking.Evidence) -> None:
    last(e.lives[1], Read).samples.pop()


def other_path(e: checking.Evidence) -> None:
    e.story.path[2] = [3]


def over_stale(e: checking.Evidence) -> None:
    e.max_staleness = 0


def tell_less(e: checking.Evidence) -> None:
    last(e.lives[1], Read).samples[0].staleness = 0


def refuse_fresh(e: checking.Evidence) -> None:
    e.story.refusals.append(Refusal(3, 3, {2}))


def lose_what_no_checkpoint_had(e: checking.Evidence) -> None:
    e.story.contents[4].fate = LOST


def read_other_bytes(e: checking.Evidence) -> None:
    last(e.lives[1], Read).samples[0].digest = "other bytes"


def use_memory_again(e: checking.Evidence) -> None:
    e.lives[1].records.append(Again(3, LEASE + 2, SampleKey(2, 0), digest(SampleKey(2, 0)), "other bytes"))


def wrong_reward(e: checking.Evidence) -> None:
    last(e.lives[1], Read).samples[0].score = "other score"


def hear_the_dead(e: checking.Evidence) -> None:
    e.story.unheard.append("PutColumns of rollout/0#1, which was dead")


def hear_the_overtaken(e: checking.Evidence) -> None:
    e.lives.append(Life("rollout/0", 2, [Joined(0.05, "rollout/0", 3, 3)]))


def same_epoch(e: checking.Evidence) -> None:
    e.lives.append(Life("rollout/0", 2, [Joined(5, "rollout/0", 1, 3)]))


def miscount(e: checking.Evidence) -> None:
    e.account["ready"] = e.story.account["ready"] = 1


def account_differs(e: checking.Evidence) -> None:
    e.account["freed"] += 1


def bad_audit(e: checking.Evidence) -> None:
    e.story.audit.append("6 samples were issued, 7 are accounted for")


def stand_still(e: checking.Evidence) -> None:
    e.end = 5.0


def no_step(e: checking.Evidence) -> None:
    e.begin = e.end = 2.25


def crash(e: checking.Evidence) -> None:
    e.crashes.append("broker/0 ended by itself with 1")


def leave_memory(e: checking.Evidence) -> None:
    e.leftovers.append("/dev/shm/rlxq-1 is left over")


def test_the_checker_finds_nothing_where_all_is_well() -> None:
    assert checking.check(evidence()) == []


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("lost", forget_put),
        ("lost", forget_lease),
        ("lost", vanish),
        ("lost", damage_journal),
        ("twice", train_again),
        ("twice", train_prompt_again),
        ("twice", count_twice),
        ("steps", repeat_step),
        ("steps", train_half_a_group),
        ("steps", other_path),
        ("staleness", over_stale),
        ("staleness", tell_less),
        ("refused", refuse_fresh),
        ("refused", lose_what_no_checkpoint_had),
        ("digest", read_other_bytes),
        ("digest", use_memory_again),
        ("digest", wrong_reward),
        ("fence", hear_the_dead),
        ("fence", hear_the_overtaken),
        ("fence", same_epoch),
        ("counts", miscount),
        ("counts", account_differs),
        ("counts", bad_audit),
        ("progress", stand_still),
        ("progress", no_step),
        ("leftovers", crash),
        ("leftovers", leave_memory),
    ],
)
def test_the_checker_finds_what_is_wrong(name: str, spoil: Callable[[checking.Evidence], None]) -> None:
    spoiled = evidence()
    spoil(spoiled)
    assert name in {violation.check for violation in checking.check(spoiled)}


@pytest.mark.parametrize("skipped", [False, True])
def test_an_undone_step_may_lose_what_it_or_its_checkpoint_freed(skipped: bool) -> None:
    e = evidence()
    trainer = e.lives[1]
    if skipped:
        trainer.records.pop()
        last(trainer, Step).skipped = True
    trainer.records += [Weights(4, 4, 2, changed=False), Fallback(4, 4, 1, 4, deliberate=not skipped)]
    for content in e.story.contents[2:4]:
        content.fate = LOST
    e.story.path = {1: [1]}
    e.story.account = e.account = {**e.account, "freed": 2, "lost": 2}
    assert checking.check(e) == []


def test_distances_are_counted_on_the_tree() -> None:
    records: list[Record] = [
        Weights(0, version, parent, changed)
        for version, parent, changed in [(1, 0, False), (2, 1, True), (3, 2, True), (4, 2, False), (5, 4, True)]
    ]
    tree = checking.Tree([Life("trainer/0", 1, records)])
    assert [tree.distance(5, version) for version in (0, 1, 2, 3, 4, 5)] == [2, 2, 1, 2, 1, 0]
    assert tree.distance(5, 6) == float("inf")
