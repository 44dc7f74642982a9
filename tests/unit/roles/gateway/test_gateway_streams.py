"""Clients that leave a stream in the middle: only what they continue from is trained, once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from gateway_world import Running, running, tokenizer, until

from relax_rt.roles.gateway.api import ClosedSession
from relax_rt.roles.gateway.sessions import tokens_until
from relax_rt.roles.rollout.router.core import GenerationRequest

LONG = "word " * 30


def script(prompt: str, wanted: GenerationRequest) -> str:
    return LONG if prompt.endswith("<|user|>go<|end|><|assistant|>") else "fine"


def ask(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def after(messages: list[dict[str, Any]], said: str) -> list[dict[str, Any]]:
    return [*messages, {"role": "assistant", "content": said}, *ask("and?")]


async def part_by_openai(world: Running, key: str, messages: list[Any], *, hold: bool) -> str:
    """What was read of a stream before it was left; hold: it was being made still."""
    async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key=key, max_retries=0) as api:
        if hold:
            world.engine.gate.clear()
        stream = await api.chat.completions.create(model="policy", messages=messages, stream=True)
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            if text:
                break
        if not hold:
            await until(lambda: world.gateway.service.answered)
            # Its end is on its way, and nobody reads it.
            await asyncio.sleep(0.05)
        await stream.close()
    return text


async def part_by_httpx(world: Running, key: str, messages: list[Any], *, hold: bool) -> str:
    if hold:
        world.engine.gate.clear()
    body = {"model": "policy", "messages": messages, "stream": True}
    head = {"Authorization": f"Bearer {key}"}
    url = f"{world.url}/v1/chat/completions"
    async with httpx.AsyncClient() as web, web.stream("POST", url, json=body, headers=head) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and (text := json.loads(line[6:])["choices"][0]["delta"].get("content")):
                if not hold:
                    await until(lambda: world.gateway.service.answered)
                    await asyncio.sleep(0.05)
                return str(text)
    raise AssertionError("nothing was said")


LEAVE = pytest.mark.parametrize("leave", [part_by_openai, part_by_httpx])


async def say(world: Running, key: str, messages: list[Any]) -> str:
    async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key=key, max_retries=0) as api:
        answer = await api.chat.completions.create(model="policy", messages=messages)
        return str(answer.choices[0].message.content)


def trained(closed: ClosedSession) -> list[str]:
    """The text of each answer that is trained, which is each sampled token once."""
    found = []
    for branch in closed.episode.branches:
        for turn in branch.turns:
            if turn.trained:
                assert all(branch.loss_mask[turn.start : turn.end])
                found.append(tokenizer().spell(branch.tokens[turn.start : turn.end]))
    total = sum(sum(branch.loss_mask) for branch in closed.episode.branches)
    assert total == sum(len(tokenizer().encode(text)) for text in found)
    return found


@LEAVE
@pytest.mark.parametrize("hold", [True, False])
async def test_an_abandoned_answer_is_trained_as_far_as_the_episode_continues_it(leave: Any, hold: bool) -> None:
    async with running(script) as world:
        key = world.episode(calls=2)
        text = await leave(world, key, ask("go"), hold=hold)
        assert text and LONG.startswith(text) and text != LONG.strip()
        if hold:
            await until(lambda: world.engine.ended_early)
        world.engine.gate.set()
        # It goes on with less than it was sent: to a word.
        words = text[: len("word wor")] if hold else text
        assert await say(world, key, after(ask("go"), words)) == "fine"
        closed = world.sessions.close("episode-1")
    assert trained(closed) == [words, "fine<|end|>"] and closed.left == 0
    assert [said.message["content"] for said in closed.answers] == [words, "fine"]
    (branch,) = closed.episode.branches
    assert closed.episode.counts.continuation == 1 and closed.episode.counts.drift == 0
    # Token for token what was sampled, with its log-probabilities.
    first = world.engine.orders[0]
    start = len(first.prompt)
    assert branch.logprobs[start : start + len(words)] == pytest.approx([-0.5 - 0.01 * n for n in range(len(words))])


@LEAVE
async def test_an_abandoned_answer_that_is_not_continued_is_dropped_and_counted(leave: Any) -> None:
    async with running(script) as world:
        key = world.episode(calls=1)
        await leave(world, key, ask("go"), hold=True)
        await until(lambda: world.engine.ended_early)
        world.engine.gate.set()
        session = world.sessions.find("episode-1", "")
        await until(lambda: session.left)
        assert await say(world, key, after(ask("go"), "other words")) == "fine", (
            "what was left is no answer that counts"
        )
        closed = world.sessions.close("episode-1")
        assert world.gateway.service.left == 1
    assert trained(closed) == ["fine<|end|>"] and closed.left == 1 and len(closed.answers) == 1


@LEAVE
async def test_a_complete_stream_counts_unless_only_a_part_is_continued(leave: Any) -> None:
    async with running(script) as world:
        key = world.episode()
        await leave(world, key, ask("go"), hold=False)
        assert await say(world, key, ask("something else")) == "fine"
        closed = world.sessions.close("episode-1")
    assert trained(closed) == [f"{LONG}<|end|>", "fine<|end|>"] and closed.left == 0


async def test_a_later_abandoned_answer_is_continued_two_calls_later() -> None:
    async with running(script) as world:
        key = world.episode()
        begun = after(ask("first"), await say(world, key, ask("first")))[:-1] + ask("go")
        text = await part_by_openai(world, key, begun, hold=True)
        await until(lambda: world.engine.ended_early)
        world.engine.gate.set()
        # Something else in between, and then twice the same: the second is a fork, and trains nothing once more.
        assert await say(world, key, ask("aside")) == "fine"
        for _ in range(2):
            assert await say(world, key, after(begun, text)) == "fine"
        closed = world.sessions.close("episode-1")
    assert sorted(trained(closed)) == sorted(["fine<|end|>", text, "fine<|end|>", "fine<|end|>", "fine<|end|>"])
    assert [said.message["content"] for said in closed.answers] == ["fine", text, "fine", "fine", "fine"]
    assert closed.episode.counts.drift == 0


async def test_a_changed_complete_answer_is_changed_history() -> None:
    async with running(script) as world:
        key = world.episode()
        async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key=key, max_retries=0) as api:
            create: Any = api.chat.completions.create
            stream = await create(model="policy", messages=ask("go"), stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            assert text.strip() == LONG.strip()
            await create(model="policy", messages=after(ask("go"), text[:8]))
        closed = world.sessions.close("episode-1")
    assert closed.episode.counts.drift == 1 and trained(closed)[0] == f"{LONG}<|end|>"


def test_tokens_are_counted_to_the_one_that_completes_the_text() -> None:
    spell = tokenizer().spell
    tokens = tokenizer().encode("<think>abc</think>abcde f")
    text = "abcde f"
    full = len(tokens)
    assert tokens_until(tokens, text, "abc", spell) == full - 4
    assert tokens_until(tokens, text, "abcde", spell) == full - 2
    assert tokens_until(tokens, text, text, spell) == full
    assert tokens_until(tokens, text, "b", spell) == tokens_until(tokens, text, "", spell) == 0
    assert tokens_until(tokens, "other", "o", spell) == 0


def test_half_a_character_does_not_complete_one() -> None:
    def spell(tokens: Any) -> str:
        return bytes(tokens).decode(errors="replace")

    tokens = list("a€b".encode())
    assert [tokens_until(tokens, "a€b", words, spell) for words in ("a", "a€", "a€b")] == [1, 4, 5]
