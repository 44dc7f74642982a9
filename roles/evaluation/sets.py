"""The held-out sets of a run: what each is, of which items, and at which steps it is evaluated."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from relax_rt.config.schema import RunConfig
from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.data.items import PromptItem
from relax_rt.roles.data.settings import DataTable
from relax_rt.roles.data.source import PromptSource, read_prompts
from relax_rt.roles.evaluation.settings import EvaluationSet, EvaluationTable
from relax_rt.roles.models.tokenizer import ChatTokenizer
from relax_rt.roles.rollout.engines.settings import SamplingTable
from relax_rt.roles.training.algorithms.settings import AlgorithmTable, ColdStartTable
from relax_rt.transport.base.versions import ROOT, VersionRecord
from relax_rt.transport.rpc.errors import DeadlineExceeded, RelaxError, Unreachable

MAIN = "held_out"
"""The name of the items that [data] holds out."""
AFTER_COLD_START = "cold_start"
"""When an evaluation is of the weights between cold start and RL."""
RETRY_S = 0.5


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How one set is evaluated; what it leaves out is filled in from the run's tables.

    Attributes:
        table: of roles.toml; None for the items that [data] holds out.
        items, during_items: used before and after, and during the run.
        ks: the k of pass@k. greedy: one completion at temperature 0 besides `samples` at `temperature`.
        every_steps, at_steps: when during the run.
    """

    name: str
    table: EvaluationSet | None
    items: int
    during_items: int
    samples: int
    ks: tuple[int, ...]
    greedy: bool
    temperature: float
    max_new_tokens: int
    every_steps: int
    at_steps: tuple[int, ...]

    def count(self, when: str) -> int:
        """Items of an evaluation."""
        return self.during_items if when == "during" else self.items


def recipes(config: RunConfig) -> list[Recipe]:
    """The held-out sets of a run; that of [data] is the first."""
    table = config.table(EvaluationTable)
    main = Recipe(
        name=MAIN,
        table=None,
        items=table.items,
        during_items=table.during_items,
        samples=table.samples,
        ks=_ks(table),
        greedy=table.greedy,
        temperature=table.temperature,
        max_new_tokens=config.table(SamplingTable).max_new_tokens,
        every_steps=table.every_steps,
        at_steps=tuple(table.at_steps),
    )
    return [main, *(_further(one, main) for one in table.sets)]


def _further(one: EvaluationSet, main: Recipe) -> Recipe:
    return Recipe(
        name=one.name,
        table=one,
        items=one.items,
        during_items=one.during_items or one.items,
        samples=one.samples,
        ks=_ks(one),
        greedy=one.greedy,
        temperature=main.temperature if one.temperature is None else one.temperature,
        max_new_tokens=one.max_new_tokens or main.max_new_tokens,
        every_steps=main.every_steps if one.every_steps is None else one.every_steps,
        at_steps=tuple(one.at_steps),
    )


def _ks(table: EvaluationTable | EvaluationSet) -> tuple[int, ...]:
    return tuple(sorted(set(table.pass_at or (1, table.samples))))


def set_data(table: EvaluationSet, data: DataTable) -> DataTable:
    """Where a set's prompts come from, as a table of [data]."""
    return data.model_copy(
        update={
            "task": table.task,
            "options": table.options,
            "size": table.size,
            "path": table.path,
            "sources": [],
            "columns": data.columns if table.columns is None else table.columns,
            "form": table.form,
            "split": table.split or "",
            "system": data.system if table.system is None else table.system,
            "template": data.template if table.template is None else table.template,
            "max_prompt_tokens": table.max_prompt_tokens or data.max_prompt_tokens,
            "overlong": "drop",
        }
    )


def load_set(
    table: EvaluationSet, config: RunConfig, source: PromptSource, tokenizer: ChatTokenizer, config_dir: Path
) -> tuple[Sequence[PromptItem], int]:
    """The items of a set, ordered by id, and how many were left out because the run trains on their questions.

    Raises:
        RelaxError: bad data, or no item is left.
    """

    data = set_data(table, config.table(DataTable))
    kept, left_out = read_prompts(data, tokenizer, config_dir, split=MAIN, without=source.train.questions)
    if not len(kept):
        why = f"none of its {left_out} prompts is left"
        why += f": {left_out} are trained on" if left_out else ""
        raise RelaxError(f"evaluation set '{table.name}'", why=why, hint="give it other items, or larger limits")
    return kept, left_out


class Course:
    """How far one set has been evaluated, and when it is due again. Pure.

    Args:
        last_step: of the run. cold_start: whether the run has one, whose weights are evaluated as well.
    """

    def __init__(self, recipe: Recipe, last_step: int, *, cold_start: bool = False) -> None:
        self.recipe, self._last_step, self._cold_start = recipe, last_step, cold_start
        self.done = -1
        self.before: dict[str, Any] | None = None
        self._taken: list[tuple[int, int]] = []
        self._path: Collection[int] | None = None

    def when(self, step: int, version: int = ROOT) -> str:
        """before, cold_start (after it), during or after; empty: it is not due at this step's weights."""
        if self.before is None and step == 0:
            return "before"
        if self._cold_start and step == 0 and version != ROOT:
            return AFTER_COLD_START
        if step <= self.done:
            return ""
        if step >= self._last_step:
            return "after"
        return "during" if self.asked(step) else ""

    def asked(self, step: int) -> list[int]:
        """The chosen steps that an evaluation of this step's weights is for: those up to it that have none yet.

        Only the newest version can be had, so that weights that came and went during another evaluation are made up
        for by later ones; by those of the last step, if need be.
        """
        last, every = max(self.done, 0), self.recipe.every_steps
        regular = range(every * (last // every + 1), step + 1, every) if every else ()
        return sorted({*regular, *(at for at in self.recipe.at_steps if last < at <= step)})

    def along(self, path: Collection[int]) -> None:
        """Count only what was evaluated on this path of versions: the trainer may have gone back to a checkpoint, and
        what came after it is of another branch."""
        self._path = path
        self._count()

    def _count(self) -> None:
        counted = (step for step, version in self._taken if self._path is None or version in self._path)
        self.done = max(counted, default=-1)

    def take(self, record: dict[str, Any]) -> None:
        """A record of an evaluation of this set, of this incarnation or an earlier one."""
        self._taken.append((int(record["step"]), int(record.get("version", ROOT))))
        self._count()
        if record["when"] == "before":
            self.before = record
        elif record["when"] == AFTER_COLD_START:
            self._cold_start = False


def courses(config: RunConfig, records: Iterable[dict[str, Any]]) -> dict[str, Course]:
    """Every set's course, by name, as far as `records` of evaluations say it has come."""
    steps, cold = config.table(AlgorithmTable).steps, config.table(ColdStartTable).wanted
    found = {recipe.name: Course(recipe, steps, cold_start=cold) for recipe in recipes(config)}
    for record in records:
        course = found.get(record.get("set", MAIN))
        if course is not None:
            course.take(record)
    return found


class Lineage:
    """The versions that led to another, as far as they were told. Pure."""

    def __init__(self) -> None:
        self._parents = {ROOT: ROOT}

    def __contains__(self, version: int) -> bool:
        return version in self._parents

    def learn(self, records: Iterable[VersionRecord]) -> None:
        """These versions were committed."""
        self._parents.update((record.version, record.parent) for record in records)

    def path(self, version: int) -> set[int]:
        """The version, all that it was made from, and ROOT."""
        found = {ROOT}
        while version not in found and version in self._parents:
            found.add(version)
            version = self._parents[version]
        return found


class Branch:
    """Follows the committed versions for who sees only the newest: the one that began a branch may be missed."""

    def __init__(self, ctx: RoleContext) -> None:
        self._ctx, self._lineage = ctx, Lineage()

    async def to(self, record: VersionRecord) -> set[int]:
        """The versions that led to this one, itself among them, and ROOT.

        A registry that is away is waited for, visibly, until the role is asked to stop.
        """
        while record.parent not in self._lineage and not self._ctx.stopping.is_set():
            try:
                self._lineage.learn(await self._ctx.registry.versions())
                break
            except (Unreachable, DeadlineExceeded) as error:
                self._ctx.progress.waiting(f"the registry: {error}")
                await asyncio.sleep(RETRY_S)
        self._lineage.learn([record])
        return self._lineage.path(record.version)
