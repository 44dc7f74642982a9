"""A rollout whose SGLang server is killed once, in the middle of a publication: the target of a test's config."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from relax_rt.process import procfs
from relax_rt.roles.rollout.engines.sglang.client import SglangClient
from relax_rt.roles.rollout.role import RolloutRole

AT_VERSION = 5
STRUCK = "struck"
"""In the run's folder: the version at which it fell."""


class StruckRollout(RolloutRole):
    """It is struck while its server loads a version."""

    def _load(self) -> None:
        super()._load()
        call = SglangClient.call

        async def striking(client: SglangClient, path: str, body: Any = None, *, timeout_s: float) -> dict[str, Any]:
            answer = asyncio.ensure_future(call(client, path, body, timeout_s=timeout_s))
            if path == "/update_weights_from_disk":
                for _ in range(10):
                    await asyncio.sleep(0)  # it is sent, and not answered yet
                self._strike(int(body["weight_version"]))
            return await answer

        SglangClient.call = striking  # type: ignore[method-assign]

    def _strike(self, version: int) -> None:
        """The guard over the server lives, and sees to what is left."""
        struck, guard = self.ctx.run_dir / STRUCK, self.engine._server.pid
        if version < AT_VERSION or struck.exists():
            return
        struck.write_text(str(version))
        for pid in procfs.descendants(guard):
            fields = procfs.stat_fields(pid)
            if fields is not None and int(fields[1]) == guard:
                os.kill(pid, signal.SIGKILL)
