"""One process, where breakpoints work: the user's environment and reward with the model or scripted words."""

from __future__ import annotations

import json
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fresh_model import save_fresh

import relax_rt
from relax_rt.config.problems import BadInput
from relax_rt.transport.rpc.errors import RelaxError

pytest.importorskip("torch")
from relax_rt.roles.job.debugging import DebugResult
from relax_rt.roles.models.tiny import character_tokenizer

HEAD = """
[run]
name = "debug"
[model]
path = "model"
[sampling]
max_new_tokens = 6
[roles.rollout]
dtype = "float32"
"""
MIN_PROMPTS = f"""{HEAD}
[roles.evaluator]
dtype = "float32"
[data]
path = "prompts.jsonl"
held_out = 0.25
max_prompt_tokens = 40
[reward]
components = [{{ function = "mine.py:score" }}, {{ name = "length", free = 1, most = 3, weight = 0.5 }}]
"""
EPISODES = f"""{HEAD}
[roles.env]
environment = "mine.py:Count"
tasks = 100
max_tokens = 200
rewards = [{{ function = "mine.py:style" }}]
"""
MINE = '''
from relax_rt.roles.agentic import Step

async def score(completion, answer, question):
    right = completion == answer
    breakpoint()
    return {"right": float(right)}

def style(completion, answer, turns, reward):
    breakpoint()
    return 0.25

class Count:
    """Blocks, so that a run would have it in worker processes."""

    def reset(self, task):
        self.at = 0
        return "count to 2"

    def step(self, reply):
        self.at += 1
        breakpoint()
        if reply.text == "boom":
            raise LookupError("on purpose")
        return Step(messages="next", reward=float(reply.text == str(self.at)), done=self.at == 2)
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_fresh(tmp_path_factory.mktemp("fresh"))


@pytest.fixture
def home(tmp_path: Path, model: Path) -> Path:
    (tmp_path / "model").symlink_to(model)
    name = f"mine_{abs(hash(str(tmp_path)))}"
    for kind, text in (("prompts", MIN_PROMPTS), ("episodes", EPISODES)):
        (tmp_path / f"{kind}.toml").write_text(text.replace("mine.py", f"{name}.py"))
    (tmp_path / f"{name}.py").write_text(MINE)
    lines = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(4) for b in range(4)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """What a debugger sees at each breakpoint."""
    found: list[dict[str, Any]] = []

    def stop() -> None:
        frame = sys._getframe(1)
        found.append({"function": frame.f_code.co_name, "thread": threading.current_thread(), **frame.f_locals})

    monkeypatch.setattr(sys, "breakpointhook", stop)
    yield found
    assert {one["thread"] for one in found} <= {threading.main_thread()}


async def test_an_episode_stops_at_breakpoints_of_environment_and_reward(
    home: Path, stops: list[dict[str, Any]]
) -> None:
    async with relax_rt.Runtime.from_toml(home / "episodes.toml", debug=True) as debug:
        shown: DebugResult = await debug.play(words=["1", "no"])
    assert [stop["function"] for stop in stops] == ["step", "step", "style"]
    assert [stop["reply"].text for stop in stops[:2]] == ["1", "no"] and stops[2]["reward"] == 1.0
    assert (shown.reward, shown.turn_rewards, shown.tokens) == (1.25, [1.0, 0.25], 5)
    assert shown.rewards == {"episode": 1.25, "environment": 1.0, "style": 0.25}
    assert [role for role, _ in shown.turns] == ["user", "assistant", "user", "assistant"]
    assert "[user] <|user|>count to 2" in str(shown) and "reward 1.25 (episode 1.25" in str(shown)


async def test_an_episode_has_the_chat_template_of_the_config(home: Path, stops: list[dict[str, Any]]) -> None:
    own = str(character_tokenizer().chat_template).replace("'<|end|>'", "'<|end|> '")
    (home / "own.jinja").write_text(own)
    for table in ("env", "gateway"):
        override = f"roles.{table}.chat_template=own.jinja"
        async with relax_rt.Runtime.from_toml(home / "episodes.toml", [override], debug=True) as debug:
            shown: DebugResult = await debug.play(words=["1", "no"])
        assert shown.turns[0] == ("user", "<|user|>count to 2<|end|> <|assistant|>")


async def test_a_prompt_and_its_rewards(home: Path, stops: list[dict[str, Any]]) -> None:
    def add(prompt: str) -> str:
        a, _, b = prompt.removeprefix("<|user|>").split()[:3]
        return str(int(a) + int(b))

    async with relax_rt.Runtime.from_toml(home / "prompts.toml", debug=True) as debug:
        shown: DebugResult = await debug.play(3, words=add)
        held_out: DebugResult = await debug.play(1, split="held_out", words=["that is long"])
        with pytest.raises(RelaxError, match="held-out item 99: there are 2"):
            await debug.play(99, split="held_out")
    assert [(stop["function"], stop["right"]) for stop in stops] == [("score", True), ("score", False)]
    assert (shown.split, shown.reward, shown.rewards["score"], shown.truncated) == ("train", 0.75, 1.0, False)
    assert (held_out.split, held_out.truncated, held_out.tokens) == ("held_out", True, 6)
    assert held_out.rewards == {"score": 0.0, "length": -1.0} and held_out.reward == -0.5


async def test_the_model_speaks_where_nobody_else_does(home: Path, stops: list[dict[str, Any]]) -> None:
    async with relax_rt.Runtime.from_toml(home / "episodes.toml", debug=True) as debug:
        first, again, other = await debug.play(), await debug.play(), await debug.play(member=1)
    assert first.turns == again.turns != other.turns and 0 < first.tokens <= 12
    assert [stop["function"] for stop in stops] == ["step", "step", "style"] * 3


async def test_what_the_users_code_raises_is_raised_from_its_line(home: Path, stops: list[dict[str, Any]]) -> None:
    async with relax_rt.Runtime.from_toml(home / "episodes.toml", debug=True) as debug:
        with pytest.raises(LookupError, match="on purpose") as caught:
            await debug.play(words=["boom"])
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert frames[-1].name == "step" and Path(frames[-1].filename).parent == home
        with pytest.raises(RelaxError, match="asked for reply 2, and there are 1"):
            await debug.play(words=["1"])
    assert len(stops) == 2


async def test_a_wrong_config_is_told_as_ever(home: Path) -> None:
    with pytest.raises(BadInput, match="unknown key 'task' in"):
        async with relax_rt.Runtime.from_toml(home / "episodes.toml", ["roles.env.task=3"], debug=True):
            raise AssertionError
