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
    """Address to listen on; "node": the address by which the other nodes of the run reach its node. Clients on other
    machines are authenticated by the run's token, unencrypted."""
    port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """Port; 0: any free port, which `relax-rt ps`, the event log and gateway-0.json in the run's folder name."""
    models: Annotated[list[str], Field(min_length=1)] = Field(default=["policy"])
    """Model names that calls may use; "*" accepts any name, for programs whose name cannot be set."""
    temperature: Literal["refuse", "override"] = "refuse"
    """What to do with an episode's call with another temperature than sampling.temperature: refuse it, or sample with
    the run's. Calls with the run's token, which are not trained on, use the temperature they request."""
    unsupported: Literal["refuse", "ignore"] = "refuse"
    """What to do with options that cannot be served (top_p, penalties, a forced tool or format, which would change what
    is trained on; and top_logprobs): refuse the call, or ignore them and name them in the header `x-relax-ignored`."""
    max_new_tokens: Annotated[int, Field(ge=1, le=131_072)] | None = None
    """Maximum tokens of one answer; unset: sampling.max_new_tokens."""
    lag: Annotated[int, Field(ge=0, le=1024)] | None = None
    """Publications that an engine may be behind the committed weights; unset: 1, or 0 if max_staleness is 0."""
    sessions: Annotated[int, Field(ge=1, le=1 << 20)] = 4096
    """Maximum number of open episodes."""
    session_tokens: Annotated[int, Field(ge=16, le=1 << 22)] = 32_768
    """Maximum tokens of one episode, all branches together, unless its opener sets another limit."""
    session_media_kib: Annotated[int, Field(ge=1, le=16_384)] = 1024
    """Images of one episode, encoded, each counted once; for models that see."""
    session_idle_s: Seconds = 900.0
    """Time without a call after which a session without an owner, or of a client with the run's token, is forgotten."""
    drift: Literal["realign", "fork", "drop"] = "fork"
    """When a client changes the history, the sampled tokens become a branch of their own (fork), are replaced by the
    changed history (realign), or are not trained on (drop)."""
    reasoning: Literal["keep_reasoning", "strip"] = "keep_reasoning"
    """Reasoning that a client omits from the history: keep_reasoning continues after the sampled tokens, strip makes
    each turn a branch."""
    tool_parser: str = "auto"
    """Format of tool calls; auto: by the chat template."""
    reasoning_parser: str = "auto"
    """Format of reasoning; auto: by the chat template."""
    chat_template: Filled | None = None
    """File with a chat template that replaces the model's; relative to the config file."""
    call_timeout_s: Seconds = 600.0
    """Deadline of a call, from its admission."""
    wait_s: Seconds = 300.0
    """Deadline for the admission of a call; then it is answered with 429."""
    waiting: Annotated[int, Field(ge=0, le=1 << 20)] = 4096
    """Maximum number of calls that wait for admission."""
    at_work: Annotated[int, Field(ge=1, le=8192)] = 4096
    """Maximum number of sequences that the engines generate for the gateway at a time; below it the number follows
    their load. A call with n = 8 counts as eight."""
    connections: Annotated[int, Field(ge=1, le=1 << 17)] = 4096
    """Maximum number of open connections."""
    body_mib: Annotated[int, Field(ge=1, le=1024)] = 16
    """Maximum size of one request."""
    held_mib: Annotated[int, Field(ge=1, le=1 << 17)] = 256
    """Maximum size of the requests of all calls in progress together."""
    read_timeout_s: Seconds = 30.0
    """Deadline for a request's head, and for its body."""
    send_timeout_s: Seconds = 60.0
    """Time without reading after which a client loses its answer."""


PACKAGES = ("starlette", "uvicorn")
PATH = ("roles", "gateway")


def check_gateway(config: RunConfig) -> Iterator[Problem]:
    """Find settings that contradict each other and missing packages (those of another interpreter are not checked)."""
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
