"""What a cold start learns from, as its source gives it: prompts with a completion, or with two of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from relax_rt.roles.data.columns import misspelt, parse_messages
from relax_rt.roles.data.files import read_rows
from relax_rt.roles.data.items import Message
from relax_rt.transport.rpc.errors import RelaxError

Kind = Literal["sft", "dpo"]
KEYS = ("messages", "prompt", "completion", "chosen", "rejected", "metadata")
MOST_ROWS = 2_000_000
MOST_FAULTS = 8
"""So many unusable rows are told one by one."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and what is to follow it.

    Attributes:
        where: file and line, for errors.
        question: identifies the prompt, as that of the same prompt in [data] does.
        messages: the conversation before the completion; None: it is made of the question, by [data]'s template.
        completion: to be learnt; of a pair the one preferred. rejected: the other one.
        metadata: further fields for the template.
    """

    where: str
    question: str
    messages: list[Message] | None
    completion: str
    rejected: str | None = None
    metadata: dict[str, Any] = {}


def read(path: Path, setting: str, kind: Kind) -> tuple[list[Row], list[RelaxError]]:
    """All usable rows of a file, and what is wrong with the others: the first MOST_FAULTS of them, then how many more.

    Raises:
        RelaxError: the file is not there, is of another kind, is not readable as such, or has too many rows.
    """
    rows: list[Row] = []
    faults: list[RelaxError] = []
    bad = 0
    for where, value in read_rows(path, setting, "cold_start.path"):
        if len(rows) >= MOST_ROWS:
            raise RelaxError(f"cold_start.path = {setting!r}", why=f"there are more than {MOST_ROWS} rows")
        try:
            rows.append(parse(where, value, kind))
        except RelaxError as error:
            bad += 1
            if len(faults) < MOST_FAULTS:
                faults.append(error)
    if bad > len(faults):
        faults.append(RelaxError(str(path), why=f"{bad - len(faults)} more rows cannot be used"))
    return rows, faults


def parse(where: str, row: Any, kind: Kind) -> Row:
    """One row, as `read_rows` gives it.

    Raises:
        RelaxError: it cannot be used; with `where`.
    """
    if isinstance(row, RelaxError):
        raise row
    if not isinstance(row, dict):
        raise RelaxError(where, why=f"a row is an object, not {row!r:.80}")
    if ("messages" in row) == ("prompt" in row):
        raise RelaxError(where, why="give one of `messages` and `prompt`" + misspelt(row, KEYS, "prompt", "messages"))
    metadata = row.get("metadata", {})
    if not isinstance(metadata, dict):
        raise RelaxError(where, why=f"`metadata` is an object, not {metadata!r:.80}")
    messages = None
    if "messages" in row:
        messages = parse_messages(where, row["messages"])
    if kind == "dpo":
        completion, rejected = (_completion(where, row, name) for name in ("chosen", "rejected"))
        if completion == rejected:
            raise RelaxError(where, why="`chosen` and `rejected` are the same", hint="leave the row out")
    else:
        rejected = None
        completion, messages = _last_turn(where, row, messages)
    if messages is not None and messages[-1]["role"] == "assistant":
        raise RelaxError(where, why="an assistant's message is followed by another one")
    question = _text(where, row, "prompt") if messages is None else question_of(messages)
    return Row(
        where=where,
        question=question,
        messages=messages,
        completion=completion,
        rejected=rejected,
        metadata=metadata,
    )


def question_of(messages: list[Message]) -> str:
    """What identifies a conversation, as [data] has it."""
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


def _last_turn(where: str, row: dict[str, Any], messages: list[Message] | None) -> tuple[str, list[Message] | None]:
    """The completion of a supervised row, and the messages before it."""
    if messages is None:
        return _completion(where, row, "completion"), None
    if "completion" in row:
        raise RelaxError(where, why="`messages` hold the completion as their last one: leave `completion` out")
    if messages[-1]["role"] != "assistant":
        raise RelaxError(where, why=f"the last message is of role {messages[-1]['role']!r}, not the assistant's")
    if len(messages) == 1:
        raise RelaxError(where, why="there is no message before the assistant's")
    if not messages[-1]["content"].strip():
        raise RelaxError(where, why="the assistant's last message is empty")
    return messages[-1]["content"], messages[:-1]


def _completion(where: str, row: dict[str, Any], name: str) -> str:
    """A completion as text, or as a list of the one message that it is."""
    value = row.get(name)
    if isinstance(value, list):
        messages = parse_messages(where, value)
        if len(messages) != 1 or messages[0]["role"] != "assistant":
            raise RelaxError(where, why=f"`{name}` is text or one message of the assistant, not {len(messages)} others")
        return _text(where, messages[0], "content", f"`{name}`")
    return _text(where, row, name)


def _text(where: str, row: dict[str, Any], name: str, called: str = "") -> str:
    if name not in row:
        raise RelaxError(where, why=f"there is no `{name}`" + misspelt(row, KEYS, name))
    value = row[name]
    if not isinstance(value, str) or not value.strip():
        raise RelaxError(where, why=f"{called or f'`{name}`'} is text that is not empty, not {value!r:.80}")
    return value


def user_texts(messages: list[Message]) -> Iterator[str]:
    """What the user says in a conversation."""
    return (str(message["content"]) for message in messages if message["role"] == "user")
