"""A program that is no role: it calls the actors of a run.

python examples/actors/ask.py [run directory]
"""

from __future__ import annotations

import asyncio
import sys

from judges import Clerk, Judge

from relax_rt import discovery
from relax_rt.actors import ActorDied

TEXT = "the quick brown fox jumps over the lazy dog"


async def main(run_dir: str) -> None:
    async with discovery.connect(run_dir) as run:
        judge, clerk = run.actor("judge", Judge, timeout_s=30.0), run.actor("clerk", Clerk)
        print("one score:", round(await judge.score(TEXT), 3))
        print("each judge:", [round(await one.score(TEXT), 3) for one in await judge.all()])
        async for word in judge.words(TEXT):
            if word == "fox":
                break
            print("word:", word)
        await clerk.forget()
        for n in range(1000):
            try:
                await clerk.enter(" ".join(TEXT.split()[: n % 9 + 1]))
            except ActorDied as died:
                print("the clerk died, and what it remembered with it:", died.diagnosis)
        print("mean:", round(await clerk.mean(), 3))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "runs/actors"))
