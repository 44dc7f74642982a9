"""A process of environments whose methods block: ``python -m relax_rt.roles.agentic.worker FD SPEC``.

It has any number of episodes, does one call after the other, and ends with whoever started it. All that it knows can be
thrown away at any moment.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec

from relax_rt.roles.agentic.frames import Answer, Call, Spec, receive, send
from relax_rt.roles.agentic.interface import Observation, Reply, Step, Task
from relax_rt.roles.agentic.loading import load_factory
from relax_rt.roles.rewards.loader import user_line
from relax_rt.transport.rpc.errors import RelaxError

PR_SET_PDEATHSIG = 1


class Episodes:
    """The environments of a process, by the numbers that its owner gives them."""

    def __init__(self, spec: Spec) -> None:
        self._factory = load_factory(spec.target, spec.options, Path(spec.config_dir))
        self._at_work: dict[int, Any] = {}

    def do(self, call: Call) -> bytes:
        """Carry out a call; what the environment raises passes through."""
        if call.op == "close":
            environment = self._at_work.pop(call.episode, None)
            if environment is not None and hasattr(environment, "close"):
                environment.close()
            return b""
        if call.op == "reset":
            environment = self._at_work[call.episode] = self._factory.make()
            found = environment.reset(msgspec.msgpack.decode(call.data, type=Task))
            return encoded(found if isinstance(found, str | Observation) else wrong("reset", found))
        found = self._at_work[call.episode].step(msgspec.msgpack.decode(call.data, type=Reply))
        return encoded(found if isinstance(found, Step) else wrong("step", found))


def wrong(method: str, found: Any) -> Any:
    """Raises: TypeError, because a method returned something else than it should."""
    wanted = "an Observation or a text" if method == "reset" else "a Step"
    raise TypeError(f"{method} returned {found!r:.80}, which is not {wanted}")


def encoded(value: Any) -> bytes:
    """What is told to the owner."""
    return msgspec.msgpack.encode(value, enc_hook=_plain)


def _plain(value: Any) -> Any:
    """Numbers of numpy as Python's."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be told to another process")


def main(fd: int, spec: Spec) -> None:
    """Answer calls until the other end is closed."""
    # Threads of user code do not keep it alive, nor does a call that hangs: see `end_with_parent`.
    end_with_parent()
    link = socket.socket(fileno=fd)
    try:
        episodes = Episodes(spec)
    except RelaxError as error:
        send(link, Answer(0, error=str(error)))
        return
    send(link, Answer(0))
    while (call := receive(link, Call)) is not None:
        try:
            answer = Answer(call.number, data=episodes.do(call))
        except BaseException as error:  # noqa: BLE001 - user code may raise anything, SystemExit included
            answer = Answer(call.number, error=f"{type(error).__name__}: {error} at {user_line(error)}"[:2000])
        send(link, answer)


def end_with_parent() -> None:
    """Have this process killed when its parent ends, and watch for that besides: the parent may have ended before."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        pause = threading.Event()
        while os.getppid() == parent:
            pause.wait(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=Spec))
    # What user code left running is nobody's business any more.
    os._exit(0)
