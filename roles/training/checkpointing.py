"""The trainer's checkpoints in a run: resuming from the newest one, and writing new ones while training continues."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.base.role import wait_for_peer
from relax_rt.roles.training.algorithms.objective import Objective
from relax_rt.roles.training.backend.interface import TrainerBackend
from relax_rt.roles.training.checkpoints.resume import resume_newest, wait_for_save
from relax_rt.roles.training.checkpoints.store import CheckpointState, CheckpointStore, read_sampling, write_sampling
from relax_rt.roles.training.critic.client import SCRATCH, CriticClient
from relax_rt.roles.training.publication.publisher import Publisher
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.queue.client import QueueClient
from relax_rt.transport.rpc.errors import GivenUp

SAVE_ALLOWANCE_S = 120.0


class SamplingState(Protocol):
    """What filters or a prompt sampler carry from checkpoint to checkpoint."""

    def state(self) -> dict[str, Any]: ...
    def restore(self, state: Mapping[str, Any]) -> None: ...


class Checkpointer:
    """Writes and restores everything that a trainer's checkpoint covers.

    A checkpoint names its policy version by digest, so it is complete only after that version is committed. It is
    written by a task beside training; at most one is under way.

    Args:
        critic: its state goes into the same folder. sampling: of the filters, or of the prompt sampler.

    Attributes:
        publisher: of the run's versions; set before the first `save`.
        quarantined: names of the checkpoints that `restore` skipped, for progress messages; empty once a new one is
            there.
        trained_before_s: training time of earlier incarnations.
    """

    publisher: Publisher

    def __init__(
        self,
        ctx: RoleContext,
        store: CheckpointStore,
        queue: QueueClient,
        backend: TrainerBackend,
        objective: Objective,
        *,
        critic: CriticClient | None = None,
        sampling: SamplingState | None = None,
        every_steps: int,
    ) -> None:
        self._ctx, self.store, self._queue, self._backend, self._objective = ctx, store, queue, backend, objective
        self.critic, self._sampling, self._every_steps = critic, sampling, every_steps
        self.quarantined: list[str] = []
        self.trained_before_s = 0.0
        self._started = time.monotonic()
        self._saving: asyncio.Task[None] | None = None
        self._publication: asyncio.Task[VersionRecord] | None = None

    @property
    def elapsed_s(self) -> float:
        """Wall-clock time that training has taken, over all incarnations."""
        return self.trained_before_s + time.monotonic() - self._started

    async def restore(self) -> CheckpointState | None:
        """Resume from the newest checkpoint that can be read; skipped ones are reported and quarantined.

        Raises:
            BadInput: the run has checkpoints, and none can be read. GivenUp: the queue lost the steps that one covers.
        """

        async def resume(folder: Path, state: CheckpointState) -> None:
            await asyncio.to_thread(self._backend.restore, folder)
            if self.critic is not None:
                await self.critic.begin(state.step, folder)
            # Last: if the critic refuses this checkpoint, an older one is resumed, and its history of prompts counts.
            if self._sampling is not None:
                self._sampling.restore(read_sampling(folder))

        found, self.quarantined = await resume_newest(self._ctx, self.store, resume)
        if found is None:
            if self.critic is not None:
                await self.critic.begin(0, None)
            return None
        folder, state = found
        await self._check_covered(folder, state.ledger_step)
        self.trained_before_s = state.elapsed_s
        if state.objective:
            self._objective.restore(state.objective)
        self._ctx.event("resumed", checkpoint=folder.name, step=state.step, version=state.version)
        return state

    async def _check_covered(self, folder: Path, step: int) -> None:
        """Check that the queue knows what a checkpoint was trained on.

        Raises:
            GivenUp: it does not, and would give out those prompts again.
        """
        known = (await wait_for_peer(self._ctx, self._queue.api.stats, "the queue")).step
        if known >= step:
            return
        why = f"the queue knows of no step after {known}: its journal has lost what came then, as if its host went down"
        hint = (
            f"move the checkpoints of steps after {known} out of {folder.parent}, and `relax-rt up` resumes from the "
            f"one before; if there is none, begin a run of another run.name with model.path = {str(folder)!r}"
        )
        raise GivenUp(f"checkpoint {folder.name} of step {step}", why=why, hint=hint)

    async def save_if_due(self, step: int, *, final: bool, early: str) -> None:
        """Save at every `every_steps`-th step and the last one, or when the queue asks for an early checkpoint.

        Args:
            early: why the queue asks; empty: it does not.
        """
        if self._saving is not None and self._saving.done():
            # A save that failed ends the trainer now, not at the next checkpoint.
            self._saving.result()
        due = final or step % self._every_steps == 0
        if early and not due and (self._saving is None or self._saving.done()):
            self._ctx.event("early_checkpoint", step=step, why=early)
            due = True
        if due:
            await self.save(step, final=final)

    async def save(self, step: int, *, final: bool) -> None:
        """Copy the state aside and write it while training continues; the last one is waited for."""
        await self.wait()
        self._ctx.progress.extend(SAVE_ALLOWANCE_S, "taking a checkpoint")
        await asyncio.to_thread(self._backend.snapshot)
        if self.critic is not None:
            await self.critic.snapshot(step)
        sampling = self._sampling.state() if self._sampling is not None else {}
        assert self.publisher.current is not None
        self._publication = self.publisher.current
        self._saving = asyncio.create_task(
            self._write(step, self.elapsed_s, self._publication, self._objective.state(), sampling)
        )
        if final:
            await self.wait()

    async def save_rest(self, step: int) -> None:
        """Save the steps since the newest checkpoint, if there are any."""
        await self.wait()
        found = self.store.newest()
        if step > (found[1].step if found else 0):
            await self.save(step, final=True)

    async def wait(self) -> None:
        """Wait for the checkpoint that is being written, if there is one."""
        if self._saving is not None:
            # Nothing of it is written before its version is committed.
            await self.publisher.wait_committed(self._publication)
            critic_folder = self._ctx.run_dir / SCRATCH if self.critic is not None else None
            await wait_for_save(self._saving, self.store, self._ctx.progress.advance, critic_folder)

    async def close(self) -> None:
        """Wait for a save under way, unless the version that it waits for will never come. Its failure was raised by
        `wait`, or the trainer has a failure of its own to report."""
        if self._saving is None:
            return
        if self.publisher.overdue and self._publication is self.publisher.current:
            self._saving.cancel()
        await asyncio.gather(self._saving, return_exceptions=True)

    async def _write(
        self,
        step: int,
        elapsed_s: float,
        publication: asyncio.Task[VersionRecord],
        objective: dict[str, float],
        sampling: dict[str, Any],
    ) -> None:
        await asyncio.wait([publication])
        version, epoch = publication.result(), self._ctx.who.epoch
        state = CheckpointState(step, version.version, version.digest, epoch, step, elapsed_s, objective)
        began = time.monotonic()
        critic = await self.critic.write(step) if self.critic is not None else None
        # The queue must not lose the steps that the checkpoint covers if this host goes down right after it.
        await self._queue.flush()

        def fill(folder: Path) -> None:
            self._backend.write(folder)
            write_sampling(folder, sampling)
            if critic is not None:
                # On the same file system.
                for path in critic.iterdir():
                    path.rename(folder / path.name)
                critic.rmdir()

        folder = await asyncio.to_thread(self.store.save, state, fill)
        await self._queue.commit(step, folder.name)
        self._ctx.event("checkpoint", step=step, folder=folder.name, seconds=round(time.monotonic() - began, 2))
        self.quarantined = []
