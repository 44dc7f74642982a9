"""Restart an env slot whose episodes all fail, once at least one has succeeded.

A restart repairs a broken process. If no episode of the slot ever succeeded, the queue counts its failed groups and
ends the run (guides/progress.md). Held-out episodes belong to no group: after MAX_RESTARTS restarts because of them,
`stall_error` ends the run.
"""

from __future__ import annotations

from relax_rt.interfaces.role import RoleContext
from relax_rt.observe.metrics import read_metrics
from relax_rt.transport.rpc.errors import GivenUp, RelaxError

KIND = "env_stalled"
"""Kind of the metrics record and of the event of such a restart."""
MAX_LOSSES = 3
"""Attempts at an episode that is lost through no fault of its own, before its group goes to other slots."""
MAX_FAILURES = 64
"""Consecutive failed episodes before the environment, not a task, is considered at fault."""
MIN_PROMPTS = 4
"""Minimum number of different prompts among them: the queue retires the prompt of a single broken task."""
MAX_RESTARTS = 3
"""Restarts without a finished episode in between that end the run."""


class EpisodesStalled(RelaxError):
    """All recent episodes of a slot failed: its role ends, to be restarted."""


class StallDetector:
    """Counts consecutive failed or lost episodes, after the first that finished. Pure.

    Args:
        environment: name for messages.
        in_flight: concurrent episodes. A dead service (a gateway) loses all of them, each up to MAX_LOSSES times, so
            the limit on lost episodes is MAX_LOSSES times this.
    """

    def __init__(self, environment: str, in_flight: int) -> None:
        self._environment, self._most = environment, MAX_LOSSES * max(MAX_FAILURES, in_flight)
        self._failed = self._attempts = 0
        self._prompts: set[int] = set()
        self._why = ""
        self._has_played = False

    def record_finished(self) -> None:
        """Record an episode that finished."""
        self._has_played = True
        self._failed = self._attempts = 0
        self._prompts.clear()

    def record_lost(self, prompt: int, why: str) -> None:
        """Record an episode that was lost, or could not be created.

        Raises:
            EpisodesStalled: too many in a row.
        """
        self._attempts, self._why = self._attempts + 1, why
        if len(self._prompts) < MIN_PROMPTS:
            self._prompts.add(prompt)
        if self._has_played and self._attempts >= self._most and len(self._prompts) >= MIN_PROMPTS:
            what = f"{self._attempts} consecutive attempts at episodes, and none finished"
            hint = "see the events episode_lost, episode_not_generated and environment_failed, and `relax-rt why`"
            raise EpisodesStalled(what, why=f"the last one: {why}", hint=hint)

    def record_failed(self, prompt: int, why: str) -> None:
        """Record an episode that failed because of its environment.

        Raises:
            EpisodesStalled: too many in a row.
        """
        self.record_lost(prompt, why)
        self._failed += 1
        if self._has_played and self._failed >= MAX_FAILURES and len(self._prompts) >= MIN_PROMPTS:
            what = f"{self._failed} consecutive episodes of {self._environment} failed"
            raise EpisodesStalled(what, why=why, hint="mend the environment; the episodes are played again")

    def summary(self) -> str:
        """Describe the consecutive losses; empty while episodes finish."""
        if self._attempts <= MAX_LOSSES:
            return ""
        return f"{self._attempts} consecutive attempts failed, the last one: {self._why}"


def stall_error(ctx: RoleContext, error: EpisodesStalled) -> RelaxError:
    """Return the error that the role ends with: `error`, or GivenUp, which ends the run, after MAX_RESTARTS restarts
    without a finished episode in between. The count starts at 0 when the run is resumed."""
    times = 1
    for record in read_metrics(ctx.run_dir):
        if record.get("kind") in ("produced", "evaluation"):
            times = 1
        elif record.get("kind") == KIND and record.get("run") == ctx.run_id:
            times += 1
    ctx.metrics({"kind": KIND, "slot": ctx.who.slot, "run": ctx.run_id, "times": times, "why": str(error)})
    ctx.event(KIND, times=times, why=str(error))
    if times < MAX_RESTARTS:
        return error
    why = f"{error.why}; it is end number {times} of an env role without an episode in between"
    return GivenUp(error.what, why=why, hint=f"{error.hint}; `relax-rt up` goes on from the last checkpoint")
