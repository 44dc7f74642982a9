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

from relax_rt.roles.agentic.errors import EnvironmentFailed, EnvironmentStuck, EpisodeLost, GenerationFailed
from relax_rt.roles.agentic.interface import (
    EpisodeOver,
    Message,
    Observation,
    Reply,
    Step,
    Task,
    checked,
    conversation,
    media,
    only_over,
)
from relax_rt.roles.agentic.tokens import Episode, PromptPlan, Sampled, TokenLedger
from relax_rt.roles.agentic.tokens.ledger import budget_exhausted
from relax_rt.roles.agentic.tokens.pictures import ingest_pictures
from relax_rt.roles.agentic.user_tasks import AbandonedTasks, EpisodeTask
from relax_rt.roles.agentic.workers import WorkerEnvironment
from relax_rt.roles.base.user_code import user_line
from relax_rt.roles.rollout.engines.routing import PART_TOKENS
from relax_rt.roles.rollout.router import GenerationRequest, NotGenerated, Outcome, RouterEnded, RouterFull
from relax_rt.roles.rollout.router.interface import CHUNK_TOKENS
from relax_rt.transport.rpc.errors import Refused, RelaxError

if TYPE_CHECKING:
    from relax_rt.roles.agentic.loading import Factory
    from relax_rt.roles.agentic.replay_cache import Replies

T = TypeVar("T")

Generate = Callable[[GenerationRequest], Awaitable[Outcome]]
CLOSE_S = 5.0
ROOM_S = 0.1
"""After that a router that had no room is asked again."""
OVER_S = 0.05
"""Who asks on although the episode is over waits so long each time: a loop without an end must not block everybody."""
OTHERS_TURN = "waits for its turn"
TOO_SLOW = "raise roles.env.episode_timeout_s, or have it take fewer or shorter turns"
ENVIRONMENT, GAME = "environment", "game"
"""Who cut an episode that had turns and tokens left: its environment; another seat of its game, which had none."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of an episode; see roles.env. max_new_tokens is that of one reply."""

    max_turns: int
    max_new_tokens: int
    turn_timeout_s: float
    episode_timeout_s: float


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How replies are sampled. `session` keeps an episode with one engine; routing: with routing rows."""

    seed: int
    temperature: float
    stop_ids: frozenset[int]
    session: str
    routing: bool = False


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """An episode that has come to its end.

    Attributes:
        episode: what was sampled.
        rewards: of each reply, by its id, in the order of `episode.replies`.
        states: what the policy saw before each, if the environment says.
        truncated: why it was cut, or empty: it used up its turns or tokens; its environment cut it (environment);
            another seat of the game used up its own (game).
        turns: replies. cut: how many of them had their length cut.
        info: what the environment reports.
        parts: of the reward, by name, where there is more than the environment's; `episode` is all of it.
        output: what the program printed, where one played. left: answers that it left before their end, dropped.
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
        """Of the whole episode."""
        return math.fsum(self.rewards.values())


class Talk:
    """The policy's side of one episode; implements Chat.

    Args:
        generate: has a reply sampled, as `Router.generate`.
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
        self.waiting = 0
        """Replies that it waits for, or waited for when its time was over."""
        self.doing = "begins"
        """What the episode is at, in words."""
        self.rewards: dict[str, float] = {}
        self.states: dict[str, str] = {}
        self._oldest = 0
        self.last = ""
        """Id of the last reply."""
        self.trouble: RelaxError | None = None
        """Why the episode cannot be played to its end, whatever its environment makes of that."""
        self.kept: Replies | None = None
        """What was said when the episode was played before."""
        self._open: set[asyncio.Task[Any]] = set()
        self._ended = self._told_over = False

    async def say(
        self,
        messages: list[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        state: str | None = None,
        previous: Reply | str = "",
    ) -> Reply:
        """See Chat.say.

        Args:
            state: what the policy sees, as the environment names it.

        Raises:
            EpisodeOver: max_turns or max_tokens is used up.
            Refused: the chat template takes no such conversation, or a picture in it is none, or beyond a bound.
            Lost: the engines did not answer within the episode's time. NotMade: they never would.
            RouterEnded: there is no way to the engines any more.
        """
        if self._told_over:
            await asyncio.sleep(OVER_S)
        messages = await ingest_pictures(messages, self.ledger)
        if self._ended:
            self._told_over = True
            raise EpisodeOver("the episode has ended")
        if self.turns >= self._limits.max_turns:
            raise self._cut("turns")
        self.turns += 1
        turn = self.turns
        plan = self._plan(messages, tools or (), _id(previous))
        self.doing = f"waits for tokens of reply {turn}"
        self.waiting += 1
        try:
            rows = plan.rows if self._sampling.routing else None
            outcome = self.kept.take(turn, plan.tokens, rows, plan.media) if self.kept is not None else None
            if outcome is None:
                outcome = await self._sampled(plan, turn)
                if self.kept is not None:
                    self.kept.add(turn, plan.tokens, outcome, plan.media)
        except BaseException as error:
            self.ledger.abandon(plan)
            if isinstance(error, RelaxError):
                self.trouble = self.trouble or error
            if time.monotonic() < self.ends_at:
                # Given up by a function that has other things to do.
                self._waits_no_more(f"goes on without reply {turn}")
            raise
        self._waits_no_more(f"goes on after reply {turn}")
        return self._took(plan, outcome, state)

    def _waits_no_more(self, doing: str) -> None:
        self.waiting -= 1
        if not self.waiting:
            self.doing = doing

    def _took(self, plan: PromptPlan, outcome: Outcome, state: str | None) -> Reply:
        """A reply is there."""
        self._oldest = min([self._oldest or math.inf, *(span.kv_version for span in outcome.versions)])  # type: ignore[assignment]
        made = self.ledger.sampled(
            plan,
            Sampled(
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
        self._told(len(outcome.tokens))
        text = made.message.get("content")
        words = text if isinstance(text, str) else ""
        return Reply(text=words, message=dict(made.message), finish_reason=made.finish_reason, id=made.id)

    def reward(self, value: float, reply: Reply | str = "") -> None:
        """See Chat.reward."""
        name = _id(reply) or self.last
        if not name:
            raise ValueError("a reward before the first reply")
        if name not in self.rewards:
            raise ValueError(f"a reward of reply {name!r:.80}, which this episode does not have")
        self.rewards[name] += checked(value)

    async def end(self) -> set[asyncio.Task[Any]]:
        """Give up the calls that are still open: whoever made them waits for them no more.

        Returns:
            Tasks of user code that made them, and do not end for that.
        """
        if not (tasks := self.give_up()):
            return set()
        return (await asyncio.wait(tasks, timeout=CLOSE_S))[1]

    def give_up(self) -> set[asyncio.Task[Any]]:
        """The same without waiting: nothing is said any more. Returns the tasks with open calls."""
        self._ended = True
        tasks = self._open - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        return tasks

    def _plan(self, messages: list[Message], tools: Sequence[dict[str, Any]], previous: str) -> PromptPlan:
        most = self._limits.max_new_tokens
        try:
            return self.ledger.prompt(messages, tools, previous=previous or None, max_new_tokens=most)
        except Refused as error:
            if self.last and budget_exhausted(error):
                self.turns -= 1
                raise self._cut("tokens") from None
            raise

    def _cut(self, why: str) -> EpisodeOver:
        self.over, self._told_over = self.over or why, True
        return EpisodeOver(why)

    async def _sampled(self, plan: PromptPlan, turn: int) -> Outcome:
        """Raises: Lost, NotMade, RouterEnded."""
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            while True:
                try:
                    return await self._generate(self._wanted(plan, turn))
                except RouterFull as error:
                    if time.monotonic() + ROOM_S >= self.ends_at:
                        raise EpisodeLost(f"reply {turn}", why=str(error)) from error
                    await asyncio.sleep(ROOM_S)
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
            self._open.discard(task)

    def _wanted(self, plan: PromptPlan, turn: int) -> GenerationRequest:
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
    """Seed of a reply, 63 bits: xxh3-64 of the episode's seed and the number of the turn."""
    return xxhash.xxh3_64_intdigest(f"{seed} {turn}".encode()) >> 1


async def play(factory: Factory, environment: Any, task: Task, talk: Talk, limits: Limits) -> Played:
    """Play an episode to its end; see `play_seats`."""
    (played,) = await play_seats(factory, environment, task, [talk], limits)
    return played


async def play_seats(
    factory: Factory,
    environment: Any,
    task: Task,
    talks: Sequence[Talk],
    limits: Limits,
    abandoned: AbandonedTasks | None = None,
    name: str = "an episode",
) -> list[Played]:
    """Play one game to its end, the policy in each of its seats: an episode for each.

    The environment's coroutines run in a task of their own, which is given up where it does not end when it is
    cancelled: this returns within episode_timeout_s and `user_tasks.EPISODE_GRACE_S`, whatever they do.

    Args:
        environment: an Environment, here or in a worker; or the function, where the factory plays.
        talks: the policy in each seat; a function has one.
        strays: take the tasks that were given up. name: of the episode, for them.

    Raises:
        Stuck: the environment did not return in time. Broken: it raised an error, or returned nonsense.
        Lost: the episode ended through no fault of its own. NotMade: the engines cannot make what it asks for.
        RouterEnded: there is no way to the engines any more.
    """
    episode_task = EpisodeTask(AbandonedTasks() if abandoned is None else abandoned, name)

    async def work() -> dict[str, float]:
        if factory.plays:
            return await _play_function(environment, task, talks[0], episode_task)
        return await _take_turns(environment, task, talks, limits, episode_task)

    async def end() -> None:
        for talk in talks:
            for left in await talk.end():
                episode_task.abandon(left, "in a task of the function")
        await _close(environment, episode_task)

    def give_up() -> None:
        for talk in talks:
            talk.give_up()

    info = await episode_task.run(work, end, limits.episode_timeout_s, lambda: _not_over(talks, limits), give_up)
    return [
        _played(talk, f"seat {seat} of the game" if len(talks) > 1 else "", info) for seat, talk in enumerate(talks)
    ]


def _not_over(talks: Sequence[Talk], limits: Limits) -> RelaxError:
    """Each call of the environment was in time, and all of them together were not."""
    late = next((talk for talk in talks if talk.waiting), None)
    at_work = late or next((talk for talk in talks if talk.doing != OTHERS_TURN), talks[0])
    what, why = f"the episode {at_work.doing}", f"not over within {limits.episode_timeout_s:g} s"
    return (EpisodeLost if late else EnvironmentStuck)(what, why=why, hint=TOO_SLOW)


def _played(talk: Talk, seat: str, info: dict[str, float]) -> Played:
    """What became of a seat; raises Broken if it has never said anything."""
    episode = talk.ledger.episode()
    if not episode.branches:
        why = f"it ended before {'that seat' if seat else 'the policy'} had said anything"
        raise EnvironmentFailed(seat or "the episode", why=why)
    return Played(
        episode=episode,
        rewards={reply: talk.rewards[reply] for reply in episode.replies},
        states=talk.states,
        truncated=talk.over,
        turns=talk.turns,
        cut=talk.cut,
        info=info,
    )


def _check(answer: Observation | Step, where: str, *, sees: bool) -> None:
    """An environment in this process may fill in anything; from a worker it comes checked.

    Args:
        sees: the model takes pictures.

    Raises:
        Broken: a field is not what it is declared to be.
    """
    messages, state = answer.messages, answer.state
    if not isinstance(messages, str) and not (
        isinstance(messages, list) and all(isinstance(m, dict) for m in messages)
    ):
        raise EnvironmentFailed(where, why=f"its messages are {messages!r:.80}, neither a text nor a list of messages")
    if kind := media(conversation(messages), sees=sees):
        takes = "takes texts and pictures" if sees else "takes text alone"
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


async def _take_turns(
    environment: Any, task: Task, talks: Sequence[Talk], limits: Limits, episode_task: EpisodeTask
) -> dict[str, float]:
    """The environment's loop; returns what it reports."""
    # In a worker a call has its deadline from when it is its turn.
    timeout_s = None if isinstance(environment, WorkerEnvironment) else limits.turn_timeout_s
    _at_work(talks, 0, "is in reset")
    begun = await _within(lambda: environment.reset(task), timeout_s, "in reset", episode_task)
    seen = Observation(messages=begun) if isinstance(begun, str) else begun
    if not isinstance(seen, Observation):
        raise EnvironmentFailed("in reset", why=f"it returned {begun!r:.80}, which is no Observation and no text")
    sees = talks[0].ledger.sight is not None
    _check(seen, "in reset", sees=sees)
    histories: list[list[Message]] = [[] for _ in talks]
    seat = _seat(seen.seat, 0, talks, "in reset")
    histories[seat], tools, state = conversation(seen.messages), seen.tools, seen.state
    info: dict[str, float] = {}
    while True:
        talk = _at_work(talks, seat, "begins its turn")
        try:
            reply = await talk.say(histories[seat], tools, state=state, previous=talk.last)
        except EpisodeOver:
            _cut_all(talks, GAME)
            return info
        except RouterEnded:
            raise
        except Refused as error:
            raise EnvironmentFailed(f"before reply {talk.turns}", why=str(error)) from error
        where = f"in step {sum(one.turns for one in talks)}"
        talk.doing = f"is {where}"
        step = await _within(lambda: environment.step(reply), timeout_s, where, episode_task)  # noqa: B023
        if not isinstance(step, Step):
            raise EnvironmentFailed(where, why=f"it returned {step!r:.80}, which is no Step")
        _check(step, where, sees=sees)
        _give(step, seat, talks, where)
        info |= step.info
        if step.truncated:
            _cut_all(talks, ENVIRONMENT)
        if step.done or step.truncated:
            return info
        histories[seat] = [*histories[seat], reply.message]
        seat = _seat(step.seat, seat, talks, where)
        histories[seat], state = [*histories[seat], *conversation(step.messages)], step.state


def _at_work(talks: Sequence[Talk], seat: int, doing: str) -> Talk:
    """It is this seat's turn, and nobody else's."""
    for talk in talks:
        talk.doing = OTHERS_TURN
    talks[seat].doing = doing
    return talks[seat]


def _cut_all(talks: Sequence[Talk], why: str) -> None:
    """The game did not come to its end, for none of its seats. One that has used up its turns or tokens says that."""
    for talk in talks:
        talk.over = talk.over or why


def _seat(named: int | None, now: int, talks: Sequence[Talk], where: str) -> int:
    """Whose turn it is. Raises: Broken, if there is no such seat."""
    seat = now if named is None else named
    if not isinstance(seat, int) or not 0 <= seat < len(talks):
        raise EnvironmentFailed(
            where, why=f"it names seat {seat!r:.40}, and the policy has {len(talks)}, numbered from 0"
        )
    return seat


def _give(step: Step, seat: int, talks: Sequence[Talk], where: str) -> None:
    """Reward the one who replied, and others as the step says; who has not replied yet has nothing to be rewarded."""
    try:
        talks[seat].reward(0.0 if step.reward is None else step.reward)
        for other, value in dict(step.rewards).items():
            talk = talks[_seat(other, seat, talks, where)]
            if talk.last:
                talk.reward(value)
    except (TypeError, ValueError) as error:
        raise EnvironmentFailed(where, why=str(error)) from error


async def _play_function(function: Any, task: Task, talk: Talk, episode_task: EpisodeTask) -> dict[str, float]:
    talk.doing = "plays"
    try:
        with episode_task.calling("in play"):
            last = await function(task, talk)
        if last is not None:
            talk.reward(last, next(reversed(talk.ledger.replies), ""))
    except (EnvironmentStuck, EnvironmentFailed, EpisodeLost):
        # It is in a worker.
        if talk.trouble is None:
            raise
    except Exception as error:
        if talk.trouble is None and not (talk.over and only_over(error)):
            raise EnvironmentFailed("in play", why=f"{type(error).__name__}: {error} at {user_line(error)}") from error
    if talk.trouble is not None:
        # Also where the function went on without the reply: its environment is not to blame, nor to be believed.
        raise talk.trouble
    return {}


async def _within(call: Callable[[], Any], seconds: float | None, where: str, episode_task: EpisodeTask) -> Any:
    """A call of an environment, within a deadline. One that swallows its cancellation is detected by `episode_task`.

    Raises:
        Stuck, Broken, and what a worker raises.
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
        # Also if it has returned since: it may have been cancelled in the middle of what it did.
        raise EnvironmentStuck(where, why=f"it did not return within {seconds:g} s")
    return found


async def _close(environment: Any, episode_task: EpisodeTask) -> None:
    """Let the environment go; what it says to that changes nothing."""
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
