"""How the policy is spoken to and read in episodes: chat template and parsers of [roles.env] and [roles.gateway]."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from relax_rt.config.loader import role_settings
from relax_rt.config.problems import KeyPath, Problem
from relax_rt.config.schema import RunConfig
from relax_rt.roles.agentic.settings import env_settings
from relax_rt.roles.agentic.tokens.parsers import AUTO, check_parsers
from relax_rt.roles.gateway.settings import GatewaySettings
from relax_rt.transport.rpc.errors import Refused

if TYPE_CHECKING:
    from relax_rt.roles.agentic.tokens import ChatTemplate
    from relax_rt.roles.models.tokenizer import ChatTokenizer

ENV, GATEWAY = ("roles", "env"), ("roles", "gateway")


class Speech(msgspec.Struct, frozen=True):
    """See the tables: a chat template's file in place of the model's own, and parsers."""

    chat_template: str | None = None
    tool_parser: str = AUTO
    reasoning_parser: str = AUTO


def speech_of(config: RunConfig) -> Speech:
    """What episodes are played with: each key of [roles.env], else of [roles.gateway]."""
    gateway, env = _gateway(config), env_settings(config)
    found = Speech(gateway.chat_template, gateway.tool_parser, gateway.reasoning_parser) if gateway else Speech()
    own = {} if env is None else {name: getattr(env, name) for name in Speech.__struct_fields__}
    return msgspec.structs.replace(found, **{name: value for name, value in own.items() if value is not None})


def _gateway(config: RunConfig) -> GatewaySettings | None:
    table = config.roles.get("gateway")
    target = table.get("target") if isinstance(table, dict) else getattr(table, "target", None)
    return None if table is None or target is not None else role_settings(config, "gateway", GatewaySettings)


def load_chat(
    config: RunConfig, tokenizer: ChatTokenizer, speech: Speech, unseen: Callable[[str], object] = lambda why: None
) -> ChatTemplate:
    """The chat template, and the model's processor if it sees.

    Args:
        unseen: see ChatTemplate.

    Raises:
        RelaxError: the file cannot be read, the parser does not fit, or the processor cannot be loaded.
    """
    from relax_rt.roles.agentic.tokens import ChatTemplate
    from relax_rt.roles.data.media.sight import load_sight

    own = None
    if speech.chat_template is not None:
        path = Path(config.config_dir) / speech.chat_template
        try:
            own = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise Refused(f"chat_template = {speech.chat_template!r}", why=str(error)) from error
    return ChatTemplate(
        tokenizer,
        template=own,
        tool_parser=speech.tool_parser,
        reasoning_parser=speech.reasoning_parser,
        sight=load_sight(tokenizer.folder),
        unseen=unseen,
    )


def template_warnings(config: RunConfig, tokenizer: ChatTokenizer) -> Iterator[str]:
    """Return what a program may send through the gateway that the chat template cannot render.

    Raises:
        RelaxError: see `load_chat`.
    """
    chat = load_chat(config, tokenizer, speech_of(config))
    for fault in chat.shortcomings(tools=True, turns=True):
        cost = "the gateway's calls that send it are refused" if fault.raises else "it is left out of prompts"
        yield f"the model's chat template cannot render {fault.why}; {cost}"


def check_speech(config: RunConfig) -> Iterator[Problem]:
    """Files that are not there, and parsers that nobody has."""
    for path, table in ((ENV, env_settings(config)), (GATEWAY, _gateway(config))):
        if table is None or not table.count:
            continue
        if table.chat_template is not None and not (file := Path(config.config_dir) / table.chat_template).is_file():
            yield Problem((*path, "chat_template"), f"there is no file {file}", "its place is relative to the config")
        yield from _parser(path, "tool_parser", tool_parser=table.tool_parser or AUTO)
        yield from _parser(path, "reasoning_parser", reasoning_parser=table.reasoning_parser or AUTO)


def _parser(path: KeyPath, key: str, *, tool_parser: str = AUTO, reasoning_parser: str = AUTO) -> Iterator[Problem]:
    try:
        check_parsers(tool_parser, reasoning_parser)
    except Refused as error:
        yield Problem((*path, key), f"{error.what}: {error.why}", error.hint)
