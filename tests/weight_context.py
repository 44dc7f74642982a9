"""What weight sources and their engines need of a role's context."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import structlog

from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.training.publication.settings import PublicationTable
from relax_rt.transport.rpc.identity import Incarnation


class Progress:
    def __init__(self) -> None:
        self.waits: list[str] = []

    def waiting(self, reason: str) -> None:
        self.waits.append(reason)


class Context:
    """What carriers need of a role's context."""

    def __init__(self, folder: Path, **table: Any) -> None:
        self.config = cast(Any, RLConfig).model_construct(
            publication=PublicationTable(**table), config_dir=str(folder), model=None, roles={}
        )
        self.who, self.run_id, self.shm_dir = Incarnation("trainer/0", 1), "run-1", folder / "shm"
        self.shm_dir.mkdir()
        self.log = structlog.get_logger()
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.progress, self.stopping = Progress(), asyncio.Event()

    def event(self, kind: str, /, **fields: Any) -> None:
        self.events.append((kind, fields))
