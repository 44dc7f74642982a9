"""What stands beside the gateway in tools/bench/agentic.py: a plain proxy of FastAPI + httpx, and the engine behind it.

    python fastapi_proxy.py proxy http://127.0.0.1:8000
    python fastapi_proxy.py engine SLOTS MEDIAN_S

The proxy hands bodies on without a look at them: no tokens, no sessions, no keys, no queue. Both run on uvicorn with
httptools and uvloop, one process each. They tell their address on standard output, end when a line comes on standard
input, and then tell what the engine logged.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import httpx
import uvicorn
import uvloop
from fastapi import FastAPI, Request, Response
from slots import ANSWER, Slots, name_of

PATH = "/v1/chat/completions"


def proxy(client: httpx.AsyncClient) -> FastAPI:
    """The plain proxy."""
    app = FastAPI()

    @app.post(PATH)
    async def call(request: Request) -> Response:
        head = {"content-type": "application/json"}
        told = await client.post(PATH, content=await request.body(), headers=head)
        return Response(told.content, told.status_code, media_type="application/json")

    return app


def engine(slots: Slots) -> Any:
    """An ASGI application without a framework: what it takes is not the proxy's."""
    choice = {"index": 0, "message": {"role": "assistant", "content": ANSWER}, "finish_reason": "stop"}
    body = json.dumps({"id": "x", "object": "chat.completion", "choices": [choice], "model": "policy"}).encode()
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        asked, more = b"", True
        while more:
            event = await receive()
            asked, more = asked + event.get("body", b""), event.get("more_body", False)
        await slots.work(name_of(json.loads(asked)["messages"][-1]["content"]))
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": body})

    return answer


async def serve(app: Any, slots: Slots | None) -> None:
    """Until a line comes on standard input."""
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, http="httptools", lifespan="off", access_log=False, log_level="error")
    )
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - it has no event for that
        await asyncio.sleep(0.01)
    host, port = server.servers[0].sockets[0].getsockname()
    print(json.dumps({"url": f"http://{host}:{port}"}), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    print(json.dumps({"log": slots.log if slots is not None else []}), flush=True)
    server.should_exit = True
    await serving


async def main() -> None:
    """See the module."""
    kind, *rest = sys.argv[1:]
    if kind == "engine":
        slots = Slots(int(rest[0]), float(rest[1]))
        await serve(engine(slots), slots)
        return
    # Its default is 100 connections, the rest would wait in the proxy.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=rest[0], timeout=600.0, limits=limits, trust_env=False) as client:
        await serve(proxy(client), None)


if __name__ == "__main__":
    uvloop.run(main())
