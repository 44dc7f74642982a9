"""Rewards beside an environment's own, and games in which the policy has several seats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from episode_kit import TASK, Count, Engine, factory, numbers, template, tokenizer

from relax_rt.config.loader import load_config
from relax_rt.config.problems import ConfigErrors
from relax_rt.roles.agentic import Chat, Observation, Reply, Step, Task
from relax_rt.roles.agentic.episode import PlayedEpisode
from relax_rt.roles.agentic.interface import EnvironmentFailed
from relax_rt.roles.agentic.loading import Factory
from relax_rt.roles.agentic.player import Player
from relax_rt.roles.agentic.preflight import preflight_environment
from relax_rt.roles.agentic.rewards import KEY, PLACE
from relax_rt.roles.agentic.role import EpisodeCounters, split_games
from relax_rt.roles.agentic.samples import make_sample
from relax_rt.roles.agentic.settings import EnvSettings
from relax_rt.roles.agentic.tokens.template import ChatTemplate
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.rewards.compose import Rewards
from relax_rt.roles.rewards.scoring import Score
from relax_rt.roles.rewards.settings import RewardTable
from relax_rt.roles.rollout.engines.settings import SamplingTable
from relax_rt.roles.training.algorithms.inputs import trajectory
from relax_rt.transport.queue.ledger.messages import Ticket

TICKET = Ticket(group=4, prompt=9, attempt=1, size=2, version=1, lease_s=60.0)
CONFIG = """
[run]
name = "game"
[model]
path = "package:tiny"
[roles.env]
environment = "game.py:Game"
tasks = 100
max_tokens = 400
rewards = [{ name = "length", free = 4, most = 8, weight = 0.1 }, { function = "game.py:style" }]
[reward]
timeout_s = 5
[sampling]
max_new_tokens = 8
[algorithm]
group_size = 4
"""
GAME = """
class Game:
    seats = 1
    async def reset(self, task): return "go"
    async def step(self, reply): ...

def style(completion, answer, turns, reward):
    return {"brief": float(len(completion) < 3), "of_it": reward}

def turnwise(completion, answer, turns):
    said = [turn["text"] for turn in turns if turn["role"] == "assistant"]
    return {"turn_rewards": [float(text == "2") for text in said]}

def wrong(completion, answer):
    raise ValueError(f"no style in {completion}")

def by_words(completion, answer, turns):
    said = [float(turn["text"]) for turn in turns if turn["role"] == "assistant"]
    return {"turn_rewards": said, "total": sum(said) + 100 * float(completion)}
"""


def read(folder: Path, *overrides: str, game: str = GAME) -> RLConfig:
    (folder / "game.py").write_text(game)
    (folder / "roles.toml").write_text(CONFIG)
    found = load_config(folder / "roles.toml", overrides)
    assert isinstance(found, RLConfig)
    return found


@pytest.mark.parametrize(
    ("overrides", "path", "message"),
    [
        (['roles.env.rewards=[{name="lenght"}]'], ("roles", "env", "rewards", 0, "name"), "no reward called 'lenght'"),
        (['roles.env.rewards=[{name="exact", group=true}]'], ("roles", "env", "rewards", 0, "group"), "group"),
        (['roles.env.rewards=[{name="genrm"}]'], ("roles", "env", "rewards", 0, "name"), "not asked about episodes"),
        (['roles.env.rewards=[{name="exact", weight=0}]'], ("roles", "env", "rewards"), "all weights are 0"),
        (['reward.components=[{name="exact"}]'], ("reward",), "have no effect"),
    ],
)
def test_what_cannot_be_added_is_refused_at_its_key(
    tmp_path: Path, overrides: list[str], path: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ConfigErrors) as caught:
        read(tmp_path, *overrides)
    assert any(one.path == path and message in one.message for one in caught.value.problems), caught.value.render()


def looked_at(folder: Path, *overrides: str, game: str = GAME) -> list[tuple[Any, ...]]:
    config = read(folder, *overrides, game=game)
    return [(one.path, one.message) for one in preflight_environment(config, folder, tokenizer(), None)]


def test_they_are_called_before_a_run_on_replies_to_its_first_task(tmp_path: Path) -> None:
    assert looked_at(tmp_path) == []
    ((path, message),) = looked_at(tmp_path, 'roles.env.rewards=[{name="exact"}, {function="game.py:wrong"}]')
    assert path == ("roles", "env", "rewards", 1) and "ValueError: no style in" in message and "game.py:15" in message


def test_a_group_is_whole_games(tmp_path: Path) -> None:
    ((path, message),) = looked_at(tmp_path, game=GAME.replace("seats = 1", "seats = 3"))
    assert path == ("algorithm", "group_size") and "has 3 seats, each a member of the group" in message


def player(made: Factory, words: Callable[[str], str], *rewards: dict[str, Any], scores: Any = None) -> Player:
    return Player(
        factory=made,
        pool=None,
        chat=template(),
        generate=Engine(words).generate,
        settings=EnvSettings(environment="test", rewards=list(rewards), max_tokens=400),  # type: ignore[arg-type]
        sampling=SamplingTable(max_new_tokens=16),
        stop_ids=tokenizer().stop_ids,
        lag=lambda oldest: 0,
        on_tokens=lambda tokens: None,
        rewards=scores,
    )


async def rewarded(folder: Path, *components: dict[str, Any]) -> PlayedEpisode:
    """A count to 3, all right, with rewards that run where they belong."""
    (folder / "game.py").write_text(GAME)
    table = RewardTable.model_validate({"components": list(components)})
    rewards = Rewards(table, folder, path=PLACE, key=KEY)
    await rewards.start()
    try:
        return await player(factory(Count), numbers, *components, scores=rewards.score_one).play("e", TASK, 3)
    finally:
        await rewards.close()


async def test_the_reward_is_the_environments_and_theirs(tmp_path: Path) -> None:
    found = await rewarded(
        tmp_path, {"function": "game.py:style", "weight": 2.0}, {"name": "length", "free": 4, "most": 8}
    )
    # Three right numbers; "3" is brief, and the function was told of the 1.5; six tokens are half of what is too long.
    assert found.parts == {
        "episode": 1.5 + 2 * 2.5 - 0.5, "environment": 1.5,
        "style": 2.5, "style.brief": 1.0, "style.of_it": 1.5, "length": -0.5,
    }  # fmt: skip
    assert found.reward == 6.0 and list(found.rewards.values()) == [0.5, 0.5, 5.0]


async def test_turns_get_theirs_and_a_failure_is_that_of_the_episode(tmp_path: Path) -> None:
    found = await rewarded(tmp_path, {"function": "game.py:turnwise"})
    assert list(found.rewards.values()) == [0.5, 1.5, 0.5] and found.parts["turnwise"] == 1.0
    with pytest.raises(
        EnvironmentFailed, match=r"roles.env.rewards: .*wrong raised ValueError: no style in 3 at .*game.py:15"
    ):
        await rewarded(tmp_path, {"function": "game.py:wrong"})


# --- several conversations

FORKS: dict[str, tuple[list[tuple[str, ...]], dict[str, float]]] = {
    # What is asked, and said before by the policy ("1") and the user; the reward of each number that was said.
    "another begins, then the first goes on": ([("a",), ("b",), ("a", "1", "c")], {"1": 1, "2": 2, "3": 3}),
    "two go on from a shared one": ([("a",), ("a", "1", "b"), ("a", "1", "c")], {"1": 1, "2": 2, "3": 3}),
    "the second is dropped": ([("a",), ("a", "1", "b"), ("a", "1", "b", "x", "c")], {"1": 1, "2": 0, "3": 3}),
}


@pytest.mark.parametrize("name", FORKS)
async def test_turn_rewards_go_to_the_turns_they_are_of_whatever_branches_there_are(tmp_path: Path, name: str) -> None:
    asked, expected = FORKS[name]

    async def plays(task: Task, chat: Chat) -> None:
        for words in asked:
            roles = ("user", "assistant")
            await chat.say([{"role": roles[at % 2], "content": text} for at, text in enumerate(words)])

    (tmp_path / "game.py").write_text(GAME)
    components = [{"function": "game.py:by_words"}]
    rewards = Rewards(RewardTable.model_validate({"components": components}), tmp_path, path=PLACE, key=KEY)
    said = iter("123")
    one = player(factory(lambda: plays, plays=True), lambda prompt: next(said), *components, scores=rewards.score_one)
    one.settings = one.settings.model_copy(update={"drift": "drop"})
    await rewards.start()
    try:
        found = await one.play("e", TASK, 3)
    finally:
        await rewards.close()
    tokens = {reply: str(number) for number, reply in enumerate(found.rewards, 1)}
    # What there is besides goes to the last reply: so does 100 times what it says, the completion.
    assert {tokens[reply]: value for reply, value in found.rewards.items()} == {**expected, "3": 3 + 300}
    sample = make_sample(TICKET, 0, TASK, found, tokenizer=tokenizer(), sampling={}, player="env/0#1")
    credited = trajectory(sample, found.reward)
    words = [tokenizer().decode(sample.tokens[start:end]) for start, end in credited.turns]
    assert words == [number for number, value in expected.items() if value]
    assert credited.turn_rewards == [float(one) + 300 * (one == "3") for one in words]


class Talkative:
    """Begins with an example, and says several things at a time."""

    async def reset(self, task: Task) -> Observation:
        shown = [("system", "be brief"), ("user", "1 + 1"), ("assistant", "2"), ("user", "1 + 2")]
        return Observation(messages=[{"role": role, "content": text} for role, text in shown])

    async def step(self, reply: Reply) -> Step:
        parts = [{"type": "text", "text": "r"}, {"type": "text", "text": "ight"}]
        more = [{"role": "tool", "content": parts}, {"role": "user", "content": "and 2 + 2"}]
        return Step(messages=more, done=reply.text == "4")


THOUGHT = "<think>hm</think>3"


@pytest.mark.parametrize("reasoning", ["keep_reasoning", "strip"])
async def test_turns_are_the_messages_and_replies_of_the_conversation(reasoning: Any) -> None:
    asked: list[Any] = []

    async def score(request: Any) -> Score:
        asked.append(request)
        return Score(0.0, {})

    said = iter([THOUGHT, "4"])
    one = player(factory(Talkative), lambda prompt: next(said), {"function": "game.py:style"}, scores=score)
    one.settings = one.settings.model_copy(update={"reasoning": reasoning})
    one.limits = msgspec.structs.replace(one.limits, max_new_tokens=40)
    one.chat = ChatTemplate(tokenizer(), reasoning_parser="think")
    found = await one.play("e", TASK, 3)
    begin = [("system", "be brief"), ("user", "1 + 1"), ("context", "2"), ("user", "1 + 2")]
    more = [("tool", "right"), ("user", "and 2 + 2"), ("assistant", "4")]
    # Without its thoughts the first reply is another branch's context, as it was sent.
    again = [*begin, ("context", "3")] if reasoning == "strip" else []
    (request,) = asked
    turns = [(turn["role"], turn["text"]) for turn in request.info["turns"]]
    assert turns == [*begin, ("assistant", THOUGHT), *again, *more] and request.completion == "4"
    assert len(found.episode.branches) == (2 if reasoning == "strip" else 1)


# --- seats


class Duel:
    """The two say numbers in turn, each told of what the other said; who says 4 has won."""

    seats = 2

    def __init__(self, first: int = 0) -> None:
        self.seat = first

    async def reset(self, task: Task) -> Observation:
        return Observation(messages=f"player {self.seat}", seat=self.seat)

    async def step(self, reply: Reply) -> Step:
        me, self.seat = self.seat, 1 - self.seat
        if reply.text == "4":
            return Step(reward=1.0, rewards={self.seat: -1.0}, done=True)
        return Step(messages=f"player {self.seat} hears {reply.text}", seat=self.seat, info={"last": float(me)})


def duel(make: Callable[[], Any] = Duel) -> Factory:
    return Factory("test", make, blocking=False, seats=2)


def next_number(prompt: str) -> str:
    heard = [int(word) for word in prompt.replace("<", " ").split() if word.isdigit()]
    return str(heard[-1] + 1 if "hears" in prompt else 1)


async def test_each_seat_has_a_conversation_an_episode_and_a_reward_of_its_own() -> None:
    first, second = await player(duel(), next_number).play_game("e", TASK, 3)
    assert (first.reward, second.reward, first.turns, second.turns) == (-1.0, 1.0, 2, 2)
    for seat, (one, said) in enumerate(((first, ("1", "3")), (second, ("2", "4")))):
        (branch,) = one.episode.branches
        texts = [tokenizer().decode(branch.tokens[turn.start : turn.end]) for turn in branch.turns]
        assert (
            tuple(texts[1::2]) == said and f"player {seat}" in texts[0] and f"player {1 - seat}" not in "".join(texts)
        )


class Cut(Duel):
    """Is cut by itself after the third number."""

    async def step(self, reply: Reply) -> Step:
        step = await super().step(reply)
        step.truncated = reply.text == "3"
        return step


@pytest.mark.parametrize(
    ("make", "max_turns", "ends"),
    [
        (Duel, 8, ("", "")),
        # Seat 0 says 1, seat 1 says 2, and seat 0 has no turn left; begun by seat 1 it is the other way round.
        (Duel, 1, ("turns", "game")),
        (lambda: Duel(1), 1, ("game", "turns")),
        (Cut, 8, ("environment", "environment")),
    ],
)
async def test_a_game_that_is_cut_is_cut_for_all_its_seats(
    make: Callable[[], Any], max_turns: int, ends: tuple[str, str]
) -> None:
    one = player(duel(make), next_number)
    one.limits = msgspec.structs.replace(one.limits, max_turns=max_turns)
    found = await one.play_game("e", TASK, 3)
    assert tuple(seat.truncated for seat in found) == ends
    tally = EpisodeCounters()
    for member, (seat, why) in enumerate(zip(found, ends, strict=True)):
        sample = make_sample(TICKET, member, TASK, seat, tokenizer=tokenizer(), sampling={}, player="env/0#1")
        reason = "length" if why else "stop"
        assert (sample.meta.truncated, sample.meta.finish_reason) == (bool(why), reason)
        assert sample.meta.info.get("truncated_by", "") == why
        tally.add(seat)
    told = tally.record()
    assert told["truncated"] == sum(map(bool, ends))
    assert told["truncated_by"] == {why: ends.count(why) for why in set(ends) if why}


async def test_tokens_that_one_seat_has_used_up_end_the_game_of_the_other() -> None:
    class Wordy(Duel):
        async def step(self, reply: Reply) -> Step:
            step = await super().step(reply)
            step.messages = f"{step.messages} {'and so on ' * 20}" if self.seat else step.messages
            return step

    one = player(duel(Wordy), lambda prompt: "1")
    first, second = await one.play_game("e", TASK, 3)
    assert (first.truncated, second.truncated) == ("game", "tokens")
    assert first.turns == second.turns + 1, "seat 1 was asked again, and had no room for it"


async def test_a_game_names_seats_that_there_are_and_lets_all_of_them_speak() -> None:
    with pytest.raises(EnvironmentFailed, match="in reset: it names seat 2, and the policy has 2"):
        await player(duel(lambda: Duel(2)), next_number).play_game("e", TASK, 3)
    with pytest.raises(EnvironmentFailed, match="seat 1 of the game: it ended before that seat had replied"):
        await player(duel(), lambda prompt: "4").play_game("e", TASK, 3)


def test_members_that_are_wanted_play_together_as_they_would_in_a_whole_group() -> None:
    assert split_games(range(6), 2) == [[0, 1], [2, 3], [4, 5]]
    assert split_games([1, 2, 5], 2) == [[1], [2], [5]] and split_games([1, 2, 5], 1) == [[1], [2], [5]]
