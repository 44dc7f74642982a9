"""The base class of the RL job's roles."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import pytest

from relax_rt.config.schema import QueueTable, RoleSettings, RunConfig, RunTable, Table
from relax_rt.roles.base import role as role_module
from relax_rt.roles.base.role import RLRole
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import RelaxError, Unreachable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Settings(RoleSettings):
    batch: int = 4


class Other(Table):
    """A table that no config has."""


class Toy(RLRole[Settings]):
    kind: ClassVar[str] = "toy"
    Settings: ClassVar[type[RoleSettings]] = Settings


def toy(ctx: Any = None) -> Toy:
    config = RunConfig(run=RunTable(name="toy"), queue=QueueTable(slab_mib=2))
    return Toy(ctx or cast(Any, SimpleNamespace(config=config, settings=Settings())))


def test_a_table_is_found_by_its_type() -> None:
    role = toy()
    assert role.table(QueueTable).slab_mib == 2
    assert role.settings.batch == 4


def test_a_table_that_the_job_does_not_have_is_an_error_that_names_it() -> None:
    with pytest.raises(RelaxError, match="no table of type Other in the config of job 'rl'"):
        toy().table(Other)


def test_a_roles_table_is_its_defaults_where_a_role_of_the_users_own_takes_its_place() -> None:
    given = RoleSettings(threads=3)
    config = RunConfig(run=RunTable(name="toy"), roles={"toy": Settings(batch=9), "own": given})
    assert config.role("toy", Settings).batch == 9
    assert config.role("own", Settings) == config.role("none", Settings) == Settings()


async def test_teardown_closes_in_reverse_order_also_when_one_fails_to_close() -> None:
    closed: list[str] = []

    @asynccontextmanager
    async def resource(name: str) -> AsyncIterator[None]:
        try:
            yield
        finally:
            closed.append(name)
        if name == "second":
            raise ValueError(name)

    role = toy()
    for name in ("first", "second", "third"):
        await role.resources.enter_async_context(resource(name))
    with pytest.raises(ValueError, match="second"):
        await role.teardown()
    assert closed == ["third", "second", "first"]


LAST = VersionRecord(5, 4, 12)


class Far:
    """A queue and a registry of another node, which say what they are told to, or are away."""

    def __init__(self, *said: tuple[int, int] | None) -> None:
        self.said = list(said)
        self.stopping = asyncio.Event()
        self.progress = SimpleNamespace(waiting=lambda reason: None)
        self.registry = self
        self.config, self.settings = RunConfig(run=RunTable(name="toy")), Settings()

    async def queue(self) -> Any:
        return self

    async def stats(self) -> Any:
        if self.said[0] is None:
            self.said.pop(0)
            raise Unreachable("the queue", why="it is being started again")
        return SimpleNamespace(committed=self.said[0][0])

    async def versions(self) -> list[VersionRecord]:
        said = self.said.pop(0)
        assert said is not None
        return [VersionRecord(version, version - 1, 0) for version in range(1, said[1] + 1)]


async def test_the_end_is_waited_for_until_a_checkpoint_has_the_last_step(monkeypatch: Any) -> None:
    monkeypatch.setattr(role_module, "FINAL_POLL_S", 0.0)
    far: Any = Far((0, 5), (10, 5), None, (12, 5))
    assert await toy(far).is_final(LAST) and not far.said


async def test_weights_that_others_came_after_are_not_the_last(monkeypatch: Any) -> None:
    monkeypatch.setattr(role_module, "FINAL_POLL_S", 0.0)
    far: Any = Far((10, 5), (10, 6))
    assert not await toy(far).is_final(LAST)
    # The checkpoint of the step may be of the newer ones.
    far = Far((12, 7))
    assert not await toy(far).is_final(LAST)
