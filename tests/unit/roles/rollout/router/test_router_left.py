"""A router that was left: whoever asks it all the same is told, and waits for nobody."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from router_far_end import Rollout, fleet

from relax_rt.roles.rollout.router import GenerationRequest, NotGenerated, Router, RouterEnded

WANTED = GenerationRequest(prompt=(1, 2, 3), seed=5, max_new_tokens=20, chunk_tokens=2, timeout_s=60.0)


async def test_who_asks_again_when_the_router_is_left_is_told_so(tmp_path: Path) -> None:
    told: list[str] = []

    async def insist(router: Router) -> None:
        while True:
            try:
                await router.generate(WANTED)
            except NotGenerated:
                told.append("cancelled")

    async with fleet(tmp_path) as run, asyncio.timeout(120):
        router = Router(run)
        async with router:
            # There is no engine: it waits.
            insisting = asyncio.create_task(insist(router))
            await asyncio.sleep(0)
        with pytest.raises(RouterEnded, match=r"its `async with` has ended \(ask within"):
            await insisting
        assert told == ["cancelled"]
        with pytest.raises(RouterEnded, match="has ended"):
            await router.generate(WANTED)
        run.commit()
        await Rollout(run, "rollout/0").begin()
        async with router:
            assert (await router.generate(WANTED)).kind == "done"
