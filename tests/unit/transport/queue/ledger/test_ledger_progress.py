"""What was lost and why, when that ends a run, and items that are retired."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from ledger_driver import ENGINE, JUDGE, TASKS, TRAINER, make, policy, started, step

from relax_rt.transport.queue.ledger import admission
from relax_rt.transport.queue.ledger import events as ev
from relax_rt.transport.queue.ledger.failures import MAX_CAUSES, report
from relax_rt.transport.queue.ledger.messages import Failure, ProgressReport, Ticket
from relax_rt.transport.queue.ledger.policy import LedgerPolicy, QueueLimits
from relax_rt.transport.rpc.errors import Refused

RULES: dict[str, Any] = {"failed_groups": 6, "failed_prompts": 3, "failures_per_prompt": 2, "item_timeouts": 2}
ERROR = "score raised ValueError: bad answer 17 at /home/me/reward.py:12"
LATE = "score did not return within reward.timeout_s = 3 s"


class Queue:
    """A driver with groups of two that fail or succeed at the task reward."""

    def __init__(self, **changes: Any) -> None:
        self.d, self.version = started(prompts_per_step=2, **{**RULES, **changes})
        self.steps = 0

    @property
    def report(self) -> ProgressReport:
        return report(self.d.ledger.core)

    def scored(
        self, failing: Sequence[int] = (0, 1), *, reason: str = ERROR, late: bool = False, item: str = ""
    ) -> Ticket:
        """Make one group, or what is missing of it, and score it; these members fail."""
        (ticket,) = make(self.d, self.version)
        batch = self.d.take(JUDGE, "reward", samples=16)
        keys = [info.key for info in batch.samples]
        failures = [Failure(key, reason, late, item, f"about {item}") for key in keys if key.member in failing]
        good = [failure.key for failure in failures]
        puts = self.d.columns(batch, "reward", without=good)
        self.d.call(JUDGE, ev.CompleteLease(batch.lease, puts, failures))
        return ticket

    def fails(self, prompts: int = 1, **how: Any) -> None:
        """So many prompts fail until they are given up."""
        for _ in range(prompts * RULES["failures_per_prompt"]):
            self.scored(**how)

    def trains(self) -> None:
        self.scored(failing=())
        self.scored(failing=())
        self.steps += 1
        batch = self.d.take(TRAINER, "train", groups=2)
        self.version = self.d.trained(TRAINER, batch, self.steps, self.version)


def test_groups_that_fail_in_a_row_are_counted_up_to_the_end_of_the_run() -> None:
    q = Queue()
    q.fails(prompts=2)
    assert (q.report.failed_groups, q.report.prompts, q.report.ended) == (4, 2, False)
    q.fails(prompts=1)
    assert (q.report.failed_groups, q.report.prompts, q.report.ended) == (6, 3, True)
    (loss,) = q.report.losses
    assert (loss.task, loss.where, loss.members) == ("reward", "/home/me/reward.py:12", 12)
    assert "ValueError: bad answer 17" in loss.cause and loss.prompts == 3 and not loss.partial
    assert q.d.ledger.audit() == []
    q.d.check_replay()


def test_the_row_that_ends_a_run_stays_as_long_as_it_was_and_losses_are_counted_on() -> None:
    q = Queue()
    q.fails(prompts=3)
    assert q.report.ended and q.report.failed_groups == 6
    q.fails(prompts=2)
    account = q.d.ledger.account()
    assert q.report.ended and q.report.failed_groups == 6 and account["groups_failed"] == 10
    assert q.report.losses[0].members == account["failed"] == 20
    # A group that becomes whole before the trainer has asked begins a new row.
    q.trains()
    q.scored()
    assert (q.report.failed_groups, q.report.ended) == (1, False)
    q.d.check_replay()


def test_a_loss_names_its_item_and_counts_it_once_however_often_it_comes() -> None:
    q = Queue(failures_per_prompt=1)
    for item in ("a", "b", "a"):
        q.scored(item=item)
    (loss,) = q.report.losses
    assert (loss.item, loss.about, loss.prompts, loss.groups) == ("a", "about a", 2, 3)
    q.d.check_replay()


def test_one_member_that_always_fails_counts_with_the_end_of_its_group() -> None:
    q = Queue(failures_per_prompt=3)
    q.scored([1])
    q.scored([1])
    assert q.report.failed_groups == 0, "its sibling is there, and it is made again"
    q.scored([1])
    assert q.report.failed_groups == 1
    assert q.report.losses[0].partial


def test_samples_that_get_through_are_counted_by_task() -> None:
    q = Queue()
    q.scored([1])
    assert q.d.ledger.state.progress.passed == {"": 2, "reward": 1}
    q.d.check_replay()


def test_too_few_prompts_end_nothing() -> None:
    q = Queue(failures_per_prompt=100, failed_groups=6)
    for _ in range(50):
        q.scored()
    assert q.report.failed_groups == 50 and q.report.prompts == 1 and not q.report.ended


@pytest.mark.parametrize("between", ["trained", "whole", "filtered"])
def test_a_group_that_is_whole_breaks_the_row(between: str) -> None:
    q = Queue()
    q.fails(prompts=2)
    if between == "trained":
        q.trains()
    else:
        q.scored(failing=())
        if between == "filtered":
            batch = q.d.take(TRAINER, "train", groups=2, at_least=1)
            q.d.call(TRAINER, ev.FilterGroups(batch.lease, [batch.samples[0].key.group], "zero_variance: equal"))
    assert q.report.failed_groups == 0 and q.report.losses[0].members == 8, "what was lost is not forgotten"
    q.fails(prompts=2)
    assert not q.report.ended
    q.fails(prompts=1)
    assert q.report.ended


@pytest.mark.parametrize("how", ["drop", "shrink"])
def test_the_other_policies_for_failed_members_count_too(how: str) -> None:
    q = Queue(on_failed_member=how, min_group=2, failures_per_prompt=100, failed_prompts=1)
    for _ in range(RULES["failed_groups"]):
        q.scored([0])
    assert q.report.ended


def test_members_that_cannot_be_made_and_killed_consumers_count_in_the_same_account() -> None:
    q = Queue(failed_groups=3)
    (ticket,) = q.d.admit(ENGINE, q.version).tickets
    q.d.call(ENGINE, ev.ReleaseGroups([ticket.group], "the environment raised KeyError at game.py:3", failed=True))
    assert q.report.failed_groups == 1
    (first,) = make(q.d, q.version)
    assert first.prompt == ticket.prompt
    for _ in range(3):
        q.d.take(JUDGE, "reward", samples=2)
        q.d.tick(1000)
    assert q.report.failed_groups == 2
    assert {(loss.task, loss.where) for loss in q.report.losses} == {("", "game.py:3"), ("reward", "")}
    assert any("3 consumers of task reward ended" in loss.cause for loss in q.report.losses)
    assert q.d.ledger.audit() == []
    q.d.check_replay()


def test_what_one_line_raises_is_one_cause_and_causes_are_bounded() -> None:
    q = Queue(failures_per_prompt=10_000)
    for number in range(8):
        q.scored(reason=f"KeyError: 'row {number}' at /home/me/reward.py:7")
    assert [loss.where for loss in q.report.losses] == ["/home/me/reward.py:7"]
    assert q.report.losses[0].example.startswith("KeyError: 'row 7'")
    for number in range(2 * MAX_CAUSES):
        q.scored(reason=f"ValueError at /home/me/reward.py:{100 + number}")
    assert len(q.report.losses) == MAX_CAUSES
    assert q.report.losses[0].where == "/home/me/reward.py:7", "the most frequent stays"


def test_a_loss_is_reported_at_once_and_then_at_doublings_or_every_few_seconds() -> None:
    q, told = Queue(failures_per_prompt=10_000), []
    real = q.d.ledger.core.log

    def note(kind: str, **fields: Any) -> None:
        real(kind, **fields)
        if kind == "members_lost":
            told.append(fields)

    q.d.ledger.core.log = note  # type: ignore[method-assign]
    for _ in range(32):
        q.scored()
    assert [fields["members"] for fields in told] == [1, 2, 4, 8, 16, 32, 64]
    assert told[0]["where"] == "/home/me/reward.py:12" and told[0]["most"] == 6
    q.d.now += 60
    q.scored()
    assert told[-1]["members"] == 65
    q.d.now -= 59
    q.d.own(ev.ReportFailures(0.0))
    assert told[-1]["members"] == 66, "also where a reboot set the clock back"
    q.d.check_replay()


def test_a_run_that_is_started_again_counts_anew_and_keeps_its_retired_items() -> None:
    q = Queue()
    late_twice(q)
    q.trains()
    q.fails(prompts=3)
    assert q.report.ended and q.report.losses
    q.d.reopen("run-2")
    assert (q.report.failed_groups, q.report.ended, q.report.losses) == (0, False, [])
    assert [one.item for one in q.report.retired] == ["a"]
    q.d.check_replay()


def test_an_item_whose_group_outlives_a_start_of_the_run_is_retired_all_the_same() -> None:
    q = Queue(failures_per_prompt=100)
    rules = policy(prompts_per_step=2, **{**RULES, "failures_per_prompt": 100})
    q.d.own(ev.ConfigureQueue(rules, QueueLimits(durable=True)))
    q.trains()
    bad, other = make(q.d, q.version, groups=2)
    q.d.reopen("run-2")
    for _ in range(2):
        batch = q.d.take(JUDGE, "reward", samples=16)
        keys = [info.key for info in batch.samples if info.key.group == bad.group]
        puts = q.d.columns(batch, "reward", without=keys)
        q.d.call(JUDGE, ev.CompleteLease(batch.lease, puts, [Failure(key, LATE, True, "a") for key in keys]))
        if bad.group in q.d.ledger.state.reopened:
            (again,) = q.d.admit(ENGINE, q.version).tickets
            q.d.generate(ENGINE, again, q.version)
    assert other.group in q.d.ledger.state.groups and [one.item for one in q.report.retired] == ["a"]


def test_a_broker_that_is_killed_goes_on_counting() -> None:
    q = Queue()
    q.fails(prompts=2)
    q.d.restart()
    assert q.report.failed_groups == 4
    q.fails(prompts=1)
    assert q.report.ended


def late_twice(q: Queue, item: str = "a", *, others: bool = True, late: bool = True) -> Ticket:
    """Let a group of the item be late as a whole twice, while another group is scored, or is late as well."""
    bad, _ = make(q.d, q.version, groups=2)
    for _ in range(2):
        batch = q.d.take(JUDGE, "reward", samples=16)
        keys = [info.key for info in batch.samples if not others or info.key.group == bad.group]
        failures = [Failure(key, LATE, late, item if key.group == bad.group else "b", "12 + 1") for key in keys]
        puts = q.d.columns(batch, "reward", without=keys)
        q.d.call(JUDGE, ev.CompleteLease(batch.lease, puts, failures))
        for ticket in q.d.admit(ENGINE, q.version, 2).tickets if bad.group in q.d.ledger.state.reopened else []:
            q.d.generate(ENGINE, ticket, q.version)
    return bad


def test_an_item_that_is_late_while_others_are_scored_is_retired_for_good() -> None:
    q = Queue(failures_per_prompt=100)
    bad = late_twice(q)
    (one,) = q.report.retired
    assert (one.item, one.about, one.task, one.timeouts) == ("a", "12 + 1", "reward", 2) and "timeout_s" in one.reason
    assert bad.group not in q.d.ledger.state.groups
    assert q.d.ledger.account()["items_retired"] == 1 and q.d.ledger.audit() == []
    # Whoever gets the item again is told by the revision, and gives it back for good.
    answer = q.d.admit(ENGINE, q.version)
    assert answer.retired == q.report.revision == 1
    (ticket,) = answer.tickets
    q.d.call(ENGINE, ev.SkipGroups([ticket.group]))
    account = q.d.ledger.account()
    assert (account["dropped(retired)"], account["prompts_skipped"]) == (2, 1) and q.d.ledger.audit() == []
    q.d.check_replay()
    # And it can be taken back.
    q.d.own(ev.ReinstateItems(["a", "unknown"]))
    assert not q.report.retired and q.report.revision == 2
    q.d.check_replay()


def test_each_answer_to_an_admission_names_the_revision_of_the_retired_items() -> None:
    q = Queue(failures_per_prompt=100)
    late_twice(q)
    unknown = q.d.admit(ENGINE, q.version + 100)
    assert "is not known to the queue yet" in unknown.waiting_on and unknown.retired == 1
    q.d.ledger.state.trainer_version = None
    unannounced = admission.admit(q.d.ledger.core, ENGINE, ev.RequestTickets(q.version, 1))
    assert "has not announced its weights" in unannounced.waiting_on and unannounced.retired == 1


def test_groups_of_an_item_that_are_under_way_when_it_is_retired_end_with_it() -> None:
    q = Queue(failures_per_prompt=100)
    first, other, second = (make(q.d, q.version)[0] for _ in range(3))
    for _ in range(2):
        batch = q.d.take(JUDGE, "reward", samples=16)
        keys = [info.key for info in batch.samples if info.key.group != other.group]
        failures = [Failure(key, LATE, True, "a") for key in keys]
        puts = q.d.columns(batch, "reward", without=keys)
        q.d.call(JUDGE, ev.CompleteLease(batch.lease, puts, failures))
        for ticket in q.d.admit(ENGINE, q.version, 2).tickets:
            q.d.generate(ENGINE, ticket, q.version)
    assert {first.group, second.group}.isdisjoint(q.d.ledger.state.groups)
    assert len(q.report.retired) == q.report.revision == 1
    assert q.d.ledger.account()["items_retired"] == 1 and q.d.ledger.audit() == []


def scored_late(q: Queue, *late: Ticket, item: str = "a") -> None:
    """Score all that is there; these groups are late as a whole, and made again."""
    batch, groups = q.d.take(JUDGE, "reward", samples=16), {ticket.group for ticket in late}
    keys = [info.key for info in batch.samples if info.key.group in groups]
    puts = q.d.columns(batch, "reward", without=keys)
    q.d.call(JUDGE, ev.CompleteLease(batch.lease, puts, [Failure(key, LATE, True, item) for key in keys]))
    made_again(q)


def made_again(q: Queue) -> None:
    if reopened := len(q.d.ledger.state.reopened):
        for ticket in q.d.admit(ENGINE, q.version, reopened).tickets:
            q.d.generate(ENGINE, ticket, q.version)


def test_timeouts_of_an_item_at_two_tasks_do_not_add_up() -> None:
    q = Queue(failures_per_prompt=100)
    (bad,) = q.d.admit(ENGINE, q.version).tickets
    make(q.d, q.version)
    q.d.reward_all(JUDGE)
    q.d.call(ENGINE, ev.ReleaseGroups([bad.group], "the reset took too long", failed=True, late=True, item="a"))
    made_again(q)
    scored_late(q, bad)
    assert not q.report.retired
    scored_late(q, bad)
    assert [(one.item, one.task, one.timeouts) for one in q.report.retired] == [("a", "reward", 2)]
    q.d.check_replay()


def test_an_item_that_gets_through_begins_its_timeouts_anew() -> None:
    q = Queue(failures_per_prompt=100, item_timeouts=3)
    first, _ = make(q.d, q.version, groups=2)
    scored_late(q, first)
    scored_late(q)
    second, _ = make(q.d, q.version, groups=2)
    scored_late(q, second)
    scored_late(q, second)
    assert not q.report.retired
    scored_late(q, second)
    assert [one.timeouts for one in q.report.retired] == [3]
    q.d.check_replay()


def test_a_service_that_is_late_with_everything_retires_nothing() -> None:
    q = Queue(failures_per_prompt=100)
    late_twice(q, others=False)
    assert not q.report.retired and q.report.losses[0].late


def scored_by_group(q: Queue, late: dict[int, str]) -> None:
    """Score group after group; those that are late as a whole, by the id of their item, come first."""
    batches = []
    while (batch := q.d.take(JUDGE, "reward", samples=2)).samples:
        batches.append(batch)
    for batch in sorted(batches, key=lambda batch: (batch.samples[0].key.group not in late, batch.lease)):
        keys = [info.key for info in batch.samples if info.key.group in late]
        puts = q.d.columns(batch, "reward", without=keys)
        failures = [Failure(key, LATE, True, late[key.group]) for key in keys]
        q.d.call(JUDGE, ev.CompleteLease(batch.lease, puts, failures))
    made_again(q)


def test_a_service_that_is_away_after_it_worked_retires_nothing() -> None:
    q = Queue(failures_per_prompt=100)
    tickets = q.d.admit(ENGINE, q.version, 3).tickets
    make(q.d, q.version)
    q.d.reward_all(JUDGE)
    for ticket in tickets:
        q.d.generate(ENGINE, ticket, q.version)
    # One group got through after these were given out. From here on the service is away.
    late = {ticket.group: item for ticket, item in zip(tickets, "abc", strict=True)}
    scored_by_group(q, late)
    scored_by_group(q, late)
    assert not q.report.retired
    # It is back: the others get through, while an attempt that began before is late.
    (slow, item), *_ = late.items()
    batches = [q.d.take(JUDGE, "reward", samples=2) for _ in late]
    for batch in sorted(batches, key=lambda batch: batch.samples[0].key.group == slow):
        keys = [info.key for info in batch.samples if info.key.group == slow]
        puts = q.d.columns(batch, "reward", without=keys)
        q.d.call(JUDGE, ev.CompleteLease(batch.lease, puts, [Failure(key, LATE, True, item) for key in keys]))
    assert not q.report.retired and q.d.ledger.audit() == []
    q.d.check_replay()


def test_two_items_that_are_always_late_are_both_retired() -> None:
    q = Queue(failures_per_prompt=100)
    late = {ticket.group: item for ticket, item in zip(make(q.d, q.version, groups=2), "ab", strict=True)}
    for _ in range(3):
        make(q.d, q.version)
        scored_by_group(q, late)
    assert [(one.item, one.timeouts) for one in q.report.retired] == [("a", 2), ("b", 2)]


def test_an_item_that_holds_up_all_others_is_retired() -> None:
    """All that got through since its group was given out did so before it was late first."""
    q = Queue(failures_per_prompt=100)
    (bad,) = q.d.admit(ENGINE, q.version).tickets
    make(q.d, q.version)
    q.d.reward_all(JUDGE)
    q.d.generate(ENGINE, bad, q.version)
    scored_by_group(q, {bad.group: "a"})
    assert not q.report.retired
    scored_by_group(q, {bad.group: "a"})
    assert [one.item for one in q.report.retired] == ["a"]


@pytest.mark.parametrize(
    ("changes", "late"),
    [({"item_timeouts": 0}, True), ({"kept_items": ("a",)}, True), ({}, False)],
    ids=["switched off", "kept by the user", "not late"],
)
def test_what_is_not_retired(changes: dict[str, Any], late: bool) -> None:
    q = Queue(failures_per_prompt=100, **changes)
    late_twice(q, late=late)
    assert not q.report.retired


def test_an_item_that_the_user_keeps_is_taken_back_when_the_run_starts() -> None:
    q = Queue(failures_per_prompt=100)
    late_twice(q)
    assert [one.item for one in q.report.retired] == ["a"]
    q.d.own(ev.ConfigureQueue(policy(prompts_per_step=2, **RULES, kept_items=("a",)), q.d.ledger.state.limits))
    assert not q.report.retired
    q.d.check_replay()


def test_a_row_of_skipped_groups_is_as_barren_as_one_of_failures() -> None:
    q = Queue()
    for _ in range(RULES["failed_groups"]):
        (ticket,) = q.d.admit(ENGINE, q.version).tickets
        q.d.call(ENGINE, ev.SkipGroups([ticket.group]))
    assert q.report.ended and q.d.ledger.audit() == []


@pytest.mark.parametrize(
    "wrong",
    [{"failed_groups": -1}, {"item_timeouts": -1}, {"failed_prompts": 0}, {"failed_groups": 3, "failed_prompts": 4}],
)
def test_rules_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(Refused):
        policy(**wrong).check()


def test_journals_of_before_these_rules_are_replayed_without_them() -> None:
    old = msgspec.to_builtins(LedgerPolicy(tasks=TASKS, group_size=2, prompts_per_step=2))
    for name in ("failed_groups", "failed_prompts", "item_timeouts", "kept_items"):
        del old[name]
    found = msgspec.convert(old, LedgerPolicy)
    assert (found.failed_groups, found.item_timeouts) == (0, 0)
    d, version = started(failures_per_prompt=2)
    q = Queue.__new__(Queue)
    q.d, q.version, q.steps = d, version, 0
    q.fails(prompts=200)
    assert not q.report.ended and q.report.failed_groups == 400


def test_a_step_that_trains_nothing_frees_its_room_and_leaves_the_weights() -> None:
    """An empty step: it counts, its samples are used up, and admission goes on under the same version."""
    d, version = started(prompts_per_step=2, max_staleness=0)
    for number in range(1, 4):
        make(d, version, groups=2)
        d.reward_all(JUDGE)
        batch = d.take(TRAINER, "train", groups=2)
        assert batch.samples, batch.waiting_on
        d.skip(TRAINER, batch, number, d.weights())
        assert d.ledger.state.step == number and d.ledger.state.trainer_version == version
    make(d, version, groups=2)
    assert step(d, 4, version) > version and d.ledger.audit() == []
    assert d.ledger.account()["skipped"] == 12
