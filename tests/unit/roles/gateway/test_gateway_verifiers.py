"""`examples/verifiers`: an environment of the `verifiers` package, played with an interpreter of its own.

Only where there is one: examples/verifiers/.venv, or what RELAX_VERIFIERS_PYTHON names (README.md there makes it).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gateway_world import Running, running
from test_gateway_program import Here

from relax_rt.roles.agentic import Task
from relax_rt.roles.agentic.episode import EpisodeLimits, PlayedEpisode
from relax_rt.roles.agentic.program import load_program
from relax_rt.roles.agentic.program_episodes import ProgramPlayer
from relax_rt.roles.agentic.program_host import ProgramHost
from relax_rt.roles.gateway.api import SessionClient
from relax_rt.roles.rollout.router.core import GenerationRequest

EXAMPLE = Path(__file__).parents[4] / "examples/verifiers"
PYTHON = Path(os.environ.get("RELAX_VERIFIERS_PYTHON") or EXAMPLE / ".venv/bin/python")
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="no interpreter with verifiers: examples/verifiers")


def adds(prompt: str, wanted: GenerationRequest) -> str:
    """The sum of the question that came last; wrong, if it is the second."""
    question = prompt.removesuffix("<|assistant|>").rpartition("<|user|>")[2].removesuffix(" =<|end|>")
    a, b = map(int, question.split(" + "))
    return str(a + b + (prompt.count("<|user|>") == 2))


async def play(world: Running, number: int) -> PlayedEpisode:
    limits = EpisodeLimits(max_turns=3, max_new_tokens=20, turn_timeout_s=60, episode_timeout_s=120)
    program = load_program(f"{PYTHON} play.py sums", {}, EXAMPLE)
    task = Task(index=number, item=f"train-{number}", split="train", seed=1)
    async with ProgramHost(EXAMPLE) as host, SessionClient(Here(world), "gateway/0") as lessee:  # type: ignore[arg-type]
        programs = ProgramPlayer(program, host, lessee, limits, 2000, has_rewards=False, on_tokens=lambda count: None)
        return await programs.play(str(number), task, 5, temperature=1.0)


async def test_an_environment_of_verifiers_is_an_episode_token_for_token() -> None:
    async with running(adds) as world:
        played = await play(world, 0)
        other = await play(world, 1)
        assert played.turns == 3 and not played.truncated and played.left == 0
        (branch,) = played.episode.branches
        sampled = [token for token, mask in zip(branch.tokens, branch.loss_mask, strict=True) if mask]
        assert sampled == [token for outcome in world.engine.made[:3] for token in outcome.tokens]
        assert played.episode.counts.continuation == 2 and played.episode.counts.drift == 0
        # Its own reward function has judged: two of three, all of it for the last reply.
        assert list(played.rewards.values()) == [0.0, 0.0, pytest.approx(2 / 3)]
        assert other.turns == 3 and other.episode.branches[0].tokens != branch.tokens, "each task is another"
        assert not len(world.sessions)
