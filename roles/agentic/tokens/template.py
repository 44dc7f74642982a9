"""A model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from relax_rt.roles.agentic.tokens.types import Message, Tool
from relax_rt.roles.models.tokenizer import ChatTokenizer


class ChatTemplate:
    """A model's chat template, and the parsers of what the model writes under it.

    Args:
        template: Jinja source instead of the model's own.
        variables: given to the template besides (`enable_thinking`, ...).
        tool_parser: one of TOOL_PARSERS, or auto: by the template's text.
        reasoning_parser: one of REASONING_PARSERS, or auto.

    Raises:
        Refused: no such parser.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        *,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
    ) -> None:
        raise NotImplementedError

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, generation: bool = True) -> list[int]:
        """Token ids of a conversation, with the opening of the assistant's turn if `generation`.

        Raises:
            Refused: the template takes no such conversation.
        """
        raise NotImplementedError
