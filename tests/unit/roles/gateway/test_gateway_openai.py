"""The gateway through the real `openai` client: Chat Completions, Completions and Responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import openai
import pytest
from gateway_world import (
    RESPONSES_TOOL,
    TEMPLATE,
    TOKEN,
    TOOL,
    ask,
    calculator,
    client,
    echo,
    running,
    tokenizer,
    until,
)

from relax_rt.roles.agentic.tokens.template import ChatTemplate
from relax_rt.roles.gateway.service import AnswerPolicy
from relax_rt.roles.models.tokenizer import ChatTokenizer
from relax_rt.roles.rollout.router.core import GenerationRequest


async def test_a_chat_completion_is_what_was_sampled_and_the_ledger_has_it() -> None:
    async with running(echo) as world, client(world, world.episode()) as api:
        raw = await api.chat.completions.with_raw_response.create(model="policy", messages=ask("hello"))
        answer = raw.parse()
        assert answer.choices[0].message.content == "You said hello."
        assert answer.choices[0].finish_reason == "stop" and answer.choices[0].message.tool_calls is None
        assert raw.headers["x-relax-policy-version"] == "3" and raw.headers["x-relax-session"] == "episode-1"
        (made,) = world.engine.made
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(made.tokens)
        assert answer.usage.prompt_tokens == len(world.engine.orders[0].prompt)
        episode = world.sessions.close("episode-1").episode
        (branch,) = episode.branches
        sampled = [token for token, mask in zip(branch.tokens, branch.loss_mask, strict=True) if mask]
        assert sampled == made.tokens
        assert [p for p, mask in zip(branch.logprobs, branch.loss_mask, strict=True) if mask] == made.logprobs


AS_JSON = "{{ '<tool_call>' + {'name': c.function.name, 'arguments': c.function.arguments} | tojson + '</tool_call>' }}"
AS_TEXT = "{{ '<call>' + c.function.name + '\\n```json\\n' + c.function.arguments + '\\n```' }}"


@pytest.mark.parametrize(
    "source",
    [
        TEMPLATE,
        # Arguments as text, and calls where there is no content alone, as templates of DeepSeek have it.
        TEMPLATE.replace(AS_JSON, AS_TEXT),
        TEMPLATE.replace(AS_JSON, "{{ '<call>' + c.function.name + c.function.arguments if not m.content }}"),
        # One call a turn, whose name and arguments stand in the template's own form.
        TEMPLATE.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]").replace(AS_JSON, AS_TEXT),
    ],
)
async def test_turns_continue_after_the_sampled_tokens_also_after_a_tool(source: str) -> None:
    chat = ChatTemplate(tokenizer(), template=source, tool_parser="hermes", reasoning_parser="think")
    async with running(calculator, chat=chat) as world, client(world, world.episode()) as api:
        messages = ask("2 and 3?")
        first = await api.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        said = first.choices[0]
        assert said.finish_reason == "tool_calls" and said.message.tool_calls is not None
        (call,) = said.message.tool_calls
        assert call.type == "function"
        assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 2, "b": 3}
        messages += [said.message.model_dump(exclude_none=True)]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "result 5"}]
        second = await api.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        assert second.choices[0].message.content == "It is 5."
        episode = world.sessions.close("episode-1").episode
        assert (episode.counts.first, episode.counts.continuation, episode.counts.drift) == (1, 1, 0)
        (branch,) = episode.branches
        made = [token for outcome in world.engine.made for token in outcome.tokens]
        assert [t for t, mask in zip(branch.tokens, branch.loss_mask, strict=True) if mask] == made
        assert second.usage is not None and second.usage.prompt_tokens_details is not None
        assert second.usage.prompt_tokens_details.cached_tokens == len(world.engine.made[0].tokens)


async def test_a_stream_has_the_same_text_and_usage_at_the_end() -> None:
    long = "word " * 30 + "end"
    async with running(lambda p, w: long) as world, client(world) as api:
        stream = await api.chat.completions.create(
            model="policy", messages=ask("go"), stream=True, stream_options={"include_usage": True}, logprobs=True
        )
        chunks = [chunk async for chunk in stream]
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == long and len([text for text in texts if text]) > 3
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(long) + 1
    told = [t for c in chunks for choice in c.choices if choice.logprobs for t in choice.logprobs.content or []]
    assert "".join(token.token for token in told) == long and told[0].logprob == -0.5


async def test_a_streamed_tool_call_is_no_text() -> None:
    async with running(calculator) as world, client(world, world.episode()) as api:
        async with api.chat.completions.stream(model="policy", messages=ask("2 and 3?"), tools=[TOOL]) as stream:
            texts = [event.delta async for event in stream if event.type == "content.delta"]
            final = await stream.get_final_completion()
        assert "tool_call" not in "".join(texts) and "".join(texts).strip() == "Let me see."
        calls = final.choices[0].message.tool_calls
        assert calls and json.loads(calls[0].function.arguments) == {"a": 2, "b": 3}
        assert final.choices[0].finish_reason == "tool_calls"
        message: Any = final.choices[0].message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True)
        for one in message["tool_calls"]:
            one["function"].pop("parsed_arguments", None)
            one.pop("index", None)
        more = [*ask("2 and 3?"), message, {"role": "tool", "tool_call_id": calls[0].id, "content": "result 5"}]
        answer = await api.chat.completions.create(model="policy", messages=more, tools=[TOOL])
        assert answer.choices[0].message.content == "It is 5."
        assert world.sessions.close("episode-1").episode.counts.continuation == 1


async def test_several_answers_have_seeds_of_their_own_and_are_branches() -> None:
    def by_seed(prompt: str, wanted: GenerationRequest) -> str:
        return f"seed {wanted.seed % 1000}"

    async with running(by_seed) as world, client(world, world.episode()) as api:
        answer = await api.chat.completions.create(model="policy", messages=ask("hi"), n=3, seed=7)
        texts = [choice.message.content for choice in answer.choices]
        assert len(set(texts)) == 3 and [choice.index for choice in answer.choices] == [0, 1, 2]
        again = await api.chat.completions.create(model="policy", messages=ask("hi"), n=3, seed=7)
        assert not {choice.message.content for choice in again.choices} & set(texts), "or a group's members were alike"
        episode = world.sessions.close("episode-1").episode
        trained = sum(sum(branch.loss_mask) for branch in episode.branches)
        assert trained == sum(len(outcome.tokens) for outcome in world.engine.made)


@pytest.mark.parametrize("api_of", ["chat", "stream", "responses"])
async def test_a_call_without_the_choice_of_tools_is_in_the_same_conversation(api_of: str) -> None:
    said = 'Let me see. <tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    async with running(lambda p, w: said) as world, client(world, world.episode()) as api:
        messages: Any = ask("2 and 3?")
        for choice in ("auto", "none", "auto"):
            request: Any = {"model": "policy", "tool_choice": choice}
            if api_of == "responses":
                answer = await api.responses.create(input=messages, tools=[RESPONSES_TOOL], **request)
                called = any(item.type == "function_call" for item in answer.output)
                text = answer.output_text
                messages += [item.model_dump(exclude_none=True) for item in answer.output]
                ids = [item.call_id for item in answer.output if item.type == "function_call"]
                messages += [{"type": "function_call_output", "call_id": one, "output": "5"} for one in ids]
            else:
                if api_of == "stream":
                    async with api.chat.completions.stream(messages=messages, tools=[TOOL], **request) as stream:
                        message = (await stream.get_final_completion()).choices[0].message
                else:
                    full = await api.chat.completions.create(messages=messages, tools=[TOOL], **request)
                    message = full.choices[0].message
                called, text = bool(message.tool_calls), message.content or ""
                back: Any = message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True)
                for one in back.get("tool_calls", []):
                    one["function"].pop("parsed_arguments", None)
                    one.pop("index", None)
                messages += [back]
                ids = [one.id for one in message.tool_calls or []]
                messages += [{"role": "tool", "tool_call_id": one, "content": "5"} for one in ids]
            assert called == (choice == "auto") and text.strip() == (said if choice == "none" else "Let me see.")
            messages += ask("And now?")
        episode = world.sessions.close("episode-1").episode
        assert (episode.counts.first, episode.counts.continuation, episode.counts.drift) == (1, 2, 0)
        (branch,) = episode.branches
        assert sum(branch.loss_mask) == sum(len(made.tokens) for made in world.engine.made)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_cuts_at_a_token_and_the_turn_is_recognised(stream: bool) -> None:
    async with (
        running(lambda p, w: "one. STOP two. three. four. five." * 3) as world,
        client(world, world.episode()) as api,
    ):
        if stream:
            chunks = await api.chat.completions.create(model="policy", messages=ask("x"), stop="STOP", stream=True)
            text = "".join([c.choices[0].delta.content or "" async for c in chunks if c.choices])
        else:
            answer = await api.chat.completions.create(model="policy", messages=ask("x"), stop=["STOP", "zzz"])
            text = answer.choices[0].message.content or ""
            assert answer.choices[0].finish_reason == "stop"
        assert text == "one. "
        assert world.engine.ended_early == 1, "the engine goes on behind the stop string"
        more = [*ask("x"), {"role": "assistant", "content": text}, *ask("y")]
        await api.chat.completions.create(model="policy", messages=more, max_tokens=5)
        episode = world.sessions.close("episode-1").episode
        assert episode.counts.continuation == 1 and episode.counts.drift == 0
        (branch,) = episode.branches
        turn = next(turn for turn in branch.turns if turn.role == "assistant")
        assert tokenizer().spell(branch.tokens[turn.start : turn.end]) == "one. STOP"
        assert all(branch.loss_mask[turn.start : turn.end])


async def test_an_answer_is_cut_at_its_length() -> None:
    async with running(echo) as world, client(world) as api:
        answer = await api.chat.completions.create(model="policy", messages=ask("hello"), max_completion_tokens=4)
        assert answer.choices[0].finish_reason == "length"
        assert (answer.choices[0].message.content or "").strip() == "You"
        assert world.engine.orders[-1].max_new_tokens == 4
        with pytest.raises(openai.BadRequestError, match="the model takes 4096"):
            await api.chat.completions.create(model="policy", messages=ask("x" * 5000))


async def test_completions_continue_text_and_tokens() -> None:
    async with running(lambda p, w: f"[{p}]") as world, client(world) as api:
        answer = await api.completions.create(model="policy", prompt=["ab", "cd"], max_tokens=50, n=2, echo=True)
        assert [choice.text for choice in answer.choices] == ["ab[ab]", "ab[ab]", "cd[cd]", "cd[cd]"]
        ids = tokenizer().encode("xyz")
        told = await api.completions.create(model="policy", prompt=ids, max_tokens=50, logprobs=0)
        assert told.choices[0].text == "[xyz]"
        logprobs = told.choices[0].logprobs
        assert logprobs is not None and logprobs.tokens == list("[xyz]") and logprobs.text_offset == [0, 1, 2, 3, 4]
        stream = await api.completions.create(model="policy", prompt="ab", max_tokens=50, stream=True)
        assert "".join([c.choices[0].text async for c in stream]) == "[ab]"
        async with client(world, world.episode()) as episode:
            with pytest.raises(openai.BadRequestError, match="use chat completions"):
                await episode.completions.create(model="policy", prompt="ab")


class Split(ChatTokenizer):
    """One whose A and B are halves of a character."""

    def spell(self, tokens: Sequence[int]) -> str:
        return super().spell(tokens).replace("AB", "😀").replace("A", "�")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_completion_that_is_cut_inside_a_character_has_the_text_before_it(stream: bool) -> None:
    chat = ChatTemplate(Split(tokenizer().raw, tokenizer().folder), tool_parser="hermes", reasoning_parser="think")
    async with running(lambda p, w: "fine ABABAB", chat=chat) as world, client(world) as api:
        request: Any = {"model": "policy", "prompt": "go", "max_tokens": 10, "stream": stream}
        answer = await api.completions.create(**request)
        parts = [part async for part in answer] if stream else [answer]
        assert "".join(part.choices[0].text for part in parts) == "fine 😀😀�"
        assert parts[-1].choices[0].finish_reason == "length"


async def test_responses_continue_from_previous_ones() -> None:
    async with running(calculator) as world, client(world) as api:
        first = await api.responses.create(model="policy", input="2 and 3?", tools=[RESPONSES_TOOL])
        assert first.status == "completed" and first.output_text == "Let me see."
        call = next(item for item in first.output if item.type == "function_call")
        assert json.loads(call.arguments) == {"a": 2, "b": 3}
        output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "result 5"}]
        second = await api.responses.create(
            model="policy", input=output, previous_response_id=first.id, tools=[RESPONSES_TOOL]
        )
        assert second.output_text == "It is 5." and second.usage is not None
        assert second.usage.input_tokens_details.cached_tokens == len(world.engine.made[0].tokens)
        with pytest.raises(openai.NotFoundError, match="resp_nothing"):
            await api.responses.create(model="policy", input="x", previous_response_id="resp_nothing")


async def test_responses_as_items_and_as_a_stream() -> None:
    async with running(calculator) as world, client(world, world.episode()) as api:
        items: Any = ask("2 and 3?")
        async with api.responses.stream(model="policy", input=items, tools=[RESPONSES_TOOL]) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        assert "response.output_text.delta" in kinds and "response.function_call_arguments.done" in kinds
        items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in final.output]
        call = next(item for item in final.output if item.type == "function_call")
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "result 5"}]
        answer = await api.responses.create(model="policy", input=items, tools=[RESPONSES_TOOL])
        assert answer.output_text == "It is 5."
        episode = world.sessions.close("episode-1").episode
        assert (episode.counts.continuation, episode.counts.drift) == (1, 0)


async def test_reasoning_tokens_are_counted() -> None:
    said = "<think>hm, hm</think>I know."
    count = len(tokenizer().encode("<think>hm, hm"))
    async with running(lambda p, w: said) as world, client(world) as api:
        chat = await api.chat.completions.create(model="policy", messages=ask("?"), n=2)
        assert chat.usage is not None and chat.usage.completion_tokens_details is not None
        assert chat.usage.completion_tokens_details.reasoning_tokens == 2 * count
        answer = await api.responses.create(model="policy", input="?")
        assert answer.usage is not None and answer.usage.output_tokens_details.reasoning_tokens == count
        assert answer.usage.output_tokens == len(world.engine.made[-1].tokens)
        assert not any(" " in (item.id or "") for item in answer.output)
        async with api.responses.stream(model="policy", input="?") as stream:
            final = await stream.get_final_response()
        assert final.usage is not None and final.usage.output_tokens_details.reasoning_tokens == count
    async with running(echo) as world, client(world) as api:
        chat = await api.chat.completions.create(model="policy", messages=ask("?"))
        assert chat.usage is not None and chat.usage.completion_tokens_details is not None
        assert chat.usage.completion_tokens_details.reasoning_tokens == 0


async def test_models_and_health() -> None:
    async with running(echo) as world, client(world) as api:
        assert [model.id async for model in api.models.list()] == ["policy"]
        assert (await api.models.retrieve("policy")).id == "policy"
        with pytest.raises(openai.NotFoundError):
            await api.models.retrieve("gpt-4o")


REFUSED: list[tuple[str, Any]] = [
    ("top_p", 0.9),
    ("top_logprobs", 3),
    ("frequency_penalty", 0.5),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "add"}}),
    ("response_format", {"type": "json_object"}),
    ("n", 0),
    ("max_tokens", 0),
    ("stop", [""]),
    ("temperature", 0.3),
    ("messages", []),
    ("messages", [{"role": "wizard", "content": "x"}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}]),
    (
        "messages",
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}],
    ),
    ("tools", [{"type": "web_search"}]),
]


async def test_unsupported_options_are_refused_by_name() -> None:
    async with running(echo) as world, client(world, world.episode()) as api:
        for field, value in REFUSED:
            request: Any = {"model": "policy", "messages": ask("x"), "logprobs": True, "tools": [TOOL], field: value}
            with pytest.raises(openai.BadRequestError) as caught:
                await api.chat.completions.create(**request)
            assert isinstance(caught.value.body, dict) and field in caught.value.body["param"]
            assert caught.value.type == "invalid_request_error"
        assert not world.engine.orders


async def test_unsupported_options_are_ignored_and_named_if_set() -> None:
    terms = AnswerPolicy(models=("*",), new_tokens=50, context=512, unsupported="ignore", other_temperature="override")
    async with running(echo, terms=terms) as world, client(world, world.episode()) as api:
        raw = await api.chat.completions.with_raw_response.create(
            model="gpt-4o-mini", messages=ask("x"), top_p=0.5, tool_choice="required", tools=[TOOL], temperature=0.2
        )
        assert raw.headers["x-relax-ignored"] == "top_p, tool_choice, temperature"
        assert raw.parse().model == "gpt-4o-mini" and world.engine.orders[0].temperature == 1.0
        async with client(world) as free:
            await free.chat.completions.create(model="any", messages=ask("x"), temperature=0.2)
        assert world.engine.orders[1].temperature == 0.2, "what is not trained on has the temperature it asks for"


async def test_top_logprobs_are_ignored_if_set() -> None:
    terms = AnswerPolicy(models=("policy",), new_tokens=50, context=512, unsupported="ignore")
    async with running(echo, terms=terms) as world, client(world) as api:
        chat = await api.chat.completions.with_raw_response.create(
            model="policy", messages=ask("x"), logprobs=True, top_logprobs=5
        )
        assert chat.headers["x-relax-ignored"] == "top_logprobs"
        told = chat.parse().choices[0].logprobs
        assert told is not None and told.content is not None
        assert told.content[0].logprob == -0.5 and told.content[0].top_logprobs == []
        plain = await api.completions.with_raw_response.create(model="policy", prompt="x", logprobs=1)
        assert plain.headers["x-relax-ignored"] == "logprobs"
        some = plain.parse().choices[0].logprobs
        assert some is not None and some.token_logprobs is not None and some.token_logprobs[0] == -0.5
        answer = await api.responses.with_raw_response.create(
            model="policy", input="x", top_logprobs=2, include=["message.output_text.logprobs"]
        )
        assert answer.headers["x-relax-ignored"] == "top_logprobs"
    async with running(echo) as world, client(world) as api:
        with pytest.raises(openai.BadRequestError, match="the log-probability of the sampled token is kept") as caught:
            await api.completions.create(model="policy", prompt="x", logprobs=1)
        assert caught.value.param == "logprobs"
        plain = await api.completions.with_raw_response.create(model="policy", prompt="x", logprobs=0)
        assert "x-relax-ignored" not in plain.headers and plain.parse().choices[0].logprobs is not None


async def test_tools_missing_from_the_template_are_reported_as_ignored() -> None:
    told: list[str] = []
    blind = TEMPLATE[TEMPLATE.index("{% for m in messages %}") :]
    chat = ChatTemplate(tokenizer(), template=blind, tool_parser="hermes", reasoning_parser="think", unseen=told.append)
    request: Any = {"model": "policy", "messages": ask("2 and 3?"), "tools": [TOOL]}
    async with running(echo, chat=chat) as world, client(world, world.episode()) as api:
        for _ in range(2):
            raw = await api.chat.completions.with_raw_response.create(**request)
            assert raw.headers["x-relax-ignored"] == "tools"
        plain = await api.chat.completions.with_raw_response.create(model="policy", messages=ask("hi"))
        assert "x-relax-ignored" not in plain.headers
    (once,) = told
    assert "the policy does not see add" in once
    async with running(echo) as world, client(world) as api:
        raw = await api.chat.completions.with_raw_response.create(**request)
        assert "x-relax-ignored" not in raw.headers and "tools: add" in tokenizer().spell(world.engine.orders[0].prompt)


async def test_keys_belong_to_their_session_and_models_are_checked() -> None:
    async with running(echo) as world:
        key = world.episode()
        for wrong in ("", "x", TOKEN[:-1] + "x", key[:-1] + ("0" if key[-1] != "0" else "1"), "rls-!!.x", "x" * 10_000):
            async with client(world, wrong or "nothing") as api:
                with pytest.raises(openai.AuthenticationError, match="the API key is wrong"):
                    await api.chat.completions.create(model="policy", messages=ask("x"))
        async with client(world, key) as api:
            with pytest.raises(openai.NotFoundError, match="no model 'gpt-4o' here, only 'policy'"):
                await api.chat.completions.create(model="gpt-4o", messages=ask("x"))
            # As the `verifiers` package does, whose header is of its own making: the key says which session it is.
            await api.chat.completions.create(
                model="policy", messages=ask("x"), extra_headers={"X-Session-Id": "other"}
            )
            assert world.sessions.of_key("episode-1").answered == 1 and len(world.sessions) == 1
            world.sessions.close("episode-1")
            for why in ("has been closed", "is not open"):
                with pytest.raises(openai.ConflictError, match=why):
                    await api.chat.completions.create(model="policy", messages=ask("x"))
                world.sessions.forget("episode-1")


async def test_a_session_may_be_named_in_a_header_and_its_bounds_hold() -> None:
    async with running(echo) as world:
        async with client(world, default_headers={"X-Session-Id": "mine"}) as api:
            messages = ask("a")
            answer = await api.chat.completions.create(model="policy", messages=messages)
            messages += [{"role": "assistant", "content": answer.choices[0].message.content}, *ask("b")]
            answer = await api.chat.completions.create(model="policy", messages=messages)
            assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
            assert answer.usage.prompt_tokens_details.cached_tokens == len(world.engine.made[0].tokens)
        async with client(world, world.episode("short", calls=1, new_tokens=3)) as api:
            answer = await api.chat.completions.create(model="policy", messages=ask("abc"), max_tokens=100)
            assert answer.usage is not None and answer.usage.completion_tokens == 3
            with pytest.raises(openai.ConflictError, match="has had its 1 calls"):
                await api.chat.completions.create(model="policy", messages=ask("abc"))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnect_ends_the_sequence_and_nothing_is_trained(stream: bool) -> None:
    async with running(lambda p, w: "x" * 100) as world, client(world, world.episode()) as api:
        world.engine.gate.clear()

        async def call() -> None:
            if stream:
                async for _ in await api.chat.completions.create(model="policy", messages=ask("x"), stream=True):
                    pass
            else:
                await api.chat.completions.create(model="policy", messages=ask("x"))

        task = asyncio.create_task(call())
        await until(lambda: world.engine.orders)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: world.engine.ended_early)
        await until(lambda: not world.gateway.service.admission.core.running)
        episode = world.sessions.close("episode-1").episode
        assert not episode.branches and episode.counts.abandoned == 1


async def test_a_stream_that_fails_reports_it_and_is_not_trained() -> None:
    async with running(lambda p, w: "word " * 20) as world, client(world, world.episode()) as api:
        world.engine.fails = True
        world.engine.gate.clear()
        texts = []
        with pytest.raises(openai.APIError, match="the engine is gone"):
            async for chunk in await api.chat.completions.create(model="policy", messages=ask("x"), stream=True):
                texts.append(chunk.choices[0].delta.content or "")
                if texts[-1]:
                    world.engine.gate.set()
        assert "".join(texts) == "word wor"
        with pytest.raises(openai.InternalServerError, match="the engine is gone") as caught:
            await api.chat.completions.create(model="policy", messages=ask("x"), stop="zzz")
        assert caught.value.status_code == 504 and caught.value.response.headers["retry-after"] == "1"
        episode = world.sessions.close("episode-1").episode
        assert not episode.branches and episode.counts.abandoned == 2


@pytest.mark.parametrize("api_of", ["chat", "completions"])
async def test_an_unexpected_error_in_mid_stream_is_reported(api_of: str) -> None:
    texts: list[str] = []
    request: Any = {"model": "policy", "stream": True}
    async with running(lambda p, w: "word " * 20) as world, client(world) as api:
        world.engine.breaks = True
        world.engine.gate.clear()

        def seen(text: str | None) -> None:
            texts.append(text or "")
            if text:
                world.engine.gate.set()

        with pytest.raises(openai.APIError, match="the gateway failed; its log has more"):
            if api_of == "chat":
                async for chunk in await api.chat.completions.create(messages=ask("x"), **request):
                    seen(chunk.choices[0].delta.content)
            else:
                async for part in await api.completions.create(prompt="x", max_tokens=50, **request):
                    seen(part.choices[0].text)
        assert "".join(texts) == "word wor"


async def test_a_responses_stream_ends_with_the_error_event() -> None:
    async with running(lambda p, w: "word " * 20) as world, client(world) as api:
        world.engine.breaks = True
        world.engine.gate.clear()
        events = []
        async for event in await api.responses.create(model="policy", input="x", stream=True):
            events.append(event)
            world.engine.gate.set()
    assert events[-2].type == "response.output_text.delta" and events[-1].type == "error"
    assert events[-1].message == "the gateway failed; its log has more" and events[-1].code == "internal_error"


async def test_the_end_of_a_session_cancels_its_calls_with_an_error() -> None:
    async with running(echo) as world, client(world, world.episode()) as api:
        world.engine.gate.clear()
        task = asyncio.create_task(api.chat.completions.create(model="policy", messages=ask("x")))
        await until(lambda: world.engine.orders)
        world.sessions.forget("episode-1")
        with pytest.raises(openai.ConflictError, match="was cancelled"):
            await task
        await until(lambda: world.engine.ended_early)
