"""uvicorn with the bounds that it lacks: connections, time for heads and bodies, and memory of bodies."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any, ClassVar

import h11
import msgspec
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from relax_rt.roles.gateway.calls import CallError
from relax_rt.transport.rpc.errors import RelaxError

Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Scope = MutableMapping[str, Any]

HEAD_BYTES = 32 << 10
KEEP_ALIVE_S = 75
GRACE_S = 2
POLL_TICKS = 50
BACKLOG = 2048
CONNECTION = "relax.connection"
"""Key in a request's scope: its connection."""
POLL_S = 0.01
LINGER_S = 2.0
LINGER_BYTES = 256 << 20
"""Bytes read, and dropped, from a client with a key after it was refused."""
LARGE_BYTES = 1 << 18
"""Requests from this size on are parsed in a thread: other callers would notice the time that it takes."""
VALUE_BYTES = 64
"""Approximate memory of a JSON value that is no text, once it is parsed."""
PARSED_TIMES = 4
"""The values of a body may take this multiple of the bound of the body itself."""
TEXTS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""Texts of JSON; one without an end extends to the end of the body, so that nothing is scanned twice."""


class BoundedProtocol(H11Protocol):
    """A connection that must send a request's head within `head_s` and read what it is sent within `send_s`.

    At most `most` are open. When another one comes, an idle one is closed; if there is none, the new one is rejected.
    """

    most: ClassVar[int] = 1024
    head_s: ClassVar[float] = 10.0
    send_s: ClassVar[float] = 60.0
    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _closing_since: float | None = None
    rejected = False
    lost = broken = False
    """The connection has ended; it ended before everything that was sent was read."""

    def unsent(self) -> int:
        """Return the number of bytes that the client has not read yet."""
        return 0 if self.lost else self.transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most and not self._make_room():
            self.rejected = True
            self._answer(CallError(503, f"{self.most} connections are open, the bound", retry_after_s=1.0))
            return
        self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        if self.rejected:
            return
        if self.idle and self._deadline is None:
            self._start_head_timer()
        super().data_received(data)
        if not self.idle:
            self._cancel_head_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self.send_s, self._abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_unread_timer()

    def poll(self, now: float) -> None:
        """Abort a closing connection whose client does not read the rest; called regularly."""
        if self.transport.is_closing():
            self._closing_since = self._closing_since or now
            if now - self._closing_since > self.send_s:
                self._abort()

    def connection_lost(self, exc: Exception | None) -> None:
        cut = self.cycle is not None and not self.cycle.response_complete
        self.lost, self.broken = True, self.broken or exc is not None or cut
        self._cancel_head_timer()
        self._cancel_unread_timer()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer with JSON in place of uvicorn's plain text."""
        self._answer(CallError(400, f"this is no HTTP request: {msg}", code="invalid_http"))

    def shutdown(self) -> None:
        """Close the connection; one that was answered is closing already."""
        if not self.transport.is_closing():
            super().shutdown()

    @property
    def idle(self) -> bool:
        """Whether no request is in progress."""
        return self.cycle is None or self.cycle.response_complete

    def _start_head_timer(self) -> None:
        self._deadline = self.loop.call_later(self.head_s, self._late)

    def _cancel_head_timer(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _cancel_unread_timer(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _late(self) -> None:
        self._deadline = None
        if self.idle and not self.transport.is_closing():
            self._answer(CallError(408, f"no request was here in {self.head_s:g} s", code="head_timeout"))

    def _abort(self) -> None:
        self.broken = True
        self.transport.abort()

    def _make_room(self) -> bool:
        """Close a connection between two requests: clients open another when they need it."""
        for one in self.connections:
            if isinstance(one, BoundedProtocol) and one is not self and one.cycle is not None and one.idle:
                self.connections.discard(one)
                one.transport.close()
                return True
        return False

    def _answer(self, error: CallError) -> None:
        """Write an error without a request cycle: there may be no request to answer."""
        if not self.transport.is_closing():
            body = msgspec.json.encode(error.body("openai"))
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            head = b"".join(b"%s: %s\r\n" % pair for pair in [*headers, *error.headers, (b"connection", b"close")])
            self.transport.write(b"HTTP/1.1 %d \r\n%s\r\n%s" % (error.status, head, body))
            with contextlib.suppress(h11.LocalProtocolError):
                self.conn.send_failed()
            self.transport.close()


class GatewayServer(uvicorn.Server):
    """A uvicorn server that leaves signals to the process it runs in."""

    async def on_tick(self, counter: int) -> bool:
        """Poll connections; uvicorn calls it ten times a second."""
        if counter % POLL_TICKS == 0:
            now = asyncio.get_running_loop().time()
            for one in list(self.server_state.connections):
                if isinstance(one, BoundedProtocol):
                    one.poll(now)
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


async def delivered(scope: Scope, limit_s: float) -> bool:
    """Whether a response has left this process while its client was connected.

    More cannot be known of a client that goes without a word: what lies in the sockets' buffers may not have been read.

    Args:
        limit_s: time for the client to read it.
    """
    connection = scope.get(CONNECTION)
    if connection is None:
        return True
    deadline = connection.loop.time() + limit_s
    while (unsent := connection.unsent()) and connection.loop.time() < deadline:  # noqa: ASYNC110 - transports have no event
        await asyncio.sleep(POLL_S)
    return not unsent and not connection.broken


def is_disconnected(scope: Scope) -> bool:
    """Whether a request's connection has ended."""
    connection = scope.get(CONNECTION)
    return connection is not None and connection.lost


def make_server(app: Any, *, connections: int, head_s: float, send_s: float = 60.0) -> GatewayServer:
    """Return a server of an ASGI application; `serve` it with a socket of `listen`."""

    async def with_connection(scope: Any, receive: Any, send: Any) -> None:
        # `send` is a method of uvicorn's object for a request, which has the transport.
        transport = getattr(getattr(send, "__self__", None), "transport", None)
        if isinstance(connection := transport and transport.get_protocol(), BoundedProtocol):
            scope[CONNECTION] = connection
        await app(scope, receive, send)

    protocol = type("ConfiguredProtocol", (BoundedProtocol,), {"most": connections, "head_s": head_s, "send_s": send_s})
    return GatewayServer(
        uvicorn.Config(
            with_connection,
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            log_level="error",
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
            backlog=BACKLOG,
            h11_max_incomplete_event_size=HEAD_BYTES,
        )
    )


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        RelaxError: the address is not of this machine, or taken.
    """
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind)
    except OSError as error:
        raise RelaxError(f"listening on {host}:{port}", why=str(error), hint="see roles.gateway.host") from error
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(place)
        # Clients may connect as soon as they know the address, before the server has started.
        found.listen(BACKLOG)
        found.setblocking(False)
    except OSError as error:
        found.close()
        hint = "another program has the port; port = 0 takes a free one"
        raise RelaxError(f"listening on {host}:{port}", why=str(error), hint=hint) from error
    return found


def url_of(listening: socket.socket) -> str:
    """Return http://HOST:PORT, with the loopback address if it listens on all addresses."""
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def remote_url_of(listening: socket.socket, node_host: str) -> str:
    """Return the URL for other nodes; empty: they cannot reach it.

    Args:
        node_host: the address of this node for the others.
    """
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        return f"http://[{node_host}]:{port}" if ":" in node_host else f"http://{node_host}:{port}"
    return "" if is_loopback(host) else url_of(listening)


def is_loopback(address: str) -> bool:
    """Whether a numeric address is reached from this machine alone."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


# --- bodies


class ClientDisconnected(Exception):
    """The client has disconnected."""


def header(scope: Scope, name: bytes) -> str:
    """Return a header's first value; empty: there is none."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


class MemoryBudget:
    """Bytes of requests that all calls together may hold at the same time."""

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0

    @contextlib.contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that a call reports its bytes to; they are given back at the end of the block.

        Raises:
            CallError: 503, from the function: the budget is used up.
        """
        mine = 0

        def hold(nbytes: int) -> None:
            nonlocal mine
            mine += nbytes
            self.held += nbytes
            if self.held > self.most:
                message = f"calls in progress have {self.most} bytes of requests already, the bound"
                raise CallError(503, message, code="busy", retry_after_s=1.0)

        try:
            yield hold
        finally:
            self.held -= mine


async def read_body(
    scope: Scope, receive: Receive, most: int, timeout_s: float, hold: Callable[[int], None] = lambda _: None
) -> bytes:
    """Read a whole body.

    Args:
        most: maximum bytes; a larger body is refused while it arrives.
        hold: called with the number of bytes that arrive.

    Raises:
        CallError: 413: it is too large; 408: it takes too long; what `hold` raises.
        ClientDisconnected: the client has disconnected.
    """
    length = header(scope, b"content-length")
    if length.isdigit() and int(length) > most:
        raise _too_large(int(length), most)
    found = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                event = await receive()
                if event["type"] == "http.disconnect":
                    raise ClientDisconnected
                hold(len(event.get("body", b"")))
                found += event.get("body", b"")
                if len(found) > most:
                    raise _too_large(len(found), most)
                if not event.get("more_body", False):
                    return bytes(found)
    except TimeoutError:
        message = f"the body was not here in {timeout_s:g} s, {len(found)} bytes of it were"
        raise CallError(408, message, code="body_timeout") from None


def _too_large(nbytes: int, most: int) -> CallError:
    message = f"the body has {nbytes} bytes or more, the bound is {most} (roles.gateway.body_mib)"
    return CallError(413, message, code="body_too_large")


async def drain_body(receive: Receive, most: int = LINGER_BYTES) -> None:
    """Read and drop what still arrives, for LINGER_S and `most` bytes: a connection that is closed while its client
    writes is reset, and the client would not see the answer."""
    count = 0
    try:
        async with asyncio.timeout(LINGER_S):
            while count < most:
                event = await receive()
                count += len(event.get("body", b""))
                if event["type"] == "http.disconnect" or not event.get("more_body", False):
                    return
    except TimeoutError:
        return


def parsed_bytes(body: bytes) -> int:
    """Estimate the memory of a JSON body's values once it is parsed; 0 if it is mostly text, which takes no more than
    it does in the body."""

    def values(text: bytes) -> int:
        return sum(text.count(mark) for mark in (b",", b"[", b"{"))

    if values(body) * VALUE_BYTES <= PARSED_TIMES * len(body):
        return 0
    return values(TEXTS.sub(b"", body)) * VALUE_BYTES
