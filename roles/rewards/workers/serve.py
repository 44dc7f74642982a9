"""A worker: loads reward functions, and calls them one request after the other until nobody asks any more.

It runs under a guard (see box/guard.py) that kills it with all its descendants. User code can do whatever it likes
here; what it says on our socket is checked at the other end.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from relax_rt.roles.rewards.loader import RewardFunction, load_reward
from relax_rt.roles.rewards.scoring import SCORE, Caller, Failed, Score, run_together
from relax_rt.roles.rewards.workers.messages import (
    HEADER,
    REQUEST_BYTES,
    About,
    Calls,
    Done,
    Loaded,
    NotLoaded,
    Part,
    Setup,
    TaskSpec,
    frame,
)
from relax_rt.transport.rpc.errors import RelaxError

if TYPE_CHECKING:
    from relax_rt.roles.data.gym import GymTask

M = TypeVar("M", Setup, Calls)


def main() -> None:
    """Entry point; the number of the socket is the argument."""
    ours = socket.socket(fileno=int(sys.argv[1]))
    # Programs that user code starts have no business with it.
    ours.set_inheritable(False)
    setup = _receive(ours, Setup)
    if setup is None:
        return
    try:
        callers = load(setup)
    except RelaxError as error:
        ours.sendall(frame(NotLoaded(error.what, error.why, error.hint)))
        return
    ours.sendall(frame(Loaded([_about(caller.function) for caller in callers])))
    process = os.getpid()
    while (calls := _receive(ours, Calls)) is not None:
        _answer(ours, calls, callers[calls.part], group=setup.parts[calls.part].group, process=process)


def load(setup: Setup) -> list[Caller]:
    """The functions of a setup.

    Raises:
        RelaxError: one cannot be loaded.
    """
    verify = verdict_of(setup.task)
    functions = [load_part(part, Path(setup.config_dir)) for part in setup.parts]
    if setup.task is not None and any(one.wants is not None and SCORE in one.wants for one in functions):
        _task(msgspec.json.encode(setup.task).decode())
    return [Caller(function, setup.timeout_s, verify) for function in functions]


def verdict_of(task: TaskSpec | None) -> Callable[[str, dict[str, Any]], float] | None:
    """A task's verdict on a text, given the item's metadata."""
    return None if task is None else functools.partial(_verdict, task)


@functools.cache
def _task(given: str) -> GymTask:
    from relax_rt.roles.data.gym import GymTask

    spec = msgspec.json.decode(given, type=TaskSpec)
    return GymTask(spec.task, spec.options, spec.size)


def _verdict(spec: TaskSpec, text: str, metadata: dict[str, Any]) -> float:
    # It takes seconds, so it is made beforehand where it is sure to be used.
    return _task(msgspec.json.encode(spec).decode()).score(text, metadata)


def load_part(part: Part, config_dir: Path) -> RewardFunction:
    """One function.

    Raises:
        RelaxError: it cannot be loaded.
    """
    if ":" in part.target:
        return load_reward(part.target, config_dir, part.setting)
    from relax_rt.roles.rewards.registry import made

    return made(part.target, part.options, part.setting)


def _about(function: RewardFunction) -> About:
    wants = None if function.wants is None else sorted(function.wants)
    return About(function.is_async, wants, sorted(function.needs))


def _answer(ours: socket.socket, calls: Calls, caller: Caller, *, group: bool, process: int) -> None:
    def say(index: int, result: Score | Failed) -> None:
        if os.getpid() != process:
            os._exit(0)  # a child that user code forked, and that came back from it beside its parent
        done = (
            Done(calls.number, index, failed=result.reason[:2000], excess=result.excess, unreadable=result.unreadable)
            if isinstance(result, Failed)
            else Done(calls.number, index, result)
        )
        ours.sendall(frame(done))

    if group:
        for index, result in enumerate(caller.group(calls.requests)):
            say(index, result)
    elif caller.function.is_async:
        told: set[int] = set()

        def at_once(index: int, result: Score | Failed) -> None:
            told.add(index)
            say(index, result)

        for index, result in enumerate(run_together(caller, calls.requests, at_once)):
            if index not in told:
                say(index, result)
    else:
        for index, request in enumerate(calls.requests):
            say(index, caller.one(request))


def _receive(ours: socket.socket, type_: type[M]) -> M | None:
    """The next message; None when there will be none."""
    header = _exactly(ours, HEADER.size)
    if header is None:
        return None
    (size,) = HEADER.unpack(header)
    data = _exactly(ours, size) if size <= REQUEST_BYTES else None
    return None if data is None else msgspec.msgpack.decode(data, type=type_)


def _exactly(ours: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        part = ours.recv(min(size - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return bytes(data)


if __name__ == "__main__":
    main()
