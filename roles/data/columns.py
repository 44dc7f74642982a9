"""Map the columns of a row to a prompt: its messages, its answer, and metadata for the reward.

`ColumnReader` is created once per source and called for every row, at indexing and again when the row is used.
docs/guides/data.md describes the forms.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping
from typing import Any, Literal

import msgspec

from relax_rt.roles.data.items import RawItem
from relax_rt.roles.models.chat_template import Message
from relax_rt.transport.rpc.errors import RelaxError

Form = Literal["auto", "prompt", "openai", "verl", "trl", "sharegpt"]

TARGETS = ("prompt", "messages", "answer", "metadata", "tools", "system")
"""Columns that mean themselves in every form, and what `data.columns` maps to."""
CONVERSATIONS = ("conversations", "conversation")
PROMPTS = ("prompt", "messages", *CONVERSATIONS)
"""Columns that hold the prompt, in some form."""
ANSWERS = ("solution", "ground_truth", "completion", "reference_answer")
"""Names of the answer in TRL and OpenAI; used if there is no `answer` and exactly one of them."""
VERL = ("reward_model", "data_source", "ability", "extra_info", "agent_name")
SIMPLE = frozenset({"prompt", "answer", "metadata"})
MEDIA = ("images", "image", "videos", "video", "audios", "audio")
ROLES = ("system", "user", "assistant", "tool")
SPEAKERS = {
    "developer": "system",
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
"""Other names of the roles: OpenAI's `developer` and `function`, and ShareGPT's speakers."""
FUNCTION_CALL = ("function_call", "tool_call")
"""Speakers in ShareGPT rows whose value is the JSON of a tool call."""
TEXT_PARTS = ("text", "input_text", "output_text")


class ColumnReader:
    """Reads rows of one source.

    Args:
        columns: map from target to its column, dotted for a nested field. Targets other than TARGETS become metadata
            of that name; an empty column for `answer` means that rows have no answer.
        form: the form that every row has; auto: found for each row.
        ignore: columns that are neither used nor passed on.
        name: put into the metadata as `source`, where the row has none.
        key: setting of `columns`, for errors.

    Attributes:
        nullable: columns of a table in which null is a value; in others it means that the row has no such column.
        forms: how many rows of each form were read. unknown: columns that went to the metadata without being asked
            for, with the number of rows and the first one.
    """

    def __init__(
        self,
        columns: Mapping[str, str] | None = None,
        form: Form = "auto",
        ignore: Collection[str] = (),
        name: str | None = None,
        key: str = "data.columns",
    ) -> None:
        self._columns, self._form, self._ignore, self._name = dict(columns or {}), form, frozenset(ignore), name
        self._key = key
        self._mapped = set(self._columns.values())
        self.nullable = frozenset({"answer", *PROMPTS, *self._mapped})
        self._as_is = not (columns or ignore or name) and form in ("auto", "prompt")
        self.forms: dict[str, int] = {}
        self.unknown: dict[str, list[Any]] = {}

    def read(self, where: str, row: Any) -> RawItem:
        """Return the row as a prompt.

        Raises:
            RelaxError: with `where`, the column and what to do.
        """
        if not isinstance(row, dict):
            raise RelaxError(where, why=f"a row is an object of columns, not {row!r:.80}")
        if self._as_is and row.keys() <= SIMPLE and isinstance(row.get("prompt"), str) and "answer" in row:
            # The form that is shown first in the documentation, in a third of the time.
            own = row.get("metadata")
            if row["prompt"].strip() and "\0" not in row["prompt"] and (own is None or isinstance(own, dict)):
                self.forms["prompt"] = self.forms.get("prompt", 0) + 1
                return RawItem(question=row["prompt"], answer=row["answer"], metadata=own or {}, where=where)
        metadata: dict[str, Any] = {}
        found = self._targets(where, row, metadata)
        form, prompt = self._prompt(where, row, found)
        self.forms[form] = self.forms.get(form, 0) + 1
        messages, question = None, prompt
        if isinstance(prompt, list):
            column = self._columns.get("messages") or self._columns.get("prompt") or ""
            messages = parse_messages(where, prompt, column or _column_of(form, row))
        elif not isinstance(prompt, str) or not prompt.strip():
            raise RelaxError(where, why=f"`prompt` is text or a list of messages, not {prompt!r:.80}")
        answer, other = self._answer(where, row, found, form, messages)
        if messages is not None:
            if answer is _LAST_TURN:
                last = messages.pop()
                answer = last["content"] or last.get("tool_calls")
            if messages[-1]["role"] == "assistant":
                leaving_out = self._leaving_out(found, other)
                hint = f"{leaving_out} to take that message as the answer, or " if leaving_out else ""
                why = "the last message is the assistant's, so there is nothing to generate"
                raise RelaxError(where, why=why, hint=f"{hint}leave the message out")
            question = "\n".join(f"{m['role']}: {m['content']}" for m in messages)
        self._metadata(where, row, found, form, other, metadata)
        tools = parse_tools(where, found["tools"]) if found.get("tools") not in (None, "", []) else None
        system = self._system(where, found, messages)
        for name, text in (("prompt" if messages is None else _column_of(form, row), question), ("system", system)):
            if text is not None and (at := text.find("\0")) >= 0:
                why = f"`{self._columns.get(name, name)}` has a NUL character, \\u0000 in JSON"
                around = text[max(0, at - 12) : at + 12]
                raise RelaxError(where, why=f"{why} ({around!r})", hint="remove it, or leave the row out")
        return RawItem(
            question=question,
            answer=answer,
            metadata=metadata,
            where=where,
            messages=messages,
            tools=tools,
            system=system,
        )

    def _targets(self, where: str, row: dict[str, Any], metadata: dict[str, Any]) -> dict[str, Any]:
        """Read the targets by name, mapped columns first; mapped names that are not targets go to `metadata`."""
        found = {}
        for target, column in self._columns.items():
            if target == "answer" and not column:
                found[target] = ""
            elif target in TARGETS:
                found[target] = _read_column(where, row, column, f"{self._key}.{target}")
            else:
                metadata[target] = _read_column(where, row, column, f"{self._key}.{target}")
        taken = "messages" in found or "prompt" in found
        for target in TARGETS:
            if target in found or target not in row or target in self._mapped or target in self._ignore:
                continue
            if taken and target in ("messages", "prompt"):
                continue  # The other one is mapped: this is a further column.
            if row[target] is not None or target == "answer":
                found[target] = row[target]
        return found

    def _prompt(self, where: str, row: dict[str, Any], found: dict[str, Any]) -> tuple[str, Any]:
        """Return the form of the row, and its prompt: text, or a list of messages."""
        given = [name for name in ("prompt", "messages") if name in found]
        if null := [self._columns[name] for name in given if found[name] is None]:
            raise _null_error(where, null)
        if len(given) == 2:
            hint = f'choose: {self._key} = {{ prompt = "prompt" }} or {{ messages = "messages" }}'
            raise RelaxError(where, why="it has both `messages` and `prompt`", hint=hint)
        turns = next((name for name in CONVERSATIONS if row.get(name) is not None and name not in self._ignore), None)
        if not given and turns is not None:
            form, prompt = "sharegpt", row[turns]
            if not isinstance(prompt, list):
                raise RelaxError(where, why=f"`{turns}` is a list of turns with from and value, not {prompt!r:.80}")
        elif not given:
            raise self._nothing(where, row, "prompt", "messages", "prompt")
        elif given == ["messages"]:
            form, prompt = "openai", found["messages"]
            if not isinstance(prompt, list):
                raise RelaxError(
                    where, why=f"`messages` is a list of objects with role and content, not {prompt!r:.80}"
                )
        else:
            prompt = found["prompt"]
            reward_model = row.get("reward_model")
            if isinstance(reward_model, dict) and "ground_truth" in reward_model:
                form = "verl"
            elif isinstance(prompt, list) or (found.get("answer") is None and any(name in row for name in ANSWERS)):
                form = "trl"
            else:
                form = "prompt"
        if self._form not in ("auto", form):
            raise RelaxError(where, why=f"the row is of form {form!r}, and the source's form is {self._form!r}")
        return form, prompt

    def _answer(
        self, where: str, row: dict[str, Any], found: dict[str, Any], form: str, messages: list[Message] | None
    ) -> tuple[Any, str]:
        """Return the answer (_LAST_TURN: it is the assistant's last message), and which of ANSWERS it is.

        A null `answer` is the answer only of a row that has no other: tables fill in null where a row has none.
        """
        if found.get("answer") is not None or "answer" in self._columns:
            return found["answer"], ""
        if form == "verl":
            return row["reward_model"]["ground_truth"], ""
        others = [name for name in ANSWERS if row.get(name) is not None and name not in self._ignore]
        if len(others) > 1:
            hint = f'say which: {self._key} = {{ answer = "{others[0]}" }}'
            raise RelaxError(where, why=f"there is no `answer`, but {' and '.join(others)}", hint=hint)
        if others:
            name, value = others[0], row[others[0]]
            if name == "completion" and isinstance(value, list) and value and isinstance(value[0], dict):
                # The one message of a completion.
                said = parse_messages(where, value, name)
                if len(said) != 1 or said[0]["role"] != "assistant":
                    why = f"`{name}` is text or one message of the assistant, not {len(said)} messages"
                    raise RelaxError(where, why=why)
                value = said[0]["content"]
            return value, name
        if messages is not None and len(messages) > 1 and messages[-1]["role"] == "assistant":
            return _LAST_TURN, ""
        if "answer" in found:
            return None, ""
        raise self._nothing(where, row, "answer", "answer")

    def _leaving_out(self, found: Mapping[str, Any], other: str) -> str:
        """Return how to leave out what the answer of a row is taken from; empty: it cannot be.

        Args:
            other: a column that is the answer under another name.
        """
        if "answer" in self._columns:
            return f"leave {self._key}.answer out"
        if found.get("answer") is not None or other:
            column = other or "answer"
            return f'leave `{column}` out (data.ignore = ["{column}"])'
        return ""

    def _nothing(self, where: str, row: dict[str, Any], target: str, *names: str) -> RelaxError:
        """Return the error of a row without a target: a misspelt column, or the setting that names one."""
        null = [name for name in PROMPTS if name in row and row[name] is None and name not in self._ignore]
        if target == "prompt" and null:
            return _null_error(where, null)
        why = f"there is no `{names[0]}`" if len(names) == 1 else "there is neither `messages` nor `prompt`"
        if close := misspelling_note(row, TARGETS, *names):
            return RelaxError(
                where, why=why + close, hint=f"rename the column, or map it: {self._setting(target, row)}"
            )
        if target == "answer" and "answer" in row:
            why = "`answer` is ignored (data.ignore), and nothing else is the answer"
        columns = ", ".join(map(repr, list(row)[:12])) or "none"
        hint = f"say which column it is: {self._setting(target, row)}"
        hint += f'; {self._key} = {{ answer = "" }} if there is none' if target == "answer" else ""
        return RelaxError(where, why=f"{why}; its columns are {columns}", hint=hint)

    def _setting(self, target: str, row: dict[str, Any]) -> str:
        free = [name for name in row if name not in TARGETS and name not in self._mapped]
        close = difflib.get_close_matches(target, free, n=1)
        likely = [name for name in LIKELY[target] if name in row]
        column = (close or likely or free or ["…"])[0]
        mapped = "".join(f'{name} = "{path}", ' for name, path in self._columns.items())
        return f'{self._key} = {{ {mapped}{target} = "{column}" }}'

    def _metadata(
        self, where: str, row: dict[str, Any], found: dict[str, Any], form: str, answer: str, metadata: dict[str, Any]
    ) -> None:
        """Put the row's metadata, and every otherwise unused column, into `metadata`.

        Args:
            answer: the column that holds the answer under another name.
        """
        own = found.get("metadata")
        if isinstance(own, str) and own.lstrip().startswith("{"):
            try:
                own = json.loads(own)
            except ValueError as error:
                raise RelaxError(where, why=f"`metadata` is text that is not JSON: {error}") from None
        if own is not None and not isinstance(own, dict):
            raise RelaxError(where, why=f"`metadata` is an object, not {own!r:.80}")
        if own:
            metadata.update(own)
        for column, value in row.items():
            if column == answer or column in self._mapped or column in self._ignore:
                continue
            if column in TARGETS and (value is None or (column in found and column not in self._columns)):
                continue
            if column in CONVERSATIONS and (form == "sharegpt" or value is None):
                continue
            if column in MEDIA:
                if value in (None, [], ""):
                    continue
                hint = f'use an environment (docs/guides/pictures.md), or go without: data.ignore = ["{column}"]'
                raise RelaxError(where, why=f"column `{column}`: prompts of [data] have text alone", hint=hint)
            if column in metadata:
                why = f"column `{column}` is also a key of the row's metadata"
                raise RelaxError(where, why=why, hint=f'leave one out: data.ignore = ["{column}"]')
            metadata[column] = value
            if not (form == "verl" and column in VERL):
                self.unknown.setdefault(column, [0, where])[0] += 1
        if self._name is not None:
            metadata.setdefault("source", self._name)

    def _system(self, where: str, found: dict[str, Any], messages: list[Message] | None) -> str | None:
        system = found.get("system")
        if system is None or system == "":
            return None
        if not isinstance(system, str):
            raise RelaxError(where, why=f"`system` is text, not {system!r:.80}")
        if messages is not None and messages[0]["role"] == "system":
            raise RelaxError(
                where,
                why="it has a `system` column and a system message",
                hint='leave one out: data.ignore = ["system"]',
            )
        return system


_LAST_TURN = object()
LIKELY = {
    "prompt": ("question", "problem", "instruction", "query", "input", "text"),
    "answer": ("ground_truth", "solution", "target", "label", "output", "response", "expected_answer", "reward_model"),
}
"""Columns that error messages suggest; they are used only if data.columns names them."""


def _null_error(where: str, columns: list[str]) -> RelaxError:
    """Return the error of a row whose prompt is null in these columns."""
    named = " and ".join(f"`{name}`" for name in columns)
    why = f"{named} {'is' if len(columns) == 1 else 'are'} null"
    return RelaxError(where, why=why, hint="fill in the prompt, or leave the row out")


def _column_of(form: str, row: dict[str, Any]) -> str:
    if form == "sharegpt":
        return next(name for name in CONVERSATIONS if row.get(name) is not None)
    return "messages" if form == "openai" else "prompt"


def _read_column(where: str, row: Any, column: str, key: str) -> Any:
    """Read the dotted column that the setting `key` names. A column whose own name has dots takes precedence."""
    if column in row:
        return row[column]
    value, said = row, ""
    for name in column.split("."):
        if not isinstance(value, dict) or name not in value:
            said = f"`{said}`" if said else "the row"
            has = ", ".join(map(repr, list(value)[:12])) if isinstance(value, dict) else f"{value!r:.60}"
            near = difflib.get_close_matches(name, list(value) if isinstance(value, dict) else [], n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"mend {key}, or the row"
            why = f"{key} = {column!r}, and {said} has no {name!r}; it has {has}"
            raise RelaxError(where, why=why, hint=hint)
        value, said = value[name], f"{said}.{name}".lstrip(".")
    return value


def parse_messages(where: str, value: Any, column: str = "messages") -> list[Message]:
    """Return a conversation of a row, in the form that chat templates take: roles of ROLES, content as text.

    ShareGPT's from and value, parts of text, `developer`, and calls without content are brought into it; keys that are
    null (parquet fills them in) are left out.

    Raises:
        RelaxError: it is not one; with `where`, the column and the number of the message.
    """
    if not isinstance(value, list) or not value:
        raise RelaxError(where, why=f"`{column}` is a list of objects with role and content, not {value!r:.80}")
    messages: list[Message] = []
    for number, message in enumerate(value, 1):
        parsed = _message(where, message, f"`{column}`, message {number}")
        if parsed["role"] == "system" and len(messages) == 1 and messages[0]["role"] == "system":
            # A system and a developer message: most templates take one, at the beginning.
            messages[0] = messages[0] | {"content": f"{messages[0]['content']}\n\n{parsed['content']}"}
        else:
            messages.append(parsed)
    return messages


def _message(where: str, message: Any, named: str) -> Message:
    if not isinstance(message, dict):
        raise RelaxError(where, why=f"{named} is not an object with role and content: {message!r:.80}")
    if "role" not in message and "from" in message:
        message = {"role": message["from"], "content": message.get("value")} | {
            key: value for key, value in message.items() if key not in ("from", "value")
        }
    role, content = message.get("role"), message.get("content")
    if role in FUNCTION_CALL:
        role, content, message = (
            "assistant",
            None,
            message | {"tool_calls": _parse_sharegpt_calls(where, content, named)},
        )
    role = SPEAKERS.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        close = difflib.get_close_matches(str(role), (*ROLES, *SPEAKERS), n=1)
        meant = f"; is {close[0]!r} meant?" if close else ""
        raise RelaxError(where, why=f"{named} has role {role!r}, not one of {', '.join((*ROLES, 'developer'))}{meant}")
    if content is None and role == "assistant" and message.get("tool_calls"):
        content = ""
    elif isinstance(content, list):
        content = "".join(_part_text(where, part, named) for part in content)
    elif not isinstance(content, str):
        raise RelaxError(where, why=f"{named} is not an object with role and content: its content is {content!r:.60}")
    parsed = {key: one for key, one in message.items() if one is not None}
    if "tool_calls" in parsed:
        if not isinstance(parsed["tool_calls"], list):
            raise RelaxError(where, why=f"{named}: `tool_calls` is a list, not {parsed['tool_calls']!r:.60}")
        if not parsed["tool_calls"]:
            del parsed["tool_calls"]
    return parsed | {"role": role, "content": content}


def _part_text(where: str, part: Any, named: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in TEXT_PARTS and isinstance(part.get("text"), str):
        return str(part["text"])
    if isinstance(part, dict) and isinstance(kind, str) and kind not in TEXT_PARTS:
        hint = "prompts of [data] have text alone; an environment can show images (docs/guides/pictures.md)"
        raise RelaxError(where, why=f"{named} has a part of type {kind!r}", hint=hint)
    raise RelaxError(where, why=f"{named} has a part that is no text: {part!r:.60}")


def _parse_sharegpt_calls(where: str, value: Any, named: str) -> list[dict[str, Any]]:
    """ShareGPT's call, JSON of name and arguments, as OpenAI's."""
    try:
        calls = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise RelaxError(where, why=f"{named} is a function call that is not JSON: {error}") from None
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise RelaxError(where, why=f"{named} is a function call without a name: {value!r:.80}")
    return [
        {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}}
        for call in calls
    ]


def parse_tools(where: str, value: Any) -> list[dict[str, Any]]:
    """Return the functions of a row as OpenAI's `tools`; a list, or its JSON text (a parquet column holds one type
    only).

    Raises:
        RelaxError: it is not such a list; with `where`.
    """
    try:
        tools = msgspec.json.decode(value) if isinstance(value, str) else value
    except msgspec.DecodeError as error:
        raise RelaxError(where, why=f"`tools` is text that is not JSON: {error}") from None
    if not isinstance(tools, list):
        raise RelaxError(where, why=f"`tools` is a list of functions, not {value!r:.80}")
    found = []
    for number, tool in enumerate(tools, 1):
        if isinstance(tool, str):
            return [one for text in tools for one in parse_tools(where, f"[{text}]")]
        if isinstance(tool, dict) and isinstance(tool.get("name"), str) and "function" not in tool:
            tool = {"type": "function", "function": {key: one for key, one in tool.items() if key != "type"}}
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RelaxError(where, why=f"`tools`: number {number} has no function with a name: {tool!r:.80}")
        found.append(_without_null(tool))
    return found


def _without_null(value: Any) -> Any:
    """Remove null keys: parquet gives each object the keys of all objects."""
    if isinstance(value, list):
        return [_without_null(one) for one in value]
    if isinstance(value, dict):
        return {key: _without_null(one) for key, one in value.items() if one is not None}
    return value


def misspelling_note(row: Collection[str], known: Collection[str], *wanted: str) -> str:
    """Return a remark on a key of the row that looks like a misspelt one; empty if none does.

    Args:
        known: keys that mean themselves. wanted: those that are missing.
    """
    for name in wanted:
        if close := difflib.get_close_matches(name, [key for key in row if key not in known], n=1):
            return f"; is {close[0]!r} meant to be {name!r}?"
    return ""


def unknown_notes(unknown: Mapping[str, list[Any]], key: str = "data.columns") -> list[str]:
    """Return one line for each unmapped column that went to the metadata."""
    notes = []
    for column, (count, where) in unknown.items():
        close = difflib.get_close_matches(column, TARGETS, n=1, cutoff=0.7)
        meant = f'; is {close[0]!r} meant? Then {key} = {{ {close[0]} = "{column}" }}' if close else ""
        notes.append(f"column {column!r} ({count} rows, the first {where}) goes to the reward as metadata{meant}")
    return notes
