"""Prompts from a .jsonl or .parquet file."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec

from relax_rt.roles.data.items import Message, RawItem
from relax_rt.transport.errors import RelaxError

KEYS = ("messages", "prompt", "answer", "metadata")
ROLES = ("system", "user", "assistant", "tool")


def read_items(path: Path, setting: str) -> Iterator[RawItem]:
    """The rows of a file as items, in file order.

    Args:
        path: a .jsonl or .parquet file.
        setting: what the user wrote as data.path, for errors.

    Raises:
        RelaxError: the file is not there, is of another kind, or a row is wrong; with file and line.
    """
    for where, row in read_rows(path, setting, "data.path"):
        if isinstance(row, RelaxError):
            raise row
        yield _item(where, row)


def read_rows(path: Path, setting: str, key: str) -> Iterator[tuple[str, Any]]:
    """The rows of a file as they are, each with its file and line; a line that is not JSON is the error that says so.

    Args:
        setting: what the user wrote. key: the setting that it was written for.

    Raises:
        RelaxError: the file is not there, is of another kind, or cannot be read as such.
    """
    if not path.is_file():
        near = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.name, near, n=1)
        hint = f"did you mean {str(path.parent / close[0])!r}?" if close else "paths are relative to the config file"
        raise RelaxError(f"{key} = {setting!r}", why=f"there is no file {path}", hint=hint)
    if path.suffix == ".jsonl":
        return _jsonl(path)
    if path.suffix == ".parquet":
        return _parquet(path, key)
    raise RelaxError(f"{key} = {setting!r}", why=f"{path.suffix or 'no suffix'}", hint="use .jsonl or .parquet")


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path}:{number}"
                try:
                    row = msgspec.json.decode(line)
                except msgspec.DecodeError as error:
                    row = RelaxError(where, why=f"not a JSON object: {error}")
                yield where, row


def _parquet(path: Path, key: str) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise RelaxError(f"{key} = {str(path)!r}", why=str(error), hint="pip install pyarrow") from error
    try:
        file = pyarrow.parquet.ParquetFile(path)
        row_number = 0
        for batch in file.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                row_number += 1
                # A column absent from a row reads as null; to the checks it is absent.
                yield f"{path}:row {row_number}", {key: value for key, value in row.items() if value is not None}
    except pyarrow.ArrowException as error:
        raise RelaxError(f"{key} = {str(path)!r}", why=f"not a readable parquet file: {error}") from error


def _item(where: str, row: Any) -> RawItem:
    if not isinstance(row, dict):
        raise RelaxError(where, why=f"a row is an object with the keys {', '.join(KEYS)}, not {row!r:.80}")
    if ("messages" in row) == ("prompt" in row):
        raise RelaxError(where, why="give one of `messages` and `prompt`" + misspelt(row, KEYS, "prompt", "messages"))
    if "answer" not in row:
        why = "there is no `answer`" + misspelt(row, KEYS, "answer")
        raise RelaxError(where, why=why, hint='write "" if there is none')
    answer, metadata = row["answer"], row.get("metadata", {})
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise RelaxError(where, why=f"`answer` is text or a number, not {answer!r:.80}")
    if not isinstance(metadata, dict):
        raise RelaxError(where, why=f"`metadata` is an object, not {metadata!r:.80}")
    if "prompt" in row:
        question, messages = row["prompt"], None
        if not isinstance(question, str) or not question.strip():
            raise RelaxError(where, why=f"`prompt` is text, not {question!r:.80}")
    else:
        messages = parse_messages(where, row["messages"])
        if messages[-1]["role"] == "assistant":
            raise RelaxError(where, why="the last message is the assistant's, so there is nothing to generate")
        question = "\n".join(f"{m['role']}: {m['content']}" for m in messages)
    return RawItem(question=question, answer=str(answer), metadata=metadata, where=where, messages=messages)


def parse_messages(where: str, value: Any) -> list[Message]:
    """A conversation of a row.

    Raises:
        RelaxError: it is not one; with `where`.
    """
    if not isinstance(value, list) or not value:
        raise RelaxError(where, why=f"`messages` is a list of objects with role and content, not {value!r:.80}")
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise RelaxError(where, why=f"message {number} is not an object with role and content: {message!r:.80}")
        if (role := message.get("role")) not in ROLES:
            raise RelaxError(where, why=f"message {number} has role {role!r}, not one of {', '.join(ROLES)}")
    return value


def misspelt(row: Collection[str], known: Collection[str], *wanted: str) -> str:
    """A remark on a key of the row that looks like a misspelt one; empty if none does.

    Args:
        known: keys that mean themselves. wanted: those that are missing.
    """
    for name in wanted:
        if close := difflib.get_close_matches(name, [key for key in row if key not in known], n=1):
            return f"; is {close[0]!r} meant to be {name!r}?"
    return ""
