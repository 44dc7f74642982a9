"""What [roles.gateway] lacks, or cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from relax_rt.config.problems import Problem
from relax_rt.config.schema import RunConfig
from relax_rt.roles.gateway.settings import GatewaySettings
from relax_rt.roles.rollout.engines.settings import SamplingTable

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
