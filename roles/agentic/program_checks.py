"""What keeps a program from being an environment, as far as the config shows it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from relax_rt.config.problems import KeyPath, Problem
from relax_rt.roles.agentic.loading import PROGRAM

if TYPE_CHECKING:
    from relax_rt.roles.agentic.settings import EnvSettings
    from relax_rt.roles.sections import RLConfig

PLACE: KeyPath = ("roles", "env")
GATEWAYS = ("drift", "reasoning")
"""Keys that the gateway has as well: what it keeps of an episode is its affair."""


def check_program(config: RLConfig, table: EnvSettings) -> Iterator[Problem]:
    """What a program needs of the gateway."""
    from relax_rt.roles.gateway.settings import GatewaySettings

    if table.environment.partition(":")[0] != PROGRAM:
        return
    gateway = config.roles.get("gateway")
    if not isinstance(gateway, GatewaySettings) or not gateway.count:
        message = "a program reaches the policy through the gateway, and there is none"
        yield Problem((*PLACE, "environment"), message, "add a table [roles.gateway]")
        return
    for key in GATEWAYS:
        if key in table.model_fields_set:
            yield Problem((*PLACE, key), f"{key} of programs is the gateway's", f"set roles.gateway.{key}", at="key")
    need = table.count * table.episodes_in_flight
    if gateway.sessions * gateway.count < need:
        message = f"sessions = {gateway.sessions}, and {need} episodes are played at a time"
        yield Problem(("roles", "gateway", "sessions"), message, f"at least {-(-need // gateway.count)}")
