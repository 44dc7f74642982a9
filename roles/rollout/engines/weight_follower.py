"""An engine's way through the versions: each is whole on it, or the engine ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable

from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.rollout.engines.base import Engine, KvPolicy
from relax_rt.roles.rollout.engines.base import Swap as Swapped
from relax_rt.roles.rollout.engines.version_machine import (
    AcknowledgeVersion,
    Action,
    FetchFailure,
    FetchVersion,
    RemoveEngine,
    SwapVersion,
    VersionMachine,
    VersionOvertaken,
    WaitForVersion,
)
from relax_rt.roles.rollout.engines.weight_sources import MakeSource, source_for
from relax_rt.roles.training.publication.settings import PublicationTable
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import Corrupt, DeadlineExceeded, Gone, OutOfSpace, Refused, RelaxError, Unreachable
from relax_rt.transport.weights.source import WeightSource

WATCH_S = 20.0
RETRY_S = 0.2


class EngineRemoved(RelaxError):
    """This engine could not be brought to a version whole. Its role ends, and a successor starts anew."""


class WeightFollower:
    """Keeps an engine at committed versions: fetch and verify in the background, swap at a token boundary.

    The engine serves nothing before the first version is whole on it. It has publication.ack_timeout_s to get from one
    to the next: an engine that is stuck ends itself, so that nobody has to find out about it and it is restarted.

    Args:
        kv: what becomes of the cache at a swap.
        source: where versions come from; unless given, by the config and by where this node is.
    """

    def __init__(
        self, ctx: RoleContext, engine: Engine, kv: KvPolicy = "keep", source: MakeSource | None = None
    ) -> None:
        self._ctx, self._engine, self._kv = ctx, engine, kv
        self._source = source or source_for(ctx)
        self._machine = VersionMachine(ctx.config.table(PublicationTable).ack_timeout_s)
        self._swap, self._fetch_s = Swapped(0, 0.0, 0), 0.0
        self._fetched: WeightSource | None = None
        self._empty = False
        self.record = VersionRecord(0, 0, 0)

    async def follow(self, record: VersionRecord) -> bool:
        """Bring the engine to `record`. False when a newer version took its place before it was whole.

        Raises:
            EngineOut: it cannot be whole there; the role must end.
        """
        began = time.monotonic()
        action = self._machine.follow(record, began)
        while True:
            match action:
                case FetchVersion():
                    action = await self._fetch(action)
                case SwapVersion():
                    action = await self._swap_in(action.record)
                case WaitForVersion(seconds=seconds):
                    await asyncio.sleep(seconds)
                    self._machine.committed(await self._newest())
                    action = self._machine.tick(time.monotonic())
                case AcknowledgeVersion():
                    await self._acknowledge(action.record, time.monotonic() - began)
                    return True
                case VersionOvertaken():
                    self._ctx.event("weights_skipped", version=record.version, why="a newer version took its place")
                    return False
                case RemoveEngine(why=why):
                    self._ctx.event("engine_removed", version=record.version, has=self.record.version, why=why)
                    raise EngineRemoved(f"{self._ctx.who} cannot get to policy version {record.version}", why=why)
                case None:
                    raise EngineRemoved(f"{self._ctx.who} at policy version {record.version}", why="it is out already")

    async def again(self, record: VersionRecord) -> bool:
        """`follow`, for an engine that has let go of its weights: also to the version that it had.

        Raises:
            EngineOut: see follow.
        """
        self._empty = True
        return await self.follow(record)

    async def _fetch(self, action: FetchVersion) -> Action | None:
        record, began = action.record, time.monotonic()
        holds = None if action.full or self._empty or not self.record.version else self.record

        source: WeightSource | None = None

        async def prepare() -> None:
            nonlocal source
            source = await asyncio.to_thread(self._source, record, holds)
            await self._engine.prepare(source)

        failure = await self._attempt(prepare())
        now = time.monotonic()
        if failure is not None:
            if failure[0] == "refused" and source is not None and source.payload != "full":
                failure = ("corrupt", failure[1])  # it may still fit as a whole
            self._ctx.event("weights_prepare_failed", version=record.version, failure=failure[0], why=failure[1])
            self._ctx.log.warning("a version could not be prepared", version=record.version, why=failure[1])
            return self._machine.failed(record.version, *failure, now)
        self._fetch_s, self._fetched = now - began, source
        return self._machine.fetched(record.version, now)

    async def _swap_in(self, record: VersionRecord) -> Action | None:
        async def commit() -> None:
            self._swap = await self._engine.commit(record, self._kv)

        # Whatever it was, the engine may sample from anything now.
        failure = await self._attempt(commit(), (Exception,))
        now = time.monotonic()
        if failure is not None:
            return self._machine.failed(record.version, *failure, now)
        return self._machine.swapped(record.version, self._engine.load().version, now)

    async def _attempt(
        self, work: Awaitable[None], foreseen: tuple[type[Exception], ...] = (RelaxError, OSError)
    ) -> tuple[FetchFailure, str] | None:
        """Have the engine do something within its time; answers with how it failed."""
        left = self._machine.left_s(time.monotonic())
        try:
            # Not wait_for, which forgets a cancellation that comes together with the result.
            async with asyncio.timeout(left):
                await work
        except TimeoutError:
            return "failed", f"not done within the {self._machine.timeout_s:g} s it has to get to a version"
        except (Gone, Unreachable, DeadlineExceeded, OutOfSpace) as error:
            return "gone", str(error)
        except Corrupt as error:
            return "corrupt", str(error)
        except Refused as error:
            return "refused", str(error)
        except foreseen as error:
            return "failed", str(error) if isinstance(error, RelaxError) else repr(error)
        return None

    async def _acknowledge(self, record: VersionRecord, seconds: float) -> None:
        self.record, self._empty = record, False
        source = self._fetched
        facts = {
            "version": record.version,
            "step": record.step,
            "carrier": source.carrier if source is not None else "",
            "payload": source.payload if source is not None else "",
            "bytes": source.nbytes if source is not None else 0,
            "seconds": round(seconds, 4),
            "fetch_s": round(self._fetch_s, 4),
            "pause_s": round(self._swap.pause_s, 4),
        }
        self._ctx.event("weights_swapped", **facts)
        self._ctx.log.info("weights swapped", **facts)
        await self._ctx.ready(record.version)

    async def _newest(self) -> int:
        """The newest committed version; what is known where the registry is away."""
        try:
            changes = await self._ctx.registry.watch(0, 0.0)
        except (Unreachable, DeadlineExceeded):
            return 0
        return changes.committed.version if changes.committed is not None else 0


class EngineFailure:
    """Carries a failure of the engine to the role, which ends with it."""

    def __init__(self) -> None:
        self._future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __call__(self, error: BaseException) -> None:
        """Called on the event loop."""
        if not self._future.done():
            self._future.set_exception(error)

    def check(self) -> None:
        """Raises what ended the engine, if it has: a better reason than that of who stumbled over it."""
        if self._future.done():
            self._future.result()

    async def wait(self) -> None:
        """Raises what ended the engine; never returns otherwise."""
        await asyncio.shield(self._future)
