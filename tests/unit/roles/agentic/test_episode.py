"""One episode: turns, rewards, ends."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
from episode_kit import TASK, Count, Engine, factory, limits, numbers, talk, tokenizer

from relax_rt.roles.agentic import Chat, Environment, Observation, Reply, Step, Task
from relax_rt.roles.agentic.episode import EpisodeChat, PlayedEpisode, play, turn_seed
from relax_rt.roles.agentic.interface import EnvironmentFailed, EnvironmentStuck, EpisodeLost, GenerationFailed
from relax_rt.roles.agentic.samples import make_sample, new_sample, produced_record
from relax_rt.roles.rollout.engines.routing import RoutingShape
from relax_rt.roles.rollout.router import GenerationRequest, NotGenerated, Outcome, RouterEnded, RouterFull
from relax_rt.roles.training.algorithms.inputs import trajectory
from relax_rt.transport.queue.ledger.messages import Ticket
from relax_rt.transport.rpc.errors import Refused, RelaxError

TICKET = Ticket(group=4, prompt=9, attempt=1, size=2, version=1, lease_s=60.0)


async def played(environment: Any, said: EpisodeChat, **changes: Any) -> PlayedEpisode:
    return await play(factory(lambda: environment), environment, TASK, said, limits(**changes))


def sample_of(episode: PlayedEpisode) -> Any:
    sampling: dict[str, float | int | str] = {"temperature": 1.0}
    return make_sample(TICKET, 1, TASK, episode, tokenizer=tokenizer(), sampling=sampling, player="env/0#1")


async def test_what_is_trained_is_what_was_sampled_and_each_turn_has_its_reward() -> None:
    engine, game = Engine(lambda prompt: "1" if "next" not in prompt else "no"), Count()
    found = await played(game, talk(engine.generate))
    assert (found.turns, found.truncated, found.reward, game.closed) == (3, "", 0.5, 1)
    sample = sample_of(found)
    said = [token for tokens, _ in engine.said for token in tokens]
    assert sample.tokens[sample.loss_mask != 0].tolist() == said
    logprobs = np.array([value for _, values in engine.said for value in values], np.float32)
    assert np.array_equal(sample.behaviour_logprobs[sample.loss_mask != 0], logprobs)
    assert not sample.behaviour_logprobs[sample.loss_mask == 0].any()
    # Each prompt is the sample up to there: nothing was tokenised anew.
    for wanted in engine.asked:
        assert tuple(sample.tokens[: len(wanted.prompt)].tolist()) == wanted.prompt
    assert sample.meta.info == {"turn_rewards": [0.5, 0.0, 0.0], "turn_states": ["0", "1", "2"]}
    one = trajectory(sample, sample.reward)
    assert [sample.tokens[start:end].tolist() for start, end in one.turns] == [tokens for tokens, _ in engine.said]
    assert new_sample(sample).columns["reward"] == np.float32(0.5) and new_sample(sample).versions == sample.versions
    assert produced_record("env/0", sample)["samples"][0][0] == "4.1"
    assert found.info == {"at": 4}


async def test_replies_have_seeds_of_their_own_that_a_repetition_has_again() -> None:
    engine = Engine(numbers)
    for _ in range(2):
        await played(Count(), talk(engine.generate))
    seeds = [wanted.seed for wanted in engine.asked]
    assert seeds[:3] == seeds[3:] and len(set(seeds)) == 3
    assert seeds[0] == turn_seed(3, 1) and all(0 <= seed < 1 << 63 for seed in seeds)


@pytest.mark.parametrize(("max_turns", "max_tokens", "why"), [(2, 400, "turns"), (8, 40, "tokens")])
async def test_an_episode_that_is_cut_keeps_what_it_has_and_says_so(max_turns: int, max_tokens: int, why: str) -> None:
    engine, game = Engine(numbers), Count(5)
    found = await played(game, talk(engine.generate, max_tokens, max_turns=max_turns))
    assert found.truncated == why and 1 <= found.turns == len(engine.said) < 5
    assert found.reward == 0.5 * found.turns and game.closed == 1
    sample = sample_of(found)
    assert sample.meta.truncated and sample.meta.finish_reason == "length" and len(sample.tokens) <= max_tokens


async def test_a_reply_that_is_cut_is_no_end_of_the_episode() -> None:
    engine = Engine(lambda prompt: "1 and so on and so on")
    found = await played(Count(2), talk(engine.generate, max_new_tokens=5), max_new_tokens=5)
    assert (found.cut, found.turns, found.truncated) == (2, 2, "")
    assert all(len(tokens) == 5 for tokens, _ in engine.said)


class Bad(Environment):
    def __init__(self, what: str) -> None:
        self.what, self.closed = what, False

    async def reset(self, task: Task) -> Observation:
        if self.what == "sleeps":
            await asyncio.sleep(60)
        return Observation(messages="go")

    async def step(self, reply: Reply) -> Step:
        match self.what:
            case "raises":
                raise KeyError("board")
            case "nan":
                return Step(reward=float("nan"))
            case "no messages":
                return Step(messages=None)  # type: ignore[arg-type]
            case "words for numbers":
                return Step(done=True, info={"won": "yes"})  # type: ignore[dict-item]
            case "a state that is no text":
                return Step(state=7)  # type: ignore[arg-type]
            case "times out itself":
                raise TimeoutError("its own")
        return {"reward": 1}  # type: ignore[return-value]

    async def close(self) -> None:
        self.closed = True
        raise OSError("too late")


@pytest.mark.parametrize(
    ("what", "error", "why"),
    [
        ("raises", EnvironmentFailed, r"in step 1.*KeyError: 'board' at .*test_episode.py:\d+"),
        ("nan", EnvironmentFailed, "in step 1.*must be finite"),
        ("no messages", EnvironmentFailed, r"in step 1.*its messages"),
        ("words for numbers", EnvironmentFailed, r"in step 1.*its info"),
        ("a state that is no text", EnvironmentFailed, r"in step 1.*its state"),
        ("times out itself", EnvironmentFailed, "TimeoutError: its own"),
        ("returns a dict", EnvironmentFailed, "which is no Step"),
        ("sleeps", EnvironmentStuck, "in reset.*did not return within 0.5 s"),
    ],
)
async def test_an_environment_that_fails_fails_its_episode_and_is_named(what: str, error: type, why: str) -> None:
    game = Bad(what)
    with pytest.raises(error, match=why):
        await played(game, talk(Engine(numbers).generate), turn_timeout_s=0.5)
    assert game.closed


async def test_tokens_that_do_not_come_are_not_the_environments_fault() -> None:
    async def refuse(wanted: GenerationRequest) -> Outcome:
        raise RelaxError("a sequence is late", why="no engine")

    async def never(wanted: GenerationRequest) -> Outcome:
        await asyncio.sleep(60)
        raise AssertionError

    with pytest.raises(EpisodeLost, match="a sequence is late"):
        await played(Count(), talk(refuse))
    with pytest.raises(EpisodeLost, match=r"waits for tokens of reply 1.*not over within 0.5 s"):
        await played(Count(), talk(never, episode_timeout_s=0.5), episode_timeout_s=0.5)


async def test_an_episode_may_be_a_function() -> None:
    async def duel(task: Task, chat: Chat) -> float:
        said = await chat.say([{"role": "user", "content": "first"}])
        chat.reward(0.25)
        # Another conversation: a branch.
        other = await chat.say([{"role": "user", "content": "second"}])
        messages = [{"role": "user", "content": "second"}, other.message, {"role": "user", "content": "third"}]
        await chat.say(messages)
        return float(said.text == "first")

    engine = Engine(lambda prompt: prompt.split("<|user|>")[-1].split("<|end|>")[0])
    found = await play(factory(lambda: duel, plays=True), duel, TASK, talk(engine.generate), limits())
    assert found.reward == 1.25 and found.turns == 3 and len(found.episode.branches) == 2
    sample = sample_of(found)
    assert sample.meta.branches == [(0, len(found.episode.branches[0].tokens)), (*sample.meta.branches[1],)]
    assert sample.tokens[sample.loss_mask != 0].tolist() == [t for tokens, _ in engine.said for t in tokens]
    assert sample.meta.info["turn_rewards"] == [0.25, 0.0, 1.0] and "turn_states" not in sample.meta.info
    assert len(trajectory(sample, 1.0).turns) == 3


async def test_a_function_that_is_cut_off_or_fails() -> None:
    async def talks_on(task: Task, chat: Chat) -> float:
        while True:
            await chat.say([{"role": "user", "content": "x"}])
            chat.reward(0.5)

    async def fails(task: Task, chat: Chat) -> float:
        await chat.say([{"role": "user", "content": "x"}])
        raise ZeroDivisionError

    async def says_nothing(task: Task, chat: Chat) -> None:
        return None

    said = talk(Engine(numbers).generate, max_turns=2)
    found = await play(factory(lambda: talks_on, plays=True), talks_on, TASK, said, limits())
    assert found.truncated == "turns" and found.reward == 1.0
    for function, why in ((fails, "ZeroDivisionError"), (says_nothing, "before the policy had replied")):
        with pytest.raises(EnvironmentFailed, match=why):
            said = talk(Engine(numbers).generate)
            await play(factory(lambda f=function: f, plays=True), function, TASK, said, limits())


async def test_a_later_reply_may_come_from_weights_as_old_as_the_first() -> None:
    engine = Engine(numbers)
    asked: list[int] = []

    def lag(oldest: int) -> int:
        asked.append(oldest)
        return 2 if oldest else 0

    said = talk(engine.generate)
    said._lag = lag
    engine.version = 5
    await played(Count(), said)
    assert asked == [0, 5, 5] and [wanted.lag for wanted in engine.asked] == [0, 2, 2]
    assert len({wanted.session for wanted in engine.asked}) == 1


async def test_a_thousand_episodes_at_once() -> None:
    engine = Engine(numbers)

    async def slow(wanted: GenerationRequest) -> Outcome:
        await asyncio.sleep(0.001 * (wanted.seed % 7))
        return await engine.generate(wanted)

    found = await asyncio.gather(*(played(Count(), talk(slow)) for _ in range(1000)))
    assert [one.reward for one in found] == [1.5] * 1000 and len(engine.said) == 3000


def failing(error: Exception) -> Any:
    async def generate(wanted: GenerationRequest) -> Outcome:
        raise error

    return generate


def not_generated(kind: Any, *, slow: bool = False) -> NotGenerated:
    error = NotGenerated(f"a sequence is {kind}", why="so it is")
    error.outcome = Outcome(kind=kind, why="so it is", slow=slow)
    return error


ENDED = RouterEnded("a request to the router", why="its job failed")
TROUBLE: list[tuple[Exception, type[Exception]]] = [
    (not_generated("late"), EpisodeLost),
    (not_generated("cancelled"), EpisodeLost),
    (not_generated("late", slow=True), GenerationFailed),
    (not_generated("failed"), GenerationFailed),
    (not_generated("refused"), GenerationFailed),
    (Refused("a request", why="no engine samples with that"), GenerationFailed),
    (ENDED, RouterEnded),
]


@pytest.mark.parametrize("how", ["lets it pass", "goes on without", "raises its own"])
@pytest.mark.parametrize(("error", "expected"), TROUBLE)
async def test_trouble_with_the_engines_is_named_and_no_environment_blamed(
    error: Exception, expected: type[Exception], how: str
) -> None:
    async def plays(task: Task, chat: Chat) -> float:
        try:
            await chat.say([{"role": "user", "content": "x"}])
        except RelaxError:
            if how == "lets it pass":
                raise
            if how == "raises its own":
                raise ValueError("the model is gone") from None
        return 1.0

    with pytest.raises(RelaxError) as found:
        await play(factory(lambda: plays, plays=True), plays, TASK, talk(failing(error)), limits())
    assert type(found.value) is expected
    assert found.value is error or "reply 1" in str(found.value)
    game = Count()
    with pytest.raises(RelaxError) as found:
        await played(game, talk(failing(error)))
    assert type(found.value) is expected and game.closed == 1


async def test_a_router_without_room_is_asked_again() -> None:
    engine, full = Engine(numbers), [RouterFull("a request", why="8192 are at hand")] * 2

    async def generate(wanted: GenerationRequest) -> Outcome:
        if full:
            raise full.pop()
        return await engine.generate(wanted)

    assert (await played(Count(), talk(generate))).reward == 1.5
    never = failing(RouterFull("a request", why="8192 are at hand"))
    with pytest.raises(EpisodeLost, match="8192 are at hand"):
        await played(Count(), talk(never, episode_timeout_s=0.15))


async def test_calls_beside_each_other_end_with_the_episode() -> None:
    engine, cancelled = Engine(numbers), []

    async def slow(wanted: GenerationRequest) -> Outcome:
        if "slow" in tokenizer().spell(wanted.prompt):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(wanted)
                raise
        return await engine.generate(wanted)

    def ask(chat: Chat, words: str) -> Any:
        return chat.say([{"role": "user", "content": words}])

    async def gathers(task: Task, chat: Chat) -> float:
        await ask(chat, "a")
        await asyncio.gather(ask(chat, "slow"), ask(chat, "b"), ask(chat, "c"))
        raise AssertionError

    async def groups(task: Task, chat: Chat) -> float:
        await ask(chat, "a")
        async with asyncio.TaskGroup() as group:
            for words in ("slow", "b", "c"):
                group.create_task(ask(chat, words))
        raise AssertionError

    for function in (gathers, groups):
        said = talk(slow, max_turns=3)
        found = await play(factory(lambda f=function: f, plays=True), function, TASK, said, limits())
        assert found.truncated == "turns" and len(cancelled) == 1 and not said._open_calls
        # What came is trained; what was open is not, and holds nothing.
        assert found.episode.counts.abandoned == 1 and len(found.episode.branches) == 2
        cancelled.clear()


async def test_an_error_beside_an_end_is_still_an_error() -> None:
    async def plays(task: Task, chat: Chat) -> float:
        async def fails() -> None:
            raise KeyError("board")

        await chat.say([{"role": "user", "content": "x"}])
        async with asyncio.TaskGroup() as group:
            group.create_task(chat.say([{"role": "user", "content": "y"}]))
            group.create_task(fails())
        return 1.0

    with pytest.raises(EnvironmentFailed, match="ExceptionGroup"):
        said = talk(Engine(numbers).generate, max_turns=1)
        await play(factory(lambda: plays, plays=True), plays, TASK, said, limits())


async def test_replies_are_named_and_rewarded_by_name() -> None:
    async def plays(task: Task, chat: Chat) -> float:
        messages = [{"role": "user", "content": "same"}]
        one, other = await chat.say(messages), await chat.say(messages)
        assert one.text == other.text and one.id != other.id
        more = [*messages, one.message, {"role": "user", "content": "go on"}]
        last = await chat.say(more, previous=one)
        chat.reward(0.25, one)
        chat.reward(0.5, other.id)
        with pytest.raises(ValueError, match="reply 's-77', which this episode does not have"):
            chat.reward(1.0, "s-77")
        assert last.id not in (one.id, other.id)
        return 1.0

    engine = Engine(lambda prompt: "same")
    found = await play(factory(lambda: plays, plays=True), plays, TASK, talk(engine.generate), limits())
    sample = sample_of(found)
    # The last went on from the first, not from the newest: they lie 2 | 1 3, and came 1 2 3.
    assert sample.meta.info["turn_rewards"] == [0.5, 0.25, 1.0] and sample.meta.turn_order == [1, 0, 2]
    assert trajectory(sample, 1.75).turn_rewards == [0.25, 0.5, 1.0]


async def test_the_reward_of_a_reply_that_is_not_trained_goes_to_the_one_before() -> None:
    async def plays(task: Task, chat: Chat) -> None:
        first = await chat.say([{"role": "user", "content": "a"}])
        messages = [{"role": "user", "content": "a"}, first.message, {"role": "user", "content": "b"}]
        second = await chat.say(messages)
        chat.reward(0.5)
        # History is changed behind the first: the second is dropped.
        changed = [*messages, {**second.message, "content": "never said"}, {"role": "user", "content": "c"}]
        await chat.say(changed)
        chat.reward(0.125)

    said = talk(Engine(numbers).generate)
    said.ledger._drift = "drop"
    found = await play(factory(lambda: plays, plays=True), plays, TASK, said, limits())
    sample = sample_of(found)
    assert found.episode.counts.dropped_tokens and sample.meta.info["turn_rewards"] == [0.5, 0.125]
    assert sample.reward == 0.625


class Cut(Count):
    async def step(self, reply: Reply) -> Step:
        step = await super().step(reply)
        step.truncated = self.at == 3
        return step


async def test_an_episode_that_its_environment_cut_is_marked_as_cut() -> None:
    engine = Engine(numbers)
    found = await played(Cut(), talk(engine.generate))
    assert (found.turns, found.truncated, found.reward) == (2, "environment", 1.0)
    sample = sample_of(found)
    assert sample.meta.truncated and sample.meta.finish_reason == "length"


async def test_routing_rows_of_all_branches() -> None:
    shape = RoutingShape(layers=1, chosen=2)
    engine = Engine(lambda prompt: "b")

    async def routed(wanted: GenerationRequest) -> Outcome:
        assert wanted.routing
        made = await engine.generate(wanted)
        number = len(engine.said)
        rows = np.full((len(made.tokens), 2), number, "<i2").tobytes()
        prompt = np.full((len(wanted.prompt) - 1, 2), 10 * number, "<i2").tobytes()
        return msgspec.structs.replace(made, routing=rows, prompt_routing=prompt)

    async def plays(task: Task, chat: Chat) -> float:
        await chat.say([{"role": "user", "content": "a"}])
        await chat.say([{"role": "user", "content": "c"}])
        return 1.0

    said = talk(routed)
    said._sampling = msgspec.structs.replace(said._sampling, routing=True)
    found = await play(factory(lambda: plays, plays=True), plays, TASK, said, limits())
    sampling: dict[str, float | int | str] = {}
    sample = make_sample(TICKET, 1, TASK, found, tokenizer=tokenizer(), sampling=sampling, player="e", routing=shape)
    # <|user|> a <|end|> <|assistant|> b <|end|>: three positions of the prompt, then where b and the end came from.
    assert sample.routing is not None and sample.routing.shape == (11, 1, 2)
    assert sample.routing[:, 0, 0].tolist() == [10] * 3 + [1] * 2 + [-1] + [20] * 3 + [2] * 2
    assert new_sample(sample).columns["routing"] is sample.routing
    with pytest.raises(Refused, match=r"branch 0 of sample 4\.1: 0 bytes of routing rows for"):
        found = await play(factory(lambda: plays, plays=True), plays, TASK, talk(engine.generate), limits())
        make_sample(TICKET, 1, TASK, found, tokenizer=tokenizer(), sampling=sampling, player="e", routing=shape)
