"""Large requests: others are served meanwhile, and requests that cannot be answered are refused early."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

import httpx
import openai
import pytest
from gateway_world import TOKEN, TOOL, Running, ask, client, echo, running, tokenizer
from hypothesis import given
from hypothesis import strategies as st
from test_gateway_hostile import CHAT, still_serves

from relax_rt.roles.agentic.tokens.template import ChatTemplate
from relax_rt.roles.agentic.tokens.types import Message, Tool
from relax_rt.roles.gateway.app import HttpLimits
from relax_rt.roles.gateway.calls import MAX_TOOL_BYTES
from relax_rt.roles.gateway.server import PARSED_TIMES, VALUE_BYTES, parsed_bytes
from relax_rt.roles.gateway.service import AnswerPolicy


class Watched(ChatTemplate):
    """Knows in which threads it renders."""

    def __init__(self) -> None:
        super().__init__(tokenizer(), tool_parser="hermes", reasoning_parser="think")
        self.threads: set[threading.Thread] = set()

    def text(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, generation: bool = True) -> str:
        self.threads.add(threading.current_thread())
        return super().text(messages, tools, generation=generation)


LONG = "x" * 20_000
CALLED = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": LONG})}}
HISTORY: list[Any] = [*ask("2 and 3?"), {"role": "assistant", "content": None, "tool_calls": [CALLED]}]
LONG_CALLS: dict[str, Any] = {
    "tools": {"messages": ask("hi"), "tools": [{**TOOL, "function": {**TOOL["function"], "description": LONG}}]},
    "arguments": {"messages": [*HISTORY, {"role": "tool", "tool_call_id": "call00001", "content": "5"}]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 10}] * 2_000}]},
    "content": {"messages": ask(LONG)},
}


@pytest.mark.parametrize("what", LONG_CALLS)
async def test_a_request_long_in_any_part_is_rendered_in_a_thread(what: str) -> None:
    chat = Watched()
    terms = AnswerPolicy(models=("policy",), new_tokens=20, context=100_000)
    async with running(echo, chat=chat, terms=terms) as world, client(world) as api:
        world.sessions._tokens = 100_000
        await api.chat.completions.create(model="policy", messages=ask("short"))
        assert chat.threads == {threading.main_thread()}
        chat.threads.clear()
        await api.chat.completions.create(model="policy", **LONG_CALLS[what])
        assert chat.threads and threading.main_thread() not in chat.threads


async def test_a_long_conversation_continued_by_id_is_rendered_in_a_thread() -> None:
    chat = Watched()
    terms = AnswerPolicy(models=("policy",), new_tokens=20, context=100_000)
    async with running(lambda p, w: "yes", chat=chat, terms=terms) as world, client(world, world.episode()) as api:
        first = await api.responses.create(model="policy", input="hi")
        chat.threads.clear()
        await api.responses.create(model="policy", input="more", previous_response_id=first.id)
        assert chat.threads and threading.main_thread() not in chat.threads


@pytest.mark.parametrize("kind", ["chat", "completions", "episode"])
async def test_a_text_far_beyond_the_room_is_not_rendered(kind: str) -> None:
    chat = Watched()
    text = "x" * (64 * 4096 + 1)
    async with running(echo, chat=chat) as world:
        async with client(world, world.episode() if kind == "episode" else TOKEN) as api:
            with pytest.raises(openai.BadRequestError, match="262145 characters, and there is room for 4096") as caught:
                if kind == "completions":
                    await api.completions.create(model="policy", prompt=text)
                else:
                    await api.chat.completions.create(model="policy", messages=ask(text))
        assert caught.value.code == "context_length_exceeded"
        assert not chat.threads and not world.engine.orders
        if kind == "episode":
            assert world.sessions.close("episode-1").exhausted == "tokens"


async def test_tools_are_bounded_in_bytes() -> None:
    tool = {**TOOL, "function": {**TOOL["function"], "description": "x" * MAX_TOOL_BYTES}}
    async with running(echo) as world, client(world) as api:
        with pytest.raises(openai.APIStatusError, match="bytes as JSON") as caught:
            await api.chat.completions.create(model="policy", messages=ask("hi"), tools=[tool])
        assert (caught.value.status_code, caught.value.code) == (413, "tools_too_large")
        await still_serves(world)


async def post(world: Running, body: bytes) -> httpx.Response:
    async with httpx.AsyncClient() as http:
        head = {"authorization": f"Bearer {TOKEN}"}
        return await http.post(f"{world.url}{CHAT}", content=body, headers=head, timeout=60)


async def test_a_body_of_many_values_is_refused_before_it_is_parsed() -> None:
    bounds = HttpLimits(body_bytes=1 << 16, held_bytes=1 << 16)
    values = (1 << 16) * PARSED_TIMES // VALUE_BYTES
    begin = b'{"model": "policy", "messages": [{"role": "user", "content": "x"}], "other": ['
    async with running(echo, bounds=bounds) as world:
        answer = await post(world, begin + b",".join([b"[]"] * (values // 2 + 1)) + b"]}")
        assert answer.status_code == 413 and "the body's values would take" in answer.json()["error"]["message"]
        # As many as that are allowed, but not beside what is held already.
        answer = await post(world, begin + b",".join([b"[]"] * (values // 4)) + b"]}")
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "busy"
        # In a text they are none.
        answer = await post(world, begin + b'"' + b"[]," * (values // 2 + 1) + b'"]}')
        assert answer.status_code == 200
        await still_serves(world)


JSON = st.recursive(
    st.none() | st.integers(0, 9) | st.text('ab[,{"\\ß', max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('k,["\\', max_size=4), inner, max_size=3),
    max_leaves=30,
)


def marks(value: Any) -> int:
    """Commas and opening brackets that a value has outside of texts."""
    if isinstance(value, list):
        return 1 + max(len(value) - 1, 0) + sum(map(marks, value))
    if isinstance(value, dict):
        return 1 + max(len(value) - 1, 0) + sum(map(marks, value.values()))
    return 0


@given(JSON)
def test_values_are_counted_outside_of_texts(value: Any) -> None:
    body = json.dumps(value).encode()
    assert parsed_bytes(body) in (0, marks(value) * VALUE_BYTES)
    if marks(value) * VALUE_BYTES > PARSED_TIMES * len(body):
        assert parsed_bytes(body) == marks(value) * VALUE_BYTES


@pytest.mark.parametrize("body", [b'"' + b'\\"' * 500_000, b'"' * 999_999, b"\\" * 999_999, b'["\\'])
def test_counting_values_scans_unterminated_texts_once(body: bytes) -> None:
    assert parsed_bytes(b"," * len(body) + body) == len(body) * VALUE_BYTES + (VALUE_BYTES if body[:1] == b"[" else 0)
