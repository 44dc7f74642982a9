"""uvicorn with the bounds that it lacks: connections, and time for a request's head."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Iterator
from typing import Any, ClassVar

import h11
import msgspec
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from relax_rt.roles.gateway.calls import CallError
from relax_rt.transport.rpc.errors import RelaxError

HEAD_BYTES = 32 << 10
KEEP_ALIVE_S = 75
GRACE_S = 2
LOOK_TICKS = 50
BACKLOG = 2048


CONNECTION = "relax.connection"
"""Key of a request's scope: the connection it came by."""
LOOK_S = 0.01


class BoundedProtocol(H11Protocol):
    """A connection that must send a request's head within `head_s` and take what it is sent within `send_s`, of which
    there are `most` at once. When there are more, one that has nothing to do makes room; without such a one the new one
    is turned away."""

    most: ClassVar[int] = 1024
    head_s: ClassVar[float] = 10.0
    send_s: ClassVar[float] = 60.0
    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _closing_since: float | None = None
    turned_away = False
    lost = broken = False
    """The connection is no more; it ended before all that was sent had been taken."""

    def unsent(self) -> int:
        """Bytes that the other side has not taken yet."""
        return 0 if self.lost else self.transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most and not self._make_room():
            self.turned_away = True
            self._answer(CallError(503, f"{self.most} connections are open, the bound", retry_after_s=1.0))
            return
        self._await_head()

    def data_received(self, data: bytes) -> None:
        if self.turned_away:
            return
        if self.idle and self._deadline is None:
            self._await_head()
        super().data_received(data)
        if not self.idle:
            self._head_is_there()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self.send_s, self._give_up)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._taken()

    def look(self, now: float) -> None:
        """Called every now and then: one that is closed waits for its caller to take the rest, but not for ever."""
        if self.transport.is_closing():
            self._closing_since = self._closing_since or now
            if now - self._closing_since > self.send_s:
                self._give_up()

    def connection_lost(self, exc: Exception | None) -> None:
        cut = self.cycle is not None and not self.cycle.response_complete
        self.lost, self.broken = True, self.broken or exc is not None or cut
        self._head_is_there()
        self._taken()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """In place of uvicorn's plain text."""
        self._answer(CallError(400, f"this is no HTTP request: {msg}", code="invalid_http"))

    def shutdown(self) -> None:
        """One that was answered already only has to be closed."""
        if not self.transport.is_closing():
            super().shutdown()

    @property
    def idle(self) -> bool:
        """No request is at work."""
        return self.cycle is None or self.cycle.response_complete

    def _await_head(self) -> None:
        self._deadline = self.loop.call_later(self.head_s, self._late)

    def _head_is_there(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _taken(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _late(self) -> None:
        self._deadline = None
        if self.idle and not self.transport.is_closing():
            self._answer(CallError(408, f"no request was here in {self.head_s:g} s", code="head_timeout"))

    def _give_up(self) -> None:
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
        """Written at once: there may be no request to answer."""
        if not self.transport.is_closing():
            body = msgspec.json.encode(error.body("openai"))
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            head = b"".join(b"%s: %s\r\n" % pair for pair in [*headers, *error.headers, (b"connection", b"close")])
            self.transport.write(b"HTTP/1.1 %d \r\n%s\r\n%s" % (error.status, head, body))
            with contextlib.suppress(h11.LocalProtocolError):
                self.conn.send_failed()
            self.transport.close()


class GatewayServer(uvicorn.Server):
    """In a process whose signals are its host's."""

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second."""
        if counter % LOOK_TICKS == 0:
            now = asyncio.get_running_loop().time()
            for one in list(self.server_state.connections):
                if isinstance(one, BoundedProtocol):
                    one.look(now)
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None."""
        yield


async def delivered(scope: Any, limit_s: float) -> bool:
    """Whether what was sent in answer to a request has left this process while its caller was there. More cannot be
    known of a caller who goes without a word: what lies in the sockets' buffers may not have been read.

    Args:
        limit_s: in which he must take it.
    """
    connection = scope.get(CONNECTION)
    if connection is None:
        return True
    deadline = connection.loop.time() + limit_s
    while (unsent := connection.unsent()) and connection.loop.time() < deadline:  # noqa: ASYNC110 - transports tell nobody
        await asyncio.sleep(LOOK_S)
    return not unsent and not connection.broken


def is_disconnected(scope: Any) -> bool:
    """Whether the connection that a request came by is no more."""
    connection = scope.get(CONNECTION)
    return connection is not None and connection.lost


def _with_connection(app: Any) -> Any:
    """The application, told of each request's connection: `send` is a method of what uvicorn has for a request."""

    async def told(scope: Any, receive: Any, send: Any) -> None:
        transport = getattr(getattr(send, "__self__", None), "transport", None)
        if isinstance(connection := transport and transport.get_protocol(), BoundedProtocol):
            scope[CONNECTION] = connection
        await app(scope, receive, send)

    return told


def make_server(app: Any, *, connections: int, head_s: float, send_s: float = 60.0) -> GatewayServer:
    """A server of an ASGI application; `serve` it with a socket of `listen`."""
    protocol = type("ConfiguredProtocol", (BoundedProtocol,), {"most": connections, "head_s": head_s, "send_s": send_s})
    return GatewayServer(
        uvicorn.Config(
            _with_connection(app),
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
    """A socket that listens.

    Raises:
        RelaxError: the address is none of this machine, or taken.
    """
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind)
    except OSError as error:
        raise RelaxError(f"listening on {host}:{port}", why=str(error), hint="see roles.gateway.host") from error
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(place)
        # Whoever is told the address may come before the server has started.
        found.listen(BACKLOG)
        found.setblocking(False)
    except OSError as error:
        found.close()
        hint = "another program has the port; port = 0 takes a free one"
        raise RelaxError(f"listening on {host}:{port}", why=str(error), hint=hint) from error
    return found


def url_of(listening: socket.socket) -> str:
    """http://HOST:PORT, with the loopback address for one that listens at all of them."""
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def remote_url_of(listening: socket.socket, node_host: str) -> str:
    """The same for other nodes; empty: they cannot reach it.

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
