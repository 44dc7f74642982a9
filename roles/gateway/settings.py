"""The table [roles.gateway] and its checks."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Annotated, Literal

from pydantic import Field

from relax_rt.config.problems import Problem
from relax_rt.config.schema import Filled, RoleSettings, RunConfig, Seconds
from relax_rt.roles.rollout.engines.settings import SamplingTable

LOOPBACK, NODE_ADDRESS = "127.0.0.1", "node"


class GatewaySettings(RoleSettings):
    """The policy as an HTTP endpoint, for programs that speak OpenAI's or Anthropic's API (docs/guides/gateway.md)."""

    host: str = LOOPBACK
    """Address to listen at; "node": the one by which the other nodes of the run reach its node. Others than this
    machine's own reach the model with the run's token alone, unencrypted."""
    port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """0: any free port; `relax-rt ps`, the event log and gateway-0.json in the run's folder name it."""
    models: Annotated[list[str], Field(min_length=1)] = Field(default=["policy"])
    """Model names that calls may use; "*" accepts any name, for programs whose name cannot be set."""
    temperature: Literal["refuse", "override"] = "refuse"
    """An episode's call with another temperature than sampling.temperature: refuse it, or sample with the run's. Calls
    with the run's token, which are not trained on, have the one they ask for."""
    unsupported: Literal["refuse", "ignore"] = "refuse"
    """What cannot be done here (top_p, penalties, a forced tool or format: they would change what is trained on; and
    top_logprobs): refuse the call, or leave it out and say so in the answer's head `x-relax-ignored`."""
    max_new_tokens: Annotated[int, Field(ge=1, le=131_072)] | None = None
    """Tokens of one answer; unset: sampling.max_new_tokens."""
    lag: Annotated[int, Field(ge=0, le=1024)] | None = None
    """Publications that an engine may be behind the committed weights; unset: 1, or 0 where max_staleness is 0."""
    sessions: Annotated[int, Field(ge=1, le=1 << 20)] = 4096
    """Episodes open at the same time."""
    session_tokens: Annotated[int, Field(ge=16, le=1 << 22)] = 32_768
    """Tokens of one episode, all its branches, where who opens it says nothing."""
    session_media_kib: Annotated[int, Field(ge=1, le=16_384)] = 1024
    """Images of one episode, encoded, each counted once; for models that see."""
    session_idle_s: Seconds = 900.0
    """A session that a caller with the run's token has named, or that has no owner, is forgotten after so long without
    a call."""
    drift: Literal["realign", "fork", "drop"] = "fork"
    """When a caller changes the history, the sampled tokens become a branch of their own (fork), are replaced by the
    changed history (realign), or are not trained on (drop)."""
    reasoning: Literal["keep_reasoning", "strip"] = "keep_reasoning"
    """Reasoning that a caller leaves out of the history: keep_reasoning continues after the sampled tokens, strip
    makes each turn a branch."""
    tool_parser: str = "auto"
    """How tool calls are written; auto: by the chat template."""
    reasoning_parser: str = "auto"
    """How thoughts are marked; auto: by the chat template."""
    chat_template: Filled | None = None
    """A file with a chat template in place of the model's; relative to the config file."""
    call_timeout_s: Seconds = 600.0
    """From a call's turn to its end."""
    wait_s: Seconds = 300.0
    """For its turn; then it is answered with 429."""
    waiting: Annotated[int, Field(ge=0, le=1 << 20)] = 4096
    """Calls that may wait for their turn."""
    at_work: Annotated[int, Field(ge=1, le=8192)] = 4096
    """Sequences that the engines are given at the same time, at most; below that it follows their load. A call with
    n = 8 has eight."""
    connections: Annotated[int, Field(ge=1, le=1 << 17)] = 4096
    """Open at the same time."""
    body_mib: Annotated[int, Field(ge=1, le=1024)] = 16
    """Of one request."""
    held_mib: Annotated[int, Field(ge=1, le=1 << 17)] = 256
    """Requests of all calls at hand together."""
    read_timeout_s: Seconds = 30.0
    """For a request's head, and for its body."""
    send_timeout_s: Seconds = 60.0
    """A caller who takes nothing of his answer for so long loses it."""


PACKAGES = ("starlette", "uvicorn")
PATH = ("roles", "gateway")


def check_gateway(config: RunConfig) -> Iterator[Problem]:
    """Settings that contradict each other, and packages that are not there (another interpreter's are its affair)."""
    table = config.roles.get("gateway")
    if not isinstance(table, GatewaySettings) or not table.count:
        return
    if table.port and table.count > 1:
        message = f"port = {table.port} with count = {table.count}: one gateway would have it, the others none"
        yield Problem((*PATH, "port"), message, "set port = 0, or count = 1")
    if table.body_mib > table.held_mib:
        message = (
            f"held_mib = {table.held_mib} is below body_mib = {table.body_mib}: large requests would never be taken"
        )
        yield Problem((*PATH, "held_mib"), message, "raise held_mib, or lower body_mib")
    limit = table.max_new_tokens or config.table(SamplingTable).max_new_tokens
    if table.session_tokens <= limit:
        message = f"session_tokens = {table.session_tokens} leaves no room for a prompt beside {limit} new tokens"
        yield Problem((*PATH, "session_tokens"), message, "raise it, or lower max_new_tokens")
    missing = [name for name in PACKAGES if find_spec(name) is None] if table.python is None else []
    if missing:
        message = (
            f"the gateway needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed"
        )
        yield Problem(PATH, message, "pip install relax-rt[agentic]", at="key")
