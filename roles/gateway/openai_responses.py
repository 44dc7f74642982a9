"""OpenAI Responses (platform.openai.com/docs/api-reference/responses). Pure.

The events of a stream are in `responses_writer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from relax_rt.roles.gateway import sampling
from relax_rt.roles.gateway.calls import MOST_MESSAGES, Answer, Call, Choice, Head, Message, Unsupported, decode
from relax_rt.roles.gateway.errors import Family, bad
from relax_rt.roles.gateway.messages import bounded_tools, content, function_tool, message

LOGPROBS = "message.output_text.logprobs"


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """The fields that are read."""

    model: str
    input: str | Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1, max_length=MOST_MESSAGES)]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    text: Any = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    previous_response_id: str | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None


class Responses:
    """See Dialect."""

    family: Family = "openai"

    def parse(self, body: bytes) -> Call:
        """See Dialect."""
        asked = decode(body, ResponsesRequest)
        for name in ("background", "conversation", "prompt"):
            if getattr(asked, name):
                raise bad(f"{name} is kept on OpenAI's servers, there is none here", name, "unsupported_parameter")
        return Call(
            model=asked.model,
            messages=_messages(asked.input),
            instructions=asked.instructions or "",
            tools=tuple(_tools(asked.tools or [])),
            may_call=asked.tool_choice != "none",
            max_tokens=sampling.length(asked.max_output_tokens, "max_output_tokens"),
            temperature=sampling.temperature(asked.temperature),
            logprobs=LOGPROBS in (asked.include or []),
            stream=bool(asked.stream),
            previous=asked.previous_response_id or "",
            store=asked.store is not False,
            unsupported=tuple(_unsupported(asked)),
            said=_said(asked),
        )

    def render(self, call: Call, answer: Answer) -> dict[str, Any]:
        """See Dialect."""
        choice = answer.choices[0]
        output = items(choice, call.logprobs)
        return response(call, answer.head, output, choice.finish_reason, usage(answer))

    def writer(self, call: Call, head: Head) -> Any:
        """See Dialect."""
        from relax_rt.roles.gateway.responses_writer import ResponsesWriter

        return ResponsesWriter(call, head)


def response(
    call: Call, head: Head, output: list[dict[str, Any]], finish_reason: str, used: dict[str, Any] | None
) -> dict[str, Any]:
    """The object that an answer is; finish_reason is empty as long as it goes on."""
    status = "incomplete" if finish_reason == "length" else "completed" if finish_reason else "in_progress"
    return {
        **call.said,
        "id": head.id,
        "object": "response",
        "created_at": head.created,
        "model": head.model,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "output": output,
        "usage": used,
    }


def items(choice: Choice, logprobs: bool) -> list[dict[str, Any]]:
    """The items of an answer: what was thought, what was said, what is to be called."""
    said, found = choice.message, []
    if reasoning := said.get("reasoning_content"):
        found.append(reasoning_item(choice.reply, reasoning))
    calls = said.get("tool_calls") or []
    if said.get("content") or not calls:
        tokens = [_logprob(token) for token in choice.logprobs] if logprobs else []
        found.append(message_item(choice.reply, said.get("content") or "", tokens, choice.finish_reason))
    return found + [call_item(call) for call in calls]


def _item_id(kind: str, reply: str) -> str:
    """An id of one word: a reply's own may have blanks."""
    return f"{kind}_{reply}".replace(" ", "-")


def reasoning_item(reply: str, text: str) -> dict[str, Any]:
    """What the model thought."""
    return {
        "id": _item_id("rs", reply),
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
        "status": "completed",
    }


def text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    """The one part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def message_item(reply: str, text: str, logprobs: list[dict[str, Any]], finish_reason: str) -> dict[str, Any]:
    """What the model said."""
    return {
        "id": _item_id("msg", reply),
        "type": "message",
        "role": "assistant",
        "status": "incomplete" if finish_reason == "length" else "completed",
        "content": [text_part(text, logprobs)],
    }


def call_item(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool to be called."""
    function = call["function"]
    return {
        "id": f"fc_{call['id']}",
        "type": "function_call",
        "call_id": call["id"],
        "name": function["name"],
        "arguments": function["arguments"],
        "status": "completed",
    }


def usage(answer: Answer) -> dict[str, Any]:
    """Numbers of tokens."""
    prompt, completion = answer.head.prompt_tokens, answer.completion_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": answer.head.reused_tokens, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": answer.thought_tokens},
        "total_tokens": prompt + completion,
    }


def _logprob(token: Any) -> dict[str, Any]:
    return {"token": token.token, "logprob": token.logprob, "bytes": token.bytes, "top_logprobs": []}


def _messages(given: str | Sequence[dict[str, Any]]) -> tuple[Message, ...]:
    if isinstance(given, str):
        return ({"role": "user", "content": given},)
    found: list[Message] = []
    turn: Message | None = None
    """The assistant's turn that items are added to: what it thought, said and called are items of their own."""
    for i, item in enumerate(given):
        at, kind = f"input[{i}]", item.get("type", "message")
        if kind == "message" and item.get("role") != "assistant":
            found.append(message(item, at))
            turn = None
        elif kind == "function_call_output":
            output = content(item.get("output"), f"{at}.output")
            found.append({"role": "tool", "tool_call_id": str(item.get("call_id") or ""), "content": output or ""})
            turn = None
        elif kind in ("message", "reasoning", "function_call"):
            if turn is None or (kind == "message" and turn.get("content") is not None):
                turn = {"role": "assistant", "content": None}
                found.append(turn)
            _add(turn, item, kind, at)
        else:
            raise bad(f"{at} is of type {kind!r}; messages, reasoning and function calls can be read", at)
    for said in found:
        if said["content"] is None and not said.get("tool_calls"):
            said["content"] = ""
    return tuple(found)


def _add(turn: Message, item: Mapping[str, Any], kind: str, at: str) -> None:
    """One item of an assistant's turn."""
    if kind == "message":
        turn["content"] = content(item.get("content"), f"{at}.content") or ""
    elif kind == "reasoning":
        parts = [*(item.get("content") or []), *([] if item.get("content") else item.get("summary") or [])]
        texts = [str(part.get("text", "")) for part in parts if isinstance(part, Mapping)]
        if texts:
            turn["reasoning_content"] = "".join(texts)
    else:
        name, arguments = item.get("name"), item.get("arguments", "")
        if not isinstance(name, str) or not isinstance(arguments, str):
            raise bad(f"{at} has no name, or arguments that are no text", at)
        call = {"id": str(item.get("call_id") or ""), "type": "function"}
        turn.setdefault("tool_calls", []).append({**call, "function": {"name": name, "arguments": arguments}})


def _tools(given: Sequence[Any]) -> list[dict[str, Any]]:
    for i, tool in enumerate(bounded_tools(given)):
        if tool.get("type") != "function":
            raise bad(f"tools[{i}] is of type {tool.get('type')!r}; functions can be offered", f"tools[{i}].type")
    return [function_tool(tool, f"tools[{i}]") for i, tool in enumerate(given)]


def _unsupported(asked: ResponsesRequest) -> list[Unsupported]:
    return [
        *sampling.unneutral({"top_p": asked.top_p}),
        *sampling.forced_tool(asked.tool_choice),
        *sampling.one_call_at_a_time(asked.parallel_tool_calls, bool(asked.tools)),
        *sampling.formatted(asked.text.get("format") if isinstance(asked.text, Mapping) else None, "text.format"),
        *sampling.top_logprobs(asked.top_logprobs),
    ]


def _said(asked: ResponsesRequest) -> dict[str, Any]:
    """What the answer repeats."""
    return {
        "instructions": asked.instructions,
        "metadata": asked.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "temperature": asked.temperature,
        "tool_choice": asked.tool_choice or "auto",
        "tools": asked.tools or [],
        "top_p": asked.top_p,
        "max_output_tokens": asked.max_output_tokens,
        "store": asked.store is not False,
    }
