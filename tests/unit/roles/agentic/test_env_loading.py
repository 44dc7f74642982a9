"""Environments as a config names them, and those of other packages."""

from __future__ import annotations

import base64
import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_rt.roles.agentic import Observation, Reply, Task
from relax_rt.roles.agentic.interface import media
from relax_rt.roles.agentic.loading import Factory, load_factory
from relax_rt.roles.agentic.tasks import SeedTasks, seed_of
from relax_rt.transport.rpc.errors import RelaxError

MINE = """
from relax_rt.roles.agentic import Environment, Step

class Wordle(Environment):
    def __init__(self, word_length, *, hard=False):
        self.word_length = word_length
    async def reset(self, task):
        return "begin"
    async def step(self, reply):
        return Step(done=True)

class Blocks:
    def reset(self, task):
        return "begin"
    def step(self, reply):
        return Step(done=True)

class NoStep:
    def reset(self, task): ...
    def stepp(self, reply): ...

class NoSeats:
    seats = 0
    def reset(self, task): ...
    def step(self, reply): ...

class Mixed:
    async def reset(self, task): ...
    def step(self, reply): ...

async def play(task, chat, *, rounds=3):
    return float(rounds)

def not_async(task, chat): ...

NUMBER = 3
"""


def said(text: str) -> Reply:
    return Reply(text=text, message={"role": "assistant", "content": text}, finish_reason="stop")


def load(folder: Path, target: str, **options: Any) -> Factory:
    (folder / "mine.py").write_text(MINE)
    return load_factory(target, options, folder)


def test_a_class_or_a_function_of_the_users_own(tmp_path: Path) -> None:
    made = load(tmp_path, "mine.py:Wordle", word_length=4)
    assert (made.blocking, made.plays, made.make().word_length) == (False, False, 4)
    assert load(tmp_path, "mine.py:Blocks").blocking
    plays = load(tmp_path, "mine.py:play", rounds=2)
    assert plays.plays and not plays.blocking


@pytest.mark.parametrize(
    ("target", "options", "what", "why", "hint"),
    [
        ("mine.py:Wordl", {}, "roles.env.environment", "has no 'Wordl'", "did you mean 'Wordle'"),
        ("min.py:Wordle", {}, "roles.env.environment", "there is no file", "did you mean 'mine.py'"),
        ("textarea:Chess-v0", {}, "roles.env.environment", "names no code", "did you mean 'textarena'"),
        (
            "mine.py:Wordle",
            {"word_lenght": 4},
            "roles.env.options.word_lenght",
            "no such",
            "did you mean 'word_length'",
        ),
        ("mine.py:Wordle", {}, "roles.env.options", "needs 'word_length'", "give it there"),
        ("mine.py:play", {"round": 1}, "roles.env.options.round", "no such option", "did you mean 'rounds'"),
        ("mine.py:NoStep", {}, "roles.env.environment", "has no step", "did you mean 'stepp'"),
        ("mine.py:Mixed", {}, "roles.env.environment", "reset is async and step is not", "both async, or neither"),
        ("mine.py:not_async", {}, "roles.env.environment", "it is a function", "async def play"),
        ("mine.py:NUMBER", {}, "roles.env.environment", "it is a int", "reset and step"),
        ("textarena:GuesTheNumber-v0", {}, "roles.env.environment", "no such game", "'GuessTheNumber-v0'"),
        ("textarena:GuessTheNumber-v0", {"max_nmber": 5}, "roles.env.options.max_nmber", "no such", "'max_number'"),
        ("textarena:TicTacToe-v0", {}, "roles.env.environment", "2", "players = 2"),
        ("textarena:TicTacToe-v0", {"players": 0}, "roles.env.options.players", "players = 0", "from 1 to"),
        ("textarena:TicTacToe-v0", {"players": 3}, "roles.env.environment", "has to be 2", "players = 2"),
        ("verifiers:wordle", {}, "roles.env.environment", "drive an OpenAI endpoint", "program:python mine.py"),
        ("verifier:wordle", {}, "roles.env.environment", "cannot be imported", "did you mean 'verifiers'"),
        ("mine.py:NoSeats", {}, "roles.env.environment", "its seats are 0", "from 1 on"),
        ("gymnasium:FrozenLake-v9", {}, "roles.env.environment", "FrozenLake", "did you mean"),
        ("gymnasium:Blackjack-v1", {"natral": True}, "roles.env.options", "natral", ""),
        ("gymnasium:Pendulum-v1", {}, "roles.env.environment", "not a few numbered ones", "an Environment around it"),
        ("gymnasium:FrozenLake-v1", {"actions": ["go"]}, "roles.env.options.actions", "1 names for 4", ""),
        ("reasoning_gym:chain_sumo", {}, "roles.env.environment", "no such task", "did you mean 'chain_sum'"),
        ("reasoning_gym:chain_sum", {"min_term": 2}, "roles.env.options.min_term", "no such option", "min_terms"),
        ("reasoning_gym:chain_sum", {"seed": 2}, "roles.env.options.seed", "drawn by its task's seed", ""),
        ("reasoning_gym:chain_sum", {"template": "?"}, "roles.env.options.template", "no {question}", ""),
    ],
)
def test_what_cannot_be_played_is_refused_with_its_key(
    tmp_path: Path, target: str, options: dict[str, Any], what: str, why: str, hint: str
) -> None:
    pytest.importorskip("textarena")
    pytest.importorskip("gymnasium")
    pytest.importorskip("reasoning_gym")
    with pytest.raises(RelaxError) as caught:
        load(tmp_path, target, **options)
    error = caught.value
    assert error.what.startswith(what) and why in (error.why or "") and hint in (error.hint or ""), error


def test_an_error_in_the_users_file_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("x = 1\ny = x.z\n")
    with pytest.raises(RelaxError, match=r"'int' object has no attribute 'z' at .*broken.py:2"):
        load_factory("broken.py:Game", {}, tmp_path)


def test_tasks_of_seeds_come_again_and_held_out_ones_are_others() -> None:
    tasks = SeedTasks(5)
    train, held_out = [tasks.train(n) for n in range(12)], tasks.held_out(50)
    assert [task.item for task in train[:5]] == [task.item for task in train[5:10]]
    assert [task.index for task in train] == list(range(12)) and tasks.train(11, 3).item == "train-3"
    assert not {task.seed for task in train} & {task.seed for task in held_out}
    assert held_out[:10] == tasks.held_out(10) and all(0 <= task.seed < 1 << 31 for task in held_out)
    assert seed_of("train", "0") == train[0].seed != seed_of("held_out", "0")


# --- adapters


def task(seed: int) -> Task:
    return Task(index=0, item="i", split="train", seed=seed)


def text_of(seen: Any) -> str:
    assert isinstance(seen, Observation)
    return str(seen.messages[-1]["content"])  # type: ignore[index]


def guess(game: Any, seed: int) -> int:
    """Plays by bisection; the number found."""
    assert "between 1 and 15" in text_of(game.reset(task(seed)))
    low, high = 1, 15
    while True:
        middle = (low + high) // 2
        step = game.step(said(str(middle)))
        if step.done:
            assert step.reward == 1.0
            return middle
        if "higher" in step.messages:
            low = middle + 1
        else:
            assert "lower" in step.messages
            high = middle - 1


def test_games_of_textarena_depend_on_their_seed_alone(tmp_path: Path) -> None:
    pytest.importorskip("textarena")
    options = {"max_number": 15, "max_turns": 10, "system": "Say a number."}
    made = load(tmp_path, "textarena:GuessTheNumber-v0", **options)
    assert made.blocking
    before = random.getstate()
    found = [guess(made.make(), seed) for seed in range(12)]
    assert random.getstate() == before and len(set(found)) > 3
    # Interleaved with another game they are the same.
    split_games = [made.make() for _ in range(12)]
    seen = [game.reset(task(seed)) for seed, game in enumerate(split_games)]
    assert seen[0].messages[0] == {"role": "system", "content": "Say a number."}
    steps = [game.step(said(f"[{number}]")) for game, number in zip(split_games, found, strict=True)]
    assert all(step.done and step.reward == 1.0 for step in steps)


def test_a_game_of_textarena_says_what_was_wrong_and_then_ends(tmp_path: Path) -> None:
    pytest.importorskip("textarena")
    game = load(tmp_path, "textarena:GuessTheNumber-v0").make()
    game.reset(task(1))
    step = game.step(said("I do not know"))
    assert not step.done and "invalid move" in step.messages and "I do not know" not in step.messages
    step = game.step(said("still not"))
    assert step.done and step.reward == 0.0 and step.info.keys() == {"game_turns"}


def test_both_players_of_a_game_are_the_policy_each_with_a_conversation_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("textarena")
    made = load(tmp_path, "textarena:TicTacToe-v0", players=2, system="You play.")
    game = made.make()
    seen = game.reset(task(3))
    assert made.seats == 2 and seen.seat == 0 and "You are Player 0" in text_of(seen)
    first = game.step(said("[0]"))
    # The other one is told the rules, and what the first has said and done.
    assert first.seat == 1 and first.messages[0] == {"role": "system", "content": "You play."}
    told = first.messages[1]["content"]
    assert "You are Player 1" in told and "[Player 0] [0]" in told and "in cell 0" in told
    steps = [game.step(said(cell)) for cell in ("3", "1", "4", "2")]
    assert [step.seat for step in steps[:3]] == [0, 1, 0] and isinstance(steps[0].messages, str)
    assert "[Player 1] [3]" in steps[0].messages and "[Player 0]" not in steps[0].messages
    # Three in a row: rewards for whoever moved, and for the other.
    assert steps[-1].done and steps[-1].reward == 1.0 and steps[-1].rewards == {1: -1.0}


def room() -> Any:
    """A room of 4 x 6 pixels in which there is a light, as an environment of gymnasium."""
    import gymnasium

    class Room(gymnasium.Env[Any, Any]):
        observation_space = gymnasium.spaces.Box(0, 255, (4, 6, 3), np.uint8)
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, **about: Any) -> tuple[Any, dict[str, Any]]:
            return np.zeros((4, 6, 3), np.uint8), {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            return np.full((4, 6, 3), 255 * action, np.uint8), float(action), bool(action), False, {}

    return Room()


def test_images_of_gymnasium_are_parts_of_messages(tmp_path: Path) -> None:
    gymnasium = pytest.importorskip("gymnasium")
    image = pytest.importorskip("PIL.Image")
    gymnasium.register("Room-v0", entry_point=room, disable_env_checker=True)
    try:
        game = load(tmp_path, "gymnasium:Room-v0", pixels=True, actions=["wait", "light"]).make()
    finally:
        del gymnasium.registry["Room-v0"]
    seen = game.reset(task(1))
    words, dark = seen.messages[0]["content"]
    assert words == {"type": "text", "text": "Answer with one of: wait, light."} and media(seen.messages) == "image_url"
    step = game.step(said("light"))
    (lit,) = step.messages[0]["content"]
    assert step.done and step.reward == 1.0 and step.state != seen.state
    for part, value in ((dark, 0), (lit, 255)):
        head, _, data = part["image_url"]["url"].partition(",")
        shown = image.open(io.BytesIO(base64.b64decode(data)))
        assert head == "data:image/png;base64" and shown.size == (6, 4) and shown.getpixel((5, 3)) == (value,) * 3


def test_a_lake_of_gymnasium_is_shown_as_text_and_walked_by_words(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    options = {"is_slippery": False, "map_name": "4x4", "invalid_reward": -0.1}
    game = load(tmp_path, "gymnasium:FrozenLake-v1", **options).make()
    assert "left, down, right, up" in text_of(seen := game.reset(task(1))) and seen.state.startswith("[S]FFF")
    assert (bad := game.step(said("I stay here"))).reward == -0.1 and bad.state == seen.state
    steps = [game.step(said(word)) for word in ("Down!", "go down", "right", "down", "right", "RIGHT")]
    assert [step.done for step in steps] == [False] * 5 + [True] and steps[-1].reward == 1.0
    assert "[G]" in steps[-1].messages and steps[0].state != seen.state and steps[-1].info == {"invalid": 1.0}
    game.close()


def test_other_environments_of_gymnasium(tmp_path: Path) -> None:
    gymnasium = pytest.importorskip("gymnasium")
    newest = max(name for name in gymnasium.registry if name.startswith("Taxi-"))
    taxi = load(tmp_path, f"gymnasium:{newest}").make()
    first = taxi.reset(task(1)).state
    assert "+---------+" in first and taxi.step(said("south")).reward == -1.0
    cards = load(tmp_path, "gymnasium:Blackjack-v1").make()
    assert "(" in text_of(cards.reset(task(1))) and isinstance(cards.step(said("stick")).reward, float)


def test_questions_of_reasoning_gym_are_episodes_of_one_turn(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    options = {"min_terms": 2, "max_terms": 2, "template": "Q: {question}", "system": "Answer."}
    made = load(tmp_path, "reasoning_gym:chain_sum", **options)
    one, other = made.make(), made.make()
    asked = text_of(one.reset(task(3)))
    assert asked.startswith("Q: ") and text_of(other.reset(task(4))) != asked
    right = str(eval(asked.partition("problem: ")[2].partition("=")[0]))  # the test's own question
    assert one.step(said(f" {right}\n")).reward == 1.0
    assert other.step(said("no idea")).reward < 0.5
