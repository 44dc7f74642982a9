"""A real SGLang server that is killed or stopped at each step of a publication: the engine is out in time and says why,
and nothing was sampled from the version that it was to get."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conformance import ENDLESS
from harness import MemorySource
from sglang_parts import needs_server
from test_sglang_failures import is_out, running, scheduler_of, wait_for

from relax_rt.process import procfs
from relax_rt.roles.rollout.engines.sglang.client import SglangClient
from relax_rt.roles.rollout.engines.sglang.engine import SglangEngine
from relax_rt.roles.rollout.engines.sglang.server import ServerDied
from relax_rt.transport.rpc.errors import DeadlineExceeded, RelaxError

pytestmark = [pytest.mark.engines, needs_server]

LIMIT_S = 8.0
"""Of each step. A server that is stopped is given up behind it."""
IN_TIME_S = 60.0
"""What no step may take, on a machine however slow; half of what it would be without LIMIT_S."""
STEPS = {
    "in the fetch": "",
    "as sequences end": "/abort_request",
    "in the load": "/update_weights_from_disk",
    "at the checksums": "/weights_checker",
}
"""Where the strike falls, and the call of the server during which it does."""


def server_of(engine: SglangEngine) -> int:
    """The server itself, which answers HTTP: the guard's child."""
    for pid in procfs.descendants(engine._server.pid):
        fields = procfs.stat_fields(pid)
        if fields is not None and int(fields[1]) == engine._server.pid:
            return pid
    raise AssertionError("the guard has no child")


class Strike:
    """Falls once: the server is killed, or its scheduler, which does all the work, is stopped."""

    def __init__(self, engine: SglangEngine, signum: signal.Signals) -> None:
        self._pid = server_of(engine) if signum == signal.SIGKILL else scheduler_of(engine)
        self._signum, self.fell = signum, False

    def __call__(self) -> None:
        if not self.fell:
            self.fell = True
            os.kill(self._pid, self._signum)


def striking(path: str, strike: Callable[[], None]) -> Callable[..., Any]:
    """SglangClient.call with a strike as soon as this call is under way."""
    call = SglangClient.call

    async def struck(self: SglangClient, asked: str, body: Any = None, *, timeout_s: float) -> dict[str, Any]:
        if asked != path:
            return await call(self, asked, body, timeout_s=timeout_s)
        answer = asyncio.create_task(call(self, asked, body, timeout_s=timeout_s))
        for _ in range(10):
            await asyncio.sleep(0)  # it is sent, and not answered yet
        strike()
        return await answer

    return struck


@pytest.mark.parametrize(
    ("signum", "reason"),
    [(signal.SIGKILL, ServerDied), (signal.SIGSTOP, DeadlineExceeded)],
    ids=["killed", "stopped"],
)
@pytest.mark.parametrize("step", STEPS)
async def test_a_server_killed_or_stopped_in_a_publication_ends_the_engine_in_time(
    step: str,
    signum: signal.Signals,
    reason: type[RelaxError],
    conformance_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path_factory.mktemp("s")
    async with running(conformance_model, folder, update_timeout_s=LIMIT_S) as driver:
        assert isinstance(driver.engine, SglangEngine)
        before, strike = driver.version, Strike(driver.engine, signum)
        asked = driver.request(range(10, 30), 4, new=400, stop_ids=ENDLESS, chunk_tokens=4)
        driver.submit(asked)
        await driver.tokens(40)
        if path := STEPS[step]:
            source = driver.source()
            monkeypatch.setattr(SglangClient, "call", striking(path, strike))
        else:
            source = driver.source(lambda model, version: MemorySource(model, version, strike))
        with pytest.raises(RelaxError):
            async with asyncio.timeout(IN_TIME_S):
                await driver.engine.prepare(source)
                await driver.engine.commit(source.record, "recompute")
        assert strike.fell
        await wait_for(lambda: driver.failure is not None)
        assert "server.log" in str(is_out(driver, reason))
        assert driver.version == before
    # Its end included: `running` has seen to it that nothing of the server is left.
    told = {span.version for chunk in driver.chunks for span in chunk.versions}
    assert told == {before}, "what it was to get, or part of it, was sampled from"
