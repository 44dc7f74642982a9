"""The trainer's part of a cold start: its steps, its checkpoints, and the way from them to RL."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from relax_rt.config.schema import RunConfig
from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.data.order import epoch_order
from relax_rt.roles.data.settings import DataTable
from relax_rt.roles.data.source import PromptSource
from relax_rt.roles.models.tokenizer import load_tokenizer
from relax_rt.roles.rollout.engines.settings import SamplingTable
from relax_rt.roles.training.algorithms.settings import AlgorithmTable, ColdStartTable
from relax_rt.roles.training.checkpoints.cold_start import (
    KEEP,
    ColdStartProgress,
    cold_start_folder,
    cold_start_weights,
    read_progress,
    read_reference_logprobs,
    write_progress,
    write_reference_logprobs,
)
from relax_rt.roles.training.checkpoints.store import CheckpointState, CheckpointStore, read_state
from relax_rt.roles.training.sft.data import Floats, SftData, SftItem, load_sft_data, sft_samples
from relax_rt.transport.rpc.errors import Corrupt, GivenUp, Refused, RelaxError

if TYPE_CHECKING:
    from relax_rt.roles.base.sample import Sample
    from relax_rt.roles.training.algorithms.objective import Objective
    from relax_rt.roles.training.backend.interface import StepResult, TrainerBackend
    from relax_rt.roles.training.checkpoints.digests import ModelIdentity


READ_ALLOWANCE_S = 600.0
SAVE_ALLOWANCE_S = 120.0
SKIPPED_IN_A_ROW = 5
"""Consecutive skipped steps before the run ends, as in RL."""
LOGPROB_ROWS = 64
"""Rows whose log-probabilities are computed together; between them a request to stop is seen."""


class PhaseInterrupted(Exception):
    """The role was asked to stop within a computation that is done anew when it comes back."""


class ColdStartPhase:
    """Trains the policy before its first RL step.

    It counts steps of its own and has checkpoints of its own, in the run's folder `cold_start`: nothing of it touches
    the queue's ledger or the numbers of RL's steps. After a death the trainer resumes from the newest of them; once the
    last one is there, which says that the phase is done, it never runs again.

    Args:
        backend: with the model's own weights. model: what these are, for the checkpoints.
    """

    def __init__(
        self, ctx: RoleContext, config: RunConfig, backend: TrainerBackend, model: ModelIdentity | None = None
    ) -> None:
        self._ctx, self._config, self._backend, self._table = ctx, config, backend, config.table(ColdStartTable)
        self._store = CheckpointStore(cold_start_folder(ctx.run_dir), ctx.who.epoch, KEEP, model)
        self._objective: Objective
        self._data: SftData
        self._steps: int
        self._reference: dict[int, list[Floats]] = {}
        self._saving: asyncio.Task[None] | None = None
        self._in_a_row = 0

    async def run(self) -> bool:
        """All steps that are left. False: the role was asked to stop before the last one."""
        if cold_start_weights(self._ctx.run_dir) is not None:
            return True
        # What follows takes as long as training does: the time for a start is for a start.
        await self._ctx.ready()
        try:
            return await self._train()
        except PhaseInterrupted:
            return False
        finally:
            if self._saving is not None:
                await asyncio.gather(self._saving, return_exceptions=True)

    async def adopt(self, objective: Objective) -> None:
        """RL begins: the weights after the phase, this objective, an optimizer without moments.

        Raises:
            BadInput: the phase was done with another model. RelaxError: its last checkpoint cannot be read, or is not
                what was written.
        """
        from safetensors import SafetensorError

        folder = cold_start_weights(self._ctx.run_dir)
        assert folder is not None
        try:
            await asyncio.to_thread(self._taken_up, folder)
        except (SafetensorError, OSError, Refused, Corrupt) as error:
            hint = f"remove {folder.parent} and start again: the cold start is done anew"
            raise RelaxError(f"the weights after the cold start in {folder}", why=str(error), hint=hint) from error
        temperature = self._config.table(SamplingTable).temperature
        await asyncio.to_thread(
            self._backend.use, objective, self._config.table(AlgorithmTable), temperature=temperature
        )
        self._ctx.event("cold_start_adopted", checkpoint=folder.name)

    def _taken_up(self, folder: Path) -> None:
        from relax_rt.roles.training.checkpoints.resume import verify_files

        state = read_state(folder)
        self._store.check(folder, state)
        verify_files(self._ctx, self._store, folder, state, f"{self._store.folder.name}/")
        self._backend.restore(folder)

    async def _train(self) -> bool:
        ctx, table = self._ctx, self._table
        ctx.progress.extend(READ_ALLOWANCE_S, "cold start: reading its data")
        await asyncio.to_thread(self._prepare)
        if table.kind == "dpo":
            # Log-probabilities of the weights before the phase, computed once, for every row.
            folder, items = cold_start_folder(ctx.run_dir), [*self._data.train, *self._data.validation]
            values = await asyncio.to_thread(read_reference_logprobs, folder, self._data.digest)
            if values is None:
                # A process begins with the model's own weights, whichever checkpoint it resumes from next.
                what = "cold start: log-probabilities of the reference"
                values = await self._log_probabilities(sft_samples(items), what)
                await asyncio.to_thread(write_reference_logprobs, folder, values, self._data.digest)
            self._reference = dict(enumerate(values))
        mark = await self._resume()
        if mark.step == 0:
            self._record(mark, {"validation_loss": await self._validate()})
        began = time.monotonic() - mark.elapsed_s
        batches = step_batches(table, [item.tokens for item in self._data.train], self._config.run.seed)
        for rows in islice(batches, mark.step, mark.total):
            if ctx.stopping.is_set():
                await self._save(mark)
                return False
            mark, about = await self._step(mark, rows, began)
            last, every = mark.step == mark.total, table.validate_every
            if last or (every and mark.step % every == 0):
                about["validation_loss"] = await self._validate()
            self._record(mark, about)
            if not last and mark.step % table.checkpoint_every == 0:
                await self._save(mark, wait=False)
        await self._save(replace(mark, done=True))
        ctx.event("cold_start_finished", steps=mark.total, tokens=mark.tokens, skipped=mark.skipped)
        return True

    def _prepare(self) -> None:
        """Data and objective; the backend follows it, with log-probabilities of the model's own distribution."""
        from relax_rt.roles.base.locations import model_folder
        from relax_rt.roles.training.algorithms.objective import Objective

        ctx, config = self._ctx, self._config
        tokenizer, base = load_tokenizer(model_folder(ctx)), Path(ctx.config.config_dir)
        source = PromptSource.load(
            config.table(DataTable), tokenizer, seed=config.run.seed, config_dir=base, run_dir=ctx.run_dir
        )
        self._data = load_sft_data(config, base, source, tokenizer)
        sizes = [item.tokens for item in self._data.train]
        self._steps = total_steps(self._table, sizes, config.run.seed)
        algorithm = phase_algorithm(config, self._steps)
        self._objective = Objective.of(algorithm)
        self._backend.use(self._objective, algorithm, temperature=1.0)
        report = self._data.report
        ctx.event("cold_start_data", **{name: getattr(report, name) for name in report.__struct_fields__})
        ctx.log.info(f"cold start: {report}")

    async def _resume(self) -> ColdStartProgress:
        """Resume from the newest good checkpoint of this data; others are skipped, reported and quarantined: of a later
        step than those to come, they would take their place."""
        from relax_rt.roles.training.checkpoints.resume import resume_newest

        marks: list[ColdStartProgress] = []

        async def take(folder: Path, state: CheckpointState) -> None:
            mark = await asyncio.to_thread(read_progress, folder)
            if mark is None:
                raise Refused(f"checkpoint {folder}", why="it does not say how far it has come")
            if mark.digest != self._data.digest:
                raise Refused(f"checkpoint {folder}", why="it is of other data: the cold start begins anew")
            await asyncio.to_thread(self._backend.restore, folder)
            marks.append(mark)

        shown = f"{self._store.folder.name}/"
        found, _ = await resume_newest(self._ctx, self._store, take, shown=shown, anew=True)
        if found is None:
            return ColdStartProgress(step=0, total=self._steps, done=False, digest=self._data.digest)
        (mark,) = marks
        self._ctx.event("cold_start_resumed", checkpoint=found.folder.name, step=mark.step)
        return replace(mark, total=self._steps)

    # Steps.

    async def _step(
        self, mark: ColdStartProgress, rows: Sequence[int], began: float
    ) -> tuple[ColdStartProgress, dict[str, Any]]:
        """Take one optimizer step, and return its metrics; a loss or gradient that is not finite throws it away.

        Args:
            began: when the phase would have begun if it had been done without a pause.
        """
        started, number = time.monotonic(), mark.step + 1
        samples = self._samples(rows, self._data.train, 0)
        self._objective.advantages(samples)
        part = await asyncio.to_thread(self._backend.accumulate, samples)
        result = await asyncio.to_thread(self._backend.apply, part.count, number)
        if result.applied:
            self._in_a_row = 0
        else:
            self._in_a_row += 1
            self._ctx.event("cold_start_step_skipped", step=number, why=result.why)
            if self._in_a_row >= SKIPPED_IN_A_ROW:
                raise GivenUp(
                    f"{self._in_a_row} steps of the cold start in a row were skipped",
                    why=result.why,
                    hint="lower cold_start.learning_rate",
                )
        now = time.monotonic()
        mark = replace(
            mark,
            step=number,
            tokens=mark.tokens + (result.tokens if result.applied else 0),
            skipped=mark.skipped + (not result.applied),
            elapsed_s=now - began,
        )
        return mark, {**_step_metrics(result), "sequences": len(samples), "seconds": round(now - started, 4)}

    def _samples(self, rows: Sequence[int], items: Sequence[SftItem], first: int) -> list[Sample]:
        """Args: first: number, among all rows, of the first of `items`."""
        reference = [self._reference[first + row] for row in rows] if self._reference else None
        return sft_samples([items[row] for row in rows], reference)

    def _record(self, mark: ColdStartProgress, about: dict[str, Any]) -> None:
        ctx, what = self._ctx, f"cold start: step {mark.step} of {mark.total}"
        record = {
            "kind": "cold_start",
            "phase": self._table.kind,
            "step": mark.step,
            "of": mark.total,
            "epoch": ctx.who.epoch,
            **about,
            "learnt_tokens": mark.tokens,
            "skipped_steps": mark.skipped,
            "elapsed_s": round(mark.elapsed_s, 3),
        }
        ctx.metrics(record)
        names = ("loss", "validation_loss", "grad_norm", "learning_rate", "tokens", "seconds")
        shown = {name: round(about[name], 6) for name in names if about.get(name) is not None}
        ctx.log.info(what, **shown)
        ctx.progress.advance(1, what)

    # What is computed without gradients.

    async def _log_probabilities(self, samples: Sequence[Sample], what: str) -> list[list[Floats]]:
        """Compute log-probabilities of each row's sequences under the current weights, LOGPROB_ROWS at a time."""
        size, found = len(self._data.train[0].sequences), []
        for first in range(0, len(samples), LOGPROB_ROWS * size):
            if self._ctx.stopping.is_set():
                raise PhaseInterrupted
            part = samples[first : first + LOGPROB_ROWS * size]
            found += await asyncio.to_thread(self._backend.log_probabilities, part)
            self._ctx.progress.advance(1, f"{what}, {len(found)} of {len(samples)}")
        return [found[at : at + size] for at in range(0, len(found), size)]

    async def _validate(self) -> float | None:
        """The loss of rows that are not learnt from; None if there are none, or the role was asked to stop."""
        count = min(len(self._data.validation), self._table.validation_items)
        if count == 0:
            return None
        samples = self._samples(range(count), self._data.validation, len(self._data.train))
        try:
            found = await self._log_probabilities(samples, "cold start: validating")
        except PhaseInterrupted:
            return None
        if self._table.kind == "sft":
            learnt = sum(int(sample.loss_mask.sum()) for sample in samples)
            return -sum(float(values.sum()) for row in found for values in row) / learnt
        losses = []
        for row, (chosen, rejected) in enumerate(found):
            before = [float(values.sum()) for values in self._reference[len(self._data.train) + row]]
            gap = (float(chosen.sum()) - before[0]) - (float(rejected.sum()) - before[1])
            losses.append(preference_loss(self._table.beta * gap, self._table.label_smoothing))
        return float(np.mean(losses))

    # Checkpoints.

    async def _save(self, mark: ColdStartProgress, *, wait: bool = True) -> None:
        """Copy the state aside and write it, while training continues unless it is to be waited for."""
        await self._saved()
        self._ctx.progress.extend(SAVE_ALLOWANCE_S, "cold start: taking a checkpoint")
        await asyncio.to_thread(self._backend.snapshot)

        def fill(folder: Path) -> None:
            self._backend.write(folder)
            write_progress(folder, mark)

        async def work() -> None:
            state = CheckpointState(mark.step, 0, "", self._ctx.who.epoch, 0, mark.elapsed_s)
            folder = await asyncio.to_thread(self._store.save, state, fill)
            self._ctx.event("cold_start_checkpoint", step=mark.step, folder=folder.name, done=mark.done)

        self._saving = asyncio.create_task(work())
        if wait:
            await self._saved()

    async def _saved(self) -> None:
        from relax_rt.roles.training.checkpoints.resume import wait_for_save

        if self._saving is not None:
            await wait_for_save(self._saving, self._store, self._ctx.progress.advance)


def phase_algorithm(config: RunConfig, steps: int) -> AlgorithmTable:
    """The phase's objective and optimizer over so many steps, as a table of [algorithm]."""
    algorithm = config.table(AlgorithmTable)
    table = config.table(ColdStartTable)
    options: dict[str, Any] = {}
    if table.kind == "dpo":
        options["loss"] = {"name": "dpo", "beta": table.beta, "label_smoothing": table.label_smoothing}
    return AlgorithmTable(
        name=table.kind,
        steps=steps,
        learning_rate=table.learning_rate,
        warmup_steps=table.warmup_steps,
        learning_rate_schedule=table.learning_rate_schedule,
        learning_rate_floor=table.learning_rate_floor,
        max_grad_norm=table.max_grad_norm,
        weight_decay=algorithm.weight_decay,
        adam_betas=algorithm.adam_betas,
        **options,
    )


def preference_loss(margin: float, smoothing: float) -> float:
    """DPO's loss of one pair (arXiv 2305.18290, equation 7); margin = beta (h_chosen - h_rejected), label smoothing as
    in `losses.dpo`."""

    def minus_log_sigmoid(x: float) -> float:
        return max(0.0, -x) + math.log1p(math.exp(-abs(x)))

    return (1 - smoothing) * minus_log_sigmoid(margin) + smoothing * minus_log_sigmoid(-margin)


def _step_metrics(result: StepResult) -> dict[str, Any]:
    """What metrics say of a step."""
    about: dict[str, Any] = {
        "loss": result.loss if result.applied else None,
        "grad_norm": result.grad_norm if result.applied else None,
        "learning_rate": result.learning_rate,
        "tokens": result.tokens,
        "computed_tokens": result.computed_tokens,
        "skipped": "" if result.applied else result.why,
    }
    if pairs := result.others.get("pairs"):
        about["preferred"] = result.others["preferred"] / pairs
        about["margin"] = result.others["margin"] / pairs
    return about


def step_batches(table: ColdStartTable, sizes: Sequence[int], seed: int) -> Iterator[list[int]]:
    """The rows of one step after the other: passes over all rows, each in an order of its own. A step may straddle the
    end of a pass; the last one may be smaller.

    Args:
        sizes: tokens of each row.
    """
    return islice(_endless(table, sizes, seed), table.steps)


def total_steps(table: ColdStartTable, sizes: Sequence[int], seed: int) -> int:
    """How many steps there are."""
    if table.steps is not None:
        return table.steps
    if table.batch_tokens is None:
        return -(-len(sizes) * (table.epochs or 1) // table.batch)
    return sum(1 for _ in step_batches(table, sizes, seed))


def _endless(table: ColdStartTable, sizes: Sequence[int], seed: int) -> Iterator[list[int]]:
    """Without an end where `steps` are set."""
    names = [str(index) for index in range(len(sizes))]
    passes = count() if table.steps is not None else range(table.epochs or 1)
    held: list[int] = []
    tokens = 0
    for number in passes:
        for index in epoch_order(seed, number, names).tolist():
            full = tokens + sizes[index] > table.batch_tokens if table.batch_tokens else len(held) == table.batch
            if held and full:
                yield held
                held, tokens = [], 0
            held.append(index)
            tokens += sizes[index]
    if held:
        yield held
