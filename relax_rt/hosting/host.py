"""The process of a role: ``python -m relax_rt.hosting.host``, started by the agent, which configures it by variables.

It ends when its role has finished (exit code 0), failed (1) or was misconfigured (2), and at once when the agent
is gone: by PR_SET_PDEATHSIG, and by the end of its control channel.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import random
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

import msgspec
import structlog
import uvloop

from relax_rt.config.loader import read_resolved, role_settings
from relax_rt.config.target import TargetError
from relax_rt.hosting.context import FINISHED, HostContext, HostEnvironment
from relax_rt.hosting.faults import Faults
from relax_rt.hosting.gang import Gang
from relax_rt.interfaces.agent import Kind
from relax_rt.interfaces.role import Role, load_role, role_target
from relax_rt.observe.events import EventLog
from relax_rt.observe.logs import setup_logging
from relax_rt.process import procfs
from relax_rt.process.zygote import MAX_FDS, replace_environment, set_process_title
from relax_rt.process.zygote import MAX_PACKET_BYTES as MAX_ORDER_BYTES
from relax_rt.supervision.channel import (
    MAX_PACKET_BYTES,
    AssignMsg,
    DumpStacksMsg,
    FailedMsg,
    FaultMsg,
    FinishedMsg,
    HelloMsg,
    PreparedMsg,
    StopMsg,
    decode_to_role,
    send_now,
)
from relax_rt.supervision.diagnosis import FailureReport, cause_of, classify_exception
from relax_rt.supervision.rundir import RESOLVED_CONFIG
from relax_rt.transport.rpc.errors import RelaxError

EXIT_FINISHED, EXIT_FAILED, EXIT_CONFIG, EXIT_ORPHANED = 0, 1, 2, 70
TRACE_BYTES = 16_000
TEARDOWN_S = 10.0
CANCEL_S = 3.0
"""Time for cancelled tasks to end, and for the threads of a role that failed."""
CLOSE_S = 5.0
"""Time for leaving the registry and closing connections; after that they end with the process."""


class ControlListener:
    """Reads the control channel in a daemon thread, which ends the process at once when the agent is gone."""

    def __init__(self, control: socket.socket, faults: Faults) -> None:
        self._control = control
        self._faults = faults
        self._lock = threading.Lock()
        self._stopped = False
        self._on_stop: Callable[[], None] | None = None
        threading.Thread(target=self._watch, name="relax-lifeline", daemon=True).start()

    def on_stop(self, callback: Callable[[], None]) -> None:
        """Call back when asked to stop, at once if that has happened already."""
        with self._lock:
            self._on_stop = callback
            stopped = self._stopped
        if stopped:
            callback()

    def _watch(self) -> None:
        while True:
            try:
                packet = self._control.recv(MAX_PACKET_BYTES)
            except OSError:
                packet = b""
            if not packet:
                os.write(2, b"the agent is gone: this role ends with it\n")
                os._exit(EXIT_ORPHANED)
            try:
                message = decode_to_role(packet)
            except msgspec.DecodeError as error:
                # The thread must survive an unknown message: it is what notices the agent's death.
                os.write(2, f"unknown message from the agent: {error}\n".encode())
                continue
            if isinstance(message, DumpStacksMsg):
                faulthandler.dump_traceback(all_threads=True)
            elif isinstance(message, FaultMsg):
                self._faults.carry_out(message)
            elif isinstance(message, StopMsg):
                with self._lock:
                    self._stopped = True
                    callback = self._on_stop
                if callback is not None:
                    callback()


def wait_as_spare() -> int:
    """Prepare the role class, then wait for the slot to fill and put it into the environment.

    Returns:
        0 when a slot was assigned, else the exit code.
    """
    host = HostEnvironment.from_environment()
    control = _tie_to_agent(host)
    setup_logging(os.environ.get("RELAX_LOG_LEVEL", "info"))
    try:
        role_class = load_role(role_target(host.who.role, host.target))
        config = read_resolved(host.run_dir / RESOLVED_CONFIG)
        role_class.prepare(config, role_settings(config, host.who.role, role_class.Settings))
    except Exception:  # noqa: BLE001 the process ends here, and its log must say why
        traceback.print_exc()
        return EXIT_FAILED
    if not send_now(control, PreparedMsg()):
        return EXIT_ORPHANED
    packet, fds, _, _ = socket.recv_fds(control, MAX_ORDER_BYTES, MAX_FDS)
    if not packet:
        return EXIT_ORPHANED
    order = decode_to_role(packet)
    assert isinstance(order, AssignMsg), "a spare receives nothing else"
    log, *handed = fds
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    replace_environment(
        {
            **order.env,
            **dict(zip(order.descriptors, map(str, handed), strict=True)),
            "RELAX_CONTROL_FD": str(control.detach()),
        }
    )
    set_process_title(order.argv, {name: os.environ[name] for name in ("RELAX_SLOT", "RELAX_EPOCH")})
    return 0


def main() -> int:
    """Run the role that the environment names; returns the exit code."""
    if os.environ.get("RELAX_SPARE") and (code := wait_as_spare()):
        return code
    host = HostEnvironment.from_environment()
    control = _tie_to_agent(host)
    setup_logging(os.environ.get("RELAX_LOG_LEVEL", "info"))

    def emit(kind: str, fields: dict[str, str]) -> None:
        log = EventLog(host.run_dir, str(host.who))
        log.emit(kind, slot=host.who.slot, epoch=host.who.epoch, **fields)
        log.close()

    faults = Faults(emit)
    if not send_now(control, HelloMsg()):
        # The agent does not wait for this process any more: it was started too late.
        os._exit(EXIT_ORPHANED)
    listener = ControlListener(control, faults)
    try:
        role_class = load_role(role_target(host.who.role, host.target))
        config = read_resolved(host.run_dir / RESOLVED_CONFIG)
        settings = role_settings(config, host.who.role, role_class.Settings)
    except TargetError as error:
        return _fail(control, "import_error", error, EXIT_FAILED)
    except RelaxError as error:
        return _fail(control, "config", error, EXIT_CONFIG)

    async def run() -> bool:
        ctx = HostContext(host, config, settings, control)
        random.seed(ctx.seed)
        loop = asyncio.get_running_loop()
        faults.follow(loop)
        ctx.reporter.watch_loop(loop)
        loop.add_signal_handler(signal.SIGTERM, ctx.stopping.set)

        def stop() -> None:
            loop.call_soon_threadsafe(ctx.stopping.set)

        listener.on_stop(stop)
        if role_class.is_gang(settings):
            # Other ranks wait for the store, including those that know it by MASTER_ADDR and MASTER_PORT only.
            await asyncio.to_thread(Gang.here().serve)
        return await run_role(role_class, ctx, lambda: send_now(control, FinishedMsg()))

    try:
        run_role_loop(run())
    except Exception as error:  # noqa: BLE001 the process ends here, and its diagnosis must say why
        kind = classify_exception(error)
        return _fail(control, kind, error, EXIT_CONFIG if kind == "config" else EXIT_FAILED)
    return EXIT_FINISHED


def run_role_loop(work: Coroutine[Any, Any, bool]) -> None:
    """Run a role on a new loop, as `uvloop.run` does, but do not wait long for what it leaves running: user code may
    swallow its cancellation, and a thread of a role that failed or was stopped during setup may be busy for hours.
    Exceptions of the work propagate.
    """
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    set_up = False
    try:
        set_up = runner.run(work)
    finally:
        tasks_left = runner.run(_end_tasks())
        if set_up:
            runner.run(runner.get_loop().shutdown_default_executor())
        # A loop whose tasks or threads do not end cannot be closed: it ends with the process.
        if (set_up or not runner.run(_threads_left())) and not tasks_left:
            runner.close()


async def _end_tasks() -> int:
    """Cancel all tasks; returns how many did not end."""
    ours = {asyncio.current_task()}
    if rest := asyncio.all_tasks() - ours:
        for task in rest:
            task.cancel()
        await asyncio.wait(rest, timeout=CANCEL_S)
    if left := asyncio.all_tasks() - ours:
        names = sorted(task.get_name() for task in left)[:8]
        structlog.get_logger().warning("tasks swallow their cancellation", tasks=len(left), names=names)
    return len(left)


async def _threads_left() -> bool:
    """Shut the default executor down; returns whether threads of it are still busy."""
    ending = asyncio.create_task(asyncio.get_running_loop().shutdown_default_executor())
    await asyncio.wait([ending], timeout=CANCEL_S)
    if not ending.done():
        structlog.get_logger().warning("threads are still busy: they end with the process")
    return not ending.done()


def _tie_to_agent(host: HostEnvironment) -> socket.socket:
    if not procfs.die_with_parent(host.agent_pid):
        os._exit(EXIT_ORPHANED)
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=host.control_fd)
    control.set_inheritable(False)
    return control


async def run_role(role_class: type[Role], ctx: HostContext, finished: Callable[[], object]) -> bool:
    """Run the role: setup, run, teardown.

    Returns:
        Whether setup finished: then its threads do useful work, and the process waits for them.

    Raises:
        StaleEpoch: a newer incarnation holds the slot.
        Exception: whatever the role raised.
    """
    role, end = role_class(ctx), FINISHED
    failure: Exception | None = None
    set_up = False
    watches: list[asyncio.Task[NoReturn]] = []
    stop_wait = asyncio.create_task(ctx.stopping.wait())
    try:
        # A stop during setup leaves it unfinished.
        if set_up := await _run_until(role.setup(), stop_wait):
            await ctx.listen()
            if ctx.registry_lease is not None:
                watches.append(asyncio.create_task(ctx.registry_lease.keep()))
            if ctx.settings.live_every_s is not None:
                watches.append(asyncio.create_task(probe(role, ctx.settings.live_every_s)))
            await _run_until(role.run(), *watches)
            if not ctx.stopping.is_set():
                finished()
    except Exception as error:
        end, failure = f"{classify_exception(error)}: {cause_of(error)}", error
        raise
    finally:
        stop_wait.cancel()
        try:
            await _run_within("its teardown", role.teardown(), TEARDOWN_S)
        except Exception as error:
            if failure is None:
                raise
            # A role that was never set up often cannot be torn down: the first failure is the cause.
            failure.add_note(f"its teardown failed as well: {type(error).__name__}: {error}")
        finally:
            for watch in watches:
                watch.cancel()
            try:
                await _run_within("its connections' close", ctx.close(end), CLOSE_S)
            except TimeoutError:
                ctx.log.warning("connections did not close in time: they end with the process", limit_s=CLOSE_S)
            except Exception as error:
                if failure is None:
                    raise
                failure.add_note(f"its connections' close failed as well: {type(error).__name__}: {error}")
    return set_up


class LiveProbeFailed(RelaxError):
    """The role's `live` raised, or did not return in time."""


async def probe(role: Role, every_s: float) -> NoReturn:
    """Call the role's `live` every every_s seconds. Raises LiveProbeFailed: it raised, or took longer than every_s."""
    while True:
        await asyncio.sleep(every_s)
        try:
            async with asyncio.timeout(every_s):
                await role.live()
        except TimeoutError as error:
            raise LiveProbeFailed(f"live probe failed: no answer within live_every_s = {every_s:g} s") from error
        except asyncio.CancelledError as error:
            if (own := asyncio.current_task()) is None or own.cancelling():
                raise
            why = "it awaited a task that was cancelled, and let that pass"
            raise LiveProbeFailed(f"live probe failed: it was cancelled from inside: {why}") from error
        except Exception as error:
            raise LiveProbeFailed(f"live probe failed: {type(error).__name__}: {error}") from error


async def _run_until(work: Coroutine[Any, Any, None], *others: asyncio.Task[Any]) -> bool:
    """Await the work until another task ends. Then cancel the work, abandon it if it does not end, and return False."""
    task = asyncio.create_task(work)
    done, _ = await asyncio.wait([task, *others], return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        _check_not_cancelled(task)
        await task
        return True
    task.cancel()
    await asyncio.wait([task], timeout=TEARDOWN_S)
    if not task.done():
        structlog.get_logger().warning("the role swallows its cancellation", limit_s=TEARDOWN_S)
    for other in done:
        await other
    return False


async def _run_within(what: str, work: Coroutine[Any, Any, None], limit_s: float) -> None:
    """Await the work for at most limit_s; then cancel it, and abandon it if it does not end. Raises TimeoutError: it
    did not finish in time."""
    task = asyncio.create_task(work)
    await asyncio.wait([task], timeout=limit_s)
    if not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=CANCEL_S)
        if not task.done() or task.cancelled():
            raise TimeoutError(f"{what} did not finish within {limit_s:g} s")
    _check_not_cancelled(task)
    await task


def _check_not_cancelled(task: asyncio.Task[None]) -> None:
    """Turn a cancellation from inside the work into an error: CancelledError is no Exception and would go unreported.
    Raises RelaxError: the work was cancelled, and not by us."""
    if task.cancelled():
        name = getattr(task.get_coro(), "__qualname__", "the role's work")
        raise RelaxError(f"{name} was cancelled from inside: it awaited a task that was cancelled, and let that pass")


def _fail(control: socket.socket, kind: Kind, error: BaseException, exit_code: int) -> int:
    trace = "".join(traceback.format_exception(error))
    cause = cause_of(error)
    structlog.get_logger().error("role failed", kind=kind, cause=cause)
    sys.stderr.write(trace)
    send_now(control, FailedMsg(FailureReport(kind=kind, cause=cause[:2000], trace=trace[-TRACE_BYTES:])))
    return exit_code


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # No interpreter shutdown: native libraries' exit handlers and leftover threads must not delay or change the exit.
    os._exit(code)
