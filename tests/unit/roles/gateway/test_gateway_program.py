"""`examples/openai_agent` in a process of its own, against a gateway over a scripted engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from gateway_world import Running, running, tokenizer

from relax_rt.roles.agentic import Task
from relax_rt.roles.agentic.episode import EpisodeLimits, PlayedEpisode
from relax_rt.roles.agentic.interface import EpisodeLost
from relax_rt.roles.agentic.program import load_program
from relax_rt.roles.agentic.program_episodes import ProgramPlayer
from relax_rt.roles.agentic.program_host import ProgramHost
from relax_rt.roles.agentic.rewards import turns_of
from relax_rt.roles.gateway.api import Access, ClosedSession, SessionClient, SessionLimits
from relax_rt.roles.rollout.router.core import GenerationRequest
from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.rpc.identity import Incarnation

EXAMPLE = Path(__file__).parents[4] / "examples/openai_agent"
COMMAND = "python agent.py '{question}'"
OPTIONS: dict[str, Any] = {"stdin": "none", "preload": ["openai"]}


class Here:
    """The gateway's side of GatewayApi, without a process of its own; and the context of who calls it."""

    who = Incarnation("env/0", 1)

    def __init__(self, world: Running) -> None:
        self.world, self.epoch, self.gone = world, 1, False

    def actor(self, name: str, api: Any, timeout_s: float) -> Any:
        return self

    async def open(self, session: str, limits: SessionLimits, nonce: str, owner: Incarnation) -> Access:
        self.world.sessions.open(session, limits, nonce, owner)
        key = self.world.gateway.keys.of_session(session, nonce)
        return Access(f"{self.world.url}/v1", key, f"gateway/0#{self.epoch}")

    async def renew(self, owner: Incarnation) -> str:
        self.world.sessions.renew(owner)
        return f"gateway/0#{self.epoch}"

    async def close(self, session: str, nonce: str) -> ClosedSession:
        if self.gone:
            raise Refused("session", why="none of this name and nonce is open")
        found = self.world.sessions.find(session, nonce)
        found.end("has been closed")
        await found.settled()
        return self.world.sessions.close(session, nonce)

    async def forget(self, session: str, nonce: str) -> None:
        self.world.sessions.forget(session, nonce)


def script(prompt: str, wanted: GenerationRequest) -> str:
    """Multiplies with the calculator, whatever it is asked; says its result."""
    last = prompt.removesuffix("<|assistant|>").rpartition("<|user|>")[2].removesuffix("<|end|>")
    if found := re.fullmatch(r"Calculate (\d+ \* \d+)\.", last):
        return f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{found[1]}"}}}}</tool_call>'
    return f"{last}" if last.isdigit() else "no idea"


async def play(
    world: Running, here: Here, host: ProgramHost, name: str, question: str, turns: int = 4
) -> PlayedEpisode:
    limits = EpisodeLimits(max_turns=turns, max_new_tokens=100, turn_timeout_s=60, episode_timeout_s=120)
    program = load_program(COMMAND, OPTIONS, EXAMPLE)
    task = Task(index=0, item=name, split="train", seed=1, question=question, answer="851")
    async with SessionClient(here, "gateway/0") as lessee:  # type: ignore[arg-type]
        programs = ProgramPlayer(program, host, lessee, limits, 2000, has_rewards=True, on_tokens=lambda count: None)
        return await programs.play(name, task, 5, temperature=1.0)


async def test_the_example_s_agent_uses_its_calculator_and_its_tokens_are_the_episode() -> None:
    async with running(script) as world, ProgramHost(EXAMPLE, ["openai"]) as host:
        here = Here(world)
        played = await play(world, here, host, "7.0", "Calculate 23 * 37.")
        assert played.output == "851\n" and played.turns == 2 and not played.truncated
        (branch,) = played.episode.branches
        sampled = [token for token, mask in zip(branch.tokens, branch.loss_mask, strict=True) if mask]
        assert sampled == [token for outcome in world.engine.made for token in outcome.tokens]
        assert played.episode.counts.continuation == 1 and played.episode.counts.drift == 0
        assert not len(world.sessions), "its session was not forgotten"
        call = '<tool_call>{"name": "calculator", "arguments": {"expression": "23 * 37"}}</tool_call>'
        assert turns_of(played.episode, tokenizer()) == [
            {"role": "system", "text": "Use the calculator, then answer with the number alone."},
            {"role": "user", "text": "Calculate 21 * 4."},
            {"role": "context", "text": '{"name":"calculator","arguments":{"expression":"21 * 4"}}'},
            {"role": "tool", "text": "84"},
            {"role": "context", "text": "84"},
            {"role": "user", "text": "Calculate 23 * 37."},
            {"role": "assistant", "text": call},
            {"role": "tool", "text": "851"},
            {"role": "assistant", "text": "851"},
        ]
        # One call is all it may have: it fails, and the episode is cut.
        cut = await play(world, here, host, "7.1", "Calculate 2 * 3.", turns=1)
        assert cut.truncated == "turns" and cut.turns == 1 and cut.output == ""
        # The gateway that had the session is no more: whatever the program says, the episode is lost.
        here.gone = True
        with pytest.raises(EpisodeLost, match="none of this name"):
            await play(world, here, host, "7.3", "Calculate 2 * 3.")
