"""The sequences of a cold start: read, rendered, without what the run evaluates on, and divided by hash."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from relax_rt.config.schema import RunConfig
from relax_rt.roles.base.sample import Sample, bare_meta
from relax_rt.roles.data.canonical import canonical, in_held_out, item_id
from relax_rt.roles.data.items import PromptItem, RawItem, answer_text
from relax_rt.roles.data.settings import DataTable
from relax_rt.roles.data.source import PromptSource, conversation, fill
from relax_rt.roles.evaluation.settings import EvaluationTable
from relax_rt.roles.models.tokenizer import ChatTokenizer
from relax_rt.roles.training.sft.render import Encoded, Text, encode, lay_out
from relax_rt.roles.training.sft.rows import Row, read, user_texts
from relax_rt.roles.training.sft.settings import ColdStartTable
from relax_rt.transport.rpc.errors import RelaxError

Floats = NDArray[np.float32]
FAULTS_TOLD = 3


class ColdReport(msgspec.Struct, frozen=True):
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


class ColdItem(msgspec.Struct, frozen=True):
    """One row, encoded: a completion, or the one preferred and the one rejected."""

    sequences: tuple[Encoded, ...]

    @property
    def tokens(self) -> int:
        """Tokens of its sequences."""
        return sum(len(one.tokens) for one in self.sequences)


class ColdData(msgspec.Struct, frozen=True):
    """What is learnt from and what is validated with. `digest` is of all of it."""

    train: list[ColdItem]
    validation: list[ColdItem]
    report: ColdReport
    digest: str


class Faults(RelaxError):
    """Rows that cannot be used. `each` has them, one by one."""

    def __init__(self, each: Sequence[RelaxError]) -> None:
        told = "; ".join(f"{one.what}: {one.why}" for one in each[:FAULTS_TOLD])
        more = f"; and {len(each) - FAULTS_TOLD} more" if len(each) > FAULTS_TOLD else ""
        super().__init__("cold_start.path has rows that cannot be used", why=told + more, hint="mend or remove them")
        self.each = list(each)


class Evaluated:
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

    def has(self, row: Row) -> bool:
        """Whether a row's question, or anything that its user says, is among them."""
        if in_held_out(row.question, self._share) or item_id(row.question) in self._ids:
            return True
        return any(item_id(text) in self._ids for text in user_texts(row.messages or []))


def load(config: RunConfig, config_dir: Path, source: PromptSource, tokenizer: ChatTokenizer) -> ColdData:
    """The data of a config's cold start.

    Args:
        source: the run's prompts.

    Raises:
        Faults: rows that cannot be used. RelaxError: no file, or nothing to learn from.
    """
    data = config.table(DataTable)
    from relax_rt.roles.evaluation.sets import load_set

    table, report = config.table(ColdStartTable), {"evaluated": 0, "overlong": 0}
    held_out = list(source.held_out)
    for one in config.table(EvaluationTable).sets:
        held_out += load_set(one, config, source, tokenizer, config_dir)[0]
    rows, prompts = _rows(table, config_dir, source)
    evaluated = Evaluated(held_out, data.held_out)
    kept = [index for index, row in enumerate(rows) if not evaluated.has(row)]
    report["evaluated"] = len(rows) - len(kept)
    chosen = [rows[index] for index in kept]
    items = _encoded(table, data, tokenizer, chosen, [prompts[index] for index in kept] if prompts else [])
    train: list[ColdItem] = []
    validation: list[ColdItem] = []
    for row, item in zip(chosen, items, strict=True):
        longest = max(len(one.tokens) for one in item.sequences)
        if longest > table.max_tokens:
            if table.overlong == "error":
                why = f"it has {longest} tokens, cold_start.max_tokens is {table.max_tokens}"
                hint = 'allow more, or set cold_start.overlong = "drop"'
                raise RelaxError(row.where, why=why, hint=hint)
            report["overlong"] += 1
            continue
        (validation if _to_validate(row.question, table.held_out) else train).append(item)
    if not train:
        why = f"of {len(rows)} rows {report['evaluated']} are evaluated on and {report['overlong']} too long"
        raise RelaxError("cold_start has nothing to learn from", why=why, hint="other data, or larger max_tokens")
    return ColdData(train, validation, _report(len(rows), report, train, validation), _digest([*train, *validation]))


def _rows(
    table: ColdStartTable, config_dir: Path, source: PromptSource
) -> tuple[list[Row], list[tuple[int, ...]] | None]:
    """Rows, and the tokens of their prompts where they are those of the run."""
    if table.answers:
        found = [(_answered(item, table.completion), tuple(item.tokens)) for item in source.train]
        return [row for row, _ in found], [tokens for _, tokens in found]
    assert table.path is not None
    path = Path(table.path).expanduser()
    rows, faults = read(path if path.is_absolute() else config_dir / path, table.path, table.kind)
    if faults:
        raise Faults(faults)
    if not rows:
        raise RelaxError(f"cold_start.path = {table.path!r}", why="there is no row in it")
    return rows, None


def _answered(item: PromptItem, template: str) -> Row:
    """A prompt of the run with its answer."""
    where = f"prompt {item.question!r:.60}"
    answer = answer_text(item.answer)
    raw = RawItem(question=item.question, answer=answer, metadata={**item.metadata, "answer": answer}, where=where)
    completion = fill(template, raw, "cold_start.completion")
    if not completion.strip():
        raise RelaxError("cold_start.completion", why=f"it is empty for {where}", hint="the prompts need answers")
    return Row(where=where, question=item.question, messages=item.messages, completion=completion)


def _encoded(
    table: ColdStartTable,
    data: DataTable,
    tokenizer: ChatTokenizer,
    rows: Sequence[Row],
    prompts: Sequence[tuple[int, ...]],
) -> list[ColdItem]:
    texts: list[Text] = []
    for number, row in enumerate(rows):
        raw = RawItem(question=row.question, answer="", metadata=row.metadata, where=row.where, messages=row.messages)
        messages = conversation(raw, data.template, data.system)
        known = prompts[number] if prompts else ()
        for completion in (row.completion, row.rejected):
            if completion is not None:
                every = table.kind == "sft"
                texts.append(lay_out(tokenizer, messages, completion, prompt=known, every_turn=every))
    found = encode(tokenizer, texts)
    size = 2 if table.kind == "dpo" else 1
    return [ColdItem(tuple(found[at : at + size])) for at in range(0, len(found), size)]


def _to_validate(question: str, share: float) -> bool:
    """Of its own hash: whether [data] holds a question out says nothing about it."""
    digest = hashlib.blake2b(canonical(question).encode(), digest_size=8, person=b"relax-cold").digest()
    return int.from_bytes(digest, "big") < share * 2.0**64


def _report(read_: int, gone: dict[str, int], train: Sequence[ColdItem], validation: Sequence[ColdItem]) -> ColdReport:
    sequences = [one for item in train for one in item.sequences]
    return ColdReport(
        read=read_,
        train=len(train),
        validation=len(validation),
        tokens=sum(len(one.tokens) for one in sequences),
        learnt=sum(int(one.mask.sum()) for one in sequences),
        longest=max(len(one.tokens) for one in sequences),
        **gone,
    )


def _digest(items: Iterable[ColdItem]) -> str:
    digest = xxhash.xxh3_64()
    for item in items:
        for one in item.sequences:
            digest.update(np.int64(len(one.tokens)).tobytes() + one.tokens.tobytes() + one.mask.tobytes())
    return digest.hexdigest()


def samples_of(items: Sequence[ColdItem], reference: Sequence[Sequence[Floats]] | None = None) -> list[Sample]:
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
