"""What the HTTP APIs have in common: one form of call that each is translated to, one of answer, and errors. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeVar

import msgspec

Family = Literal["openai", "anthropic"]

KINDS = {
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
"""Of a status: the kind of error in OpenAI's form and in Anthropic's (both as their clients document them)."""


class CallError(Exception):
    """A call is answered with an error.

    Args:
        status: of HTTP.
        message: what is wrong and what to do, in a sentence or two.
        param: the field of the request that is meant.
        code: a word for programs.
        retry_after_s: when to come again, seconds; 0: nothing is said.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: float = 0
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """What goes with it: when to come again, in whole seconds, and whether clients should try by themselves."""
        if self.retry_after_s > 0:
            after = max(1, round(self.retry_after_s + 0.499))
            return [(b"retry-after", str(after).encode()), (b"x-should-retry", b"true")]
        return [] if self.status in (408, 429, 500, 503, 504) else [(b"x-should-retry", b"false")]

    def body(self, family: Family, request_id: str = "") -> dict[str, Any]:
        """The answer's body."""
        openai, anthropic = KINDS.get(self.status, KINDS[500] if self.status >= 500 else KINDS[400])
        if family == "anthropic":
            error = {"type": anthropic, "message": self.message}
            return {"type": "error", "error": error, "request_id": request_id or None}
        return {"error": {"message": self.message, "type": openai, "param": self.param, "code": self.code}}


def bad(message: str, param: str | None = None, code: str | None = None) -> CallError:
    """The request itself is wrong (400)."""
    return CallError(400, message, param=param, code=code)


Message = dict[str, Any]
"""As in OpenAI's Chat Completions: role, content, tool_calls, tool_call_id, name, reasoning_content."""
FinishReason = Literal["stop", "length", "tool_calls"]
T = TypeVar("T")

MAX_MESSAGES, MAX_TOOLS, MAX_STOPS, MAX_CHOICES = 4096, 256, 16, 128
MAX_STOP_LENGTH = 256
"""Characters of a stop string: so many are held back from a stream at most."""
MAX_TOOL_BYTES = 1 << 20
"""Of all tools of a call, as JSON."""


class Unsupported(msgspec.Struct, frozen=True):
    """Something that was asked for and cannot be done here; whether it is refused or left out is the gateway's setting.

    Attributes:
        name: the field. why: it cannot be done.
    """

    name: str
    why: str


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A call, whichever API it came by.

    Attributes:
        messages: the conversation; empty if `prompts` is not.
        instructions: a system message before them, which belongs to this call alone (Responses).
        prompts: texts or token ids to go on with (Completions).
        tools: functions offered, in the form of Chat Completions.
        may_call: the answer may call them; else it is text, whatever it says.
        n: answers for each prompt.
        max_tokens: of an answer; None: as many as the gateway allows.
        temperature: None: the run's.
        stop: an answer ends before the first of these texts.
        seed: None: of the gateway's choice.
        logprobs: of the sampled tokens are told.
        usage_chunk: a stream ends with the numbers of tokens.
        previous: id of the answer that this call goes on from (Responses).
        store: keep the answer, so that a later call can go on from it (Responses).
        echo: an answer begins with its prompt (Completions).
        unsupported: what was asked for besides.
        said: fields of the request that the answer repeats (Responses).
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
    said: dict[str, Any] = {}
    nbytes: int = 0


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """A sampled token: its text, its bytes as far as they are text, and its behaviour log-probability."""

    token: str
    logprob: float

    @property
    def bytes(self) -> list[int]:
        """UTF-8 of the text."""
        return list(self.token.encode())


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to a call.

    Attributes:
        index: among the call's answers.
        reply: its id.
        message: as the assistant's message of Chat Completions.
        text: of a completion without messages.
        stop: the stop string that ended it.
        tokens: sampled ones. thought: those up to the end of its thoughts.
        logprobs: of the tokens, if they were asked for.
    """

    index: int
    reply: str
    message: Message
    text: str
    finish_reason: FinishReason
    stop: str | None = None
    tokens: int = 0
    thought: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an answer when its first token is.

    Attributes:
        created: seconds since 1970.
        model: as it was asked for.
        reused_tokens: prompt tokens that were there from earlier answers of the session.
        version: policy version of the first token; 0 before it is there.
        ignored: what was asked for and not done.
    """

    id: str
    created: int
    model: str
    prompt_tokens: int = 0
    reused_tokens: int = 0
    version: int = 0
    ignored: tuple[str, ...] = ()


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a call is answered with; choices in order of their index."""

    head: Head
    choices: tuple[Choice, ...]

    @property
    def completion_tokens(self) -> int:
        """Tokens of all choices."""
        return sum(choice.tokens for choice in self.choices)

    @property
    def thought_tokens(self) -> int:
        """Reasoning tokens of all choices."""
        return sum(choice.thought for choice in self.choices)

    @property
    def usage(self) -> dict[str, Any]:
        """Numbers of tokens in the form of Chat Completions."""
        prompt, completion = self.head.prompt_tokens, self.completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.head.reused_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.thought_tokens},
        }


class Writer(Protocol):
    """Writes one answer as server-sent events; what it returns is to be sent."""

    def begin(self) -> bytes:
        """The head of it."""

    def text(self, index: int, text: str) -> bytes:
        """More of the text of a choice; its log-probabilities come with its end."""

    def choice(self, choice: Choice) -> bytes:
        """A choice has ended: what of it has not been written."""

    def end(self, answer: Answer) -> bytes:
        """All have ended."""

    def failed(self, error: CallError) -> bytes:
        """It cannot be gone on with."""


class AnswerSink(Protocol):
    """Who looks on while an answer is made."""

    gone: Callable[[], bool]
    """Whether he is there no more."""

    def begin(self, head: Head) -> None:
        """The first token is there."""

    def text(self, index: int, text: str) -> None:
        """More of a choice."""

    def choice(self, choice: Choice) -> None:
        """A choice has ended."""


class ApiFormat(Protocol):
    """An API of the gateway."""

    family: Family

    def parse(self, body: bytes) -> Call:
        """Raises CallError (400): it is none of this API's requests."""

    def render(self, call: Call, answer: Answer) -> dict[str, Any]:
        """The answer's body."""

    def writer(self, call: Call, head: Head) -> Writer:
        """For a call with `stream`."""


def decode(body: bytes, kind: type[T]) -> T:
    """A request body as its struct.

    Raises:
        CallError: it is no JSON, or not of this form; `param` names the field.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `")
        raise bad(f"{what}{f' at {field}' if (field := _field(where)) else ''}", _field(where) or None) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad(f"the body is no JSON: {error}", code="invalid_json") from error


def _field(where: str) -> str:
    return where.rstrip("`").removeprefix("$").removeprefix(".")


def stops(given: str | list[str] | None, param: str = "stop") -> tuple[str, ...]:
    """Stop strings.

    Raises:
        CallError: too many, too long or empty.
    """
    texts = [given] if isinstance(given, str) else list(given or [])
    if len(texts) > MAX_STOPS:
        raise bad(f"{len(texts)} stop strings, at most {MAX_STOPS} are looked for", param)
    if wrong := [len(text) for text in texts if not 0 < len(text) <= MAX_STOP_LENGTH]:
        raise bad(f"a stop string of {wrong[0]} characters: 1 to {MAX_STOP_LENGTH} may be given", param)
    return tuple(texts)


def event(data: Any, name: str = "") -> bytes:
    """One server-sent event (WHATWG HTML, section 9.2) with JSON data."""
    head = f"event: {name}\n".encode() if name else b""
    return b"".join((head, b"data: ", msgspec.json.encode(data), b"\n\n"))
