"""What an env slot needs beside itself where its environments are programs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from relax_rt.cluster.nodes.links import Links
from relax_rt.config.loader import role_settings
from relax_rt.config.schema import RunConfig
from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.agentic.episode import Limits
from relax_rt.roles.agentic.program import Program
from relax_rt.roles.agentic.program_episodes import Programs
from relax_rt.roles.agentic.program_host import ProgramHost
from relax_rt.roles.agentic.settings import EnvSettings
from relax_rt.roles.gateway.api import SessionClient
from relax_rt.roles.gateway.settings import GatewaySettings
from relax_rt.roles.rollout.engines.settings import SamplingTable

GATEWAY = "gateway"


@contextlib.asynccontextmanager
async def open_programs(
    ctx: RoleContext, program: Program | None, told: Callable[[int], None], broken: Callable[[BaseException], None]
) -> AsyncIterator[Programs | None]:
    """A host for a slot's programs, and the gateway that they speak to: slots take turns at several gateways. None
    where there is no program.

    Args:
        told: is called with the tokens of each episode. broken: with why the slot must end: a newer epoch has it, or no
            program can be started any more.
    """
    if program is None:
        yield None
        return
    config, settings = ctx.config, ctx.settings
    assert isinstance(config, RunConfig) and isinstance(settings, EnvSettings)
    count = role_settings(config, GATEWAY, GatewaySettings).count
    slot = f"{GATEWAY}/{int(ctx.who.slot.rpartition('/')[2]) % count}"
    limits = Limits(
        max_turns=settings.max_turns,
        max_new_tokens=config.table(SamplingTable).max_new_tokens,
        turn_timeout_s=settings.turn_timeout_s,
        episode_timeout_s=settings.episode_timeout_s,
    )
    host = ProgramHost(
        Path(program.cwd), program.preload, program.limits, files=settings.open_files or 0, tell=ctx.event
    )
    if host.places < settings.episodes_in_flight:
        hint = "raise the hard limit of open files (ulimit -Hn), or lower roles.env.episodes_in_flight"
        why = f"open files of the slot; {settings.episodes_in_flight} are asked for"
        ctx.event("programs_bounded", places=host.places, why=why, hint=hint)
        ctx.log.warning("fewer programs at a time than asked for", places=host.places, why=why, hint=hint)
    links = Links.from_environment()
    async with host, SessionClient(ctx, slot) as gateway:
        for watched in (gateway.fenced, host.broken):
            watched.add_done_callback(lambda done: _tell(done, broken))
        judged = bool(settings.rewards)
        node = links.node if links else ""
        yield Programs(program, host, gateway, limits, settings.max_tokens, judged, told, node)


def _tell(done: asyncio.Future[None], broken: Callable[[BaseException], None]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        broken(error)
