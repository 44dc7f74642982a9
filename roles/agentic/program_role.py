"""What an env slot needs beside itself where its environments are programs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from relax_rt.config.loader import role_settings
from relax_rt.role import RoleContext
from relax_rt.roles.agentic.episode import Limits
from relax_rt.roles.agentic.program import Program
from relax_rt.roles.agentic.program_host import ProgramHost
from relax_rt.roles.agentic.program_play import Programs
from relax_rt.roles.agentic.settings import EnvSettings
from relax_rt.roles.gateway.remote import Lessee
from relax_rt.roles.gateway.settings import GatewaySettings
from relax_rt.roles.sections import RLConfig

GATEWAY = "gateway"


@contextlib.asynccontextmanager
async def open_programs(
    ctx: RoleContext, program: Program | None, told: Callable[[int], None], fenced: Callable[[BaseException], None]
) -> AsyncIterator[Programs | None]:
    """A host for a slot's programs, and the gateway that they speak to: slots take turns at several gateways. None
    where there is no program.

    Args:
        told: is called with the tokens of each episode. fenced: with why the slot must end, when a newer epoch has it.
    """
    if program is None:
        yield None
        return
    config, settings = ctx.config, ctx.settings
    assert isinstance(config, RLConfig) and isinstance(settings, EnvSettings)
    count = role_settings(config, GATEWAY, GatewaySettings).count
    slot = f"{GATEWAY}/{int(ctx.who.slot.rpartition('/')[2]) % count}"
    limits = Limits(
        max_turns=settings.max_turns,
        max_new_tokens=config.sampling.max_new_tokens,
        turn_timeout_s=settings.turn_timeout_s,
        episode_timeout_s=settings.episode_timeout_s,
    )
    async with ProgramHost(Path(program.cwd), program.preload) as host, Lessee(ctx, slot) as gateway:
        gateway.fenced.add_done_callback(lambda done: _tell(done, fenced))
        yield Programs(program, host, gateway, limits, settings.max_tokens, bool(settings.rewards), told)


def _tell(done: asyncio.Future[None], fenced: Callable[[BaseException], None]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        fenced(error)
