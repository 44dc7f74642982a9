"""The supervisor's rules, one by one, under an invented clock."""

from __future__ import annotations

from typing import Any

import pytest
from supervisor_bench import Bench, running, spec

from relax_rt.interfaces.agent import Kind
from relax_rt.supervision.protocol import (
    DumpStacks,
    Emit,
    Kill,
    KillRequested,
    RestartRequested,
    RunStarted,
    SlotFinished,
    SlotProgress,
    SlotReady,
    SlotSpawned,
    Start,
    Stop,
    StopRequested,
    Tick,
)
from relax_rt.supervision.supervisor import InvalidTransition
from relax_rt.transport.rpc.errors import Refused


def test_tiers_start_when_lower_ones_are_ready() -> None:
    b = Bench(spec("c/0", tier=30), spec("a/0", tier=10), spec("b/0", tier=20), spec("b/1", tier=20))
    b(RunStarted())
    assert b.of(Start) == ["a/0"]
    b.up("a/0")
    assert b.of(Start) == ["b/0", "b/1"]
    b.up("b/0")
    assert b.of(Start) == []
    b.up("b/1")
    assert b.of(Start) == ["c/0"]


def test_death_of_a_lower_tier_leaves_the_others_alone() -> None:
    b = running(spec("a/0", tier=10), spec("b/0", tier=20))
    b.dies("a/0", after=1)
    assert b.of(Stop) == b.of(Kill) == b.of(Start) == []
    assert (b.state("a/0"), b.state("b/0")) == ("backoff", "ready")
    assert b(Tick(), after=1) and b.of(Start) == ["a/0"]


def test_a_pending_tier_waits_while_a_lower_one_is_down_again() -> None:
    b = Bench(spec("a/0", tier=10), spec("a/1", tier=10), spec("b/0", tier=20))
    b(RunStarted()), b.up("a/0")
    b.dies("a/0")
    b.up("a/1")
    assert b.of(Start) == []
    b(Tick(), after=1), b.up("a/0")
    assert b.of(Start) == ["b/0"]


def test_stop_runs_in_reverse_and_ends_with_the_asked_code() -> None:
    b = running(spec("a/0", tier=10), spec("b/0", tier=20))
    b(StopRequested("Ctrl-C", 130))
    assert b.of(Stop) == ["b/0"]
    b.dies("b/0", "clean")
    assert b.of(Stop) == ["a/0"]
    b.dies("a/0", "clean")
    assert (b.done.exit_code, b.done.reason, b.done.diagnosis) == (130, "Ctrl-C", None)


def test_stop_ends_pending_slots_and_waits_for_a_start_in_progress() -> None:
    b = Bench(spec("a/0", tier=10), spec("b/0", tier=20))
    b(RunStarted())
    b(StopRequested("enough"))
    assert b.of(Stop) == ["a/0"] and b.core.done is None
    b(SlotSpawned("a/0", 1, 77))
    assert b.of(Stop) == ["a/0"], "a process that came to be after the stop is asked to stop as well"
    b.dies("a/0", "clean")
    assert b.done.exit_code == 0


def test_stop_ends_the_wait_for_a_restart() -> None:
    b = running(spec("a/0", backoff_first_s=1), spec("b/0"))
    b.dies("a/0")
    b(StopRequested("enough"))
    b(Tick(), after=1)
    assert b.of(Start) == [] and b.state("a/0") == "ended"


def test_kill_reaches_a_process_that_is_spawned_after_it() -> None:
    b = Bench(spec("a/0"))
    b(RunStarted())
    b(KillRequested("now"))
    assert b.of(Kill) == ["a/0"]
    b(SlotSpawned("a/0", 1, 77))
    assert b.of(Kill) == ["a/0"]


def test_stop_timeout_kills_and_a_second_request_kills_at_once() -> None:
    b = running(spec("a/0", stop_timeout_s=5), spec("b/0", stop_timeout_s=50))
    b(StopRequested("Ctrl-C", 130))
    b(Tick(), after=5)
    assert b.of(Kill) == ["a/0"]
    b(KillRequested("Ctrl-C again", 137))
    assert b.of(Kill) == ["b/0"]
    b.dies("a/0", "killed"), b.dies("b/0", "killed")
    assert (b.done.exit_code, b.done.reason) == (130, "Ctrl-C"), "the first cause counts"


def stopping(**rules: Any) -> Bench:
    b = Bench(spec("a/0", stop_timeout_s=5, drain_timeout_s=60, **rules))
    b(RunStarted()), b.up("a/0"), b(StopRequested("Ctrl-C", 130))
    return b


def test_each_progress_restarts_the_stop_timeout_of_a_draining_role_up_to_a_bound() -> None:
    b = stopping(drains=True)
    for n in range(1, 15):
        b(SlotProgress("a/0", n, detail="writing a checkpoint"), after=4)
        assert b.of(Kill) == [], f"after {b.now} s"
    b(Tick(), after=4)
    assert b.now == 60 and b.of(Kill) == ["a/0"], "no more than drain_timeout_s in all"


def test_status_of_a_stopping_slot_gives_the_time_to_its_kill_with_and_without_progress() -> None:
    b = running(spec("a/0", stop_timeout_s=5, drain_timeout_s=60, drains=True))
    assert (b.view("a/0").kill_s, b.view("a/0").kill_latest_s) == (None, None)
    b(StopRequested("Ctrl-C", 130))
    assert (b.view("a/0").kill_s, b.view("a/0").kill_latest_s) == (5, 60)
    (told,) = [action.fields for action in b.actions if isinstance(action, Emit) and action.kind == "run_draining"]
    assert told["slot_most_s"] == 60
    b(SlotProgress("a/0", 1, detail="writing a checkpoint"), after=4)
    assert (b.view("a/0").kill_s, b.view("a/0").kill_latest_s) == (5, 56)


def test_a_draining_role_without_progress_is_killed() -> None:
    b = stopping(drains=True)
    b(SlotProgress("a/0", 1, detail="writing"), after=4), b(SlotProgress("a/0", 1, detail="writing"), after=4)
    assert b.of(Kill) == []
    b(Tick(), after=1)
    assert b.of(Kill) == ["a/0"]


def test_progress_alone_gives_no_other_role_more_time() -> None:
    b = stopping()
    b(SlotProgress("a/0", 1), after=4)
    b(SlotProgress("a/0", 2), after=1)
    assert b.of(Kill) == ["a/0"]


def test_known_slow_work_while_stopping_is_bounded() -> None:
    b = stopping()
    b(SlotProgress("a/0", 1, extend_s=1000), after=1)
    b(Tick(), after=58)
    assert b.of(Kill) == []
    b(Tick(), after=1)
    assert b.of(Kill) == ["a/0"]


def test_a_role_that_has_finished_gets_no_more_time_for_waiting() -> None:
    b = running(spec("a/0", stop_timeout_s=5, drains=True))
    b(SlotFinished("a/0"))
    b(SlotProgress("a/0", 1, "somebody"), after=4)
    b(SlotProgress("a/0", 1, "somebody"), after=1)
    assert b.of(Kill) == ["a/0"]


def test_a_kill_without_an_exit_is_repeated() -> None:
    b = running(spec("a/0"))
    b(KillRequested("now"))
    b(Tick(), after=10)
    assert b.of(Kill) == ["a/0"]
    assert not any(isinstance(a, Emit) for a in b.actions), "it is told once"


def test_significant_role_that_finishes_ends_the_run_in_order() -> None:
    b = running(spec("reg/0", tier=1, system=True), spec("t/0", tier=20, significant=True), spec("r/0", tier=30))
    b(SlotFinished("t/0"))
    b.dies("t/0", "clean")
    assert b.of(Stop) == ["r/0"]
    b.dies("r/0", "clean")
    assert b.of(Stop) == ["reg/0"]
    b.dies("reg/0", "clean")
    assert b.done.exit_code == 0 and "t/0 has finished" in b.done.reason


def test_the_end_of_a_finished_run_is_named_by_its_job() -> None:
    b = running(spec("t/0", significant=True), finished="all 6 steps are done")
    b(SlotFinished("t/0"))
    b.dies("t/0", "clean")
    assert (b.done.exit_code, b.done.reason) == (0, "all 6 steps are done")


def test_a_finished_role_counts_as_finished_though_its_exit_was_not_clean() -> None:
    b = running(spec("t/0", significant=True))
    b(SlotFinished("t/0"))
    b.dies("t/0", "killed")
    assert b.done.exit_code == 0


@pytest.mark.parametrize(
    ("restart", "kind", "again"),
    [
        ("permanent", "clean", True),
        ("permanent", "exception", True),
        ("transient", "clean", False),
        ("transient", "exception", True),
        ("temporary", "clean", False),
        ("temporary", "exception", False),
    ],
)
def test_restart_classes(restart: str, kind: Kind, again: bool) -> None:
    b = running(spec("a/0", restart=restart), spec("keeps/0"))
    b.dies("a/0", kind)
    assert b.state("a/0") == ("backoff" if again else "ended")
    assert b.state("keeps/0") == "ready"


def test_run_ends_when_all_that_is_not_system_has_ended() -> None:
    b = running(spec("reg/0", tier=1, system=True), spec("a/0", restart="transient"), spec("b/0", restart="temporary"))
    b.dies("a/0", "clean"), b.dies("b/0", "exception")
    assert b.of(Stop) == ["reg/0"]
    b.dies("reg/0", "clean")
    assert b.done.exit_code == 1 and "b/0" in b.done.reason


def test_backoff_doubles_up_to_its_limit_with_full_jitter() -> None:
    b = Bench(spec("a/0", max_restarts=5, backoff_first_s=1, backoff_max_s=5), draw=0.5)
    b(RunStarted())
    waits = []
    for _ in range(5):
        b.dies("a/0")
        deadline = b.core.next_deadline()
        assert deadline is not None
        waits.append(deadline - b.now)
        b(Tick(), after=waits[-1])
        assert b.of(Start) == ["a/0"]
    assert waits == [0.5, 1.0, 2.0, 2.5, 2.5]


def test_exhausted_intensity_drains_with_one_diagnosis_and_the_first_failure() -> None:
    b = running(spec("reg/0", tier=1, system=True), spec("a/0", max_restarts=2), spec("z/0"))
    b.dies("z/0", "cuda", after=0.1)
    for _ in range(2):
        b.dies("a/0", after=0.1)
        b(Tick(), after=10), b.up("a/0")
    b.up("z/0")
    b.dies("a/0", after=0.1)
    assert b.of(Stop) == ["z/0"]
    b.dies("z/0", "clean"), b.dies("reg/0", "clean")
    assert b.done.exit_code == 1
    assert b.done.diagnosis is not None and b.done.diagnosis.slot == "a/0"
    assert b.done.first is not None and b.done.first.slot == "z/0" and b.done.first.kind == "cuda"


def test_restarts_age_only_in_good_time() -> None:
    steady = Bench(spec("a/0", max_restarts=1, period_s=10))
    steady(RunStarted())
    for _ in range(6):
        steady.up("a/0")
        steady(SlotProgress("a/0", 1), after=11)
        steady.dies("a/0")
        assert steady.state("a/0") == "backoff", "each failure came after a whole period of good work"
        steady(Tick(), after=10)

    slow = Bench(spec("a/0", max_restarts=1, period_s=10, start_timeout_s=60))
    slow(RunStarted()), slow(SlotSpawned("a/0", 1, 5))
    slow.dies("a/0", after=59)
    slow(Tick(), after=10), slow(SlotSpawned("a/0", 2, 6))
    slow.dies("a/0", after=59)
    assert slow.done.exit_code == 1, "slow starts that fail must exhaust the limit too"


def test_hangs_exhaust_the_limit_though_each_lasts_longer_than_the_period() -> None:
    b = Bench(spec("a/0", max_restarts=1, period_s=10, hang_after_s=60, dump_grace_s=1))
    b(RunStarted())
    for _ in range(2):
        b.up("a/0")
        b(Tick(), after=60), b(Tick(), after=1)
        assert b.of(Kill) == ["a/0"]
        b.dies("a/0", "hang")
        b(Tick(), after=10)
    assert b.done.exit_code == 1


def test_config_failure_ends_the_run_without_a_restart() -> None:
    b = Bench(spec("a/0"))
    b(RunStarted()), b(SlotSpawned("a/0", 1, 5))
    b.dies("a/0", "config")
    assert b.done.exit_code == 2 and "a/0 cannot start" in b.done.reason
    b = running(spec("a/0"))
    b.dies("a/0", "config")
    assert b.done.exit_code == 1 and "a/0 cannot go on" in b.done.reason
    # A trainer that comes back, or another role, once the work has begun.
    for late in ("t/0", "r/0"):
        b = Bench(spec("t/0", significant=True), spec("r/0"))
        b(RunStarted()), b.up("t/0"), b(SlotSpawned("r/0", 2, 6))
        b.dies("t/0", "killed") if late == "t/0" else None
        b(Tick(), after=10)
        b.dies(late, "config")
        b.dies("r/0" if late == "t/0" else "t/0", "clean")
        assert b.done.exit_code == 1
    b = Bench(spec("a/0"))
    b(RunStarted()), b(SlotSpawned("a/0", 1, 5))
    b.dies("a/0", "import_error")
    assert b.done.exit_code == 1
    b = running(spec("a/0"))
    b.dies("a/0", "import_error")
    assert b.state("a/0") == "backoff", "it has worked before: the import may work again"


def test_a_role_that_reached_its_limit_ends_the_run_without_a_restart() -> None:
    for begun in (False, True):
        b = Bench(spec("a/0", max_restarts=5))
        b(RunStarted())
        b.up("a/0") if begun else b(SlotSpawned("a/0", 1, 5))
        b.dies("a/0", "given_up")
        assert b.done.exit_code == 1 and b.state("a/0") == "ended"
        assert ("a/0 cannot go on" if begun else "a/0 cannot start") in b.done.reason


def test_hang_dumps_stacks_then_kills() -> None:
    b = running(spec("a/0", hang_after_s=10, dump_grace_s=1))
    b(SlotProgress("a/0", 5), after=9)
    b(SlotProgress("a/0", 5, detail="decoding"), after=9)
    assert b(Tick(), after=0.5) == []
    b(Tick(), after=0.5)
    assert b.of(DumpStacks) == ["a/0"] and b.of(Kill) == []
    b(Tick(), after=1)
    assert next(a for a in b.actions if isinstance(a, Kill)).kind == "hang"


def test_progress_during_the_stack_dump_saves_the_role() -> None:
    b = running(spec("a/0", hang_after_s=10, dump_grace_s=1))
    b(Tick(), after=10)
    assert b.of(DumpStacks) == ["a/0"]
    b(SlotProgress("a/0", 1), after=0.5)
    b(Tick(), after=5)
    assert b.of(Kill) == [] and b.state("a/0") == "ready"


def test_waiting_is_idle_and_extend_moves_the_deadline_once() -> None:
    b = running(spec("a/0", hang_after_s=10))
    for _ in range(100):
        b(SlotProgress("a/0", 0, waiting="for samples"), after=9)
    assert b.of(DumpStacks) == []
    b(SlotProgress("a/0", 0))
    b(SlotProgress("a/0", 0, extend_s=30), after=5)
    b(Tick(), after=34)
    assert b.of(DumpStacks) == []
    b(Tick(), after=1)
    assert b.of(DumpStacks) == ["a/0"]


def test_an_idle_role_without_reports_is_a_hang_and_its_next_report_saves_it() -> None:
    b = Bench(spec("a/0", hang_after_s=10, dump_grace_s=1))
    b(RunStarted()), b(SlotSpawned("a/0", 1, 5), SlotProgress("a/0", 0, waiting="for weights"), SlotReady("a/0"))
    b(SlotProgress("a/0", 0, waiting="for weights"), after=9)
    b(Tick(), after=9.9)
    assert b.state("a/0") == "ready"
    b(Tick(), after=0.1)
    assert b.of(DumpStacks) == ["a/0"]
    b(SlotProgress("a/0", 0, waiting="for weights"), after=0.5)
    assert b.state("a/0") == "ready"
    b(Tick(), after=10), b(Tick(), after=1)
    assert "for weights" in next(a for a in b.actions if isinstance(a, Kill)).reason


def test_an_idle_role_has_time_for_a_report_however_short_its_limit() -> None:
    b = running(spec("a/0", hang_after_s=0.5))
    b(SlotProgress("a/0", 0, waiting="for samples"))
    b(Tick(), after=2)
    assert b.state("a/0") == "ready"


def test_a_start_that_reports_waiting_for_another_role_is_not_timed_out() -> None:
    b = Bench(spec("a/0", start_timeout_s=10))
    b(RunStarted()), b(SlotSpawned("a/0", 1, 5))
    for _ in range(10):
        b(SlotProgress("a/0", 0, waiting="the first committed weights"), after=9)
    assert b.state("a/0") == "starting" and b.of(DumpStacks) == []
    b(SlotProgress("a/0", 0), after=9)
    b(Tick(), after=1)
    assert b.of(DumpStacks) == ["a/0"]


def test_start_timeout_dumps_kills_and_counts_and_can_be_extended() -> None:
    b = Bench(spec("a/0", start_timeout_s=10, max_restarts=0))
    b(RunStarted()), b(SlotSpawned("a/0", 1, 5))
    b(SlotProgress("a/0", 0, extend_s=100), after=5)
    b(Tick(), after=104)
    assert b.of(DumpStacks) == []
    b(Tick(), after=1)
    assert b.of(DumpStacks) == ["a/0"]
    b(Tick(), after=1)
    assert b.of(Kill) == ["a/0"]
    b.dies("a/0", "hang")
    assert b.done.exit_code == 1


def test_a_start_is_extended_while_slow_work_makes_progress() -> None:
    """A trainer that compares a large checkpoint extends its start by what the last part took."""
    b = Bench(spec("a/0", start_timeout_s=10, dump_grace_s=1))
    b(RunStarted()), b(SlotSpawned("a/0", 1, 5))
    for n in range(100):
        b(SlotProgress("a/0", n, extend_s=9), after=9)
        assert b.state("a/0") == "starting"
    b(Tick(), after=9.5)
    assert b.of(DumpStacks) == []
    b(Tick(), after=0.5)
    assert b.of(DumpStacks) == ["a/0"]


def test_what_a_spawn_waits_for_does_not_count_against_the_start_timeout() -> None:
    b = Bench(spec("a/0", start_timeout_s=10))
    b(RunStarted())
    b(Tick(), after=290)
    assert b.of(Kill) == []
    b(SlotSpawned("a/0", 1, 5))
    b(Tick(), after=9)
    assert b.of(DumpStacks) == []
    b(Tick(), after=1)
    assert b.of(DumpStacks) == ["a/0"]


def test_a_start_without_a_process_is_given_up() -> None:
    b = Bench(spec("a/0", start_timeout_s=10))
    b(RunStarted())
    b(Tick(), after=300)
    assert b.of(Kill) == ["a/0"]
    b.dies("a/0", "killed")
    assert b.core.view()[0].last is not None


def test_operators_restart_is_not_counted() -> None:
    b = running(spec("a/0", max_restarts=0), spec("b/0"))
    b(RestartRequested("a/0"))
    assert b.of(Stop) == ["a/0"]
    b.dies("a/0", "killed")
    assert b.of(Start) == ["a/0"], "at once, though no restart is allowed after a failure"
    with pytest.raises(Refused, match="no such slot"):
        b(RestartRequested("nope/0"))
    b(RestartRequested("b"))
    assert b.of(Stop) == ["b/0"], "all slots of a role"
    b(StopRequested("over"))
    with pytest.raises(Refused, match="over"):
        b(RestartRequested("b/0"))


def test_role_that_finishes_while_its_restart_is_asked_for_has_finished() -> None:
    b = running(spec("t/0", significant=True))
    b(RestartRequested("t/0"))
    b(SlotFinished("t/0"))
    b.dies("t/0", "clean")
    assert b.done.exit_code == 0


def test_invalid_transition_shows_the_history_of_the_slot() -> None:
    b = Bench(spec("a/0"))
    b(RunStarted())
    with pytest.raises(InvalidTransition, match="SlotReady in state 'requested'"):
        b(SlotReady("a/0"))
    b.dies("a/0")
    with pytest.raises(InvalidTransition, match="requested -> backoff"):
        b(SlotSpawned("a/0", 3, 9))
