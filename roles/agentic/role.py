"""The env role: takes groups from the queue and plays their episodes with the policy, through the rollouts' engines."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from relax_rt.config.schema import RoleSettings
from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.agentic.episode import PlayedEpisode
from relax_rt.roles.agentic.evaluation import EpisodeEvaluation
from relax_rt.roles.agentic.interface import (
    EnvironmentFailed,
    EnvironmentStuck,
    EpisodeLost,
    GenerationFailed,
    LimitExceeded,
    Task,
)
from relax_rt.roles.agentic.loading import EnvironmentFactory, load_factory
from relax_rt.roles.agentic.player import Player
from relax_rt.roles.agentic.program_episodes import open_programs
from relax_rt.roles.agentic.replay_cache import ReplayStore, clear_all
from relax_rt.roles.agentic.rewards import KEY, PLACE, reward_table
from relax_rt.roles.agentic.samples import make_sample, new_sample, produced_record
from relax_rt.roles.agentic.settings import EnvSettings, chat_format_of
from relax_rt.roles.agentic.stall_detection import MAX_LOSSES, EpisodesStalled, StallDetector, stall_error
from relax_rt.roles.agentic.tasks import Tasks, load_tasks
from relax_rt.roles.agentic.tokens.template import ChatTemplate, load_chat_template
from relax_rt.roles.agentic.user_tasks import AbandonedTasks, LoopWatch, cancel_all
from relax_rt.roles.agentic.workers import EnvironmentPool, open_pool
from relax_rt.roles.base.episodes import KIND
from relax_rt.roles.base.locations import model_folder
from relax_rt.roles.base.progress import without_retired
from relax_rt.roles.base.versions import committed_versions
from relax_rt.roles.data.order import sample_seed
from relax_rt.roles.data.settings import DataTable
from relax_rt.roles.models.tokenizer import ChatTokenizer, load_tokenizer
from relax_rt.roles.rewards.compose import Rewards
from relax_rt.roles.rewards.dry_run import task_of
from relax_rt.roles.rollout.engines.routing import RoutingShape, sparse_layers
from relax_rt.roles.rollout.engines.settings import RolloutSettings, SamplingTable
from relax_rt.roles.rollout.router.role import RouterRole
from relax_rt.roles.training.algorithms.settings import AlgorithmTable
from relax_rt.roles.training.backend.settings import TrainerSettings
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.queue.ledger.messages import ABOUT, Ticket
from relax_rt.transport.rpc.errors import RelaxError
from relax_rt.transport.rpc.interface import idempotent


@dataclass
class EpisodeCounters:
    """Counters of an env slot since its last metrics record."""

    since: float = field(default_factory=time.monotonic)
    episodes: int = 0
    failed: int = 0
    stuck: int = 0
    over_limit: int = 0
    left: int = 0
    lost: int = 0
    turns: int = 0
    truncated: int = 0
    truncated_by: dict[str, int] = field(default_factory=dict)
    cut: int = 0
    tokens: int = 0
    branches: int = 0
    drift: int = 0
    dropped_tokens: int = 0
    reward: float = 0.0
    info: dict[str, float] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)

    def add(self, played: PlayedEpisode) -> None:
        """Count an episode."""
        self.episodes += 1
        self.turns += played.turns
        if played.truncated:
            self.truncated += 1
            self.truncated_by[played.truncated] = self.truncated_by.get(played.truncated, 0) + 1
        self.cut += played.cut
        self.tokens += sum(len(branch.tokens) for branch in played.episode.branches)
        self.branches += len(played.episode.branches)
        self.drift += played.episode.counts.drift
        self.dropped_tokens += played.episode.counts.dropped_tokens
        self.left += played.left
        self.reward += played.reward
        for totals, values in ((self.info, played.info), (self.parts, played.parts)):
            for name, value in values.items():
                totals[name] = totals.get(name, 0.0) + float(value)

    def record(self) -> dict[str, object]:
        """Return counts, and means over episodes of turns, tokens, reward and info."""
        n = max(1, self.episodes)
        return {
            **{k: getattr(self, k) for k in ("episodes", "failed", "stuck", "over_limit", "lost")},
            **{k: getattr(self, k) for k in ("truncated", "cut", "left", "branches", "drift", "dropped_tokens")},
            **{k: getattr(self, k) / n for k in ("turns", "tokens", "reward")},
            "truncated_by": self.truncated_by,
            "info": {name: value / n for name, value in self.info.items()},
            "rewards": {name: value / n for name, value in self.parts.items()},
            "seconds": time.monotonic() - self.since,
        }


EVALUATION_SLOT = f"{KIND}/0"
"""The slot that plays the held-out episodes."""
ADMIT_WAIT_S = 0.25
ASK_S = 0.5
METRICS_EVERY_S = 2.0
LOAD_ALLOWANCE_S = 120.0
RELEASE_TIMEOUT_S = 4.0
MIN_ABANDONED = 8
"""A slot tolerates a quarter of episodes_in_flight, at least this many, as coroutines that ignore cancellation."""


class EnvApi(Protocol):
    """Calls between the slots of the role."""

    @idempotent
    async def initial_evaluation_done(self) -> bool:
        """Return whether the first weights are evaluated, so that training may begin."""


@dataclass(eq=False)
class EpisodeGroup:
    """A ticket whose members are being played."""

    ticket: Ticket
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    remaining: int = 0
    failed: str = ""
    lost: str = ""
    late: bool = True
    """Whether all of its failed episodes failed because of a time or memory limit."""


class EpisodesNotEnding(RelaxError):
    """Episodes do not end although they were cancelled: the role ends instead."""


def split_games(members: Sequence[int], seats: int) -> list[list[int]]:
    """Split the members of a group into those that play one game together, one for each seat. Pure."""
    return [list(found) for _, found in itertools.groupby(members, key=lambda member: member // seats)]


class EnvRole(RouterRole[EnvSettings]):
    """One member of a group is one episode, and one sample. When the role dies, its tickets lapse and other slots play
    the episodes again; samples that were put stay.

    The first slot plays the held-out episodes as well; the run ends when it and the trainer have finished.
    """

    kind: ClassVar[str] = KIND
    tier: ClassVar[int] = 40
    restart: ClassVar[str] = "transient"
    significant: ClassVar[bool] = True
    preload: ClassVar[tuple[str, ...]] = (
        "transformers",
        "relax_rt.roles.models.tokenizer",
        "relax_rt.roles.rollout.router",
        "relax_rt.roles.rollout.engines.weight_follower",
        "relax_rt.roles.agentic.player",
        "relax_rt.roles.agentic.evaluation",
        "relax_rt.roles.agentic.samples",
        "relax_rt.transport.queue.client",
    )
    Settings: ClassVar[type[RoleSettings]] = EnvSettings

    def __init__(self, ctx: RoleContext) -> None:
        super().__init__(ctx)
        self.record = VersionRecord(0, 0, 0)
        """The newest committed version."""
        self.groups: dict[int, EpisodeGroup] = {}
        self._capacity_changed, self._version_changed = asyncio.Event(), asyncio.Event()
        self._failure: asyncio.Future[None]
        self._stalls = StallDetector(self.settings.environment, self.settings.episodes_in_flight)
        self._has_worked = self._may_begin = False
        self._counters = EpisodeCounters()
        self.tokenizer: ChatTokenizer
        self.chat: ChatTemplate
        self.factory: EnvironmentFactory
        self.tasks: Tasks
        self.pool: EnvironmentPool | None = None
        self.player: Player
        self.evaluation: EpisodeEvaluation | None = None
        self.routing: RoutingShape | None = None
        self.store: ReplayStore | None = None
        self.rewards: Rewards | None = None

    # --- start and end

    async def setup(self) -> None:
        self.ctx.progress.extend(LOAD_ALLOWANCE_S, "loading tokenizer and environment")
        await asyncio.to_thread(self._load)
        self.pool = open_pool(self.settings, self.factory, self.config.config_dir)
        if self.pool is not None:
            await self.resources.enter_async_context(self.pool)
        if (table := reward_table(self.config)) is not None:

            def lost(why: str) -> None:
                self.ctx.event("reward_worker_lost", reason=why[:500])

            task = task_of(self.table(DataTable))
            self.rewards = Rewards(table, self.config_dir, task, lost, path=PLACE, key=KEY)
            self.resources.push_async_callback(self.rewards.close)
            await self.rewards.start()
            if (sandbox := self.rewards.sandbox) is not None:
                self.ctx.event("sandbox", level=sandbox.level, backend=sandbox.backend, what=str(sandbox))
        self.ctx.serve(EnvApi, self)
        await self.open_queue(length_field="tokens", on_lost=self._on_groups_lost)
        await self.queue.warm()

    def _load(self) -> None:
        model = model_folder(self.ctx)
        self.tokenizer = load_tokenizer(model)
        if self.config.role("rollout", RolloutSettings).routing:
            self.routing, _ = sparse_layers(model)
        chat_format = chat_format_of(self.config)
        self.chat = load_chat_template(self.config_dir, self.tokenizer, chat_format, self.ctx.log.warning)
        self.factory = load_factory(self.settings.environment, self.settings.options, self.config_dir)
        self.tasks = load_tasks(self.config, self.settings, self.tokenizer, self.ctx.run_dir)
        if self.settings.unfinished == "keep" and self.factory.program is None:
            lasts_s = 2 * self.settings.episode_timeout_s
            self.store = ReplayStore(self.ctx.run_dir, self.factory.seats, lasts_s, self._is_too_stale)

    async def run(self) -> None:
        self._failure = asyncio.get_running_loop().create_future()
        programs = open_programs(self.ctx, self.factory.program, self._advance, self._fail_role)
        await self.open_router()
        async with programs as playing:
            most = max(MIN_ABANDONED, self.settings.episodes_in_flight // 4)
            self.player = Player(
                factory=self.factory,
                pool=self.pool,
                chat=self.chat,
                generate=self.router.generate,
                settings=self.settings,
                sampling=self.table(SamplingTable),
                stop_ids=self.tokenizer.stop_ids,
                lag=self._lag,
                on_tokens=self._advance,
                routing=self.routing is not None,
                rewards=None if self.rewards is None else self.rewards.score_one,
                programs=playing,
                abandoned=AbandonedTasks(most, self._on_abandoned, self._fail_role),
            )
            if self.ctx.who.slot == EVALUATION_SLOT:
                places = self.settings.episodes_in_flight
                self.evaluation = EpisodeEvaluation(self.ctx, self.config, self.tasks, self.player, self._seed, places)
            await self.ctx.ready()
            work = asyncio.create_task(self._work())
            jobs = [asyncio.create_task(job) for job in (self._follow(), self._report())]
            stop = asyncio.create_task(self.ctx.stopping.wait())
            losses = 1
            try:
                waited: list[asyncio.Future[Any]] = [work, stop, self._failure, *jobs]
                with LoopWatch(asyncio.get_running_loop(), self._on_loop_blocked, self._on_loop_unblocked):
                    finished, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                for task in finished:
                    task.result()
                losses = 0
            except EpisodesStalled as error:
                raise stall_error(self.ctx, error) from error
            finally:
                # If the role fails, one of these episodes may be the cause: count a loss for each.
                await self._release_groups("the env role ends", losses, (work, stop, *jobs))
                self._record_metrics()

    def _fail_role(self, error: BaseException) -> None:
        """End the role."""
        if not self._failure.done():
            self._failure.set_exception(error)

    def _on_abandoned(self, name: str, where: str, line: str) -> None:
        """Report a coroutine of the environment that did not end when it was cancelled."""
        self.ctx.event("environment_abandoned", episode=name, call=where, line=line, at_once=len(self.player.abandoned))
        self.ctx.log.warning("user code swallows its cancellation", episode=name, call=where, line=line)

    def _on_loop_blocked(self, task: asyncio.Task[Any] | None, line: str) -> None:
        """Report a blocked event loop; called in another thread. The diagnosis of a hang shows what is waited for."""
        what = "no task" if task is None else task.get_name()
        self.ctx.event("loop_blocked", what=what, line=line)
        self.ctx.log.warning("the event loop is blocked: nothing else is played meanwhile", what=what, line=line)
        self.ctx.progress.waiting(f"{what} blocks the event loop at {line}")

    def _on_loop_unblocked(self, seconds: float) -> None:
        self.ctx.event("loop_unblocked", seconds=seconds)
        self.ctx.progress.waiting(f"what there is to play: the event loop was blocked for {seconds:g} s")

    async def _release_groups(self, why: str, losses: int = 0, also: Sequence[asyncio.Task[Any]] = ()) -> int:
        """Cancel all episodes and release their groups to other slots; return how many tasks did not end.

        Args:
            also: tasks that are cancelled with them.
        """

        groups, self.groups = list(self.groups.values()), {}
        remaining = await cancel_all([*also, *(task for group in groups for task in group.tasks)])
        # The queue may be gone as well: then the tickets lapse.
        with suppress(RelaxError, TimeoutError):
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                if held := [g.ticket.group for g in groups if g.ticket.group in self.queue.groups]:
                    await self.queue.release_groups(held, why, losses=losses)
        return len(remaining)

    # --- admission

    async def initial_evaluation_done(self) -> bool:
        """Return whether the first weights are evaluated; see EnvApi."""
        return self._may_begin

    async def _follow(self) -> None:
        async for record in committed_versions(self.ctx):
            if self.evaluation is not None:
                await self.evaluation.on_version(record)
            self.record = record
            self._version_changed.set()
            self._capacity_changed.set()
        await self.ctx.stopping.wait()

    async def _work(self) -> None:
        """Evaluate the weights that are due, else play for the trainer, until the last weights are evaluated."""

        self.ctx.progress.waiting("the first committed weights")
        while True:
            await self._version_changed.wait()
            self._version_changed.clear()
            record = self.record
            last = record.step >= self.table(AlgorithmTable).steps
            if last and (remaining := await self._release_groups("the last step is done")):
                raise EpisodesNotEnding(
                    f"{remaining} episodes after the last step", why=f"they are {self.player.activity()}"
                )
            if self.evaluation is not None and (when := self.evaluation.due(record)):
                await self.evaluation.evaluate(record, when)
            elif not self._may_begin and self.ctx.who.slot != EVALUATION_SLOT:
                # Wait until the first slot has evaluated the weights before the first step.
                first = self.ctx.actor(EVALUATION_SLOT, EnvApi, timeout_s=10 * ASK_S)
                while record.step == 0:
                    self.ctx.progress.waiting(f"{EVALUATION_SLOT} evaluates the first weights")
                    with suppress(RelaxError):
                        if await first.initial_evaluation_done():
                            break
                    await asyncio.sleep(ASK_S)
            self._may_begin = True
            if not last:
                await self._admit_until_due()
            elif await self.is_final(record):
                return

    async def _admit_until_due(self) -> None:
        """Play as many episodes as admitted, until newer weights must be evaluated or are the last ones."""
        table = self.table(AlgorithmTable)
        while self.record.step < table.steps and not (self.evaluation and self.evaluation.due(self.record)):
            self._version_changed.clear()
            free = self.settings.episodes_in_flight - sum(group.remaining for group in self.groups.values())
            # At least one group is always played.
            if (room := max(free // table.group_size, 0 if self.groups else 1)) <= 0:
                self._capacity_changed.clear()
                await self._capacity_changed.wait()
                continue
            if not self.groups:
                self.ctx.progress.waiting("admission by the staleness bound")
            answer = await self.queue.admit(self.record.version, room, wait_s=ADMIT_WAIT_S)
            if not answer.tickets and not self.groups and answer.waiting_on:
                self.ctx.progress.waiting(answer.waiting_on)
            for ticket in await without_retired(self.queue, answer.tickets, lambda one: self._task(one).item):
                if ticket.group in self.queue.groups:
                    group = self.groups[ticket.group] = EpisodeGroup(ticket)
                    members = ticket.wanted()
                    group.remaining = len(members)
                    for game in split_games(members, self.factory.seats):
                        task = asyncio.create_task(self._play_game(group, game), name=f"group {ticket.group}")
                        task.add_done_callback(self._on_task_done)
                        group.tasks.append(task)
        self._version_changed.set()

    def _task(self, ticket: Ticket) -> Task:
        return self.tasks.train(ticket.prompt, ticket.item)

    # --- groups

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """End the role if a game's task failed with an error that is not an episode's."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail_role(error)

    async def _play_game(self, group: EpisodeGroup, members: list[int]) -> None:
        """Play the members of one game and put their samples; finish the group if it was the last game."""
        ticket, sampling = group.ticket, self.table(SamplingTable)
        for member, played in zip(members, await self._play_members(group, members), strict=False):
            sample = make_sample(
                ticket,
                member,
                self._task(ticket),
                played,
                tokenizer=self.tokenizer,
                sampling={
                    "temperature": sampling.temperature,
                    "max_new_tokens": sampling.max_new_tokens,
                    "seed": self._seed(ticket.prompt, member, ticket.attempt),
                },
                player=str(self.ctx.who),
                routing=self.routing,
                has_vision=self.chat.image_processor is not None,
            )
            self.ctx.metrics(produced_record(self.ctx.who.slot, sample))
            await self.queue.put_samples([new_sample(sample)])
            self._counters.add(played)
            self._advance(1)
            if not self._has_worked:
                self._has_worked = True
                self.ctx.event("first_work", what="an episode")
            if self.store is not None:
                self.store.clear(ticket.prompt, member)
        group.remaining -= len(members)
        self._capacity_changed.set()
        if group.remaining or self.groups.pop(ticket.group, None) is None or ticket.group not in self.queue.groups:
            return
        # A group of which members are missing is released, with the reason.
        if group.failed:
            task, why = self._task(ticket), group.failed[:400]
            await self.queue.release_groups(
                [ticket.group], why, failed=True, late=group.late, item=task.item, about=task.question[:ABOUT]
            )
        elif group.lost:
            await self.queue.release_groups([ticket.group], group.lost[:400], losses=MAX_LOSSES)

    async def _play_members(self, group: EpisodeGroup, members: list[int]) -> list[PlayedEpisode]:
        """Play one game, again if it is lost; return the episodes of its members, or nothing if it failed.

        Raises:
            EpisodesStalled: too many failed one after the other.
        """
        ticket, seats = group.ticket, self.factory.seats
        member = members[0] // seats * seats
        task, stuck_before = self._task(ticket), False
        for loss in range(MAX_LOSSES):
            name = f"{ticket.group}.{member}" + (f"+{loss}" if loss else "")
            seed = self._seed(ticket.prompt, member, ticket.attempt + (loss << 32))
            replays = self.store.caches_of(ticket.prompt, member) if self.store is not None else []
            if not loss and ticket.losses > MAX_LOSSES:
                # Earlier attempts with these replies were lost: the replies may be the cause.
                clear_all(replays)
            try:
                found = await self.player.play_game(name, task, seed, replays=replays)
                for played in found:
                    # The trainer must be able to train it.
                    count = len(played.episode.branches)
                    if count > 1 and self.config.role("trainer", TrainerSettings).backend == "megatron":
                        hint = "have the environment go on with one conversation, or train with the torch backend"
                        why = f"it has {count} branches, and gangs of Megatron-Core take one"
                        raise EnvironmentFailed("the episode", why=why, hint=hint)
            except EpisodeLost as error:
                self._counters.lost += 1
                self.ctx.event("episode_lost", episode=name, item=task.item, why=str(error))
                group.lost = str(error)
                self._stalls.record_lost(ticket.prompt, f"{name} was lost: {error}")
                continue
            except GenerationFailed as error:
                # The same seed would fail again, and it is not the environment's fault either.
                self._counters.failed += 1
                group.failed, group.late = str(error), False
                self.ctx.event("episode_not_generated", episode=name, item=task.item, why=str(error))
                clear_all(replays)
                self._stalls.record_lost(ticket.prompt, f"{name} was not made: {error}")
                return []
            except (EnvironmentStuck, EnvironmentFailed) as error:
                stuck = isinstance(error, EnvironmentStuck)
                self._counters.stuck += stuck
                self._counters.over_limit += isinstance(error, LimitExceeded)
                if stuck and replays and not stuck_before:
                    # With its replies at hand, a second attempt is cheap, and may not get stuck.
                    stuck_before, group.lost = True, str(error)
                    self.ctx.event("environment_stuck", episode=name, item=task.item, why=str(error), again=True)
                    self._stalls.record_lost(ticket.prompt, f"{name} was stuck: {error}")
                    continue
                clear_all(replays)
                self._counters.failed += 1
                group.failed = why = str(error)
                group.late = group.late and (stuck or isinstance(error, LimitExceeded))
                kind = "environment_stuck" if stuck else "environment_failed"
                self.ctx.event(kind, episode=name, item=task.item, why=why)
                self.ctx.log.warning("an episode failed", episode=name, item=task.item, why=why)
                self._stalls.record_failed(ticket.prompt, f"{name}: {why}")
                return []
            finally:
                if replayed := sum(one.replayed for one in replays):
                    self.ctx.event("episode_resumed", episode=name, item=task.item, replies=replayed)
            self._stalls.record_finished()
            return [found[member % seats] for member in members]
        return []

    def _on_groups_lost(self, groups: list[int]) -> None:
        """Stop playing groups that the queue has given to others or dropped."""
        for number in groups:
            if (group := self.groups.pop(number, None)) is not None:
                for task in group.tasks:
                    task.cancel()
        self.ctx.event("groups_lost", groups=groups)
        self._capacity_changed.set()

    def _seed(self, prompt: int, member: int, attempt: int) -> int:
        return sample_seed(self.config.run.seed, prompt, member, attempt)

    def _is_too_stale(self, version: int) -> bool:
        # A new router may not know this version yet; the queue checks staleness again when the episode is put.
        fleet = self.router.core.fleet
        known = fleet.committed.version >= self.record.version
        return known and bool(fleet.lag(version) > self.table(AlgorithmTable).max_staleness)

    def _lag(self, oldest: int) -> int:
        """Return the lag that engines may have: weights no older than the episode's oldest token add no staleness."""
        if not oldest:
            return 0
        lag = self.router.core.fleet.lag(oldest)
        return int(lag) if lag < float("inf") else 0

    # --- metrics

    def _advance(self, count: int) -> None:
        self.ctx.progress.waiting("")
        self.ctx.progress.advance(count, f"version {self.record.version}, {self.player.playing} episodes")

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(METRICS_EVERY_S)
            self._record_metrics()

    def _record_metrics(self) -> None:
        """Report what is waited for, and record metrics since the last record.

        Episodes have deadlines of their own, so the hang detector need not watch the role for them.
        """
        if self.player.playing:
            engines = ", ".join(self.router.waiting_on())
            doing = self.player.activity() + (f" ({engines})" if engines else "")
            parts = (doing, self._stalls.summary(), self.player.abandoned.summary())
            self.ctx.progress.waiting("; ".join(one for one in parts if one))
        tally = self._counters
        if tally.episodes or tally.failed or tally.lost:
            programs = self.player.programs
            workers = programs.host.spawners_lost if programs is not None else 0
            if self.pool is not None:
                workers = self.pool.pool.replaced
            about = {"slot": self.ctx.who.slot, "version": self.record.version, "playing": self.player.playing}
            counts = {"workers_killed": workers, "abandoned": self.player.abandoned.total}
            self.ctx.metrics({"kind": KIND, **about, **counts, **tally.record()})
            self._counters = EpisodeCounters()
