"""Plays episodes whose environment is a program: opens a session, runs the program, reads what it says, and closes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from relax_rt.roles.agentic.episode import Limits, Played
from relax_rt.roles.agentic.errors import (
    EnvironmentFailed,
    EnvironmentStuck,
    EpisodeLost,
    GenerationFailed,
    LimitExceeded,
)
from relax_rt.roles.agentic.interface import Task, checked
from relax_rt.roles.agentic.program import Program, Result, passed_limit, result_of
from relax_rt.roles.agentic.program_host import Ended, ProgramHost
from relax_rt.roles.agentic.program_link import NotStarted
from relax_rt.roles.gateway.api import Access, Closed, OpenSession, Said, SessionClient, SessionLimits
from relax_rt.transport.rpc.errors import Refused, RelaxError, StaleEpoch

LAST_LINES, LAST_CHARS = 5, 600
"""Of what a program that failed wrote to its standard error: they are told."""
LOCAL = ("127.0.0.1", "localhost")
START_AGAIN_S = (0.5, 1.0, 2.0, 4.0, *[8.0] * 7)
"""PauseDetector before an episode is tried again for whose program, or session, there was no room."""


class NotReachable(RelaxError):
    """The gateway cannot be reached from the node where the programs run, and never will be."""


@dataclass
class Programs:
    """See the module.

    Attributes:
        max_tokens: of an episode.
        judged: there are reward functions, so that the program need not say how well it went.
        told: is called with the tokens of each episode.
    """

    program: Program
    host: ProgramHost
    gateway: SessionClient
    limits: Limits
    max_tokens: int
    judged: bool
    told: Callable[[int], None]
    node: str = ""
    """Where the programs run; empty in a run of one node."""
    doing: dict[str, str] = field(default_factory=dict)
    """What each episode is at, in words."""

    async def play(
        self, name: str, task: Task, seed: int, *, temperature: float, fresh: bool = False, routing: bool = False
    ) -> Played:
        """Play one episode; see `Player.play`. It waits for a place among the programs, and where the machine has no
        room for one more process, its time not running.

        Args:
            routing: its replies come with routing rows.

        Raises:
            Stuck, Broken, Lost, NotMade: see `episode.play_seats`.
            NotReachable: programs of this node cannot reach the gateway.
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
        self.doing[name] = f"waits for a place ({self.host.places} programs at a time)"
        try:
            async with self.host.place():
                return await self._started(name, task, limits)
        except (EnvironmentStuck, EnvironmentFailed, EpisodeLost, GenerationFailed, NotReachable):
            raise
        except RelaxError as error:
            raise EpisodeLost(f"the episode {self.doing[name]}", why=str(error)) from error
        finally:
            del self.doing[name]

    async def _started(self, name: str, task: Task, limits: SessionLimits) -> Played:
        """Play it; again, a number of times, while there is no room for it."""
        why = ""
        for wait_s in (0.0, *START_AGAIN_S):
            if wait_s:
                self.doing[name] = f"waits for room ({why})"
                await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
            try:
                return await self._once(name, task, limits)
            except NotStarted as error:
                why = error.why or error.what
        raise EpisodeLost("the program", why=f"it could not be started within {sum(START_AGAIN_S):g} s: {why}")

    async def _once(self, name: str, task: Task, limits: SessionLimits) -> Played:
        async with contextlib.AsyncExitStack() as stack:
            self.doing[name] = f"waits for {self.gateway.slot}"
            session = self.gateway.session(name.replace(" ", "-"), limits)
            try:
                lent = await stack.enter_async_context(session)
            except Refused as error:
                if isinstance(error, StaleEpoch):
                    raise
                # As many are open as may be, or an earlier one of this name is not forgotten yet.
                raise NotStarted("a session", why=str(error)) from error
            base_url = url_from(lent.access, self.node)
            self.doing[name] = "runs its program"
            ended = await self._run(task, lent, base_url)
            closed = await lent.close()
        return self._played(ended, closed)

    async def _run(self, task: Task, lent: OpenSession, base_url: str) -> Ended:
        """Run the program to its end, within the episode's time and the session's life."""
        limit_s = self.limits.episode_timeout_s
        env = environment(self.program, base_url, lent.access.api_key)
        run = asyncio.ensure_future(self.host.run(self.program.words(task), env, self.program.given(task)))
        either: list[asyncio.Future[Any]] = [run, lent.gone]
        try:
            await asyncio.wait(either, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if run.done():
                return run.result()
            if lent.gone.done():
                raise EpisodeLost("the program's session", why=str(lent.gone.exception()))
            closed = await lent.close()
            error = EpisodeLost if closed.waiting or closed.trouble else EnvironmentStuck
            at = "waits for tokens" if closed.waiting else "is at work"
            raise error("the program", why=f"not over within {limit_s:g} s; it {at} after {len(closed.said)} answers")
        finally:
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)

    def _played(self, ended: Ended, closed: Closed) -> Played:
        if over := passed_limit(ended.over, ended.code, last_words(ended), self.program.limits):
            raise LimitExceeded("the program", why=over if ended.over else f"{over}; it ended with {how(ended)}")
        if closed.trouble:
            raise (GenerationFailed if closed.never else EpisodeLost)(
                "the program", why=f"its last call had no answer: {closed.trouble}"
            )
        if ended.code and not closed.used_up:
            raise EnvironmentFailed("the program", why=f"it ended with {how(ended)}")
        if not closed.episode.branches:
            raise EnvironmentFailed("the program", why="it ended before the policy had said anything")
        result = self._result(ended, closed)
        self.told(sum(sum(branch.loss_mask) for branch in closed.episode.branches))
        try:
            rewards = rewards_of(result, closed.said)
        except ValueError as error:
            raise EnvironmentFailed("the program", why=str(error)) from error
        return Played(
            episode=closed.episode,
            rewards=rewards,
            states={},
            truncated=closed.used_up,
            turns=len(closed.said),
            cut=sum(said.finish_reason == "length" for said in closed.said),
            info=dict(result.info),
            output=ended.stdout,
            left=closed.left,
        )

    def _result(self, ended: Ended, closed: Closed) -> Result:
        if self.judged:
            # What a judge is shown may quote the policy word for word: it must not be able to reward itself.
            return Result()
        try:
            result = result_of(ended.stdout)
        except ValueError as error:
            raise EnvironmentFailed("the program's result", why=str(error)) from None
        if result is None and not closed.used_up:
            why = f'it printed no line of JSON with "reward"; its last words: {ended.stdout[-200:]!r}'
            raise EnvironmentFailed("the program", why=f"{why}; roles.env.rewards is empty, too")
        return result or Result()


def rewards_of(result: Result, said: Sequence[Said]) -> dict[str, float]:
    """The reward of each answer by its id in the episode, as a program says.

    Args:
        said: all answers that it was given, in order.

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
    return {name: checked(value) for name, value in rewards.items()}


def url_from(access: Access, node: str) -> str:
    """The gateway's base URL for programs of a node.

    Raises:
        NotReachable: it has none there.
    """
    if access.node == node:
        return access.base_url
    if access.remote_url:
        return access.remote_url
    raise NotReachable(
        f"{access.gateway} from node {node!r}",
        why=f"it is on node {access.node!r} and listens there for that machine alone ({access.base_url})",
        hint='set roles.gateway.host = "node", or node of roles.env and roles.gateway to the same one',
    )


def environment(program: Program, base_url: str, api_key: str) -> dict[str, str]:
    """The environment variables of a program: those of this process, the way to the gateway, and the user's own.

    A proxy that the user's machine has for the outer world is not asked for the gateway.
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


def last_words(ended: Ended) -> str:
    """The last lines of standard error."""
    lines = [line for line in ended.stderr.splitlines() if line.strip()][-LAST_LINES:]
    return " / ".join(lines)[-LAST_CHARS:]


def how(ended: Ended) -> str:
    """An exit code, and the last lines of standard error."""
    code = f"signal {-ended.code}" if ended.code < 0 else f"exit code {ended.code}"
    return f"{code}: {said}" if (said := last_words(ended)) else code
