"""The gateway through the real `anthropic` client."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic
from gateway_world import TOKEN, Running, calculator, echo, running, tokenizer

from relax_rt.roles.rollout.router.core import GenerationRequest

TOOL: Any = {
    "name": "add",
    "description": "adds",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}


def client(running: Running, key: str = TOKEN) -> AsyncAnthropic:
    return AsyncAnthropic(base_url=running.url, api_key=key, max_retries=0, timeout=60.0)


async def test_a_tool_result_continues_the_conversation() -> None:
    async with running(calculator) as world, client(world, world.episode()) as api:
        messages: Any = [{"role": "user", "content": "2 and 3?"}]
        first = await api.messages.create(
            model="policy", max_tokens=150, messages=messages, tools=[TOOL], system=[{"type": "text", "text": "Add."}]
        )
        assert first.stop_reason == "tool_use"
        text, call = first.content
        assert text.type == "text" and text.text == "Let me see."
        assert call.type == "tool_use" and call.input == {"a": 2, "b": 3}
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "result 5"}]}
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        second = await api.messages.create(
            model="policy", max_tokens=150, messages=messages, tools=[TOOL], system="Add."
        )
        assert second.stop_reason == "end_turn" and second.content[0].type == "text"
        assert second.content[0].text == "It is 5."
        assert second.usage.cache_read_input_tokens == len(world.engine.made[0].tokens)
        episode = world.sessions.close("episode-1").episode
        assert (episode.counts.continuation, episode.counts.drift) == (1, 0)


async def test_a_failed_tool_result_is_marked_as_an_error() -> None:
    async with running(calculator) as world, client(world, world.episode()) as api:
        messages: Any = [{"role": "user", "content": "2 and 3?"}]
        for failed in (True, False):
            answer = await api.messages.create(model="policy", max_tokens=150, messages=messages, tools=[TOOL])
            use = answer.content[-1].id if answer.content[-1].type == "tool_use" else ""
            result = {"type": "tool_result", "tool_use_id": use, "content": "no such file", "is_error": failed}
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        await api.messages.create(model="policy", max_tokens=150, messages=messages, tools=[TOOL])
        prompt = tokenizer().spell(world.engine.orders[-1].prompt)
        assert prompt.count("<|user|>Error: no such file<|end|>") == prompt.count("<|user|>no such file<|end|>") == 1
        assert world.sessions.close("episode-1").episode.counts.continuation == 2


async def test_a_call_without_the_choice_of_tools_is_in_the_same_conversation() -> None:
    async with running(calculator) as world, client(world, world.episode()) as api:
        messages: Any = [{"role": "user", "content": "2 and 3?"}]
        for kind, stop in (("none", "end_turn"), ("auto", "tool_use")):
            answer = await api.messages.create(
                model="policy", max_tokens=150, messages=messages, tools=[TOOL], tool_choice={"type": kind}
            )
            assert answer.stop_reason == stop
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "And now?"}]
        episode = world.sessions.close("episode-1").episode
        assert (episode.counts.first, episode.counts.continuation, episode.counts.drift) == (1, 1, 0)


async def test_count_tokens_generates_no_answer() -> None:
    async with running(calculator) as world, client(world, world.episode(calls=1)) as api:
        request: Any = {"model": "policy", "messages": [{"role": "user", "content": "2 and 3?"}], "system": "Add."}
        bare = await api.messages.count_tokens(**request)
        counted = await api.messages.count_tokens(**request, tools=[TOOL])
        assert counted.input_tokens > bare.input_tokens and not world.engine.orders
        answer = await api.messages.create(**request, max_tokens=150, tools=[TOOL])
        assert answer.usage.input_tokens == counted.input_tokens == len(world.engine.orders[0].prompt)
        assert world.sessions.close("episode-1").episode.counts.first == 1
    async with running(calculator) as world:
        async with client(world) as api:
            with pytest.raises(anthropic.NotFoundError, match="no model 'claude'"):
                await api.messages.count_tokens(**{**request, "model": "claude"})
        async with client(world, "wrong") as api:
            with pytest.raises(anthropic.AuthenticationError):
                await api.messages.count_tokens(**request)


async def test_a_stream_accumulates_to_the_same_message() -> None:
    async with running(calculator) as world, client(world) as api:
        async with api.messages.stream(
            model="policy", max_tokens=150, messages=[{"role": "user", "content": "2 and 3?"}], tools=[TOOL]
        ) as stream:
            text = "".join([part async for part in stream.text_stream])
            final = await stream.get_final_message()
        assert text == "Let me see." and final.stop_reason == "tool_use"
        assert final.content[-1].type == "tool_use" and final.content[-1].input == {"a": 2, "b": 3}
        assert final.usage.output_tokens == len(world.engine.made[0].tokens)


async def test_reasoning_precedes_text_also_in_a_stream() -> None:
    def thinks(prompt: str, wanted: GenerationRequest) -> str:
        return "<think>hm, hm</think>I know." + " Yes." * 10

    async with running(thinks) as world, client(world) as api:
        messages: Any = [{"role": "user", "content": "?"}]
        plain = await api.messages.create(model="policy", max_tokens=150, messages=messages)
        assert [block.type for block in plain.content] == ["thinking", "text"]
        async with api.messages.stream(model="policy", max_tokens=150, messages=messages) as stream:
            final = await stream.get_final_message()
        assert [block.type for block in final.content] == ["thinking", "text"]
        assert final.content[0].type == "thinking" and final.content[0].thinking == "hm, hm"
        assert final.content[1].type == "text" and final.content[1].text == "I know." + " Yes." * 10


async def test_a_stop_sequence_is_reported() -> None:
    async with running(lambda p, w: "one two STOP three") as world, client(world) as api:
        answer = await api.messages.create(
            model="policy",
            max_tokens=100,
            messages=[{"role": "user", "content": "x"}],
            stop_sequences=["STOP"],
        )
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "STOP")
        assert answer.content[0].type == "text" and answer.content[0].text == "one two "


@pytest.mark.parametrize(("breaks", "why"), [(False, "the engine is gone"), (True, "the gateway failed")])
async def test_an_error_in_mid_stream_is_reported(breaks: bool, why: str) -> None:
    async with running(lambda p, w: "word " * 20) as world, client(world) as api:
        world.engine.breaks, world.engine.fails = breaks, not breaks
        world.engine.gate.clear()
        texts = []
        with pytest.raises(anthropic.APIStatusError, match=why):
            async with api.messages.stream(
                model="policy", max_tokens=150, messages=[{"role": "user", "content": "x"}]
            ) as stream:
                async for text in stream.text_stream:
                    texts.append(text)
                    world.engine.gate.set()
        assert "".join(texts) == "word wor"


async def test_errors_have_this_api_s_form() -> None:
    async with running(echo) as world:
        messages: Any = [{"role": "user", "content": "x"}]
        async with client(world, "wrong") as api:
            with pytest.raises(anthropic.AuthenticationError) as wrong:
                await api.messages.create(model="policy", max_tokens=10, messages=messages)
            assert isinstance(wrong.value.body, dict) and wrong.value.body["error"]["type"] == "authentication_error"
        async with client(world) as api:
            with pytest.raises(anthropic.NotFoundError, match="no model 'claude'"):
                await api.messages.create(model="claude", max_tokens=10, messages=messages)
            with pytest.raises(anthropic.BadRequestError, match="nothing can force it"):
                await api.messages.create(
                    model="policy", max_tokens=10, messages=messages, tools=[TOOL], tool_choice={"type": "any"}
                )
            image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
            with pytest.raises(anthropic.BadRequestError, match="reads text alone"):
                await api.messages.create(
                    model="policy", max_tokens=10, messages=[{"role": "user", "content": [image]}]
                )
            names = [model.id async for model in api.models.list()]
            assert names == ["policy"]
