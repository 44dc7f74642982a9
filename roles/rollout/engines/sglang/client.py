"""HTTP client of an SGLang server: calls with deadlines, and streams of tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import msgspec

from relax_rt.transport.rpc.errors import DeadlineExceeded, ProtocolError, RelaxError, Unreachable

CONNECT_TIMEOUT_S = 10.0
IDLE_S = 1.0
"""An idle connection is reused within this time only. The server closes it after SGLANG_TIMEOUT_KEEP_ALIVE (5 s), and a
call that is sent at that moment fails."""
REPEATABLE = frozenset(
    {"/abort_request", "/model_info", "/server_info", "/update_weights_from_disk", "/weights_checker"}
)
"""Idempotent calls. Only these reuse a connection, and are repeated on a new one if it breaks. All others have a new
one at once: a second release of memory, for example, would end the server."""
BROKEN = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError, httpx.CloseError)
"""Errors of a connection that the server has closed, in contrast to those of a missing server."""
LARGE_BYTES = 1 << 20
"""From this size on, events are decoded in a thread: it takes milliseconds."""
MAX_EVENT_BYTES = 256 << 20
"""Bound of one event: tokens and log-probabilities of some steps of a sequence, and at its end its routing rows."""


class SequenceEnd(msgspec.Struct, frozen=True):
    """How a sequence ended: stop, length, or abort with a message."""

    type: str
    message: str = ""


class Span(msgspec.Struct, frozen=True):
    """Tokens from `start` to `end` of a request were sampled from this version."""

    version: str
    start: int
    end: int


class Meta(msgspec.Struct, frozen=True):
    """What the server reports about a request, as far as it is used.

    Attributes:
        id: the request's name.
        completion_tokens: sampled so far, this event included.
        cached_tokens: positions of the input whose keys and values were cached.
        output_token_logprobs: (log-probability, token, text).
        weight_versions: of all sampled tokens; in the last event.
        routed_experts: int32 of positions, layers and experts chosen, as the raw base64 string; in the last event, if
            requested.
    """

    id: str
    finish_reason: SequenceEnd | None = None
    completion_tokens: int = 0
    cached_tokens: int = 0
    output_token_logprobs: list[tuple[float | None, int, str | None]] = []
    weight_versions: list[Span] = []
    routed_experts: msgspec.Raw = msgspec.Raw()


class StreamError(msgspec.Struct, frozen=True):
    """An error in the stream."""

    message: str = ""


class StreamEvent(msgspec.Struct, frozen=True):
    """A piece of one sequence."""

    output_ids: list[int] = []
    meta_info: Meta | None = None
    error: StreamError | None = None


class ServerLimits(msgspec.Struct, frozen=True):
    """ServerLimits that a server reports: its options and the device's memory decide.

    Attributes:
        longest: positions of one sequence, prompt and completion.
        kv_tokens: positions of all sequences together.
        running: sequences that it decodes at a time.
    """

    longest: int
    kv_tokens: int
    running: int


class _Info(msgspec.Struct):
    max_req_input_len: int
    max_total_num_tokens: int
    page_size: int | None = None
    internal_states: list[dict[str, Any]] = []


class ServerRefused(RelaxError):
    """The server answered with an error."""


_events: msgspec.json.Decoder[StreamEvent] = msgspec.json.Decoder(StreamEvent)


class SglangClient:
    """Calls the endpoints of one server.

    Args:
        key: the bearer token of this server.
    """

    def __init__(self, url: str, key: str) -> None:
        def client(kept: int) -> httpx.AsyncClient:
            return httpx.AsyncClient(
                base_url=url,
                headers={"Authorization": f"Bearer {key}"},
                # The engine bounds the number of streams by its running sequences.
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=kept, keepalive_expiry=IDLE_S),
                timeout=httpx.Timeout(CONNECT_TIMEOUT_S, read=None),
                trust_env=False,
            )

        self._kept, self._fresh = client(8), client(0)
        self.url = url

    async def call(self, path: str, body: dict[str, Any] | bytes | None = None, *, timeout_s: float) -> dict[str, Any]:
        """POST (GET without a body); return the decoded object, empty if there was none.

        Args:
            body: bytes are sent as they are.

        Raises:
            ServerRefused: another status than 200, or "success": false.
            Unreachable, DeadlineExceeded: no answer.
        """
        data = msgspec.json.encode(body) if isinstance(body, dict) else body
        what, deadline = f"{path} of the SGLang server", time.monotonic() + timeout_s
        try:
            try:
                answer = await self._send(self._kept if path in REPEATABLE else self._fresh, path, data, timeout_s)
            except BROKEN:
                left_s = deadline - time.monotonic()
                if path not in REPEATABLE or left_s <= 0:
                    raise
                answer = await self._send(self._fresh, path, data, left_s)
        except httpx.TimeoutException as error:
            raise DeadlineExceeded(what, why=f"no answer within {timeout_s:g} s") from error
        except httpx.HTTPError as error:
            raise Unreachable(what, why=str(error) or type(error).__name__) from error
        try:
            decoded = msgspec.json.decode(answer.content, type=dict[str, Any]) if answer.content.strip() else {}
        except msgspec.DecodeError:
            decoded = {}
        if answer.status_code != 200 or decoded.get("success") is False:
            why = str(decoded.get("message") or decoded.get("error") or answer.text[:300])
            raise ServerRefused(what, why=f"{answer.status_code}: {why}")
        return decoded

    @staticmethod
    async def _send(http: httpx.AsyncClient, path: str, data: bytes | None, timeout_s: float) -> httpx.Response:
        return await http.request(
            "GET" if data is None else "POST",
            path,
            content=data,
            headers={"Content-Type": "application/json"},
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S)),
        )

    async def limits(self, timeout_s: float) -> ServerLimits:
        """Return the server's limits.

        Raises:
            ProtocolError: it does not report them in the known form. As call().
        """
        try:
            info = msgspec.convert(await self.call("/server_info", timeout_s=timeout_s), _Info)
            running = min(int(state["effective_max_running_requests_per_dp"]) for state in info.internal_states)
        except (msgspec.ValidationError, KeyError, TypeError, ValueError) as error:
            raise ProtocolError(
                "/server_info of the SGLang server",
                why=f"its limits are not where they are looked for: {error!r}",
                hint="use the release of sglang that this engine is written to",
            ) from error
        # It reserves a page of the cache for each sequence, and rounds the input up to pages.
        page = info.page_size or 1
        longest = min(info.max_req_input_len, info.max_total_num_tokens - 2 * page)
        return ServerLimits(longest, info.max_total_num_tokens, running)

    async def generate(self, body: dict[str, Any]) -> AsyncIterator[StreamEvent]:
        """Yield events of the sequences of one request, until the last one has ended. Without a deadline beyond the
        connection: the engine judges by progress.

        Raises:
            ServerRefused: it rejects the request.
            Unreachable: the connection broke before the end.
        """
        try:
            async with self._fresh.stream("POST", "/generate", json=body) as answer:
                if answer.status_code != 200:
                    text = (await answer.aread())[:500].decode(errors="replace")
                    raise ServerRefused("/generate of the SGLang server", why=f"{answer.status_code}: {text}")
                async for event in _decoded(answer):
                    if event.error is not None:
                        raise ServerRefused("/generate of the SGLang server", why=event.error.message)
                    yield event
        except httpx.HTTPError as error:
            raise Unreachable("/generate of the SGLang server", why=str(error) or type(error).__name__) from error

    async def close(self) -> None:
        """End all connections."""
        await self._kept.aclose()
        await self._fresh.aclose()


async def _decoded(answer: httpx.Response) -> AsyncIterator[StreamEvent]:
    """Server-sent events: lines `data: {…}`, the last one `data: [DONE]`."""
    held: list[bytes] = []
    size = 0
    async for piece in answer.aiter_bytes():
        end = piece.rfind(b"\n") + 1
        held.append(piece[:end] if end else piece)
        size += len(held[-1])
        if not end:
            if size > MAX_EVENT_BYTES:
                why = f"a line is longer than {MAX_EVENT_BYTES} bytes"
                raise ProtocolError("the stream of the SGLang server", why=why)
            continue
        events = await asyncio.to_thread(_events_of, held) if size > LARGE_BYTES else _events_of(held)
        held = [piece[end:]]
        size = len(held[0])
        for event in events:
            yield event


def _events_of(pieces: Sequence[bytes]) -> list[StreamEvent]:
    """Decode whole lines without copying them again: an event may have hundreds of megabytes."""
    events: list[StreamEvent] = []
    whole = b"".join(pieces)
    view, at = memoryview(whole), 0
    while (end := whole.find(b"\n", at)) >= 0:
        line, at = view[at:end], end + 1
        begins = bytes(line[:13])
        if not begins.startswith(b"data: ") or begins == b"data: [DONE]":
            continue
        try:
            events.append(_events.decode(line[6:]))
        except msgspec.DecodeError as error:
            why = f"{error}: {bytes(line[:200])!r}"
            raise ProtocolError("the stream of the SGLang server", why=why) from error
    return events
