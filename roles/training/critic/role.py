"""The critic role: values for the trainer's samples, and a step on their returns after each of its own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ClassVar

from relax_rt.config.schema import RoleSettings
from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.base.role import MODEL_CODE, RLRole
from relax_rt.roles.training.algorithms.settings import AlgorithmTable
from relax_rt.roles.training.critic.settings import CriticSettings

if TYPE_CHECKING:
    from relax_rt.roles.training.critic.api import CriticReport
    from relax_rt.roles.training.critic.model import CriticModel

LOAD_ALLOWANCE_S = 180.0
IDLE = "the trainer's next step"


class CriticRole(RLRole[CriticSettings]):
    """It has no say of its own: the trainer begins it, from the checkpoint that it resumes from itself, and asks it at
    each step. When either dies, the trainer goes back to its last checkpoint and takes the critic with it."""

    kind: ClassVar[str] = "critic"
    tier: ClassVar[int] = 30
    preload: ClassVar[tuple[str, ...]] = (
        "torch",
        "transformers",
        "relax_rt.roles.training.critic.service",
        *MODEL_CODE,
    )
    Settings: ClassVar[type[RoleSettings]] = CriticSettings

    def __init__(self, ctx: RoleContext) -> None:
        super().__init__(ctx)

    async def setup(self) -> None:
        from relax_rt.roles.training.critic.api import CriticApi
        from relax_rt.roles.training.critic.service import CriticService

        self.ctx.progress.extend(LOAD_ALLOWANCE_S, "loading the model")
        model = await asyncio.to_thread(self._load)
        self.ctx.serve(CriticApi, CriticService(model, self._working, self._report))

    def _load(self) -> CriticModel:
        from relax_rt.roles.base.role import model_folder
        from relax_rt.roles.models.device import open_device
        from relax_rt.roles.models.opening import refused_for_good
        from relax_rt.roles.training.budget import Budget
        from relax_rt.roles.training.critic.model import CriticModel

        device = open_device(self.ctx, self.settings)
        budget = Budget.of(self.ctx, self.settings.tokens_per_micro_batch)
        updates, told = self.table(AlgorithmTable).updates_per_step, self.ctx.progress.advance
        folder = model_folder(self.ctx)
        with refused_for_good():
            return CriticModel(folder, self.settings, told, device, budget, updates=updates)

    async def run(self) -> None:
        await self.ctx.ready()
        self._working(False)
        await self.ctx.stopping.wait()

    def _working(self, at_work: bool) -> None:
        self.ctx.progress.waiting("" if at_work else IDLE)

    def _report(self, step: int, report: CriticReport) -> None:
        fields = {name: getattr(report, name) for name in report.__struct_fields__}
        self.ctx.metrics({"kind": "critic", "step": step, **fields})
        if not report.applied:
            self.ctx.event("critic_step_skipped", step=step)
        elif report.thrown_away:
            self.ctx.event("critic_update_skipped", step=step, thrown_away=report.thrown_away)
