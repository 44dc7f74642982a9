"""What the HTTP APIs share: the form of a call and of an answer, errors, parts of requests, and streams. Pure.

Each API (`openai_chat`, `openai_responses`, `anthropic_messages`) is an `ApiFormat`, which parses requests to a `Call`
and renders an `Answer`, whole or with a `StreamWriter`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import msgspec

from relax_rt.roles.data.media.images import IMAGES, is_image
from relax_rt.roles.data.media.images import MAX_BYTES as MAX_MEDIA_BYTES

Family = Literal["openai", "anthropic"]

ERROR_TYPES = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    404: ("not_found_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    408: ("timeout_error", "timeout_error"),
    409: ("conflict_error", "invalid_request_error"),
    413: ("request_too_large", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    499: ("cancelled_error", "api_error"),
    500: ("server_error", "api_error"),
    503: ("server_error", "overloaded_error"),
    504: ("timeout_error", "timeout_error"),
}
"""The type of error by status, in OpenAI's form and in Anthropic's (both as their clients document them)."""


class CallError(Exception):
    """A call is answered with an error.

    Args:
        status: of HTTP.
        message: what is wrong and what to do, in a sentence or two.
        param: the field of the request at fault.
        code: for programs.
        retry_after_s: when to retry; 0: not stated.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: float = 0
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """When to retry, in whole seconds, and whether clients should do so on their own."""
        if self.retry_after_s > 0:
            after = max(1, round(self.retry_after_s + 0.499))
            return [(b"retry-after", str(after).encode()), (b"x-should-retry", b"true")]
        return [] if self.status in (408, 429, 500, 503, 504) else [(b"x-should-retry", b"false")]

    def body(self, family: Family, request_id: str = "") -> dict[str, Any]:
        """Return the response body."""
        openai, anthropic = ERROR_TYPES.get(self.status, ERROR_TYPES[500] if self.status >= 500 else ERROR_TYPES[400])
        if family == "anthropic":
            error = {"type": anthropic, "message": self.message}
            return {"type": "error", "error": error, "request_id": request_id or None}
        return {"error": {"message": self.message, "type": openai, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> CallError:
    """Return the error of an invalid request (400)."""
    return CallError(400, message, param=param, code=code)


Message = dict[str, Any]
"""As in OpenAI's Chat Completions: role, content, tool_calls, tool_call_id, name, reasoning_content."""
FinishReason = Literal["stop", "length", "tool_calls"]
T = TypeVar("T")

MAX_MESSAGES, MAX_TOOLS, MAX_STOPS, MAX_CHOICES = 4096, 256, 16, 128
MAX_STOP_LENGTH = 256
"""Characters of a stop string: at most as many are held back from a stream."""
MAX_TOOL_BYTES = 1 << 20
"""Bytes of all tools of a call, as JSON."""


class Unsupported(msgspec.Struct, frozen=True):
    """A requested option that cannot be served. The gateway's settings decide whether it is refused or ignored.

    Attributes:
        name: the field. why: it cannot be served.
    """

    name: str
    why: str


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A call, in the same form for every API.

    Attributes:
        messages: the conversation; empty if `prompts` is not.
        instructions: a system message before them, which belongs to this call alone (Responses).
        prompts: texts or token ids to complete (Completions).
        tools: functions offered, in the form of Chat Completions.
        may_call: the answer may call tools; else it is parsed as text only.
        n: answers for each prompt.
        max_tokens: of an answer; None: as many as the gateway allows.
        temperature: None: the run's.
        stop: an answer ends before the first of these texts.
        seed: None: chosen by the gateway.
        logprobs: return those of the sampled tokens.
        usage_chunk: a stream ends with the token counts.
        previous: id of the answer that this call continues from (Responses).
        store: keep the answer, so that a later call can continue from it (Responses).
        echo: an answer begins with its prompt (Completions).
        unsupported: requested options that cannot be served.
        repeated: fields of the request that the answer repeats (Responses).
        nbytes: of the request.
    """

    model: str
    messages: tuple[Message, ...] = ()
    instructions: str = ""
    prompts: tuple[str | tuple[int, ...], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    may_call: bool = True
    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: bool = False
    stream: bool = False
    usage_chunk: bool = False
    previous: str = ""
    store: bool = False
    echo: bool = False
    unsupported: tuple[Unsupported, ...] = ()
    repeated: dict[str, Any] = {}
    nbytes: int = 0

    @property
    def characters(self) -> int:
        """Number of characters to render. Tools have a bound of their own, and images are no text."""
        prompts = sum(len(prompt) for prompt in self.prompts if isinstance(prompt, str))
        return len(self.instructions) + prompts + sum(len(text) for one in self.messages for text in _texts(one))


def _texts(message: Message) -> Iterator[str]:
    content = message.get("content") or ""
    if isinstance(content, str):
        yield content
    else:
        yield from (part["text"] for part in content if part.get("type") == "text")
    yield message.get("reasoning_content") or ""
    for call in message.get("tool_calls") or []:
        yield from (call["function"]["name"], call["function"]["arguments"])


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """A sampled token: its text, as far as its bytes are text, and its behaviour log-probability."""

    token: str
    logprob: float

    def as_openai(self) -> dict[str, Any]:
        """Return it in the form of OpenAI's chat APIs."""
        encoded = list(self.token.encode())
        return {"token": self.token, "logprob": self.logprob, "bytes": encoded, "top_logprobs": []}


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to a call.

    Attributes:
        index: among the call's answers.
        reply: its id.
        message: as the assistant's message of Chat Completions.
        text: of a completion without messages.
        stop: the stop string that ended it.
        tokens: number of sampled tokens. reasoning_tokens: those up to the end of its reasoning.
        logprobs: of the tokens, if requested.
    """

    index: int
    reply: str
    message: Message
    text: str
    finish_reason: FinishReason
    stop: str | None = None
    tokens: int = 0
    reasoning_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an answer when its first token arrives.

    Attributes:
        created: seconds since 1970.
        model: as requested.
        reused_tokens: prompt tokens that come from earlier answers of the session.
        version: policy version of the first token; 0 before it arrives.
        ignored: requested options that were ignored.
    """

    id: str
    created: int
    model: str
    prompt_tokens: int = 0
    reused_tokens: int = 0
    version: int = 0
    ignored: tuple[str, ...] = ()


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a call; choices in order of their index."""

    head: Head
    choices: tuple[Choice, ...]

    @property
    def completion_tokens(self) -> int:
        """Tokens of all choices."""
        return sum(choice.tokens for choice in self.choices)

    @property
    def reasoning_tokens(self) -> int:
        """Reasoning tokens of all choices."""
        return sum(choice.reasoning_tokens for choice in self.choices)

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts in the form of Chat Completions."""
        prompt, completion = self.head.prompt_tokens, self.completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.head.reused_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


class AnswerSink(Protocol):
    """Receives an answer while it is generated."""

    gone: Callable[[], bool]
    """Whether the client has disconnected."""

    def begin(self, head: Head) -> None:
        """The first token has arrived."""

    def text(self, index: int, text: str) -> None:
        """More text of a choice."""

    def choice(self, choice: Choice) -> None:
        """A choice has ended."""


# --- formats and streams


class StreamWriter(ABC):
    """Writes one answer as server-sent events; each method returns the bytes to send."""

    def __init__(self, call: Call, head: Head) -> None:
        self._call, self._head = call, head
        self._written: dict[int, int] = {}
        """Characters written of each choice's text."""

    def begin(self) -> bytes:
        """Open the stream."""
        return b""

    def text(self, index: int, text: str) -> bytes:
        """Write more text of a choice; its log-probabilities come with its end."""
        if not text:
            return b""
        self._written[index] = self._written.get(index, 0) + len(text)
        return self._text(index, text)

    def _unwritten(self, choice: Choice, text: str | None) -> str:
        return (text or "")[self._written.get(choice.index, 0) :]

    @abstractmethod
    def _text(self, index: int, text: str) -> bytes:
        """Write text that is not empty."""

    @abstractmethod
    def choice(self, choice: Choice) -> bytes:
        """Write what is left of a choice that has ended."""

    @abstractmethod
    def end(self, answer: Answer) -> bytes:
        """End the stream."""

    def failed(self, error: CallError) -> bytes:
        """End the stream with an error."""
        return event(error.body("openai"))


class ApiFormat(ABC):
    """One API of the gateway."""

    family: ClassVar[Family] = "openai"
    writer: ClassVar[type[StreamWriter]]
    """Writes answers to calls with `stream`."""

    @abstractmethod
    def parse(self, body: bytes) -> Call:
        """Parse a request body.

        Raises:
            CallError: 400: it is no valid request of this API.
        """

    @abstractmethod
    def render(self, call: Call, answer: Answer) -> dict[str, Any]:
        """Return the body of a whole answer."""


def event(data: Any, name: str = "") -> bytes:
    """Encode a server-sent event (WHATWG HTML, section 9.2) with JSON data."""
    head = f"event: {name}\n".encode() if name else b""
    return b"".join((head, b"data: ", msgspec.json.encode(data), b"\n\n"))


# --- parts of requests


def decode(body: bytes, kind: type[T]) -> T:
    """Decode a request body.

    Raises:
        CallError: it is no JSON, or not of this form; `param` names the field.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `")
        field = where.rstrip("`").removeprefix("$").removeprefix(".")
        raise bad_request(f"{what}{f' at {field}' if field else ''}", field or None) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"the body is no JSON: {error}", code="invalid_json") from error


def parse_stops(given: str | list[str] | None, param: str = "stop") -> tuple[str, ...]:
    """Return stop strings, checked."""
    texts = [given] if isinstance(given, str) else list(given or [])
    if len(texts) > MAX_STOPS:
        raise bad_request(f"{len(texts)} stop strings, at most {MAX_STOPS} are looked for", param)
    if wrong := [len(text) for text in texts if not 0 < len(text) <= MAX_STOP_LENGTH]:
        raise bad_request(f"a stop string of {wrong[0]} characters: 1 to {MAX_STOP_LENGTH} may be given", param)
    return tuple(texts)


def parse_n(n: int | None) -> int:
    """Return the number of answers, checked."""
    n = 1 if n is None else n
    if not 1 <= n <= MAX_CHOICES:
        raise bad_request(f"n = {n}: 1 to {MAX_CHOICES} answers can be had at once", "n")
    return n


def parse_max_tokens(given: int | None, name: str) -> int | None:
    """Return the length limit, checked."""
    if given is not None and given < 1:
        raise bad_request(f"{name} = {given}: at least one token", name)
    return given


def parse_temperature(given: float | None) -> float | None:
    """Return the temperature, checked; 0 is greedy."""
    if given is not None and not 0 <= given <= 10:
        raise bad_request(f"temperature = {given}: 0 to 10", "temperature")
    return given


ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
MEDIA = {
    **dict.fromkeys(IMAGES, "image"),
    **dict.fromkeys(("input_audio", "audio"), "audio"),
    **dict.fromkeys(("video_url", "input_video", "video"), "video"),
    **dict.fromkeys(("file", "input_file", "document"), "file"),
}
TEXTS = frozenset({"text", "input_text", "output_text", "refusal"})
PLACE = "at"
"""Key under which an image part says where in the request it is."""


def parse_message(given: Mapping[str, Any], at: str) -> Message:
    """Parse a message of Chat Completions; texts in parts are joined.

    Raises:
        CallError: it is none, or has parts that the model cannot take.
    """
    role = ROLES.get(given.get("role", ""))
    if role is None:
        raise bad_request(f"{at}.role is {given.get('role')!r}, not one of {', '.join(ROLES)}", f"{at}.role")
    parse = parse_user_content if role == "user" else parse_content
    found: Message = {"role": role, "content": parse(given.get("content"), f"{at}.content")}
    if isinstance(name := given.get("name"), str):
        found["name"] = name
    if role == "assistant":
        if given.get("function_call") is not None:
            message = f"{at}.function_call is no longer a part of the API: use tool_calls"
            raise bad_request(message, f"{at}.function_call")
        reasoning = given.get("reasoning_content") or given.get("reasoning")
        if isinstance(reasoning, str) and reasoning:
            found["reasoning_content"] = reasoning
        if calls := given.get("tool_calls"):
            if not isinstance(calls, list):
                raise bad_request(f"{at}.tool_calls is no list", f"{at}.tool_calls")
            found["tool_calls"] = [_tool_call(call, f"{at}.tool_calls[{i}]") for i, call in enumerate(calls)]
        elif found["content"] is None:
            found["content"] = ""
    elif found["content"] is None:
        raise bad_request(f"{at} has no content", f"{at}.content")
    if role == "tool":
        found["tool_call_id"] = _text(given, "tool_call_id", at)
    return found


def _tool_call(given: Any, at: str) -> dict[str, Any]:
    """Parse a tool call that the model made earlier."""
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping):
        raise bad_request(f"{at} is no call of a function", at)
    arguments = function.get("arguments", "")
    if not isinstance(arguments, str):
        raise bad_request(f"{at}.function.arguments is to be JSON in a string", f"{at}.function.arguments")
    call = {"name": _text(function, "name", f"{at}.function"), "arguments": arguments}
    return {"id": str(given.get("id") or ""), "type": "function", "function": call}


def parse_content(given: Any, at: str) -> str | None:
    """Return text, or texts in parts, as text; None where nothing is given.

    Raises:
        CallError: it is neither, or has a part that is no text.
    """
    if given is None or isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise bad_request(f"{at} is neither text nor a list of parts", at)
    return "".join(_part(part, f"{at}[{i}]") for i, part in enumerate(given))


def parse_user_content(given: Any, at: str) -> str | list[Message] | None:
    """As `parse_content`, or with images a list of parts. An image stays as it came, with its place (`at`); nothing of
    it is decoded.

    Raises:
        CallError: it is none of these, or too large.
    """
    if not isinstance(given, list) or not any(map(is_image, given)):
        return parse_content(given, at)
    found: list[Message] = []
    for i, part in enumerate(given):
        here = f"{at}[{i}]"
        if is_image(part):
            _check_bytes(part, here)
            found.append({**part, PLACE: here})
        else:
            found.append({"type": "text", "text": _part(part, here)})
    return found


def _part(part: Any, at: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in TEXTS:
        return _text(part, "refusal" if kind == "refusal" else "text", at)
    if kind in MEDIA:
        _check_bytes(part, at)
        read = "texts are, and images in user messages by vision-language models"
        raise bad_request(f"{at} is of type {MEDIA[kind]}, which is not read there: {read}", at, "unsupported_media")
    raise bad_request(f"{at} is a part of type {kind!r}; text is what can be read", at)


def image_refused(part: Mapping[str, Any]) -> CallError:
    """Return the error of an image to a text model. Nothing of the image is decoded or fetched."""
    at = str(part[PLACE])
    message = f"{at} is of type image, and the model that is trained here reads text alone"
    return bad_request(message, at, "unsupported_media")


def _check_bytes(part: Mapping[str, Any], at: str) -> None:
    """Refuse a part whose base64 data are too large, without decoding them."""
    values = [*part.values(), *(v for inner in part.values() if isinstance(inner, Mapping) for v in inner.values())]
    nbytes = max((len(value) for value in values if isinstance(value, str)), default=0) * 3 // 4
    if nbytes > MAX_MEDIA_BYTES:
        message = f"{at} is {MEDIA[part['type']]} data of {nbytes} bytes, the bound is {MAX_MEDIA_BYTES}"
        raise CallError(413, message, param=at, code="media_too_large")


def function_tool(given: Mapping[str, Any], at: str) -> dict[str, Any]:
    """Return a function in the form of Chat Completions: {"type": "function", "function": {…}}."""
    parameters = given.get("parameters")
    function = {
        "name": _text(given, "name", at),
        "description": given.get("description") or "",
        "parameters": parameters if isinstance(parameters, Mapping) else {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


def check_tools(tools: Sequence[Any]) -> Sequence[Any]:
    """Return the tools; refuse too many, tools that are too large together, and tools that are no objects."""
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"{len(tools)} tools, at most {MAX_TOOLS} can be offered", "tools")
    if any(not isinstance(tool, Mapping) for tool in tools):
        raise bad_request("a tool that is no object", "tools")
    if tools and (nbytes := len(msgspec.json.encode(tools))) > MAX_TOOL_BYTES:
        message = f"the tools have {nbytes} bytes as JSON, the bound is {MAX_TOOL_BYTES} for all of a call"
        raise CallError(413, message, param="tools", code="tools_too_large")
    return tools


def _text(given: Mapping[str, Any], key: str, at: str) -> str:
    value = given.get(key)
    if not isinstance(value, str):
        raise bad_request(f"{at}.{key} is missing or no text", f"{at}.{key}")
    return value


TRUNCATES = "it changes the distribution that is sampled from, and tokens would have no behaviour log-probability"
CONSTRAINED = "answers are sampled freely, without a grammar: nothing can force it"
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "top_p": (None, 1, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "logit_bias": (None, {}),
}
"""Options of samplers that change the distribution, with the values that leave it as it is."""


def unsupported_options(
    body: object,
    *,
    tool_choice: Any = None,
    sequential_tools: bool = False,
    text_format: tuple[str, Any] = ("", None),
    top_logprobs: tuple[str, int | None] = ("", None),
) -> tuple[Unsupported, ...]:
    """List what was requested and cannot be served.

    Args:
        body: the decoded request, whose sampler options are checked.
        tool_choice: anything but "auto" and "none" would have to be forced upon the model.
        sequential_tools: the answer must not call several tools at once.
        text_format, top_logprobs: name and value of the fields.
    """
    found = [
        Unsupported(name, TRUNCATES)
        for name, neutral in NEUTRAL_VALUES.items()
        if getattr(body, name, None) not in neutral
    ]
    if tool_choice not in (None, "auto", "none"):
        found.append(Unsupported("tool_choice", CONSTRAINED))
    if sequential_tools:
        found.append(Unsupported("parallel_tool_calls", CONSTRAINED))
    kind = text_format[1].get("type", "text") if isinstance(text_format[1], Mapping) else "text"
    if kind != "text":
        found.append(Unsupported(text_format[0], CONSTRAINED))
    if top_logprobs[1]:
        why = "the log-probability of the sampled token is kept, no others"
        found.append(Unsupported(top_logprobs[0], why))
    return tuple(found)
