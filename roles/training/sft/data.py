"""The sequences of a cold start: read from their source, rendered to tokens, without what the run evaluates on, and
split by hash into training and validation rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from relax_rt.config.schema import RunConfig
from relax_rt.roles.base.sample import Sample, bare_meta
from relax_rt.roles.data.columns import misspelling_note, parse_messages
from relax_rt.roles.data.files import read_rows
from relax_rt.roles.data.items import PromptItem, RawItem, answer_text
from relax_rt.roles.data.settings import DataTable
from relax_rt.roles.data.source import PromptSource, conversation, fill_template
from relax_rt.roles.data.split.canonical import canonical, in_held_out, item_id
from relax_rt.roles.evaluation.sets import load_set
from relax_rt.roles.evaluation.settings import EvaluationTable
from relax_rt.roles.models.chat_template import Message
from relax_rt.roles.models.tokenizer import ChatTokenizer
from relax_rt.roles.training.algorithms.settings import ColdStartTable
from relax_rt.transport.rpc.errors import RelaxError

Kind = Literal["sft", "dpo"]
KEYS = ("messages", "prompt", "completion", "chosen", "rejected", "metadata")
MAX_ROWS = 2_000_000
MAX_FAULTS = 8
"""Unusable rows that are listed one by one."""


class SftRow(msgspec.Struct, frozen=True, kw_only=True):
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


def read_sft_rows(path: Path, setting: str, kind: Kind) -> tuple[list[SftRow], list[RelaxError]]:
    """All usable rows of a file, and what is wrong with the others: the first MAX_FAULTS of them, then how many more.

    Raises:
        RelaxError: the file is not there, is of another kind, is not readable as such, or has too many rows.
    """
    rows: list[SftRow] = []
    faults: list[RelaxError] = []
    bad = 0
    for where, value in read_rows(path, setting, "cold_start.path"):
        if len(rows) >= MAX_ROWS:
            raise RelaxError(f"cold_start.path = {setting!r}", why=f"there are more than {MAX_ROWS} rows")
        try:
            rows.append(parse_row(where, value, kind))
        except RelaxError as error:
            bad += 1
            if len(faults) < MAX_FAULTS:
                faults.append(error)
    if bad > len(faults):
        faults.append(RelaxError(str(path), why=f"{bad - len(faults)} more rows cannot be used"))
    return rows, faults


def parse_row(where: str, row: Any, kind: Kind) -> SftRow:
    """One row, as `read_rows` gives it.

    Raises:
        RelaxError: it cannot be used; with `where`.
    """
    if isinstance(row, RelaxError):
        raise row
    if not isinstance(row, dict):
        raise RelaxError(where, why=f"a row is an object, not {row!r:.80}")
    if ("messages" in row) == ("prompt" in row):
        raise RelaxError(
            where, why="give one of `messages` and `prompt`" + misspelling_note(row, KEYS, "prompt", "messages")
        )
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
    return SftRow(
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
        raise RelaxError(where, why=f"there is no `{name}`" + misspelling_note(row, KEYS, name))
    value = row[name]
    if not isinstance(value, str) or not value.strip():
        raise RelaxError(where, why=f"{called or f'`{name}`'} is text that is not empty, not {value!r:.80}")
    return value


def user_texts(messages: list[Message]) -> Iterator[str]:
    """What the user says in a conversation."""
    return (str(message["content"]) for message in messages if message["role"] == "user")


ENCODE_BATCH = 4096
"""Texts that go through the tokenizer together."""


class EncodedSequence(msgspec.Struct, frozen=True):
    """A sequence: tokens int32 [T]; mask uint8 [T], 1 on what is learnt."""

    tokens: NDArray[np.int32]
    mask: NDArray[np.uint8]


class ConversationText(msgspec.Struct, frozen=True):
    """A sequence before it is encoded.

    Attributes:
        prompt: token ids that go before everything; empty where `parts` begin with the prompt.
        parts: texts that are encoded each on its own, as a prompt and what a model adds to it are. Each but a first
            one of the prompt begins with a turn of the assistant.
        turns: whether the part begins with a turn that is learnt.
    """

    prompt: tuple[int, ...]
    parts: tuple[str, ...]
    turns: tuple[bool, ...]


def split_conversation(
    tokenizer: ChatTokenizer,
    messages: Sequence[Message],
    completion: str,
    *,
    prompt: Sequence[int] = (),
    every_turn: bool = True,
) -> ConversationText:
    """A conversation and its completion, cut where turns of the assistant begin.

    The prompt is what a rollout would be given. Where the template writes an answered turn otherwise than it opens one
    (it drops what was thought), the completion follows the prompt as it stands.

    Args:
        prompt: its tokens, if they are known; then nothing but the completion is learnt.
        every_turn: learn earlier turns of the assistant too; those that the template writes otherwise are not.
    """
    start = tokenizer.text(messages)
    whole = tokenizer.conversation([*messages, {"role": "assistant", "content": completion}])
    tail = whole[len(start) :] if whole.startswith(start) else completion
    if prompt:
        return ConversationText(tuple(prompt), (tail,), (True,))
    cuts = [0]
    if every_turn:
        for index, message in enumerate(messages):
            if message["role"] == "assistant" and index:
                opened = tokenizer.text(messages[:index])
                if start.startswith(opened) and len(opened) > cuts[-1]:
                    cuts.append(len(opened))
    ends = [*cuts[1:], len(start)]
    parts = [start[a:b] for a, b in zip(cuts, ends, strict=True)]
    return ConversationText((), (*parts, tail), (False, *[True] * len(parts)))


def encode_texts(tokenizer: ChatTokenizer, texts: Sequence[ConversationText]) -> list[EncodedSequence]:
    """Tokens and masks. A turn is learnt up to the token that stops a completion, with it; the last one ends there."""
    flat = [part for text in texts for part in text.parts]
    ids: list[list[int]] = []
    for first in range(0, len(flat), ENCODE_BATCH):
        ids += tokenizer.encode_many(flat[first : first + ENCODE_BATCH])
    found, encoded = [], iter(ids)
    for text in texts:
        tokens: list[int] = list(text.prompt)
        mask = [0] * len(tokens)
        for number, turn in enumerate(text.turns):
            part = next(encoded)
            end = next((place + 1 for place, token in enumerate(part) if token in tokenizer.stop_ids), None)
            if number == len(text.turns) - 1:
                part = part[:end] if end is not None else [*part, tokenizer.end_id]
                end = len(part)
            # What follows a turn that does not end cannot be told from it.
            learnt = end if turn and end is not None else 0
            tokens += part
            mask += [1] * learnt + [0] * (len(part) - learnt)
        # Nothing predicts the first token.
        mask[:1] = [0]
        found.append(EncodedSequence(np.array(tokens, np.int32), np.array(mask, np.uint8)))
    return found


Floats = NDArray[np.float32]
LISTED_FAULTS = 3


class SftReport(msgspec.Struct, frozen=True):
    """What became of the rows: read = train + validation + evaluated + overlong. `evaluated` are left out because the
    run evaluates on their questions. Tokens are those of one pass over `train`; `learnt` of them are learnt."""

    read: int
    evaluated: int
    overlong: int
    train: int
    validation: int
    tokens: int
    learnt: int
    longest: int

    def __str__(self) -> str:
        gone = [
            f"{n} {what}"
            for n, what in ((self.evaluated, "that the run evaluates on"), (self.overlong, "overlong"))
            if n
        ]
        return (
            f"{self.train} rows to learn from and {self.validation} to validate with, of {self.read} read"
            + (f" ({' and '.join(gone)} left out)" if gone else "")
            + f"; {self.learnt} of {self.tokens} tokens are learnt, at most {self.longest} a sequence"
        )


class SftItem(msgspec.Struct, frozen=True):
    """One row, encoded: a completion, or the one preferred and the one rejected."""

    sequences: tuple[EncodedSequence, ...]

    @property
    def tokens(self) -> int:
        """Tokens of its sequences."""
        return sum(len(one.tokens) for one in self.sequences)


class SftData(msgspec.Struct, frozen=True):
    """What is learnt from and what is validated with. `digest` is of all of it."""

    train: list[SftItem]
    validation: list[SftItem]
    report: SftReport
    digest: str


class UnusableRows(RelaxError):
    """Rows that cannot be used. `each` has them, one by one."""

    def __init__(self, each: Sequence[RelaxError]) -> None:
        listed = "; ".join(f"{one.what}: {one.why}" for one in each[:LISTED_FAULTS])
        more = f"; and {len(each) - LISTED_FAULTS} more" if len(each) > LISTED_FAULTS else ""
        super().__init__("cold_start.path has rows that cannot be used", why=listed + more, hint="mend or remove them")
        self.each = list(each)


class EvaluatedQuestions:
    """What the run evaluates on: questions that are held out.

    Args:
        share: of all questions, whether they are among the items or not.
    """

    def __init__(self, items: Iterable[PromptItem], share: float) -> None:
        self._share = share
        self._ids: set[str] = set()
        for item in items:
            self._ids.add(item_id(item.question))
            # A file may hold the same prompt as a conversation, already in its template.
            self._ids.update(item_id(text) for text in user_texts(item.messages))

    def has(self, row: SftRow) -> bool:
        """Whether a row's question, or anything that its user says, is among them."""
        if in_held_out(row.question, self._share) or item_id(row.question) in self._ids:
            return True
        return any(item_id(text) in self._ids for text in user_texts(row.messages or []))


def load_sft_data(config: RunConfig, config_dir: Path, source: PromptSource, tokenizer: ChatTokenizer) -> SftData:
    """The data of a config's cold start.

    Args:
        source: the run's prompts.

    Raises:
        UnusableRows: rows that cannot be used. RelaxError: no file, or nothing to learn from.
    """
    data, table, overlong = config.table(DataTable), config.table(ColdStartTable), 0
    held_out = list(source.held_out)
    for named in config.table(EvaluationTable).sets:
        held_out += load_set(named, config, source, tokenizer, config_dir)[0]
    rows, prompts = _rows(table, config_dir, source)
    evaluated = EvaluatedQuestions(held_out, data.held_out)
    kept = [index for index, row in enumerate(rows) if not evaluated.has(row)]
    chosen = [rows[index] for index in kept]
    items = _encoded(table, data, tokenizer, chosen, [prompts[index] for index in kept] if prompts else [])
    train: list[SftItem] = []
    validation: list[SftItem] = []
    for row, item in zip(chosen, items, strict=True):
        longest = max(len(one.tokens) for one in item.sequences)
        if longest > table.max_tokens:
            if table.overlong == "error":
                why = f"it has {longest} tokens, cold_start.max_tokens is {table.max_tokens}"
                hint = 'allow more, or set cold_start.overlong = "drop"'
                raise RelaxError(row.where, why=why, hint=hint)
            overlong += 1
            continue
        (validation if _held_out(row.question, table.held_out) else train).append(item)
    if not train:
        why = f"of {len(rows)} rows {len(rows) - len(kept)} are evaluated on and {overlong} too long"
        raise RelaxError("cold_start has nothing to learn from", why=why, hint="other data, or larger max_tokens")
    digest = xxhash.xxh3_64()
    for one in (one for item in (*train, *validation) for one in item.sequences):
        digest.update(np.int64(len(one.tokens)).tobytes() + one.tokens.tobytes() + one.mask.tobytes())
    sequences = [one for item in train for one in item.sequences]
    report = SftReport(
        read=len(rows),
        evaluated=len(rows) - len(kept),
        overlong=overlong,
        train=len(train),
        validation=len(validation),
        tokens=sum(len(one.tokens) for one in sequences),
        learnt=sum(int(one.mask.sum()) for one in sequences),
        longest=max(len(one.tokens) for one in sequences),
    )
    return SftData(train, validation, report, digest.hexdigest())


def _rows(
    table: ColdStartTable, config_dir: Path, source: PromptSource
) -> tuple[list[SftRow], list[tuple[int, ...]] | None]:
    """Rows, and the tokens of their prompts where they are those of the run."""
    if table.answers:
        found = [(_answered(item, table.completion), tuple(item.tokens)) for item in source.train]
        return [row for row, _ in found], [tokens for _, tokens in found]
    assert table.path is not None
    path = Path(table.path).expanduser()
    rows, faults = read_sft_rows(path if path.is_absolute() else config_dir / path, table.path, table.kind)
    if faults:
        raise UnusableRows(faults)
    if not rows:
        raise RelaxError(f"cold_start.path = {table.path!r}", why="there is no row in it")
    return rows, None


def _answered(item: PromptItem, template: str) -> SftRow:
    """A prompt of the run with its answer."""
    where = f"prompt {item.question!r:.60}"
    answer = answer_text(item.answer)
    raw = RawItem(question=item.question, answer=answer, metadata={**item.metadata, "answer": answer}, where=where)
    completion = fill_template(template, raw, "cold_start.completion")
    if not completion.strip():
        raise RelaxError("cold_start.completion", why=f"it is empty for {where}", hint="the prompts need answers")
    return SftRow(where=where, question=item.question, messages=item.messages, completion=completion)


def _encoded(
    table: ColdStartTable,
    data: DataTable,
    tokenizer: ChatTokenizer,
    rows: Sequence[SftRow],
    prompts: Sequence[tuple[int, ...]],
) -> list[SftItem]:
    texts: list[ConversationText] = []
    for number, row in enumerate(rows):
        raw = RawItem(question=row.question, answer="", metadata=row.metadata, where=row.where, messages=row.messages)
        messages = conversation(raw, data.template, data.system)
        known = prompts[number] if prompts else ()
        for completion in (row.completion, row.rejected):
            if completion is not None:
                every = table.kind == "sft"
                texts.append(split_conversation(tokenizer, messages, completion, prompt=known, every_turn=every))
    found = encode_texts(tokenizer, texts)
    size = 2 if table.kind == "dpo" else 1
    return [SftItem(tuple(found[at : at + size])) for at in range(0, len(found), size)]


def _held_out(question: str, share: float) -> bool:
    """Whether a question is validated with, by a hash of its own: whether [data] holds it out says nothing about it."""
    digest = hashlib.blake2b(canonical(question).encode(), digest_size=8, person=b"relax-cold").digest()
    return int.from_bytes(digest, "big") < share * 2.0**64


def sft_samples(items: Sequence[SftItem], reference: Sequence[Sequence[Floats]] | None = None) -> list[Sample]:
    """Items as the trainer backend takes them: a group each, the preferred completion of reward 1, the other of 0.

    Args:
        reference: log-probabilities of each item's sequences, float32 [T], for `dpo`.
    """
    samples = []
    for group, item in enumerate(items):
        for member, one in enumerate(item.sequences):
            samples.append(
                Sample(
                    meta=bare_meta(group, member),
                    tokens=one.tokens,
                    loss_mask=one.mask.copy(),
                    behaviour_logprobs=np.zeros(len(one.tokens), np.float32),
                    versions=[],
                    reward=float(member == 0),
                    reference_logprobs=reference[group][member] if reference is not None else None,
                )
            )
    return samples
