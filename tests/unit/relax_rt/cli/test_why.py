"""The account of a run from its event log."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from relax_rt.cli.why import MAX_NOTES, MAX_SHOWN, explain, show_why
from relax_rt.interfaces.agent import Diagnosis, RunStatus, SlotStatus


def event(t: float, kind: str, slot: str = "", **fields: Any) -> dict[str, Any]:
    return {"t": t, "m": t, "by": "agent", "kind": kind, **({"slot": slot, "epoch": 1} if slot else {}), **fields}


def exited(t: float, slot: str, cause: str, kind: str = "exception", at: float | None = None) -> dict[str, Any]:
    diagnosis = Diagnosis(slot=slot, epoch=1, kind=kind, cause=cause, at=t if at is None else at, trace="Tr\nBoom: x")  # type: ignore[arg-type]
    return event(t, "slot_exited", slot, diagnosis=msgspec.to_builtins(diagnosis))


RUNNING = RunStatus(
    run_id="ab",
    name="two",
    run_dir="/runs/two",
    status="running",
    slots=[
        SlotStatus(slot="trainer/0", kind="trainer", tier=1, state="ready", waiting="samples", state_s=3.0),
        SlotStatus(slot="rollout/0", kind="rollout", tier=1, state="ready", detail="busy"),
        SlotStatus(
            slot="rollout/1",
            kind="rollout",
            tier=1,
            state="backoff",
            last=Diagnosis(slot="rollout/1", epoch=4, kind="oom", cause="too big"),
        ),
        SlotStatus(slot="evaluator/0", kind="evaluator", tier=2, state="pending"),
    ],
)

EVENTS = [
    event(0.0, "run_started"),
    exited(1.0, "rollout/0", "of an earlier start"),
    event(10.0, "run_started"),
    event(11.0, "slot_ready", "rollout/0"),
    exited(20.0, "reward/0", "seen first", at=19.9),
    exited(20.1, "rollout/0", "happened first", at=19.8),
    event(22.1, "slot_ready", "rollout/0"),
    exited(30.0, "rollout/0", "again"),
    event(30.5, "slot_exited", "rollout/0", diagnosis={"kind": "no such kind"}),
    exited(31.0, "rollout/0", "while starting"),
    event(33.0, "slot_ready", "rollout/0"),
    exited(34.0, "queue/0", "done", kind="clean"),
]


def test_first_failure_is_the_first_in_time_of_this_start() -> None:
    found = explain(EVENTS, RUNNING)
    assert found.first is not None
    assert found.first.cause == "happened first"
    assert [(d.slot, d.failures, d.back) for d in found.deaths] == [("rollout/0", 3, True), ("reward/0", 1, False)]
    assert found.deaths[0].away_s == pytest.approx(2.0 + 3.0)
    assert found.deaths[0].last.cause == "while starting"
    assert not any("earlier start" in note.text for note in found.notes)


def test_who_waits_for_what() -> None:
    found = explain(EVENTS, RUNNING)
    assert [(w.slot, w.reason) for w in found.waiting] == [
        ("trainer/0", "samples"),
        ("rollout/1", "after oom: too big"),
        ("evaluator/0", "the tiers below it"),
    ]
    ended = msgspec.structs.replace(RUNNING, exit_code=1)
    assert explain(EVENTS, ended).waiting == []


def test_one_slot_or_one_kind() -> None:
    found = explain(EVENTS, RUNNING, "reward/0")
    assert found.first is not None
    assert found.first.slot == "reward/0"
    assert found.waiting == []
    assert [w.slot for w in explain(EVENTS, RUNNING, "rollout").waiting] == ["rollout/1"]
    assert explain(EVENTS, RUNNING, "roll").deaths == []


def test_what_is_reported_is_bounded_to_the_newest() -> None:
    many = [
        e
        for n in range(100)
        for e in (exited(float(n), "rollout/0", f"number {n}"), event(n, "slot_ready", "rollout/0"))
    ]
    found = explain(many, RUNNING)
    assert (len(found.incidents), found.incidents_left_out) == (MAX_SHOWN, 100 - MAX_SHOWN)
    assert found.incidents[-1].diagnosis.cause == "number 99"
    assert found.notes == []
    found = explain([event(float(n), "slot_hung", "rollout/0", reason=f"number {n}") for n in range(100)], RUNNING)
    assert (len(found.notes), found.notes_left_out) == (MAX_NOTES, 60)


def test_paragraphs_name_failure_trace_and_waits(capsys: pytest.CaptureFixture[str]) -> None:
    show_why(explain(EVENTS, RUNNING))
    out = capsys.readouterr().out
    for words in ("happened first", "Boom: x", "3 times, back, away for 5.0 s", "not back", "rollout/1  backoff"):
        assert words in out
    show_why(explain([], msgspec.structs.replace(RUNNING, slots=[])))
    assert "No role has failed" in capsys.readouterr().out
    show_why(explain(EVENTS, RUNNING, "evaluator"), "evaluator")
    assert "evaluator has not failed" in capsys.readouterr().out


def test_each_thing_is_said_once_and_its_cause_first(capsys: pytest.CaptureFixture[str]) -> None:
    last_words = " | ".join(f"line {n} of the server" for n in range(12))
    cause = f"the SGLang server ended: its scheduler_0 was killed by SIGKILL; signal 9; its last lines: {last_words}"
    diagnosis = Diagnosis(
        slot="rollout/0",
        epoch=4,
        kind="exception",
        cause=cause,
        at=20.0,
        trace=f"Traceback (most recent call last):\n  File x\nrelax_rt.server.ServerDied: {cause}",
    )
    died = event(20.0, "slot_exited", "rollout/0", diagnosis=msgspec.to_builtins(diagnosis))
    again = {**died, "t": 21.0, "diagnosis": {**died["diagnosis"], "epoch": 5, "at": 21.0}}
    told = [event(10.0, "run_started"), died, again, event(22.0, "slot_ready", "rollout/0")]
    for asked in ("", "rollout"):
        show_why(explain(told, RUNNING, asked), asked)
        out = capsys.readouterr().out
        assert out.count("line 11 of the server") == 1
        assert "its last lines" in out and "failed again before it was ready, for the same reason" in out
        for line in out.splitlines():
            assert "SIGKILL" not in line or line.index("SIGKILL") < 140, "the cause stands first"
    ended = msgspec.structs.replace(RUNNING, status="failed", exit_code=1, reason=f"rollout/0 failed: {cause}")
    show_why(explain(told, msgspec.structs.replace(ended, diagnosis=diagnosis)))
    assert capsys.readouterr().out.count("line 11 of the server") == 1


def test_who_has_no_process_yet_says_what_is_missing() -> None:
    slots = [
        SlotStatus(slot="rollout/0", kind="rollout", tier=1, state="requested"),
        SlotStatus(slot="rollout/1", kind="rollout", tier=1, state="starting"),
        SlotStatus(slot="rollout/2", kind="rollout", tier=1, state="starting", detail="its server, 12 s of 150 s"),
    ]
    waiting = explain([], msgspec.structs.replace(RUNNING, slots=slots)).waiting
    assert [one.reason for one in waiting] == ["its process", "to be ready", "its server, 12 s of 150 s"]


def test_an_injected_fault_is_named_with_what_followed(capsys: pytest.CaptureFixture[str]) -> None:
    told = [
        event(10.0, "run_started"),
        {**event(20.0, "fault_injected", "trainer/0", name="kill", seed=7, number=3, seconds=0.0), "by": "chaos"},
        exited(20.1, "trainer/0", "SIGKILL from outside the run", "killed"),
        exited(20.1, "registry/0", "another", "killed"),
        event(20.1, "slot_restarting", "trainer/0", wait_s=0.25, restarts=2),
        event(20.2, "lease_lapsed", lease=1, task="train", samples=12),
        event(20.2, "lease_lapsed", lease=2, task="train", samples=4),
        *(event(20.2, "group_ended", group=n, state="dropped(surplus)", prompt_fate="return") for n in range(3)),
        event(20.3, "lease_lapsed", "trainer/0", detail="of the registry, no samples"),
        event(20.4, "slot_ready", "registry/0"),
        {**event(21.0, "resumed", checkpoint="step-000010", step=10), "by": "trainer/0#8"},
        event(22.1, "slot_ready", "trainer/0"),
        {**event(22.6, "first_work", what="step 11"), "by": "trainer/0#8"},
        event(30.0, "lease_lapsed", lease=3, task="train", samples=99),
    ]
    found = explain(told, RUNNING, "trainer")
    (incident,) = found.incidents
    assert incident.fault is not None
    assert (incident.fault.name, incident.fault.seed) == ("kill", 7)
    assert incident.policy == ["restart 2 after a back-off of 0.25 s"]
    assert incident.affected == [
        "leases lapsed, 16 samples of task train offered again",
        "3 groups ended as dropped(surplus): their prompts are sampled again",
        "resumes from checkpoint step-000010, step 10",
    ]
    assert incident.away_s == pytest.approx(2.0)
    assert incident.first_work_s == pytest.approx(2.5)
    show_why(found, "trainer")
    out = capsys.readouterr().out
    assert "fault 'kill' injected by chaos (seed 7, number 3)" in out
    assert "ready again, after 2.0 s" in out
    (other,) = explain(told, RUNNING, "registry").incidents
    assert not any("leases" in line for line in other.affected)


def reopened(t: float, group: int, *, holder: str = "rollout/0#1", **fields: Any) -> dict[str, Any]:
    state = {"state": "dropped(producer gone)", "why": "", "missing": 8, "partial": 8, "tokens": 400}
    return {**event(t, "group_reopened", group=group, holder=holder), **state, **fields, "by": "queue/0#3"}


def test_what_becomes_of_the_sequences_of_a_dead_rollout_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    told = [
        event(10.0, "run_started"),
        # It gave this one back in good order.
        reopened(19.0, 9, state="dropped(returned)", why="the trainer has the device"),
        # Its last words come before its end is seen, and so does who is quick to go on.
        {**event(20.0, "groups_released", groups=2, tokens_lost=31), "by": "rollout/0#1"},
        reopened(20.0, 1, state="dropped(returned)", why="the rollout ends"),
        {**event(20.1, "group_resumed", group=1, members=[0], tokens=[50] * 8), "by": "rollout/1#2"},
        exited(20.2, "rollout/0", "the SGLang server ended"),
        reopened(20.3, 2, partial=6, tokens=100),
        {**event(20.4, "group_resumed", group=2, members=[0], tokens=[20] * 5 + [0] * 3), "by": "rollout/1#2"},
        {**event(20.4, "group_resumed", group=9, members=[0], tokens=[50] * 8), "by": "rollout/1#2"},
        event(22.0, "slot_ready", "rollout/0"),
    ]
    (incident,) = explain(told, RUNNING, "rollout").incidents
    assert incident.affected == [
        "16 sequences were left unfinished, 14 of them with 500 tokens in the journal, 31 tokens lost; "
        "13 were resumed from these"
    ]
    show_why(explain(told, RUNNING, "rollout"), "rollout")
    assert "16 sequences were left unfinished" in " ".join(capsys.readouterr().out.split())
    (alone,) = explain([told[0], *told[5:6], reopened(20.3, 2, holder="rollout/1#1")], RUNNING, "rollout").incidents
    assert alone.affected == [], "another's"


def test_why_samples_could_not_be_made_is_reported() -> None:
    told = [
        event(10.0, "run_started"),
        exited(20.0, "env/0", "SIGSEGV", "killed"),
        {**event(20.1, "samples_failed", group=4, task="", reasons=["begun and lost 6 times"]), "by": "queue/0#3"},
        {**event(20.1, "samples_failed", group=5, task="reward", reasons=["ValueError"]), "by": "queue/0#3"},
        event(22.0, "slot_ready", "env/0"),
    ]
    (incident,) = explain(told, RUNNING, "env").incidents
    made, scored = incident.affected
    assert made == "samples of group 4 could not be made: begun and lost 6 times"
    assert scored == "samples of group 5 failed in task reward"


def test_what_may_be_of_another_failure_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """The queue tells that groups ended, not for whose death: with two roles away it is nobody's for certain."""
    told = [
        event(10.0, "run_started"),
        exited(20.0, "rollout/0", "SIGKILL", "killed"),
        {
            **event(20.1, "group_ended", group=1, state="dropped(producer gone)", prompt_fate="return"),
            "by": "queue/0#3",
        },
        event(21.0, "slot_ready", "rollout/0"),
        exited(30.0, "rollout/0", "SIGKILL", "killed"),
        exited(30.0, "evaluator/0", "SIGKILL", "killed"),
        {
            **event(30.1, "group_ended", group=2, state="dropped(producer gone)", prompt_fate="return"),
            "by": "queue/0#3",
        },
        event(31.0, "slot_ready", "rollout/0"),
        event(31.0, "slot_ready", "evaluator/0"),
    ]
    alone, doubtful = explain(told, RUNNING, "rollout").incidents
    assert alone.affected and alone.perhaps == [] and doubtful.perhaps == ["evaluator/0"]
    (evaluator,) = explain(told, RUNNING, "evaluator").incidents
    assert evaluator.affected and evaluator.perhaps == ["rollout/0"]
    assert "or caused by the end of rollout/0, away at the same time" in evaluator.line()
    show_why(explain(told, RUNNING, "evaluator"), "evaluator")
    assert "or caused by the end of rollout/0" in capsys.readouterr().out


def test_a_fault_that_stands_with_its_failure_is_not_reported_again() -> None:
    fault = {"name": "kill", "seed": 7, "by": "chaos"}
    told = [
        event(10.0, "run_started"),
        {**event(20.0, "fault_injected", "trainer/0", number=1), **fault},
        exited(20.1, "trainer/0", "SIGKILL", "killed"),
        {**event(20.2, "fault_injected", "trainer/0", number=2), **fault},
        exited(20.3, "trainer/0", "SIGKILL", "killed"),
        event(21.0, "slot_ready", "trainer/0"),
        {**event(22.0, "fault_injected", "trainer/0", number=3), **fault, "name": "delay"},
    ]
    (note,) = explain(told, RUNNING).notes
    assert "'delay'" in note.text, "what it caused is not known (yet)"


def test_a_gang_is_one_failure_of_all_its_ranks() -> None:
    told = [
        event(10.0, "run_started"),
        exited(20.0, "trainer/1", "NCCL error", "cuda"),
        event(20.0, "gang_failed", "trainer/1", role="trainer", generation=2, cause="NCCL error"),
        exited(20.1, "trainer/0", "starts again with others: trainer/1: NCCL error", "killed"),
        event(20.1, "slot_restarting", "trainer/0", wait_s=0.5, restarts=1),
        event(20.1, "slot_restarting", "trainer/1", wait_s=0.5, restarts=1),
        event(20.6, "gang_started", role="trainer", generation=3, ranks=2, nodes=["a"]),
        event(25.0, "slot_ready", "trainer/0"),
        event(26.0, "slot_ready", "trainer/1"),
    ]
    (incident,) = explain(told, RUNNING, "trainer").incidents
    assert incident.slots == ["trainer/1", "trainer/0"]
    assert incident.policy == [
        "generation 2 of the gang ends as one failure",
        "restart 1 after a back-off of 0.5 s",
        "2 ranks start as generation 3 with a new rendezvous",
    ]
    assert incident.away_s == pytest.approx(6.0)


def test_escalation_is_reported_step_by_step() -> None:
    told = [
        event(10.0, "run_started"),
        exited(20.0, "rollout/1", "broke"),
        event(20.0, "slot_given_up", "rollout/1", reason="failed 6 times in 120 s", cause="broke", left=3),
        exited(30.0, "rollout/2", "broke too"),
        event(30.0, "role_restarting", "rollout/2", role="rollout", reason="failed 6 times in 120 s"),
        exited(30.1, "rollout/3", "starts again with others: rollout/2", "killed"),
    ]
    first, second = explain(told, RUNNING, "rollout").incidents
    assert first.policy == ["escalated: given up, 3 others go on, as it failed 6 times in 120 s"]
    assert second.policy == ["escalated: the role is restarted as a whole, as rollout/2 failed 6 times in 120 s"]
    assert second.slots == ["rollout/2", "rollout/3"]
    assert second.away_s is None


def test_a_dead_agent_is_the_story(capsys: pytest.CaptureFixture[str]) -> None:
    dead = msgspec.structs.replace(
        RUNNING, status="agent died", reason="the agent was ended by SIGKILL", exit_code=1, slots=[]
    )
    keepers_word = [*EVENTS, {**event(40.0, "agent_died", cause="the agent was ended by SIGKILL"), "by": "keeper"}]
    found = explain(keepers_word, dead)
    assert found.agent_died == "the agent was ended by SIGKILL"
    show_why(found)
    out = capsys.readouterr().out
    assert "The node agent died" in out and "relax-rt up" in out
    assert "No role has failed" not in out
    # Killed with its keeper: nobody could tell of it.
    found = explain(EVENTS, msgspec.structs.replace(dead, reason=""))
    assert "killed together with its keeper" in found.agent_died
    assert found.last_event == 34.0


def test_a_log_of_many_events_is_read_in_bounded_memory() -> None:
    def endless() -> Iterator[dict[str, Any]]:
        yield event(0.0, "run_started")
        for n in range(50_000):
            yield exited(float(n), f"rollout/{n % 7}", "again")
            yield event(n + 0.5, "slot_ready", f"rollout/{n % 7}")

    tracemalloc.start()
    found = explain(endless(), RUNNING)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.incidents_left_out == 50_000 - MAX_SHOWN
    assert sum(death.failures for death in found.deaths) == 50_000
    assert peak < 4 << 20


FOLDER = (
    "/mnt/shared/weights/"
    + "run-" * 30
    + "is a file: Not a directory (put the folder back, then `relax-rt up` resumes)"
)


def ended_by_trainer(*causes: str) -> tuple[list[dict[str, Any]], RunStatus]:
    """A rollout is killed and comes back; then the trainer fails, for the last cause for good."""
    told = [event(10.0, "run_started"), exited(12.0, "rollout/1", "SIGKILL", "killed")]
    told += [event(12.5, "slot_ready", "rollout/1")]
    for n, cause in enumerate(causes):
        told += [exited(20.0 + n, "trainer/0", cause), event(20.5 + n, "slot_ready", "trainer/0")]
    told.pop()
    reason = f"trainer/0 cannot go on: {causes[-1]}"
    told.append(event(30.0, "run_draining", reason=reason, exit_code=1))
    final = msgspec.convert(told[-2]["diagnosis"], Diagnosis)
    ended = msgspec.structs.replace(RUNNING, status="failed", exit_code=1, reason=reason, diagnosis=final)
    return told, ended


def test_what_ended_the_run_stands_first_once_and_whole(capsys: pytest.CaptureFixture[str]) -> None:
    told, ended = ended_by_trainer(FOLDER)
    show_why(explain(told, ended))
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "two is failed: trainer/0 cannot go on"
    flat = " ".join(out.split())
    assert flat.count(FOLDER[:30]) == 1 and FOLDER in flat and "…" not in out
    assert "First failure" not in out, "it was mended, and is another role's"
    assert out.index("What ended the run") < out.index("rollout/1")
    assert "Last failure: trainer/0" in out


def test_a_reason_that_comes_again_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    told, ended = ended_by_trainer(FOLDER, FOLDER, FOLDER)
    show_why(explain(told, ended))
    out = capsys.readouterr().out
    assert " ".join(out.split()).count(FOLDER[:30]) == 1
    assert "3 times until" in out and "3 times, not back; last: exception: as above" in out


def test_an_earlier_reason_of_the_role_that_ended_the_run_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    told, ended = ended_by_trainer("the disk was full", FOLDER)
    told = [e for e in told if e.get("slot") != "rollout/1"]
    show_why(explain(told, ended))
    out = capsys.readouterr().out
    assert out.index("What ended the run") < out.index("First failure") < out.index("Each failure")


def test_a_run_that_was_ended_by_request_has_no_failures(capsys: pytest.CaptureFixture[str]) -> None:
    now = "relax-rt down --now"
    told = [
        event(10.0, "run_started"),
        event(20.0, "run_draining", reason=now, exit_code=137),
        *(event(20.1, "slot_killed", slot, reason=now) for slot in ("trainer/0", "rollout/0")),
        *(exited(20.2, slot, now, "killed") for slot in ("trainer/0", "rollout/0")),
        event(20.3, "run_ended", status="killed", exit_code=137, reason=now),
    ]
    found = explain(told, msgspec.structs.replace(RUNNING, status="killed", exit_code=137, reason=now, slots=[]))
    assert (found.first, found.deaths, found.incidents) == (None, [], [])
    show_why(found)
    out = capsys.readouterr().out
    assert out.splitlines()[:2] == [f"two is killed: {now}", "No role has failed since the run was started."]
    assert "died" not in out


def test_earlier_starts_are_named_with_their_end_and_their_losses(capsys: pytest.CaptureFixture[str]) -> None:
    loss = {"task": "reward", "gist": "r.py:3", "cause": "KeyError: 'a' at r.py:3", "where": "r.py:3", "groups": 8}
    told = [
        event(10.0, "run_started"),
        exited(12.0, "trainer/0", "killed for memory", "oom"),
        event(20.0, "run_started"),
        event(21.0, "members_lost", **loss, prompts=2, members=64),
        event(22.0, "run_ended", status="failed", exit_code=1, reason="trainer/0 cannot go on: 64 groups failed"),
        event(30.0, "run_started"),
        event(31.0, "members_lost", **loss, prompts=1, members=1),
    ]
    found = explain(told, RUNNING)
    assert [(one.status, len(one.losses), one.began, one.ended) for one in found.earlier] == [
        ("agent died", 0, 10.0, 12.0),
        ("failed", 1, 20.0, 22.0),
    ]
    assert [one.members for one in found.losses] == [1]
    show_why(found)
    out = capsys.readouterr().out
    assert "failed: trainer/0 cannot go on: 64 groups failed" in out and "agent died: it was killed together" in out
    assert "lost: 64 samples of 8 groups (2 prompts) failed at task reward: KeyError: 'a' at r.py:3" in out
    show_why(explain(told, RUNNING, "trainer"), "trainer")
    assert "Earlier starts" not in capsys.readouterr().out
    assert explain(told[:4], RUNNING).earlier[0].reason and explain(told[:1], RUNNING).earlier == []
