"""The events of OpenAI Responses (platform.openai.com/docs/api-reference/responses-streaming). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from relax_rt.roles.gateway.calls import Answer, Call, Choice, Head, TokenLogprob, event
from relax_rt.roles.gateway.errors import CallError
from relax_rt.roles.gateway.openai_responses import call_item, message_item, reasoning_item, response, text_part, usage


class ResponsesWriter:
    """See Writer. Items are opened in the order in which they come; each ends before the next begins."""

    def __init__(self, call: Call, head: Head) -> None:
        self._call, self._head = call, head
        self._number = 0
        self._output: list[dict[str, Any]] = []
        self._text = ""
        self._logprobs: list[dict[str, Any]] = []
        self._open = False
        """The message is begun."""

    def begin(self) -> bytes:
        """See Writer."""
        return self._whole("response.created", "") + self._whole("response.in_progress", "")

    def text(self, index: int, text: str) -> bytes:
        """See Writer."""
        return self._told(text, ()) if text else b""

    def _told(self, text: str, logprobs: Sequence[TokenLogprob]) -> bytes:
        begun = b"" if self._open else self._begin_message()
        self._text += text
        told = [{"token": t.token, "logprob": t.logprob, "bytes": t.bytes, "top_logprobs": []} for t in logprobs]
        told = told if self._call.logprobs else []
        self._logprobs += told
        return begun + self._event("response.output_text.delta", **self._place(), delta=text, logprobs=told)

    def choice(self, choice: Choice) -> bytes:
        """See Writer."""
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
        """See Writer."""
        reason = answer.choices[0].finish_reason
        name = "response.incomplete" if reason == "length" else "response.completed"
        return self._whole(name, reason, usage(answer))

    def failed(self, error: CallError) -> bytes:
        """See Writer."""
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
