"""A trainer whose gang gathers slowly, and is struck in the middle of it: the target of a test's config."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from relax_rt.roles.training.backend.channel import WeightChannel
from relax_rt.roles.training.trainer import TrainerRole

STRIKES = ((1, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGKILL))
"""The rank that is struck, and how; one in each generation, in its fourth publication."""
SPARED = 3
SLOW_S = 0.4


class FragileTrainer(TrainerRole):
    """Says in `gathering` of the run directory whether parts of a version are on their way."""

    strikes = STRIKES

    def _load(self, loop: asyncio.AbstractEventLoop) -> None:
        super()._load(loop)
        gang: Any = self._follower if self._follower is not None else self.backend
        channel: WeightChannel = gang.ranks.publication
        struck, gathering = self.ctx.run_dir / "struck", self.ctx.run_dir / "gathering"
        struck.mkdir(exist_ok=True)
        done, fallen = [0], len(list(struck.iterdir()))

        def strike() -> None:
            if done[0] >= SPARED and fallen < len(self.strikes) and self.strikes[fallen][0] == channel.rank:
                (struck / str(fallen)).write_text(str(channel.rank))
                os.kill(os.getpid(), self.strikes[fallen][1])

        def harmed(call: Callable[..., None]) -> Callable[..., None]:
            def late(*arguments: Any) -> None:
                if channel.rank == 0:
                    gathering.touch()
                    time.sleep(SLOW_S)
                strike()
                call(*arguments)
                done[0] += 1
                if channel.rank == 0:
                    gathering.unlink()

            return late

        channel.send, channel.receive = harmed(channel.send), harmed(channel.receive)  # type: ignore[method-assign]


class SlowTrainer(FragileTrainer):
    """Only slow."""

    strikes = ()
