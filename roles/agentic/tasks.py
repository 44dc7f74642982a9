"""The tasks of episodes: items of the run's data, or seeds."""

from __future__ import annotations

import hashlib
from pathlib import Path

from relax_rt.config.schema import RunConfig
from relax_rt.roles.agentic.interface import Task
from relax_rt.roles.agentic.settings import EnvSettings
from relax_rt.roles.data.items import PromptItem
from relax_rt.roles.data.settings import DataTable
from relax_rt.roles.data.source import PromptSource
from relax_rt.roles.models.tokenizer import ChatTokenizer

TRAIN, HELD_OUT = "train", "held_out"
SEED_BITS = 31
"""Some random generators that environments seed take no more bits."""


def seed_of(split: str, name: str) -> int:
    """Return the seed of a task: blake2b of split and name, 31 bits. It depends on nothing else, so runs with different
    seeds train and evaluate on the same tasks, and no task is in both splits."""
    digest = hashlib.blake2b(f"{split} {name}".encode(), digest_size=8, person=b"relax-task").digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)


class SeedTasks:
    """Tasks that differ in their seed only; after the last one, the first follows again."""

    def __init__(self, count: int) -> None:
        self.count = count

    def train(self, index: int, item: int | None = None) -> Task:
        """Return the task at `index` of the run's order; item: a data item that a sampler chose instead."""
        return self._task(TRAIN, index, (index if item is None else item) % self.count)

    def held_out(self, count: int) -> list[Task]:
        """Return the first `count` held-out tasks, or as many as there are; the same in every run."""
        return [self._task(HELD_OUT, number, number) for number in range(count)]

    def _task(self, split: str, index: int, number: int) -> Task:
        return Task(index=index, item=f"{split}-{number}", split=split, seed=seed_of(split, str(number)))


class DataTasks:
    """The items of [data], in its order and splits."""

    def __init__(self, source: PromptSource) -> None:
        self._source = source

    def train(self, index: int, item: int | None = None) -> Task:
        """Return the task at `index`."""
        return self._task(index, self._source.prompt(index, item))

    def held_out(self, count: int) -> list[Task]:
        """Return the first held-out tasks."""
        return [self._task(number, item) for number, item in enumerate(self._source.held_out[:count])]

    def _task(self, index: int, item: PromptItem) -> Task:
        return Task(
            index=index,
            item=item.item,
            split=item.split,
            seed=seed_of(item.split, item.item),
            question=item.question,
            answer=item.answer,
            metadata=item.metadata,
            messages=item.messages,
            tools=item.tools or [],
        )


Tasks = SeedTasks | DataTasks
"""The tasks of a run."""


def load_tasks(
    config: RunConfig, settings: EnvSettings, tokenizer: ChatTokenizer, run_dir: Path | None = None
) -> Tasks:
    """Load the tasks of a run: its data, unless the environment creates them from seeds.

    Args:
        run_dir: of a run that has started; its data must not have changed since.

    Raises:
        RelaxError: bad data.
    """
    if settings.tasks is not None:
        return SeedTasks(settings.tasks)
    data, folder = config.table(DataTable), Path(config.config_dir)
    return DataTasks(PromptSource.load(data, tokenizer, seed=config.run.seed, config_dir=folder, run_dir=run_dir))
