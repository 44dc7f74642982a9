"""A run inside your own program::

    async with relax_rt.Runtime.from_toml("roles.toml") as run:
        async with run.router() as router:          # tokens of the run's engines
            outcome = await router.generate(GenerationRequest(prompt=(1, 2, 3)))
        async for step in run.records("step"):      # until the run ends
            print(step["step"], step["reward_mean"])
        print(await run.wait())

The run is the one that `relax-rt up` starts, in its own processes; this program holds a connection to it. The run ends
with the block: in order, or at once when that wait is cancelled too. It also ends when this program dies.
`from_toml(…, debug=True)` starts no run: it plays single prompts or episodes in this process.
Everything runs on the program's own event loop, so it works in a notebook (`await run.start()`, `await run.close()`).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, overload

from relax_rt.cluster import launch
from relax_rt.cluster.discovery import RunDiscovery, connect
from relax_rt.config.loader import load_config, preflight_config
from relax_rt.interfaces.agent import RunStatus
from relax_rt.observe.metrics import METRICS, Tail
from relax_rt.supervision import control
from relax_rt.supervision.rundir import read_run
from relax_rt.transport.rpc.errors import RelaxError

T = TypeVar("T")
ROUTER, DEBUG = "relax_rt.roles.rollout.router", "relax_rt.roles.job.debugging"
GATEWAY = "relax_rt.roles.gateway.access"
POLL_S = 0.1
STOP_S = 60.0
"""Time for a run to end in order, on top of supervision.drain_timeout_s; after that it is ended at once."""
KILL_S = 30.0
WATCHER = """
import os, select, signal, sys
fd = os.pidfd_open(int(sys.argv[1]))
for seconds in (None, float(sys.argv[2]), 30):
    if fd in select.select([fd] if seconds else [fd, 0], [], [], seconds)[0]:
        break
    signal.pidfd_send_signal(fd, signal.SIGINT)
"""
"""A process that interrupts the run when its input ends, as it does when this program dies: once, and again when the
time to end in order is over."""


class DebugRun(Protocol):
    """Result of ``Runtime.from_toml(…, debug=True)``, implemented by relax_rt.roles.job.debugging.Debug."""

    async def __aenter__(self) -> DebugRun: ...
    async def __aexit__(self, *_: object) -> None: ...
    async def start(self) -> None:
        """Read config, tokenizer and data."""

    async def close(self) -> None:
        """Free the model."""

    async def play(self, index: int = 0, *, split: Any = "train", words: Any = None, member: int = 0) -> Any:
        """Answer a prompt, or play an episode, and reward it."""


class GatewayEndpoint(Protocol):
    """Result of `Runtime.gateway`, implemented by relax_rt.roles.gateway.access.Endpoint."""

    @property
    def base_url(self) -> str:
        """Base URL for clients of OpenAI's API."""

    @property
    def anthropic_url(self) -> str:
        """Base URL for clients of Anthropic's API."""

    @property
    def api_key(self) -> str:
        """API key for both."""

    @property
    def models(self) -> tuple[str, ...]:
        """Model names of the policy."""


class Runtime:
    """A run that this program starts and ends; the module's docstring has an example.

    Args:
        config: roles.toml.
        overrides: ``a.b=c`` pairs put over it, as `--set`.
        name: this program's name in the run: a word without a slash.

    Attributes:
        run_dir, run_id: of the run, once it has started.
        discovery: a connection to it, once it is ready.
    """

    def __init__(self, config: str | Path, overrides: Sequence[str] = (), *, name: str = "program") -> None:
        self._config, self._overrides, self._name = Path(config), tuple(overrides), name
        self._keeper: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        self._stop_s = STOP_S
        self._stack = contextlib.AsyncExitStack()
        self.run_dir = Path()
        self.run_id = ""
        self.discovery: RunDiscovery

    @overload
    @classmethod
    def from_toml(cls, path: str | Path, overrides: Sequence[str] = (), *, name: str = "program") -> Runtime: ...
    @overload
    @classmethod
    def from_toml(cls, path: str | Path, overrides: Sequence[str] = (), *, debug: Literal[True]) -> DebugRun: ...
    @classmethod
    def from_toml(
        cls, path: str | Path, overrides: Sequence[str] = (), *, name: str = "program", debug: bool = False
    ) -> Runtime | DebugRun:
        """Make a run from a roles.toml; nothing is started yet.

        Args:
            debug: play single prompts or episodes in this process instead, where breakpoints work.
        """
        if debug:
            # Imported by name: the runtime does not depend on roles.
            debugged: DebugRun = importlib.import_module(DEBUG).Debug(path, overrides)
            return debugged
        return cls(path, overrides, name=name)

    async def __aenter__(self) -> Runtime:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Check the config as `relax-rt validate` does, start the run (or resume it), and wait until it is ready.

        Raises:
            BadInput: something is wrong with the config. Nothing was started.
            RelaxError: the run must not start, or it ended before it was ready; it says why.
        """
        if self._keeper is not None:
            raise RelaxError("starting a run twice", hint="make another Runtime")
        try:
            await self._launch()
            await self._ready()
            self.discovery = await self._stack.enter_async_context(connect(self.run_dir, name=self._name))
        except BaseException:
            await self.close()
            raise

    async def _launch(self) -> None:
        def launch_run() -> None:
            config = load_config(self._config, self._overrides, inputs=True)
            launch.check_start(config)
            preflight_config(config, self._config, self._overrides)
            self._stop_s = config.supervision.drain_timeout_s + STOP_S
            paths, self._keeper = launch.start(self._config, self._overrides)
            self.run_dir, self.run_id = paths.run_dir, paths.run_id
            argv = [sys.executable, "-I", "-S", "-c", WATCHER, str(self._keeper.pid), str(self._stop_s)]
            self._watcher = subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True)

        task = asyncio.create_task(asyncio.to_thread(launch_run))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            # A thread cannot be cancelled, and the keeper that it started must be known to `close`.
            with contextlib.suppress(RelaxError):
                await task
            raise

    async def _ready(self) -> None:
        while True:
            ended = self._ended
            record = read_run(self.run_dir) or {}
            if record.get("run_id") == self.run_id and record.get("status") == "running":
                return
            if ended:
                status = await self.status()
                raise RelaxError(
                    f"the run in {self.run_dir} ended before it was ready",
                    why=status.reason or f"exit code {status.exit_code}",
                    hint=f"relax-rt why --run {self.run_dir}",
                )
            await asyncio.sleep(POLL_S)

    @property
    def _ended(self) -> bool:
        return self._keeper is None or self._keeper.poll() is not None

    async def status(self) -> RunStatus:
        """Status of the run; once it is over, of its end.

        Raises:
            NoRun: it was not started. Unreachable: its agent does not answer.
        """
        return await asyncio.to_thread(control.status, self.run_dir)

    async def wait(self) -> RunStatus:
        """Wait until the run has ended by itself.

        Returns:
            How it ended: `status` is finished, stopped, killed, failed or "agent died".
        """
        await self._wait_keeper()
        return await self.status()

    async def records(self, kind: str = "step") -> AsyncIterator[dict[str, Any]]:
        """Iterate over the run's metrics records, from its start until it has ended.

        Args:
            kind: step, evaluation, rollout, … (docs/reference/metrics.md); empty: all.
        """
        tail = Tail(self.run_dir / METRICS)
        try:
            while True:
                ended = self._ended
                found = tail.poll()
                for record in found:
                    if not kind or record.get("kind") == kind:
                        yield record
                if not found:
                    if ended:
                        return
                    await asyncio.sleep(POLL_S)
        finally:
            tail.close()

    def actor(self, name: str, api: type[T]) -> T:
        """A reference to an actor of the run; see docs/guides/actors.md."""
        return self.discovery.actor(name, api)

    def router(self, role: str = "rollout") -> AbstractAsyncContextManager[Any]:
        """A Router to the run's engines, for the duration of the block (docs/explanation/router.md)."""
        # Imported by name: the runtime does not depend on roles.
        router: AbstractAsyncContextManager[Any] = importlib.import_module(ROUTER).Router(self.discovery, role)
        return router

    def gateway(self, slot: str = "gateway/0") -> GatewayEndpoint:
        """Address and key of OpenAI's and Anthropic's API to the policy, for a run with [roles.gateway]. A
        gateway that was started again may have another address: ask again.

        Raises:
            RelaxError: no gateway serves now.
        """
        # Imported by name: the runtime does not depend on roles.
        served: GatewayEndpoint = importlib.import_module(GATEWAY).endpoint(self.run_dir, slot)
        return served

    async def close(self) -> None:
        """End the run and wait for it: in order, or at once when that wait is cancelled."""
        try:
            await self._stack.aclose()
            await self._end()
        finally:
            if self._watcher is not None and self._ended:
                self._watcher.kill()
                self._watcher.communicate()

    async def _end(self) -> None:
        if self._ended:
            return
        self._interrupt()
        try:
            async with asyncio.timeout(self._stop_s):
                await self._wait_keeper()
        except TimeoutError:
            await self._end_at_once()
        except asyncio.CancelledError:
            await self._end_at_once()
            raise

    async def _end_at_once(self) -> None:
        self._interrupt()
        try:
            async with asyncio.timeout(KILL_S):
                await self._wait_keeper()
        except TimeoutError:
            assert self._keeper is not None
            # The agent ends the run when its keeper is dead.
            self._keeper.kill()
            await self._wait_keeper()

    async def _wait_keeper(self) -> None:
        if self._ended:
            return
        assert self._keeper is not None
        # The keeper is not reaped yet, so its pid cannot have been reused.
        pidfd, gone, loop = os.pidfd_open(self._keeper.pid), asyncio.Event(), asyncio.get_running_loop()
        loop.add_reader(pidfd, gone.set)
        try:
            await gone.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        self._keeper.wait()

    def _interrupt(self) -> None:
        """Interrupt the run as Ctrl-C does: the first time it drains, the second time it ends at once."""
        if self._keeper is not None and self._keeper.poll() is None:
            self._keeper.send_signal(signal.SIGINT)
