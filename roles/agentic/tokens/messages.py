"""Compare and validate chat messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import xxhash

from relax_rt.roles.agentic.tokens.types import Message, Tool
from relax_rt.roles.models.chat_template import content_text, parsed_arguments, tool_calls_of
from relax_rt.transport.rpc.errors import Refused

Key = tuple[str, str]
"""Role and digest of a message, or of a set of tools."""
THINK_START, THINK_END = "<think>", "</think>"
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
ASSISTANT = "assistant"


def check_messages(messages: Sequence[Message]) -> None:
    """Validate a conversation.

    Raises:
        Refused: there are no messages, or one of them has no role, or content or tool calls of an unknown form.
    """
    if not messages:
        raise Refused("a conversation without messages", why="there is nothing to answer", hint="send at least one")
    for place, message in enumerate(messages):
        if wrong := _invalid_message(message):
            raise Refused(f"messages[{place}]", why=wrong, hint="messages are as in OpenAI's Chat Completions")


def _invalid_message(message: Any) -> str:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return "it has no role"
    content = message.get("content")
    if isinstance(content, list):
        odd = [part for part in content if not isinstance(part, dict) or not isinstance(part.get("text", ""), str)]
    else:
        odd = [] if content is None or isinstance(content, str) else [content]
    if odd:
        return f"content is a text or a list of parts, not {odd[0]!r:.80}"
    for call in tool_calls_of(message):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return f"a tool call has a function with a name, unlike {call!r:.80}"
    return ""


def text_after_reasoning(content: str) -> str:
    """Return the text after the reasoning; empty if the reasoning does not end."""
    if THINK_END in content:
        return content.rpartition(THINK_END)[2].lstrip("\n")
    return "" if content.lstrip().startswith(THINK_START) else content


def message_key(message: Message) -> Key:
    """Return a key that is equal for equal messages.

    Of an assistant's message: the text after its reasoning, stripped, and names and arguments of tool
    calls, whatever their ids, spacing and order of keys; reasoning is not compared. Of others: content and name.
    """
    role, content = message["role"], content_text(message.get("content"))
    if role == ASSISTANT:
        if isinstance(content, str):
            content = text_after_reasoning(content).strip()
        calls = [
            [call["function"]["name"], _canonical_arguments(call["function"].get("arguments"))]
            for call in tool_calls_of(message)
        ]
        return role, digest([content, calls])
    # Frameworks may repeat the tool's name with its result, and give ids of their own.
    return role, digest([content, None if role == "tool" else message.get("name")])


def tools_key(tools: Sequence[Tool]) -> Key:
    """Return a key that is equal for equal tools, whatever the order of keys."""
    return "tools", digest(list(tools))


def digest(value: Any) -> str:
    """Return xxh3-128 of a JSON-like value."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=repr)
    return xxhash.xxh3_128_hexdigest(text.encode())


def _canonical_arguments(arguments: Any) -> Any:
    parsed = parsed_arguments(arguments)
    return parsed.strip() if isinstance(parsed, str) else parsed


def without_reasoning(message: Message) -> Message:
    """Return an assistant's message without its reasoning; others as they are."""
    if message["role"] != ASSISTANT:
        return message
    content = content_text(message.get("content"))
    bare = {name: value for name, value in message.items() if name not in REASONING_FIELDS}
    return {**bare, "content": text_after_reasoning(content) if isinstance(content, str) else content}
