"""The prompts of a run: read through the index, rendered on use, in an order derived from the run's seed."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, overload

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from relax_rt.roles.data.index import RowIndex, first_row, sources_of
from relax_rt.roles.data.items import PromptItem, RawItem, answer_text
from relax_rt.roles.data.order import SourceMixture, epoch_order, sample_seed, substitute
from relax_rt.roles.data.settings import DataTable
from relax_rt.roles.data.split.canonical import held_out_below
from relax_rt.roles.models.chat_template import Message, content_text
from relax_rt.roles.models.tokenizer import ChatTokenizer
from relax_rt.transport.rpc.errors import RelaxError

FIELD = re.compile(r"\{\{|\}\}|\{([A-Za-z_][A-Za-z0-9_]*)\}")
MEASURED_WHOLE = 50_000
"""Up to this many prompts are all rendered at the start to find overlong ones; rendering takes 0.1 ms per prompt. Of
more prompts a sample is measured, and the other overlong ones are found on use."""
SAMPLE = 2048
TRIES = 64
CACHED = 1024
"""Number of rendered prompts kept in memory."""
RECORD = "data.json"
"""File in the run directory that records the digest of the rows at the start of the run."""


class DataReport(msgspec.Struct, frozen=True):
    """Counts of the rows: read = train + held_out + duplicates + dropped.

    Attributes:
        dropped, truncated: overlong prompts among the `measured` rows.
        longest_tokens: of the longest used prompt; if not all rows are measured, data.max_prompt_tokens.
        forms: rows of each form. notes: remarks for the user, one a line.
    """

    read: int
    duplicates: int
    dropped: int
    truncated: int
    train: int
    held_out: int
    longest_tokens: int
    measured: int = 0
    forms: dict[str, int] = {}
    notes: list[str] = []

    def __str__(self) -> str:
        whole = self.measured >= self.train + self.held_out + self.dropped
        dropped = [(self.dropped, "overlong")] if whole else []
        gone = [f"{n} {what}" for n, what in [(self.duplicates, "duplicates"), *dropped] if n]
        text = f"{self.train} training and {self.held_out} held-out prompts of {self.read} read"
        text += f" ({' and '.join(gone)} left out)" if gone else ""
        text += f", at most {self.longest_tokens} tokens"
        if whole:
            text += f", {self.truncated} cut on the left" if self.truncated else ""
        else:
            text += f"; of {self.measured} that were measured {self.dropped + self.truncated} are overlong"
            text += ", and another prompt takes the place of such a one" if self.dropped else ""
        if set(self.forms) - {"prompt"}:
            text += "; form of the rows: " + ", ".join(f"{form} {count}" for form, count in sorted(self.forms.items()))
        return text


class ItemIds(Sequence[str]):
    """Ids of prompts as text, formatted on access."""

    def __init__(self, values: NDArray[np.uint64]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> list[str]: ...
    def __getitem__(self, at: int | slice) -> str | list[str]:
        if isinstance(at, slice):
            text = self.values[at].astype(">u8").tobytes().hex()
            return [text[start : start + 16] for start in range(0, len(text), 16)]
        return f"{int(self.values[at]):016x}"


class PromptPositions(Mapping[str, int]):
    """Maps the id of a prompt to its place, by binary search."""

    def __init__(self, ids: ItemIds) -> None:
        self._ids, self._order = ids, np.argsort(ids.values, kind="stable")
        self._sorted = ids.values[self._order]

    def __getitem__(self, item: str) -> int:
        try:
            value = np.uint64(int(item, 16))
        except (ValueError, OverflowError):
            raise KeyError(item) from None
        at = int(np.searchsorted(self._sorted, value))
        if at == len(self._sorted) or self._sorted[at] != value:
            raise KeyError(item)
        return int(self._order[at])

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[str]:
        return iter(self._ids)


class PromptRenderer:
    """Renders rows of the index as prompts."""

    def __init__(self, index: RowIndex, data: DataTable, tokenizer: ChatTokenizer) -> None:
        self.index, self._data, self._tokenizer = index, data, tokenizer
        self._shows_tools = False
        self.row = lru_cache(maxsize=CACHED)(self._render)

    def _render(self, row: int, split: str) -> PromptItem | None:
        with self.index.source(row).named_in_errors():
            raw = self.index.raw(row)
            messages = conversation(raw, self._data.template, self._data.system)
            fitted = self._fit(raw, messages, self._tokenizer.encode(self._text(raw, messages)))
        if fitted is None:
            return None
        messages, tokens = fitted
        return PromptItem(
            item=f"{int(self.index.rows['item'][row]):016x}",
            split=split,
            question=raw.question,
            answer=raw.answer,
            metadata=raw.metadata,
            messages=messages,
            tokens=tokens,
            tools=raw.tools,
        )

    def _text(self, raw: RawItem, messages: list[Message]) -> str:
        text = self._tokenizer.text(messages, raw.tools or ())
        if raw.tools and not self._shows_tools:
            if text == self._tokenizer.text(messages):
                why = f"the chat template of {self._tokenizer.folder} does not show them"
                hint = 'a template that does, or go without: data.ignore = ["tools"]'
                raise RelaxError(f"the tools of {raw.where}", why=why, hint=hint)
            self._shows_tools = True
        return text

    def _fit(self, raw: RawItem, messages: list[Message], tokens: list[int]) -> tuple[list[Message], list[int]] | None:
        """Apply data.overlong to a prompt; None: it is dropped, or cannot be shortened."""
        most = self._data.max_prompt_tokens
        if len(tokens) <= most:
            return messages, tokens
        if self._data.overlong == "error":
            raise RelaxError(
                f"the prompt of {raw.where}",
                why=f"it has {len(tokens)} tokens, data.max_prompt_tokens is {most}",
                hint='set data.overlong to "drop" or "truncate_left", or allow more tokens',
            )
        if self._data.overlong == "drop":
            return None
        return truncate_conversation(messages, lambda kept: self._tokenizer.render(kept, raw.tools or ()), most)

    def lengths(self, rows: NDArray[np.uint32]) -> NDArray[np.int32]:
        """Return token counts of the rows' prompts before truncation; cached next to the index if they cover all
        rows."""
        path = None
        if self.index.folder is not None and len(rows) == len(self.index):
            digests = self._tokenizer.tokenizer_digest, self._tokenizer.template_digest
            parts = (self._data.template, self._data.system, *digests)
            path = self.index.folder / f"lengths-{xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(parts))}.npy"
        if path is not None and path.is_file():
            with suppress(OSError, ValueError):
                found: NDArray[np.int32] = np.load(path)
                if len(found) == len(rows):
                    return found
        lengths = np.empty(len(rows), np.int32)
        for start in range(0, len(rows), CACHED):
            texts = []
            for row in rows[start : start + CACHED]:
                with self.index.source(int(row)).named_in_errors():
                    raw = self.index.raw(int(row))
                    texts.append(self._text(raw, conversation(raw, self._data.template, self._data.system)))
            lengths[start : start + CACHED] = [len(tokens) for tokens in self._tokenizer.encode_many(texts)]
        if path is not None:
            with suppress(OSError):
                temporary = path.with_name(f".{path.name}.{os.getpid()}.npy")
                np.save(temporary, lengths)
                temporary.replace(path)
        return lengths

    def check(self, row: int, length: int) -> None:
        """Raise for an overlong prompt if data.overlong = "error"."""
        if self._data.overlong == "error" and length > self._data.max_prompt_tokens:
            self.row(row, "train")


class PromptItems(Sequence[PromptItem]):
    """Prompts by place, rendered on access.

    Args:
        rows: row of the index for each place.

    Attributes:
        ids: of the prompts.
    """

    def __init__(self, renderer: PromptRenderer, rows: NDArray[np.uint32], split: str) -> None:
        self._renderer, self._rows, self._split = renderer, rows, split
        self.ids = ItemIds(renderer.index.rows["item"][rows])

    @property
    def questions(self) -> NDArray[np.uint64]:
        """Hashes of the canonical questions."""
        found: NDArray[np.uint64] = self._renderer.index.rows["question"][self._rows]
        return found

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, at: int) -> PromptItem: ...
    @overload
    def __getitem__(self, at: slice) -> list[PromptItem]: ...
    def __getitem__(self, at: int | slice) -> PromptItem | list[PromptItem]:
        if isinstance(at, slice):
            return [self[place] for place in range(*at.indices(len(self)))]
        place = range(len(self))[at]
        item = int(self.ids.values[place])
        for attempt in range(TRIES):
            # An overlong prompt of data too large to measure is replaced by another one, the same in every role.
            found = self._renderer.row(int(self._rows[place]), self._split)
            if found is not None:
                return found
            place = substitute(item, attempt, len(self))
        hint = "allow more tokens (data.max_prompt_tokens)"
        raise RelaxError("data", why=f"{TRIES} prompts in a row have more tokens than are allowed", hint=hint)

    def __iter__(self) -> Iterator[PromptItem]:
        return (self[place] for place in range(len(self)))


class EvaluationItems(Sequence[PromptItem]):
    """Evaluation prompts ordered by id, so that the first n are the same in every run on the same data.

    Overlong prompts of data too large to measure are skipped on access: there may be fewer than the length says.
    """

    def __init__(self, renderer: PromptRenderer, rows: NDArray[np.uint32], split: str) -> None:
        order = np.argsort(renderer.index.rows["item"][rows], kind="stable")
        self._renderer, self._rows, self._split = renderer, rows[order], split
        self._usable: list[int] = []
        self._scanned = 0

    def __len__(self) -> int:
        return len(self._rows) - (self._scanned - len(self._usable))

    @overload
    def __getitem__(self, at: int) -> PromptItem: ...
    @overload
    def __getitem__(self, at: slice) -> list[PromptItem]: ...
    def __getitem__(self, at: int | slice) -> PromptItem | list[PromptItem]:
        if isinstance(at, slice):
            places = range(*at.indices(len(self)))
            self._scan(max(places, default=-1) + 1)
            return [self[place] for place in places if place < len(self)]
        place = at if at < 0 else range(len(self))[at]
        self._scan(len(self._rows) if place < 0 else place + 1)
        found = self._renderer.row(int(self._rows[self._usable[place]]), self._split)
        assert found is not None
        return found

    def _scan(self, count: int) -> None:
        """Find the first `count` prompts that are not overlong."""
        while len(self._usable) < count and self._scanned < len(self._rows):
            if self._renderer.row(int(self._rows[self._scanned]), self._split) is not None:
                self._usable.append(self._scanned)
            self._scanned += 1

    def __iter__(self) -> Iterator[PromptItem]:
        place = 0
        while True:
            self._scan(place + 1)
            if place >= len(self._usable):
                return
            yield self[place]
            place += 1


class PromptSource:
    """Training prompts by index of the run's order, and the held-out prompts.

    Args:
        sources: the source of each training prompt, and the weights of the sources; None: one order over all prompts.

    Attributes:
        train, held_out: the prompts of the splits.
        report: counts for the user. digest: hash of the rows.
    """

    def __init__(
        self,
        train: PromptItems,
        held_out: EvaluationItems,
        *,
        seed: int,
        shuffle: bool,
        epochs: int | None,
        sources: tuple[NDArray[np.uint32], Sequence[float]] | None = None,
        report: DataReport | None = None,
        digest: str = "",
    ) -> None:
        self.train, self.held_out, self.digest = train, held_out, digest
        self.seed, self.shuffle, self.epochs = seed, shuffle, epochs
        self.report = report or DataReport(len(train) + len(held_out), 0, 0, 0, len(train), len(held_out), 0)
        for name, items in (("training", train), ("held-out", held_out)):
            if not len(items):
                raise RelaxError(
                    "data",
                    why=f"there are no {name} prompts among {len(train) + len(held_out)}",
                    hint="more items (data.size), another share (data.held_out), or a larger data.max_prompt_tokens",
                )
        self._mixture, self._parts = None, [np.arange(len(train), dtype=np.uint32)]
        if sources is not None:
            of, weights = sources
            self._mixture = SourceMixture(seed, weights)
            self._parts = [np.flatnonzero(of == number).astype(np.uint32) for number in range(len(weights))]
            for number, part in enumerate(self._parts):
                if not len(part):
                    raise RelaxError(f"data.sources[{number}]", why="none of its rows is a training prompt")
        # Prompts in flight may straddle the end of an epoch: two orders of a source are then used alternately.
        self._order = lru_cache(maxsize=2 * len(self._parts))(self._epoch_order)

    @classmethod
    def load(
        cls, data: DataTable, tokenizer: ChatTokenizer, *, seed: int, config_dir: Path, run_dir: Path | None = None
    ) -> PromptSource:
        """Index, deduplicate and split the prompts of a config. The index is kept in the cache folder.

        Args:
            seed: the run's seed; it decides the order, not which items there are.
            config_dir: folder of roles.toml.
            run_dir: run directory; the first call records the digest of the rows, later calls compare it.

        Raises:
            RelaxError: bad data, with the setting or the file and line; or the data changed since the run was started.
        """
        index = RowIndex.open(data, config_dir)
        if run_dir is not None:
            check_unchanged(run_dir, index)
        renderer = PromptRenderer(index, data, tokenizer)
        rows, report = measure_prompts(renderer, data)
        held = index.rows["question"][rows] < held_out_below(data.held_out)
        train = PromptItems(renderer, rows[~held], "train")
        held_out = EvaluationItems(renderer, rows[held], "held_out")
        weights = [one.weight for one in sources_of(data, config_dir) if one.weight is not None]
        return cls(
            train,
            held_out,
            seed=seed,
            shuffle=data.shuffle,
            epochs=data.epochs,
            sources=(index.rows["source"][rows[~held]], weights) if weights else None,
            report=msgspec.structs.replace(report, train=len(train), held_out=len(held_out)),
            digest=index.contents.digest,
        )

    def _epoch_order(self, source: int, epoch: int) -> NDArray[np.uint32]:
        part = self._parts[source]
        return part[epoch_order(self.seed, epoch, ItemIds(self.train.ids.values[part]))]

    @property
    def limit(self) -> int | None:
        """Number of prompts in the run's order; None if it has no end (data.epochs is not set)."""
        return None if self.epochs is None else self.epochs * len(self.train)

    def place(self, index: int) -> int:
        """Return place in `train` that the run's order has at `index`; a pure function of data, run seed and index.

        Raises:
            IndexError: past the last epoch.
        """
        if index < 0 or (self.limit is not None and index >= self.limit):
            raise IndexError(f"prompt {index} of {self.limit}")
        source, number = (0, index) if self._mixture is None else self._mixture.place(index)
        epoch, at = divmod(number, len(self._parts[source]))
        return int(self._order(source, epoch)[at] if self.shuffle else self._parts[source][at])

    def prompt(self, index: int, item: int | None = None) -> PromptItem:
        """Return the training prompt at `index` of the run's order.

        Args:
            item: place in `train` that a sampler chose for the index, which is then the order's no more.

        Raises:
            IndexError: past the last epoch, or there is no such place: the data changed since it was chosen.
        """
        place = self.place(index) if item is None else item
        if not 0 <= place < len(self.train):
            raise IndexError(f"prompt {index} was chosen to be item {item}, there are {len(self.train)}")
        return self.train[place]

    def sample_seed(self, prompt: int, member: int, attempt: int) -> int:
        """Return seed of one sample; see `order.sample_seed`."""
        return sample_seed(self.seed, prompt, member, attempt)


def measure_prompts(renderer: PromptRenderer, data: DataTable) -> tuple[NDArray[np.uint32], DataReport]:
    """Return the usable rows, and a report on their lengths without the counts of train and held_out."""
    index, most = renderer.index, data.max_prompt_tokens
    rows = np.arange(len(index), dtype=np.uint32)
    whole = len(rows) <= MEASURED_WHOLE
    sampled = rows if whole else np.linspace(0, len(rows) - 1, SAMPLE).astype(np.uint32)
    lengths = renderer.lengths(sampled)
    overlong = lengths > most
    for row in sampled[overlong][:1]:
        renderer.check(int(row), most + 1)
    # With truncation, an overlong prompt without a part that may be shortened is still dropped.
    fits = data.overlong != "drop"
    pairs = zip(sampled, overlong, strict=True)
    dropped = np.array([one and not (fits and renderer.row(int(row), "train")) for row, one in pairs], bool)
    if whole:
        rows = rows[~dropped]
    longest = int(np.minimum(lengths, most)[~dropped].max(initial=0)) if whole else most
    contents = index.contents
    return rows, DataReport(
        read=contents.read,
        duplicates=contents.duplicates,
        dropped=int(dropped.sum()),
        truncated=int((overlong & ~dropped).sum()),
        train=0,
        held_out=0,
        longest_tokens=longest,
        measured=len(sampled),
        forms=contents.forms if data.task is None else {},
        notes=contents.notes,
    )


def check_unchanged(run_dir: Path, index: RowIndex) -> None:
    """Record the digest of the rows in the run directory, or compare it with the recorded one.

    Raises:
        RelaxError: the rows changed, so the resumed run would train on other prompts.
    """
    path, contents = run_dir / RECORD, index.contents
    now = {"digest": contents.digest, "rows": len(index), "files": [shard.path for shard in contents.shards]}
    try:
        known = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        with suppress(OSError):
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            temporary.write_bytes(msgspec.json.format(msgspec.json.encode(now)))
            temporary.replace(path)
        return
    if known.get("digest") != contents.digest:
        raise RelaxError(
            "data",
            why=f"its rows are not those that the run was started with: {known.get('rows')} then, {len(index)} now",
            hint=f"put the files back or start a new run; to resume with the new rows, remove {path}",
        )


def read_prompts(
    data: DataTable, tokenizer: ChatTokenizer, config_dir: Path, *, split: str, without: NDArray[np.uint64]
) -> tuple[EvaluationItems, int]:
    """Return the prompts of a further evaluation set, ordered by id, and how many were left out.

    Args:
        without: hashes of canonical questions whose prompts are left out.

    Raises:
        RelaxError: bad data; with the setting or the file and line.
    """
    renderer = PromptRenderer(RowIndex.open(data, config_dir), data, tokenizer)
    rows, _ = measure_prompts(renderer, data)
    out = np.isin(renderer.index.rows["question"][rows], without)
    return EvaluationItems(renderer, rows[~out], split), int(out.sum())


def check_data(data: DataTable, config_dir: Path) -> None:
    """Read the first item and put it into the template: what can be checked without a tokenizer.

    Raises:
        RelaxError: bad data; with the setting or the file and line.
    """
    conversation(first_row(data, config_dir), data.template, data.system)


def conversation(raw: RawItem, template: str, system: str | None) -> list[Message]:
    """Return the messages of a prompt: its own, or one user message made from the template; a system message before it.

    Raises:
        RelaxError: the template names a field that the item does not have.
    """
    messages = raw.messages or [{"role": "user", "content": fill_template(template, raw)}]
    system = system if raw.system is None else raw.system
    if system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return messages


def fill_template(template: str, raw: RawItem, setting: str = "data.template") -> str:
    """Return the template with {question}, and any {key} of the metadata, put in; {{ and }} are braces.

    Args:
        setting: the key of the template, for errors.
    """
    fields: dict[str, Any] = {**raw.metadata, "question": raw.question}

    def put(match: re.Match[str]) -> str:
        name = match.group(1)
        if name is None:
            return match.group()[0]
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=1)
            hint = f"did you mean {{{close[0]}}}?" if close else "a brace itself is written {{ or }}"
            raise RelaxError(
                f"{setting} names {{{name}}}", why=f"{raw.where} has {', '.join(sorted(fields))}", hint=hint
            )
        value = fields[name]
        return answer_text(value) if isinstance(value, float) else str(value)

    return FIELD.sub(put, template)


HEAD = ("system", "developer")


def truncate_conversation(
    messages: Sequence[Message], render: Callable[[list[Message]], list[int]], most: int
) -> tuple[list[Message], list[int]] | None:
    """Shorten a conversation to at most `most` tokens.

    Drops the oldest exchanges, then if necessary the beginning of the last user message. An exchange is a user message
    with everything up to the next one. System messages at the beginning stay.

    Args:
        render: token ids of a conversation, the opening of the assistant's turn included.

    Returns:
        The messages and their tokens; None if what has to stay is too long already, or the text to be shortened is
        none (images).
    """
    first = next((at for at, one in enumerate(messages) if one["role"] not in HEAD), len(messages))
    head, rest = list(messages[:first]), list(messages[first:])
    asked = [at for at, one in enumerate(rest) if one["role"] == "user"]
    for begin in asked:
        if not begin:
            continue
        kept = [*head, *rest[begin:]]
        tokens = render(kept)
        if len(tokens) <= most:
            return kept, tokens
    last = rest[asked[-1] :] if asked else []
    text = content_text(last[0].get("content")) if last else ""
    if not isinstance(text, str) or not text:
        return None
    # Binary search for the fewest characters to remove. A cut inside a token may add one token, so the count is not
    # strictly monotonic; the result is only taken from cuts that were rendered and fit.
    low, high, found = 1, len(text) - 1, None
    while low <= high:
        middle = (low + high) // 2
        kept = [*head, {**last[0], "content": text[middle:]}, *last[1:]]
        tokens = render(kept)
        if len(tokens) <= most:
            found, high = (kept, tokens), middle - 1
        else:
            low = middle + 1
    return found
