"""OpenAI Responses (platform.openai.com/docs/api-reference/responses) and its stream of events. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from relax_rt.roles.gateway import request_parts
from relax_rt.roles.gateway.calls import (
    MAX_MESSAGES,
    Answer,
    Call,
    CallError,
    Choice,
    Family,
    Head,
    Message,
    TokenLogprob,
    Unsupported,
    bad,
    decode,
    event,
)
from relax_rt.roles.gateway.request_parts import bounded_tools, content, function_tool, message

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


class ResponsesApi:
    """Translates requests and answers."""

    family: Family = "openai"

    def parse(self, body: bytes) -> Call:
        """Parse a request body."""
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
            max_tokens=request_parts.length(asked.max_output_tokens, "max_output_tokens"),
            temperature=request_parts.temperature(asked.temperature),
            logprobs=LOGPROBS in (asked.include or []),
            stream=bool(asked.stream),
            previous=asked.previous_response_id or "",
            store=asked.store is not False,
            unsupported=tuple(_unsupported(asked)),
            said=_said(asked),
        )

    def render(self, call: Call, answer: Answer) -> dict[str, Any]:
        """Render the answer's body."""
        choice = answer.choices[0]
        output = items(choice, call.logprobs)
        return response(call, answer.head, output, choice.finish_reason, usage(answer))

    def writer(self, call: Call, head: Head) -> Any:
        """Return the writer of a stream."""
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
    text_format = asked.text.get("format") if isinstance(asked.text, Mapping) else None
    return [
        *request_parts.distribution_changes({"top_p": asked.top_p}),
        *request_parts.forced_tool(asked.tool_choice),
        *request_parts.sequential_tools(asked.parallel_tool_calls, bool(asked.tools)),
        *request_parts.output_format(text_format, "text.format"),
        *request_parts.top_logprobs(asked.top_logprobs),
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


class ResponsesWriter:
    """Stream of Responses. Items are opened in the order in which they come; each ends before the next begins."""

    def __init__(self, call: Call, head: Head) -> None:
        self._call, self._head = call, head
        self._number = 0
        self._output: list[dict[str, Any]] = []
        self._text = ""
        self._logprobs: list[dict[str, Any]] = []
        self._open = False
        """The message is begun."""

    def begin(self) -> bytes:
        """Open the stream."""
        return self._whole("response.created", "") + self._whole("response.in_progress", "")

    def text(self, index: int, text: str) -> bytes:
        """Write more text of a choice."""
        return self._told(text, ()) if text else b""

    def _told(self, text: str, logprobs: Sequence[TokenLogprob]) -> bytes:
        begun = b"" if self._open else self._begin_message()
        self._text += text
        told = [{"token": t.token, "logprob": t.logprob, "bytes": t.bytes, "top_logprobs": []} for t in logprobs]
        told = told if self._call.logprobs else []
        self._logprobs += told
        return begun + self._event("response.output_text.delta", **self._place(), delta=text, logprobs=told)

    def choice(self, choice: Choice) -> bytes:
        """Write the rest of a choice."""
        said, out = choice.message, b""
        calls = said.get("tool_calls") or []
        if (reasoning := said.get("reasoning_content")) and not self._open:
            out += self._reasoning(choice.reply, reasoning)
        rest = (said.get("content") or "")[len(self._text) :]
        if rest or self._open or not calls:
            if rest or choice.logprobs:
                out += self._told(rest, choice.logprobs)
            out += b"" if self._open else self._begin_message()
            out += self._end_message(choice)
        for call in calls:
            out += self._called(call)
        return out

    def end(self, answer: Answer) -> bytes:
        """End the stream."""
        reason = answer.choices[0].finish_reason
        name = "response.incomplete" if reason == "length" else "response.completed"
        return self._whole(name, reason, usage(answer))

    def failed(self, error: CallError) -> bytes:
        """End the stream with an error."""
        told = {"code": error.code or str(error.status), "message": error.message, "param": error.param}
        return self._event("error", **told)

    @property
    def _message_id(self) -> str:
        return f"msg_{self._head.id}"

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._message_id, "output_index": len(self._output), "content_index": 0}

    def _begin_message(self) -> bytes:
        self._open = True
        item = {"id": self._message_id, "type": "message", "role": "assistant", "status": "in_progress", "content": []}
        return self._added(item) + self._event("response.content_part.added", **self._place(), part=text_part("", []))

    def _end_message(self, choice: Choice) -> bytes:
        out = self._event("response.output_text.done", **self._place(), text=self._text, logprobs=self._logprobs)
        part = text_part(self._text, self._logprobs)
        out += self._event("response.content_part.done", **self._place(), part=part)
        item = message_item("", self._text, self._logprobs, choice.finish_reason)
        return out + self._done({**item, "id": self._message_id})

    def _reasoning(self, reply: str, text: str) -> bytes:
        item = reasoning_item(reply, text)
        place = {"item_id": item["id"], "output_index": len(self._output), "content_index": 0}
        out = self._added({**item, "content": [], "status": "in_progress"})
        part = {"type": "reasoning_text", "text": ""}
        out += self._event("response.content_part.added", **place, part=part)
        out += self._event("response.reasoning_text.delta", **place, delta=text)
        out += self._event("response.reasoning_text.done", **place, text=text)
        out += self._event("response.content_part.done", **place, part={**part, "text": text})
        return out + self._done(item)

    def _called(self, call: Mapping[str, Any]) -> bytes:
        item = call_item(call)
        place = {"item_id": item["id"], "output_index": len(self._output)}
        out = self._added({**item, "arguments": "", "status": "in_progress"})
        name = "response.function_call_arguments"
        out += self._event(f"{name}.delta", **place, delta=item["arguments"])
        out += self._event(f"{name}.done", **place, arguments=item["arguments"], name=item["name"])
        return out + self._done(item)

    def _added(self, item: dict[str, Any]) -> bytes:
        return self._event("response.output_item.added", output_index=len(self._output), item=item)

    def _done(self, item: dict[str, Any]) -> bytes:
        index = len(self._output)
        self._output.append(item)
        return self._event("response.output_item.done", output_index=index, item=item)

    def _whole(self, name: str, finish_reason: str, used: dict[str, Any] | None = None) -> bytes:
        return self._event(name, response=response(self._call, self._head, self._output, finish_reason, used))

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)
