"""When nothing comes of a slot's episodes any more although it has played some: then the role starts anew.

That mends what broke in the slot's own process. Where nothing ever came of a slot, its failed groups are counted by the
queue, which ends the run (docs/progress.md). Held-out episodes are in no group: ends of a slot because of them end the
run by `ending`.
"""

from __future__ import annotations

from relax_rt.metrics import read_metrics
from relax_rt.role import RoleContext
from relax_rt.transport.errors import GivenUp, RelaxError

KIND = "env_standstill"
"""Of the metrics record, and the event, of a slot that ends because of it."""
LOSSES = 3
"""How often an episode that was lost through no fault of its own is begun before its group goes to others."""
FAILURES_IN_A_ROW = 64
"""Episodes that fail one after the other before the environment, and not a task, is held to be at fault."""
PROMPTS = 4
"""Of so many different ones at least: what is wrong with a task is the queue's affair, which retires its prompt."""
ENDS = 3
"""So many ends of slots without an episode in between, in one life of the run, end it."""


class Fruitless(RelaxError):
    """Nothing comes of a slot's episodes: its role ends."""


class Standstill:
    """Counts episodes of which nothing came, in a row, once one was played. Pure.

    Args:
        environment: for people. in_flight: episodes at a time. What kills what many wait for (a gateway) takes all of
            them along, each as often as one may be lost.
    """

    def __init__(self, environment: str, in_flight: int) -> None:
        self._environment, self._most = environment, LOSSES * max(FAILURES_IN_A_ROW, in_flight)
        self._failed = self._begun = 0
        self._prompts: set[int] = set()
        self._why = ""
        self._has_played = False

    def played(self) -> None:
        """One came to its end."""
        self._has_played = True
        self._failed = self._begun = 0
        self._prompts.clear()

    def lost(self, prompt: int, why: str) -> None:
        """One was lost, or could not be made.

        Raises:
            Fruitless: too many in a row.
        """
        self._begun, self._why = self._begun + 1, why
        if len(self._prompts) < PROMPTS:
            self._prompts.add(prompt)
        if self._has_played and self._begun >= self._most and len(self._prompts) >= PROMPTS:
            what = f"{self._begun} times in a row an episode was begun, and none came to its end"
            hint = "see the events episode_lost, episode_not_made and environment_failed, and `relax-rt why`"
            raise Fruitless(what, why=f"the last one: {why}", hint=hint)

    def failed(self, prompt: int, why: str) -> None:
        """One failed because of its environment.

        Raises:
            Fruitless: too many in a row.
        """
        self.lost(prompt, why)
        self._failed += 1
        if self._has_played and self._failed >= FAILURES_IN_A_ROW and len(self._prompts) >= PROMPTS:
            what = f"{self._failed} episodes of {self._environment} failed one after the other"
            raise Fruitless(what, why=why, hint="mend the environment; the episodes are played again")

    def told(self) -> str:
        """How it stands, in words; empty while episodes come to their ends."""
        if self._begun <= LOSSES:
            return ""
        return f"{self._begun} in a row came to nothing, the last one: {self._why}"


def ending(ctx: RoleContext, error: Fruitless) -> RelaxError:
    """What the role is to end with: the error; where slots ended so before with no episode in between, what ends the
    run. A run that is begun again (`relax-rt up`) has its tries again."""
    times = 1
    for record in read_metrics(ctx.run_dir):
        if record.get("kind") in ("made", "evaluation"):
            times = 1
        elif record.get("kind") == KIND and record.get("run") == ctx.run_id:
            times += 1
    ctx.metrics({"kind": KIND, "slot": ctx.who.slot, "run": ctx.run_id, "times": times, "why": str(error)})
    ctx.event(KIND, times=times, why=str(error))
    if times < ENDS:
        return error
    why = f"{error.why}; it is end number {times} of an env role without an episode in between"
    return GivenUp(error.what, why=why, hint=f"{error.hint}; `relax-rt up` goes on from the last checkpoint")
