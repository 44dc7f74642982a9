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


class SetSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How one set is evaluated; unset keys are filled in from the run's tables.

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
        """Return the number of items of an evaluation."""
        return self.during_items if when == "during" else self.items


def set_specs(config: RunConfig) -> list[SetSpec]:
    """Return the held-out sets of a run; that of [data] is the first."""
    table = config.table(EvaluationTable)
    main = SetSpec(
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


def _further(one: EvaluationSet, main: SetSpec) -> SetSpec:
    return SetSpec(
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
    """Return where a set's prompts come from, as a table of [data]."""
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
    """Return the items of a set, ordered by id, and how many were left out because the run trains on their questions.

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


class EvaluationSchedule:
    """When a set is due for evaluation, and which steps are covered. Pure.

    Args:
        last_step: of the run. cold_start: whether the run has one, whose weights are evaluated as well.
    """

    def __init__(self, spec: SetSpec, last_step: int, *, cold_start: bool = False) -> None:
        self.spec, self._last_step, self._cold_start = spec, last_step, cold_start
        self.done = -1
        self.before: dict[str, Any] | None = None
        self._recorded: list[tuple[int, int]] = []
        self._path: Collection[int] | None = None

    def when(self, step: int, version: int = ROOT) -> str:
        """Return before, cold_start (after it), during or after; empty: it is not due at these weights."""
        if self.before is None and step == 0:
            return "before"
        if self._cold_start and step == 0 and version != ROOT:
            return AFTER_COLD_START
        if step <= self.done:
            return ""
        if step >= self._last_step:
            return "after"
        return "during" if self.due_steps(step) else ""

    def due_steps(self, step: int) -> list[int]:
        """Return the chosen steps that an evaluation of this step's weights covers: those up to it that have none yet.

        Only the newest version can be fetched: a step whose weights were replaced during another evaluation is covered
        by later weights, at the latest by those of the last step.
        """
        last, every = max(self.done, 0), self.spec.every_steps
        regular = range(every * (last // every + 1), step + 1, every) if every else ()
        return sorted({*regular, *(at for at in self.spec.at_steps if last < at <= step)})

    def keep_path(self, path: Collection[int]) -> None:
        """Count only what was evaluated on this path of versions: the trainer may have rolled back to a checkpoint, and
        evaluations after it belong to another branch."""
        self._path = path
        self._count()

    def _count(self) -> None:
        counted = (step for step, version in self._recorded if self._path is None or version in self._path)
        self.done = max(counted, default=-1)

    def record(self, evaluation: dict[str, Any]) -> None:
        """Count an evaluation of this set, by this incarnation or an earlier one."""
        self._recorded.append((int(evaluation["step"]), int(evaluation.get("version", ROOT))))
        self._count()
        if evaluation["when"] == "before":
            self.before = evaluation
        elif evaluation["when"] == AFTER_COLD_START:
            self._cold_start = False


def schedules(config: RunConfig, records: Iterable[dict[str, Any]]) -> dict[str, EvaluationSchedule]:
    """Return the schedule of each set by name, with the recorded evaluations counted."""
    steps, cold = config.table(AlgorithmTable).steps, config.table(ColdStartTable).wanted
    found = {spec.name: EvaluationSchedule(spec, steps, cold_start=cold) for spec in set_specs(config)}
    for record in records:
        schedule = found.get(record.get("set", MAIN))
        if schedule is not None:
            schedule.record(record)
    return found


class VersionLineage:
    """The versions that led to the current weights: a trainer that rolls back to a checkpoint starts a new branch.

    For roles that see only the newest committed version: the first version of a branch may have been missed.
    """

    def __init__(self, ctx: RoleContext) -> None:
        self._ctx = ctx
        self._parents = {ROOT: ROOT}

    async def path_to(self, record: VersionRecord) -> set[int]:
        """Return the versions that led to this one, itself and ROOT among them.

        A registry that is away is waited for, visibly, until the role is asked to stop.
        """
        while record.parent not in self._parents and not self._ctx.stopping.is_set():
            try:
                self._parents.update({one.version: one.parent for one in await self._ctx.registry.versions()})
                break
            except (Unreachable, DeadlineExceeded) as error:
                self._ctx.progress.waiting(f"the registry: {error}")
                await asyncio.sleep(RETRY_S)
        self._parents[record.version] = record.parent
        found, version = {ROOT}, record.version
        while version not in found and version in self._parents:
            found.add(version)
            version = self._parents[version]
        return found
