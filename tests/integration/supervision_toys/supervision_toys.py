"""Roles that do nothing but behave in one particular way, and a job for them; found by entry point."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from relax_rt.config.job import Job
from relax_rt.config.problems import BadInput
from relax_rt.config.schema import RoleSettings
from relax_rt.hosting.gang import Gang
from relax_rt.interfaces.role import Role
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.queue.ledger.policy import LedgerPolicy


class ToySettings(RoleSettings):
    """For all toys."""

    after_s: float = 0.0
    """When it does what it does."""


class Toy(Role):
    """Base: ready at once, works in small steps until it is asked to stop."""

    Settings = ToySettings

    async def setup(self) -> None:
        self.ctx.event("toy_setup", pid=os.getpid())

    async def run(self) -> None:
        await self.ctx.ready()
        while not self.ctx.stopping.is_set():
            self.ctx.progress.advance(1, "ticking")
            await asyncio.sleep(0.05)

    async def wait(self) -> None:
        await asyncio.sleep(self.ctx.settings.after_s)  # type: ignore[attr-defined]


class Worker(Toy):
    kind = "worker"
    tier = 20


class Aide(Toy):
    """Of a higher tier."""

    kind = "aide"
    tier = 30


class Idler(Toy):
    """Has nothing to do."""

    kind = "idler"

    async def run(self) -> None:
        await self.ctx.ready()
        self.ctx.progress.waiting("for work that never comes")
        await self.ctx.stopping.wait()


class Crasher(Toy):
    kind = "crasher"

    async def run(self) -> None:
        await self.ctx.ready()
        await self.wait()
        raise ValueError("the toy broke")


class Refuser(Toy):
    """Is told to do what it cannot ever do."""

    kind = "refuser"

    async def run(self) -> None:
        await self.ctx.ready()
        await self.wait()
        raise BadInput("the toy's folder", why="read-only")


class Hanger(Toy):
    """The first time, its interpreter is stuck in native code that never lets go."""

    kind = "hanger"

    async def run(self) -> None:
        await self.ctx.ready()
        self.ctx.progress.advance(1, "about to hang")
        mark = self.ctx.run_dir / "hung_once"
        if not mark.exists():
            mark.touch()
            stuck_in_native_code()
        await super().run()


def stuck_in_native_code() -> None:
    """The regular expression engine holds the interpreter for longer than any test lasts."""
    re.match(r"(a+)+$", "a" * 64 + "b")


class Brooder(Toy):
    """Has a child in a session of its own."""

    kind = "brooder"

    async def setup(self) -> None:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "import time; time.sleep(600)", start_new_session=True
        )
        self.ctx.event("brood", pid=child.pid)


class Busy(Toy):
    """Is stuck in native code, and so deaf to its lifeline."""

    kind = "busy"

    async def run(self) -> None:
        await self.ctx.ready()
        await self.wait()
        stuck_in_native_code()


class Stubborn(Toy):
    """Does not stop when asked to."""

    kind = "stubborn"

    async def run(self) -> None:
        await self.ctx.ready()
        await asyncio.sleep(600)


class Once(Toy):
    """Is never restarted."""

    kind = "once"
    restart = "temporary"


class Holder(Toy):
    """Holds a group of the queue that it never finishes; no next incarnation gives it back."""

    kind = "holder"
    restart = "temporary"

    async def run(self) -> None:
        queue = await self.ctx.queue()
        await queue.rollback(1, 0, VersionRecord(version=1, parent=0, step=0, digest="d"))
        admitted = await queue.admit(2, 1, 1, 20.0)
        self.ctx.event("held", groups=[ticket.group for ticket in admitted.tickets])
        await super().run()


class Ranks(Toy):
    """A gang that adds up numbers for ever: with torch.distributed, as if it had been started by torchrun."""

    kind = "ranks"
    gang = True
    tier = 40

    async def run(self) -> None:
        await asyncio.to_thread(self.add_up, asyncio.get_running_loop())

    def add_up(self, loop: asyncio.AbstractEventLoop) -> None:
        import torch
        import torch.distributed as dist

        gang = Gang.here()
        # Both ways lead to the same store; the generation's own keys are the safer one.
        own = gang.generation % 2 == 0
        place = {"store": gang.store(), "rank": gang.rank, "world_size": gang.world_size} if own else {}
        dist.init_process_group("gloo", **place)
        asyncio.run_coroutine_threadsafe(self.ctx.ready(), loop).result()
        for step in range(1 << 30):
            # All leave in the same step: whoever is asked to stop says so in the sum.
            numbers = torch.tensor([1, gang.generation, int(self.ctx.stopping.is_set())])
            dist.all_reduce(numbers)
            ranks, generations, stopping = numbers.tolist()
            self.ctx.progress.advance(1, "adding up")
            if step in (0, 20):
                self.ctx.event("added", rank=gang.rank, step=step, ranks=ranks, generations=generations)
            if stopping:
                break
            time.sleep(0.005)
        dist.destroy_process_group()


class Finisher(Toy):
    kind = "finisher"
    significant = True
    tier = 40

    async def run(self) -> None:
        await self.ctx.ready()
        await self.wait()


class ToyJob(Job):
    """The job `toy`."""

    def closing(self, summary: dict[str, Any]) -> list[str]:
        return [f"toys: {', '.join(summary['toys'])}"]

    def ledger_policy(self, config: Any) -> LedgerPolicy:
        return LedgerPolicy(group_size=2, prompts_per_step=1, max_staleness=1, tasks={"train": ()})

    def finish(self, run_dir: Path, config: Any) -> dict[str, Any]:
        return {"toys": sorted(config.roles)}
