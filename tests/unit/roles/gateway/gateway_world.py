"""A gateway over a scripted engine, on a real socket, and what tests with the real client packages share."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from relax_rt.roles.agentic.tokens.ledger import TokenLedger
from relax_rt.roles.agentic.tokens.template import ChatTemplate
from relax_rt.roles.gateway.access import Keys
from relax_rt.roles.gateway.api import SessionLimits
from relax_rt.roles.gateway.app import Gateway, HttpLimits
from relax_rt.roles.gateway.server import listen, make_server, url_of
from relax_rt.roles.gateway.service import AnswerPolicy, Service
from relax_rt.roles.gateway.sessions import Sessions
from relax_rt.roles.models.tiny import character_tokenizer
from relax_rt.roles.models.tokenizer import ChatTokenizer
from relax_rt.roles.rollout.router.admission import AdmissionLimits, AdmissionQueue, FleetLoad
from relax_rt.roles.rollout.router.core import Deliver, GenerationRequest, Outcome
from relax_rt.roles.rollout.router.router import NotGenerated
from relax_rt.transport.queue.ledger.messages import VersionSpan

TOKEN = "the-token-of-this-run-is-a-long-one"
TEMPLATE = (
    "{% if tools %}{{ '<|system|>tools: ' + (tools | map(attribute='function.name') | join(', ')) + '<|end|>' }}"
    "{% endif %}"
    "{% for m in messages %}{{ '<|' + ('user' if m.role == 'tool' else m.role) + '|>' }}"
    "{% if m.content %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}"
    "{{ '<tool_call>' + {'name': c.function.name, 'arguments': c.function.arguments} | tojson + '</tool_call>' }}"
    "{% endfor %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
Script = Callable[[str, GenerationRequest], str]
"""(prompt as text, order) -> what the model says, its end of turn excluded."""


@functools.cache
def tokenizer() -> ChatTokenizer:
    raw = character_tokenizer()
    raw.chat_template = TEMPLATE
    return ChatTokenizer(raw, Path("/nowhere"))


@functools.cache
def template() -> ChatTemplate:
    return ChatTemplate(tokenizer(), tool_parser="hermes", reasoning_parser="think")


ROW = 4
"""Bytes of a routing row."""


def rows_of(number: int, start: int, end: int) -> bytes:
    """Routing rows of positions, which say in which order they were made (the first is 1), and whose they are."""
    return b"".join(struct.pack("<HH", number, place) for place in range(start, end))


class Scripted:
    """Says what the script says, a few tokens at a time, each with a log-probability of its own."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.orders: list[GenerationRequest] = []
        self.made: list[Outcome] = []
        self.ended_early = 0
        self.gate = asyncio.Event()
        """Sequences stand still behind their first piece until it is set."""
        self.gate.set()
        self.version = 3
        self.fails = False
        """Sequences end in the middle, without being done."""
        self.breaks = False
        """Sequences end in the middle, by an error that nobody has foreseen."""

    async def generate(self, wanted: GenerationRequest) -> Outcome:
        outcome = self._outcome(wanted)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.ended_early += 1
            raise
        self.made.append(outcome)
        return outcome

    async def stream(self, wanted: GenerationRequest) -> AsyncIterator[Deliver]:
        outcome, at = self._outcome(wanted), 0
        done = False
        try:
            while at < len(outcome.tokens):
                end = min(len(outcome.tokens), at + wanted.chunk_tokens)
                spans = [VersionSpan(at, end, self.version, self.version)]
                rows, prompt = outcome.routing[at * ROW : end * ROW], b"" if at else outcome.prompt_routing
                yield Deliver(1, at, outcome.tokens[at:end], outcome.logprobs[at:end], spans, rows, prompt)
                at = end
                await self.gate.wait()
                if self.breaks:
                    raise LookupError("a bug")
                if self.fails:
                    error = NotGenerated("a sequence is late", why="the engine is gone")
                    error.outcome = Outcome(kind="late")
                    raise error
                await asyncio.sleep(0)
            done = True
            self.made.append(outcome)
        finally:
            self.ended_early += not done

    def _outcome(self, wanted: GenerationRequest) -> Outcome:
        self.orders.append(wanted)
        tokens = tokenizer().encode(self.script(tokenizer().spell(wanted.prompt), wanted))
        tokens = [*tokens, *wanted.stop_ids][: wanted.max_new_tokens]
        number, last = len(self.orders), len(wanted.prompt) - 1
        return Outcome(
            kind="done",
            finish_reason="stop" if tokens[-1] in wanted.stop_ids else "length",
            tokens=tokens,
            logprobs=[-0.5 - 0.01 * i for i in range(len(tokens))],
            versions=[VersionSpan(0, len(tokens), self.version, self.version)],
            routing=rows_of(number, last, last + len(tokens)) if wanted.routing else b"",
            prompt_routing=rows_of(number, wanted.rows_from, last) if wanted.routing else b"",
        )


class Running:
    """A gateway that can be called."""

    def __init__(self, gateway: Gateway, engine: Scripted, url: str) -> None:
        self.gateway, self.engine, self.url = gateway, engine, url

    @property
    def sessions(self) -> Sessions:
        return self.gateway.sessions

    def episode(self, name: str = "episode 1".replace(" ", "-"), **limits: object) -> str:
        """Open one; its key."""
        self.sessions.open(name, SessionLimits(**limits))  # type: ignore[arg-type]
        return self.gateway.keys.of_session(name)


def ledger(name: str, tokens: int) -> TokenLedger:
    return TokenLedger(template(), max_tokens=tokens, session=name)


@contextlib.asynccontextmanager
async def running(
    script: Script,
    *,
    terms: AnswerPolicy | None = None,
    bounds: HttpLimits | None = None,
    limits: AdmissionLimits | None = None,
    connections: int = 256,
    head_s: float = 20.0,
    send_s: float = 20.0,
    load: Callable[[], FleetLoad] = lambda: FleetLoad(64, 0, 0.0),
    chat: ChatTemplate | None = None,
) -> AsyncIterator[Running]:
    engine = Scripted(script)
    terms = terms or AnswerPolicy(models=("policy",), new_tokens=200, context=4096)
    chat = chat or template()
    sessions = Sessions(
        lambda name, tokens: TokenLedger(chat, max_tokens=tokens, session=name),
        tokens=20_000,
        most=64,
        idle_s=600.0,
        now=time.monotonic,
    )
    listening = listen("127.0.0.1", 0)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 << 10)
    url = url_of(listening)
    async with AdmissionQueue(limits or AdmissionLimits(), load) as admission:
        service = Service(engine, chat.tokenizer, admission, terms, image_processor=chat.image_processor)
        gateway = Gateway(service, sessions, Keys(TOKEN), bounds or HttpLimits())
        server = make_server(gateway.application(), connections=connections, head_s=head_s, send_s=send_s)
        serving = asyncio.create_task(server.serve([listening]))
        try:
            await until(lambda: server.started)
            yield Running(gateway, engine, url)
        finally:
            engine.gate.set()
            server.should_exit = True
            await serving
            listening.close()


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


RESPONSES_TOOL: Any = {"type": "function", **TOOL["function"], "strict": False}


def echo(prompt: str, wanted: GenerationRequest) -> str:
    return "You said " + prompt.removesuffix("<|assistant|>").removesuffix("<|end|>").rpartition("|>")[2] + "."


def calculator(prompt: str, wanted: GenerationRequest) -> str:
    """Calls the tool, and says its result."""
    result = re.search(r"<\|user\|>result (\d+)<\|end\|><\|assistant\|>$", prompt)
    if result:
        return f"It is {result[1]}."
    return 'Let me see. <tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'


def client(running: Running, key: str = TOKEN, **options: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0, timeout=60.0, **options)


def ask(text: str) -> Any:
    return [{"role": "user", "content": text}]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)
