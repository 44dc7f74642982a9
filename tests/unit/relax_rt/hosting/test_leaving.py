"""A role that fails leaves, whatever of it is still at work: its thread, its coroutine, its connections."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from relax_rt.hosting import host
from relax_rt.hosting.host import LiveProbeFailed, run_role
from relax_rt.interfaces.role import Role
from relax_rt.transport.rpc.errors import RelaxError

SOON_S = 120


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CANCEL_S", "CLOSE_S", "TEARDOWN_S"):
        monkeypatch.setattr(host, name, 0.1)


def test_a_thread_at_work_keeps_no_failed_role() -> None:
    free, done = threading.Event(), threading.Event()

    async def role() -> bool:
        def work() -> None:
            free.wait(2 * SOON_S)
            done.set()

        at_work = asyncio.create_task(asyncio.to_thread(work))
        await asyncio.sleep(0)
        at_work.cancel()
        raise ValueError("why it ended")

    began = time.monotonic()
    with pytest.raises(ValueError, match="why it ended"):
        host.run_role_loop(role())
    assert time.monotonic() - began < SOON_S and not done.is_set()
    free.set()
    assert done.wait(SOON_S)


def test_a_thread_of_a_role_that_has_done_its_work_is_waited_for() -> None:
    done = threading.Event()

    async def role() -> bool:
        asyncio.get_running_loop().run_in_executor(None, lambda: (time.sleep(0.3), done.set()))
        return True

    host.run_role_loop(role())
    assert done.is_set()


class Loading(Role):
    """Is asked to stop while a thread of its setup is at work."""

    async def setup(self) -> None:
        at_work = asyncio.create_task(asyncio.to_thread(self.ctx.free.wait, 2 * SOON_S))  # type: ignore[attr-defined]
        self.ctx.stopping.set()
        await at_work

    async def run(self) -> None:
        raise AssertionError("it was never set up")


def test_a_thread_of_a_setup_that_was_cut_short_keeps_nobody() -> None:
    free = threading.Event()

    async def role() -> bool:
        return await run_role(Loading, context(free=free), lambda: None)

    began = time.monotonic()
    try:
        host.run_role_loop(role())
        assert time.monotonic() - began < SOON_S
    finally:
        free.set()


class Enduring(Role):
    """Swallows its cancellation, and finds itself broken."""

    async def run(self) -> None:
        while True:
            try:
                await asyncio.sleep(SOON_S)
            except asyncio.CancelledError:
                if self.ctx.free:  # type: ignore[attr-defined]
                    raise

    async def live(self) -> None:
        raise ValueError("the device is gone")


class Unending(Enduring):
    """Its teardown swallows its cancellation, too."""

    async def teardown(self) -> None:
        await Enduring.run(self)


def context(*, close_s: float = 0.0, free: Any = False) -> Any:
    """What `live` needs of one, with `left`: what it was closed with."""
    left: list[str] = []

    async def listen() -> None:
        pass

    async def close(how: str) -> None:
        left.append(how)
        await asyncio.sleep(close_s)

    return SimpleNamespace(
        stopping=asyncio.Event(),
        settings=SimpleNamespace(live_every_s=0.2),
        registry_lease=None,
        log=structlog.get_logger(),
        listen=listen,
        close=close,
        free=free,
        left=left,
    )


class Careless(Role):
    """Awaits a task that it has cancelled, and lets that pass."""

    where = ""

    async def setup(self) -> None:
        await self.maybe("setup")

    async def run(self) -> None:
        await self.maybe("run")
        if self.where == "live":
            await self.ctx.stopping.wait()

    async def live(self) -> None:
        await self.maybe("live")

    async def teardown(self) -> None:
        await self.maybe("teardown")

    async def maybe(self, where: str) -> None:
        if where == self.where:
            task = asyncio.create_task(asyncio.sleep(SOON_S))
            task.cancel()
            await task


@pytest.fixture
def patient(impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is ended by a limit."""
    for name in ("CANCEL_S", "CLOSE_S", "TEARDOWN_S"):
        monkeypatch.setattr(host, name, SOON_S)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("where", ["setup", "run", "teardown"])
async def test_a_cancellation_of_its_own_is_told_as_a_failure(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Careless, "where", where)
    with pytest.raises(RelaxError, match=f"Careless.{where} was cancelled from inside"):
        await run_role(Careless, context(), lambda: None)


@pytest.mark.usefixtures("patient")
async def test_a_live_probe_that_is_cancelled_from_inside_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Careless, "where", "live")
    ctx = context()
    with pytest.raises(LiveProbeFailed, match="cancelled from inside"):
        await run_role(Careless, ctx, lambda: None)
    assert "cancelled from inside" in ctx.left[0]


@pytest.mark.usefixtures("patient")
async def test_a_close_that_fails_hides_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(how: str) -> None:
        raise OSError("the socket is gone")

    monkeypatch.setattr(Careless, "where", "run")
    ctx = context()
    ctx.close = broken
    with pytest.raises(RelaxError, match=r"Careless.run was cancelled") as told:
        await run_role(Careless, ctx, lambda: None)
    assert "the socket is gone" in told.value.__notes__[0]
    monkeypatch.setattr(Careless, "where", "")
    with pytest.raises(OSError, match="the socket is gone"):
        await run_role(Careless, ctx, lambda: None)


def test_a_task_that_swallows_its_cancellation_cuts_off_no_thread_that_is_of_use() -> None:
    done = threading.Event()

    async def swallow() -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(SOON_S)
        await asyncio.sleep(SOON_S)

    async def role() -> bool:
        asyncio.get_running_loop().run_in_executor(None, lambda: (time.sleep(0.5), done.set()))
        kept.append(asyncio.create_task(swallow()))
        await asyncio.sleep(0)
        return True

    kept: list[asyncio.Task[None]] = []
    host.run_role_loop(role())
    assert done.is_set()


@pytest.mark.parametrize("role", [Enduring, Unending])
async def test_work_and_connections_that_do_not_end_hide_no_failure(role: type[Role]) -> None:
    ctx = context(close_s=2 * SOON_S)
    began = time.monotonic()
    with pytest.raises(LiveProbeFailed, match="the device is gone"):
        await run_role(role, ctx, lambda: None)
    assert time.monotonic() - began < SOON_S and "the device is gone" in ctx.left[0]
    ctx.free = True
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
