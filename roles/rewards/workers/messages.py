"""What the reward role and its workers say to each other: msgpack, each message behind its length."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from relax_rt.roles.rewards.scoring import Failed, Request, Score

HEADER = struct.Struct("<I")
REQUEST_BYTES, REPLY_BYTES = 256 << 20, 4 << 20
"""Of one message."""


class TaskSpec(msgspec.Struct, frozen=True):
    """The reasoning-gym task whose verdict a function may take as `score`."""

    task: str
    options: dict[str, Any]
    size: int


class Part(msgspec.Struct, frozen=True):
    """A function to load: a user's by its target, or a registered one by its name and options. `label` in messages."""

    target: str
    options: dict[str, Any] = {}
    setting: str = "reward.function"
    group: bool = False


class Setup(msgspec.Struct, frozen=True):
    """The first message to a worker."""

    parts: list[Part]
    config_dir: str
    timeout_s: float
    task: TaskSpec | None = None


class About(msgspec.Struct, frozen=True):
    """A loaded function: see RewardFunction."""

    is_async: bool
    wants: list[str] | None
    needs: list[str]


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """All parts are there."""

    parts: list[About]


class NotLoaded(msgspec.Struct, frozen=True, tag=True):
    """One is not; the texts of the error."""

    what: str
    why: str
    hint: str


class Calls(msgspec.Struct, frozen=True):
    """Requests for one part; all of one group, if the part scores groups."""

    number: int
    part: int
    requests: list[Request]


class Done(msgspec.Struct, frozen=True, tag=True):
    """The outcome of one request. Exactly one of score and failed is there."""

    number: int
    index: int
    score: Score | None = None
    failed: str = ""
    excess: bool = False
    unreadable: bool = False

    def outcome(self) -> Score | Failed:
        """As one thing."""
        return (
            self.score
            if self.score is not None
            else Failed(self.failed, excess=self.excess, unreadable=self.unreadable)
        )


Reply = Loaded | NotLoaded | Done


def frame(message: Any) -> bytes:
    """A message as it crosses. What is not plain data is sent as text."""
    data = msgspec.msgpack.encode(message, enc_hook=str)
    return HEADER.pack(len(data)) + data
