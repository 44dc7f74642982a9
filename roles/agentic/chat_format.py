"""The chat template and parsers of episodes, as [roles.env] and [roles.gateway] set them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from relax_rt.config.loader import role_settings
from relax_rt.config.problems import KeyPath, Problem
from relax_rt.config.schema import RunConfig
from relax_rt.roles.agentic.settings import env_settings
from relax_rt.roles.agentic.tokens.chat_format import ChatFormat, load_chat_template
from relax_rt.roles.agentic.tokens.parsers import AUTO, check_parsers
from relax_rt.roles.gateway.settings import GatewaySettings
from relax_rt.roles.models.tokenizer import ChatTokenizer
from relax_rt.transport.rpc.errors import Refused


def chat_format_of(config: RunConfig) -> ChatFormat:
    """Return what episodes are played with: each key of [roles.env], else of [roles.gateway]."""
    gateway, env = _gateway_settings(config), env_settings(config)
    found = ChatFormat()
    if gateway is not None:
        found = ChatFormat(gateway.chat_template, gateway.tool_parser, gateway.reasoning_parser)
    own = {} if env is None else {name: getattr(env, name) for name in ChatFormat.__struct_fields__}
    return msgspec.structs.replace(found, **{name: value for name, value in own.items() if value is not None})


def _gateway_settings(config: RunConfig) -> GatewaySettings | None:
    table = config.roles.get("gateway")
    target = table.get("target") if isinstance(table, dict) else getattr(table, "target", None)
    return None if table is None or target is not None else role_settings(config, "gateway", GatewaySettings)


def template_warnings(config: RunConfig, tokenizer: ChatTokenizer) -> Iterator[str]:
    """Return what a program may send through the gateway that the chat template cannot render.

    Raises:
        RelaxError: see `load_chat_template`.
    """
    chat = load_chat_template(Path(config.config_dir), tokenizer, chat_format_of(config))
    for fault in chat.shortcomings(tools=True, turns=True):
        cost = "the gateway's calls that send it are refused" if fault.raises else "it is left out of prompts"
        yield f"the model's chat template cannot render {fault.why}; {cost}"


def check_chat_format(config: RunConfig) -> Iterator[Problem]:
    """Check that files of templates exist, and parsers are known."""
    tables = ((("roles", "env"), env_settings(config)), (("roles", "gateway"), _gateway_settings(config)))
    for path, table in tables:
        if table is None or not table.count:
            continue
        if table.chat_template is not None and not (file := Path(config.config_dir) / table.chat_template).is_file():
            yield Problem((*path, "chat_template"), f"there is no file {file}", "its path is relative to the config")
        yield from _check_parser(path, "tool_parser", table.tool_parser or AUTO, AUTO)
        yield from _check_parser(path, "reasoning_parser", AUTO, table.reasoning_parser or AUTO)


def _check_parser(path: KeyPath, key: str, tool_parser: str, reasoning_parser: str) -> Iterator[Problem]:
    try:
        check_parsers(tool_parser, reasoning_parser)
    except Refused as error:
        yield Problem((*path, key), f"{error.what}: {error.why}", error.hint)
