"""A run in which every slot is up and none gets on ends, and says who waited for what."""

from __future__ import annotations

import pytest
from supervisor_bench import spec

from relax_rt.interfaces.agent import Diagnosis
from relax_rt.supervision.protocol import (
    Action,
    DrainRequested,
    Emit,
    Event,
    RunDone,
    RunStarted,
    SlotExited,
    SlotProgress,
    SlotReady,
    SlotSpawned,
    Tick,
)
from relax_rt.supervision.supervisor import PAUSE_S, Supervisor
from relax_rt.supervision.tree import RoleSpec

STALL_S = 300.0


class Run:
    """A queue that always moves, a rollout and a trainer, all ready."""

    def __init__(self, stall_after_s: float | None = STALL_S) -> None:
        specs = [
            spec("queue/0", tier=10, system=True, counts_for_stall=False),
            spec("rollout/0", tier=40),
            spec("trainer/0", tier=40),
        ]
        roles = [RoleSpec(kind=kind, role_restarts=0) for kind in ("queue", "rollout", "trainer")]
        self.core = Supervisor(specs, lambda: 0.5, roles, stall_after_s=stall_after_s)
        self.now, self.count = 0.0, dict.fromkeys(("queue/0", "rollout/0", "trainer/0"), 0)
        self.actions: list[Action] = []
        self(RunStarted())
        for epoch, slot in enumerate(self.count, 1):
            self(SlotSpawned(slot, epoch, 1000 + epoch), SlotReady(slot))

    def __call__(self, *events: Event) -> None:
        for event in events:
            self.actions += self.core.handle(event, self.now)

    def passes(self, seconds: float, *moving: str) -> None:
        """Each slot reports every 5 s; those that are named get on, the others wait."""
        for _ in range(int(seconds / 5)):
            self.now += 5
            for slot in self.count:
                if not any(view.slot == slot and view.state == "ready" for view in self.core.view()):
                    continue
                self.count[slot] += slot in moving or slot == "queue/0"
                waiting = "" if slot in moving or slot == "queue/0" else f"what {slot} waits for"
                self(SlotProgress(slot, self.count[slot], waiting=waiting))

    @property
    def ending(self) -> str:
        return self.core.draining


def test_a_run_without_progress_ends_and_each_slot_gives_what_it_waits_for() -> None:
    run = Run()
    run.passes(STALL_S - 10)
    assert run.ending == ""
    run.passes(20)
    assert "nothing moved for 300 s" in run.ending
    assert "rollout/0: what rollout/0 waits for; trainer/0: what trainer/0 waits for" in run.ending
    told = {
        a.fields["slot"]: a.fields["waiting"] for a in run.actions if isinstance(a, Emit) and a.kind == "slot_stalled"
    }
    assert told == {slot: f"what {slot} waits for" for slot in ("rollout/0", "trainer/0")}


@pytest.mark.parametrize("moving", ["rollout/0", "trainer/0"])
def test_a_single_token_or_step_now_and_then_is_enough(moving: str) -> None:
    run = Run()
    for _ in range(5):
        run.passes(STALL_S - 20)
        run.passes(5, moving)
    assert run.ending == ""


def test_without_stall_after_a_run_never_ends_for_a_stall() -> None:
    run = Run(stall_after_s=None)
    run.passes(20 * STALL_S)
    assert run.ending == ""


def test_known_slow_work_and_starts_have_deadlines_of_their_own() -> None:
    run = Run()
    run(SlotProgress("trainer/0", 0, detail="downloading the model", extend_s=900.0))
    run.passes(900 + STALL_S - 10)
    assert run.ending == ""
    run.passes(20)
    assert run.ending
    run = Run()
    run.passes(STALL_S - 20)
    run(SlotExited("rollout/0", Diagnosis(slot="rollout/0", epoch=2, kind="exception", cause="x", at=1.0)))
    run.passes(STALL_S - 20)
    assert run.ending == "", "a slot that comes back is movement"


def test_what_an_operator_drained_waits_for_the_operator() -> None:
    run = Run()
    run(DrainRequested("rollout/0"))
    run(SlotExited("rollout/0", Diagnosis(slot="rollout/0", epoch=2, kind="clean", cause="finished")))
    run.passes(4 * STALL_S)
    assert run.ending == ""


def test_a_suspended_agent_does_not_count_its_pause_as_a_stall() -> None:
    run = Run(stall_after_s=PAUSE_S + 30)
    run.now += PAUSE_S + 40
    run(Tick())
    assert run.ending == ""
    run.passes(20)
    assert run.ending == ""
    run.passes(20)
    assert run.ending


def test_a_stall_drains_the_run_and_its_time_is_a_deadline() -> None:
    run = Run()
    run.passes(5)
    due = run.core.next_deadline()
    assert due is not None and due <= run.now + STALL_S
    run.passes(2 * STALL_S)
    for slot in ("trainer/0", "rollout/0", "queue/0"):
        run(SlotExited(slot, Diagnosis(slot=slot, epoch=1, kind="clean", cause="finished")))
    (done,) = [a for a in run.actions if isinstance(a, RunDone)]
    assert done.exit_code == 1 and "nothing moved" in done.reason
