"""The supervisor's rules for slots that belong together: gangs, strategies, min_ready, escalation, scale, nodes."""

from __future__ import annotations

from typing import Any

import pytest
from supervisor_bench import Bench, running, spec

from relax_rt.config.schema import RoleSettings, SupervisionTable
from relax_rt.supervision.placement import Node, Placer
from relax_rt.supervision.plan import RolePlan
from relax_rt.supervision.protocol import (
    DrainRequested,
    Kill,
    KillRequested,
    NodeJoined,
    NodeLost,
    RestartRequested,
    RunStarted,
    ScaleRequested,
    SlotExited,
    SlotFinished,
    SlotProgress,
    SlotReady,
    SlotSpawned,
    Start,
    StartGang,
    Stop,
    StopRequested,
    Tick,
)
from relax_rt.supervision.tree import RoleSpec
from relax_rt.transport.rpc.errors import Refused


def gang(count: int, *others: Any, placer: Placer | None = None, **fields: Any) -> Bench:
    """A gang `t` of that many ranks, all up, beside other slots, up as well."""
    ranks = [spec(f"t/{n}", **fields) for n in range(count)]
    return running(*ranks, *others, roles=[RoleSpec(kind="t", gang=True, role_restarts=0)], placer=placer)


def generation(b: Bench) -> int:
    return next(a.generation for a in b.actions if isinstance(a, StartGang))


def test_gang_starts_as_one() -> None:
    b = Bench(spec("t/0"), spec("t/1"), roles=[RoleSpec(kind="t", gang=True)])
    b(RunStarted())
    assert [a for a in b.actions if isinstance(a, StartGang)] == [StartGang("t", 1, [Start("t/0"), Start("t/1")])]
    assert b.of(Start) == []


def test_gang_that_lost_a_rank_starts_again_once_all_others_are_gone() -> None:
    b = gang(3, spec("r/0"))
    b.dies("t/1", after=1)
    assert b.events("gang_failed") == [{"role": "t", "slot": "t/1", "generation": 1, "cause": "exception of t/1"}]
    assert sorted(b.of(Kill)) == ["t/0", "t/2"], "they would wait for ever in a collective"
    b.dies("t/0", "killed")
    b(Tick(), after=10)
    assert b.starts == [], "t/2 may still be alive"
    assert b.view("t/0").waiting == "waits until t/2 has exited"
    b.dies("t/2", "killed")
    b(Tick(), after=1)
    assert b.starts == ["t/0", "t/1", "t/2"] and generation(b) == 2
    assert b.state("r/0") == "ready" and b.of(Stop) == []


def test_failures_of_several_ranks_count_once_and_the_earliest_is_the_cause() -> None:
    b = gang(2, max_restarts=1)
    b.dies("t/0", at=0.5)
    b.dies("t/1", at=0.4)
    assert {e["cause"] for e in b.events("slot_restarting")} == {"t/1: exception of t/1"}
    b(Tick(), after=1), b.up("t/0"), b.up("t/1")
    b.dies("t/0"), b.dies("t/1", "killed")
    assert b.done.exit_code == 1, "the second failure of the gang was one too many"
    assert b.done.first is not None and b.done.first.slot == "t/1"


@pytest.mark.parametrize("kind", ["config", "given_up"])
def test_rank_that_gives_up_ends_the_run_though_another_was_seen_to_die_before(kind: Any) -> None:
    b = gang(2, significant=True)
    # Rank 0 fails because its peer has left, and its end is seen first.
    b.dies("t/0")
    b.dies("t/1", kind)
    assert b.done.exit_code == 1 and "t/1 cannot go on" in b.done.reason


def test_failures_of_a_gang_age_while_all_its_ranks_work() -> None:
    b = gang(2, max_restarts=1, period_s=10)
    for _ in range(4):
        b(SlotProgress("t/0", 1), SlotProgress("t/1", 1), after=11)
        b.dies("t/0"), b.dies("t/1", "killed")
        b(Tick(), after=1)
        b.up("t/0")
        b(Tick(), after=50)
        b.up("t/1")
    assert b.core.done is None


def test_gang_has_finished_when_all_its_ranks_have() -> None:
    b = gang(2, spec("r/0"), significant=True)
    for slot in ("t/0", "t/1"):
        assert not b.core.draining
        b(SlotFinished(slot))
        b.dies(slot, "clean")
    assert b.of(Stop) == ["r/0"]


def test_gang_whose_last_rank_fails_at_the_end_starts_again_whole() -> None:
    b = gang(2, significant=True)
    b(SlotFinished("t/0"))
    b.dies("t/0", "clean"), b.dies("t/1")
    b(Tick(), after=1)
    assert b.starts == ["t/0", "t/1"]


def test_restart_of_a_rank_by_hand_asks_all_ranks_to_stop_and_counts_nothing() -> None:
    b = gang(2, max_restarts=0)
    b(RestartRequested("t/1"))
    assert sorted(b.of(Stop)) == ["t/0", "t/1"]
    b.dies("t/0", "clean")
    b.dies("t/1", "exception")
    assert b.starts == ["t/0", "t/1"] and generation(b) == 2


def test_rank_that_fails_while_the_run_ends_takes_the_others_with_it() -> None:
    b = gang(2)
    b(StopRequested("enough"))
    b.dies("t/0")
    assert b.of(Kill) == ["t/1"]


def test_one_for_all_stops_the_others_and_counts_the_failures_of_the_role() -> None:
    rules = RoleSpec(kind="a", strategy="one_for_all", role_restarts=0)
    b = running(spec("a/0", max_restarts=1), spec("a/1", max_restarts=1), roles=[rules])
    b.dies("a/0")
    assert b.of(Stop) == ["a/1"]
    b.dies("a/1", "clean")
    b(Tick(), after=1)
    assert b.starts == ["a/0", "a/1"]
    b.up("a/0"), b.up("a/1")
    b.dies("a/1")
    b.dies("a/0", "clean")
    assert b.done.exit_code == 1


def test_rest_for_one_restarts_those_after_it() -> None:
    b = Bench(*(spec(f"a/{n}") for n in range(3)), roles=[RoleSpec(kind="a", strategy="rest_for_one")])
    b(RunStarted()), [b.up(f"a/{n}") for n in range(3)]
    b.dies("a/1")
    assert b.of(Stop) == ["a/2"] and b.state("a/0") == "ready"
    b.dies("a/2", "clean")
    b(Tick(), after=1)
    assert b.starts == ["a/1", "a/2"]


def test_higher_tiers_start_when_min_ready_of_the_lower_are() -> None:
    pool = [spec(f"r/{n}", tier=10) for n in range(3)]
    b = Bench(*pool, spec("t/0", tier=20), roles=[RoleSpec(kind="r", min_ready=2)])
    b(RunStarted()), b.up("r/0")
    assert b.starts == [] and b.view("t/0").waiting == "waits until r/1, r/2 are ready"
    b.up("r/2")
    assert b.starts == ["t/0"]


def exhausted(b: Bench, slot: str) -> None:
    """The slot, which may be restarted once, fails twice."""
    b.dies(slot)
    b(Tick(), after=10), b.up(slot)
    b.dies(slot)


def test_slot_without_restarts_left_is_given_up_while_enough_others_remain() -> None:
    pool = [spec(f"r/{n}", max_restarts=1) for n in range(3)]
    b = Bench(*pool, roles=[RoleSpec(kind="r", min_ready=2, role_restarts=0)])
    b(RunStarted()), [b.up(f"r/{n}") for n in range(3)]
    exhausted(b, "r/1")
    assert b.state("r/1") == "ended" and b.view("r/1").given_up and not b.core.draining
    assert b.events("slot_given_up")[0]["left"] == 2
    exhausted(b, "r/0")
    assert b.core.draining, "one would be too few"


def test_role_is_restarted_once_as_a_whole_before_the_run_ends() -> None:
    b = running(spec("r/0", max_restarts=1), spec("r/1"), spec("w/0"), roles=[RoleSpec(kind="r", role_restarts=1)])
    exhausted(b, "r/0")
    assert b.of(Stop) == ["r/1"] and b.events("role_restarting")[0]["slot"] == "r/0"
    b.dies("r/1", "clean")
    b(Tick(), after=10)
    assert b.starts == ["r/0", "r/1"]
    b.up("r/0"), b.up("r/1")
    exhausted(b, "r/0")
    assert b.core.draining
    b.dies("r/1", "clean"), b.dies("w/0", "clean")
    assert b.done.exit_code == 1
    assert b.done.first is not None and b.done.first.epoch == 1, "the first failure of all is remembered"


def test_restart_of_the_role_ages_in_the_good_time_of_the_slot_that_needed_it() -> None:
    b = Bench(spec("r/0", max_restarts=0), roles=[RoleSpec(kind="r", role_restarts=1, role_period_s=100)])
    b(RunStarted())
    for _ in range(3):
        b.up("r/0")
        b(SlotProgress("r/0", 1), after=110)
        b.dies("r/0")
        b(Tick(), after=10)
    assert b.core.done is None


def test_scale_up_adds_slots_and_scale_down_drains_the_highest_and_forgets_them() -> None:
    b = running(spec("r/0"), spec("r/1"))
    b(ScaleRequested("r", 3))
    assert b.starts == ["r/2"]
    b.up("r/2")
    b(ScaleRequested("r", 1))
    assert b.of(Stop) == ["r/2", "r/1"]
    b.dies("r/2", "exception")
    b.dies("r/1", "clean")
    assert [v.slot for v in b.core.view()] == ["r/0"] and not b.core.draining
    b(Tick(), after=100)
    assert b.starts == []


def test_scale_up_restores_slots_that_are_leaving_drained_or_given_up() -> None:
    b = Bench(*(spec(f"r/{n}", max_restarts=0) for n in range(3)), roles=[RoleSpec(kind="r", min_ready=0)])
    b(RunStarted()), [b.up(f"r/{n}") for n in range(3)]
    b.dies("r/0")
    assert b.view("r/0").given_up
    b(DrainRequested("r/1"))
    b.dies("r/1", "clean")
    assert b.view("r/1").waiting.startswith("drained")
    b(ScaleRequested("r", 2))
    assert b.starts == ["r/0", "r/1"] and b.of(Stop) == ["r/2"]
    b(ScaleRequested("r", 3))
    b.dies("r/2", "clean")
    assert b.starts == ["r/2"]


def test_scale_to_nothing_does_not_end_the_run() -> None:
    b = running(spec("r/0"))
    b(ScaleRequested("r", 0))
    b.dies("r/0", "clean")
    assert not b.core.draining and b.core.view() == []
    b(ScaleRequested("r", 1))
    assert b.starts == ["r/0"]


def test_what_cannot_be_scaled_is_refused() -> None:
    b = gang(2, spec("r/0"), spec("q/0", system=True))
    for kind, count, why in (("t", 3, "gang"), ("q", 2, "cannot do without"), ("x", 1, "no such role"), ("r", -1, "0")):
        with pytest.raises(Refused, match=why):
            b(ScaleRequested(kind, count))
    b = Bench(spec("r/0"), roles=[RoleSpec(kind="r", min_ready=1)])
    with pytest.raises(Refused, match="min_ready = 1"):
        b(ScaleRequested("r", 0))


def test_drained_role_stays_down_until_it_is_restarted() -> None:
    b = running(spec("r/0"), spec("r/1", backoff_first_s=100, backoff_max_s=100), spec("w/0"))
    b.dies("r/1")
    b(DrainRequested("r"))
    assert b.of(Stop) == ["r/0"] and b.state("r/1") == "ended"
    b.dies("r/0", "exception")
    b(Tick(), after=1000)
    assert b.starts == [] and not b.core.draining
    b(RestartRequested("r/0"))
    assert b.starts == ["r/0"]
    with pytest.raises(Refused, match="no such slot, role or node"):
        b(DrainRequested("nope"))


def test_draining_one_rank_drains_the_gang() -> None:
    b = gang(2)
    b(DrainRequested("t/0"))
    assert sorted(b.of(Stop)) == ["t/0", "t/1"]
    b.dies("t/0", "clean"), b.dies("t/1", "exception")
    b(Tick(), after=100)
    assert b.starts == []
    b(RestartRequested("t/1"))
    assert b.starts == ["t/0", "t/1"] and generation(b) == 2


def on_nodes(*nodes: Node) -> Placer:
    return Placer(nodes)


def test_slot_without_room_waits_with_a_reason_until_there_is_some() -> None:
    b = Bench(spec("a/0", gpus=1.0), spec("a/1", gpus=1.0), placer=on_nodes(Node("n1", 4, 1)))
    b(RunStarted())
    assert b.starts == ["a/0"] and b.state("a/1") == "pending"
    assert "no room for 1 GPU: n1 has 0 of 1 free" in b.view("a/1").waiting
    b(NodeJoined(Node("n2", 4, 1)))
    assert b.starts == ["a/1"] and b.view("a/1").node == "n2"


def test_slots_of_a_lost_node_start_elsewhere_at_once_and_nothing_is_counted() -> None:
    placer = on_nodes(Node("n1", 1), Node("n2", 1))
    b = running(spec("a/0", max_restarts=0), spec("a/1", max_restarts=0), placer=placer)
    lost = next(s for s in ("a/0", "a/1") if b.view(s).node == "n2")
    b(NodeLost("n2", "silent for 10 s"))
    assert b.starts == [lost] and b.view(lost).node == "n1"
    assert b.view(lost).last is not None and "silent for 10 s" in b.view(lost).last.cause  # type: ignore[union-attr]


def test_slots_of_a_lost_node_wait_for_it_when_it_is_kept() -> None:
    b = running(spec("a/0", node=""), placer=on_nodes(Node("n1", 1)))
    b(NodeJoined(Node("n2", 1)))
    b(NodeLost("n1", "cable", keep=True))
    assert b.state("a/0") == "pending" and "'n1'" in b.view("a/0").waiting
    b(NodeJoined(Node("n1", 1)))
    assert b.starts == ["a/0"] and b.view("a/0").node == "n1"


def test_gang_across_nodes_starts_again_whole_when_one_is_lost() -> None:
    b = gang(2, placer=on_nodes(Node("n1", 4, 1), Node("n2", 4, 1)), gpus=1.0, max_restarts=0)
    assert {b.view("t/0").node, b.view("t/1").node} == {"n1", "n2"}
    gone, stays = sorted(("t/0", "t/1"), key=lambda s: b.view(s).node != "n2")
    b(NodeLost("n2", "silent"))
    assert b.of(Kill) == [stays]
    b.dies(stays, "killed")
    assert b.state(gone) == b.state(stays) == "pending" and "2 ranks of t" in b.view(gone).waiting
    b(NodeJoined(Node("n3", 4, 1)))
    assert b.starts == ["t/0", "t/1"] and generation(b) == 2


def test_all_ranks_on_one_lost_node() -> None:
    b = gang(2, placer=on_nodes(Node("n1", 4, 2), Node("n2", 4, 2)), gpus=1.0)
    b(NodeLost(b.view("t/0").node, "silent"))
    assert b.starts == ["t/0", "t/1"] and generation(b) == 2


def test_drained_node_is_emptied_and_gets_nothing_new() -> None:
    b = running(spec("a/0"), spec("a/1"), placer=on_nodes(Node("n1", 1), Node("n2", 1)))
    moved = next(s for s in ("a/0", "a/1") if b.view(s).node == "n2")
    b(DrainRequested("n2"))
    assert b.of(Stop) == [moved]
    b.dies(moved, "clean")
    assert b.starts == [moved] and b.view(moved).node == "n1"


def test_node_with_the_registry_on_it_cannot_be_drained() -> None:
    b = running(spec("q/0", system=True), placer=on_nodes(Node("n1", 1)))
    with pytest.raises(Refused, match="q/0 runs there"):
        b(DrainRequested("n1"))


def test_kill_and_exits_out_of_order_end_a_gang_that_was_starting_again() -> None:
    b = gang(2)
    b.dies("t/0")
    b(KillRequested("now"))
    b.dies("t/1", "killed")
    assert b.core.done is not None


def test_start_of_a_gang_that_fails_for_one_rank_is_a_failure_of_the_gang() -> None:
    b = Bench(spec("t/0"), spec("t/1"), roles=[RoleSpec(kind="t", gang=True)])
    b(RunStarted())
    b(SlotSpawned("t/0", 1, 11), SlotReady("t/0"))
    b.dies("t/1", "unknown")
    assert b.of(Kill) == ["t/0"]
    b(SlotExited("t/0", b.diagnosis("t/0", "killed")))
    b(Tick(), after=1)
    assert b.starts == ["t/0", "t/1"] and generation(b) == 2


def test_memory_limits_count_in_the_placement() -> None:
    settings = RoleSettings(memory_mib=700, count=3)
    plan = RolePlan(kind="a", target="x:A", settings=settings, tier=1, restart="permanent", significant=False)
    slots = plan.specs(SupervisionTable())
    b = Bench(*slots, placer=on_nodes(Node("n1", 8, 0, 1000), Node("n2", 1, 0, 1500)))
    b(RunStarted())
    assert [b.view(s.slot).node for s in slots] == ["n1", "n2", "n2"]


def test_drained_node_takes_slots_again_once_it_is_restarted() -> None:
    b = running(spec("p/0", node="n2"), spec("a/0"), placer=on_nodes(Node("n1", 1), Node("n2", 1)))
    with pytest.raises(Refused, match="not drained"):
        b(RestartRequested("n2"))
    b(DrainRequested("n2"))
    b.dies("p/0", "clean"), b(Tick(), after=1)
    assert b.state("p/0") == "pending" and "`relax-rt restart n2`" in b.view("p/0").waiting
    for name in ("p", "p/0"):
        with pytest.raises(Refused, match="no room for it: node 'n2': it is drained"):
            b(RestartRequested(name))
    b(RestartRequested("n2"))
    assert b.starts == ["p/0"] and b.events("node_reopened") == [{"node": "n2"}]


def test_restart_of_a_role_without_slots_is_refused_with_that_reason() -> None:
    b = running(spec("r/0"), spec("w/0"))
    b(ScaleRequested("r", 0))
    b.dies("r/0", "clean")
    assert b.core.counts == {"r": 0, "w": 1} and b.core.can_scale("r")
    with pytest.raises(Refused, match="no slots"):
        b(RestartRequested("r"))


def test_slots_of_a_role_start_as_many_at_a_time_as_there_are_cores() -> None:
    b = running(spec("r/0"), spec("w/0"), placer=on_nodes(Node("n1", 3)))
    b(ScaleRequested("r", 9))
    assert b.starts == ["r/1", "r/2", "r/3"]
    assert b.state("r/8") == "pending" and "3 others of its role are starting" in b.view("r/8").waiting
    b(ScaleRequested("w", 2))
    assert b.starts == ["w/1"], "another role's starts are not held up"
    b.up("r/2")
    assert b.starts == ["r/4"] and b.view("r/4").waiting == ""
    b.dies("r/0", "killed"), b(Tick(), after=2)
    assert b.state("r/0") == "pending" and "starting" in b.view("r/0").waiting
    b.up("r/1")
    assert b.starts == ["r/0"], "the lowest comes first"
    b(ScaleRequested("r", 4))
    assert not [v.slot for v in b.core.view() if v.kind == "r" and v.state == "pending"]
