"""Toys that talk to each other, wherever they run; named in a config by file."""

from __future__ import annotations

import asyncio
from typing import Protocol

from supervision_toys import Toy

from relax_rt.transport.errors import RelaxError
from relax_rt.transport.rpc import idempotent


class EchoApi(Protocol):
    @idempotent
    async def echo(self, text: str) -> str: ...


class Echo(Toy):
    """Answers, and says from where."""

    async def setup(self) -> None:
        self.ctx.serve(EchoApi, self)

    async def echo(self, text: str) -> str:
        return f"{self.ctx.who} on {self.ctx.node}: {text}"  # type: ignore[attr-defined]


class Caller(Toy):
    """Calls echo/0 again and again; tells each answer that differs from the one before."""

    async def run(self) -> None:
        echo = await self.ctx.peer("echo/0", EchoApi, timeout_s=1.0)
        await self.ctx.ready()
        before = ""
        while not self.ctx.stopping.is_set():
            try:
                answer = await echo.echo("hello")
            except RelaxError as error:
                answer = ""
                self.ctx.progress.advance(1, str(error))
            else:
                self.ctx.progress.advance(1, "called")
            if answer and answer != before:
                before = answer
                self.ctx.event("echoed", answer=answer)
            await asyncio.sleep(0.05)
