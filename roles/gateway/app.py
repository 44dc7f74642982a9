"""The gateway as an ASGI application (asgi.readthedocs.io, HTTP, version 2.3): endpoints, and answers that stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from relax_rt.roles.gateway.access import Caller, Keys
from relax_rt.roles.gateway.anthropic_messages import CountTokensApi, MessagesApi
from relax_rt.roles.gateway.calls import ApiFormat, Call, CallError, Choice, Head, StreamWriter
from relax_rt.roles.gateway.openai_chat import ChatApi, CompletionsApi
from relax_rt.roles.gateway.openai_responses import ResponsesApi
from relax_rt.roles.gateway.server import (
    LARGE_BYTES,
    PARSED_TIMES,
    ClientDisconnected,
    MemoryBudget,
    Receive,
    Scope,
    Send,
    delivered,
    drain_body,
    header,
    is_disconnected,
    parsed_bytes,
    read_body,
)
from relax_rt.roles.gateway.service import ServedAnswer, Service, new_id
from relax_rt.roles.gateway.sessions import Session, Sessions

Headers = list[tuple[bytes, bytes]]

log = logging.getLogger(__name__)

JSON = (b"content-type", b"application/json")
CLOSE = (b"connection", b"close")
SLICE = 64 << 10
UNAUTHENTICATED_BYTES = 64 << 10
"""Bytes of a body that are read, and dropped, from a client without a key, so that it sees why it is refused."""
ROUTES: Mapping[str, tuple[str, ApiFormat]] = {
    "/v1/chat/completions": ("chatcmpl-", ChatApi()),
    "/v1/completions": ("cmpl-", CompletionsApi()),
    "/v1/responses": ("resp_", ResponsesApi()),
    "/v1/messages": ("msg_", MessagesApi()),
}
COUNT = "/v1/messages/count_tokens"


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of bodies and answers.

    Attributes:
        body_bytes: of one body. held_bytes: of the bodies of all calls in progress.
        body_s: time until a body must have arrived. send_s: time until a client must have read the end of an answer.
    """

    body_bytes: int = 16 << 20
    held_bytes: int = 256 << 20
    body_s: float = 30.0
    send_s: float = 60.0


class Gateway:
    """Everything that answers calls.

    Args:
        health: why calls are not answered; empty if they are.
        worked: called for each answer.
    """

    def __init__(
        self,
        service: Service,
        sessions: Sessions,
        keys: Keys,
        limits: HttpLimits,
        *,
        health: Callable[[], str] = lambda: "",
        worked: Callable[[], None] = lambda: None,
    ) -> None:
        self.service, self.sessions, self.keys, self.limits = service, sessions, keys, limits
        self.health, self.worked = health, worked
        self.memory = MemoryBudget(limits.held_bytes)

    def application(self) -> Starlette:
        """Return the ASGI application."""
        calls = [Route(path, _ApiEndpoint(self, *of), methods=["POST"]) for path, of in ROUTES.items()]
        return Starlette(
            routes=[
                *calls,
                Route(COUNT, _CountTokensEndpoint(self, "msg_", CountTokensApi()), methods=["POST"]),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/v1/models/{name:path}", self._model, methods=["GET"]),
                Route("/health", self._health, methods=["GET"]),
            ],
            exception_handlers={HTTPException: _unknown_endpoint, CallError: _error_response},
        )

    def session_of(self, scope: Scope, previous: str) -> Session:
        """Return the session that a call belongs to.

        Raises:
            CallError: 401: no key, or a wrong one; 409: the session is not open.
        """
        caller = self.authenticate(scope)
        if caller.session:
            # Clients also set the header on their own, to be routed to one engine: the key decides.
            return self.sessions.of_key(caller.session, caller.nonce)
        name = header(scope, b"x-session-id")
        if len(name) > 200 or not name.isascii():
            raise CallError(400, "X-Session-Id is to be of at most 200 ASCII characters", param="X-Session-Id")
        return self.sessions.of_run(name, previous)

    def authenticate(self, scope: Scope) -> Caller:
        """Return whose key the request carries.

        Raises:
            CallError: 401: no key, or a wrong one.
        """
        kind, _, key = header(scope, b"authorization").partition(" ")
        key = key.strip() if kind.lower() == "bearer" else header(scope, b"x-api-key")
        if (caller := self.keys.check(key)) is None:
            what = "the API key is wrong" if key else "there is no API key"
            hint = "use the run's token (gateway.token in the run's folder) or a session's key"
            raise CallError(401, f"{what}: {hint}", code="invalid_api_key")
        return caller

    async def _models(self, request: Request) -> Response:
        self.authenticate(request.scope)
        models = [_model(request, name) for name in self.service.policy.models if name != "*"]
        if not header(request.scope, b"anthropic-version"):
            return _json({"object": "list", "data": models})
        first, last = (models[0]["id"], models[-1]["id"]) if models else (None, None)
        return _json({"data": models, "has_more": False, "first_id": first, "last_id": last})

    async def _model(self, request: Request) -> Response:
        self.authenticate(request.scope)
        name = request.path_params["name"]
        if name not in self.service.policy.models or name == "*":
            raise CallError(404, f"there is no model {name!r} here", code="model_not_found")
        return _json(_model(request, name))

    async def _health(self, request: Request) -> Response:
        why = self.health()
        return _json({"status": why or "ok"}, 503 if why else 200)


class StreamBuffer:
    """Takes an answer as it is generated and returns it as server-sent events.

    What arrives between two `take` calls is merged: a slow client gets fewer and larger events, and the buffer is
    bounded by the length of the answer.

    Args:
        gone: whether the client has disconnected.
    """

    def __init__(self, api: ApiFormat, call: Call, gone: Callable[[], bool] = lambda: False) -> None:
        self._api, self._call, self.gone = api, call, gone
        self.writer: StreamWriter | None = None
        self.head: Head | None = None
        self.changed = asyncio.Event()
        self._started = False
        self._texts: dict[int, str] = {}
        self._choices: list[Choice] = []

    def begin(self, head: Head) -> None:
        """Add the answer's head."""
        self.head, self.writer = head, self._api.writer(self._call, head)
        self.changed.set()

    def text(self, index: int, text: str) -> None:
        """Add more text of a choice."""
        self._texts[index] = self._texts.get(index, "") + text
        self.changed.set()

    def choice(self, choice: Choice) -> None:
        """Add the end of a choice."""
        self._choices.append(choice)
        self.changed.set()

    def take(self) -> bytes:
        """Return all new events."""
        self.changed.clear()
        assert self.writer is not None
        out = b"" if self._started else self.writer.begin()
        self._started = True
        texts, self._texts = self._texts, {}
        choices, self._choices = self._choices, []
        out += b"".join(self.writer.text(index, text) for index, text in texts.items())
        return out + b"".join(self.writer.choice(choice) for choice in choices)


class _ApiEndpoint:
    """The endpoint of one API."""

    def __init__(self, gateway: Gateway, prefix: str, api: ApiFormat) -> None:
        self._gateway, self._prefix, self._api = gateway, prefix, api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = new_id(self._prefix)
        out = _ResponseSender(send)
        try:
            # Before anything is read of a client without a key.
            self._gateway.authenticate(scope)
            with self._gateway.memory.share() as hold:
                await self._answer(scope, receive, out, request, hold)
        except ClientDisconnected:
            pass
        except CallError as error:
            await self._fail(error, receive, out, request)
        except Exception:
            log.exception("a call of %s", scope["path"])
            failed = CallError(500, "the gateway failed; its log has more", code="internal_error")
            await self._fail(failed, receive, out, request)

    async def _answer(
        self, scope: Scope, receive: Receive, out: _ResponseSender, request: str, hold: Callable[[int], None]
    ) -> None:
        gateway = self._gateway
        call = await self._read(scope, receive, hold)
        session = gateway.session_of(scope, call.previous)
        buffer = StreamBuffer(self._api, call, lambda: is_disconnected(scope)) if call.stream else None
        work = asyncio.ensure_future(gateway.service.answer(call, session, request, buffer))
        gone = asyncio.ensure_future(_wait_for_disconnect(receive))
        try:
            if buffer is not None:
                await self._stream(buffer, work, gone, out, session)
            await asyncio.wait([gone, work], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientDisconnected
            served = work.result()
            if call.store and not session.trained:
                gateway.sessions.remember(request, session)
            gateway.worked()
            # One iteration of the loop: a disconnect that came meanwhile may not have been read yet.
            await asyncio.sleep(0)
            received = False
            try:
                if not gone.done():
                    if buffer is None:
                        body = msgspec.json.encode(self._api.render(call, served.answer))
                        await out.whole(200, body, _headers(session, served.answer.head, served.versions))
                    else:
                        assert buffer.writer is not None
                        await out.more(buffer.take() + buffer.writer.end(served.answer), last=True)
                    received = await delivered(scope, gateway.limits.send_s)
            finally:
                if not received:
                    gateway.service.undelivered(served, session)
        finally:
            for task in (gone, work):
                task.cancel()
            await asyncio.gather(gone, work, return_exceptions=True)

    async def _read(self, scope: Scope, receive: Receive, hold: Callable[[int], None]) -> Call:
        """Read and parse a request; large ones are parsed in a thread."""
        limits = self._gateway.limits
        body = await read_body(scope, receive, limits.body_bytes, limits.body_s, hold)
        most = PARSED_TIMES * limits.body_bytes
        large = len(body) >= LARGE_BYTES
        nbytes = await asyncio.to_thread(parsed_bytes, body) if large else parsed_bytes(body)
        if nbytes > most:
            message = f"the body's values would take {nbytes} bytes of memory, the bound is {most}"
            raise CallError(413, f"{message} ({PARSED_TIMES} times roles.gateway.body_mib)", code="body_too_large")
        hold(nbytes)
        call = await asyncio.to_thread(self._api.parse, body) if large else self._api.parse(body)
        return msgspec.structs.replace(call, nbytes=len(body))

    async def _stream(
        self,
        buffer: StreamBuffer,
        work: asyncio.Future[ServedAnswer],
        gone: asyncio.Future[None],
        out: _ResponseSender,
        session: Session,
    ) -> None:
        """Send events until the answer is complete or has failed."""

        async def start() -> None:
            if not out.started:
                assert buffer.head is not None and buffer.writer is not None
                kind = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
                await out.start(200, [*kind, *_headers(session, buffer.head, (buffer.head.version,) * 2)])
                out.failed = buffer.writer.failed

        while not work.done():
            changed = asyncio.ensure_future(buffer.changed.wait())
            any_of: list[asyncio.Future[Any]] = [changed, work, gone]
            try:
                await asyncio.wait(any_of, return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()
            if gone.done():
                raise ClientDisconnected
            if buffer.changed.is_set() and not work.done():
                await start()
                await out.more(buffer.take())
        if not work.cancelled() and work.exception() is None:
            await start()
        elif out.started:
            await out.more(buffer.take())

    async def _fail(self, error: CallError, receive: Receive, out: _ResponseSender, request: str) -> None:
        """Send an error: as an event, if the answer has begun."""
        if out.started:
            if not out.ended:
                await out.more(out.failed(error), last=True)
            return
        body = msgspec.json.encode(error.body(self._api.family, request))
        # These errors come before the body was read to its end.
        early = error.status in (401, 408, 413, 503)
        headers = [*error.headers, (b"x-request-id", request.encode()), (b"request-id", request.encode())]
        await out.start(error.status, [JSON, *_length(body), *headers, *([CLOSE] if early else [])])
        await out.more(body)
        if early and error.status != 408:
            await drain_body(receive, *([UNAUTHENTICATED_BYTES] if error.status == 401 else []))
        await out.more(b"", last=True)


class _CountTokensEndpoint(_ApiEndpoint):
    """Counts the tokens of a call that would begin a conversation; no episode records it."""

    async def _answer(
        self, scope: Scope, receive: Receive, out: _ResponseSender, request: str, hold: Callable[[int], None]
    ) -> None:
        gateway = self._gateway
        count = await gateway.service.count(await self._read(scope, receive, hold), gateway.sessions.of_run("", ""))
        headers = [(b"x-request-id", request.encode()), (b"request-id", request.encode())]
        await out.whole(200, msgspec.json.encode({"input_tokens": count}), headers)


class _ResponseSender:
    """Sends a response in slices, so that a client that does not read holds only a few of them in memory."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = self.ended = False
        self.failed: Callable[[CallError], bytes] = lambda error: b""
        """Encodes the error at the end of a stream."""

    async def start(self, status: int, headers: Headers) -> None:
        """Send the head."""
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def more(self, body: bytes, *, last: bool = False) -> None:
        """Send more of the body. Returns at once if the client has disconnected."""
        self.ended = self.ended or last
        for at in range(0, max(len(body), last), SLICE):
            end = last and at + SLICE >= len(body)
            await self._send({"type": "http.response.body", "body": body[at : at + SLICE], "more_body": not end})

    async def whole(self, status: int, body: bytes, headers: Headers) -> None:
        """Send a whole response."""
        await self.start(status, [JSON, *_length(body), *headers])
        await self.more(body, last=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _headers(session: Session, head: Head, versions: tuple[int, int]) -> Headers:
    low, high = versions
    found = [(b"x-request-id", head.id), (b"request-id", head.id)]
    found.append((b"x-relax-policy-version", f"{low}" if low == high else f"{low}-{high}"))
    if session.kept:
        found.append((b"x-relax-session", session.name))
    if head.ignored:
        found.append((b"x-relax-ignored", ", ".join(head.ignored)))
    return [(name, value.encode("latin-1", "replace")) for name, value in found]


def _length(body: bytes) -> Headers:
    return [(b"content-length", str(len(body)).encode())]


def _json(data: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(data), status, media_type="application/json")


def _model(request: Request, name: str) -> dict[str, Any]:
    """Return a model in the form of the API that the client speaks."""
    if header(request.scope, b"anthropic-version"):
        return {"id": name, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
    return {"id": name, "object": "model", "created": 0, "owned_by": "relax-rt"}


async def _error_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, CallError)
    anthropic = request.url.path.startswith("/v1/messages")
    response = _json(error.body("anthropic" if anthropic else "openai"), error.status)
    response.raw_headers += error.headers
    return response


async def _unknown_endpoint(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = [f"POST {path}" for path in (*ROUTES, COUNT)] + ["GET /v1/models", "GET /health"]
    message = f"{request.method} {request.url.path}: there is {', '.join(known)}"
    code = "method_not_allowed" if error.status_code == 405 else "no_such_endpoint"
    response = await _error_response(request, CallError(error.status_code, message, code=code))
    response.headers.update(error.headers or {})
    return response
