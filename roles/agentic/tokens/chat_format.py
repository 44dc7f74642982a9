"""Load a chat template with its parsers, for the env role and the gateway."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from relax_rt.roles.agentic.tokens.parsers import AUTO
from relax_rt.transport.rpc.errors import Refused

if TYPE_CHECKING:
    from relax_rt.roles.agentic.tokens.template import ChatTemplate
    from relax_rt.roles.models.tokenizer import ChatTokenizer


class ChatFormat(msgspec.Struct, frozen=True):
    """How conversations are rendered and completions parsed.

    Attributes:
        chat_template: a file, relative to the config, in place of the model's own template.
    """

    chat_template: str | None = None
    tool_parser: str = AUTO
    reasoning_parser: str = AUTO


def load_chat_template(
    config_dir: Path,
    tokenizer: ChatTokenizer,
    chat_format: ChatFormat,
    on_unseen_tools: Callable[[str], object] = lambda why: None,
) -> ChatTemplate:
    """Load the chat template, with the image processor of a model that takes pictures.

    Args:
        on_unseen_tools: see ChatTemplate.

    Raises:
        RelaxError: the file cannot be read, the parser does not fit, or the processor cannot be loaded.
    """
    # Here, because a config is checked without what these load (numpy, Pillow).
    from relax_rt.roles.agentic.tokens.template import ChatTemplate
    from relax_rt.roles.data.media.image_processor import load_image_processor

    template = None
    if chat_format.chat_template is not None:
        try:
            template = (config_dir / chat_format.chat_template).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise Refused(f"chat_template = {chat_format.chat_template!r}", why=str(error)) from error
    return ChatTemplate(
        tokenizer,
        template=template,
        tool_parser=chat_format.tool_parser,
        reasoning_parser=chat_format.reasoning_parser,
        image_processor=load_image_processor(tokenizer.folder),
        unseen=on_unseen_tools,
    )
