"""Lives of a real trainer: its role, backend, queue, registry and weight stage, in this process."""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import structlog
from queue_parts import World, calls_of, world

from relax_rt.cluster.registry.role import RegistryService
from relax_rt.cluster.registry.store import Store
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.rollout.engines.settings import RolloutSettings
from relax_rt.roles.training.backend.settings import TrainerSettings
from relax_rt.roles.training.trainer import TrainerRole
from relax_rt.transport.rpc.identity import Incarnation

EVERY = 2
"""Steps between checkpoints."""
GROUPS = 2
"""Of a step."""
STALENESS = 12
"""More than there are steps in a life: all samples are of the first version."""
SOON_S = 120


class Progress:
    def __init__(self) -> None:
        self.details: list[str] = []

    def advance(self, n: int = 1, detail: str = "") -> None:
        self.details.append(detail)

    def waiting(self, reason: str) -> None:
        pass

    def extend(self, seconds: float, reason: str) -> None:
        self.details.append(reason)


class Context:
    """What a trainer uses of a role's context; it keeps what it is told."""

    def __init__(self, lives: Lives, who: Incarnation, config: RLConfig) -> None:
        self.config, self.who, self.settings = config, who, config.roles["trainer"]
        self.run_dir, self.shm_dir = lives.run_dir, lives.shm
        self.payload_dir, self.spill_dir, self.fetcher = lives.shm, None, None
        self.registry, self._world = lives.registry, lives.world
        self.log, self.progress, self.stopping = structlog.get_logger(), Progress(), asyncio.Event()
        self.records: list[dict[str, Any]] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.stop_after: int | None = None

    async def queue(self) -> Any:
        return calls_of(self._world, self.who)

    async def ready(self, policy_version: int = 0) -> None:
        pass

    def event(self, kind: str, /, **fields: Any) -> None:
        self.events.append((kind, fields))

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [fields for found, fields in self.events if found == kind]

    def metrics(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        if record["kind"] == "step" and record["step"] == self.stop_after:
            self.stopping.set()


class Lives:
    """A run of which only the trainer's incarnations come and go."""

    def __init__(self, made: World, registry: RegistryService, home: Path) -> None:
        self.world, self.registry, self.home = made, registry, home
        self.run_dir, self.shm = home / "run", home / "shm"
        self.checkpoints = self.run_dir / "checkpoints"
        self.who = Incarnation("trainer/0", 0)
        self.contexts: list[Context] = []
        self.most: float = math.inf
        """Groups that are made in all lives; nobody trains on more where each life fails, and memory is bounded."""
        self._made = 0

    def folders(self) -> list[str]:
        return sorted(path.name for path in self.checkpoints.iterdir() if path.is_dir())

    async def life(
        self,
        model: Path,
        *,
        steps: int,
        stop_after: int | None = None,
        harm: Callable[[TrainerRole], None] = lambda _: None,
        **algorithm: Any,
    ) -> Context:
        """One incarnation, to its end. harm: what is done to it before it works."""
        while self.who.epoch <= 3:
            # The queue knows epochs up to 3 already.
            self.who = Incarnation("trainer/0", await self.registry.issue_epoch("trainer/0"))
        self.who = Incarnation("trainer/0", await self.registry.issue_epoch("trainer/0"))
        ctx = Context(self, self.who, config_of(model, steps, algorithm))
        ctx.stop_after = stop_after
        self.contexts.append(ctx)
        role = TrainerRole(ctx)  # type: ignore[arg-type]
        ended = asyncio.Event()
        producing = asyncio.create_task(self._produce(ended))
        try:
            await role.setup()
            harm(role)
            await asyncio.wait_for(role.run(), SOON_S)
        finally:
            ended.set()
            await role.teardown()
            await asyncio.wait_for(producing, SOON_S)
        return ctx

    async def _produce(self, ended: asyncio.Event) -> None:
        while not ended.is_set():
            if self._made < self.most:
                self._made += len(await self.world.make(GROUPS, 0.0, 1.0))
            await asyncio.sleep(0.01)


def config_of(model: Path, steps: int, algorithm: dict[str, Any]) -> RLConfig:
    config = RLConfig.model_validate(
        {
            "run": {"name": "x"},
            "model": {"path": str(model)},
            "data": {"path": "d"},
            "reward": {"function": "f.py:f"},
            "sampling": {"max_new_tokens": 8},
            "checkpoint": {"every_steps": EVERY, "keep": 2},
            "algorithm": {
                "group_size": 2,
                "prompts_per_step": GROUPS,
                "max_staleness": STALENESS,
                "steps": steps,
                "learning_rate": 1e-3,
                **algorithm,
            },
        }
    )
    roles = {"rollout": RolloutSettings(dtype="float32"), "trainer": TrainerSettings(dtype="float32", threads=1)}
    return config.model_copy(update={"roles": roles})


@asynccontextmanager
async def lives_of(tmp_path: Path, memory: str = "run") -> AsyncIterator[Lives]:
    """memory: see `world`."""
    async with world(tmp_path, prompts_per_step=GROUPS, max_staleness=STALENESS, memory=memory) as made:
        found: Lives
        service = RegistryService(Store(tmp_path / "registry.sqlite", "run"), identity=lambda: found.who)
        await service.start()
        (tmp_path / "run").mkdir(exist_ok=True)
        found = Lives(made, service, tmp_path)
        try:
            yield found
        finally:
            await service.close()


def model_with_tokenizer(model_dir: Path, home: Path) -> Path:
    """The model in a folder that has all the files of one."""
    folder = home / "model"
    shutil.copytree(model_dir, folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder
