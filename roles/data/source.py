"""The prompts of a run: read once, split by hash, in an order that derives from the run's seed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from relax_rt.roles.data.canonical import canonical, in_held_out, item_id
from relax_rt.roles.data.items import Message, PromptItem, RawItem
from relax_rt.roles.data.order import epoch_order, sample_seed
from relax_rt.roles.models.tokenizer import ChatTokenizer
from relax_rt.roles.sections import DataTable
from relax_rt.transport.errors import RelaxError

FIELD = re.compile(r"\{\{|\}\}|\{([A-Za-z_][A-Za-z0-9_]*)\}")
MAX_ITEMS = 10_000_000


class DataReport(msgspec.Struct, frozen=True):
    """What became of the items read: read = train + held_out + duplicates + dropped."""

    read: int
    duplicates: int
    dropped: int
    truncated: int
    train: int
    held_out: int
    longest_tokens: int

    def __str__(self) -> str:
        gone = [f"{n} {what}" for n, what in ((self.duplicates, "duplicates"), (self.dropped, "overlong")) if n]
        cut = f", {self.truncated} cut on the left" if self.truncated else ""
        return (
            f"{self.train} training and {self.held_out} held-out prompts of {self.read} read"
            + (f" ({' and '.join(gone)} left out)" if gone else "")
            + f", at most {self.longest_tokens} tokens{cut}"
        )


class PromptSource:
    """Training prompts by index of the run's order, and the held-out prompts.

    Attributes:
        train, held_out: the items of the splits; held-out items are ordered by id, so that the first n are the same
            in every run on the same data.
        report: counts for people.
    """

    def __init__(
        self, train: list[PromptItem], held_out: list[PromptItem], *, seed: int, shuffle: bool, epochs: int | None
    ) -> None:
        self.train = train
        self.held_out = sorted(held_out, key=lambda item: item.item)
        self.seed, self.shuffle, self.epochs = seed, shuffle, epochs
        self.report = DataReport(len(train) + len(held_out), 0, 0, 0, len(train), len(held_out), 0)
        self._check_splits()
        ids = [item.item for item in train]
        # Prompts in flight may straddle the end of an epoch, so that two orders are wanted by turns.
        self._order = lru_cache(maxsize=2)(lambda epoch: epoch_order(seed, epoch, ids))

    @classmethod
    def load(cls, data: DataTable, tokenizer: ChatTokenizer, *, seed: int, config_dir: Path) -> PromptSource:
        """Read, deduplicate, render and split the prompts of a config.

        Args:
            seed: the run's seed; it decides the order, not which items there are.
            config_dir: folder of roles.toml.

        Raises:
            RelaxError: bad data; with the setting or the file and line.
        """
        raws, duplicates = distinct(read_raw(data, config_dir))
        rendered, dropped, truncated = _render(raws, data, tokenizer)
        train = [item for item in rendered if item.split == "train"]
        held_out = [item for item in rendered if item.split == "held_out"]
        source = cls(train, held_out, seed=seed, shuffle=data.shuffle, epochs=data.epochs)
        longest = max(len(item.tokens) for item in rendered) if rendered else 0
        source.report = DataReport(
            len(raws) + duplicates, duplicates, dropped, truncated, len(train), len(held_out), longest
        )
        return source

    def _check_splits(self) -> None:
        both = {canonical(i.question) for i in self.train} & {canonical(i.question) for i in self.held_out}
        if both:
            raise RelaxError(
                "data", why=f"{len(both)} questions are both trained on and held out, as {sorted(both)[0]!r:.120}"
            )
        for name, items in (("training", self.train), ("held-out", self.held_out)):
            if not items:
                raise RelaxError(
                    "data",
                    why=f"there are no {name} prompts among {len(self.train) + len(self.held_out)}",
                    hint="more items (data.size), another share (data.held_out), or a larger data.max_prompt_tokens",
                )

    @property
    def limit(self) -> int | None:
        """Number of prompts in the run's order; None if it has no end (data.epochs is not set)."""
        return None if self.epochs is None else self.epochs * len(self.train)

    def place(self, index: int) -> int:
        """Place in `train` that the run's order has at `index`; a pure function of data, run seed and index.

        Raises:
            IndexError: past the last epoch.
        """
        if index < 0 or (self.limit is not None and index >= self.limit):
            raise IndexError(f"prompt {index} of {self.limit}")
        epoch, place = divmod(index, len(self.train))
        return self._order(epoch)[place] if self.shuffle else place

    def prompt(self, index: int, item: int | None = None) -> PromptItem:
        """The training prompt at `index` of the run's order.

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
        """Seed of one sample; see `order.sample_seed`."""
        return sample_seed(self.seed, prompt, member, attempt)


def read_prompts(data: DataTable, tokenizer: ChatTokenizer, config_dir: Path) -> list[PromptItem]:
    """Read, deduplicate and render prompts, of whatever split.

    Raises:
        RelaxError: bad data; with the setting or the file and line.
    """
    raws, _ = distinct(read_raw(data, config_dir))
    items, _, _ = _render(raws, data, tokenizer)
    return items


def read_raw(data: DataTable, config_dir: Path) -> Iterable[RawItem]:
    """The rows of the data, as they are.

    Raises:
        RelaxError: bad data; with the setting or the file and line.
    """
    if data.task is not None:
        from relax_rt.roles.data.gym import GymTask

        return GymTask(data.task, data.options, data.size).items()
    if data.path is None:
        raise RelaxError("data", why="neither data.task nor data.path is set")
    from relax_rt.roles.data.files import read_items

    path = Path(data.path).expanduser()
    return read_items(path if path.is_absolute() else config_dir / path, data.path)


def check_data(data: DataTable, config_dir: Path) -> None:
    """Read the first item and put it into the template: what can be checked without a tokenizer.

    Raises:
        RelaxError: bad data; with the setting or the file and line.
    """
    for raw in read_raw(data, config_dir):
        conversation(raw, data.template, data.system)
        return


def distinct(raws: Iterable[RawItem]) -> tuple[list[RawItem], int]:
    """The items with the later ones of equal canonical question left out, and how many those were."""
    kept: dict[str, RawItem] = {}
    read = 0
    for raw in raws:
        read += 1
        if read > MAX_ITEMS:
            raise RelaxError("data", why=f"there are more than {MAX_ITEMS} items", hint="use a smaller file")
        kept.setdefault(canonical(raw.question), raw)
    return list(kept.values()), read - len(kept)


def conversation(raw: RawItem, template: str, system: str | None) -> list[Message]:
    """The messages of a prompt: its own, or one user message made from the template; a system message before it.

    Raises:
        RelaxError: the template names a field that the item does not have.
    """
    messages = raw.messages or [{"role": "user", "content": fill(template, raw)}]
    if system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return messages


def fill(template: str, raw: RawItem, setting: str = "data.template") -> str:
    """The template with {question}, and any {key} of the metadata, put in; {{ and }} are braces.

    Args:
        setting: where the template stands, for errors.
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
        return str(fields[name])

    return FIELD.sub(put, template)


def _render(raws: list[RawItem], data: DataTable, tokenizer: ChatTokenizer) -> tuple[list[PromptItem], int, int]:
    """Items with tokens, how many were dropped as overlong, and how many were cut."""
    conversations = [conversation(raw, data.template, data.system) for raw in raws]
    items, dropped, truncated = [], 0, 0
    for raw, messages, tokens in zip(raws, conversations, tokenizer.render_many(conversations), strict=True):
        if len(tokens) > data.max_prompt_tokens:
            if data.overlong == "error":
                raise RelaxError(
                    f"the prompt of {raw.where}",
                    why=f"it has {len(tokens)} tokens, data.max_prompt_tokens is {data.max_prompt_tokens}",
                    hint='set data.overlong to "drop" or "truncate_left", or allow more tokens',
                )
            if data.overlong == "drop":
                dropped += 1
                continue
            tokens = tokens[-data.max_prompt_tokens :]
            truncated += 1
        held = in_held_out(raw.question, data.held_out)
        items.append(
            PromptItem(
                item=item_id(raw.question),
                split="held_out" if held else "train",
                question=raw.question,
                answer=raw.answer,
                metadata=raw.metadata,
                messages=messages,
                tokens=tokens,
            )
        )
    return items, dropped, truncated
