"""Sessions: owners, leases, nonces, and the end of an episode."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

import openai
import pytest
from gateway_world import RESPONSES_TOOL, TOOL, ask, client, echo, ledger, running, tokenizer, until

from relax_rt.roles.agentic import Task
from relax_rt.roles.agentic.episode import PlayedEpisode
from relax_rt.roles.agentic.program import ProgramResult
from relax_rt.roles.agentic.program_episodes import rewards_of
from relax_rt.roles.agentic.samples import make_sample
from relax_rt.roles.gateway import service
from relax_rt.roles.gateway.access import Caller, Keys
from relax_rt.roles.gateway.api import LEASE_S, Access, ClosedSession, SessionClient, SessionLimits
from relax_rt.roles.gateway.calls import CallError
from relax_rt.roles.gateway.service import AnswerPolicy
from relax_rt.roles.gateway.sessions import PAUSE_S, Sessions
from relax_rt.roles.rollout.router.core import GenerationRequest
from relax_rt.roles.training.algorithms.inputs import trajectory
from relax_rt.transport.queue.ledger.messages import Ticket
from relax_rt.transport.rpc.errors import Refused, StaleEpoch, Unreachable
from relax_rt.transport.rpc.identity import Incarnation

NONE = SessionLimits()
OLD, NEW, OTHER = Incarnation("env/0", 3), Incarnation("env/0", 4), Incarnation("env/1", 3)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def sessions(clock: Callable[[], float], most: int = 8) -> Sessions:
    return Sessions(ledger, tokens=1000, most=most, idle_s=900.0, now=clock)


def test_a_newer_epoch_ends_the_sessions_of_older_ones() -> None:
    found = sessions(Clock())
    mine = found.open("1.0", NONE, "a", OLD)
    assert found.open("1.0", NONE, "a", OLD) is mine
    for nonce, owner in (("b", OTHER), ("a", OTHER), ("a", None)):
        with pytest.raises(Refused, match="open, with other limits or for another"):
            found.open("1.0", NONE, nonce, owner)
    theirs = found.open("2.0", NONE, "c", OTHER)
    first, mine = mine, found.open("1.0", NONE, "b", OLD)
    assert first is not mine and "opened again by env/0#3" in first.ended
    again = found.open("1.0", NONE, "d", NEW)
    assert again is not mine and "env/0's, which was started again" in mine.ended and not theirs.ended
    with pytest.raises(StaleEpoch):
        found.open("3.0", NONE, "e", OLD)
    with pytest.raises(StaleEpoch):
        found.renew(OLD)
    # What the old one left behind, a program or a call that comes late, reaches nothing of the new one.
    with pytest.raises(CallError, match="is not open"):
        found.of_key("1.0", "a")
    with pytest.raises(Refused, match="none of this name and nonce"):
        found.close("1.0", "a")
    found.forget("1.0", "a")
    assert found.of_key("1.0", "d") is again and found.of_key("2.0", "c") is theirs


def test_sessions_lapse_without_renewal_but_not_after_a_pause_of_the_gateway() -> None:
    clock = Clock()
    found = sessions(clock)
    session, free = found.open("1.0", NONE, "a", OLD), found.open("mine", NONE)
    for _ in range(3 * int(LEASE_S)):
        clock.now += 1
        found.renew(OLD)
        found.tick()
    assert not session.ended
    clock.now += 10 * LEASE_S + PAUSE_S
    found.tick()
    assert not session.ended, "renewals that came meanwhile have not been read yet"
    for _ in range(int(LEASE_S) + 2):
        clock.now += 1
        found.tick()
    assert session.ended == "was not renewed by env/0#3" and not free.ended
    clock.now += 901
    found.tick()
    assert free.ended and not len(found)


def test_an_episode_can_be_fetched_until_it_is_forgotten() -> None:
    clock = Clock()
    found = sessions(clock, most=1)
    found.open("1.0", NONE, "a", OLD)
    first = found.close("1.0", "a")
    assert isinstance(first, ClosedSession) and found.close("1.0", "a") is first
    with pytest.raises(Refused, match="1 are open"):
        found.open("2.0", NONE, "b", OLD)
    found.forget("1.0", "a")
    found.open("2.0", NONE, "b", OLD)
    found.close("2.0", "b")
    for _ in range(int(LEASE_S) + 2):
        clock.now += 1
        found.renew(OLD)
        found.tick()
    assert not len(found), "it was never acknowledged"


def test_a_key_is_valid_for_one_opening() -> None:
    keys = Keys("t" * 40)
    key = keys.of_session("1.0", "a-b_c")
    assert keys.check(key) == Caller("1.0", "a-b_c") and keys.of_session("1.0", "a") != key
    assert keys.check(key.replace("a-b_c", "a-b_d")) is None and keys.check(key.replace(".a-b_c", "")) is None


# --- episodes over HTTP


async def test_a_closed_session_has_its_answers_and_exhausted_limit() -> None:
    terms = AnswerPolicy(models=("policy",), new_tokens=200, context=120)
    async with running(echo, terms=terms) as world, client(world, world.episode(calls=2)) as api:
        with pytest.raises(openai.BadRequestError, match="the model takes 120"):
            await api.chat.completions.create(model="policy", messages=ask("x" * 200))
        assert world.sessions.find("episode-1", "").exhausted == "tokens"
        for text in "ab":
            await api.chat.completions.create(model="policy", messages=ask(text), stop=" ")
        with pytest.raises(openai.ConflictError, match="has had its 2 calls"):
            await api.chat.completions.create(model="policy", messages=ask("c"))
        closed = world.sessions.close("episode-1")
    assert [said.message["content"] for said in closed.answers] == ["You", "You"], "a call that was refused counted"
    assert closed.exhausted == "tokens" and not closed.error and not closed.interrupted
    async with running(echo) as world, client(world, world.episode(tokens=60)) as api:
        await api.chat.completions.create(model="policy", messages=ask("hello"))
        with pytest.raises(openai.ConflictError, match="max_tokens is 60"):
            await api.chat.completions.create(model="policy", messages=ask("y" * 60))
        closed = world.sessions.close("episode-1")
    assert closed.exhausted == "tokens" and len(closed.answers) == 1


async def test_answers_are_in_the_order_of_calls_and_choices() -> None:
    # The longer a text, the more pieces it takes.
    texts = ["x" * 90, "x" * 60, "x" * 30, "x", "y" * 90, "z"]
    async with (
        running(lambda p, w: texts[len(world.engine.orders) - 1]) as world,
        client(world, world.episode()) as api,
    ):
        create: Any = api.chat.completions.create
        four = await create(model="policy", messages=ask("four"), n=4, stop="#")
        world.engine.gate.clear()
        both = []
        for text in ("slow", "quick"):
            both.append(asyncio.create_task(create(model="policy", messages=ask(text), stop="#")))
            await until(lambda: len(world.engine.orders) == 4 + len(both))
        world.engine.gate.set()
        slow, quick = await asyncio.gather(*both)
        closed = world.sessions.close("episode-1")
    assert [len(outcome.tokens) - 1 for outcome in world.engine.made] == [1, 30, 60, 90, 1, 90]
    answers = [(four.id, n, choice.message.content) for n, choice in enumerate(four.choices)]
    answers += [(one.id, 0, one.choices[0].message.content) for one in (slow, quick)]
    assert [(said.response, said.choice, said.message["content"]) for said in closed.answers] == answers
    assert [text for *_, text in answers] == texts
    assert tuple(said.id for said in closed.answers) == closed.episode.replies


@pytest.mark.parametrize("drift", ["fork", "drop"])
@pytest.mark.parametrize("strip", [False, True])
@pytest.mark.parametrize("cut", [(1, 2), (1,), (2,), (2, 3)])
async def test_a_cut_answer_is_recognised_in_its_place_only(cut: tuple[int, ...], strip: bool, drift: Any) -> None:
    """An agent that stops before what it observes, and does the same again."""
    said = [f"Action: look{chr(10) + 'Observation: made up' if turn in cut else ''}" for turn in (1, 2, 3)]
    async with running(lambda p, w: said[len(world.engine.orders) - 1]) as world, client(world, world.episode()) as api:
        book = world.sessions.find("episode-1", "")._ledger
        book._drift, book._reasoning = drift, "strip" if strip else "keep_reasoning"
        talk = ask("go")
        for turn in (1, 2, 3):
            answer = await api.chat.completions.create(model="policy", messages=talk, stop=["\nObservation:"])
            assert answer.choices[0].message.content == "Action: look"
            talk += [{"role": "assistant", "content": "Action: look"}, *ask(f"Observation: {turn}")]
        closed = world.sessions.close("episode-1")
    counts = closed.episode.counts
    assert (counts.first, counts.continuation, counts.drift, counts.dropped_tokens) == (1, 2, 0, 0)
    (branch,) = closed.episode.branches
    told = [f"Action: look{chr(10) + 'Observation:' if turn in cut else '<|end|>'}" for turn in (1, 2, 3)]
    trained = [tokenizer().spell(branch.tokens[turn.start : turn.end]) for turn in closed.episode.trained]
    assert trained == told
    # What is between them is the user's words and nothing else: nobody said what was cut off.
    text = "".join(
        f"<|user|>{words}<|end|><|assistant|>{one}{'' if one.endswith('<|end|>') else '<|end|>'}"
        for words, one in zip(("go", "Observation: 1", "Observation: 2"), told, strict=True)
    )
    assert tokenizer().spell(branch.tokens) == text.removesuffix("<|end|>" if 3 in cut else "")


@pytest.mark.parametrize("drift", ["fork", "realign", "drop"])
async def test_answers_dropped_by_changed_history_are_reported(drift: Any) -> None:
    said = iter("1234")
    async with running(lambda p, w: next(said)) as world, client(world, world.episode()) as api:
        world.sessions.find("episode-1", "")._ledger._drift = drift
        talk = ask("a")
        for text in "bc":
            answer = await api.chat.completions.create(model="policy", messages=talk)
            talk += [{"role": "assistant", "content": answer.choices[0].message.content}, *ask(text)]
        # It puts its second answer in other words.
        talk[3] = {"role": "assistant", "content": "In short: 2"}
        await api.chat.completions.create(model="policy", messages=talk)
        closed = world.sessions.close("episode-1")
    assert [one.message["content"] for one in closed.answers] == ["1", "2", "3"] and closed.episode.counts.drift
    assert len(closed.episode.trained) == (3 if drift == "fork" else 2)
    rewards = rewards_of(ProgramResult(rewards=(0.25, 0.5, 1.0), reward=2.0), closed.answers)
    played = PlayedEpisode(
        episode=closed.episode, rewards=rewards, states={}, truncated="", turns=3, cut=0, info={}
    )  # fmt: skip
    ticket = Ticket(group=4, prompt=9, attempt=1, size=2, version=1, lease_s=60.0)
    task = Task(index=0, item="train-0", split="train", seed=7)
    sample = make_sample(ticket, 0, task, played, tokenizer=tokenizer(), sampling={}, player="env/0#1")
    credit = trajectory(sample, played.reward).turn_rewards
    assert credit == ([0.25, 0.5, 3.0] if drift == "fork" else [0.75, 3.0])


async def test_the_runtime_s_error_is_kept_until_a_call_is_answered() -> None:
    async with running(lambda p, w: "word " * 20) as world, client(world, world.episode()) as api:
        world.engine.fails = True
        with pytest.raises(openai.InternalServerError):
            await api.chat.completions.create(model="policy", messages=ask("x"), stop="zzz")
        assert "the engine is gone" in world.sessions.find("episode-1", "").error
        world.engine.fails = False
        await api.chat.completions.create(model="policy", messages=ask("x"))
        assert not world.sessions.close("episode-1").error


async def test_a_session_limits_how_it_is_sampled() -> None:
    orders: list[GenerationRequest] = []

    def script(prompt: str, wanted: GenerationRequest) -> str:
        orders.append(wanted)
        return "yes"

    async with running(script) as world:
        world.gateway.service._lag = lambda version: {3: 2}[version]
        seeds = []
        for name, seed in (("a", 5), ("b", 5), ("c", 6)):
            limits = SessionLimits(seed=seed, temperature=0.5, weights="episode")
            world.sessions.open(name, limits)
            async with client(world, world.gateway.keys.of_session(name)) as api:
                for _ in range(2):
                    await api.chat.completions.create(model="policy", messages=ask("go"))
                with pytest.raises(openai.BadRequestError, match=r"at 0\.5"):
                    await api.chat.completions.create(model="policy", messages=ask("go"), temperature=1.0)
            seeds.append([order.seed for order in orders[-2:]])
            assert [order.temperature for order in orders[-2:]] == [0.5, 0.5]
            assert [order.lag for order in orders[-2:]] == [0, 2], "the second may be as old as the first"
    assert seeds[0] == seeds[1] != seeds[2] and seeds[0][0] != seeds[0][1]


async def test_an_undelivered_answer_is_neither_trained_nor_counted() -> None:
    async with running(lambda p, w: "x" * 150, send_s=1.0) as world:
        key = world.episode(calls=1)
        session = world.sessions.find("episode-1", "")
        host, port = world.url.removeprefix("http://").split(":")
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 10)
            deaf.setblocking(False)
            await asyncio.get_running_loop().sock_connect(deaf, (host, int(port)))
            body = json.dumps({"model": "policy", "messages": ask("go"), "n": 40, "logprobs": True})
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
            request = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
            await asyncio.get_running_loop().sock_sendall(deaf, request)
            await until(lambda: session.answered)
            await until(lambda: not session.answered)
        async with client(world, key) as api:
            await api.chat.completions.create(model="policy", messages=ask("go"))
        closed = world.sessions.close("episode-1")
    assert len(closed.answers) == 1 and closed.episode.counts.abandoned == 1


async def test_long_conversations_are_rendered_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "LONG_BYTES", 100)
    threads: list[bool] = []
    plan = service.Service._plan

    def planned(*args: Any) -> Any:
        try:
            asyncio.get_running_loop()
            threads.append(False)
        except RuntimeError:
            threads.append(True)
        return plan(*args)

    monkeypatch.setattr(service.Service, "_plan", planned)
    async with running(echo) as world, client(world, world.episode()) as api:
        texts = ["short", *(f"{n}" * 60 for n in range(4))]
        answers = await asyncio.gather(
            *(api.chat.completions.create(model="policy", messages=ask(text)) for text in texts)
        )
        assert [a.choices[0].message.content for a in answers] == [f"You said {text}." for text in texts]
        closed = world.sessions.close("episode-1")
    assert sorted(threads)[:1] == [False] and threads.count(True) >= 4
    made = sorted(tuple(outcome.tokens) for outcome in world.engine.made)
    trained = sorted(
        tuple(branch.tokens[turn.start : turn.end])
        for branch in closed.episode.branches
        for turn in branch.turns
        if turn.trained
    )
    assert trained == made


async def test_instructions_belong_to_their_call_alone() -> None:
    def prompt(text: str, wanted: GenerationRequest) -> str:
        return str(text.count("<|system|>"))

    async with running(prompt) as world, client(world) as api:
        first = await api.responses.create(model="policy", input="a", instructions="be brief")
        second = await api.responses.create(model="policy", input="b", previous_response_id=first.id)
        third = await api.responses.create(
            model="policy", input="c", previous_response_id=second.id, instructions="be long"
        )
    assert (first.output_text, second.output_text, third.output_text) == ("1", "0", "1")
    asked = tokenizer().spell(world.engine.orders[1].prompt)
    assert "be brief" not in asked and "<|user|>a<|end|>" in asked and "<|user|>b<|end|>" in asked


async def test_sequential_tool_calls_are_refused() -> None:
    async with running(echo) as world, client(world) as api:
        with pytest.raises(openai.BadRequestError, match="parallel_tool_calls"):
            await api.chat.completions.create(
                model="policy", messages=ask("x"), tools=[TOOL], parallel_tool_calls=False
            )
        with pytest.raises(openai.BadRequestError, match="parallel_tool_calls"):
            await api.responses.create(model="policy", input="x", tools=[RESPONSES_TOOL], parallel_tool_calls=False)
        await api.chat.completions.create(model="policy", messages=ask("x"), parallel_tool_calls=True)


# --- from the other end


class Far:
    """A gateway as a role sees it: it may die, and another is there then."""

    def __init__(self) -> None:
        self.epoch, self.down, self.newer = 1, False, False
        self.calls: list[tuple[str, ...]] = []
        self.renewed = 0

    async def open(self, session: str, limits: SessionLimits, nonce: str, owner: Incarnation) -> Access:
        self.calls.append(("open", session, nonce, str(owner)))
        return Access("url", "key", f"gateway/0#{self.epoch}")

    async def renew(self, owner: Incarnation) -> str:
        self.renewed += 1
        if self.down:
            raise Unreachable("gateway/0")
        if self.newer:
            raise StaleEpoch("env/0")
        return f"gateway/0#{self.epoch}"

    async def close(self, session: str, nonce: str) -> ClosedSession:
        self.calls.append(("close", session, nonce))
        raise Unreachable("gateway/0")

    async def forget(self, session: str, nonce: str) -> None:
        self.calls.append(("forget", session, nonce))


class Ctx:
    who = OLD

    def __init__(self, far: Far) -> None:
        self.far = far

    def actor(self, name: str, api: Any, timeout_s: float) -> Any:
        return self.far


async def test_a_client_notices_a_new_gateway_and_a_newer_epoch_of_its_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RENEW_S", "RETRY_S"):
        monkeypatch.setattr(f"relax_rt.roles.gateway.api.{name}", 0.005)
    far = Far()
    async with SessionClient(Ctx(far), "gateway/0") as lessee:  # type: ignore[arg-type]
        async with lessee.session("1.0", NONE) as first, lessee.session("1.1", NONE) as second:
            assert far.calls[0][2] != far.calls[1][2] and far.calls[0][3] == "env/0#3"
            far.down = True
            await until(lambda: far.renewed > 3)
            assert not first.gone.done(), "it may come back"
            far.down, far.epoch = False, 2
            await until(lambda: first.gone.done() and second.gone.done())
            assert "now it is gateway/0#2" in str(first.gone.exception())
        async with lessee.session("1.2", NONE) as third:
            at = far.renewed
            await until(lambda: far.renewed > at + 3)
            assert not third.gone.done() and not lessee.fenced.done()
        far.newer = True
        await until(lambda: lessee.fenced.done())
        assert isinstance(lessee.fenced.exception(), StaleEpoch)
    opened = {(name, nonce) for what, name, nonce, *_ in far.calls if what == "open"}
    assert opened == {(name, nonce) for what, name, nonce, *_ in far.calls if what == "forget"}
