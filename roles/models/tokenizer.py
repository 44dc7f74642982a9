"""Text to token ids and back, and the digests that say which tokenizer and template did it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from relax_rt.config.problems import KeyPath, Problem
from relax_rt.roles.models.chat_template import (
    Message,
    TemplateCapabilities,
    Tool,
    prepare_message,
    probe_template,
    template_errors,
    unseen_role,
)
from relax_rt.transport.rpc.errors import RelaxError

PROBE: list[Message] = [{"role": "user", "content": "a"}]


class ChatTokenizer:
    """A model's tokenizer with its chat template.

    Attributes:
        raw: the transformers tokenizer.
        folder: the model folder it came from.
    """

    def __init__(self, raw: Any, folder: Path) -> None:
        self.raw, self.folder = raw, folder

    @cached_property
    def capabilities(self) -> TemplateCapabilities:
        """Capabilities of the model's own chat template."""
        return probe_template(lambda messages, tools: self._rendered(messages, tools), str(self.raw.chat_template))

    def text(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        """Return the prompt as text: the template applied, with the opening of the assistant's turn.

        Args:
            tools: functions that the model may call, as OpenAI's `tools`.

        Raises:
            RelaxError: the template refuses these messages (a role or an order that it does not know), or would leave
                a message out.
        """
        return self._apply(messages, tools, opened=True)

    def conversation(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        """Answered messages as text: the template applied, and nothing opened after them.

        Raises:
            RelaxError: as `text`.
        """
        return self._apply(messages, tools, opened=False)

    def _apply(self, messages: Sequence[Message], tools: Sequence[Tool], *, opened: bool) -> str:
        why = unseen_role(messages, self.capabilities)
        if not why:
            try:
                return self._rendered(
                    [prepare_message(one, self.capabilities) for one in messages], tools, opened=opened
                )
            except template_errors() as error:
                why = f"it refuses {messages!r:.200}: {error}"
        raise RelaxError(
            f"the chat template of {self.folder}",
            why=why,
            hint="leave these messages out, or put a chat_template.jinja that takes them into the model's folder",
        )

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Tool], *, opened: bool = False) -> str:
        return str(
            self.raw.apply_chat_template(
                list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=opened
            )
        )

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Return token ids of a prompt, the opening of the assistant's turn included."""
        return self.encode(self.text(messages, tools))

    def encode(self, text: str) -> list[int]:
        """Return token ids of a text; no special tokens are added."""
        return list(self.raw(text, add_special_tokens=False)["input_ids"])

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Return token ids of many texts, several times faster than `encode` one by one."""
        return [list(ids) for ids in self.raw(list(texts), add_special_tokens=False)["input_ids"]] if texts else []

    def decode(self, tokens: Sequence[int]) -> str:
        """Return text of token ids, special tokens (an EOS) left out."""
        return str(self.raw.decode([int(t) for t in tokens], skip_special_tokens=True))

    def spell(self, tokens: Sequence[int]) -> str:
        """Return text of token ids as the model sees it: special tokens written out, no spaces tidied."""
        return str(
            self.raw.decode([int(t) for t in tokens], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a completion: EOS of the tokenizer and of the model's files, and what closes a turn.

        Raises:
            RelaxError: there is none, so that nothing but the length limit would end a completion.
        """
        found = {self.raw.eos_token_id, self._turn_end(), *named_ends(self.folder)}
        stops = frozenset(int(token) for token in found if token is not None)
        if not stops:
            raise RelaxError(
                f"the tokenizer of {self.folder}",
                why="neither it nor generation_config.json nor config.json names an end-of-sequence token",
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
        """Return the special token that the chat template puts right after an assistant's words, if there is one."""
        mark = "zqx"
        messages = [*PROBE, {"role": "assistant", "content": mark}]
        text = self.conversation(messages)
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


PARTS = ("text_config", "thinker_config", "llm_config", "language_config")
"""Keys of the language model's config in that of a multimodal model."""


def named_ends(folder: Path) -> list[int]:
    """Return end-of-sequence tokens that a model's files name: those of config.json and generation_config.json
    together, since SGLang ends at either; of the language model's part of config.json where neither has any, because
    the parts of a composed model often keep an unset default.

    Raises:
        RelaxError: a file is no JSON object, or names an end that is no token id.
    """
    path = folder / "config.json"
    config = _json_object(path)
    found = [*_ends(path, config), *_ends(generation := folder / "generation_config.json", _json_object(generation))]
    tables = [config]
    while not found and tables:
        tables = [table[name] for table in tables for name in PARTS if isinstance(table.get(name), dict)]
        found = [token for table in tables for token in _ends(path, table)]
    return found


def _json_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise RelaxError(str(path), why=f"it cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise RelaxError(str(path), why="it is not a JSON object")
    return values


def _ends(path: Path, table: dict[str, Any]) -> list[int]:
    named = table.get("eos_token_id")
    tokens = [token for token in (named if isinstance(named, list) else [named]) if token is not None]
    if any(isinstance(token, bool) or not isinstance(token, int) for token in tokens):
        why = f"eos_token_id = {named!r:.80} is not a token id or a list of them"
        raise RelaxError(str(path), why=why, hint="write the ids as numbers")
    return tokens


def load_tokenizer(folder: Path) -> ChatTokenizer:
    """Return the tokenizer of a model folder; never looks outside it.

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


FEWEST = 0.5
"""Share of the model's tokens below which a tokenizer is another model's. Padding of the embedding is some percent."""
PLACE: KeyPath = ("model", "path")


def vocabulary_size(folder: Path) -> int | None:
    """Return rows of the embedding, by config.json; None if it does not say."""
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    size = (values.get("text_config") or values).get("vocab_size")
    return size if isinstance(size, int) else None


def check_vocabulary(folder: Path, tokenizer: ChatTokenizer, place: KeyPath = PLACE) -> list[Problem]:
    """Return what keeps the model in a folder from reading and writing this tokenizer's tokens.

    Args:
        place: the setting that named the model.
    """
    size = vocabulary_size(folder)
    if size is None:
        return []
    vocabulary: dict[str, int] = tokenizer.raw.get_vocab()
    beyond = sorted((number, token) for token, number in vocabulary.items() if number >= size)
    if beyond:
        number, token = beyond[0]
        message = (
            f"the tokenizer in {tokenizer.folder} has {len(beyond)} tokens that the model, with vocab_size = {size}, "
            f"does not know: {token!r} is token {number}"
        )
        hint = "use the model's own tokenizer; if tokens were added, resize_token_embeddings(len(tokenizer)) and save"
        return [Problem(place, message, hint)]
    if stops := sorted(stop for stop in tokenizer.stop_ids if stop >= size):
        message = f"completions are to end with token {stops[0]}, which a model with vocab_size = {size} never makes"
        return [Problem(place, message, "mend eos_token_id in generation_config.json")]
    highest = max(vocabulary.values(), default=-1) + 1
    if highest < FEWEST * size:
        message = (
            f"the tokenizer in {tokenizer.folder} has {highest} tokens, and the model can make {size}: it is another "
            "model's, and most of what is sampled would be no text"
        )
        return [Problem(place, message, "put the model's own tokenizer files into the folder")]
    return []
