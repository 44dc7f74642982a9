"""Play episodes whose environment is a program: open a session of the gateway, run the program, parse its result."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from relax_rt.cluster.nodes.links import Links
from relax_rt.config.loader import role_settings
from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.agentic.episode import EpisodeLimits, PlayedEpisode
from relax_rt.roles.agentic.interface import (
    EnvironmentFailed,
    EnvironmentStuck,
    EpisodeLost,
    GenerationFailed,
    LimitExceeded,
    Task,
    checked_reward,
)
from relax_rt.roles.agentic.program import Program, ProgramResult, exceeded_limit, parse_result
from relax_rt.roles.agentic.program_host import ProgramExit, ProgramHost, ProgramNotStarted
from relax_rt.roles.agentic.settings import EnvSettings
from relax_rt.roles.gateway.api import Access, ClosedSession, GivenAnswer, OpenSession, SessionClient, SessionLimits
from relax_rt.roles.gateway.settings import GatewaySettings
from relax_rt.roles.rollout.engines.settings import SamplingTable
from relax_rt.transport.rpc.errors import Refused, RelaxError, StaleEpoch

TAIL_LINES, TAIL_CHARS = 5, 600
"""Limits on the standard error that an error of a failed program quotes."""
GATEWAY = "gateway"
LOCAL = ("127.0.0.1", "localhost")
RETRY_PAUSES_S = (0.5, 1.0, 2.0, 4.0, *[8.0] * 7)
"""Pauses before an episode is retried because there was no room for its program or its session."""


class GatewayUnreachable(RelaxError):
    """The gateway can never be reached from the node where the programs run."""


@dataclass
class ProgramPlayer:
    """Plays the episodes of a slot.

    Attributes:
        max_tokens: of an episode.
        has_rewards: there are reward functions, so the program need not print a reward.
        on_tokens: called with the number of trained tokens of each episode.
        node: where the programs run; empty in a run of one node.
        activity: what each episode is doing, in words.
    """

    program: Program
    host: ProgramHost
    gateway: SessionClient
    limits: EpisodeLimits
    max_tokens: int
    has_rewards: bool
    on_tokens: Callable[[int], None]
    node: str = ""
    activity: dict[str, str] = field(default_factory=dict)

    async def play(
        self, name: str, task: Task, seed: int, *, temperature: float, fresh: bool = False, routing: bool = False
    ) -> PlayedEpisode:
        """Play one episode; see `Player.play`. Its time starts once there is room for its program on this machine.

        Args:
            routing: record routing rows with its replies.

        Raises:
            EnvironmentStuck, EnvironmentFailed, EpisodeLost, GenerationFailed: see `episode.play_game`.
            GatewayUnreachable: programs of this node cannot reach the gateway.
        """
        limits = SessionLimits(
            tokens=self.max_tokens,
            new_tokens=self.limits.max_new_tokens,
            calls=self.limits.max_turns,
            group=name.partition(".")[0],
            seed=seed,
            temperature=temperature,
            weights="newest" if fresh else "episode",
            routing=routing,
        )
        self.activity[name] = f"waits for a free process ({self.host.capacity} programs at a time)"
        why = ""
        try:
            async with self.host.reserve():
                for wait_s in (0.0, *RETRY_PAUSES_S):
                    if wait_s:
                        self.activity[name] = f"waits for room ({why})"
                        await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
                    try:
                        return await self._attempt(name, task, limits)
                    except ProgramNotStarted as error:
                        why = error.why or error.what
            raise EpisodeLost("the program", why=f"it could not be started within {sum(RETRY_PAUSES_S):g} s: {why}")
        except (EnvironmentStuck, EnvironmentFailed, EpisodeLost, GenerationFailed, GatewayUnreachable):
            raise
        except RelaxError as error:
            raise EpisodeLost(f"the episode {self.activity[name]}", why=str(error)) from error
        finally:
            del self.activity[name]

    async def _attempt(self, name: str, task: Task, limits: SessionLimits) -> PlayedEpisode:
        async with contextlib.AsyncExitStack() as stack:
            self.activity[name] = f"waits for {self.gateway.slot}"
            session = self.gateway.session(name.replace(" ", "-"), limits)
            try:
                lent = await stack.enter_async_context(session)
            except Refused as error:
                if isinstance(error, StaleEpoch):
                    raise
                # The gateway is full, or still holds an earlier session of this name.
                raise ProgramNotStarted("a session", why=str(error)) from error
            base_url = gateway_url(lent.access, self.node)
            self.activity[name] = "runs its program"
            ended = await self._run(task, lent, base_url)
            closed = await lent.close()
        return self._played(ended, closed)

    async def _run(self, task: Task, lent: OpenSession, base_url: str) -> ProgramExit:
        """Run the program to its end, within the episode's time and the session's lifetime."""
        limit_s = self.limits.episode_timeout_s
        env = program_environment(self.program, base_url, lent.access.api_key)
        run = asyncio.ensure_future(self.host.run(self.program.argv_for(task), env, self.program.stdin_for(task)))
        either: list[asyncio.Future[Any]] = [run, lent.gone]
        try:
            await asyncio.wait(either, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if run.done():
                return run.result()
            if lent.gone.done():
                raise EpisodeLost("the program's session", why=str(lent.gone.exception()))
            closed = await lent.close()
            error = EpisodeLost if closed.interrupted or closed.error else EnvironmentStuck
            at = "waits for tokens" if closed.interrupted else "is at work"
            raise error(
                "the program", why=f"not over within {limit_s:g} s; it {at} after {len(closed.answers)} answers"
            )
        finally:
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)

    def _played(self, ended: ProgramExit, closed: ClosedSession) -> PlayedEpisode:
        if over := exceeded_limit(ended.over, ended.code, stderr_tail(ended), self.program.limits):
            raise LimitExceeded("the program", why=over if ended.over else f"{over}; it ended with {exit_text(ended)}")
        if closed.error:
            raise (GenerationFailed if closed.permanent else EpisodeLost)(
                "the program", why=f"its last call had no answer: {closed.error}"
            )
        if ended.code and not closed.exhausted:
            raise EnvironmentFailed("the program", why=f"it ended with {exit_text(ended)}")
        if not closed.episode.branches:
            raise EnvironmentFailed("the program", why="it ended before the policy had replied")
        # With reward functions, the output is not parsed: it may quote the policy word for word, which must not be able
        # to reward itself.
        result = None
        if not self.has_rewards:
            try:
                result = parse_result(ended.stdout)
            except ValueError as error:
                raise EnvironmentFailed("the program's result", why=str(error)) from None
            if result is None and not closed.exhausted:
                why = f'it printed no line of JSON with "reward"; the end of its output: {ended.stdout[-200:]!r}'
                raise EnvironmentFailed("the program", why=f"{why}; roles.env.rewards is empty, too")
        result = result or ProgramResult()
        self.on_tokens(sum(sum(branch.loss_mask) for branch in closed.episode.branches))
        try:
            rewards = rewards_of(result, closed.answers)
        except ValueError as error:
            raise EnvironmentFailed("the program", why=str(error)) from error
        return PlayedEpisode(
            episode=closed.episode,
            rewards=rewards,
            states={},
            truncated=closed.exhausted,
            turns=len(closed.answers),
            cut=sum(said.finish_reason == "length" for said in closed.answers),
            info=dict(result.info),
            output=ended.stdout,
            left=closed.left,
        )


@contextlib.asynccontextmanager
async def open_programs(
    ctx: RoleContext,
    program: Program | None,
    on_tokens: Callable[[int], None],
    on_failure: Callable[[BaseException], None],
) -> AsyncIterator[ProgramPlayer | None]:
    """Open the host of a slot's programs and their gateway; slots use several gateways in turn. None without a program.

    Args:
        on_tokens: called with the tokens of each episode.
        on_failure: called with why the slot must end: a newer epoch has it, or no program can be started any more.
    """
    if program is None:
        yield None
        return
    config, settings = ctx.config, ctx.settings
    assert isinstance(settings, EnvSettings)
    count = role_settings(config, GATEWAY, GatewaySettings).count
    slot = f"{GATEWAY}/{int(ctx.who.slot.rpartition('/')[2]) % count}"
    limits = EpisodeLimits(
        max_turns=settings.max_turns,
        max_new_tokens=config.table(SamplingTable).max_new_tokens,
        turn_timeout_s=settings.turn_timeout_s,
        episode_timeout_s=settings.episode_timeout_s,
    )
    host = ProgramHost(
        Path(program.cwd), program.preload, program.limits, files=settings.open_files or 0, on_event=ctx.event
    )
    if host.capacity < settings.episodes_in_flight:
        hint = "raise the hard limit of open files (ulimit -Hn), or lower roles.env.episodes_in_flight"
        why = f"open files of the slot; {settings.episodes_in_flight} are asked for"
        ctx.event("programs_bounded", places=host.capacity, why=why, hint=hint)
        ctx.log.warning("fewer programs at a time than asked for", places=host.capacity, why=why, hint=hint)
    links = Links.from_environment()

    def report_failure(done: asyncio.Future[None]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            on_failure(error)

    async with host, SessionClient(ctx, slot) as gateway:
        for watched in (gateway.fenced, host.failed):
            watched.add_done_callback(report_failure)
        has_rewards = bool(settings.rewards)
        node = links.node if links else ""
        yield ProgramPlayer(program, host, gateway, limits, settings.max_tokens, has_rewards, on_tokens, node)


def rewards_of(result: ProgramResult, said: Sequence[GivenAnswer]) -> dict[str, float]:
    """Return the reward of each answer, by its id in the episode, from a program's result.

    Args:
        said: all answers that the program got, in order.

    Raises:
        ValueError: it has rewards for others than these, or one does not fit into 32 bits.
    """
    given = result.rewards
    rewards = {one.id: 0.0 for one in said}
    if isinstance(given, dict):
        for response, values in given.items():
            numbers = values if isinstance(values, tuple) else (values,)
            choices = [one.id for one in said if one.response == response]
            if len(numbers) != len(choices):
                why = f"it gave {len(numbers)} rewards to response {response!r:.80}, which has {len(choices)} answers"
                raise ValueError(why)
            rewards |= zip(choices, numbers, strict=True)
    elif given:
        if len(given) != len(said):
            raise ValueError(f"it gave rewards to {len(given)} answers, and it had {len(said)}")
        rewards = dict(zip(rewards, given, strict=True))
    rewards[said[-1].id] += result.reward
    return {name: checked_reward(value) for name, value in rewards.items()}


def gateway_url(access: Access, node: str) -> str:
    """Return the gateway's base URL for programs of a node.

    Raises:
        GatewayUnreachable: it has none there.
    """
    if access.node == node:
        return access.base_url
    if access.remote_url:
        return access.remote_url
    raise GatewayUnreachable(
        f"{access.gateway} from node {node!r}",
        why=f"it is on node {access.node!r} and listens there for that machine alone ({access.base_url})",
        hint='set roles.gateway.host = "node", or node of roles.env and roles.gateway to the same one',
    )


def program_environment(program: Program, base_url: str, api_key: str) -> dict[str, str]:
    """Return a program's environment variables: those of this process, the gateway's address, and the user's own.

    The gateway is never reached through a proxy.
    """
    found = dict(os.environ)
    here = ",".join(dict.fromkeys((*LOCAL, urlsplit(base_url).hostname or "")))
    for name in ("NO_PROXY", "no_proxy"):
        found[name] = f"{found[name]},{here}" if found.get(name) else here
    found |= {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": api_key,
    }
    return {**found, **program.env}


def stderr_tail(ended: ProgramExit) -> str:
    """Return the last lines of standard error."""
    lines = [line for line in ended.stderr.splitlines() if line.strip()][-TAIL_LINES:]
    return " / ".join(lines)[-TAIL_CHARS:]


def exit_text(ended: ProgramExit) -> str:
    """Describe an exit code, with the last lines of standard error."""
    code = f"signal {-ended.code}" if ended.code < 0 else f"exit code {ended.code}"
    return f"{code}: {said}" if (said := stderr_tail(ended)) else code
