"""Rewards that another machine computes."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from relax_rt.config.schema import Seconds, Table
from relax_rt.roles.rewards.library.functions import reward
from relax_rt.transport.rpc.errors import RelaxError

if TYPE_CHECKING:
    import httpx

FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 5.0
"""Between tries; doubled each time, drawn with full jitter."""
AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Answers after which another try may succeed."""


class HttpOptions(Table):
    """What a server answers to a POST of { completion, answer, question, metadata, item, split, finish_reason,
    truncated, tokens } as JSON: a number, or an object as a reward function returns."""

    url: Annotated[str, Field(pattern=r"^https?://[^\s]+$")]
    """URL of the server."""
    token_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    """Environment variable of the reward role whose value is sent as a bearer token. The token itself belongs in no
    config."""
    timeout_s: Seconds = 30.0
    """Deadline of one sample, all tries together."""
    retries: Annotated[int, Field(ge=0, le=20)] = 2
    """Further tries when the server cannot be reached, is busy or fails."""
    answer_kib: Annotated[int, Field(ge=1, le=16384)] = 64
    """A longer answer fails the sample."""
    at_a_time: Annotated[int, Field(ge=1, le=1024)] = 32
    """Maximum concurrent requests."""


def _wrong(options: HttpOptions) -> list[tuple[str, str, str]]:
    if find_spec("httpx") is None:
        return [("name", "httpx is not installed", "pip install httpx")]
    if re.match(r"https?://[^/@\s]*@", options.url):
        return [("url", "holds a name or password", "put a token into an environment variable: token_env")]
    return []


@reward("http", options=HttpOptions, check=_wrong)
class Http:
    """Asks the server; see HttpOptions."""

    def __init__(self, options: HttpOptions) -> None:
        self._options = options
        self._client: httpx.AsyncClient | None = None
        self._room = asyncio.Semaphore(options.at_a_time)

    async def __call__(self, completion: str, answer: Any, **info: Any) -> Any:
        known = {key: value for key, value in info.items() if key in SENT}
        body = json.dumps({**known, "completion": completion, "answer": answer}, default=str).encode()
        async with self._room:
            try:
                async with asyncio.timeout(self._options.timeout_s):
                    return await self._answer(body)
            except TimeoutError:
                raise self._failed(f"no answer within timeout_s = {self._options.timeout_s:g} s") from None

    async def _answer(self, body: bytes) -> Any:
        import httpx

        for attempt in range(self._options.retries + 1):
            try:
                status, data = await self._post(body)
            except httpx.HTTPError as error:
                why = f"{type(error).__name__}: {error}"
            else:
                if status == 200:
                    try:
                        return json.loads(data)
                    except (ValueError, RecursionError) as error:
                        raise self._failed(f"its answer is no JSON: {error}") from None
                why = f"it answered {status}: {data[:200].decode(errors='replace')!r}"
                if status not in AGAIN:
                    raise self._failed(why)
            if attempt < self._options.retries:
                await asyncio.sleep(random.uniform(0, min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**attempt)))
        raise self._failed(f"{why} ({self._options.retries + 1} tries)")

    async def _post(self, body: bytes) -> tuple[int, bytes]:
        """Status and body; a body that is too long is read no further."""
        import httpx

        if self._client is None:
            self._client = httpx.AsyncClient(timeout=httpx.Timeout(self._options.timeout_s), follow_redirects=False)
        headers = {"content-type": "application/json", **self._authorization()}
        most, data = self._options.answer_kib << 10, bytearray()
        async with self._client.stream("POST", self._options.url, content=body, headers=headers) as response:
            async for part in response.aiter_bytes(1 << 14):
                data += part
                if len(data) > most:
                    raise self._failed(f"it answered with more than answer_kib = {self._options.answer_kib} KiB")
            return response.status_code, bytes(data)

    def _authorization(self) -> Mapping[str, str]:
        name = self._options.token_env
        if name is None:
            return {}
        token = os.environ.get(name, "")
        if not token:
            raise self._failed(f"the environment variable {name} (token_env) is empty", "set it where the role runs")
        return {"authorization": f"Bearer {token}"}

    def _failed(self, why: str, hint: str = "") -> RelaxError:
        return RelaxError(f"the reward server {self._options.url}", why=why, hint=hint)

    async def aclose(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()


SENT = ("question", "metadata", "item", "split", "finish_reason", "truncated", "tokens", "turns", "verdict")
