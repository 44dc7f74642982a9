"""A model's chat template: render conversations and what is new in them, and parse completions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_rt.roles.agentic.tokens import parsers
from relax_rt.roles.agentic.tokens.messages import (
    ASSISTANT,
    REASONING_FIELDS,
    THINK_START,
    Key,
    check_messages,
    without_reasoning,
)
from relax_rt.roles.agentic.tokens.messages import tools_key as key_of_tools
from relax_rt.roles.agentic.tokens.parsers import ChatFormat, ParsedCompletion
from relax_rt.roles.agentic.tokens.types import Message, Tool
from relax_rt.roles.data.media.image_processor import ImageProcessor, load_image_processor
from relax_rt.roles.data.media.images import IMAGE, ImageSpan
from relax_rt.roles.models.chat_template import (
    CALLS,
    RESULTS,
    TURNS,
    TemplateCapabilities,
    TemplateFault,
    content_text,
    prepare_message,
    probe_template,
    template_errors,
    unseen_role,
)
from relax_rt.roles.models.tokenizer import PROBE, ChatTokenizer
from relax_rt.transport.rpc.errors import Refused

if TYPE_CHECKING:
    from relax_rt.roles.agentic.tokens.images import EncodedImage

MARK, OTHER = "zqxj", "jqxz"
"""Texts that no template contains."""
UNSEEN = "the chat template shows no tools (chat_template of roles.env or roles.gateway): the policy does not see"
MAX_TOOL_SETS = 256
"""Sets of tools for which it is cached whether the template shows them."""


class ChatTemplate:
    """A model's chat template, and the parsers of its completions. One instance serves many ledgers.

    Args:
        template: Jinja source instead of the model's own.
        variables: given to the template besides (`enable_thinking`, ...).
        tool_parser: one of parsers.TOOL_PARSERS; model: the tokenizer's own `response_template`; auto: that, if there
            is one, else by the template's text.
        reasoning_parser: one of parsers.REASONING_PARSERS, or auto: by the template's text.
        image_processor: of a model that takes images.
        unseen: called once if tools are offered that the template does not show.

    Raises:
        Refused: no such parser, or the template has no placeholder for an image.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        *,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
        tool_parser: str = parsers.AUTO,
        reasoning_parser: str = parsers.AUTO,
        image_processor: ImageProcessor | None = None,
        unseen: Callable[[str], object] = lambda why: None,
    ) -> None:
        parsers.check_parsers(tool_parser, reasoning_parser)
        self.tokenizer, self.image_processor = tokenizer, image_processor
        self._unseen: Callable[[str], object] | None = unseen
        self._shown: dict[Key, bool] = {}
        self._given: dict[str, Any] = {**(variables or {}), **({"chat_template": template} if template else {})}
        source = template or str(tokenizer.raw.chat_template)
        own = getattr(tokenizer.raw, "response_template", None) is not None
        if tool_parser == parsers.MODEL and not own:
            why = "the tokenizer brings no response_template"
            raise Refused("tool_parser = 'model'", why=why, hint=f"it would be {parsers.tool_family(source)!r}")
        auto = parsers.MODEL if own else parsers.tool_family(source)
        self.tool_parser = auto if tool_parser == parsers.AUTO else tool_parser
        auto = parsers.reasoning_family(source)
        self.reasoning_parser = auto if reasoning_parser == parsers.AUTO else reasoning_parser
        self.capabilities: TemplateCapabilities = probe_template(self._apply, source)
        if image_processor is not None:
            self._check_places(image_processor)

    def text(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, generation: bool = True) -> str:
        """Return a conversation as text, with the start of the assistant's turn if `generation`.

        Raises:
            Refused: the template does not render it.
        """
        check_messages(messages)
        why = unseen_role(messages, self.capabilities)
        if not why:
            try:
                return self._apply(
                    [prepare_message(one, self.capabilities) for one in messages], tools, generation=generation
                )
            # An exception of the template about a client's messages is the client's error, whatever its class.
            except template_errors() as error:
                why = f"the model's chat template does not take it: {error}"
        roles = ", ".join(message["role"] for message in messages[-8:])
        raise Refused(
            f"a conversation of {len(messages)} messages ({roles})",
            why=why[:400],
            hint="send roles, an order and contents that the template knows",
        )

    def _apply(self, messages: list[Message], tools: Sequence[Tool], *, generation: bool = False) -> str:
        text = self.tokenizer.raw.apply_chat_template(
            messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=generation, **self._given
        )
        str(text).encode()
        return str(text)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a rendered text; no special tokens are added."""
        return self.tokenizer.encode(text)

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, generation: bool = True) -> list[int]:
        """Return `text` as token ids.

        Raises:
            Refused: the template does not render it.
        """
        return self.encode(self.text(messages, tools, generation=generation))

    def _check_places(self, image_processor: ImageProcessor) -> None:
        """Raises: Refused, if the template does not render a text beside an image's placeholder."""
        parts = [{"type": "text", "text": MARK}, {"type": IMAGE}]
        ids = self.render([{"role": "user", "content": parts}])
        if ids.count(image_processor.placeholder) == 1 and MARK in self.text([{"role": "user", "content": MARK}]):
            return
        token = self.tokenizer.spell([image_processor.placeholder])
        why = f"it must write {token!r} once for an image, and the texts beside it"
        hint = "put a chat_template.jinja that does both into the model's folder"
        raise Refused(f"the chat template of {self.tokenizer.folder}", why=why, hint=hint)

    def expand_images(self, ids: list[int], images: Sequence[EncodedImage]) -> tuple[list[int], tuple[ImageSpan, ...]]:
        """Return rendered tokens with placeholders replaced by the tokens of images.

        Raises:
            Refused: the number of placeholders differs: a text or the template has written one.
        """
        if self.image_processor is None:
            return ids, ()
        places = [at for at, token in enumerate(ids) if token == self.image_processor.placeholder]
        if len(places) != len(images):
            token = self.tokenizer.spell([self.image_processor.placeholder])
            why = f"{token!r} stands there {len(places)} times, in texts too: only an image has it"
            raise Refused(f"a conversation with {len(images)} new images", why=why, hint="leave it out of texts")
        found: list[int] = []
        spans: list[ImageSpan] = []
        begun = 0
        for at, one in zip(places, images, strict=True):
            found += ids[begun:at]
            spans.append(ImageSpan(len(found), len(found) + len(one.tokens), one.data))
            found += one.tokens
            begun = at + 1
        return [*found, *ids[begun:]], tuple(spans)

    def shortcomings(self, *, tools: bool, turns: bool) -> list[TemplateFault]:
        """Return what episodes need and the template cannot render; those that raise would end an episode.

        Args:
            tools: tools are offered. turns: the environment may send messages after a reply.
        """
        needed = {
            CALLS: ("a turn of the assistant with a tool call", tools),
            RESULTS: ("the result of a tool call (role 'tool')", tools),
            TURNS: ("a turn of the user after one of the assistant", turns),
        }
        found: list[TemplateFault] = []
        for key, (what, is_needed) in needed.items():
            fault = self.capabilities.missing.get(key)
            if key == RESULTS and any(one.raises for one in found):
                # A result is rendered after its call, which already failed, so it cannot be probed.
                continue
            if is_needed and fault is not None:
                # Omitted calls are still in the sampled tokens; other omitted messages are refused.
                found.append(TemplateFault(f"{what}: {fault.why}", raises=fault.raises or key != CALLS))
        return found

    @cached_property
    def turn_end(self) -> str:
        """The text that closes a turn of the assistant; empty if it cannot be determined."""
        said = [*PROBE, {"role": ASSISTANT, "content": MARK}]
        try:
            last = self.text(said, generation=False)
            middle = self.text([*said, {"role": "user", "content": OTHER}], generation=False)
        except Refused:
            return ""
        if MARK not in last or MARK not in middle or OTHER not in middle:
            return ""
        end, between = last.rpartition(MARK)[2], middle.rpartition(MARK)[2].rpartition(OTHER)[0]
        return end if end and between.startswith(end) and end not in between[len(end) :] else ""

    def delta(self, messages: Sequence[Message], tools: Sequence[Tool], known: int) -> str | None:
        """Return the text from the end of turn of messages[known - 1], an assistant's, to the start of the next turn.

        It is found in the rendering of the whole conversation without reasoning. That rendering must start with the
        rendering of the conversation before that turn: then only this text is new.

        Returns:
            None if the template renders earlier text differently once there are new messages (it moves the tools, say),
            or does not close turns.

        Raises:
            Refused: the template does not render it.
        """
        if not self.turn_end:
            return None
        plain = [without_reasoning(message) for message in messages]
        whole = self.text(plain, tools)
        try:
            before = self.text(plain[: known - 1], tools, generation=False)
            # With other new texts, the rendering is the same up to the first of them.
            new = list(plain[known:])
            if new:
                # A text that differs from the message's, from the first letter on.
                mark = OTHER if str(content_text(new[0].get("content"))).startswith(MARK[0]) else MARK
                new[0] = {**new[0], "content": mark}
            other = self.text([*plain[:known], *new], tools) if new else whole
        except Refused:
            return None
        if not whole.startswith(before) or (new and other == whole):
            return None
        shared = whole[: _common_length(whole, other)]
        at = shared.rfind(self.turn_end)
        return whole[at:] if at >= len(before) else None

    def stop_text(self, tokens: Sequence[int]) -> str:
        """Return the stop token that a completion ends with, as text; empty if it ends with none."""
        return self.tokenizer.spell(tokens[-1:]) if tokens and tokens[-1] in self.tokenizer.stop_ids else ""

    def behind(self, tokens: Sequence[int], text: str) -> tuple[list[int], str]:
        """Return what a text that starts with an end of turn adds to a completion: token ids and their text.

        A sampled stop token is not repeated: what the template has after it follows. A completion without one (it was
        cut) gets the template's.
        """
        stop = self.stop_text(tokens)
        if not stop or not text.startswith(stop):
            return self.encode(text), text
        # Encode it with its context: some tokenizers put a space before the first word of a text.
        ids = self.encode(text)
        rest = text[len(stop) :]
        return (ids[1:] if ids[:1] == list(tokens[-1:]) else self.encode(rest)), rest

    def tools_key(self, tools: Sequence[Tool]) -> Key:
        """Return a key that is equal for tools with the same rendering; a template without tools has a single key."""
        key = key_of_tools(tools)
        return key if not tools or self._shows(key, tools) else key_of_tools(())

    def shows(self, tools: Sequence[Tool]) -> bool:
        """Return whether the template shows these tools in a prompt."""
        return self._shows(key_of_tools(tools), tools)

    def _shows(self, key: Key, tools: Sequence[Tool]) -> bool:
        if key not in self._shown:
            if len(self._shown) >= MAX_TOOL_SETS:
                self._shown.clear()
            try:
                self._shown[key] = self.text(PROBE, tools) != self.text(PROBE)
            except Refused:
                self._shown[key] = True
            if not self._shown[key] and self._unseen is not None:
                told, self._unseen = self._unseen, None
                functions = [tool.get("function", tool) for tool in tools]
                names = (str(one.get("name") if isinstance(one, dict) else one) for one in functions)
                told(f"{UNSEEN} {', '.join(names)}"[:400])
        return self._shown[key]

    @cached_property
    def _specials(self) -> re.Pattern[str]:
        return re.compile("|".join(re.escape(token) for token in self.tokenizer.raw.all_special_tokens) or "(?!)")

    def parse(self, text: str, tools: Sequence[Tool], *, prompt: str) -> ParsedCompletion:
        """Parse a completion into reasoning, content and tool calls.

        Args:
            text: as the model wrote it, special tokens as text, without its stop token.
            tools: without any, tool calls are not parsed.
            prompt: the text before it, which may have started the reasoning.
        """
        parsed = self._parse_with_model(text, tools, prompt) if self.tool_parser == parsers.MODEL else None
        if parsed is None or (parsed.calls and not tools):
            family = "none" if parsed is not None else self.tool_parser
            opened = prompt.rstrip().endswith(THINK_START)
            parsed = parsers.parse(
                text, tools, tool_parser=family, reasoning_parser=self.reasoning_parser, opened=opened
            )
        content, reasoning = (self._specials.sub("", part) for part in (parsed.content, parsed.reasoning))
        calls, malformed = parsed.calls, parsed.malformed
        if self.capabilities.one_call and len(calls) > 1:
            # The next prompt could not be rendered with all of them.
            calls, malformed = calls[:1], malformed + len(calls) - 1
        return ParsedCompletion(content, reasoning, calls, malformed)

    def _parse_with_model(self, text: str, tools: Sequence[Tool], prompt: str) -> ParsedCompletion:
        try:
            message = self.tokenizer.raw.parse_response(text, prefix=prompt, tools=list(tools) or None)
        except (ValueError, KeyError):
            return ParsedCompletion(text, malformed=1)
        calls = [parsers.parse_openai_call(call) for call in message.get("tool_calls") or []]
        known = tuple(call for call in calls if call is not None)
        reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name)), "")
        return ParsedCompletion(str(message.get("content") or ""), str(reasoning), known, len(calls) - len(known))


def load_chat_template(
    config_dir: Path,
    tokenizer: ChatTokenizer,
    chat_format: ChatFormat,
    on_unseen_tools: Callable[[str], object] = lambda why: None,
) -> ChatTemplate:
    """Load the chat template, with the image processor of a model that takes images.

    Args:
        on_unseen_tools: see ChatTemplate.

    Raises:
        RelaxError: the file cannot be read, the parser does not fit, or the processor cannot be loaded.
    """
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


def _common_length(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts, by bisection: comparing slices is fast."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
