"""A `verifiers` environment: sums of two numbers, one after the other, with a word on each answer.

Taskset, reward, environment and harness are as verifiers (0.4) has them; nothing here knows of relax-rt. `vf-eval sums`
plays it too.
"""

from __future__ import annotations

import random

import verifiers.v1 as vf
from openai import AsyncOpenAI

SUMS = 3


class SumsData(vf.TaskData):
    sums: list[tuple[int, int]]


class SumsTask(vf.Task[SumsData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Share of the sums that were right; one that was not asked for any more was not."""
        said = [message.content for message in trace.messages if message.role == "assistant"]
        return sum(answer == str(a + b) for answer, (a, b) in zip(said, self.data.sums, strict=False)) / SUMS


class SumsConfig(vf.TasksetConfig):
    tasks: int = 400


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    def load(self) -> list[SumsTask]:
        draw = random.Random(0)
        found = []
        for _ in range(self.config.tasks):
            sums = [(draw.randrange(10, 100), draw.randrange(10, 100)) for _ in range(SUMS)]
            found.append(SumsTask(SumsData(prompt=asked(*sums[0]), sums=sums), self.config.task))
        return found


class SumsEnvConfig(vf.EnvConfig):
    student: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class SumsEnv(vf.Env[SumsEnvConfig]):
    async def run(self, task: SumsTask, agents: vf.Agents) -> None:
        """The task's prompt is the first sum; the others are the user's next words."""
        async with agents.student.interaction(task) as interaction:
            segment = await interaction.turn()
            for a, b in task.data.sums[1:]:
                if segment.terminated:
                    break
                segment = await interaction.turn(asked(a, b))


class OneCall(vf.Harness[vf.HarnessConfig]):
    """Asks the model once for each turn, in this process (verifiers' own `null` starts a program with `uv`)."""

    SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        said = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else data.prompt
        messages = [{"role": message.role, "content": message.content} for message in said or []]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(0, "", "")


def asked(a: int, b: int) -> str:
    """A question, as `package:tiny` knows it."""
    return f"{a} + {b} ="


__all__ = ["OneCall", "SumsEnv", "SumsTaskset"]
