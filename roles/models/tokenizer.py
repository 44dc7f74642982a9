"""Text to token ids and back, and the digests that say which tokenizer and template did it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from relax_rt.transport.errors import RelaxError

Message = dict[str, Any]
PROBE: list[Message] = [{"role": "user", "content": "a"}]


class ChatTokenizer:
    """A model's tokenizer with its chat template.

    Attributes:
        raw: the transformers tokenizer.
        folder: the model folder it came from.
    """

    def __init__(self, raw: Any, folder: Path) -> None:
        self.raw, self.folder = raw, folder

    def text(self, messages: Sequence[Message], tools: Sequence[Message] | None = None) -> str:
        """The prompt as text: the template applied, with the opening of the assistant's turn.

        Args:
            tools: functions that the model may call, as OpenAI's `tools`.

        Raises:
            RelaxError: the template refuses these messages (a role or an order it does not know).
        """
        return self._apply(messages, opened=True, tools=tools)

    def _apply(self, messages: Sequence[Message], *, opened: bool, tools: Sequence[Message] | None = None) -> str:
        from jinja2 import TemplateError

        try:
            offered = list(tools) if tools else None
            return str(
                self.raw.apply_chat_template(
                    list(messages), tools=offered, tokenize=False, add_generation_prompt=opened
                )
            )
        except TemplateError as error:
            raise RelaxError(
                f"the chat template of {self.folder}", why=f"it refuses {messages!r:.200}: {error}"
            ) from error

    def conversation(self, messages: Sequence[Message]) -> str:
        """Answered messages as text: the template applied, and nothing opened after them.

        Raises:
            RelaxError: the template refuses these messages.
        """
        return self._apply(messages, opened=False)

    def render(self, messages: Sequence[Message], tools: Sequence[Message] | None = None) -> list[int]:
        """Token ids of a prompt, the opening of the assistant's turn included."""
        return self.encode(self.text(messages, tools))

    def render_many(self, conversations: Sequence[Sequence[Message]]) -> list[list[int]]:
        """`render` of many prompts, several times faster than one by one."""
        if not conversations:
            return []
        return self.encode_many([self.text(messages) for messages in conversations])

    def encode(self, text: str) -> list[int]:
        """Token ids of a text as it stands: no special tokens are added."""
        return list(self.raw(text, add_special_tokens=False)["input_ids"])

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of many texts, several times faster than one by one."""
        return [list(ids) for ids in self.raw(list(texts), add_special_tokens=False)["input_ids"]] if texts else []

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids, special tokens (an EOS) left out."""
        return str(self.raw.decode([int(t) for t in tokens], skip_special_tokens=True))

    def spell(self, tokens: Sequence[int]) -> str:
        """Text of token ids as the model sees it: special tokens written out, no spaces tidied."""
        return str(
            self.raw.decode([int(t) for t in tokens], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a completion: EOS of tokenizer and generation_config, and what closes a turn.

        Raises:
            RelaxError: there is none, so that nothing but the length limit would end a completion.
        """
        found = {self.raw.eos_token_id, self._turn_end()}
        config = self.folder / "generation_config.json"
        if config.is_file():
            named = json.loads(config.read_text()).get("eos_token_id")
            found.update(named if isinstance(named, list) else [named])
        stops = frozenset(int(token) for token in found if token is not None)
        if not stops:
            raise RelaxError(
                f"the tokenizer of {self.folder}",
                why="neither it nor generation_config.json names an end-of-sequence token",
                hint="set eos_token in tokenizer_config.json",
            )
        return stops

    @cached_property
    def end_id(self) -> int:
        """The token that closes a turn of the assistant: what the chat template puts there, else an EOS."""
        end = self._turn_end()
        end = self.raw.eos_token_id if end is None else end
        return int(end) if end is not None else min(self.stop_ids)

    def _turn_end(self) -> int | None:
        """The special token that the chat template puts right after an assistant's words, if there is one."""
        mark = "zqx"
        messages = [*PROBE, {"role": "assistant", "content": mark}]
        text = str(self.raw.apply_chat_template(messages, tokenize=False, add_generation_prompt=False))
        tail = self.encode(text.rpartition(mark)[2])
        return tail[0] if tail and tail[0] in set(self.raw.all_special_ids) else None

    @cached_property
    def tokenizer_digest(self) -> str:
        """xxh3-128 over everything that turns text into tokens (vocabulary, merges, normaliser, added tokens)."""
        core = getattr(self.raw, "backend_tokenizer", None)
        if core is None:
            content = json.dumps(sorted(self.raw.get_vocab().items())) + repr(self.raw)
        else:
            # transformers keeps padding and truncation of the last call in the core: they are no part of it.
            state = json.loads(core.to_str()) | {"padding": None, "truncation": None}
            content = json.dumps(state, sort_keys=True)
        return xxhash.xxh3_128_hexdigest(content.encode())

    @cached_property
    def template_digest(self) -> str:
        """xxh3-128 of the chat template's source."""
        return xxhash.xxh3_128_hexdigest(str(self.raw.chat_template).encode())


def load_tokenizer(folder: Path) -> ChatTokenizer:
    """The tokenizer of a model folder; never looks outside it.

    Raises:
        RelaxError: it cannot be loaded, or has no chat template.
    """
    from transformers import AutoTokenizer

    try:
        raw = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise RelaxError(f"the tokenizer of {folder}", why=str(error).splitlines()[0]) from error
    if not getattr(raw, "chat_template", None):
        raise RelaxError(
            f"the tokenizer of {folder}",
            why="it has no chat template",
            hint="put chat_template.jinja into the folder (a base model: a template of your own)",
        )
    return ChatTokenizer(raw, folder)
