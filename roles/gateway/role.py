"""The gateway role: the policy as an HTTP endpoint, for programs written against OpenAI's or Anthropic's API."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any, ClassVar

from relax_rt.cluster.nodes.links import Links
from relax_rt.config.loader import role_settings
from relax_rt.config.schema import MIB, RoleSettings
from relax_rt.interfaces.role import RoleContext
from relax_rt.process.limits import raise_open_files
from relax_rt.roles.agentic.tokens.ledger import TokenLedger
from relax_rt.roles.agentic.tokens.parsers import ChatFormat
from relax_rt.roles.agentic.tokens.template import ChatTemplate, load_chat_template
from relax_rt.roles.gateway.access import FILE, Keys, run_token
from relax_rt.roles.gateway.api import Access, ClosedSession, GatewayApi, Name, Nonce, SessionLimits
from relax_rt.roles.gateway.service import AnswerPolicy, Service
from relax_rt.roles.gateway.sessions import Sessions
from relax_rt.roles.gateway.settings import LOOPBACK, NODE_ADDRESS, GatewaySettings
from relax_rt.roles.models.tokenizer import ChatTokenizer, load_tokenizer
from relax_rt.roles.rollout.engines.settings import RolloutSettings, SamplingTable
from relax_rt.roles.rollout.router.admission import AdmissionLimits, AdmissionQueue
from relax_rt.roles.rollout.router.role import RouterRole
from relax_rt.roles.training.algorithms.settings import AlgorithmTable
from relax_rt.transport.rpc.errors import Refused, RelaxError
from relax_rt.transport.rpc.identity import Incarnation

LOAD_ALLOWANCE_S = 60.0
REPORT_EVERY_S = 1.0
METRICS_EVERY_S = 5.0
STOP_S = 5.0
OTHER_FILES = 256
"""Open files of the process besides connections."""


class GatewayRole(RouterRole[GatewaySettings]):
    """Serves HTTP, and `GatewayApi` to roles of the run. Sessions live in this process and end with it: the role that
    plays the episode notices, and plays it again."""

    kind: ClassVar[str] = "gateway"
    tier: ClassVar[int] = 45
    preload: ClassVar[tuple[str, ...]] = (
        "transformers",
        "starlette.applications",
        "uvicorn",
        "relax_rt.roles.models.tokenizer",
        "relax_rt.roles.agentic.tokens.ledger",
        "relax_rt.roles.rollout.router",
    )
    Settings: ClassVar[type[RoleSettings]] = GatewaySettings

    def __init__(self, ctx: RoleContext) -> None:
        super().__init__(ctx)
        self.tokenizer: ChatTokenizer
        self.template: ChatTemplate
        self.sessions: Sessions
        self.service: Service
        self.keys: Keys
        self.listening: socket.socket
        self.url = self.remote_url = ""
        """Its address on its node, and for other nodes."""
        self.node = ""
        self._worked = False
        self._reported_answers = 0
        self._last_metrics: dict[str, Any] = {}

    # --- GatewayApi

    async def open(
        self, session: Name, limits: SessionLimits, nonce: Nonce = "", owner: Incarnation | None = None
    ) -> Access:
        """Open a session."""
        if limits.routing and not role_settings(self.config, "rollout", RolloutSettings).routing:
            why, hint = "roles.rollout.routing is false", "set it, with a mixture of experts"
            raise Refused(f"session {session!r} with routing rows", why=why, hint=hint)
        self.sessions.open(session, limits, nonce, owner)
        key = self.keys.of_session(session, nonce)
        remote = f"{self.remote_url}/v1" if self.remote_url else ""
        return Access(f"{self.url}/v1", key, str(self.ctx.who), self.node, remote)

    async def renew(self, owner: Incarnation) -> str:
        """Renew the owner's sessions."""
        self.sessions.renew(owner)
        return str(self.ctx.who)

    async def close(self, session: Name, nonce: Nonce = "") -> ClosedSession:
        """End a session and return its episode."""
        found = self.sessions.find(session, nonce)
        found.end("has been closed")
        await found.settled()
        return self.sessions.close(session, nonce)

    async def forget(self, session: Name, nonce: Nonce = "") -> None:
        """End and forget a session."""
        self.sessions.forget(session, nonce)

    async def where(self) -> str:
        """Return the base URL."""
        return f"{self.url}/v1"

    # --- Role

    async def setup(self) -> None:
        from relax_rt.roles.gateway.server import listen, remote_url_of, url_of

        table = self.settings
        self.ctx.progress.extend(LOAD_ALLOWANCE_S, "loading the tokenizer")
        await asyncio.to_thread(self._load)
        self.keys = Keys(run_token(self.ctx.run_dir))
        links = Links.from_environment()
        host = table.host
        if host == NODE_ADDRESS:
            host = links.host if links else LOOPBACK
        self.listening = listen(host, table.port)
        self.url = url_of(self.listening)
        if links:
            self.node, self.remote_url = links.node, remote_url_of(self.listening, links.host)

        def make_ledger(session: str, tokens: int) -> TokenLedger:
            return TokenLedger(
                self.template,
                max_tokens=tokens,
                max_media_bytes=table.session_media_kib << 10,
                drift=table.drift,
                reasoning=table.reasoning,
                session=session,
            )

        self.sessions = Sessions(
            make_ledger,
            tokens=table.session_tokens,
            most=table.sessions,
            idle_s=table.session_idle_s,
            now=time.monotonic,
        )
        self.ctx.serve(GatewayApi, self)

    def _load(self) -> None:
        from relax_rt.roles.base.locations import model_folder

        table, folder = self.settings, model_folder(self.ctx)
        self.tokenizer = load_tokenizer(folder)
        self.context = context_of(folder)
        chat_format = ChatFormat(table.chat_template, table.tool_parser, table.reasoning_parser)
        self.template = load_chat_template(self.config_dir, self.tokenizer, chat_format, self.ctx.log.warning)

    async def run(self) -> None:
        from relax_rt.roles.gateway.app import Gateway, HttpLimits
        from relax_rt.roles.gateway.server import make_server

        table = self.settings
        await self.open_router()
        admission_limits = AdmissionLimits(
            first=min(16, table.at_work), most=table.at_work, waiting=table.waiting, wait_s=table.wait_s
        )
        http_limits = HttpLimits(
            body_bytes=table.body_mib * MIB,
            held_bytes=table.held_mib * MIB,
            body_s=table.read_timeout_s,
            send_s=table.send_timeout_s,
        )
        connections = table.connections
        if (files := raise_open_files(connections + OTHER_FILES)) < connections + OTHER_FILES:
            self.ctx.log.warning("fewer connections than asked for", limit=files, asked=connections)
            connections = max(1, files - OTHER_FILES)
        async with AdmissionQueue(admission_limits, self.router.load) as admission:
            self.service = self._make_service(admission)
            gateway = Gateway(
                self.service,
                self.sessions,
                self.keys,
                http_limits,
                health=lambda: "stopping" if self.ctx.stopping.is_set() else "",
                worked=self._first_work,
            )
            server = make_server(
                gateway.application(),
                connections=connections,
                head_s=table.read_timeout_s,
                send_s=table.send_timeout_s,
            )
            serving = asyncio.create_task(server.serve([self.listening]))
            try:
                await self._publish_address()
                await self.ctx.ready()
                await self._until_stopped(serving, admission)
            finally:
                server.should_exit = True
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(STOP_S):
                        await asyncio.gather(serving, return_exceptions=True)

    async def teardown(self) -> None:
        if hasattr(self, "listening"):
            self.listening.close()
            self._address_file.unlink(missing_ok=True)
        await super().teardown()

    # --- inside

    def _make_service(self, admission: AdmissionQueue) -> Service:
        table, sampling = self.settings, self.table(SamplingTable)
        lag = min(1, int(min(self.table(AlgorithmTable).max_staleness, 1))) if table.lag is None else table.lag
        policy = AnswerPolicy(
            models=tuple(table.models),
            temperature=sampling.temperature,
            other_temperature=table.temperature,
            unsupported=table.unsupported,
            new_tokens=table.max_new_tokens or sampling.max_new_tokens,
            context=self.context,
            timeout_s=table.call_timeout_s,
            lag=lag,
            seed=self.config.run.seed,
        )
        return Service(
            self.router,
            self.tokenizer,
            admission,
            policy,
            lag=self.router.core.fleet.lag,
            image_processor=self.template.image_processor,
        )

    async def _publish_address(self) -> None:
        from relax_rt.roles.gateway.server import is_loopback

        token = str(self.ctx.run_dir / FILE)
        self.ctx.event("gateway_listening", slot=self.ctx.who.slot, url=f"{self.url}/v1", token_file=token)
        self.ctx.log.info("listening", url=f"{self.url}/v1", token_file=token)
        if not is_loopback(self.listening.getsockname()[0]):
            self.ctx.log.warning(
                "others than this machine reach the gateway, and keys and texts are not encrypted on the way",
                host=self.settings.host,
                hint="put a TLS proxy in front of it, or set roles.gateway.host = '127.0.0.1'",
            )
        path = self._address_file
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps({"url": f"{self.url}/v1", "token_file": token, "models": self.settings.models}))
        draft.replace(path)

    @property
    def _address_file(self) -> Path:
        """The file that `access.endpoint` reads."""
        return self.ctx.run_dir / f"{self.ctx.who.slot.replace('/', '-')}.json"

    async def _until_stopped(self, serving: asyncio.Task[None], admission: AdmissionQueue) -> None:
        stop = asyncio.create_task(self.ctx.stopping.wait())
        core, metrics_at = admission.core, 0.0
        try:
            while not stop.done():
                # Waiting for calls or for tokens: in both cases the answering event loop shows that the role is alive.
                waiting = f", {core.waiting} wait for their turn" if core.waiting else ""
                work = f"tokens for {core.running} calls{waiting}" if core.running or core.waiting else "calls"
                self.ctx.progress.waiting(f"{work} at {self.url}/v1, {len(self.sessions)} sessions")
                if (answered := self.service.answered) > self._reported_answers:
                    self.ctx.progress.advance(answered - self._reported_answers, f"{answered} calls answered")
                    self._reported_answers = answered
                self.sessions.tick()
                if (now := time.monotonic()) - metrics_at >= METRICS_EVERY_S:
                    metrics_at = now
                    self._record_metrics(admission)
                await asyncio.wait({stop, serving}, timeout=REPORT_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
                if serving.done():
                    serving.result()
                    raise RelaxError(f"the server at {self.url}", why="it ended", hint="see the role's log")
        finally:
            stop.cancel()
            # A run may be over before the next record is due.
            self._record_metrics(admission)

    def _record_metrics(self, admission: AdmissionQueue) -> None:
        core = admission.core
        record = {
            "kind": "gateway",
            "slot": self.ctx.who.slot,
            "sessions": len(self.sessions),
            "at_work": core.running,
            "waiting": core.waiting,
            "cap": core.cap,
            "answered": self.service.answered,
            "failed": self.service.failed,
            "left": self.service.left,
            "tokens": self.service.sampled,
            **{f"admission_{name}": count for name, count in core.counts.items()},
        }
        if record != self._last_metrics:
            self._last_metrics = record
            self.ctx.metrics(record)

    def _first_work(self) -> None:
        if not self._worked:
            self._worked = True
            self.ctx.event("first_work", what="a call answered")


def context_of(folder: Path) -> int:
    """Return the context length of a model.

    Raises:
        RelaxError: its config.json does not say.
    """
    values = json.loads((folder / "config.json").read_text())
    found = values.get("max_position_embeddings") or values.get("text_config", {}).get("max_position_embeddings")
    if not isinstance(found, int):
        hint = "put max_position_embeddings into config.json"
        raise RelaxError(f"the model in {folder}", why="its config.json has no max_position_embeddings", hint=hint)
    return found
