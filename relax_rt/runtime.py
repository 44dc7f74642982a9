"""A run inside a program of one's own::

    async with relax_rt.Runtime.from_toml("roles.toml") as run:
        async with run.router() as router:          # tokens of the run's engines
            outcome = await router.generate(GenerationRequest(prompt=(1, 2, 3)))
        async for step in run.records("step"):      # until the run ends
            print(step["step"], step["reward_mean"])
        print(await run.wait())

The run is what `relax-rt up` starts, in processes of its own; this program has a connection to it. It ends with the
block, however that is left: in order, or at once when the wait for that is cancelled too. It ends also when this
program dies.
`from_toml(…, debug=True)` starts nothing and plays single prompts or episodes in this very process instead.
The loop is the program's own, so that it works in a notebook (`await run.start()`, `await run.close()`) and in pytest.
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
from relax_rt.observe.metrics import METRICS, Tail
from relax_rt.supervision import control
from relax_rt.supervision.api import RunStatus
from relax_rt.supervision.rundir import read_run
from relax_rt.transport.rpc.errors import RelaxError

T = TypeVar("T")
ROUTER, DEBUG = "relax_rt.roles.rollout.router", "relax_rt.roles.job.debugging"
GATEWAY = "relax_rt.roles.gateway.access"
POLL_S = 0.1
STOP_S = 60.0
"""For a run to end in order, beside what supervision.drain_timeout_s gives its roles; then it is ended at once."""
KILL_S = 30.0
LEASH = """
import os, select, signal, sys
fd = os.pidfd_open(int(sys.argv[1]))
for seconds in (None, float(sys.argv[2]), 30):
    if fd in select.select([fd] if seconds else [fd, 0], [], [], seconds)[0]:
        break
    signal.pidfd_send_signal(fd, signal.SIGINT)
"""
"""Waits until its input ends, and so this program, and interrupts the run then: once, and again when it had its time
to end in order."""


class Debugged(Protocol):
    """What ``Runtime.from_toml(…, debug=True)`` gives: see relax_rt.roles.job.debugging.Debug."""

    async def __aenter__(self) -> Debugged: ...
    async def __aexit__(self, *_: object) -> None: ...
    async def start(self) -> None:
        """Read config, tokenizer and data."""

    async def close(self) -> None:
        """Let the model go."""

    async def play(self, index: int = 0, *, split: Any = "train", words: Any = None, member: int = 0) -> Any:
        """Answer a prompt, or play an episode, and reward it."""


class Served(Protocol):
    """What `Runtime.gateway` gives: see relax_rt.roles.gateway.access.Endpoint."""

    @property
    def base_url(self) -> str:
        """For clients of OpenAI's API."""

    @property
    def anthropic_url(self) -> str:
        """For clients of Anthropic's API."""

    @property
    def api_key(self) -> str:
        """For both."""

    @property
    def models(self) -> tuple[str, ...]:
        """Names that the policy is called by."""


class Runtime:
    """A run that this program has begun; see the module.

    Args:
        config: roles.toml.
        overrides: ``a.b=c`` pairs put over it, as `--set`.
        name: how this program is called at the run's ends: a word, no slash.

    Attributes:
        run_dir, run_id: of the run, once it is started.
        discovery: a connection to it, once it is ready.
    """

    def __init__(self, config: str | Path, overrides: Sequence[str] = (), *, name: str = "program") -> None:
        self._config, self._overrides, self._name = Path(config), tuple(overrides), name
        self._keeper: subprocess.Popen[bytes] | None = None
        self._leash: subprocess.Popen[bytes] | None = None
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
    def from_toml(cls, path: str | Path, overrides: Sequence[str] = (), *, debug: Literal[True]) -> Debugged: ...
    @classmethod
    def from_toml(
        cls, path: str | Path, overrides: Sequence[str] = (), *, name: str = "program", debug: bool = False
    ) -> Runtime | Debugged:
        """The run of a roles.toml; nothing is started yet.

        Args:
            debug: play single prompts or episodes in this process instead, where breakpoints work.
        """
        if debug:
            # By its name: the runtime knows nothing of RL until somebody asks for it.
            debugged: Debugged = importlib.import_module(DEBUG).Debug(path, overrides)
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
            await self._begin()
            await self._ready()
            self.discovery = await self._stack.enter_async_context(connect(self.run_dir, name=self._name))
        except BaseException:
            await self.close()
            raise

    async def _begin(self) -> None:
        def begin() -> None:
            config = load_config(self._config, self._overrides, inputs=True)
            launch.check_start(config)
            preflight_config(config, self._config, self._overrides)
            self._stop_s = config.supervision.drain_timeout_s + STOP_S
            paths, self._keeper = launch.start(self._config, self._overrides)
            self.run_dir, self.run_id = paths.run_dir, paths.run_id
            argv = [sys.executable, "-I", "-S", "-c", LEASH, str(self._keeper.pid), str(self._stop_s)]
            self._leash = subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True)

        task = asyncio.create_task(asyncio.to_thread(begin))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            # A thread cannot be called off, and what it has started must be known.
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
        """How the run does; once it is over, how it ended.

        Raises:
            NoRun: it was not started. Unreachable: its agent does not answer.
        """
        return await asyncio.to_thread(control.status, self.run_dir)

    async def wait(self) -> RunStatus:
        """Until the run has ended by itself.

        Returns:
            How it ended: `status` is finished, stopped, killed, failed or "agent died".
        """
        await self._gone()
        return await self.status()

    async def records(self, kind: str = "step") -> AsyncIterator[dict[str, Any]]:
        """Records of the run's metrics as they come, from its beginning on, until it has ended.

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
        """A Router: tokens of the run's engines, for as long as the block lasts; see docs/explanation/router.md."""
        # By its name: the runtime knows nothing of RL until somebody asks for it.
        router: AbstractAsyncContextManager[Any] = importlib.import_module(ROUTER).Router(self.discovery, role)
        return router

    def gateway(self, slot: str = "gateway/0") -> Served:
        """Where the policy speaks OpenAI's and Anthropic's API, for a run with [roles.gateway]. A
        gateway that was started again may have another address: ask again.

        Raises:
            RelaxError: none serves now.
        """
        # By its name: the runtime knows nothing of RL until somebody asks for it.
        served: Served = importlib.import_module(GATEWAY).endpoint(self.run_dir, slot)
        return served

    async def close(self) -> None:
        """End the run, if it has not ended, and wait for it: in order, or, once that is cancelled, at once."""
        try:
            await self._stack.aclose()
            await self._end()
        finally:
            if self._leash is not None and self._ended:
                self._leash.kill()
                self._leash.communicate()

    async def _end(self) -> None:
        if self._ended:
            return
        self._interrupt()
        try:
            async with asyncio.timeout(self._stop_s):
                await self._gone()
        except TimeoutError:
            await self._end_at_once()
        except asyncio.CancelledError:
            await self._end_at_once()
            raise

    async def _end_at_once(self) -> None:
        self._interrupt()
        try:
            async with asyncio.timeout(KILL_S):
                await self._gone()
        except TimeoutError:
            assert self._keeper is not None
            # Its agent sees to the rest.
            self._keeper.kill()
            await self._gone()

    async def _gone(self) -> None:
        if self._ended:
            return
        assert self._keeper is not None
        # Not waited for yet, so that the number is its own.
        pidfd, gone, loop = os.pidfd_open(self._keeper.pid), asyncio.Event(), asyncio.get_running_loop()
        loop.add_reader(pidfd, gone.set)
        try:
            await gone.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        self._keeper.wait()

    def _interrupt(self) -> None:
        """As Ctrl-C does: the first time the run is drained, the second time ended."""
        if self._keeper is not None and self._keeper.poll() is None:
            self._keeper.send_signal(signal.SIGINT)
