"""The gateway as an ASGI application (asgi.readthedocs.io, HTTP, version 2.3)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from relax_rt.roles.gateway.access import Caller, Keys
from relax_rt.roles.gateway.anthropic_messages import CountTokensApi, MessagesApi
from relax_rt.roles.gateway.calls import ApiFormat, Call, CallError, Choice, Family, Head, Writer
from relax_rt.roles.gateway.openai_chat import ChatApi
from relax_rt.roles.gateway.openai_completions import CompletionsApi
from relax_rt.roles.gateway.openai_responses import ResponsesApi
from relax_rt.roles.gateway.request_body import (
    LARGE_BYTES,
    PARSED_TIMES,
    ClientDisconnected,
    MemoryBudget,
    Receive,
    Scope,
    Send,
    drain_body,
    header,
    parsed_bytes,
    read_body,
)
from relax_rt.roles.gateway.server import delivered, is_disconnected
from relax_rt.roles.gateway.service import ServedAnswer, Service, new_id
from relax_rt.roles.gateway.sessions import Session, Sessions


class StreamBuffer:
    """Takes an answer as it is made and gives it out as server-sent events. What comes between two looks is put
    together: a caller who reads slowly gets fewer and larger events, and it is bounded by the answer's own length.

    Args:
        gone: whether the caller's connection is no more.
    """

    def __init__(self, dialect: ApiFormat, call: Call, gone: Callable[[], bool] = lambda: False) -> None:
        self._dialect, self._call, self.gone = dialect, call, gone
        self.writer: Writer | None = None
        self.head: Head | None = None
        self.news = asyncio.Event()
        self._started = False
        self._texts: dict[int, str] = {}
        self._choices: list[Choice] = []

    def begin(self, head: Head) -> None:
        """Take the answer's head."""
        self.head, self.writer = head, self._dialect.writer(self._call, head)
        self.news.set()

    def text(self, index: int, text: str) -> None:
        """Take more text of a choice."""
        self._texts[index] = self._texts.get(index, "") + text
        self.news.set()

    def choice(self, choice: Choice) -> None:
        """Take the end of a choice."""
        self._choices.append(choice)
        self.news.set()

    def take(self) -> bytes:
        """All that there is."""
        self.news.clear()
        assert self.writer is not None
        out = b"" if self._started else self.writer.begin()
        self._started = True
        texts, self._texts = self._texts, {}
        choices, self._choices = self._choices, []
        out += b"".join(self.writer.text(index, text) for index, text in texts.items())
        return out + b"".join(self.writer.choice(choice) for choice in choices)


T = TypeVar("T")
Headers = list[tuple[bytes, bytes]]

log = logging.getLogger(__name__)

JSON = (b"content-type", b"application/json")
CLOSE = (b"connection", b"close")
SLICE = 64 << 10
UNAUTHENTICATED_BYTES = 64 << 10
"""Of a body that are taken, and thrown away, from somebody without a key, so that he sees why he is refused."""
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
        body_bytes: of one body. held_bytes: of the bodies of all calls at hand.
        body_s: until a body must be there, seconds. send_s: until a caller must have taken the end of an answer.
    """

    body_bytes: int = 16 << 20
    held_bytes: int = 256 << 20
    body_s: float = 30.0
    send_s: float = 60.0


class Gateway:
    """All that answers a call.

    Args:
        health: why calls are not answered; empty if they are.
        worked: called for each answer.
    """

    def __init__(
        self,
        service: Service,
        sessions: Sessions,
        keys: Keys,
        bounds: HttpLimits,
        *,
        health: Callable[[], str] = lambda: "",
        worked: Callable[[], None] = lambda: None,
    ) -> None:
        self.service, self.sessions, self.keys, self.bounds = service, sessions, keys, bounds
        self.health, self.worked = health, worked
        self.memory = MemoryBudget(bounds.held_bytes)

    def application(self) -> Starlette:
        """The ASGI application."""
        calls = [Route(path, _ApiEndpoint(self, *of), methods=["POST"]) for path, of in ROUTES.items()]
        return Starlette(
            routes=[
                *calls,
                Route(COUNT, _CountTokensEndpoint(self, "msg_", CountTokensApi()), methods=["POST"]),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/v1/models/{name:path}", self._model, methods=["GET"]),
                Route("/health", self._health, methods=["GET"]),
            ],
            exception_handlers={HTTPException: _no_such_thing, CallError: _refused},
        )

    def session_of(self, scope: Scope, previous: Callable[[], str]) -> Session:
        """The session that a call belongs to.

        Raises:
            CallError: 401 no key or a wrong one; the session is not open.
        """
        caller = self.admitted(scope)
        if caller.session:
            # Clients send the header on their own account, to be routed to one engine: the key is what counts.
            return self.sessions.of_key(caller.session, caller.nonce)
        asked = header(scope, b"x-session-id")
        if len(asked) > 200 or not asked.isascii():
            raise CallError(400, "X-Session-Id is to be of at most 200 ASCII characters", param="X-Session-Id")
        return self.sessions.of_run(asked, previous())

    def admitted(self, scope: Scope) -> Caller:
        """Whose key was shown.

        Raises:
            CallError: 401 neither was.
        """
        kind, _, key = header(scope, b"authorization").partition(" ")
        key = key.strip() if kind.lower() == "bearer" else header(scope, b"x-api-key")
        if (caller := self.keys.check(key)) is None:
            what = "the API key is wrong" if key else "there is no API key"
            hint = "use the run's token (gateway.token in the run's folder) or a session's key"
            raise CallError(401, f"{what}: {hint}", code="invalid_api_key")
        return caller

    async def _models(self, request: Request) -> Response:
        self.admitted(request.scope)
        if header(request.scope, b"anthropic-version"):
            found = [_anthropic_model(name) for name in self._names()]
            first, last = (found[0]["id"], found[-1]["id"]) if found else (None, None)
            return _json({"data": found, "has_more": False, "first_id": first, "last_id": last})
        return _json({"object": "list", "data": [_openai_model(name) for name in self._names()]})

    async def _model(self, request: Request) -> Response:
        self.admitted(request.scope)
        name = request.path_params["name"]
        if name not in self._names():
            raise CallError(404, f"there is no model {name!r} here", code="model_not_found")
        anthropic = bool(header(request.scope, b"anthropic-version"))
        return _json(_anthropic_model(name) if anthropic else _openai_model(name))

    async def _health(self, request: Request) -> Response:
        why = self.health()
        return _json({"status": why or "ok"}, 503 if why else 200)

    def _names(self) -> list[str]:
        return [name for name in self.service.terms.models if name != "*"]


class _ApiEndpoint:
    """One API's calls."""

    def __init__(self, gateway: Gateway, prefix: str, dialect: ApiFormat) -> None:
        self._gateway, self._prefix, self._dialect = gateway, prefix, dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = new_id(self._prefix)
        out = _ResponseSender(send)
        try:
            # Before anything is read of somebody without a key.
            self._gateway.admitted(scope)
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
        gateway, bounds = self._gateway, self._gateway.bounds
        body = await read_body(scope, receive, bounds.body_bytes, bounds.body_s, hold)
        call = await self._parsed(body, hold)
        del body
        session = gateway.session_of(scope, lambda: call.previous)
        box = StreamBuffer(self._dialect, call, lambda: is_disconnected(scope)) if call.stream else None
        work = asyncio.ensure_future(gateway.service.answer(call, session, request, box))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            if box is not None:
                await self._stream(box, work, gone, out, session)
            made = await _unless(gone, work)
            if call.store and not session.trained:
                gateway.sessions.remember(request, session)
            gateway.worked()
            # One turn of the loop: that the caller hung up meanwhile may not have been read yet.
            await asyncio.sleep(0)
            received = False
            try:
                if not gone.done():
                    await self._send_end(call, made, session, box, out)
                    received = await delivered(scope, bounds.send_s)
            finally:
                if not received:
                    gateway.service.undelivered(made, session)
        finally:
            for task in (gone, work):
                task.cancel()
            await asyncio.gather(gone, work, return_exceptions=True)

    async def _parsed(self, body: bytes, hold: Callable[[int], None]) -> Call:
        """The call that a body is; in a thread where that takes long."""
        most = PARSED_TIMES * self._gateway.bounds.body_bytes
        large = len(body) >= LARGE_BYTES
        nbytes = await asyncio.to_thread(parsed_bytes, body) if large else parsed_bytes(body)
        if nbytes > most:
            message = f"the body's values would take {nbytes} bytes of memory, the bound is {most}"
            raise CallError(413, f"{message} ({PARSED_TIMES} times roles.gateway.body_mib)", code="body_too_large")
        hold(nbytes)
        parse = self._dialect.parse
        call = await asyncio.to_thread(parse, body) if large else parse(body)
        return msgspec.structs.replace(call, nbytes=len(body))

    async def _send_end(
        self, call: Call, made: ServedAnswer, session: Session, box: StreamBuffer | None, out: _ResponseSender
    ) -> None:
        """All of an answer, or what is left of its stream."""
        if box is None:
            headers = _headers(session, made.answer.head, made.versions)
            await out.whole(200, msgspec.json.encode(self._dialect.render(call, made.answer)), headers)
        else:
            assert box.writer is not None
            await out.more(box.take() + box.writer.end(made.answer), last=True)

    async def _stream(
        self,
        box: StreamBuffer,
        work: asyncio.Future[ServedAnswer],
        gone: asyncio.Future[None],
        out: _ResponseSender,
        session: Session,
    ) -> None:
        """Send what is made until all of it is, or it has failed."""
        while not work.done():
            news = asyncio.ensure_future(box.news.wait())
            any_of: list[asyncio.Future[Any]] = [news, work, gone]
            try:
                await asyncio.wait(any_of, return_when=asyncio.FIRST_COMPLETED)
            finally:
                news.cancel()
            if gone.done():
                raise ClientDisconnected
            if box.news.is_set() and not work.done():
                await self._start(out, session, box)
                await out.more(box.take())
        if not work.cancelled() and work.exception() is None:
            await self._start(out, session, box)
        elif out.started:
            await out.more(box.take())

    async def _start(self, out: _ResponseSender, session: Session, box: StreamBuffer) -> None:
        if not out.started:
            assert box.head is not None
            kind = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
            await out.start(200, [*kind, *_headers(session, box.head, (box.head.version,) * 2)])
            assert box.writer is not None
            out.failed = box.writer.failed

    async def _fail(self, error: CallError, receive: Receive, out: _ResponseSender, request: str) -> None:
        """Tell the caller of an error: in an event, where his answer has begun."""
        if out.started:
            if not out.ended:
                await out.more(out.failed(error), last=True)
            return
        body = msgspec.json.encode(error.body(self._dialect.family, request))
        early = error.status in (401, 408, 413, 503)
        headers = [*error.headers, (b"x-request-id", request.encode()), (b"request-id", request.encode())]
        # Early: the body was not read to its end.
        await out.start(error.status, [JSON, *_length(body), *headers, *([CLOSE] if early else [])])
        await out.more(body)
        if early and error.status != 408:
            await drain_body(receive, *([UNAUTHENTICATED_BYTES] if error.status == 401 else []))
        await out.more(b"", last=True)


class _CountTokensEndpoint(_ApiEndpoint):
    """Counts tokens, of a call that would begin a conversation: an episode has no call by it."""

    async def _answer(
        self, scope: Scope, receive: Receive, out: _ResponseSender, request: str, hold: Callable[[int], None]
    ) -> None:
        gateway, bounds = self._gateway, self._gateway.bounds
        call = await self._parsed(await read_body(scope, receive, bounds.body_bytes, bounds.body_s, hold), hold)
        count = await gateway.service.count(call, gateway.sessions.of_run("", ""))
        headers = [(b"x-request-id", request.encode()), (b"request-id", request.encode())]
        await out.whole(200, msgspec.json.encode({"input_tokens": count}), headers)


class _ResponseSender:
    """Sends an answer, in slices, so that a caller who does not take them holds no more than a few in memory."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = self.ended = False
        self.failed: Callable[[CallError], bytes] = lambda error: b""
        """What a stream that has begun ends with."""

    async def start(self, status: int, headers: Headers) -> None:
        """The head."""
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def more(self, body: bytes, *, last: bool = False) -> None:
        """More of the body. It returns at once when the caller is gone."""
        self.ended = self.ended or last
        for at in range(0, max(len(body), last), SLICE):
            end = last and at + SLICE >= len(body)
            await self._send({"type": "http.response.body", "body": body[at : at + SLICE], "more_body": not end})

    async def whole(self, status: int, body: bytes, headers: Headers) -> None:
        """All of it."""
        await self.start(status, [JSON, *_length(body), *headers])
        await self.more(body, last=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _unless(gone: asyncio.Future[None], work: asyncio.Future[T]) -> T:
    """The work's result.

    Raises:
        ClientDisconnected: the caller went before.
    """
    either: list[asyncio.Future[Any]] = [gone, work]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if not work.done():
        raise ClientDisconnected
    return work.result()


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


def _openai_model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "relax-rt"}


def _anthropic_model(name: str) -> dict[str, Any]:
    return {"id": name, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def _family(path: str) -> Family:
    return "anthropic" if path.startswith("/v1/messages") else "openai"


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, CallError)
    response = _json(error.body(_family(request.url.path)), error.status)
    response.raw_headers += error.headers
    return response


async def _no_such_thing(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    known = [f"POST {known}" for known in (*ROUTES, COUNT)] + ["GET /v1/models", "GET /health"]
    message = f"{request.method} {path}: there is {', '.join(known)}"
    code = "method_not_allowed" if error.status_code == 405 else "no_such_endpoint"
    response = await _refused(request, CallError(error.status_code, message, code=code))
    response.headers.update(error.headers or {})
    return response
