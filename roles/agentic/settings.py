"""The table [roles.env]."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from relax_rt.config.loader import role_settings
from relax_rt.config.schema import Filled, RoleSettings, RunConfig, Seconds
from relax_rt.roles.agentic.tokens.parsers import ChatFormat
from relax_rt.roles.base.episodes import DEFAULT_MAX_TOKENS, KIND, plays_episodes
from relax_rt.roles.gateway.settings import GatewaySettings
from relax_rt.roles.rewards.settings import ComponentTable

PROGRAM = "program"
"""`program:COMMAND`: any program that speaks to the gateway."""


class EnvSettings(RoleSettings):
    """Plays episodes with the policy: it takes the place of prompts, reward workers and evaluator."""

    environment: Filled
    """Your class or function, `file.py:Name` (relative to the config file) or `package.module:Name`; or an adapter:
    `textarena:GuessTheNumber-v0`, `gymnasium:FrozenLake-v1`, `reasoning_gym:chain_sum`; or a program that speaks to the
    gateway: `program:python agent.py` (docs/guides/programs.md)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the class or function, or options of the adapter or program."""
    rewards: list[ComponentTable] = Field(default_factory=list)
    """Added to what the environment gives, when the episode is over: [{ name = "length", weight = 0.1, most = 400 }],
    as reward.components; [reward] has the limits of their workers."""
    tasks: Annotated[int, Field(ge=1, le=1 << 40)] | None = None
    """Tasks to train on, distinguished by their seeds; held-out tasks have other seeds. Unset: the items of [data]."""
    max_turns: Annotated[int, Field(ge=1, le=10_000)] = 16
    """Replies of one episode; after that it is truncated."""
    max_tokens: Annotated[int, Field(ge=16, le=1 << 20)] = DEFAULT_MAX_TOKENS
    """Tokens of one episode, observations included; each reply has sampling.max_new_tokens at most."""
    media_kib: Annotated[int, Field(ge=1, le=16_384)] = 1024
    """Images of one episode, encoded, each counted once; for models that see."""
    turn_timeout_s: Seconds = 30.0
    """Deadline of one call of the environment. A call that takes longer is stuck: its process is killed and its
    episode played again."""
    episode_timeout_s: Seconds = 600.0
    """A whole episode, waiting for tokens included."""
    episodes_in_flight: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Episodes that one slot plays at a time."""
    workers: Annotated[int, Field(ge=0, le=256)] | None = None
    """Processes for the environments of a slot, those of async ones with an event loop each. Unset: 1 where the methods
    are not async, else 0: they run in the slot's own process."""
    worker_processes: Annotated[int, Field(ge=1, le=100_000)] = 1024
    """Processes that a worker may have with all that it starts; one that has more is killed."""
    worker_memory_mib: Annotated[int, Field(ge=64)] | None = None
    """Memory of a worker with all that it starts; one that takes more is killed. Unset: no bound."""
    unfinished: Literal["keep", "drop"] = "keep"
    """Replies of an episode that is played again, because its process was killed, a call of its environment was stuck,
    or the env role died: keep replays them as long as the environment answers as before, and continues from there;
    drop samples all of it anew."""
    drift: Literal["realign", "fork", "drop"] = "fork"
    """How to continue an episode whose history was changed where the policy had spoken: fork (a branch of its own),
    realign, or drop."""
    reasoning: Literal["keep_reasoning", "strip"] = "keep_reasoning"
    """Reasoning that a client leaves out of the history: keep_reasoning continues after the sampled tokens, strip
    makes each turn a branch."""
    chat_template: Filled | None = None
    """A file with a chat template in place of the model's; relative to the config file. Unset, as the two parsers: what
    [roles.gateway] says, if there is one."""
    tool_parser: str | None = None
    """Format of tool calls; unset: as in [roles.gateway], else by the chat template (auto)."""
    reasoning_parser: str | None = None
    """Format of reasoning; unset: as in [roles.gateway], else by the chat template (auto)."""
    success: float = 0.5
    """An episode whose reward is above this is a success, in evaluations."""


def env_settings(config: RunConfig) -> EnvSettings | None:
    """Return the table [roles.env], if the run has one that is not a role of the user's own."""
    return role_settings(config, KIND, EnvSettings) if plays_episodes(config) else None


def is_program(table: EnvSettings) -> bool:
    """Return whether the environment is a program that speaks to the gateway."""
    return table.environment.partition(":")[0] == PROGRAM


def gateway_settings(config: RunConfig) -> GatewaySettings | None:
    """Return the table [roles.gateway], if the run has one that is not a role of the user's own."""
    table = config.roles.get("gateway")
    target = table.get("target") if isinstance(table, dict) else getattr(table, "target", None)
    return None if table is None or target is not None else role_settings(config, "gateway", GatewaySettings)


def chat_format_of(config: RunConfig) -> ChatFormat:
    """Return the chat format of episodes: each key of [roles.env], else of [roles.gateway]."""
    gateway, env = gateway_settings(config), env_settings(config)
    found = ChatFormat()
    if gateway is not None:
        found = ChatFormat(gateway.chat_template, gateway.tool_parser, gateway.reasoning_parser)
    own = {} if env is None else {name: getattr(env, name) for name in ChatFormat.__struct_fields__}
    return msgspec.structs.replace(found, **{name: value for name, value in own.items() if value is not None})
