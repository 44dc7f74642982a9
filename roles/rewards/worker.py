"""The worker process of reward functions: ``python -m relax_rt.roles.rewards.worker FD``, and its messages.

It loads reward functions and calls them, one request after the other, until its pool (workers.py) closes the link. User
code can do whatever it likes here: the guard bounds it, and the pool checks what it sends.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from relax_rt.process.worker import WorkerLink
from relax_rt.roles.data.gym import GymTask
from relax_rt.roles.rewards.library.functions import RewardFunction, load_reward, make_function
from relax_rt.roles.rewards.scoring import SCORE, RewardCaller, RewardFailed, RewardRequest, Score, run_together
from relax_rt.transport.rpc.errors import RelaxError

MAX_REPLY_BYTES = 4 << 20
MAX_REASON_CHARS = 2000


class TaskSpec(msgspec.Struct, frozen=True):
    """The reasoning-gym task whose verdict a function may take as `score`."""

    task: str
    options: dict[str, Any]
    size: int


class FunctionSpec(msgspec.Struct, frozen=True):
    """A function to load: a user's by its target, or a registered one by its name and options."""

    target: str
    options: dict[str, Any] = {}
    setting: str = "reward.function"
    group: bool = False


class RewardWorkerSetup(msgspec.Struct, frozen=True):
    """The first message to a worker."""

    functions: list[FunctionSpec]
    config_dir: str
    timeout_s: float
    task: TaskSpec | None = None


class FunctionsLoaded(msgspec.Struct, frozen=True, tag=True):
    """All functions are loaded; whether each is async."""

    is_async: list[bool]


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """A function cannot be loaded; the texts of the error."""

    what: str
    why: str
    hint: str


class ScoreRequest(msgspec.Struct, frozen=True):
    """Completions for one function; all of one group, if it scores groups."""

    number: int
    function: int
    requests: list[RewardRequest]


class ScoreResult(msgspec.Struct, frozen=True, tag=True):
    """The result of one completion: either `score`, or why it `failed`."""

    number: int
    index: int
    score: Score | None = None
    failed: str = ""
    excess: bool = False
    unreadable: bool = False

    def outcome(self) -> Score | RewardFailed:
        """Return it as the role uses it."""
        return self.score or RewardFailed(self.failed, excess=self.excess, unreadable=self.unreadable)


def main() -> None:
    """Serve the pool that holds the other end of the socket, whose number is the argument."""
    link = WorkerLink(int(sys.argv[1]), MAX_REPLY_BYTES)
    if (body := link.receive()) is None:
        return
    setup = msgspec.msgpack.decode(body, type=RewardWorkerSetup)
    try:
        callers = load_callers(setup)
    except RelaxError as error:
        link.send(LoadFailed(error.what, error.why, error.hint))
        return
    link.send(FunctionsLoaded([caller.function.is_async for caller in callers]))
    while (body := link.receive()) is not None:
        message = msgspec.msgpack.decode(body, type=ScoreRequest)
        _score(link, message, callers[message.function], group=setup.functions[message.function].group)


def load_callers(setup: RewardWorkerSetup) -> list[RewardCaller]:
    """Load the functions of a setup.

    Raises:
        RelaxError: one cannot be loaded.
    """
    verify = task_verifier(setup.task)
    functions = [load_function(one, Path(setup.config_dir)) for one in setup.functions]
    if setup.task is not None and any(one.wants is not None and SCORE in one.wants for one in functions):
        # Creating the task takes seconds: do it before the first call, which has a deadline.
        _gym_task(msgspec.json.encode(setup.task).decode())
    return [RewardCaller(function, setup.timeout_s, verify) for function in functions]


def load_function(spec: FunctionSpec, config_dir: Path) -> RewardFunction:
    """Load one function.

    Raises:
        RelaxError: it cannot be loaded.
    """
    if ":" in spec.target:
        return load_reward(spec.target, config_dir, spec.setting)
    return make_function(spec.target, spec.options, spec.setting)


def task_verifier(task: TaskSpec | None) -> Callable[[str, dict[str, Any]], float] | None:
    """Return the task's own verdict on a text, given the item's metadata."""
    if task is None:
        return None
    encoded = msgspec.json.encode(task).decode()
    return lambda text, metadata: _gym_task(encoded).score(text, metadata)


@functools.cache
def _gym_task(encoded: str) -> GymTask:
    spec = msgspec.json.decode(encoded, type=TaskSpec)
    return GymTask(spec.task, spec.options, spec.size)


def _score(link: WorkerLink, message: ScoreRequest, caller: RewardCaller, *, group: bool) -> None:
    """Call the function and send each result as soon as there is one."""
    sent: set[int] = set()

    def send(index: int, result: Score | RewardFailed) -> None:
        if index in sent:
            return
        sent.add(index)
        if isinstance(result, RewardFailed):
            reason = result.reason[:MAX_REASON_CHARS]
            link.send(
                ScoreResult(message.number, index, failed=reason, excess=result.excess, unreadable=result.unreadable)
            )
        else:
            link.send(ScoreResult(message.number, index, result))

    if group:
        for index, result in enumerate(caller.group(message.requests)):
            send(index, result)
    elif caller.function.is_async:
        for index, result in enumerate(run_together(caller, message.requests, send)):
            send(index, result)
    else:
        for index, request in enumerate(message.requests):
            send(index, caller.one(request))


if __name__ == "__main__":
    main()
