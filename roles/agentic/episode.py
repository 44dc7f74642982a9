"""Play one episode: the environment and the policy take turns, and each sampled token goes into a token ledger.

`play_game` plays a game for all of its seats, an episode for each; player.py calls it for training and evaluation.
"""

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
    EnvironmentFailed,
    EnvironmentStuck,
    EpisodeLost,
    EpisodeOver,
    GenerationFailed,
    Message,
    Observation,
    Reply,
    Step,
    Task,
    as_messages,
    checked_reward,
    is_episode_over,
    unsupported_part,
)
from relax_rt.roles.agentic.tokens.images import ingest_images
from relax_rt.roles.agentic.tokens.ledger import TokenLedger, budget_exhausted
from relax_rt.roles.agentic.tokens.types import Episode, PromptPlan, SampledCompletion
from relax_rt.roles.agentic.user_tasks import AbandonedTasks, EpisodeTask
from relax_rt.roles.agentic.workers import WorkerEnvironment
from relax_rt.roles.base.user_code import user_line
from relax_rt.roles.rollout.engines.routing import PART_TOKENS
from relax_rt.roles.rollout.router import GenerationRequest, NotGenerated, Outcome, RouterEnded, RouterFull
from relax_rt.roles.rollout.router.interface import CHUNK_TOKENS
from relax_rt.transport.rpc.errors import Refused, RelaxError

if TYPE_CHECKING:
    from relax_rt.roles.agentic.loading import EnvironmentFactory
    from relax_rt.roles.agentic.replay_cache import ReplayCache

T = TypeVar("T")

Generate = Callable[[GenerationRequest], Awaitable[Outcome]]
CLOSE_S = 5.0
FULL_RETRY_S = 0.1
"""Pause before a router that was full is asked again."""
OVER_PAUSE_S = 0.05
"""Pause for each call after the episode is over: a function that loops forever must not block the event loop."""
WAITING_FOR_TURN = "waits for its turn"
SLOW_HINT = "raise roles.env.episode_timeout_s, or have it take fewer or shorter turns"
ENVIRONMENT, GAME = "environment", "game"
"""Why an episode with turns and tokens left was truncated: by its environment, or another seat of its game."""


class EpisodeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of an episode, as in [roles.env]; max_new_tokens is for one reply."""

    max_turns: int
    max_new_tokens: int
    turn_timeout_s: float
    episode_timeout_s: float


class ReplySampling(msgspec.Struct, frozen=True, kw_only=True):
    """How replies are sampled.

    Attributes:
        session: keeps an episode on one engine. routing: record routing rows.
    """

    seed: int
    temperature: float
    stop_ids: frozenset[int]
    session: str
    routing: bool = False


class PlayedEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """A finished episode.

    Attributes:
        episode: what was sampled.
        rewards: of each reply, by id, in the order of `episode.replies`.
        states: the state before each reply, if the environment names it.
        truncated: why it was truncated, or empty: turns or tokens were used up; by its environment (environment); or
            because another seat of the game used up its own (game).
        turns: number of replies. cut: how many of them reached the length limit.
        info: numbers that the environment reports.
        parts: parts of the reward by name, if there are more than the environment's; `episode` is the total.
        output: what the program printed, if one played. left: replies that it abandoned, which were dropped.
    """

    episode: Episode
    rewards: dict[str, float]
    states: dict[str, str]
    truncated: str
    turns: int
    cut: int
    info: dict[str, float]
    parts: dict[str, float] = {}
    output: str | None = None
    left: int = 0

    @property
    def reward(self) -> float:
        """The reward of the whole episode."""
        return math.fsum(self.rewards.values())


class EpisodeChat:
    """The policy's side of one episode; implements Chat.

    Args:
        generate: generates a reply, as `Router.generate`.
        lag: publications that an engine may be behind for the next reply, given the oldest version in the episode (0:
            none yet).
        on_tokens: called with the number of tokens of each reply.

    Attributes:
        waiting: replies that are being generated, or were when the time was over.
        activity: what the episode is doing, in words.
        last: id of the last reply.
        failure: why the episode cannot be finished, whatever its environment does.
        replay: replies of an earlier attempt at the episode.
    """

    def __init__(
        self,
        ledger: TokenLedger,
        generate: Generate,
        limits: EpisodeLimits,
        sampling: ReplySampling,
        *,
        lag: Callable[[int], int] = lambda oldest: 0,
        on_tokens: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        self.ledger, self._generate, self._limits, self._sampling = ledger, generate, limits, sampling
        self._lag, self._on_tokens = lag, on_tokens
        self.ends_at = time.monotonic() + limits.episode_timeout_s
        self.turns = self.cut = 0
        self.truncated_by = ""
        self.waiting = self._oldest = 0
        self.activity, self.last = "begins", ""
        self.rewards: dict[str, float] = {}
        self.states: dict[str, str] = {}
        self.failure: RelaxError | None = None
        self.replay: ReplayCache | None = None
        self._open_calls: set[asyncio.Task[Any]] = set()
        self._ended = self._over_reported = False

    async def say(
        self,
        messages: list[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        state: str | None = None,
        previous: Reply | str = "",
    ) -> Reply:
        """Have the policy reply to a conversation; see Chat.say.

        Args:
            state: the environment's name for what the policy sees.

        Raises:
            EpisodeOver: max_turns or max_tokens is used up.
            Refused: the chat template does not render the conversation, or an image is invalid or exceeds a limit.
            EpisodeLost: the engines did not answer within the episode's time. GenerationFailed: they never will.
            RouterEnded: the engines cannot be reached any more.
        """
        if self._over_reported:
            await asyncio.sleep(OVER_PAUSE_S)
        messages = await ingest_images(messages, self.ledger.image_processor, self.ledger.add_image)
        if self._ended:
            self._over_reported = True
            raise EpisodeOver("the episode has ended")
        if self.turns >= self._limits.max_turns:
            raise self._truncate("turns")
        self.turns += 1
        turn = self.turns
        most = self._limits.max_new_tokens
        try:
            plan = self.ledger.prompt(messages, tools or (), previous=_id(previous) or None, max_new_tokens=most)
        except Refused as error:
            if self.last and budget_exhausted(error):
                self.turns -= 1
                raise self._truncate("tokens") from None
            raise
        self.activity = f"waits for tokens of reply {turn}"
        self.waiting += 1
        try:
            rows = plan.rows if self._sampling.routing else None
            outcome = self.replay.take(turn, plan.tokens, rows, plan.media) if self.replay is not None else None
            if outcome is None:
                outcome = await self._generate_reply(plan, turn)
                if self.replay is not None:
                    self.replay.add(turn, plan.tokens, outcome, plan.media)
        except BaseException as error:
            self.ledger.abandon(plan)
            if isinstance(error, RelaxError):
                self.failure = self.failure or error
            if time.monotonic() < self.ends_at:
                # Cancelled by a function that continues without this reply.
                self._stop_waiting(f"goes on without reply {turn}")
            raise
        self._stop_waiting(f"goes on after reply {turn}")
        # Record a generated reply in the ledger.
        self._oldest = min([self._oldest or math.inf, *(span.kv_version for span in outcome.versions)])  # type: ignore[assignment]
        made = self.ledger.record(
            plan,
            SampledCompletion(
                tuple(outcome.tokens),
                tuple(outcome.logprobs),
                tuple(outcome.versions),
                outcome.finish_reason,
                outcome.routing,
                outcome.prompt_routing,
            ),
        )
        self.last = made.id
        self.rewards[made.id] = 0.0
        if state is not None:
            self.states[made.id] = state
        self.cut += made.finish_reason == "length"
        self._on_tokens(len(outcome.tokens))
        text = made.message.get("content")
        words = text if isinstance(text, str) else ""
        return Reply(text=words, message=dict(made.message), finish_reason=made.finish_reason, id=made.id)

    def _stop_waiting(self, doing: str) -> None:
        self.waiting -= 1
        if not self.waiting:
            self.activity = doing

    def reward(self, value: float, reply: Reply | str = "") -> None:
        """Add to the reward of a reply; see Chat.reward."""
        name = _id(reply) or self.last
        if not name:
            raise ValueError("a reward before the first reply")
        if name not in self.rewards:
            raise ValueError(f"a reward of reply {name!r:.80}, which this episode does not have")
        self.rewards[name] += checked_reward(value)

    async def end(self) -> set[asyncio.Task[Any]]:
        """Cancel the calls that are still open; return tasks of user code that made them and do not end."""
        if not (tasks := self.cancel_open_calls()):
            return set()
        return (await asyncio.wait(tasks, timeout=CLOSE_S))[1]

    def cancel_open_calls(self) -> set[asyncio.Task[Any]]:
        """Refuse further calls and cancel open ones; return their tasks."""
        self._ended = True
        tasks = self._open_calls - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        return tasks

    def _truncate(self, why: str) -> EpisodeOver:
        self.truncated_by, self._over_reported = self.truncated_by or why, True
        return EpisodeOver(why)

    async def _generate_reply(self, plan: PromptPlan, turn: int) -> Outcome:
        """Raises: EpisodeLost, GenerationFailed, RouterEnded."""
        task = asyncio.current_task()
        assert task is not None
        self._open_calls.add(task)
        try:
            while True:
                try:
                    return await self._generate(self._request(plan, turn))
                except RouterFull as error:
                    if time.monotonic() + FULL_RETRY_S >= self.ends_at:
                        raise EpisodeLost(f"reply {turn}", why=str(error)) from error
                    await asyncio.sleep(FULL_RETRY_S)
        except (EpisodeLost, RouterEnded):
            raise
        except NotGenerated as error:
            never = error.outcome.kind in ("refused", "failed") or error.outcome.slow
            raise (GenerationFailed if never else EpisodeLost)(f"reply {turn}", why=str(error)) from error
        except Refused as error:
            raise GenerationFailed(f"reply {turn}", why=str(error)) from error
        except RelaxError as error:
            raise EpisodeLost(f"reply {turn}", why=str(error)) from error
        finally:
            self._open_calls.discard(task)

    def _request(self, plan: PromptPlan, turn: int) -> GenerationRequest:
        sampling = self._sampling
        left_s = max(0.001, self.ends_at - time.monotonic())
        return GenerationRequest(
            prompt=plan.tokens,
            seed=turn_seed(sampling.seed, turn),
            temperature=sampling.temperature,
            max_new_tokens=min(plan.room, self._limits.max_new_tokens),
            stop_ids=sampling.stop_ids,
            timeout_s=left_s,
            lag=self._lag(self._oldest),
            session=sampling.session,
            chunk_tokens=PART_TOKENS if sampling.routing else CHUNK_TOKENS,
            routing=sampling.routing,
            rows_from=plan.rows,
            media=plan.media,
        )


def _id(reply: Reply | str) -> str:
    return reply.id if isinstance(reply, Reply) else reply


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a reply, 63 bits: xxh3-64 of the episode's seed and the number of the turn."""
    return xxhash.xxh3_64_intdigest(f"{seed} {turn}".encode()) >> 1


async def play(
    factory: EnvironmentFactory, environment: Any, task: Task, chat: EpisodeChat, limits: EpisodeLimits
) -> PlayedEpisode:
    """Play one episode; as `play_game` with a single seat."""
    (played,) = await play_game(factory, environment, task, [chat], limits)
    return played


async def play_game(
    factory: EnvironmentFactory,
    environment: Any,
    task: Task,
    chats: Sequence[EpisodeChat],
    limits: EpisodeLimits,
    abandoned: AbandonedTasks | None = None,
    name: str = "an episode",
) -> list[PlayedEpisode]:
    """Play one game with the policy in each of its seats, an episode for each.

    The environment's coroutines run in a task of their own, which is abandoned if it does not end when it is cancelled:
    this returns within episode_timeout_s plus `user_tasks.EPISODE_GRACE_S`, whatever they do.

    Args:
        environment: an Environment, here or in a worker; or the function, if the factory plays.
        chats: the policy in each seat; a function has one.
        abandoned: collects tasks that do not end. name: of the episode, for them.

    Raises:
        EnvironmentStuck: the environment did not return in time. EnvironmentFailed: it raised an error, or returned
            something invalid. EpisodeLost: the episode ended through no fault of its own. GenerationFailed: the engines
            cannot generate what it asks for. RouterEnded: the engines cannot be reached any more.
    """
    episode_task = EpisodeTask(AbandonedTasks() if abandoned is None else abandoned, name)

    async def work() -> dict[str, float]:
        if factory.plays:
            return await _play_function(environment, task, chats[0], episode_task)
        return await _play_turns(environment, task, chats, limits, episode_task)

    async def end() -> None:
        for chat in chats:
            for left in await chat.end():
                episode_task.abandon(left, "in a task of the function")
        await _close(environment, episode_task)

    def cancel_open_calls() -> None:
        for chat in chats:
            chat.cancel_open_calls()

    def timeout_error() -> RelaxError:
        # Each call was in time, but not all of them together.
        late = next((chat for chat in chats if chat.waiting), None)
        at_work = late or next((chat for chat in chats if chat.activity != WAITING_FOR_TURN), chats[0])
        what, why = f"the episode {at_work.activity}", f"not over within {limits.episode_timeout_s:g} s"
        return (EpisodeLost if late else EnvironmentStuck)(what, why=why, hint=SLOW_HINT)

    info = await episode_task.run(work, end, limits.episode_timeout_s, timeout_error, cancel_open_calls)
    return [
        _result(chat, f"seat {seat} of the game" if len(chats) > 1 else "", info) for seat, chat in enumerate(chats)
    ]


def _result(chat: EpisodeChat, seat: str, info: dict[str, float]) -> PlayedEpisode:
    """Return the episode of a seat.

    Raises:
        EnvironmentFailed: it has never replied.
    """
    episode = chat.ledger.episode()
    if not episode.branches:
        why = f"it ended before {'that seat' if seat else 'the policy'} had replied"
        raise EnvironmentFailed(seat or "the episode", why=why)
    return PlayedEpisode(
        episode=episode,
        rewards={reply: chat.rewards[reply] for reply in episode.replies},
        states=chat.states,
        truncated=chat.truncated_by,
        turns=chat.turns,
        cut=chat.cut,
        info=info,
    )


def _check(answer: Observation | Step, where: str, *, has_vision: bool) -> None:
    """Check the types of what an environment of this process returned; a worker's are checked by decoding.

    Args:
        has_vision: the model takes images.

    Raises:
        EnvironmentFailed: a field is not what it is declared to be.
    """
    messages, state = answer.messages, answer.state
    if not isinstance(messages, str) and not (
        isinstance(messages, list) and all(isinstance(m, dict) for m in messages)
    ):
        raise EnvironmentFailed(where, why=f"its messages are {messages!r:.80}, neither a text nor a list of messages")
    if kind := unsupported_part(as_messages(messages), has_vision=has_vision):
        takes = "takes texts and images" if has_vision else "takes text alone"
        raise EnvironmentFailed(where, why=f"its messages have a part of type {kind!r}, and the model {takes}")
    if not isinstance(state, str | None):
        raise EnvironmentFailed(where, why=f"its state is {state!r:.80}, which is no text")
    info = answer.info if isinstance(answer, Step) else {}
    try:
        numbers = [float(value) for value in info.values()]
    except (TypeError, ValueError, AttributeError) as error:
        raise EnvironmentFailed(where, why=f"its info is {info!r:.80}, which is not numbers by name") from error
    if not all(map(math.isfinite, numbers)):
        raise EnvironmentFailed(where, why=f"its info has numbers that are not finite: {info!r:.80}")


async def _play_turns(
    environment: Any, task: Task, chats: Sequence[EpisodeChat], limits: EpisodeLimits, episode_task: EpisodeTask
) -> dict[str, float]:
    """Play an environment turn by turn; return what it reports."""
    # In a worker, a call's deadline starts when it is its turn.
    timeout_s = None if isinstance(environment, WorkerEnvironment) else limits.turn_timeout_s
    _set_active(chats, 0, "is in reset")
    begun = await _call(lambda: environment.reset(task), timeout_s, "in reset", episode_task)
    seen = Observation(messages=begun) if isinstance(begun, str) else begun
    if not isinstance(seen, Observation):
        raise EnvironmentFailed("in reset", why=f"it returned {begun!r:.80}, which is no Observation and no text")
    has_vision = chats[0].ledger.image_processor is not None
    _check(seen, "in reset", has_vision=has_vision)
    histories: list[list[Message]] = [[] for _ in chats]
    seat = _next_seat(seen.seat, 0, chats, "in reset")
    histories[seat], tools, state = as_messages(seen.messages), seen.tools, seen.state
    info: dict[str, float] = {}
    while True:
        chat = _set_active(chats, seat, "begins its turn")
        try:
            reply = await chat.say(histories[seat], tools, state=state, previous=chat.last)
        except EpisodeOver:
            _truncate_all(chats, GAME)
            return info
        except RouterEnded:
            raise
        except Refused as error:
            raise EnvironmentFailed(f"before reply {chat.turns}", why=str(error)) from error
        where = f"in step {sum(one.turns for one in chats)}"
        chat.activity = f"is {where}"
        step = await _call(lambda: environment.step(reply), timeout_s, where, episode_task)  # noqa: B023
        if not isinstance(step, Step):
            raise EnvironmentFailed(where, why=f"it returned {step!r:.80}, which is no Step")
        _check(step, where, has_vision=has_vision)
        _give_rewards(step, seat, chats, where)
        info |= step.info
        if step.truncated:
            _truncate_all(chats, ENVIRONMENT)
        if step.done or step.truncated:
            return info
        histories[seat] = [*histories[seat], reply.message]
        seat = _next_seat(step.seat, seat, chats, where)
        histories[seat], state = [*histories[seat], *as_messages(step.messages)], step.state


def _set_active(chats: Sequence[EpisodeChat], seat: int, doing: str) -> EpisodeChat:
    """Make it this seat's turn."""
    for chat in chats:
        chat.activity = WAITING_FOR_TURN
    chats[seat].activity = doing
    return chats[seat]


def _truncate_all(chats: Sequence[EpisodeChat], why: str) -> None:
    """Mark the game as truncated for all seats; one that has used up its turns or tokens keeps that reason."""
    for chat in chats:
        chat.truncated_by = chat.truncated_by or why


def _next_seat(named: int | None, now: int, chats: Sequence[EpisodeChat], where: str) -> int:
    """Return whose turn it is. Raises: EnvironmentFailed, if there is no such seat."""
    seat = now if named is None else named
    if not isinstance(seat, int) or not 0 <= seat < len(chats):
        raise EnvironmentFailed(
            where, why=f"it names seat {seat!r:.40}, and the policy has {len(chats)}, numbered from 0"
        )
    return seat


def _give_rewards(step: Step, seat: int, chats: Sequence[EpisodeChat], where: str) -> None:
    """Reward the seat that replied, and others as the step says; a seat without a reply has nothing to reward."""
    try:
        chats[seat].reward(0.0 if step.reward is None else step.reward)
        for other, value in dict(step.rewards).items():
            chat = chats[_next_seat(other, seat, chats, where)]
            if chat.last:
                chat.reward(value)
    except (TypeError, ValueError) as error:
        raise EnvironmentFailed(where, why=str(error)) from error


async def _play_function(function: Any, task: Task, chat: EpisodeChat, episode_task: EpisodeTask) -> dict[str, float]:
    chat.activity = "plays"
    try:
        with episode_task.calling("in play"):
            last = await function(task, chat)
        if last is not None:
            chat.reward(last, next(reversed(chat.ledger.replies), ""))
    except (EnvironmentStuck, EnvironmentFailed, EpisodeLost):
        # Raised by a function in a worker.
        if chat.failure is None:
            raise
    except Exception as error:
        if chat.failure is None and not (chat.truncated_by and is_episode_over(error)):
            raise EnvironmentFailed("in play", why=f"{type(error).__name__}: {error} at {user_line(error)}") from error
    if chat.failure is not None:
        # Also if the function went on without the reply: it is not to blame, and its reward is not valid.
        raise chat.failure
    return {}


async def _call(call: Callable[[], Any], seconds: float | None, where: str, episode_task: EpisodeTask) -> Any:
    """Call an environment within a deadline. One that swallows its cancellation is detected by `episode_task`.

    Raises:
        EnvironmentStuck, EnvironmentFailed, and what a worker raises.
    """
    deadline = asyncio.timeout(seconds)
    try:
        with episode_task.calling(where, seconds):
            async with deadline:
                found = call()
                if inspect.isawaitable(found):
                    found = await found
    except (EnvironmentStuck, EnvironmentFailed, EpisodeLost):
        raise
    except Exception as error:
        if not deadline.expired():
            raise EnvironmentFailed(where, why=f"{type(error).__name__}: {error} at {user_line(error)}") from error
    if deadline.expired():
        # Also if it has returned since: it may have been cancelled halfway.
        raise EnvironmentStuck(where, why=f"it did not return within {seconds:g} s")
    return found


async def _close(environment: Any, episode_task: EpisodeTask) -> None:
    """Close the environment; its errors are ignored."""
    close = getattr(environment, "close", None)
    if close is None:
        return
    try:
        with episode_task.calling("in close"):
            async with asyncio.timeout(CLOSE_S):
                found = close()
                if inspect.isawaitable(found):
                    await found
    except Exception:  # noqa: BLE001 - user code may raise anything
        return
