"""What an environment is: the user's side of episodes with several turns. See docs/guides/environments.md."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Protocol, runtime_checkable

import msgspec

from relax_rt.roles.data.media.pictures import IMAGES

TEXTS = ("text", "input_text", "output_text")
"""Types of parts of a message that are text."""
FLOAT32_MAX = 3.4028234e38
Message = dict[str, Any]
"""An OpenAI chat message: role, content, and what else its role has."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What an episode is about; all members of a group have the same.

    Attributes:
        index: place in the run's order of tasks, or among the held-out ones.
        item: stable id. split: train or held_out.
        seed: decides what the environment makes of it, the same in every run, 31 bits.
        question, answer, metadata: of the data item, in a run with [data]; messages: its prompt; tools: its functions.
    """

    index: int
    item: str
    split: str
    seed: int
    question: str = ""
    answer: Any = ""
    metadata: dict[str, Any] = {}
    messages: list[Message] = []
    tools: list[dict[str, Any]] = []


class Observation(msgspec.Struct, kw_only=True):
    """How an episode begins.

    Attributes:
        messages: what the policy sees first; a text is one message of the user.
        tools: functions it may call, as OpenAI's `tools`.
        state: names what it sees, for advantages that compare equal states (gigpo).
        seat: whose turn it is, where the policy plays several (`seats` of the class).
    """

    messages: list[Message] | str
    tools: list[dict[str, Any]] = []
    state: str | None = None
    seat: int = 0


class Step(msgspec.Struct, kw_only=True):
    """What became of a reply.

    Attributes:
        messages: what the policy sees next, behind its own reply; a text is one message of the user.
        reward: of this turn; the episode's reward is the sum over its turns.
        done: the episode is over.
        truncated: it is over although it had not ended: a limit of time or steps has cut it (gymnasium's `truncated`).
        state: names what it sees next; see Observation.
        info: numbers that are reported as means over episodes, the last one given under each name.
        seat: who sees `messages` and replies next; None: the one who has replied.
        rewards: by seat, to the last reply of each.
    """

    messages: list[Message] | str = []
    reward: float | None = None
    done: bool = False
    truncated: bool = False
    state: str | None = None
    info: dict[str, float] = {}
    seat: int | None = None
    rewards: dict[int, float] = {}


class Reply(msgspec.Struct, kw_only=True):
    """What the policy said.

    Attributes:
        text: its words, without special tokens.
        message: the same as a chat message, with `tool_calls` and `reasoning_content` if there are any.
        finish_reason: stop, tool_calls, or length if it was cut.
        id: names it in its episode.
    """

    text: str
    message: Message
    finish_reason: str
    id: str = ""

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """Its calls of functions, as OpenAI's `tool_calls`."""
        return list(self.message.get("tool_calls") or [])


class Environment:
    """One game, sandbox or user, for one episode::

        class Echo(Environment):
            async def reset(self, task: Task) -> Observation:
                return Observation(messages="Say hello.")

            async def step(self, reply: Reply) -> Step:
                return Step(reward=float(reply.text == "hello"), done=True)

    The class is made anew for each episode, with `roles.env.options` as its arguments. Methods that are not async run
    in worker processes, which are killed when a call is late. Async ones must not block: they share an event loop, the
    slot's own or a worker's. A subclass is not needed, the methods are.

    Attributes:
        seats: how many players the policy is in one game, each with a conversation, rewards and a sample of its own.
    """

    seats: int = 1

    async def reset(self, task: Task) -> Observation | str:
        """Begin the task."""
        raise NotImplementedError

    async def step(self, reply: Reply) -> Step:
        """Take the policy's reply."""
        raise NotImplementedError

    async def close(self) -> None:
        """Let go of what it holds; called once, whatever became of the episode."""


class Chat(Protocol):
    """The policy, for an episode that is a function: ``async def play(task, chat) -> float``."""

    async def say(
        self, messages: list[Message], tools: list[dict[str, Any]] | None = None, *, previous: Reply | str = ""
    ) -> Reply:
        """The policy's answer to a whole conversation. What it said before is in there as `Reply.message`.

        A conversation that goes on behind an earlier one extends its tokens; one that goes another way is a branch.
        Calls may run beside each other. What is still open when the function ends is given up, and not trained.

        Args:
            previous: the reply (or its id) that it goes on from, where several say the same; else it is found by what
                was said.

        Raises:
            EpisodeOver: max_turns or max_tokens is used up. Let it pass: the episode ends there, marked as truncated.
        """

    def reward(self, value: float, reply: Reply | str = "") -> None:
        """Add to the reward of a reply, or of the one that came last, besides what the function returns at its end.

        Raises:
            ValueError: it is no finite number, or there is no such reply.
        """


class EpisodeOver(Exception):
    """An episode has used up its turns or tokens."""


@runtime_checkable
class Play(Protocol):
    """An episode as a function; it returns the reward that its last turn gets besides `chat.reward`, or None."""

    def __call__(self, task: Task, chat: Chat, **options: Any) -> Awaitable[float | None]:
        """Play one episode."""


def conversation(messages: list[Message] | str) -> list[Message]:
    """Messages as a list."""
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)


def media(messages: list[Message], *, sees: bool = False) -> str:
    """Type of the first part that the model cannot take, as `image_url`; empty if there is none.

    Args:
        sees: it takes pictures.
    """
    known = (*TEXTS, *IMAGES) if sees else TEXTS
    parts = [part for message in messages if isinstance(message.get("content"), list) for part in message["content"]]
    kinds = (str(part.get("type", "")) if isinstance(part, dict) else type(part).__name__ for part in parts)
    return next((kind for kind in kinds if kind not in known), "")


def checked(value: Any) -> float:
    """A reward.

    Raises:
        ValueError: it is no finite number that fits into 32 bits.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"a reward of {value!r:.80}; a number is wanted") from None
    if not abs(number) <= FLOAT32_MAX:
        raise ValueError(f"a reward of {value!r:.80}; it must be finite, as a 32-bit float")
    return number


def only_over(error: BaseException) -> bool:
    """Whether it is EpisodeOver, or a group of nothing else."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(EpisodeOver)[1] is None
    return isinstance(error, EpisodeOver)
