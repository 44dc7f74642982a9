"""The base class of the RL job's roles."""

from __future__ import annotations

from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import pytest

from relax_rt.config.schema import QueueTable, RoleSettings, RunConfig, RunTable, Table
from relax_rt.roles.base.role import RLRole
from relax_rt.transport.rpc.errors import RelaxError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Settings(RoleSettings):
    batch: int = 4


class Other(Table):
    """A table that no config has."""


class Toy(RLRole[Settings]):
    kind: ClassVar[str] = "toy"
    Settings: ClassVar[type[RoleSettings]] = Settings


def toy() -> Toy:
    config = RunConfig(run=RunTable(name="toy"), queue=QueueTable(slab_mib=2))
    return Toy(cast(Any, SimpleNamespace(config=config, settings=Settings())))


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
