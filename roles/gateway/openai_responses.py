"""OpenAI Responses (platform.openai.com/docs/api-reference/responses) and its stream of events. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from relax_rt.roles.gateway.calls import (
    MAX_MESSAGES,
    Answer,
    ApiFormat,
    Call,
    CallError,
    Choice,
    Head,
    Message,
    StreamWriter,
    bad_request,
    check_tools,
    decode,
    event,
    function_tool,
    parse_content,
    parse_max_tokens,
    parse_message,
    parse_temperature,
    unsupported_options,
)

LOGPROBS = "message.output_text.logprobs"


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """The fields that are read."""

    model: str
    input: str | Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
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


class ResponsesWriter(StreamWriter):
    """Stream of Responses. Items are opened in the order in which they come; each ends before the next begins."""

    def __init__(self, call: Call, head: Head) -> None:
        super().__init__(call, head)
        self._sequence_number = 0
        self._output: list[dict[str, Any]] = []
        self._message = ""
        self._logprobs: list[dict[str, Any]] = []
        self._message_open = False

    def begin(self) -> bytes:
        return self._response("response.created", "") + self._response("response.in_progress", "")

    def _text(self, index: int, text: str) -> bytes:
        return self._message_delta(text, [])

    def choice(self, choice: Choice) -> bytes:
        message, out = choice.message, b""
        calls = message.get("tool_calls") or []
        if (reasoning := message.get("reasoning_content")) and not self._message_open:
            item = _reasoning_item(choice.reply, reasoning)
            place = {"item_id": item["id"], "output_index": len(self._output), "content_index": 0}
            part = {"type": "reasoning_text", "text": ""}
            out += self._item_added({**item, "content": [], "status": "in_progress"})
            out += self._event("response.content_part.added", **place, part=part)
            out += self._event("response.reasoning_text.delta", **place, delta=reasoning)
            out += self._event("response.reasoning_text.done", **place, text=reasoning)
            out += self._event("response.content_part.done", **place, part={**part, "text": reasoning})
            out += self._item_done(item)
        rest = self._unwritten(choice, message.get("content"))
        if rest or self._message_open or not calls:
            logprobs = [token.as_openai() for token in choice.logprobs]
            if rest or logprobs:
                out += self._message_delta(rest, logprobs)
            out += b"" if self._message_open else self._open_message()
            out += self._event(
                "response.output_text.done", **self._place(), text=self._message, logprobs=self._logprobs
            )
            part = _text_part(self._message, self._logprobs)
            out += self._event("response.content_part.done", **self._place(), part=part)
            item = _message_item("", self._message, self._logprobs, choice.finish_reason)
            out += self._item_done({**item, "id": self._message_id})
        for call in calls:
            item, name = _call_item(call), "response.function_call_arguments"
            place = {"item_id": item["id"], "output_index": len(self._output)}
            out += self._item_added({**item, "arguments": "", "status": "in_progress"})
            out += self._event(f"{name}.delta", **place, delta=item["arguments"])
            out += self._event(f"{name}.done", **place, arguments=item["arguments"], name=item["name"])
            out += self._item_done(item)
        return out

    def end(self, answer: Answer) -> bytes:
        reason = answer.choices[0].finish_reason
        name = "response.incomplete" if reason == "length" else "response.completed"
        return self._response(name, reason, _usage(answer))

    def failed(self, error: CallError) -> bytes:
        code = error.code or str(error.status)
        return self._event("error", code=code, message=error.message, param=error.param)

    @property
    def _message_id(self) -> str:
        return f"msg_{self._head.id}"

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._message_id, "output_index": len(self._output), "content_index": 0}

    def _message_delta(self, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        out = b"" if self._message_open else self._open_message()
        logprobs = logprobs if self._call.logprobs else []
        self._message += text
        self._logprobs += logprobs
        return out + self._event("response.output_text.delta", **self._place(), delta=text, logprobs=logprobs)

    def _open_message(self) -> bytes:
        self._message_open = True
        item = {"id": self._message_id, "type": "message", "role": "assistant", "status": "in_progress", "content": []}
        part = _text_part("", [])
        return self._item_added(item) + self._event("response.content_part.added", **self._place(), part=part)

    def _item_added(self, item: dict[str, Any]) -> bytes:
        return self._event("response.output_item.added", output_index=len(self._output), item=item)

    def _item_done(self, item: dict[str, Any]) -> bytes:
        index = len(self._output)
        self._output.append(item)
        return self._event("response.output_item.done", output_index=index, item=item)

    def _response(self, name: str, finish_reason: str, usage: dict[str, Any] | None = None) -> bytes:
        return self._event(name, response=_response(self._call, self._head, self._output, finish_reason, usage))

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        number, self._sequence_number = self._sequence_number, self._sequence_number + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)


class ResponsesApi(ApiFormat):
    """Responses."""

    writer = ResponsesWriter

    def parse(self, body: bytes) -> Call:
        request = decode(body, ResponsesRequest)
        for name in ("background", "conversation", "prompt"):
            if getattr(request, name):
                message = f"{name} is kept on OpenAI's servers, there is none here"
                raise bad_request(message, name, "unsupported_parameter")
        for i, tool in enumerate(check_tools(request.tools or [])):
            if tool.get("type") != "function":
                message = f"tools[{i}] is of type {tool.get('type')!r}; functions can be offered"
                raise bad_request(message, f"tools[{i}].type")
        tools = tuple(function_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or []))
        text_format = request.text.get("format") if isinstance(request.text, Mapping) else None
        return Call(
            model=request.model,
            messages=_messages(request.input),
            instructions=request.instructions or "",
            tools=tools,
            may_call=request.tool_choice != "none",
            max_tokens=parse_max_tokens(request.max_output_tokens, "max_output_tokens"),
            temperature=parse_temperature(request.temperature),
            logprobs=LOGPROBS in (request.include or []),
            stream=bool(request.stream),
            previous=request.previous_response_id or "",
            store=request.store is not False,
            unsupported=unsupported_options(
                request,
                tool_choice=request.tool_choice,
                sequential_tools=request.parallel_tool_calls is False and bool(tools),
                text_format=("text.format", text_format),
                top_logprobs=("top_logprobs", request.top_logprobs),
            ),
            repeated={
                "instructions": request.instructions,
                "metadata": request.metadata or {},
                "parallel_tool_calls": request.parallel_tool_calls is not False,
                "previous_response_id": request.previous_response_id,
                "temperature": request.temperature,
                "tool_choice": request.tool_choice or "auto",
                "tools": request.tools or [],
                "top_p": request.top_p,
                "max_output_tokens": request.max_output_tokens,
                "store": request.store is not False,
            },
        )

    def render(self, call: Call, answer: Answer) -> dict[str, Any]:
        choice = answer.choices[0]
        message, output = choice.message, []
        if reasoning := message.get("reasoning_content"):
            output.append(_reasoning_item(choice.reply, reasoning))
        calls = message.get("tool_calls") or []
        if message.get("content") or not calls:
            logprobs = [token.as_openai() for token in choice.logprobs] if call.logprobs else []
            output.append(_message_item(choice.reply, message.get("content") or "", logprobs, choice.finish_reason))
        output += [_call_item(one) for one in calls]
        return _response(call, answer.head, output, choice.finish_reason, _usage(answer))


def _response(
    call: Call, head: Head, output: list[dict[str, Any]], finish_reason: str, usage: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the object of an answer; finish_reason is empty while it is generated."""
    status = "incomplete" if finish_reason == "length" else "completed" if finish_reason else "in_progress"
    return {
        **call.repeated,
        "id": head.id,
        "object": "response",
        "created_at": head.created,
        "model": head.model,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "output": output,
        "usage": usage,
    }


def _item_id(kind: str, reply: str) -> str:
    # Replies' ids may have spaces, items' may not.
    return f"{kind}_{reply}".replace(" ", "-")


def _reasoning_item(reply: str, text: str) -> dict[str, Any]:
    return {
        "id": _item_id("rs", reply),
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
        "status": "completed",
    }


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _message_item(reply: str, text: str, logprobs: list[dict[str, Any]], finish_reason: str) -> dict[str, Any]:
    return {
        "id": _item_id("msg", reply),
        "type": "message",
        "role": "assistant",
        "status": "incomplete" if finish_reason == "length" else "completed",
        "content": [_text_part(text, logprobs)],
    }


def _call_item(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {
        "id": f"fc_{call['id']}",
        "type": "function_call",
        "call_id": call["id"],
        "name": function["name"],
        "arguments": function["arguments"],
        "status": "completed",
    }


def _usage(answer: Answer) -> dict[str, Any]:
    prompt, completion = answer.head.prompt_tokens, answer.completion_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": answer.head.reused_tokens, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
        "total_tokens": prompt + completion,
    }


def _messages(given: str | Sequence[dict[str, Any]]) -> tuple[Message, ...]:
    """Parse the conversation. Reasoning, text and calls of one assistant turn are items of their own here."""
    if isinstance(given, str):
        return ({"role": "user", "content": given},)
    found: list[Message] = []
    turn: Message | None = None
    """The assistant's turn that further items are added to."""
    for i, item in enumerate(given):
        at, kind = f"input[{i}]", item.get("type", "message")
        if kind == "message" and item.get("role") != "assistant":
            found.append(parse_message(item, at))
            turn = None
            continue
        if kind == "function_call_output":
            output = parse_content(item.get("output"), f"{at}.output")
            found.append({"role": "tool", "tool_call_id": str(item.get("call_id") or ""), "content": output or ""})
            turn = None
            continue
        if kind not in ("message", "reasoning", "function_call"):
            raise bad_request(f"{at} is of type {kind!r}; messages, reasoning and function calls can be read", at)
        if turn is None or (kind == "message" and turn.get("content") is not None):
            turn = {"role": "assistant", "content": None}
            found.append(turn)
        if kind == "message":
            turn["content"] = parse_content(item.get("content"), f"{at}.content") or ""
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary") or []
            texts = [str(part.get("text", "")) for part in parts if isinstance(part, Mapping)]
            if texts:
                turn["reasoning_content"] = "".join(texts)
        else:
            name, arguments = item.get("name"), item.get("arguments", "")
            if not isinstance(name, str) or not isinstance(arguments, str):
                raise bad_request(f"{at} has no name, or arguments that are no text", at)
            call = {"id": str(item.get("call_id") or ""), "type": "function"}
            turn.setdefault("tool_calls", []).append({**call, "function": {"name": name, "arguments": arguments}})
    for message in found:
        if message["content"] is None and not message.get("tool_calls"):
            message["content"] = ""
    return tuple(found)
