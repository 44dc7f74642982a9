"""Messages between an env slot (workers.py) and its worker processes (worker_process.py)."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

MAX_BYTES = 64 << 20
Operation = Literal["reset", "step", "close", "play"]


class WorkerSetup(msgspec.Struct, frozen=True):
    """The first message: which environment to load; see [roles.env].

    Attributes:
        blocked_after_s: an event loop that does not answer for so long is reported as blocked.
    """

    target: str
    options: dict[str, Any]
    config_dir: str
    blocked_after_s: float = 5.0


class EnvironmentCall(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """A call of an episode's environment; data is the encoded task or reply.

    Async environments get further calls before this one has returned. `play` calls a function that plays the episode.
    """

    number: int
    episode: int
    operation: Operation
    data: bytes = b""


class CallResult(msgspec.Struct, frozen=True, array_like=True, tag="result"):
    """The result of a call: an encoded Observation, text, Step or reward, or an error; number 0: of loading.

    Attributes:
        over: a function let EpisodeOver pass.
    """

    number: int
    data: bytes = b""
    error: str = ""
    over: str = ""


class PolicyRequest(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """A function, called by `number`, asks the policy; data is an encoded ChatArguments."""

    number: int
    request: int
    data: bytes


class PolicyReply(msgspec.Struct, frozen=True, array_like=True, tag="reply"):
    """The policy's reply to a ChatRequest: an encoded Reply, or why there is none."""

    request: int
    data: bytes = b""
    error: str = ""
    over: str = ""


class ReplyReward(msgspec.Struct, frozen=True, array_like=True, tag="reward"):
    """A reward that a function, called by `number`, gives to a reply."""

    number: int
    value: float
    reply: str


class CancelCall(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Nobody waits any more: to a worker for a call, from it for a ChatRequest."""

    number: int
    request: int = 0


class LoopBlocked(msgspec.Struct, frozen=True, array_like=True, tag="blocked"):
    """A call (0: unknown) blocks the worker's event loop at this line of code; empty line: it answers again."""

    number: int
    line: str = ""


class PolicyArguments(msgspec.Struct, frozen=True, array_like=True):
    """Arguments of Chat.say."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    previous: str


ToWorker = EnvironmentCall | PolicyReply | CancelCall
FromWorker = CallResult | PolicyRequest | ReplyReward | CancelCall | LoopBlocked
