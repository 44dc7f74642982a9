"""Brings an engine from one committed policy version to the next, each whole or not at all.

    fetching -> verified -> swapped -> acknowledged | removed(reason)

`WeightFollower` runs beside the engine and does what `VersionMachine`, a pure state machine, decides. An engine reports
a version only after its own copy was verified and it samples from that copy. An engine that cannot get there ends,
and its successor starts at the committed version. The counterpart beside the trainer is
`training.publication.engine_tracker`; neither waits for the other, the registry stands between them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Literal, TypeAlias

import msgspec

from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.rollout.engines.base import Engine, KvPolicy, Swap
from relax_rt.roles.rollout.engines.weight_sources import MakeSource, source_for
from relax_rt.roles.training.publication.settings import PublicationTable
from relax_rt.transport.base.versions import ROOT, VersionRecord
from relax_rt.transport.rpc.errors import Corrupt, DeadlineExceeded, Gone, OutOfSpace, Refused, RelaxError, Unreachable
from relax_rt.transport.weights.source import WeightSource

RETRY_S = 0.2

FetchFailure = Literal["gone", "corrupt", "refused", "failed"]
"""gone: the version cannot be fetched now, or never again; corrupt: the bytes differ; refused: they do not fit this
engine, and never will; failed: anything else."""


class EngineRemoved(RelaxError):
    """This engine could not be brought to a version whole. Its role ends, and a successor starts anew."""


class WeightFollower:
    """Keeps an engine at committed versions: fetch and verify in the background, swap at a token boundary.

    The engine serves nothing before the first version is whole on it. It has publication.ack_timeout_s to get from one
    version to the next: a stuck engine ends itself, so that it is restarted and nobody else has to find out about it.

    Args:
        kv: whether the cache is kept or recomputed at a swap.
        source: where versions come from; by default as the config and the place of this node say.
    """

    def __init__(
        self, ctx: RoleContext, engine: Engine, kv: KvPolicy = "keep", source: MakeSource | None = None
    ) -> None:
        self._ctx, self._engine, self._kv = ctx, engine, kv
        self._make_source = source or source_for(ctx)
        self._machine = VersionMachine(ctx.config.table(PublicationTable).ack_timeout_s)
        self._swap, self._fetch_s = Swap(0, 0.0, 0), 0.0
        self._fetched: WeightSource | None = None
        self._weights_released = False
        self.record = VersionRecord(0, 0, 0)

    async def follow(self, record: VersionRecord) -> bool:
        """Bring the engine to `record`. False when a newer version took its place before it was whole.

        Raises:
            EngineRemoved: it cannot be whole there; the role must end.
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
                    try:
                        committed = (await self._ctx.registry.watch(0, 0.0)).committed
                    except (Unreachable, DeadlineExceeded):
                        committed = None
                    self._machine.committed(committed.version if committed is not None else 0)
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

    async def follow_again(self, record: VersionRecord) -> bool:
        """`follow`, for an engine that has released its weights: also to the version that it had."""
        self._weights_released = True
        return await self.follow(record)

    async def _fetch(self, action: FetchVersion) -> Action | None:
        record, began = action.record, time.monotonic()
        # The base that a delta may apply to.
        base = None if action.full or self._weights_released or not self.record.version else self.record
        source: WeightSource | None = None

        async def prepare() -> None:
            nonlocal source
            source = await asyncio.to_thread(self._make_source, record, base)
            await self._engine.prepare(source)

        failure = await self._attempt(prepare())
        now = time.monotonic()
        if failure is not None:
            if failure[0] == "refused" and source is not None and source.payload != "full":
                failure = ("corrupt", failure[1])  # the full version may still fit
            self._ctx.event("weights_prepare_failed", version=record.version, failure=failure[0], why=failure[1])
            self._ctx.log.warning("a version could not be prepared", version=record.version, why=failure[1])
            return self._machine.failed(record.version, *failure, now)
        self._fetch_s, self._fetched = now - began, source
        return self._machine.fetched(record.version, now)

    async def _swap_in(self, record: VersionRecord) -> Action | None:
        async def commit() -> None:
            self._swap = await self._engine.commit(record, self._kv)

        # Whatever went wrong, the engine may sample from anything now.
        failure = await self._attempt(commit(), (Exception,))
        now = time.monotonic()
        if failure is not None:
            return self._machine.failed(record.version, *failure, now)
        return self._machine.swapped(record.version, self._engine.load().version, now)

    async def _attempt(
        self, work: Awaitable[None], expected: tuple[type[Exception], ...] = (RelaxError, OSError)
    ) -> tuple[FetchFailure, str] | None:
        """Have the engine do something within its time; return how it failed."""
        try:
            # Not wait_for, which swallows a cancellation that comes together with the result.
            async with asyncio.timeout(self._machine.left_s(time.monotonic())):
                await work
        except TimeoutError:
            return "failed", f"not done within the {self._machine.timeout_s:g} s it has to get to a version"
        except (Gone, Unreachable, DeadlineExceeded, OutOfSpace) as error:
            return "gone", str(error)
        except Corrupt as error:
            return "corrupt", str(error)
        except Refused as error:
            return "refused", str(error)
        except expected as error:
            return "failed", str(error) if isinstance(error, RelaxError) else repr(error)
        return None

    async def _acknowledge(self, record: VersionRecord, seconds: float) -> None:
        self.record, self._weights_released = record, False
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


class EngineFailure:
    """Carries a failure of the engine to its role, which ends with it. Call it on the event loop."""

    def __init__(self) -> None:
        self._future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __call__(self, error: BaseException) -> None:
        if not self._future.done():
            self._future.set_exception(error)

    def check(self) -> None:
        """Raise what ended the engine, if it has ended: the cause, where other errors are its consequences."""
        if self._future.done():
            self._future.result()

    async def wait(self) -> None:
        """Raise what ended the engine; never returns otherwise."""
        await asyncio.shield(self._future)


# --- the state machine


class FetchVersion(msgspec.Struct, frozen=True):
    """Prepare this version in the background of generation. `full`: no delta, the last try failed."""

    record: VersionRecord
    full: bool


class SwapVersion(msgspec.Struct, frozen=True):
    """Have the engine sample from the prepared version, from the next token boundary on."""

    record: VersionRecord


class AcknowledgeVersion(msgspec.Struct, frozen=True):
    """The version is whole here: report it."""

    record: VersionRecord


class WaitForVersion(msgspec.Struct, frozen=True):
    """Look for a newer version, and tick again after this time."""

    seconds: float


class VersionOvertaken(msgspec.Struct, frozen=True):
    """The version is gone, and a newer one is committed. The engine is unchanged."""

    record: VersionRecord


class RemoveEngine(msgspec.Struct, frozen=True):
    """The engine must end: nothing may be routed to it, and its successor starts anew."""

    record: VersionRecord
    why: str


Action: TypeAlias = FetchVersion | SwapVersion | AcknowledgeVersion | WaitForVersion | VersionOvertaken | RemoveEngine


class VersionMachine:
    """Decides what an engine does next to get from one version to the next.

    Every event returns the one action to take next, or None if the event is outdated. Times are monotonic seconds of
    the caller's clock.

    Args:
        timeout_s: time to get from one whole version to the next. Versions that were overtaken on the way count
            towards it: newer versions must not give an engine that cannot load any more and more time.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.state: Literal["idle", "fetching", "pausing", "swapping", "out"] = "idle"
        self.whole: VersionRecord | None = None
        self._target = VersionRecord(ROOT, ROOT, 0)
        self._committed = ROOT
        self._began = self._spent_s = 0.0
        self._full = False
        self._why = ""

    def left_s(self, now: float) -> float:
        """Return the time until the engine is removed unless it gets to the version."""
        return max(0.0, self._began + self.timeout_s - self._spent_s - now)

    def follow(self, record: VersionRecord, now: float) -> Action | None:
        """A version was committed that this engine must get to."""
        if self.state != "idle":
            return None
        self._target, self._began, self._full, self._why = record, now, False, ""
        self._committed = max(self._committed, record.version)
        return self._fetch()

    def committed(self, version: int) -> None:
        """Note a newer committed version."""
        self._committed = max(self._committed, version)

    def fetched(self, version: int, now: float) -> Action | None:
        """The engine's private copy is there and verified."""
        if self.state != "fetching" or version != self._target.version:
            return None
        if self._is_late(now):
            return self._remove_late()
        self.state = "swapping"
        return SwapVersion(self._target)

    def failed(self, version: int, failure: FetchFailure, why: str, now: float) -> Action | None:
        """The fetch or the swap failed."""
        if version != self._target.version or self.state not in ("fetching", "swapping"):
            return None
        if self.state == "swapping":
            # It may sample from anything now.
            return self._remove(f"the swap failed: {why}")
        if failure in ("refused", "failed"):
            return self._remove(why)
        self._why, self._full = why, True
        if self._is_late(now):
            return self._remove_late()
        self.state = "pausing"
        return WaitForVersion(min(RETRY_S, self.timeout_s))

    def tick(self, now: float) -> Action | None:
        """Time has passed."""
        if self.state in ("idle", "out"):
            return None
        if self._is_late(now):
            return self._remove_late()
        if self.state == "pausing" and self._committed > self._target.version:
            self.state = "idle"
            self._spent_s += now - self._began
            return VersionOvertaken(self._target)
        return self._fetch() if self.state == "pausing" else None

    def swapped(self, version: int, loaded: int, now: float) -> Action | None:
        """The engine reports that it has swapped; `loaded` is the version that it says it samples from."""
        if self.state != "swapping" or version != self._target.version:
            return None
        if loaded != version:
            return self._remove(f"it answered that it swapped, and samples from version {loaded}")
        if self._is_late(now):
            return self._remove_late()
        self.state, self.whole, self._spent_s = "idle", self._target, 0.0
        return AcknowledgeVersion(self._target)

    def _is_late(self, now: float) -> bool:
        return self._spent_s + now - self._began > self.timeout_s

    def _fetch(self) -> FetchVersion:
        self.state = "fetching"
        return FetchVersion(self._target, self._full)

    def _remove_late(self) -> RemoveEngine:
        doing = {"fetching": "being fetched", "pausing": "tried again", "swapping": "being swapped in"}[self.state]
        last = f"; last: {self._why}" if self._why else ""
        return self._remove(f"not whole after {self.timeout_s:g} s, it was still {doing}{last}")

    def _remove(self, why: str) -> RemoveEngine:
        self.state = "out"
        return RemoveEngine(self._target, why)
