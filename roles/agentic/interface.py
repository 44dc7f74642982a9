"""The interface of environments: what users write for episodes with several turns."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Protocol, runtime_checkable

import msgspec

from relax_rt.roles.data.media.images import IMAGES
from relax_rt.transport.rpc.errors import RelaxError, did_you_mean

TEXTS = ("text", "input_text", "output_text")
"""Types of a message's parts that are text."""
FLOAT32_MAX = 3.4028234e38
Message = dict[str, Any]
"""An OpenAI chat message: role, content, and further fields of its role."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """The task of an episode; all members of a group have the same.

    Attributes:
        index: position in the run's order of tasks, or among the held-out ones.
        item: stable id. split: train or held_out.
        seed: for the environment's random choices, the same in every run, 31 bits.
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
    """The first observation of an episode.

    Attributes:
        messages: what the policy sees first; a text is one message of the user.
        tools: functions that it may call, as OpenAI's `tools`.
        state: name of what it sees, for advantages that compare equal states (gigpo).
        seat: whose turn it is, if the policy plays several (`seats` of the class).
    """

    messages: list[Message] | str
    tools: list[dict[str, Any]] = []
    state: str | None = None
    seat: int = 0


class Step(msgspec.Struct, kw_only=True):
    """The result of a reply.

    Attributes:
        messages: what the policy sees next, after its own reply; a text is one message of the user.
        reward: of this turn; the episode's reward is the sum over its turns.
        done: the episode is over.
        truncated: it is over because of a limit of time or steps (gymnasium's `truncated`).
        state: name of what it sees next; see Observation.
        info: numbers that are reported as means over episodes; of each name the last one counts.
        seat: which seat sees `messages` and replies next; None: the one that has replied.
        rewards: by seat, added to the last reply of each.
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
    """A reply of the policy.

    Attributes:
        text: without special tokens.
        message: the same as a chat message, with `tool_calls` and `reasoning_content` if there are any.
        finish_reason: stop, tool_calls, or length if it reached the limit.
        id: unique in its episode.
    """

    text: str
    message: Message
    finish_reason: str
    id: str = ""

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """Its function calls, as OpenAI's `tool_calls`."""
        return list(self.message.get("tool_calls") or [])


class Environment:
    """One game, sandbox or user, for one episode::

        class Echo(Environment):
            async def reset(self, task: Task) -> Observation:
                return Observation(messages="Say hello.")

            async def step(self, reply: Reply) -> Step:
                return Step(reward=float(reply.text == "hello"), done=True)

    Each episode has an instance of its own, with `roles.env.options` as arguments. Methods that are not async run in
    worker processes, which are killed when a call is late. Async ones must not block: they share an event loop, the
    slot's own or a worker's. Subclassing is optional; the methods are what counts.

    Attributes:
        seats: how many players the policy plays in one game, each with a conversation, rewards and a sample of its own.
    """

    seats: int = 1

    async def reset(self, task: Task) -> Observation | str:
        """Start the task and return the first observation."""
        raise NotImplementedError

    async def step(self, reply: Reply) -> Step:
        """Apply the policy's reply and return its result."""
        raise NotImplementedError

    async def close(self) -> None:
        """Release resources; called once, however the episode ended."""


class Chat(Protocol):
    """The policy, for an episode that is a function: ``async def play(task, chat) -> float``."""

    async def say(
        self, messages: list[Message], tools: list[dict[str, Any]] | None = None, *, previous: Reply | str = ""
    ) -> Reply:
        """Return the policy's reply to a whole conversation, in which its earlier replies are `Reply.message`.

        A conversation that continues an earlier one extends its tokens; one that departs from it becomes a branch.
        Calls may run concurrently. Calls that are open when the function returns are cancelled and not trained.

        Args:
            previous: the reply (or its id) that the conversation continues, if several have the same text; by default
                it is found by comparing messages.

        Raises:
            EpisodeOver: max_turns or max_tokens is used up. Let it pass: the episode ends there, marked as truncated.
        """

    def reward(self, value: float, reply: Reply | str = "") -> None:
        """Add to the reward of a reply, by default the last one, in addition to what the function returns.

        Raises:
            ValueError: it is not a finite number, or there is no such reply.
        """


class EpisodeOver(Exception):
    """An episode has used up its turns or tokens."""


@runtime_checkable
class Play(Protocol):
    """An episode as a function; it returns a reward that is added to its last turn's, or None."""

    def __call__(self, task: Task, chat: Chat, **options: Any) -> Awaitable[float | None]:
        """Play one episode."""


def as_messages(messages: list[Message] | str) -> list[Message]:
    """Return messages as a list."""
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)


def unsupported_part(messages: list[Message], *, has_vision: bool = False) -> str:
    """Return the type of the first part that the model does not take, as `image_url`; empty if there is none.

    Args:
        has_vision: the model takes images.
    """
    known = (*TEXTS, *IMAGES) if has_vision else TEXTS
    parts = [part for message in messages if isinstance(message.get("content"), list) for part in message["content"]]
    kinds = (str(part.get("type", "")) if isinstance(part, dict) else type(part).__name__ for part in parts)
    return next((kind for kind in kinds if kind not in known), "")


def checked_reward(value: Any) -> float:
    """Return a reward as a float.

    Raises:
        ValueError: it is not a finite number that fits into 32 bits.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"a reward of {value!r:.80}; a number is wanted") from None
    if not abs(number) <= FLOAT32_MAX:
        raise ValueError(f"a reward of {value!r:.80}; it must be finite, as a 32-bit float")
    return number


def is_episode_over(error: BaseException) -> bool:
    """Return whether an error is EpisodeOver, or a group of nothing else."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(EpisodeOver)[1] is None
    return isinstance(error, EpisodeOver)


OPTIONS = "roles.env.options"


class EnvironmentStuck(RelaxError):
    """A call of an environment did not return in time; if it ran in a worker, that was killed."""


class EnvironmentFailed(RelaxError):
    """An environment raised an error, returned something invalid, or its process ended in a call."""


class LimitExceeded(EnvironmentFailed):
    """A program was killed, or failed, because it exceeded a limit."""


class EpisodeLost(RelaxError):
    """An episode ended through no fault of its own, as when its process was killed because of another episode."""


class GenerationFailed(RelaxError):
    """The engines could not generate a reply and would not if asked again: none accepts it, too many died with it, or
    the episode's time is too short for it."""


def refuse_unknown_option(target: str, name: str, known: list[str]) -> None:
    """Raises: RelaxError, if an option of an environment is none of the known ones."""
    if name not in known:
        hint = did_you_mean(name, known) or (f"options are {', '.join(known)}" if known else "it has none")
        raise RelaxError(f"{OPTIONS}.{name}", why=f"{target} has no such option", hint=hint)
