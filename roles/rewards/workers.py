"""Workers that call users' reward functions, for the reward role and for dry runs; see relax_rt/process/worker_pool.py.

A call that hangs, crashes or exceeds a limit fails its sample and costs its worker, which is replaced; the rest of the
batch is scored.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from relax_rt.process.sandbox import Level
from relax_rt.process.worker import encode_frame
from relax_rt.process.worker_pool import Worker, WorkerDied, WorkerPool, WorkerSpec, WorkerTimeout
from relax_rt.roles.rewards.scoring import GRACE_S, Failed, Request, Score, chunks
from relax_rt.roles.rewards.worker import MAX_REPLY_BYTES, Loaded, LoadFailed, ScoreRequest, ScoreResult, Setup
from relax_rt.transport.rpc.errors import RelaxError

MAX_LOST_WHILE_LOADING = 3
"""After this many consecutive workers died while they loaded, none is started any more."""


class RewardWorker(Worker):
    """A worker whose first reply says which functions it has loaded.

    Attributes:
        is_async: of each function.
    """

    def __init__(self, spec: WorkerSpec, level: Level) -> None:
        super().__init__(spec, level)
        self.is_async: list[bool] = []

    async def start(self) -> bytes:
        """Start the process and load the functions.

        Raises:
            RelaxError: a function cannot be loaded, as the worker says. WorkerDied: it died, or took too long.
        """
        body = await super().start()
        try:
            reply = msgspec.msgpack.decode(body, type=Loaded | LoadFailed)
            if isinstance(reply, LoadFailed):
                raise RelaxError(reply.what, why=reply.why, hint=reply.hint)
        except msgspec.MsgspecError:
            await self.kill("it sent garbage")
            raise self.garbage() from None
        except RelaxError:
            await self.kill("it could not load its functions")
            raise
        self.is_async = reply.is_async
        return body


class RewardWorkers:
    """Scores completions by functions in worker processes. `start` it, and `close` it whatever happens.

    Args:
        processes, memory_mib: limits for a worker with everything it starts.
        on_lost: called with the reason for each worker that was lost.

    Attributes:
        is_async: of each function, once started.
    """

    def __init__(
        self,
        setup: Setup,
        size: int,
        *,
        processes: int = 64,
        memory_mib: int | None = None,
        on_lost: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._setup, self._size, self._on_lost = setup, size, on_lost
        spec = WorkerSpec(
            name="a reward worker",
            module="relax_rt.roles.rewards.worker",
            setup=msgspec.msgpack.encode(setup),
            processes=processes,
            memory_mib=memory_mib,
            processes_key="reward.processes",
            memory_key="reward.memory_mib",
            max_reply_bytes=MAX_REPLY_BYTES,
        )
        self.pool = WorkerPool(size, lambda level: RewardWorker(spec, level))
        self.is_async: list[bool] = []
        self._numbers = itertools.count(1)
        self._lost_while_loading = 0

    async def start(self) -> None:
        """Start one worker, and so load the functions; the others are started with the work.

        Raises:
            RelaxError: a function cannot be loaded, or no worker started.
        """
        async with self.pool.lease() as worker:
            self.is_async = worker.is_async

    async def score(
        self, function: int, requests: Sequence[Request], after_each: Callable[[], None] = lambda: None
    ) -> list[Score | Failed]:
        """Return scores in order; `after_each` is called for each result as it comes."""
        group = self._setup.functions[function].group
        results: list[Score | Failed] = [Failed("it was not scored")] * len(requests)
        work: deque[tuple[int, list[Request]]] = deque()
        first = 0
        for chunk in chunks(self.is_async[function], requests, groups=group):
            work.append((first, chunk))
            first += len(chunk)

        def settle(index: int, result: Score | Failed) -> None:
            results[index] = result
            after_each()

        async def drain() -> None:
            while work:
                await self._score_chunk(function, *work.popleft(), settle)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(self._size, len(work))):
                tasks.create_task(drain())
        return results

    async def _score_chunk(
        self, function: int, first: int, chunk: list[Request], settle: Callable[[int, Score | Failed], None]
    ) -> None:
        """Have one worker score a chunk. If it is lost, what it has not scored by then fails."""
        spec, timeout_s = self._setup.functions[function], self._setup.timeout_s
        number, missing = next(self._numbers), set(range(len(chunk)))
        # Async calls keep their own deadlines, unless they block their loop.
        grace_s = GRACE_S if self.is_async[function] and not spec.group else 0.0
        loading = True
        try:
            async with self.pool.lease() as worker:
                loading, self._lost_while_loading = False, 0

                def take(body: bytes) -> bool:
                    try:
                        reply = msgspec.msgpack.decode(body, type=ScoreResult)
                    except msgspec.MsgspecError:
                        raise worker.garbage() from None
                    if reply.number != number or reply.index not in missing:
                        raise worker.garbage()
                    missing.remove(reply.index)
                    settle(first + reply.index, reply.outcome())
                    return not missing

                frame = encode_frame(ScoreRequest(number, function, chunk), enc_hook=str)
                await worker.request(frame, timeout_s + grace_s, take, f"in {spec.target}")
        except WorkerTimeout:
            late = f"did not return within reward.timeout_s = {timeout_s:g} s: its process was killed"
            failed = Failed(f"{spec.target} {late}", excess=True)
        except WorkerDied as error:
            if loading:
                self._lost_while_loading += 1
                if self._lost_while_loading >= MAX_LOST_WHILE_LOADING:
                    why = f"{MAX_LOST_WHILE_LOADING} were lost while they loaded their functions"
                    raise RelaxError("reward workers", why=why) from None
            failed = Failed(f"{spec.target} did not return: {error.why}", excess=error.over_limit)
        else:
            return
        self._on_lost(failed.reason)
        for index in sorted(missing):
            settle(first + index, failed)

    async def close(self) -> None:
        """Kill all workers and what they started."""
        await self.pool.close()
