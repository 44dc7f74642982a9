"""The writer role: writes metrics.jsonl to TensorBoard and W&B. Its failure affects no other role."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from relax_rt.config.schema import RoleSettings
from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.base.role import RLRole
from relax_rt.roles.trackers.feed import Feed, TensorBoardSink, WandbSink
from relax_rt.roles.trackers.settings import WriterSettings

if TYPE_CHECKING:
    from relax_rt.roles.trackers.feed import Sink

POLL_S = 1.0
OPEN_ALLOWANCE_S = 120.0
DRAIN_S = 8.0
"""Remaining records are written within this time once the run ends; a resumed run writes the rest."""


class WriterRole(RLRole[WriterSettings]):
    """Follows the metrics file and feeds one sink after the other.

    A sink that fails (a full disk, a missing package) is closed and reported in an event; the others continue. Without
    any left the role has finished. It is never restarted within a run, and no process waits for it.
    """

    kind: ClassVar[str] = "writer"
    tier: ClassVar[int] = 50
    restart: ClassVar[str] = "temporary"
    Settings: ClassVar[type[RoleSettings]] = WriterSettings

    def __init__(self, ctx: RoleContext) -> None:
        super().__init__(ctx)
        self._feeds: list[Feed] = []

    async def run(self) -> None:
        await self.ctx.ready()
        self.ctx.progress.extend(OPEN_ALLOWANCE_S, "opening")
        await asyncio.to_thread(self._open)
        over: float | None = None
        while self._feeds:
            if over is None and self.ctx.stopping.is_set():
                over = time.monotonic() + DRAIN_S
            self.ctx.progress.waiting("")
            done = await asyncio.to_thread(self._poll)
            self.ctx.progress.advance(done, "writing metrics")
            if over is not None and (not done or time.monotonic() > over):
                break
            if not done:
                await self._wait()
        if not self._feeds:
            self.ctx.event("writer_ended", why="no sink is left")

    async def teardown(self) -> None:
        await asyncio.to_thread(self._close)
        await super().teardown()

    async def _wait(self) -> None:
        self.ctx.progress.waiting("new records")
        try:
            async with asyncio.timeout(POLL_S):
                await self.ctx.stopping.wait()
        except TimeoutError:
            pass

    def _open(self) -> None:
        def tensorboard() -> Sink:
            return TensorBoardSink(self.ctx.run_dir / "tensorboard")

        def wandb() -> Sink:
            run = self.config.run.name
            shown_config = self.config.model_dump(mode="json", exclude={"roles", "config_dir"})
            project, folder = self.settings.project, self.ctx.run_dir / "wandb"
            return WandbSink(folder, project=project, name=run, run_id=self.ctx.run_id, config=shown_config)

        makers: dict[str, Callable[[], Sink]] = {"tensorboard": tensorboard, "wandb": wandb}
        for name, make in makers.items():
            if getattr(self.settings, name):
                try:
                    sink = make()
                    self._feeds.append(Feed(self.ctx.run_dir, self.ctx.run_dir / name, sink))
                except Exception as error:  # noqa: BLE001 whatever a sink raises ends that sink alone
                    self._failed(name, error)

    def _poll(self) -> int:
        """Write new records to each sink; return the bytes handled."""
        done = 0
        for feed in list(self._feeds):
            try:
                done += feed.poll()
            except Exception as error:  # noqa: BLE001 whatever a sink raises ends that sink alone
                self._feeds.remove(feed)
                self._failed(feed.sink.name, error)
                self._close_feed(feed)
        return done

    def _failed(self, name: str, error: Exception) -> None:
        why = f"{type(error).__name__}: {error}"[:500]
        self.ctx.event("writer_failed", sink=name, why=why)
        self.ctx.log.warning("a metrics writer has failed; the run continues without it", sink=name, why=why)

    def _close(self) -> None:
        for feed in self._feeds:
            if feed.skipped:
                self.ctx.event("writer_skipped", sink=feed.sink.name, records=feed.skipped)
            self._close_feed(feed)
        self._feeds.clear()

    def _close_feed(self, feed: Feed) -> None:
        try:
            feed.close()
        except Exception as error:  # noqa: BLE001 as above
            self.ctx.log.warning("a metrics writer could not be closed", sink=feed.sink.name, why=str(error))
