"""Base class of RL roles that send requests to engines."""

from __future__ import annotations

from typing import TypeVar

from relax_rt.config.schema import RoleSettings
from relax_rt.roles.base.role import RLRole
from relax_rt.roles.rollout.router.router import Router

S = TypeVar("S", bound=RoleSettings)


class RouterRole(RLRole[S]):
    """An RL role with a router to the run's engines."""

    router: Router
    """There after `open_router`."""

    async def open_router(self, role: str = "rollout", *, frozen: bool = False) -> None:
        """Open `router`, and close it at the end.

        Args:
            role: whose engines are used.
            frozen: see Router.
        """
        self.router = await self.resources.enter_async_context(Router(self.ctx, role, frozen=frozen))
