"""What a caller over HTTP is told when a call cannot be answered, in the form of the API that he speaks. Pure."""

from __future__ import annotations

from typing import Any, Literal

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
