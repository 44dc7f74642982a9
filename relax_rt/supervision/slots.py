"""One slot as the supervisor's core remembers it, and the limit on its restarts."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Literal

import msgspec

from relax_rt.supervision.diagnosis import Diagnosis
from relax_rt.supervision.spec import SlotSpec

if TYPE_CHECKING:
    from relax_rt.supervision.gang import Cohort
    from relax_rt.supervision.tree import RoleNode

State = Literal["pending", "requested", "starting", "ready", "hung", "stopping", "killing", "backoff", "ended"]
LIVE: frozenset[State] = frozenset({"requested", "starting", "ready", "hung", "stopping", "killing"})
STORY = 24


class SlotView(msgspec.Struct, frozen=True, kw_only=True):
    """A slot as people see it.

    Attributes:
        since: the core's clock at the last change of state.
        waiting: why it is idle, or why it is not started.
        node: where it runs or last ran.
        given_up: it used up its restarts, and the role goes on without it.
        generation: of its gang, else 0.
        kill_at, kill_latest: while it stops, when it is killed by the core's clock: unless it makes progress, and
            whatever it does; else None.
    """

    slot: str
    kind: str
    tier: int
    state: State
    epoch: int
    pid: int
    restarts: int
    since: float
    progress: int
    detail: str
    waiting: str
    last: Diagnosis | None
    node: str = ""
    given_up: bool = False
    generation: int = 0
    kill_at: float | None = None
    kill_latest: float | None = None


class Window:
    """How often something may be restarted after failures: `max_restarts` within `period_s` of its own good time.

    Good time is what passes between `begin` and `settle`: waits, starts and hangs do not age a restart.
    """

    def __init__(self, max_restarts: int, period_s: float) -> None:
        self.good_s = 0.0
        self._max, self._period_s = max_restarts, period_s
        self._good_from: float | None = None
        self._failures: deque[tuple[float, Diagnosis]] = deque(maxlen=max_restarts + 1)

    def begin(self, now: float) -> None:
        """From now on it does well."""
        if self._good_from is None:
            self._good_from = now

    def settle(self, until: float) -> None:
        """It did well until then."""
        if self._good_from is not None:
            self.good_s += max(0.0, until - self._good_from)
            self._good_from = None

    def failed(self, diagnosis: Diagnosis) -> int | None:
        """Take a failure; answers with the number of restarts already in the window, None when one more is too many."""
        while self._failures and self.good_s - self._failures[0][0] >= self._period_s:
            self._failures.popleft()
        before = len(self._failures)
        self._failures.append((self.good_s, diagnosis))
        return before if before < self._max else None

    def amend(self, diagnosis: Diagnosis) -> bool:
        """Take another failure of what just failed as one: the earlier is the cause. True if that is this one."""
        if not self._failures or not diagnosis.failed or diagnosis.at >= self._failures[-1][1].at:
            return False
        self._failures[-1] = (self._failures[-1][0], diagnosis)
        return True

    def clear(self) -> None:
        """Count from nothing again."""
        self._failures.clear()

    @property
    def remembered(self) -> list[Diagnosis]:
        """The failures that count now."""
        return [diagnosis for _, diagnosis in self._failures]


class Slot:
    """The state of one slot. `Supervisor` alone changes it."""

    def __init__(self, spec: SlotSpec, role: RoleNode, window: Window) -> None:
        self.spec, self.role, self.window = spec, role, window
        self.index = int(spec.slot.rpartition("/")[2])
        self.state: State = "pending"
        self.since = 0.0
        self.deadline: float | None = None
        self.epoch = self.pid = self.restarts = 0
        self.node = ""
        self.moved_at = 0.0
        self.progress = 0
        self.detail = self.waiting = ""
        self.was_ready = self.finished = self.failed = False
        self.restart_asked = False
        """By an operator."""
        self.drained = self.given_up = False
        """Ended, but to be started again by an operator; the run does not end because of a drained one."""
        self.retired = False
        """Scaled away: it is forgotten once it has exited."""
        self.gated = True
        """It has not been started yet, so lower tiers come first."""
        self.roomless = False
        """No node has room for it, and nothing has changed since that was found."""
        self.exited = False
        """Its process is gone, and what comes next is being decided."""
        self.lost = False
        """It went with its node, and its exit is about to be taken: there is nobody to give orders to."""
        self.cohort: Cohort | None = None
        self.resume: State = "ready"
        self.condemned: tuple[Literal["killed", "hang"], str] = ("killed", "")
        self.last: Diagnosis | None = None
        self.story: deque[str] = deque(maxlen=STORY)

    @property
    def name(self) -> str:
        """As `rollout/0`."""
        return self.spec.slot

    @property
    def live(self) -> bool:
        """A process exists, or may come to be."""
        return self.state in LIVE and not self.exited

    def forget_process(self) -> None:
        """Its process is gone."""
        self.pid = self.progress = 0
        self.detail = self.waiting = ""
        self.lost = False

    def renew(self) -> None:
        """A new incarnation is asked for."""
        self.forget_process()
        self.epoch = 0
        self.finished = self.restart_asked = self.failed = False
        self.drained = self.given_up = self.gated = self.roomless = False
        self.cohort = None

    def view(self) -> SlotView:
        """For people."""
        return SlotView(
            slot=self.name,
            kind=self.spec.kind,
            tier=self.spec.tier,
            state=self.state,
            epoch=self.epoch,
            pid=self.pid,
            restarts=self.restarts,
            since=self.since,
            progress=self.progress,
            detail=self.detail,
            waiting=self.waiting or self.role.holdup(self),
            last=self.last,
            node=self.node,
            given_up=self.given_up,
            generation=self.role.generation,
            kill_at=self.deadline if self.state == "stopping" else None,
            kill_latest=self.since + self.spec.stop_most_s if self.state == "stopping" else None,
        )
