"""Requests to the server, each with a deadline, and the streams of tokens that it answers with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import httpx
import msgspec

from relax_rt.transport.rpc.errors import DeadlineExceeded, ProtocolError, RelaxError, Unreachable

CONNECT_TIMEOUT_S = 10.0
IDLE_S = 1.0
"""An idle connection is used again within this time only. The server ends it after SGLANG_TIMEOUT_KEEP_ALIVE (5 s), and
a call that is sent just then finds it closed."""
REPEATABLE = frozenset(
    {"/abort_request", "/model_info", "/server_info", "/update_weights_from_disk", "/weights_checker"}
)
"""Calls that may be made twice. Only these use a connection again; one that breaks below them is made once more, on a
connection of its own. All others have one of their own at once: a memory that is released twice ends the server."""
BROKEN = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError, httpx.CloseError)
"""What a connection gives that the server has ended; not that there is none."""
LARGE_BYTES = 1 << 20
"""What is decoded off the event loop: from here on it takes milliseconds."""
MAX_EVENT_BYTES = 256 << 20
"""One event of a stream: tokens and log-probabilities of some steps of one sequence, and with its end routing rows."""


class Finish(msgspec.Struct, frozen=True):
    """How a sequence ended: stop, length, or abort with a message."""

    type: str
    message: str = ""


class Span(msgspec.Struct, frozen=True):
    """Tokens from `start` to `end` of a request were sampled from this version."""

    version: str
    start: int
    end: int


class Meta(msgspec.Struct, frozen=True):
    """What the server says of a request, as far as it is looked at.

    Attributes:
        id: the request's name.
        completion_tokens: sampled so far, those of this event included.
        cached_tokens: positions of the input whose keys and values were there already.
        output_token_logprobs: (log-probability, token, text).
        weight_versions: of all sampled tokens; there at the end.
        routed_experts: int32 of positions, layers and experts chosen, a string in base64, as it stands in the answer;
            there at the end if asked for.
    """

    id: str
    finish_reason: Finish | None = None
    completion_tokens: int = 0
    cached_tokens: int = 0
    output_token_logprobs: list[tuple[float | None, int, str | None]] = []
    weight_versions: list[Span] = []
    routed_experts: msgspec.Raw = msgspec.Raw()


class StreamError(msgspec.Struct, frozen=True):
    """An error that came in the stream."""

    message: str = ""


class Event(msgspec.Struct, frozen=True):
    """A piece of one sequence."""

    output_ids: list[int] = []
    meta_info: Meta | None = None
    error: StreamError | None = None


class Limits(msgspec.Struct, frozen=True):
    """What a server has room for, as it says itself: options and the device's memory decide.

    Attributes:
        longest: positions of one sequence, its prompt and all that is to come.
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
    """The server answered, and did not do what it was asked."""


_events: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


class Client:
    """One server's endpoints.

    Args:
        key: the bearer token of this server.
    """

    def __init__(self, url: str, key: str) -> None:
        def client(kept: int) -> httpx.AsyncClient:
            return httpx.AsyncClient(
                base_url=url,
                headers={"Authorization": f"Bearer {key}"},
                # Streams are bounded by the sequences that the engine lets run.
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=kept, keepalive_expiry=IDLE_S),
                timeout=httpx.Timeout(CONNECT_TIMEOUT_S, read=None),
                trust_env=False,
            )

        self._kept, self._fresh = client(8), client(0)
        self.url = url

    async def call(self, path: str, body: dict[str, Any] | bytes | None = None, *, timeout_s: float) -> dict[str, Any]:
        """POST (GET without a body) and answer with the decoded object, empty where there was none.

        Args:
            body: bytes: encoded already.

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
        decoded = _object(answer.content)
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

    async def limits(self, timeout_s: float) -> Limits:
        """What the server has room for.

        Raises:
            ProtocolError: it does not say it in the way that is known. As call().
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
        # Of the cache it keeps back a page of each sequence, and rounds the input up to one.
        page = info.page_size or 1
        longest = min(info.max_req_input_len, info.max_total_num_tokens - 2 * page)
        return Limits(longest, info.max_total_num_tokens, running)

    async def generate(self, body: dict[str, Any]) -> AsyncIterator[Event]:
        """Pieces of the sequences of one request as they come; the iteration ends with the last of them.

        Nothing is waited for here beyond the connection: whoever reads judges by progress.

        Raises:
            ServerRefused: the request is not to its liking.
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


def _object(content: bytes) -> dict[str, Any]:
    try:
        decoded = msgspec.json.decode(content) if content.strip() else {}
    except msgspec.DecodeError:
        return {}
    return decoded if isinstance(decoded, dict) else {}


async def _decoded(answer: httpx.Response) -> AsyncIterator[Event]:
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


def _events_of(pieces: Sequence[bytes]) -> list[Event]:
    """Those of whole lines. Nothing in them is copied once more: an event may be of hundreds of megabytes."""
    events: list[Event] = []
    for line in _lines(b"".join(pieces)):
        begins = bytes(line[:13])
        if not begins.startswith(b"data: ") or begins == b"data: [DONE]":
            continue
        try:
            events.append(_events.decode(line[6:]))
        except msgspec.DecodeError as error:
            why = f"{error}: {bytes(line[:200])!r}"
            raise ProtocolError("the stream of the SGLang server", why=why) from error
    return events


def _lines(whole: bytes) -> Iterator[memoryview]:
    view, at = memoryview(whole), 0
    while (end := whole.find(b"\n", at)) >= 0:
        yield view[at:end]
        at = end + 1
