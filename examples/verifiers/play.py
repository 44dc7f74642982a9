"""Plays one episode of a `verifiers` environment: ``python play.py ENVIRONMENT [CONFIG as JSON]``, the task on stdin.

It runs in an interpreter that has verifiers, and needs nothing of relax-rt: the policy is a server of OpenAI's API.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import verifiers.v1 as vf

MAX_TASKS = 1000
"""Of a taskset that does not end."""
HELD_OUT = 0.1


def chosen(taskset: vf.Taskset, asked: dict[str, Any]) -> vf.Task:
    """The task that is meant: one of the last tenth, if it is held out. Members of a group have the same."""
    tasks = list(taskset if taskset.bounded else taskset.take(MAX_TASKS))
    cut = len(tasks) - max(1, int(HELD_OUT * len(tasks)))
    mine = tasks[cut:] if asked["split"] == "held_out" else tasks[:cut]
    return mine[int(asked["item"].rpartition("-")[2]) % len(mine)]


async def main() -> int:
    """The exit code; the reward is printed."""
    asked = json.loads(sys.stdin.readline())
    given = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    env = vf.load_environment(vf.resolve_env_config({"taskset": {"id": sys.argv[1]}, **given}))
    policy = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with env.serving():
        episode = await env.run_episode(chosen(env.taskset, asked), vf.ModelContext(model="policy", client=policy))
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in traces for error in trace.errors)]
        print("\n".join(f"{error.type}: {error.message}" for error in errors), file=sys.stderr)
        return 1
    metrics = {name: value for trace in traces for name, value in trace.metrics.items() if value is not None}
    print(json.dumps({"reward": sum(trace.reward for trace in traces), "info": metrics}))
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
