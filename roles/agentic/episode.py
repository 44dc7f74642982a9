"""One episode: the environment and the policy take turns, and what was sampled goes into a token ledger."""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import xxhash

from relax_rt.roles.agentic.interface import (
    EpisodeOver,
    Message,
    Observation,
    Reply,
    Step,
    Task,
    conversation,
)
from relax_rt.roles.agentic.pool import Broken, Lost, RemoteEnvironment, Stuck
from relax_rt.roles.agentic.tokens import Episode, PromptPlan, Sampled, TokenLedger
from relax_rt.roles.rewards.loader import user_line
from relax_rt.roles.router.requests import Outcome, Wanted
from relax_rt.transport.errors import Refused, RelaxError

if TYPE_CHECKING:
    from relax_rt.roles.agentic.loading import Factory

T = TypeVar("T")

Generate = Callable[[Wanted], Awaitable[Outcome]]
FLOAT32_MAX = 3.4028234e38
CLOSE_S = 5.0


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of an episode; see roles.env. max_new_tokens is that of one reply."""

    max_turns: int
    max_new_tokens: int
    turn_timeout_s: float
    episode_timeout_s: float


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How replies are sampled. `session` keeps an episode with one engine."""

    seed: int
    temperature: float
    stop_ids: frozenset[int]
    session: str


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """An episode that has come to its end.

    Attributes:
        episode: what was sampled.
        rewards: of each reply, by its id. states: what the policy saw before each, if the environment says.
        truncated: why it was cut (turns, tokens), or empty.
        turns: replies. cut: how many of them had their length cut.
        info: what the environment reports.
    """

    episode: Episode
    rewards: dict[str, float]
    states: dict[str, str]
    truncated: str
    turns: int
    cut: int
    info: dict[str, float]

    @property
    def reward(self) -> float:
        """Of the whole episode."""
        return math.fsum(self.rewards.values())


class Talk:
    """The policy's side of one episode; implements Chat.

    Args:
        generate: has a reply sampled; raises RelaxError if it cannot be.
        lag: publications that an engine may be behind for the next reply, given the oldest version in the episode (0:
            none yet).
    """

    def __init__(
        self,
        ledger: TokenLedger,
        generate: Generate,
        limits: Limits,
        sampling: Sampling,
        *,
        lag: Callable[[int], int] = lambda oldest: 0,
        told: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        self.ledger, self._generate, self._limits, self._sampling = ledger, generate, limits, sampling
        self._lag, self._told = lag, told
        self.ends_at = time.monotonic() + limits.episode_timeout_s
        self.turns = self.cut = 0
        self.over = ""
        self.doing = "begins"
        """What the episode is at, in words."""
        self.rewards: dict[str, float] = {}
        self.states: dict[str, str] = {}
        self._oldest = 0
        self.last = ""
        """Id of the last reply."""

    async def say(
        self,
        messages: list[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        state: str | None = None,
        previous: str = "",
    ) -> Reply:
        """See Chat.say.

        Args:
            state: what the policy sees, as the environment names it.
            previous: id of the reply that this goes on from; else that is found by what was said.

        Raises:
            EpisodeOver: max_turns or max_tokens is used up.
            Refused: the chat template takes no such conversation.
            Lost: the engines did not answer within the episode's time.
        """
        if self.turns >= self._limits.max_turns:
            raise self._cut("turns")
        self.turns += 1
        turn = self.turns
        plan = self._plan(messages, tools or (), previous)
        self.doing = f"waits for tokens of reply {turn}"
        try:
            outcome = await self._sampled(plan, turn)
        except BaseException:
            self.ledger.abandon(plan)
            raise
        self._oldest = min([self._oldest or math.inf, *(span.kv_version for span in outcome.versions)])  # type: ignore[assignment]
        made = self.ledger.sampled(
            plan,
            Sampled(tuple(outcome.tokens), tuple(outcome.logprobs), tuple(outcome.versions), outcome.finish_reason),
        )
        self.last = made.id
        self.rewards[made.id] = 0.0
        if state is not None:
            self.states[made.id] = state
        self.cut += made.finish_reason == "length"
        self._told(len(outcome.tokens))
        text = made.message.get("content")
        return Reply(
            text=text if isinstance(text, str) else "", message=dict(made.message), finish_reason=made.finish_reason
        )

    def reward(self, value: float) -> None:
        """See Chat.reward."""
        if not self.last:
            raise ValueError("a reward before the first reply")
        self.rewards[self.last] += checked(value)

    def _plan(self, messages: list[Message], tools: Sequence[dict[str, Any]], previous: str) -> PromptPlan:
        most = self._limits.max_new_tokens
        try:
            return self.ledger.prompt(messages, tools, previous=previous or None, max_new_tokens=most)
        except Refused as error:
            if self.last and used_up(error):
                self.turns -= 1
                raise self._cut("tokens") from None
            raise

    def _cut(self, why: str) -> EpisodeOver:
        self.over = self.over or why
        return EpisodeOver(why)

    async def _sampled(self, plan: PromptPlan, turn: int) -> Outcome:
        sampling = self._sampling
        left_s = max(0.001, self.ends_at - time.monotonic())
        wanted = Wanted(
            prompt=plan.tokens,
            seed=turn_seed(sampling.seed, turn),
            temperature=sampling.temperature,
            max_new_tokens=min(plan.room, self._limits.max_new_tokens),
            stop_ids=sampling.stop_ids,
            timeout_s=left_s,
            lag=self._lag(self._oldest),
            session=sampling.session,
        )
        try:
            return await self._generate(wanted)
        except Refused:
            raise
        except RelaxError as error:
            raise Lost(f"reply {turn}", why=str(error)) from error


def used_up(error: Refused) -> bool:
    """Whether the ledger has no room left, in tokens or branches."""
    return "or raise max_" in (error.hint or "")


def turn_seed(seed: int, turn: int) -> int:
    """Seed of a reply, 63 bits: xxh3-64 of the episode's seed and the number of the turn."""
    return xxhash.xxh3_64_intdigest(f"{seed} {turn}".encode()) >> 1


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


async def play(factory: Factory, environment: Any, task: Task, talk: Talk, limits: Limits) -> Played:
    """Play an episode to its end.

    Args:
        environment: an Environment, here or in a worker; or the function, where the factory plays.

    Raises:
        Stuck: the environment did not return in time. Broken: it raised an error, or returned nonsense.
        Lost: the episode ended through no fault of its own.
    """
    deadline = asyncio.timeout(limits.episode_timeout_s)
    try:
        async with deadline:
            try:
                if factory.plays:
                    info = await _play_function(environment, task, talk)
                else:
                    info = await _take_turns(environment, task, talk, limits)
            finally:
                await _close(environment)
    except TimeoutError:
        if not deadline.expired():
            raise
        # Environments have deadlines of their own; a function that plays has only this one.
        error = Stuck if factory.plays and not talk.doing.startswith("waits for tokens") else Lost
        raise error(f"the episode {talk.doing}", why=f"not over within {limits.episode_timeout_s:g} s") from None
    episode = talk.ledger.episode()
    if not episode.branches:
        raise Broken("the episode", why="it ended before the policy had said anything")
    return Played(
        episode=episode,
        rewards=talk.rewards,
        states=talk.states,
        truncated=talk.over,
        turns=talk.turns,
        cut=talk.cut,
        info=info,
    )


def _check(answer: Observation | Step, where: str) -> None:
    """An environment in this process may fill in anything; from a worker it comes checked.

    Raises:
        Broken: a field is not what it is declared to be.
    """
    messages, state = answer.messages, answer.state
    if not isinstance(messages, str) and not (
        isinstance(messages, list) and all(isinstance(m, dict) for m in messages)
    ):
        raise Broken(where, why=f"its messages are {messages!r:.80}, neither a text nor a list of messages")
    if not isinstance(state, str | None):
        raise Broken(where, why=f"its state is {state!r:.80}, which is no text")
    try:
        numbers = [float(value) for value in answer.info.values()] if isinstance(answer, Step) else []
    except (TypeError, ValueError, AttributeError) as error:
        raise Broken(where, why=f"its info is {answer.info!r:.80}, which is not numbers by name") from error
    if not all(map(math.isfinite, numbers)):
        raise Broken(where, why=f"its info has numbers that are not finite: {answer.info!r:.80}")


async def _take_turns(environment: Any, task: Task, talk: Talk, limits: Limits) -> dict[str, float]:
    """The environment's loop; returns what it reports."""
    # In a worker a call has its deadline from when it is its turn.
    timeout_s = None if isinstance(environment, RemoteEnvironment) else limits.turn_timeout_s
    talk.doing = "is in reset"
    begun = await _within(lambda: environment.reset(task), timeout_s, "in reset")
    seen = Observation(messages=begun) if isinstance(begun, str) else begun
    if not isinstance(seen, Observation):
        raise Broken("in reset", why=f"it returned {begun!r:.80}, which is no Observation and no text")
    _check(seen, "in reset")
    messages, tools, state = conversation(seen.messages), seen.tools, seen.state
    info: dict[str, float] = {}
    while True:
        try:
            reply = await talk.say(messages, tools, state=state, previous=talk.last)
        except EpisodeOver:
            return info
        except Refused as error:
            raise Broken(f"before reply {talk.turns}", why=str(error)) from error
        where = f"in step {talk.turns}"
        talk.doing = f"is {where}"
        step = await _within(lambda: environment.step(reply), timeout_s, where)  # noqa: B023
        if not isinstance(step, Step):
            raise Broken(where, why=f"it returned {step!r:.80}, which is no Step")
        _check(step, where)
        try:
            talk.reward(0.0 if step.reward is None else step.reward)
        except ValueError as error:
            raise Broken(where, why=str(error)) from error
        info |= step.info
        if step.done:
            return info
        messages, state = [*messages, reply.message, *conversation(step.messages)], step.state


async def _play_function(function: Any, task: Task, talk: Talk) -> dict[str, float]:
    talk.doing = "plays"
    try:
        last = await function(task, talk)
        if last is not None:
            talk.reward(last)
    except EpisodeOver:
        return {}
    except (Lost, Stuck, asyncio.CancelledError):
        raise
    except Exception as error:
        raise Broken("in play", why=f"{type(error).__name__}: {error} at {user_line(error)}") from error
    return {}


async def _within(call: Callable[[], Any], seconds: float | None, where: str) -> Any:
    """A call of an environment, within a deadline.

    Raises:
        Stuck, Broken, and what a worker raises.
    """
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            found = call()
            if inspect.isawaitable(found):
                found = await found
    except (Stuck, Broken, Lost):
        raise
    except Exception as error:
        if deadline.expired():
            raise Stuck(where, why=f"it did not return within {seconds:g} s") from None
        raise Broken(where, why=f"{type(error).__name__}: {error} at {user_line(error)}") from error
    return found


async def _close(environment: Any) -> None:
    """Let the environment go; what it says to that changes nothing."""
    close = getattr(environment, "close", None)
    if close is None:
        return
    try:
        async with asyncio.timeout(CLOSE_S):
            found = close()
            if inspect.isawaitable(found):
                await found
    except Exception:  # noqa: BLE001 - user code may raise anything
        return
