"""The process of a role: ``python -m relax_rt.hosting.host``, started by the agent with its orders in the environment.

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
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import structlog
import uvloop

from relax_rt.config.loader import read_resolved, role_settings
from relax_rt.config.target import TargetError
from relax_rt.hosting.context import FINISHED, HostContext
from relax_rt.hosting.faults import Faults
from relax_rt.hosting.gang import Gang
from relax_rt.interfaces.loading import load_role, role_target
from relax_rt.interfaces.role import Role
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
from relax_rt.supervision.diagnosis import FailureReport, Kind, cause_of, classify_exception
from relax_rt.supervision.rundir import RESOLVED_CONFIG
from relax_rt.transport.rpc.errors import RelaxError
from relax_rt.transport.rpc.identity import Incarnation

EXIT_FINISHED, EXIT_FAILED, EXIT_CONFIG, EXIT_ORPHANED = 0, 1, 2, 70
TRACE_BYTES = 16_000
TEARDOWN_S = 10.0
LEFT_S = 3.0
"""Tasks that a role leaves behind have so long to end when they are cancelled; so have threads of one that failed."""
CLOSE_S = 5.0
"""For leaving the registry and closing connections; what is left of them ends with the process."""


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent put into our environment."""

    who: Incarnation
    run_id: str
    run_dir: Path
    socket_dir: Path
    shm_dir: Path
    control_fd: int
    agent_pid: int
    target: str
    has_registry: bool

    @classmethod
    def from_environment(cls) -> Orders:
        """Read RELAX_*; a host is never started by hand."""
        env = os.environ
        try:
            return cls(
                who=Incarnation(env["RELAX_SLOT"], int(env["RELAX_EPOCH"])),
                run_id=env.get("RELAX_RUN") or env["RELAX_RUN_ID"],
                run_dir=Path(env["RELAX_RUN_DIR"]),
                socket_dir=Path(env["RELAX_SOCKET_DIR"]),
                shm_dir=Path(env["RELAX_SHM_DIR"]),
                control_fd=int(env["RELAX_CONTROL_FD"]),
                agent_pid=int(env["RELAX_AGENT_PID"]),
                target=env.get("RELAX_ROLE_TARGET", ""),
                has_registry=env.get("RELAX_HAS_REGISTRY", "1") == "1",
            )
        except KeyError as error:
            raise SystemExit(
                f"relax_rt.hosting.host is started by `relax-rt up`, not by hand: {error} is not set"
            ) from error


class Lifeline:
    """The control channel's reading end: a daemon thread that blocks on nothing but the socket."""

    def __init__(self, control: socket.socket, faults: Faults) -> None:
        self._control = control
        self._faults = faults
        self._lock = threading.Lock()
        self._stopped = False
        self._on_stop: Callable[[], None] | None = None
        threading.Thread(target=self._watch, name="relax-lifeline", daemon=True).start()

    def on_stop(self, callback: Callable[[], None]) -> None:
        """Call back once asked to stop, also when that was before now."""
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
                # This thread is the lifeline: it must not end for a word it does not know.
                os.write(2, f"the agent said what this role does not understand: {error}\n".encode())
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
    """Prepare for the role, then wait to be told whose slot we fill; our environment then says it. The exit code,
    if nothing comes of it; else 0."""
    orders = Orders.from_environment()
    control = _tie_to_agent(orders)
    setup_logging(os.environ.get("RELAX_LOG_LEVEL", "info"))
    try:
        role_class = load_role(role_target(orders.who.role, orders.target))
        config = read_resolved(orders.run_dir / RESOLVED_CONFIG)
        role_class.prepare(config, role_settings(config, orders.who.role, role_class.Settings))
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
    """Run the role that the environment names; answers with the exit code."""
    if os.environ.get("RELAX_SPARE") and (code := wait_as_spare()):
        return code
    orders = Orders.from_environment()
    control = _tie_to_agent(orders)
    setup_logging(os.environ.get("RELAX_LOG_LEVEL", "info"))

    def tell(kind: str, fields: dict[str, str]) -> None:
        log = EventLog(orders.run_dir, str(orders.who))
        log.emit(kind, slot=orders.who.slot, epoch=orders.who.epoch, **fields)
        log.close()

    faults = Faults(tell)
    if not send_now(control, HelloMsg()):
        # Nobody waits for us any more: the order to start came through too late.
        os._exit(EXIT_ORPHANED)
    lifeline = Lifeline(control, faults)
    try:
        role_class = load_role(role_target(orders.who.role, orders.target))
        config = read_resolved(orders.run_dir / RESOLVED_CONFIG)
        settings = role_settings(config, orders.who.role, role_class.Settings)
    except TargetError as error:
        return _fail(control, "import_error", error, EXIT_FAILED)
    except RelaxError as error:
        return _fail(control, "config", error, EXIT_CONFIG)

    async def run() -> bool:
        ctx = HostContext(
            config=config,
            settings=settings,
            who=orders.who,
            run_id=orders.run_id,
            run_dir=orders.run_dir,
            socket_dir=orders.socket_dir,
            shm_dir=orders.shm_dir,
            control=control,
            has_registry=orders.has_registry,
        )
        random.seed(ctx.seed)
        loop = asyncio.get_running_loop()
        faults.follow(loop)
        ctx.reporter.follow(loop)
        loop.add_signal_handler(signal.SIGTERM, ctx.stopping.set)

        def stop() -> None:
            loop.call_soon_threadsafe(ctx.stopping.set)

        lifeline.on_stop(stop)
        if role_class.is_gang(settings):
            # Other ranks wait for the store, also those that know of it by environment variables only.
            await asyncio.to_thread(Gang.here().serve)
        return await live(role_class, ctx, lambda: send_now(control, FinishedMsg()))

    try:
        run_and_leave(run())
    except Exception as error:  # noqa: BLE001 the process ends here, and its diagnosis must say why
        kind = classify_exception(error)
        return _fail(control, kind, error, EXIT_CONFIG if kind == "config" else EXIT_FAILED)
    return EXIT_FINISHED


def run_and_leave(work: Coroutine[Any, Any, bool]) -> None:
    """Run a role on a loop of its own, as `uvloop.run`; but what it leaves running keeps nobody waiting for long: user
    code may swallow its cancellation, and a thread of a role that failed or was stopped in its setup may be at work for
    hours. What the work raises is raised."""
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    patient = False
    try:
        patient = runner.run(work)
    finally:
        tasks_left = runner.run(_end_tasks())
        if patient:
            runner.run(runner.get_loop().shutdown_default_executor())
        # A loop with tasks or threads that do not end cannot be closed: it ends with the process.
        if (patient or not runner.run(_threads_left())) and not tasks_left:
            runner.close()


async def _end_tasks() -> int:
    """Cancel whatever runs; how many did not end for that."""
    ours = {asyncio.current_task()}
    if rest := asyncio.all_tasks() - ours:
        for task in rest:
            task.cancel()
        await asyncio.wait(rest, timeout=LEFT_S)
    if left := asyncio.all_tasks() - ours:
        names = sorted(task.get_name() for task in left)[:8]
        structlog.get_logger().warning("tasks swallow their cancellation", tasks=len(left), names=names)
    return len(left)


async def _threads_left() -> bool:
    """Have the default executor end; whether some of its threads are at work all the same."""
    ending = asyncio.create_task(asyncio.get_running_loop().shutdown_default_executor())
    await asyncio.wait([ending], timeout=LEFT_S)
    if not ending.done():
        structlog.get_logger().warning("threads are still at work: they end with the process")
    return not ending.done()


def _tie_to_agent(orders: Orders) -> socket.socket:
    if not procfs.die_with_parent(orders.agent_pid):
        os._exit(EXIT_ORPHANED)
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=orders.control_fd)
    control.set_inheritable(False)
    return control


async def live(role_class: type[Role], ctx: HostContext, finished: Callable[[], object]) -> bool:
    """A role's life: setup, run, teardown.

    Returns:
        Whether it was set up to the end: what its threads do then is of use.

    Raises:
        StaleEpoch: a newer incarnation holds the slot.
        Exception: whatever the role raised.
    """
    role, how = role_class(ctx), FINISHED
    failure: Exception | None = None
    whole = False
    watches: list[asyncio.Task[NoReturn]] = []
    stop_wait = asyncio.create_task(ctx.stopping.wait())
    try:
        # A role that is asked to stop during setup is not set up to the end.
        if whole := await _first(role.setup(), stop_wait):
            await ctx.listen()
            if ctx.registry_lease is not None:
                watches.append(asyncio.create_task(ctx.registry_lease.keep()))
            if ctx.settings.live_every_s is not None:
                watches.append(asyncio.create_task(probe(role, ctx.settings.live_every_s)))
            await _first(role.run(), *watches)
            if not ctx.stopping.is_set():
                finished()
    except Exception as error:
        how, failure = f"{classify_exception(error)}: {cause_of(error)}", error
        raise
    finally:
        stop_wait.cancel()
        try:
            await _within("its teardown", role.teardown(), TEARDOWN_S)
        except Exception as error:
            if failure is None:
                raise
            # What was never set up often cannot be torn down either: the cause is what came first.
            failure.add_note(f"its teardown failed as well: {type(error).__name__}: {error}")
        finally:
            for watch in watches:
                watch.cancel()
            await _closed(ctx, how, failure)
    return whole


async def _closed(ctx: HostContext, how: str, failure: Exception | None) -> None:
    try:
        await _within("its connections' close", ctx.close(how), CLOSE_S)
    except TimeoutError:
        ctx.log.warning("connections did not close in time: they end with the process", limit_s=CLOSE_S)
    except Exception as error:
        if failure is None:
            raise
        failure.add_note(f"its connections' close failed as well: {type(error).__name__}: {error}")


class LiveProbeFailed(RelaxError):
    """The role's own check says that it does not work any more, or does not answer."""


async def probe(role: Role, every_s: float) -> NoReturn:
    """Have the role look at itself again and again.

    Raises:
        LiveProbeFailed: it found itself broken, or took longer than every_s.
    """
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


async def _first(work: Coroutine[Any, Any, None], *others: asyncio.Task[Any]) -> bool:
    """Await the work, unless another task ends before it: then the work is cancelled, and False the answer; work that
    does not end for that is left behind."""
    task = asyncio.create_task(work)
    done, _ = await asyncio.wait([task, *others], return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        _not_from_inside(task)
        await task
        return True
    task.cancel()
    await asyncio.wait([task], timeout=TEARDOWN_S)
    if not task.done():
        structlog.get_logger().warning("the role's work swallows its cancellation", limit_s=TEARDOWN_S)
    for other in done:
        await other
    return False


async def _within(what: str, work: Coroutine[Any, Any, None], limit_s: float) -> None:
    """Await the work for so long at most; then it is cancelled, and left behind if it does not end for that.

    Raises:
        TimeoutError: it was not done in time.
    """
    task = asyncio.create_task(work)
    await asyncio.wait([task], timeout=limit_s)
    if not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=LEFT_S)
        if not task.done() or task.cancelled():
            raise TimeoutError(f"{what} was not done within {limit_s:g} s")
    _not_from_inside(task)
    await task


def _not_from_inside(task: asyncio.Task[None]) -> None:
    """A CancelledError of the work's own is no Exception: nobody would tell what failed.

    Raises:
        RelaxError: the work ended by a cancellation that nobody asked it for.
    """
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
