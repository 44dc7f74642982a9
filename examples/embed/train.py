"""A run inside a program of one's own: `python examples/embed/train.py`. Two cores, half a minute."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import relax_rt
from relax_rt.roles.models.resolve import resolve_model
from relax_rt.roles.models.tokenizer import load_tokenizer
from relax_rt.roles.rollout.router import GenerationRequest

HERE = Path(__file__).parent


async def add(run: relax_rt.Runtime, question: str) -> str:
    """Ask the policy, as it is now."""
    tokenizer = load_tokenizer(resolve_model("package:tiny", HERE))
    prompt = tokenizer.render([{"role": "user", "content": question}])
    async with run.router() as router:
        outcome = await router.generate(
            GenerationRequest(prompt=tuple(prompt), temperature=0.0, max_new_tokens=5, stop_ids=tokenizer.stop_ids)
        )
    return tokenizer.decode(outcome.tokens)


async def main(*overrides: str) -> list[float]:
    """Train, print the reward of every step, and ask for a sum in between."""
    rewards = []
    async with relax_rt.Runtime.from_toml(HERE / "roles.toml", overrides) as run:
        print(f"17 + 25 = {await add(run, '17 + 25 =')}")
        async for step in run.records("step"):
            rewards.append(step["reward_mean"])
            print(f"step {step['step']}: reward {rewards[-1]:.3f}")
        print((await run.wait()).status)
    return rewards


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
