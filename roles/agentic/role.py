"""The env role: takes groups from the queue and plays their episodes with the policy, through the rollouts' engines."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from relax_rt.config.schema import RoleSettings
from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.agentic.counters import Tally
from relax_rt.roles.agentic.settings import KIND, EnvSettings
from relax_rt.roles.agentic.stall_detection import LOSSES, Fruitless, Standstill, ending
from relax_rt.roles.base.progress import without_retired
from relax_rt.roles.base.role import RLRole
from relax_rt.roles.data.settings import DataTable
from relax_rt.roles.rollout.engines.settings import SamplingTable
from relax_rt.roles.training.algorithms.settings import AlgorithmTable
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.queue.ledger.messages import ABOUT, Ticket
from relax_rt.transport.rpc.errors import RelaxError
from relax_rt.transport.rpc.interface import idempotent

if TYPE_CHECKING:
    from relax_rt.roles.agentic.episode import Played
    from relax_rt.roles.agentic.evaluation import HeldOut
    from relax_rt.roles.agentic.loading import Factory
    from relax_rt.roles.agentic.player import Player
    from relax_rt.roles.agentic.program_episodes import Programs
    from relax_rt.roles.agentic.replay_cache import Store
    from relax_rt.roles.agentic.tasks import Tasks
    from relax_rt.roles.agentic.tokens import ChatTemplate
    from relax_rt.roles.agentic.workers import EnvironmentPool
    from relax_rt.roles.base.sample import Sample
    from relax_rt.roles.models.tokenizer import ChatTokenizer
    from relax_rt.roles.rewards.compose import Rewards
    from relax_rt.roles.rollout.engines.routing import RoutingShape
    from relax_rt.roles.rollout.router import Router

EVALUATES = f"{KIND}/0"
"""The slot that plays the held-out episodes."""
ADMIT_WAIT_S = 0.25
ASK_S = 0.5
METRICS_EVERY_S = 2.0
LOAD_ALLOWANCE_S = 120.0
LAST_WORD_S = 4.0
LEAST_STRAYS = 8
"""A slot bears a quarter of episodes_in_flight as coroutines that go on although they were cancelled, or so many."""


class EnvApi(Protocol):
    """What the slots of the role ask each other."""

    @idempotent
    async def may_begin(self) -> bool:
        """Whether the first weights are evaluated, so that training may begin."""


@dataclass(eq=False)
class Group:
    """A ticket whose members are played."""

    ticket: Ticket
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    left: int = 0
    failed: str = ""
    lost: str = ""
    late: bool = True
    """Whether its episodes failed because of a time limit, and for no other reason."""


class NotLeft(RelaxError):
    """Episodes do not end although they were told to: the role ends instead."""


def games(members: Sequence[int], seats: int) -> list[list[int]]:
    """Members that play one game together: those of as many as there are seats, from the group's first on. Pure."""
    return [list(found) for _, found in itertools.groupby(members, key=lambda member: member // seats)]


class EnvRole(RLRole[EnvSettings]):
    """One member of a group is one episode, and one sample. When the role dies its tickets lapse, and the episodes are
    played again by whoever gets the groups; what was put stays.

    The first slot plays the held-out episodes as well; with the trainer it is what the run waits for.
    """

    kind: ClassVar[str] = KIND
    tier: ClassVar[int] = 40
    restart: ClassVar[str] = "transient"
    significant: ClassVar[bool] = True
    preload: ClassVar[tuple[str, ...]] = (
        "transformers",
        "relax_rt.roles.models.tokenizer",
        "relax_rt.roles.rollout.router",
        "relax_rt.roles.training.publication.follower",
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
        self.groups: dict[int, Group] = {}
        self._room, self._news = asyncio.Event(), asyncio.Event()
        self._broken: asyncio.Future[None]
        self._standstill = Standstill(self.settings.environment, self.settings.episodes_in_flight)
        self._worked = self._begun = False
        self._tally = Tally()
        self.tokenizer: ChatTokenizer
        self.chat: ChatTemplate
        self.factory: Factory
        self.tasks: Tasks
        self.pool: EnvironmentPool | None = None
        self.router: Router
        self.player: Player
        self.held_out: HeldOut | None = None
        self.routing: RoutingShape | None = None
        self.store: Store | None = None
        self.rewards: Rewards | None = None

    # --- beginning and end

    async def setup(self) -> None:
        self.ctx.progress.extend(LOAD_ALLOWANCE_S, "loading tokenizer and environment")
        await asyncio.to_thread(self._load)
        await self._open_pool()
        await self._start_rewards()
        self.ctx.serve(EnvApi, self)
        await self.open_queue(length_field="tokens", on_lost=self._lost)
        await self.queue.warm()

    def _load(self) -> None:
        from relax_rt.roles.agentic.chat_format import chat_format_of
        from relax_rt.roles.agentic.loading import load_factory
        from relax_rt.roles.agentic.replay_cache import Store
        from relax_rt.roles.agentic.tasks import load_tasks
        from relax_rt.roles.agentic.tokens.chat_format import load_chat_template
        from relax_rt.roles.base.locations import model_folder
        from relax_rt.roles.models.tokenizer import load_tokenizer
        from relax_rt.roles.rollout.engines.routing import sparse_layers
        from relax_rt.roles.rollout.engines.settings import RolloutSettings

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
            self.store = Store(self.ctx.run_dir, self.factory.seats, lasts_s, self._too_old)

    async def _open_pool(self) -> None:
        from relax_rt.roles.agentic.workers import open_pool

        self.pool = open_pool(self.settings, self.factory, self.config.config_dir)
        if self.pool is not None:
            await self.resources.enter_async_context(self.pool)

    async def _start_rewards(self) -> None:
        from relax_rt.roles.agentic.rewards import KEY, PLACE, reward_table
        from relax_rt.roles.rewards.compose import Rewards
        from relax_rt.roles.rewards.dry_run import task_of

        if (table := reward_table(self.config)) is None:
            return

        def lost(why: str) -> None:
            self.ctx.event("reward_worker_lost", reason=why[:500])

        task = task_of(self.table(DataTable))
        self.rewards = Rewards(table, self.config_dir, task, lost, path=PLACE, key=KEY)
        self.resources.push_async_callback(self.rewards.close)
        await self.rewards.start()
        if (sandbox := self.rewards.sandbox) is not None:
            self.ctx.event("sandbox", level=sandbox.level, backend=sandbox.backend, what=str(sandbox))

    async def run(self) -> None:
        from relax_rt.roles.agentic.program_role import open_programs
        from relax_rt.roles.agentic.user_tasks import LoopWatch
        from relax_rt.roles.rollout.router import Router

        self._broken = asyncio.get_running_loop().create_future()
        programs = open_programs(self.ctx, self.factory.program, self._advance, self._break)
        async with Router(self.ctx) as self.router, programs as playing:
            self._make_player(playing)
            await self.ctx.ready()
            work = asyncio.create_task(self._work())
            jobs = [asyncio.create_task(job) for job in (self._follow(), self._report())]
            stop = asyncio.create_task(self.ctx.stopping.wait())
            losses = 1
            try:
                waited: list[asyncio.Future[Any]] = [work, stop, self._broken, *jobs]
                with LoopWatch(asyncio.get_running_loop(), self._blocked, self._unblocked):
                    finished, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                for task in finished:
                    task.result()
                losses = 0
            except Fruitless as error:
                raise ending(self.ctx, error) from error
            finally:
                # What the role ends with by itself may be because of one of them.
                await self._leave_groups("the env role ends", losses, (work, stop, *jobs))
                self._measure()

    def _break(self, error: BaseException) -> None:
        """End the role."""
        if not self._broken.done():
            self._broken.set_exception(error)

    def _make_player(self, programs: Programs | None) -> None:
        from relax_rt.roles.agentic.evaluation import HeldOut
        from relax_rt.roles.agentic.player import Player
        from relax_rt.roles.agentic.user_tasks import AbandonedTasks

        most = max(LEAST_STRAYS, self.settings.episodes_in_flight // 4)
        self.player = Player(
            factory=self.factory,
            pool=self.pool,
            chat=self.chat,
            generate=self.router.generate,
            settings=self.settings,
            sampling=self.table(SamplingTable),
            stop_ids=self.tokenizer.stop_ids,
            lag=self._lag,
            told=self._advance,
            routing=self.routing is not None,
            rewards=None if self.rewards is None else self.rewards.score_one,
            programs=programs,
            abandoned=AbandonedTasks(most, self._abandoned, self._break),
        )
        if self.ctx.who.slot == EVALUATES:
            places = self.settings.episodes_in_flight
            self.held_out = HeldOut(self.ctx, self.config, self.tasks, self.player, self._seed, places)

    def _abandoned(self, name: str, where: str, line: str) -> None:
        """A coroutine of the environment goes on although it was cancelled."""
        self.ctx.event("environment_abandoned", episode=name, call=where, line=line, at_once=len(self.player.abandoned))
        self.ctx.log.warning("user code swallows its cancellation", episode=name, call=where, line=line)

    def _blocked(self, task: asyncio.Task[Any] | None, line: str) -> None:
        """The loop does not answer; called in another thread. A hang's diagnosis ends with what is waited for."""
        what = "no task" if task is None else task.get_name()
        self.ctx.event("loop_blocked", what=what, line=line)
        self.ctx.log.warning("the event loop is blocked: nothing else is played meanwhile", what=what, line=line)
        self.ctx.progress.waiting(f"{what} blocks the event loop at {line}")

    def _unblocked(self, seconds: float) -> None:
        self.ctx.event("loop_unblocked", seconds=seconds)
        self.ctx.progress.waiting(f"what there is to play: the event loop was blocked for {seconds:g} s")

    async def _leave_groups(self, why: str, losses: int = 0, also: Sequence[asyncio.Task[Any]] = ()) -> int:
        """Whoever asks next gets what is not played to its end.

        Args:
            also: tasks that end with the groups.

        Returns:
            Tasks that did not end.
        """
        from relax_rt.roles.agentic.user_tasks import cancel_all

        groups, self.groups = list(self.groups.values()), {}
        left = await cancel_all([*also, *(task for group in groups for task in group.tasks)])
        # The queue may be gone as well: then the tickets lapse.
        with suppress(RelaxError, TimeoutError):
            async with asyncio.timeout(LAST_WORD_S):
                if held := [g.ticket.group for g in groups if g.ticket.group in self.queue.groups]:
                    await self.queue.release_groups(held, why, losses=losses)
        return len(left)

    # --- what comes when

    async def may_begin(self) -> bool:
        """See EnvApi."""
        return self._begun

    async def _follow(self) -> None:
        from relax_rt.roles.training.publication.follower import committed_versions

        async for record in committed_versions(self.ctx):
            if self.held_out is not None:
                await self.held_out.arrived(record)
            self.record = record
            self._news.set()
            self._room.set()
        await self.ctx.stopping.wait()

    async def _work(self) -> None:
        """Evaluate what is due, else play for the trainer, until the last weights are evaluated."""

        self.ctx.progress.waiting("the first committed weights")
        while True:
            await self._news.wait()
            self._news.clear()
            record = self.record
            last = record.step >= self.table(AlgorithmTable).steps
            if last and (left := await self._leave_groups("the last step is done")):
                raise NotLeft(f"{left} episodes after the last step", why=f"they are {self.player.doing()}")
            if self.held_out is not None and (when := self.held_out.due(record)):
                await self.held_out.evaluate(record, when)
            elif not self._begun:
                await self._wait_for_the_first_slot(record)
            self._begun = True
            if not last:
                await self._admit_until_news()
            elif await self.is_final(record):
                return

    async def _wait_for_the_first_slot(self, record: VersionRecord) -> None:
        """The weights before the first step are evaluated before any step is taken."""
        first = self.ctx.actor(EVALUATES, EnvApi, timeout_s=10 * ASK_S)
        while record.step == 0 and self.ctx.who.slot != EVALUATES:
            self.ctx.progress.waiting(f"{EVALUATES} evaluates the first weights")
            with suppress(RelaxError):
                if await first.may_begin():
                    return
            await asyncio.sleep(ASK_S)

    async def _admit_until_news(self) -> None:
        """Keep as many episodes at work as may be, until newer weights are to be evaluated or are the last ones."""
        while not self._is_due():
            self._news.clear()
            if (room := self._free()) <= 0:
                self._room.clear()
                await self._room.wait()
                continue
            if not self.groups:
                self.ctx.progress.waiting("admission by the staleness bound")
            answer = await self.queue.admit(self.record.version, room, wait_s=ADMIT_WAIT_S)
            if not answer.tickets and not self.groups and answer.waiting_on:
                self.ctx.progress.waiting(answer.waiting_on)
            for ticket in await without_retired(self.queue, answer.tickets, self._item):
                if ticket.group in self.queue.groups:
                    self._begin(ticket)
        self._news.set()

    def _item(self, ticket: Ticket) -> str:
        return self.tasks.train(ticket.prompt, ticket.item).item

    def _is_due(self) -> bool:
        last = self.record.step >= self.table(AlgorithmTable).steps
        return last or (self.held_out is not None and bool(self.held_out.due(self.record)))

    def _free(self) -> int:
        """Groups that may be begun, counted by their episodes; one is always at work."""
        size = self.table(AlgorithmTable).group_size
        room = self.settings.episodes_in_flight - sum(group.left for group in self.groups.values())
        return max(room // size, 0 if self.groups else 1)

    # --- groups

    def _begin(self, ticket: Ticket) -> None:
        group = self.groups[ticket.group] = Group(ticket)
        members = ticket.wanted()
        group.left = len(members)
        for game in games(members, self.factory.seats):
            task = asyncio.create_task(self._game(group, game), name=f"group {ticket.group}")
            task.add_done_callback(self._look_at)
            group.tasks.append(task)

    def _look_at(self, task: asyncio.Task[None]) -> None:
        """An error that is nobody's episode's ends the role."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._break(error)

    async def _game(self, group: Group, members: list[int]) -> None:
        """Play the members of one game and put them, or say why there are none."""
        from relax_rt.roles.agentic.samples import as_put, made_record

        for member, played in zip(members, await self._played(group, members), strict=False):
            sample = self._sample(group.ticket, member, played)
            self.ctx.metrics(made_record(self.ctx.who.slot, sample))
            await self.queue.put_samples([as_put(sample)])
            self._tally.add(played)
            self._advance(1)
            if not self._worked:
                self._worked = True
                self.ctx.event("first_work", what="an episode")
            if self.store is not None:
                self.store.forget(group.ticket.prompt, member)
        group.left -= len(members)
        self._room.set()
        if not group.left and self.groups.pop(group.ticket.group, None) is not None:
            await self._end(group)

    async def _end(self, group: Group) -> None:
        """All members are put, or what is missing is given back."""
        number = group.ticket.group
        if number not in self.queue.groups:
            return
        if group.failed:
            task = self.tasks.train(group.ticket.prompt, group.ticket.item)
            await self.queue.release_groups(
                [number],
                group.failed[:400],
                failed=True,
                late=group.late,
                item=task.item,
                about=task.question[:ABOUT],
            )
        elif group.lost:
            await self.queue.release_groups([number], group.lost[:400], losses=LOSSES)

    async def _played(self, group: Group, members: list[int]) -> list[Played]:
        """What became of the members of one game; nothing if it could not be played."""
        from relax_rt.roles.agentic.errors import (
            EnvironmentFailed,
            EnvironmentStuck,
            EpisodeLost,
            GenerationFailed,
            LimitExceeded,
        )
        from relax_rt.roles.agentic.replay_cache import forget

        ticket, seats = group.ticket, self.factory.seats
        member = members[0] // seats * seats
        task, stuck_before = self.tasks.train(ticket.prompt, ticket.item), False
        for loss in range(LOSSES):
            name = f"{ticket.group}.{member}" + (f"+{loss}" if loss else "")
            seed = self._seed(ticket.prompt, member, ticket.attempt + (loss << 32))
            kept = self.store.of(ticket.prompt, member) if self.store is not None else []
            if not loss and ticket.losses > LOSSES:
                # Those who had these replies were lost: they may be why.
                forget(kept)
            try:
                found = await self.player.play_seats(name, task, seed, kept=kept)
                for played in found:
                    self._check(played)
            except EpisodeLost as error:
                self._tally.lost += 1
                self.ctx.event("episode_lost", episode=name, item=task.item, why=str(error))
                group.lost = str(error)
                self._standstill.lost(ticket.prompt, f"{name} was lost: {error}")
                continue
            except GenerationFailed as error:
                # Not again with the same seed, and not the environment's fault either.
                self._tally.failed += 1
                group.failed, group.late = str(error), False
                self.ctx.event("episode_not_generated", episode=name, item=task.item, why=str(error))
                forget(kept)
                self._standstill.lost(ticket.prompt, f"{name} was not made: {error}")
                return []
            except (EnvironmentStuck, EnvironmentFailed) as error:
                stuck = isinstance(error, EnvironmentStuck)
                self._tally.stuck += stuck
                self._tally.over_limit += isinstance(error, LimitExceeded)
                if stuck and kept and not stuck_before:
                    # Its replies are there: where it stood still once it may not do so again.
                    stuck_before, group.lost = True, str(error)
                    self.ctx.event("environment_stuck", episode=name, item=task.item, why=str(error), again=True)
                    self._standstill.lost(ticket.prompt, f"{name} was stuck: {error}")
                    continue
                forget(kept)
                kind = "environment_stuck" if stuck else "environment_failed"
                self._fail(group, name, task.item, str(error), kind, late=stuck or isinstance(error, LimitExceeded))
                return []
            finally:
                if used := sum(one.used for one in kept):
                    self.ctx.event("episode_resumed", episode=name, item=task.item, replies=used)
            self._standstill.played()
            return [found[member % seats] for member in members]
        return []

    def _check(self, played: Played) -> None:
        """Raises: Broken, if the trainer cannot train it."""
        from relax_rt.roles.agentic.errors import EnvironmentFailed
        from relax_rt.roles.training.backend.settings import TrainerSettings

        count = len(played.episode.branches)
        if count > 1 and self.config.role("trainer", TrainerSettings).backend == "megatron":
            hint = "have the environment go on with one conversation, or train with the torch backend"
            why = f"it has {count} branches, and gangs of Megatron-Core take one"
            raise EnvironmentFailed("the episode", why=why, hint=hint)

    def _fail(self, group: Group, name: str, item: str, why: str, kind: str, *, late: bool) -> None:
        """An episode failed; raises when that is the environment's way.

        Raises:
            Fruitless: too many failed one after the other.
        """
        self._tally.failed += 1
        group.failed, group.late = why, group.late and late
        self.ctx.event(kind, episode=name, item=item, why=why)
        self.ctx.log.warning("an episode failed", episode=name, item=item, why=why)
        self._standstill.failed(group.ticket.prompt, f"{name}: {why}")

    def _sample(self, ticket: Ticket, member: int, played: Played) -> Sample:
        sampling_table = self.table(SamplingTable)
        from relax_rt.roles.agentic.samples import make_sample

        sampling: dict[str, float | int | str] = {
            "temperature": sampling_table.temperature,
            "max_new_tokens": sampling_table.max_new_tokens,
            "seed": self._seed(ticket.prompt, member, ticket.attempt),
        }
        task = self.tasks.train(ticket.prompt, ticket.item)
        who = str(self.ctx.who)
        return make_sample(
            ticket,
            member,
            task,
            played,
            tokenizer=self.tokenizer,
            sampling=sampling,
            player=who,
            routing=self.routing,
            sees=self.chat.sight is not None,
        )

    def _lost(self, groups: list[int]) -> None:
        """The queue gave these groups to others or wants them no more: stop playing them."""
        for number in groups:
            if (group := self.groups.pop(number, None)) is not None:
                for task in group.tasks:
                    task.cancel()
        self.ctx.event("groups_lost", groups=groups)
        self._room.set()

    def _seed(self, prompt: int, member: int, attempt: int) -> int:
        from relax_rt.roles.data.order import sample_seed

        return sample_seed(self.config.run.seed, prompt, member, attempt)

    def _too_old(self, version: int) -> bool:
        # What a new router has not heard of yet is not old; the queue looks once more when the episode is put.
        fleet = self.router.core.fleet
        known = fleet.committed.version >= self.record.version
        return known and bool(fleet.lag(version) > self.table(AlgorithmTable).max_staleness)

    def _lag(self, oldest: int) -> int:
        """A reply may come from weights as old as the episode's oldest token: it is no staler for it."""
        if not oldest:
            return 0
        lag = self.router.core.fleet.lag(oldest)
        return int(lag) if lag < float("inf") else 0

    # --- figures

    def _advance(self, count: int) -> None:
        self.ctx.progress.waiting("")
        self.ctx.progress.advance(count, f"version {self.record.version}, {self.player.playing} episodes")

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(METRICS_EVERY_S)
            self._measure()

    def _measure(self) -> None:
        """What is waited for, and a metrics record of the time since the last one.

        Episodes have deadlines of their own, so that the role need not be watched for them.
        """
        if self.player.playing:
            engines = ", ".join(self.router.waiting_on())
            doing = self.player.doing() + (f" ({engines})" if engines else "")
            parts = (doing, self._standstill.summary(), self.player.abandoned.summary())
            self.ctx.progress.waiting("; ".join(one for one in parts if one))
        tally = self._tally
        if tally.episodes or tally.failed or tally.lost:
            programs = self.player.programs
            workers = programs.host.lost if programs is not None else 0
            if self.pool is not None:
                workers = self.pool.pool.replaced
            about = {"slot": self.ctx.who.slot, "version": self.record.version, "playing": self.player.playing}
            counts = {"workers_killed": workers, "abandoned": self.player.abandoned.total}
            self.ctx.metrics({"kind": KIND, **about, **counts, **tally.record()})
            self._tally = Tally()
